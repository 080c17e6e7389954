/* Attention, forward: panels of GG_NR queries, one query in each vector lane.
 *
 *   S^T = K (scale Q)^T    softmax down the columns    O = P V
 *
 * A strip of panels meets a block of keys before the next one, so that keys and values are converted and packed once
 * for all of them.  What a panel computes does not depend on its strip.  A single query of each head makes
 * a panel together with those of the other heads that share its keys.
 *
 * Each score is one FMA chain of scaled query and key, here and in the backward, which then finds P as
 * exp(s - top) / total of the very same s: for a score of 1e30 too. */
#include "abi/attrs/attention.h"
#include "attention/alibi.h"
#include "attention/attention.h"

enum {
    EXT_KEYS = 256,       /* keys of a block */
    EXT_STRIP = 6,        /* the most panels of a strip */
    EXT_STRIPS = 64,      /* so many of them keep threads equally busy */
    EXT_COPIED = 3,       /* so many panels make it worth it to copy f32 keys and values that lie far apart */
    EXT_FEW = 16,         /* so few queries of a sequence meet its keys in splits ... */
    EXT_SPLIT_KEYS = 512, /* ... of at least so many, ... */
    EXT_SPLITS = 16,      /* ... at most so many, ... */
    EXT_STREAM = 8,       /* so many times as many keys as queries come from memory, not a cache */
    EXT_SPLIT_HEADS = 16, /* ... which are units of work where a batch has fewer heads */
};
enum { EXT_WIDE = 4 }; /* vectors of values that few rows take at once: with less they would wait for their own sums */
enum { EXT_MASK = SRC_V + 1, EXT_SINKS, EXT_CU_Q, EXT_CU_K, EXT_SEED };
enum { EXT_OUT, EXT_LSE, EXT_TOP, EXT_TOTAL };
enum { EXT_CHECK, EXT_PANELS, EXT_MERGE, EXT_STAGES };

typedef struct ext {
    attn a;
    float max_bias;
    const gg_tensor *out, *lse, *top, *total;
    int shares;    /* the heads that share keys make one panel */
    float *qt;     /* of each panel: [DK][GG_NR], scaled */
    float *states; /* of each panel */
    float *later;  /* one more, for a further split */
    float *s;      /* [EXT_KEYS][GG_NR]: scores, then weights */
    float *mask;   /* [EXT_KEYS][GG_NR] */
    float *rows;   /* [GG_NR][EXT_KEYS]: of a mask that is not f32 */
    float *k, *v;  /* [EXT_KEYS][DK], [EXT_KEYS][DV]: copies of keys and values */
    int64_t floats;
} ext;

/* A state is what the queries of a panel found among some keys: max, sum, and rows of O, all of whole vectors. */
static int64_t ext_row(const ext *e) { return gg_round_up(e->a.DV, GG_VW); }
static int64_t ext_state(const ext *e) { return (2 + ext_row(e)) * GG_NR; }

/* Into how many splits the keys are cut that few queries meet: what each finds is merged in order, so the bits
 * follow from the sequence's own lengths. */
static int64_t ext_splits(int64_t M, int64_t N) {
    return N > EXT_FEW ? 1 : attn_clamp(M / EXT_SPLIT_KEYS, 1, EXT_SPLITS);
}

/* Whether one query of every head that reads a kv head can be in one panel. */
static int ext_shares(const ext *e) {
    const attn *a = &e->a;
    const int64_t masks = a->mask ? a->mask->ne[1] : 1;
    return a->N == 1 && a->cu_q == NULL && !attn_drops(a) && e->max_bias == 0 && (masks == 1 || masks == a->H);
}

/* Whether rows of f32 lie far from each other. */
static int ext_far(const gg_tensor *t) { return t->dtype == GG_F32 && attn_step(t, 2) > 2 * t->ne[3]; }

static int64_t ext_copy_floats(const gg_tensor *t) {
    return ext_far(t) ? EXT_KEYS * t->ne[3] : attn_copy_floats(t, EXT_KEYS);
}

static ext ext_open(const gg_call *c, float *scratch) {
    const gg_flash_attn_ext_attrs *at = c->attrs;
    ext e = { .a = attn_open(c, EXT_MASK, EXT_SINKS, &at->rules),
              .max_bias = at->max_bias,
              .out = &c->dst[EXT_OUT],
              .lse = &c->dst[EXT_LSE],
              .top = &c->dst[EXT_TOP],
              .total = &c->dst[EXT_TOTAL] };
    e.shares = ext_shares(&e);
    e.qt = gg_claim(scratch, &e.floats, EXT_STRIP * e.a.DK * GG_NR);
    e.states = gg_claim(scratch, &e.floats, EXT_STRIP * ext_state(&e));
    e.later = gg_claim(scratch, &e.floats, ext_splits(e.a.M, 1) > 1 ? ext_state(&e) : 0);
    e.s = gg_claim(scratch, &e.floats, EXT_KEYS * GG_NR);
    e.mask = gg_claim(scratch, &e.floats, e.a.mask ? EXT_KEYS * GG_NR : 0);
    e.rows = gg_claim(scratch, &e.floats, e.a.mask && e.a.mask->dtype != GG_F32 ? EXT_KEYS * GG_NR : 0);
    e.k = gg_claim(scratch, &e.floats, ext_copy_floats(e.a.k));
    e.v = gg_claim(scratch, &e.floats, ext_copy_floats(e.a.v));
    return e;
}

/* Some queries of one head of one sequence: nq lanes from `lead` on; lane 0 is query q0, if there is such.  Few are in
 * the last vector alone, and no work is done for the others.  Where heads share a panel, lane lead + i is
 * query q0 + lead of head h + i. */
typedef struct panel {
    const attn_seq *s;
    int64_t h, q0, nq, lead;
    float *qt, *o;             /* its own of ext's; rows of O, which exist for its queries alone */
    vf max[GG_NV], sum[GG_NV]; /* of the scores so far, and of exp(score - max) */
    int met;                   /* some key: before that, there is nothing in O */
} panel;

static inline int64_t ext_one(const panel *p) { return p->q0 + p->lead; }
static inline int64_t ext_last(const ext *e, const panel *p) { return ext_one(p) + (e->shares ? 0 : p->nq - 1); }

/* -- masks ------------------------------------------------------------------------------------------------ */

static int ext_seen(const float *mask, int64_t nq) {
    for (int64_t i = 0; i < nq; i++)
        if (mask[i] != -INFINITY) return 1;
    return 0;
}

/* The mask of keys *lo..*hi, at most EXT_KEYS, into e->mask; narrows them to those that some query sees. */
static void ext_mask(const ext *e, const panel *p, int64_t *lo, int64_t *hi) {
    const gg_tensor *mask = e->a.mask;
    const int64_t n = *hi - *lo;
    const float slope = gg_alibi_slope(e->a.H, p->h, e->max_bias);
    float *const to = e->mask + p->lead;
    const char *row = gg_at(mask, p->s->b % mask->ne[0], p->h % mask->ne[1], p->s->q0 + ext_one(p));
    const int64_t step = !e->shares ? mask->nb[2] : mask->ne[1] > 1 ? mask->nb[1] : 0;
    row += (p->s->k0 + *lo) * gg_float_bytes(mask->dtype);
    if (mask->dtype == GG_F32)
        attn_transpose((const float *)row, step / (int64_t)sizeof(float), p->nq, n, slope, to, GG_NR, GG_NR - p->lead);
    else {
        for (int64_t i = 0; i < p->nq; i++, row += step) gg_to_f32_row(mask->dtype, row, e->rows + i * EXT_KEYS, n);
        attn_transpose(e->rows, EXT_KEYS, p->nq, n, slope, to, GG_NR, GG_NR - p->lead);
    }
    int64_t first = 0, end = n;
    while (end > 0 && !ext_seen(to + (end - 1) * GG_NR, p->nq)) end--;
    while (first < end && !ext_seen(to + first * GG_NR, p->nq)) first++;
    if (first > 0) memmove(e->mask, e->mask + first * GG_NR, (end - first) * GG_NR * sizeof(float));
    *hi = *lo + end;
    *lo += first;
}

/* The lanes of vector v that do not see key j of the block. */
GG_INLINE vi ext_hidden(attn_sight seen, int32_t j, int v) {
    const int early = j < seen.prefix;
    const vi lane = vi_lanes() + v * GG_VW;
    return (lane < j - (early ? seen.reach : seen.ahead)) | (lane > (early ? GG_NR : j - seen.behind));
}

/* Hides the scores of keys from..to of a block from the queries that do not see them. */
static void ext_hide(attn_sight seen, float *s, int64_t from, int64_t to) {
    for (int32_t j = (int32_t)from; j < to; j++)
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) {
            float *at = s + j * GG_NR + v * GG_VW;
            vf_store(at, vf_select(ext_hidden(seen, j, v), vf_set1(-INFINITY), vf_load(at)));
        }
}

/* Writes HIDDEN over the weights of n keys where the mask (or NULL), causality or the window hides them. */
static void ext_mark(const ext *e, attn_sight seen, float *w, const float *mask, int64_t n) {
    for (int32_t j = 0; j < n; j++)
        for (int v = 0; v < GG_NV; v++) {
            const int64_t at = j * GG_NR + v * GG_VW;
            vi hidden = e->shares ? vi_set1(0) : ext_hidden(seen, j, v); /* a single query sees all of the block */
            if (mask != NULL) hidden |= vf_load(mask + at) == -INFINITY;
            vf_store(w + at, vf_select(hidden, vf_set1(HIDDEN), vf_load(w + at)));
        }
}

/* Writes 0 over the weights of keys lo..hi that dropout drops. */
static void ext_drop(const ext *e, const panel *p, float *w, int64_t lo, int64_t hi) {
    for (int64_t block = lo / 4; 4 * block < hi; block++)
        for (int v = 0; v < GG_NV; v++) {
            vi keep[4];
            const vu query = (vu)vi_lanes() + (uint32_t)(p->q0 + v * GG_VW);
            attn_keep(&e->a, p->s, p->h, query, (vu){ 0 } + (uint32_t)block, keep);
            for (int64_t j = gg_max(lo, 4 * block); j < gg_min(hi, 4 * block + 4); j++) {
                float *at = w + (j - lo) * GG_NR + v * GG_VW;
                vf_store(at, (vf)((vi)vf_load(at) & keep[j % 4]));
            }
        }
}

/* -- products --------------------------------------------------------------------------------------------- */

GG_INLINE void ext_score_tile(const int M, const int whole, int64_t DK, const float *k, int64_t k_row, const float *qt,
                              float *s) {
    vf c[GG_MR][GG_NV] = { 0 };
    if (whole) gg_micro(M, DK, k, k_row, 1, qt, GG_NR, c);
    else attn_micro_thin(M, DK, k, k_row, 1, qt, GG_NR, GG_NV - 1, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = whole ? 0 : GG_NV - 1; j < GG_NV; j++) vf_store(s + m * GG_NR + j * GG_VW, c[m][j]);
}

/* Asks for values that are needed next, and for keys a few tiles ahead, up to `left` of them. */
GG_INLINE void ext_ask(const ext *e, const float *k, int64_t k_row, const float *v, int64_t v_row, int64_t n,
                       int64_t left) {
    enum { AHEAD = 4 * GG_MR };
    attn_prefetch(k + AHEAD * k_row, k_row, attn_clamp(left - AHEAD, 0, n), e->a.DK, 0);
    attn_prefetch(v, v_row, n, e->a.DV, 0);
}

/* s[j] = scores of n keys, of which the last vector of queries sees all, the others those before `whole`.  Tiles of
 * about the same size: a small one would wait for its own sums.  Who is the first to meet the keys says how many are
 * `left`, that they may come from memory early. */
static void ext_scores(const ext *e, const float *qt, const float *k, int64_t k_row, const float *v, int64_t v_row,
                       int64_t n, int64_t whole, int64_t left) {
    int64_t j = 0;
    for (int part = 0; part < 2; part++) {
        const int64_t stop = part ? n : whole;
        for (int64_t tiles = gg_ceil_div(stop - j, GG_MR), end; tiles > 0; tiles--, j = end) {
            end = j + (stop - j) / tiles;
            const float *const rows = k + j * k_row;
            if (left > 0) ext_ask(e, rows, k_row, v + j * v_row, v_row, end - j, left - j);
            if (part) GG_EACH_M(end - j, ext_score_tile, 0, e->a.DK, rows, k_row, qt, e->s + j * GG_NR)
            else GG_EACH_M(end - j, ext_score_tile, 1, e->a.DK, rows, k_row, qt, e->s + j * GG_NR)
        }
    }
}

static void ext_add_mask(float *s, const float *mask, int64_t floats) {
    for (int64_t i = 0; i < floats; i += GG_VW) {
        const vf add = vf_load(mask + i);
        vf_store(s + i, vf_select(add == -INFINITY, add, vf_load(s + i) + add));
    }
}

/* max = the largest of it and of s, of n keys. */
GG_INLINE void ext_max(const float *s, int64_t n, vf max[GG_NV]) {
    vf other[GG_NV]; /* every second key's: no maximum waits for the one before */
    for (int j = 0; j < GG_NV; j++) other[j] = max[j];
    int64_t i = 0;
    for (; i + 2 <= n; i += 2, s += 2 * GG_NR)
#pragma GCC unroll 4
        for (int j = 0; j < GG_NV; j++) {
            max[j] = vf_max(max[j], vf_load(s + j * GG_VW));
            other[j] = vf_max(other[j], vf_load(s + GG_NR + j * GG_VW));
        }
    for (int j = 0; j < GG_NV; j++) {
        if (i < n) max[j] = vf_max(max[j], vf_load(s + j * GG_VW));
        max[j] = vf_max(max[j], other[j]);
    }
}

/* s = exp(s - max) for the vectors from `first` on and 0 for those before, which see none of these n keys; what the keys
 * sum to is added to sum. */
GG_INLINE void ext_exp(const int first, float *s, int64_t n, const vf max[GG_NV], vf sum[GG_NV]) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < n; j++)
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) {
            float *at = s + j * GG_NR + v * GG_VW;
            const vf p = v < first ? vf_zero() : attn_exp(vf_load(at) - max[v]);
            if (v >= first) sum[v] += p;
            vf_store(at, p);
        }
}

/* M rows of o = o * keep + w^T v over n keys, or where `set` of what w^T v is: of each row `vectors` vectors, of which
 * the only one may be cut off after `tail` lanes.  Lanes of w are rows of o. */
GG_INLINE void ext_value_tile(const int M, const int vectors, const int tail, int64_t n, const float *w, const float *v,
                              int64_t v_row, const float *keep, int set, float *o, int64_t o_row) {
    vf c[GG_MR * GG_NV];
#pragma GCC unroll 16
    for (int i = 0; i < M * vectors; i++) c[i] = vf_zero();
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; k++, v += v_row, w += GG_NR) {
        vf b[EXT_WIDE];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) b[j] = tail ? vf_load_n(v, tail, 0) : vf_load(v + j * GG_VW);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) c[m * vectors + j] += w[m] * b[j];
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++, o += o_row)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            const vf x = c[m * vectors + j];
            vf_store(o + j * GG_VW, set ? x : vf_load(o + j * GG_VW) * keep[m] + x);
        }
}

/* The same for all DV columns. */
static void ext_value_rows(const ext *e, int64_t M, int64_t n, const float *w, const float *v, int64_t v_row,
                           const float *keep, int set, float *o) {
    const int64_t DV = e->a.DV, o_row = ext_row(e);
    int64_t d = 0;
    for (; M <= 2 && d + EXT_WIDE * GG_VW <= DV; d += EXT_WIDE * GG_VW) {
        if (M == 1) ext_value_tile(1, EXT_WIDE, 0, n, w, v + d, v_row, keep, set, o + d, o_row);
        else ext_value_tile(2, EXT_WIDE, 0, n, w, v + d, v_row, keep, set, o + d, o_row);
    }
    for (; d + GG_NR <= DV; d += GG_NR)
        GG_EACH_M(M, ext_value_tile, GG_NV, 0, n, w, v + d, v_row, keep, set, o + d, o_row)
    for (; d + GG_VW <= DV; d += GG_VW) GG_EACH_M(M, ext_value_tile, 1, 0, n, w, v + d, v_row, keep, set, o + d, o_row)
    const int tail = (int)(DV - d);
    if (tail > 0) GG_EACH_M(M, ext_value_tile, 1, tail, n, w, v + d, v_row, keep, set, o + d, o_row)
}

/* The same for a row, without the pairs that w hides. */
static void ext_visible_row(const ext *e, int64_t n, const float *w, const float *v, int64_t v_row, float keep, int set,
                            float *o) {
    for (int64_t d = 0; d < e->a.DV; d++) {
        float sum = 0;
        for (int64_t k = 0; k < n; k++) {
            const float weight = w[k * GG_NR];
            if (weight != 0 || !signbit(weight)) sum += weight * v[k * v_row + d];
        }
        o[d] = set ? sum : o[d] * keep + sum;
    }
}

/* O = O * keep + P V over n keys, of which the first is key lo. */
static void ext_values(const ext *e, panel *p, const float *v, int64_t v_row, int64_t lo, int64_t n, int careful,
                       const vf keep[GG_NV]) {
    const int64_t tiles = gg_ceil_div(p->nq, GG_MR);
    float by[GG_NR];
    for (int j = 0; j < GG_NV; j++) vf_store(by + j * GG_VW, keep[j]);
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t m = p->lead + p->nq * t / tiles, end = p->lead + p->nq * (t + 1) / tiles;
        const int64_t one = e->shares ? ext_one(p) : p->q0 + m, last = e->shares ? one : p->q0 + end - 1;
        /* of these keys, those that some of the rows see */
        const int64_t from = p->s->prefix > 0 ? 0 : attn_clamp(seq_begin(p->s, one) - lo, 0, n);
        const int64_t to = p->s->prefix > 0 ? n : attn_clamp(seq_end(p->s, last) - lo, from, n);
        const float *const w = e->s + from * GG_NR, *const rows = v + from * v_row;
        float *const o = p->o + m * ext_row(e);
        if (!careful) ext_value_rows(e, end - m, to - from, w + m, rows, v_row, by + m, !p->met, o);
        else
            for (int64_t i = 0; i < end - m; i++)
                ext_visible_row(e, to - from, w + m + i, rows, v_row, by[m + i], !p->met, o + i * ext_row(e));
    }
    p->met = 1;
}

/* O = O * by. */
static void ext_scale(const ext *e, const panel *p, const float by[GG_NR]) {
    for (int64_t m = p->lead; m < p->lead + p->nq; m++)
        for (int64_t d = 0; d < ext_row(e); d += GG_VW) {
            float *o = p->o + m * ext_row(e) + d;
            vf_store(o, vf_load(o) * by[m]);
        }
}

/* -- panels ----------------------------------------------------------------------------------------------- */

/* The keys lo..hi of a kv head, at most EXT_KEYS; loaded when the first panel needs them. */
typedef struct block {
    int64_t hk, lo, hi;
    int copies, loaded;
    const float *k, *v; /* rows */
    int64_t k_row, v_row;
} block;

static const float *ext_rows(const gg_tensor *t, const attn_seq *s, const block *b, float *copy, int64_t *step) {
    const int64_t n = b->hi - b->lo, D = t->ne[3];
    const float *rows = attn_rows(t, s->b, b->hk, s->k0 + b->lo, n, copy, step);
    if (!b->copies || !ext_far(t)) return rows;
    for (int64_t j = 0; j < n; j++) memcpy(copy + j * D, rows + j * *step, D * sizeof(float));
    *step = D;
    return copy;
}

static void ext_load(const ext *e, const attn_seq *s, block *b) {
    b->loaded = 1;
    b->k = ext_rows(e->a.k, s, b, e->k, &b->k_row);
    b->v = ext_rows(e->a.v, s, b, e->v, &b->v_row);
}

/* Whether keys and values, used in place, are so many more than the queries that they come from memory. */
static int ext_streams(const ext *e, const attn_seq *s) {
    const attn *a = &e->a;
    return s->M >= EXT_STREAM * a->group * s->N && a->k->dtype == GG_F32 && a->v->dtype == GG_F32;
}

/* Keys lo..hi of a block, of which each is seen by some query. */
static void ext_block(const ext *e, panel *p, block *b, int64_t lo, int64_t hi) {
    const attn *a = &e->a;
    const attn_seq *s = p->s;
    if (a->mask && lo < hi) ext_mask(e, p, &lo, &hi);
    if (lo >= hi) return;
    const int first = !b->loaded;
    if (first) ext_load(e, s, b);
    const int64_t n = hi - lo;
    const float *k = b->k + (lo - b->lo) * b->k_row, *v = b->v + (lo - b->lo) * b->v_row;

    /* All queries see the keys begin ... end - 1 and those before prefix; before `late` the queries of the last
     * vector are not the only ones. */
    const int64_t one = ext_one(p), last = ext_last(e, p);
    const int64_t begin = seq_begin(s, last), end = seq_end(s, one), prefix = seq_prefix(s, one);
    const int64_t late = p->lead > 0 ? lo : prefix > end ? hi : p->q0 + s->shift + s->right + (GG_NV - 1) * GG_VW;
    const int64_t whole = attn_clamp(late - lo, 0, n);
    const int64_t from = attn_clamp(prefix, lo, hi), to = attn_clamp(begin, from, hi); /* too early for some */
    const int64_t open = attn_clamp(gg_max(prefix, end), lo, hi); /* from here on too late for some */

    ext_scores(e, p->qt, k, b->k_row, v, b->v_row, n, whole, first && ext_streams(e, s) ? s->M - lo : 0);
    if (a->rules.cap > 0) attn_cap(e->s, n * GG_NR, a->rules.cap, NULL);
    if (a->mask) ext_add_mask(e->s, e->mask, n * GG_NR);
    const attn_sight seen = seq_sight(s, p->q0, lo);
    ext_hide(seen, e->s, from - lo, to - lo);
    ext_hide(seen, e->s, open - lo, n);

    const int64_t holes = a->mask || from < to ? lo : open; /* the first key that may be hidden from some query */
    const int careful = holes < hi && !gg_rows_finite(v + (holes - lo) * b->v_row, b->v_row, hi - holes, a->DV);
    vf max[GG_NV], sum[GG_NV], base[GG_NV], keep[GG_NV];
    for (int j = 0; j < GG_NV; j++) max[j] = p->max[j], sum[j] = vf_zero();
    ext_max(e->s, n, max);
    for (int j = 0; j < GG_NV; j++) {
        base[j] = vf_select(max[j] == -INFINITY, vf_zero(), max[j]); /* no key yet: exp(-inf - 0) */
        keep[j] = attn_exp(p->max[j] - base[j]);
        p->max[j] = max[j];
    }
    ext_exp(0, e->s, whole, base, sum);
    ext_exp(GG_NV - 1, e->s + whole * GG_NR, n - whole, base, sum);
    if (attn_drops(a)) ext_drop(e, p, e->s, lo, hi);
    if (careful) ext_mark(e, seen, e->s, a->mask ? e->mask : NULL, n);
    for (int j = 0; j < GG_NV; j++) p->sum[j] = p->sum[j] * keep[j] + sum[j];
    ext_values(e, p, v, b->v_row, lo, n, careful, keep);
}

static void ext_begin(panel *p) {
    for (int j = 0; j < GG_NV; j++) p->max[j] = vf_set1(-INFINITY), p->sum[j] = vf_zero();
    p->met = 0;
}

/* As if it had met a key of weight 0. */
static void ext_meet_some(const ext *e, panel *p) {
    if (!p->met) memset(p->o, 0, ext_row(e) * GG_NR * sizeof(float));
    p->met = 1;
}

/* A sink is one key more, without a value.  Rows that see no other stay 0, whatever the sink. */
static void ext_sink(const ext *e, panel *p) {
    float sinks[GG_NR];
    for (int i = 0; i < GG_NR; i++)
        sinks[i] = ((const float *)e->a.sinks->data)[p->h + (e->shares ? attn_clamp(i - p->lead, 0, p->nq - 1) : 0)];
    float by[GG_NR];
    for (int j = 0; j < GG_NV; j++) {
        const vf sink = vf_load(sinks + j * GG_VW);
        const vf max = vf_max(p->max[j], sink), base = vf_select(max == -INFINITY, vf_zero(), max);
        const vf keep = attn_exp(p->max[j] - base);
        const vi empty = p->sum[j] == 0.0f;
        vf_store(by + j * GG_VW, vf_select(empty, vf_zero(), keep));
        const vf alone = vf_select(sink == -INFINITY, vf_zero(), vf_set1(1.0f));
        p->sum[j] = vf_select(empty, alone, p->sum[j] * keep + attn_exp(sink - base));
        p->max[j] = max;
    }
    ext_scale(e, p, by);
}

static void ext_end(const ext *e, const panel *p) {
    const attn *a = &e->a;
    const attn_seq *s = p->s;
    float share[GG_NR], lse[GG_NR], top[GG_NR], total[GG_NR];
    for (int j = 0; j < GG_NV; j++) {
        const vf sum = p->sum[j];
        vf_store(share + j * GG_VW, attn_rescale(a) / vf_select(sum == 0.0f, vf_set1(1.0f), sum));
        vf_store(lse + j * GG_VW, p->max[j] + vf_log(sum));
        vf_store(top + j * GG_VW, vf_select(sum == sum, p->max[j], sum)); /* a maximum loses NaN */
        vf_store(total + j * GG_VW, sum);
    }
    const int64_t row = s->q0 + ext_one(p), step = attn_step(e->out, e->shares ? 2 : 1);
    float *out = (float *)gg_at(e->out, s->b, row, p->h);
    for (int64_t m = p->lead; m < p->lead + p->nq; m++, out += step) {
        const float *const o = p->o + m * ext_row(e);
        int64_t d = 0;
        for (; d + GG_VW <= a->DV; d += GG_VW) vf_store(out + d, vf_load(o + d) * share[m]);
        if (d < a->DV) vf_store_n(out + d, vf_load(o + d) * share[m], (int)(a->DV - d));
    }
    memcpy((float *)gg_at(e->lse, 0, s->b, p->h) + row, lse + p->lead, p->nq * sizeof(float));
    memcpy((float *)gg_at(e->top, 0, s->b, p->h) + row, top + p->lead, p->nq * sizeof(float));
    memcpy((float *)gg_at(e->total, 0, s->b, p->h) + row, total + p->lead, p->nq * sizeof(float));
}

static void ext_load_queries(const ext *e, const panel *p) {
    const attn *a = &e->a;
    const int64_t row = p->s->q0 + ext_one(p);
    const int64_t q_row = attn_step(a->q, e->shares ? 1 : 2), out_row = attn_step(e->out, e->shares ? 2 : 1);
    attn_transpose(attn_row(a->q, p->s->b, p->h, row), q_row, p->nq, a->DK, a->rules.scale, p->qt + p->lead, GG_NR,
                   GG_NR - p->lead);
    attn_prefetch((float *)gg_at(e->out, p->s->b, row, p->h), out_row, p->nq, a->DV, 1);
}

static void ext_finish(const ext *e, panel *p) {
    ext_meet_some(e, p);
    if (e->a.sinks) ext_sink(e, p);
    ext_end(e, p);
}

/* -- strips ----------------------------------------------------------------------------------------------- */

/* Which keys of lo..hi a panel sees: at most two runs of them. */
static void ext_runs(const ext *e, const panel *p, int64_t lo, int64_t hi, int64_t run[4]) {
    const int64_t one = ext_one(p), last = ext_last(e, p);
    const int64_t prefix = seq_prefix(p->s, last), begin = seq_begin(p->s, one), end = seq_end(p->s, last);
    const int joined = prefix >= begin;
    run[0] = lo, run[1] = gg_min(hi, joined ? gg_max(prefix, end) : prefix);
    run[2] = joined ? hi : gg_max(lo, begin), run[3] = gg_min(hi, end);
}

/* What the panels of a strip, whose queries are loaded, find among the keys from..to: max, sum, and O. */
static void ext_meet(const ext *e, panel *p, int panels, int64_t from, int64_t to) {
    for (int i = 0; i < panels; i++) ext_begin(&p[i]);
    for (int64_t at = from / EXT_KEYS * EXT_KEYS; at < to; at += EXT_KEYS) {
        const int64_t first = gg_max(at, from), end = gg_min(at + EXT_KEYS, to);
        int64_t run[EXT_STRIP][4];
        block b = { .hk = p->h / e->a.group, .lo = end, .hi = first, .copies = panels >= EXT_COPIED };
        for (int i = 0; i < panels; i++) {
            ext_runs(e, &p[i], first, end, run[i]);
            for (int r = 0; r < 4; r += 2)
                if (run[i][r] < run[i][r + 1]) b.lo = gg_min(b.lo, run[i][r]), b.hi = gg_max(b.hi, run[i][r + 1]);
        }
        for (int i = 0; i < panels; i++)
            for (int r = 0; r < 4; r += 2) ext_block(e, &p[i], &b, run[i][r], run[i][r + 1]);
    }
}

/* -- splits ----------------------------------------------------------------------------------------------- */

/* The panel's O lies in this state. */
static void ext_use_state(panel *p, float *state) { p->o = state + 2 * GG_NR; }

/* Writes there what else the state holds. */
static void ext_put_state(const ext *e, panel *p, float *state) {
    for (int j = 0; j < GG_NV; j++) {
        vf_store(state + j * GG_VW, p->max[j]);
        vf_store(state + GG_NR + j * GG_VW, p->sum[j]);
    }
    ext_meet_some(e, p);
}
static void ext_get_state(panel *p, float *state) {
    ext_use_state(p, state);
    for (int j = 0; j < GG_NV; j++) {
        p->max[j] = vf_load(state + j * GG_VW);
        p->sum[j] = vf_load(state + GG_NR + j * GG_VW);
    }
    p->met = 1;
}

/* Onto what a panel found comes what it found among later keys. */
static void ext_merge(const ext *e, panel *p, panel *later) {
    float keep[GG_NR], more[GG_NR];
    ext_meet_some(e, p), ext_meet_some(e, later);
    for (int j = 0; j < GG_NV; j++) {
        const vf max = vf_max(p->max[j], later->max[j]), base = vf_select(max == -INFINITY, vf_zero(), max);
        const vf a = attn_exp(p->max[j] - base), b = attn_exp(later->max[j] - base);
        p->max[j] = max;
        p->sum[j] = p->sum[j] * a + later->sum[j] * b;
        vf_store(keep + j * GG_VW, a), vf_store(more + j * GG_VW, b);
    }
    for (int64_t m = p->lead; m < p->lead + p->nq; m++)
        for (int64_t d = m * ext_row(e); d < (m + 1) * ext_row(e); d += GG_VW)
            vf_store(p->o + d, vf_load(p->o + d) * keep[m] + vf_load(later->o + d) * more[m]);
}

/* The keys that split i of n has, in whole blocks. */
static void ext_split(const ext *e, panel *p, int64_t i, int64_t n) {
    const int64_t blocks = gg_ceil_div(p->s->M, EXT_KEYS);
    ext_meet(e, p, 1, gg_cut(blocks, i, n) * EXT_KEYS, gg_min(p->s->M, gg_cut(blocks, i + 1, n) * EXT_KEYS));
}

/* A panel whose splits are merged one after another as they are found. */
static void ext_split_panel(const ext *e, panel *p) {
    const int64_t n = ext_splits(p->s->M, p->s->N);
    panel later = *p;
    ext_use_state(&later, e->later);
    ext_split(e, p, 0, n);
    for (int64_t i = 1; i < n; i++) {
        ext_split(e, &later, i, n);
        ext_merge(e, p, &later);
    }
}

static void ext_merge_panel(const ext *e, panel *p, int64_t n, float *states) {
    panel later = *p;
    ext_get_state(p, states);
    for (int64_t i = 1; i < n; i++) {
        ext_get_state(&later, states + i * ext_state(e));
        ext_merge(e, p, &later);
    }
    ext_finish(e, p);
}

/* -- tasks ------------------------------------------------------------------------------------------------ */

/* The panels of a kv head of a sequence, and how many make a strip. */
static int64_t ext_panels(const ext *e, int64_t N) {
    return e->shares ? gg_ceil_div(e->a.group, GG_NR) : e->a.group * gg_ceil_div(N, GG_NR);
}
static int64_t ext_strip(const ext *e) {
    const int copies =
        ext_copy_floats(e->a.k) > 0 || ext_copy_floats(e->a.v) > 0; /* the fewer strips, the fewer of them */
    return copies ? EXT_STRIP : attn_clamp(e->a.B * e->a.HK * ext_panels(e, e->a.N) / EXT_STRIPS, 1, EXT_STRIP);
}
static int64_t ext_strips(const ext *e, int64_t M, int64_t N) {
    return gg_ceil_div(ext_panels(e, N), ext_splits(M, N) > 1 ? 1 : ext_strip(e));
}

/* The most strips that a kv head's sequences can have. */
static int64_t ext_most_strips(const ext *e) {
    const attn *a = &e->a;
    if (a->cu_q == NULL) return a->B * ext_strips(e, a->M, a->N);
    const int64_t few = a->group * gg_ceil_div(EXT_FEW, GG_NR); /* strips of a sequence of few queries */
    return a->N == 0 ? 0 : a->group * gg_ceil_div(a->N, GG_NR) / ext_strip(e) + a->sequences * (few + 2);
}

/* How many units of work a strip is. */
static int64_t ext_spread(const attn *a) {
    return a->cu_q == NULL && a->B * a->H < EXT_SPLIT_HEADS ? ext_splits(a->M, a->N) : 1;
}

static int64_t ext_units(const ext *e, int stage) {
    const int64_t strips = e->a.HK * ext_most_strips(e), spread = ext_spread(&e->a);
    switch (stage) {
    case EXT_CHECK: return e->a.cu_q != NULL;
    case EXT_PANELS: return strips * spread;
    default: return spread > 1 ? strips : 0;
    }
}

static int64_t ext_tasks(const gg_call *c, int stage) {
    const ext e = ext_open(c, NULL);
    const int64_t keys = stage == EXT_PANELS ? attn_sees(&e.a) / ext_spread(&e.a) : ext_spread(&e.a);
    const int64_t panels = e.a.cu_q ? ext_strip(&e) : ext_panels(&e, e.a.N) / gg_max(1, ext_strips(&e, e.a.M, e.a.N));
    const int64_t flops = 2 * GG_NR * panels * keys * (e.a.DK + e.a.DV);
    return gg_ceil_div(ext_units(&e, stage), gg_max(1, ATTN_TASK_FLOPS / gg_max(1, flops)));
}

/* Panels first ... first + n - 1 of a kv head: the longest of a causal sequence first, and those of all its heads. */
static void ext_open_panels(const ext *e, const attn_seq *s, int64_t hk, int64_t first, int n, panel *p) {
    const int64_t group = e->a.group, blocks = gg_ceil_div(s->N, GG_NR);
    for (int i = 0; i < n; i++, p++) {
        const int64_t x = first + i, q = e->shares ? 0 : (blocks - 1 - x / group) * GG_NR;
        *p = (panel){ .s = s, .qt = e->qt + i * e->a.DK * GG_NR };
        ext_use_state(p, e->states + i * ext_state(e));
        p->h = hk * group + (e->shares ? x * GG_NR : x % group);
        p->nq = e->shares ? gg_min(GG_NR, group - x * GG_NR) : gg_min(GG_NR, s->N - q);
        p->lead = p->nq <= GG_VW ? GG_NR - GG_VW : 0;
        p->q0 = q - p->lead;
    }
}

/* A unit is a strip or a split of one; a task holds as many as make it worth handing over. */
static void ext_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const ext e = ext_open(c, scratch);
    const attn *a = &e.a;
    if (stage == EXT_CHECK) {
        attn_check(c, a, EXT_CU_Q);
        return;
    }
    const int64_t most = ext_most_strips(&e), spread = ext_spread(a), parts = stage == EXT_PANELS ? spread : 1;
    const int64_t units = ext_units(&e, stage), tasks = ext_tasks(c, stage), last = gg_cut(units, end, tasks);
    attn_seq s = { 0 };
    panel p[EXT_STRIP];
    int64_t number = 0, before = 0, here = -1; /* the sequence at hand, and the strips before and in it */
    for (int64_t u = gg_cut(units, begin, tasks); u < last; u++) {
        const int64_t unit = u / parts, part = u % parts, at = unit % most;
        if (at == 0 || here < 0) number = -1, before = here = 0;
        while (at >= before + here && number + 1 < a->sequences) {
            before += here;
            s = attn_sequence(a, ++number);
            here = ext_strips(&e, s.M, s.N);
        }
        if (at >= before + here) continue; /* packed sequences have fewer strips than they might */
        const int64_t panels = ext_panels(&e, s.N), first = gg_cut(panels, at - before, here);
        const int n = (int)(gg_cut(panels, at - before + 1, here) - first);
        ext_open_panels(&e, &s, unit / most, first, n, p);
        float *states = (float *)c->work + unit * spread * ext_state(&e);
        if (stage == EXT_MERGE) {
            ext_merge_panel(&e, p, spread, states);
            continue;
        }
        for (int i = 0; i < n; i++) ext_load_queries(&e, &p[i]);
        if (spread > 1) {
            float *const state = states + part * ext_state(&e);
            ext_use_state(p, state);
            ext_split(&e, p, part, spread);
            ext_put_state(&e, p, state);
            continue;
        }
        if (ext_splits(s.M, s.N) > 1) ext_split_panel(&e, p);
        else ext_meet(&e, p, n, 0, s.M);
        for (int i = 0; i < n; i++) ext_finish(&e, &p[i]);
    }
}

static int64_t ext_work(const gg_call *c) {
    const ext e = ext_open(c, NULL);
    return ext_units(&e, EXT_MERGE) * ext_spread(&e.a) * ext_state(&e) * (int64_t)sizeof(float);
}

static int64_t ext_scratch(const gg_call *c) { return ext_open(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(flash_attn_ext, .stages = EXT_STAGES, .tasks = ext_tasks, .run = ext_run, .work = ext_work,
          .scratch = ext_scratch);
