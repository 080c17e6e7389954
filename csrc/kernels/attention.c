/* Attention, forward: a panel of GG_NR queries at a time, one query in each vector lane.
 *
 *   S^T = K (scale Q)^T    softmax down the columns    O^T = V^T P^T
 *
 * Each score is one FMA chain of scaled query and key, here and in the backward, which then finds P as
 * exp(s - top) / total of the very same s: for a score of 1e30 too. */
#include "../alibi.h"
#include "../attention.h"

enum {
    EXT_KEYS = 256,       /* keys whose scores a panel holds */
    EXT_FEW = 16,         /* so few queries of a sequence meet its keys in splits ... */
    EXT_SPLIT_KEYS = 512, /* ... of at least so many, ... */
    EXT_SPLITS = 16,      /* ... at most so many, ... */
    EXT_SPLIT_HEADS = 16, /* ... which are units of work where a batch has fewer heads */
};
enum { EXT_MASK = SRC_V + 1, EXT_SINKS, EXT_CU_Q, EXT_CU_K, EXT_SEED };
enum { EXT_OUT, EXT_LSE, EXT_TOP, EXT_TOTAL };
enum { EXT_CHECK, EXT_PANELS, EXT_MERGE, EXT_STAGES };

typedef struct ext {
    attn a;
    float max_bias;
    const gg_tensor *out, *lse, *top, *total;
    float *qt;    /* [DK][GG_NR], scaled */
    float *ot;    /* [DV][GG_NR], and where it is kept two rows more: max and sum */
    float *sum;   /* the like, of the splits so far */
    float *s;     /* [EXT_KEYS][GG_NR]: scores, then weights */
    float *mask;  /* [EXT_KEYS][GG_NR] */
    float *rows;  /* [GG_NR][EXT_KEYS]: of a mask that is not f32 */
    float *k, *v; /* [EXT_KEYS][DK], [EXT_KEYS][DV]: of keys and values that are not f32 */
    int64_t floats;
} ext;

/* Floats of a state: O^T, max, sum. */
static int64_t ext_state(const ext *e) { return (e->a.DV + 2) * GG_NR; }

/* Into how many splits the keys are cut that few queries meet: what each finds is merged in order, so the bits
 * follow from the sequence's own lengths. */
static int64_t ext_splits(int64_t M, int64_t N) {
    return N > EXT_FEW ? 1 : attn_clamp(M / EXT_SPLIT_KEYS, 1, EXT_SPLITS);
}

static ext ext_open(const gg_call *c, float *scratch) {
    const gg_flash_attn_ext_attrs *at = c->attrs;
    ext e = { .a = attn_open(c, EXT_MASK, EXT_SINKS, ATTN_RULES(at)),
              .max_bias = at->max_bias,
              .out = &c->dst[EXT_OUT],
              .lse = &c->dst[EXT_LSE],
              .top = &c->dst[EXT_TOP],
              .total = &c->dst[EXT_TOTAL] };
    e.qt = attn_take(scratch, &e.floats, e.a.DK * GG_NR);
    e.ot = attn_take(scratch, &e.floats, ext_state(&e));
    e.sum = attn_take(scratch, &e.floats, ext_splits(e.a.M, 1) > 1 ? ext_state(&e) : 0);
    e.s = attn_take(scratch, &e.floats, EXT_KEYS * GG_NR);
    e.mask = attn_take(scratch, &e.floats, e.a.mask ? EXT_KEYS * GG_NR : 0);
    e.rows = attn_take(scratch, &e.floats, e.a.mask && e.a.mask->dtype != GG_F32 ? EXT_KEYS * GG_NR : 0);
    e.k = attn_take(scratch, &e.floats, attn_copy_floats(e.a.k, EXT_KEYS));
    e.v = attn_take(scratch, &e.floats, attn_copy_floats(e.a.v, EXT_KEYS));
    return e;
}

/* Some queries of one head of one sequence: nq lanes from `lead` on; lane 0 is query q0, if there is such.  Few are in
 * the last vector alone, and no work is done for the others. */
typedef struct panel {
    attn_seq s;
    int64_t h, q0, nq, lead;
    vf max[GG_NV], sum[GG_NV]; /* of the scores so far, and of exp(score - max) */
} panel;

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
    const char *row = gg_at(mask, p->s.b % mask->ne[0], p->h % mask->ne[1], p->s.q0 + p->q0 + p->lead);
    row += (p->s.k0 + *lo) * gg_float_bytes(mask->dtype);
    if (mask->dtype == GG_F32)
        attn_transpose((const float *)row, attn_step(mask, 2), p->nq, n, slope, to, GG_NR, GG_NR - p->lead);
    else {
        for (int64_t i = 0; i < p->nq; i++, row += mask->nb[2])
            gg_to_f32_row(mask->dtype, row, e->rows + i * EXT_KEYS, n);
        attn_transpose(e->rows, EXT_KEYS, p->nq, n, slope, to, GG_NR, GG_NR - p->lead);
    }
    int64_t first = 0, end = n;
    while (end > 0 && !ext_seen(to + (end - 1) * GG_NR, p->nq)) end--;
    while (first < end && !ext_seen(to + first * GG_NR, p->nq)) first++;
    if (first > 0) memmove(e->mask, e->mask + first * GG_NR, (end - first) * GG_NR * sizeof(float));
    *hi = *lo + end;
    *lo += first;
}

/* The queries of vector v that do not see key j, before any mask. */
GG_INLINE vi ext_hidden(const panel *p, int64_t j, int v) {
    const int32_t first = (int32_t)attn_clamp(seq_first(&p->s, j) - p->q0, 0, GG_NR);
    const int32_t last = (int32_t)attn_clamp(seq_last(&p->s, j) - p->q0, 0, GG_NR);
    const vi lane = (vi)vu_lanes() + v * GG_VW;
    return (lane < first) | (lane >= last);
}

/* Scores of keys from..to are hidden from the queries that do not see them; s belongs to key lo. */
static void ext_hide(const panel *p, float *s, int64_t lo, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; j++)
        for (int v = 0; v < GG_NV; v++) {
            float *at = s + (j - lo) * GG_NR + v * GG_VW;
            vf_store(at, vf_select(ext_hidden(p, j, v), vf_set1(-INFINITY), vf_load(at)));
        }
}

/* Writes HIDDEN over the weights of keys lo..hi where the mask (or NULL), causality or the window hides them. */
static void ext_mark(const panel *p, float *w, const float *mask, int64_t lo, int64_t hi) {
    for (int64_t j = lo; j < hi; j++)
        for (int v = 0; v < GG_NV; v++) {
            const int64_t at = (j - lo) * GG_NR + v * GG_VW;
            vi hidden = ext_hidden(p, j, v);
            if (mask != NULL) hidden |= vf_load(mask + at) == -INFINITY;
            vf_store(w + at, vf_select(hidden, vf_set1(HIDDEN), vf_load(w + at)));
        }
}

/* Writes 0 over the weights of keys lo..hi that dropout drops. */
static void ext_drop(const ext *e, const panel *p, float *w, int64_t lo, int64_t hi) {
    for (int64_t block = lo / 4; 4 * block < hi; block++)
        for (int v = 0; v < GG_NV; v++) {
            vi keep[4];
            const vu query = vu_lanes() + (uint32_t)(p->q0 + v * GG_VW);
            attn_keep(&e->a, &p->s, p->h, query, (vu){ 0 } + (uint32_t)block, keep);
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

/* s[j] = scores of n keys, of which the last vector of queries sees all, the others those before `whole`. */
static void ext_scores(const ext *e, const float *k, int64_t k_row, int64_t n, int64_t whole) {
    const int64_t DK = e->a.DK;
    int64_t j = 0;
    for (; j + GG_MR <= whole; j += GG_MR) ext_score_tile(GG_MR, 1, DK, k + j * k_row, k_row, e->qt, e->s + j * GG_NR);
    GG_EACH_M(whole - j, ext_score_tile, 1, DK, k + j * k_row, k_row, e->qt, e->s + j * GG_NR)
    for (j = whole; j + GG_MR <= n; j += GG_MR)
        ext_score_tile(GG_MR, 0, DK, k + j * k_row, k_row, e->qt, e->s + j * GG_NR);
    GG_EACH_M(n - j, ext_score_tile, 0, DK, k + j * k_row, k_row, e->qt, e->s + j * GG_NR)
}

static void ext_add_mask(float *s, const float *mask, int64_t floats) {
    for (int64_t i = 0; i < floats; i += GG_VW) {
        const vf add = vf_load(mask + i);
        vf_store(s + i, vf_select(add == -INFINITY, add, vf_load(s + i) + add));
    }
}

/* s = exp(s - max) for the vectors from `first` on, and the sum over n keys added to sum. */
GG_INLINE void ext_exp(const int first, float *s, int64_t n, const vf max[GG_NV], vf sum[GG_NV]) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < n; j++)
#pragma GCC unroll 4
        for (int v = first; v < GG_NV; v++) {
            float *at = s + j * GG_NR + v * GG_VW;
            const vf p = vf_exp_neg(vf_load(at) - max[v]);
            sum[v] += p;
            vf_store(at, p);
        }
}

/* ot = ot * keep + c. */
GG_INLINE void ext_put_values(const int M, vf c[GG_MR][GG_NV], const vf keep[GG_NV], float *ot) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = 0; j < GG_NV; j++) {
            float *o = ot + m * GG_NR + j * GG_VW;
            vf_store(o, vf_load(o) * keep[j] + c[m][j]);
        }
}

GG_INLINE void ext_value_tile(const int M, int64_t n, int64_t whole, const float *v, int64_t v_row, const float *p,
                              const vf keep[GG_NV], float *ot) {
    vf c[GG_MR][GG_NV];
    gg_micro(M, whole, v, 1, v_row, p, GG_NR, c);
    attn_micro_thin(M, n - whole, v + whole * v_row, 1, v_row, p + whole * GG_NR, GG_NR, GG_NV - 1, c);
    ext_put_values(M, c, keep, ot);
}

/* ot = ot * keep + v^T p over n keys; `whole` as in ext_scores. */
static void ext_values(const ext *e, const float *v, int64_t v_row, int64_t n, int64_t whole, const vf keep[GG_NV]) {
    const int64_t DV = e->a.DV;
    int64_t d = 0;
    for (; d + GG_MR <= DV; d += GG_MR) ext_value_tile(GG_MR, n, whole, v + d, v_row, e->s, keep, e->ot + d * GG_NR);
    GG_EACH_M(DV - d, ext_value_tile, n, whole, v + d, v_row, e->s, keep, e->ot + d * GG_NR)
}

static void ext_visible_values(const ext *e, const float *v, int64_t v_row, int64_t n, const vf keep[GG_NV]) {
    for (int64_t d = 0; d < e->a.DV; d++) {
        vf c[GG_MR][GG_NV] = { 0 };
        attn_micro_visible(1, n, v + d, 1, v_row, e->s, GG_NR, e->s, 0, GG_NR, 1, c);
        ext_put_values(1, c, keep, e->ot + d * GG_NR);
    }
}

/* -- panels ----------------------------------------------------------------------------------------------- */

/* Keys lo..hi, at most EXT_KEYS, of which each is seen by some query. */
static void ext_block(const ext *e, panel *p, int64_t lo, int64_t hi) {
    const attn *a = &e->a;
    const attn_seq *s = &p->s;
    if (a->mask) ext_mask(e, p, &lo, &hi);
    if (lo >= hi) return;
    const int64_t hk = p->h / a->group, n = hi - lo;
    int64_t k_row, v_row;
    const float *k = attn_rows(a->k, s->b, hk, s->k0 + lo, n, e->k, &k_row);
    const float *v = attn_rows(a->v, s->b, hk, s->k0 + lo, n, e->v, &v_row);

    /* All queries see the keys begin ... end - 1 and those before prefix; before `late` the queries of the last
     * vector are not the only ones. */
    const int64_t one = p->q0 + p->lead, last = one + p->nq - 1;
    const int64_t begin = seq_begin(s, last), end = seq_end(s, one), prefix = seq_prefix(s, one);
    const int64_t late = p->lead > 0 ? lo : prefix > end ? hi : p->q0 + s->shift + s->right + (GG_NV - 1) * GG_VW + 1;
    const int64_t whole = attn_clamp(late - lo, 0, n);
    const int64_t from = attn_clamp(prefix, lo, hi), to = attn_clamp(begin, from, hi); /* too early for some */
    const int64_t open = attn_clamp(gg_max(prefix, end), lo, hi); /* from here on too late for some */

    ext_scores(e, k, k_row, n, whole);
    if (a->rules.cap > 0) attn_cap(e->s, n * GG_NR, a->rules.cap, NULL);
    if (a->mask) ext_add_mask(e->s, e->mask, n * GG_NR);
    ext_hide(p, e->s, lo, from, to);
    ext_hide(p, e->s, lo, open, hi);

    const int64_t holes = a->mask || from < to ? lo : open; /* the first key that may be hidden from some query */
    const int careful = holes < hi && !gg_rows_finite(v + (holes - lo) * v_row, v_row, hi - holes, a->DV);
    vf max[GG_NV], sum[GG_NV], base[GG_NV], keep[GG_NV];
    for (int j = 0; j < GG_NV; j++) max[j] = p->max[j], sum[j] = vf_zero();
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < GG_NV; j++) max[j] = vf_max(max[j], vf_load(e->s + i * GG_NR + j * GG_VW));
    for (int j = 0; j < GG_NV; j++) {
        base[j] = vf_select(max[j] == -INFINITY, vf_zero(), max[j]); /* no key yet: exp(-inf - 0) */
        keep[j] = vf_exp_neg(p->max[j] - base[j]);
        p->max[j] = max[j];
    }
    ext_exp(0, e->s, whole, base, sum);
    ext_exp(GG_NV - 1, e->s + whole * GG_NR, n - whole, base, sum);
    if (attn_drops(a)) ext_drop(e, p, e->s, lo, hi);
    if (careful) ext_mark(p, e->s, a->mask ? e->mask : NULL, lo, hi);
    for (int j = 0; j < GG_NV; j++) p->sum[j] = p->sum[j] * keep[j] + sum[j];
    if (careful) ext_visible_values(e, v, v_row, n, keep);
    else ext_values(e, v, v_row, n, whole, keep);
}

/* Keys lo..hi, as far as they are within from..to. */
static void ext_blocks(const ext *e, panel *p, int64_t lo, int64_t hi, int64_t from, int64_t to) {
    hi = gg_min(hi, to);
    for (int64_t k = gg_max(lo, from); k < hi; k += EXT_KEYS) ext_block(e, p, k, gg_min(k + EXT_KEYS, hi));
}

static void ext_begin(const ext *e, panel *p) {
    for (int j = 0; j < GG_NV; j++) p->max[j] = vf_set1(-INFINITY), p->sum[j] = vf_zero();
    memset(e->ot, 0, e->a.DV * GG_NR * sizeof(float));
}

/* A sink is one key more, without a value.  Rows that see no other stay 0, whatever the sink. */
static void ext_sink(const ext *e, panel *p) {
    const vf sink = vf_set1(((const float *)e->a.sinks->data)[p->h]);
    for (int j = 0; j < GG_NV; j++) {
        const vf max = vf_max(p->max[j], sink), base = vf_select(max == -INFINITY, vf_zero(), max);
        const vf keep = vf_exp_neg(p->max[j] - base);
        const vi empty = p->sum[j] == 0.0f;
        for (int64_t d = 0; d < e->a.DV; d++) {
            float *o = e->ot + d * GG_NR + j * GG_VW;
            vf_store(o, vf_select(empty, vf_zero(), vf_load(o) * keep));
        }
        const vf alone = vf_select(sink == -INFINITY, vf_zero(), vf_set1(1.0f));
        p->sum[j] = vf_select(empty, alone, p->sum[j] * keep + vf_exp_neg(sink - base));
        p->max[j] = max;
    }
}

static void ext_end(const ext *e, const panel *p) {
    const attn *a = &e->a;
    const attn_seq *s = &p->s;
    const float rescale = attn_rescale(a);
    float lse[GG_NR], top[GG_NR], total[GG_NR];
    for (int j = 0; j < GG_NV; j++) {
        const vf sum = vf_select(p->sum[j] == 0.0f, vf_set1(1.0f), p->sum[j]);
        for (int64_t d = 0; d < a->DV; d++) {
            float *o = e->ot + d * GG_NR + j * GG_VW;
            vf_store(o, vf_load(o) * rescale / sum);
        }
        vf_store(lse + j * GG_VW, p->max[j] + vf_log(p->sum[j]));
        vf_store(top + j * GG_VW, vf_select(p->sum[j] == p->sum[j], p->max[j], p->sum[j])); /* a maximum loses NaN */
        vf_store(total + j * GG_VW, p->sum[j]);
    }
    const int64_t row = s->q0 + p->q0 + p->lead;
    attn_transpose(e->ot + p->lead, GG_NR, a->DV, p->nq, 1.0f, (float *)gg_at(e->out, s->b, row, p->h),
                   attn_step(e->out, 1), a->DV);
    memcpy((float *)gg_at(e->lse, 0, s->b, p->h) + row, lse + p->lead, p->nq * sizeof(float));
    memcpy((float *)gg_at(e->top, 0, s->b, p->h) + row, top + p->lead, p->nq * sizeof(float));
    memcpy((float *)gg_at(e->total, 0, s->b, p->h) + row, total + p->lead, p->nq * sizeof(float));
}

static void ext_load_queries(const ext *e, const panel *p) {
    const attn *a = &e->a;
    const int64_t row = p->s.q0 + p->q0 + p->lead, q_row = attn_step(a->q, 2);
    attn_transpose(attn_row(a->q, p->s.b, p->h, row), q_row, p->nq, a->DK, a->rules.scale, e->qt + p->lead, GG_NR,
                   GG_NR - p->lead);
    if (p->q0 > 0) attn_prefetch(attn_row(a->q, p->s.b, p->h, row - GG_NR), q_row, GG_NR, a->DK, 0);
    attn_prefetch((float *)gg_at(e->out, p->s.b, row, p->h), attn_step(e->out, 1), p->nq, a->DV, 1);
}

/* What split i of n finds: max, sum, and O^T in e->ot. */
static void ext_split(const ext *e, panel *p, int64_t i, int64_t n) {
    const attn_seq *s = &p->s;
    const int64_t blocks = gg_ceil_div(s->M, EXT_KEYS), one = p->q0 + p->lead, last = one + p->nq - 1;
    const int64_t from = gg_cut(blocks, i, n) * EXT_KEYS, to = gg_min(s->M, gg_cut(blocks, i + 1, n) * EXT_KEYS);
    const int64_t prefix = seq_prefix(s, last), begin = seq_begin(s, one), end = seq_end(s, last);
    ext_begin(e, p);
    if (prefix < begin) {
        ext_blocks(e, p, 0, prefix, from, to);
        ext_blocks(e, p, begin, end, from, to);
    } else ext_blocks(e, p, 0, gg_max(prefix, end), from, to);
}

static void ext_finish(const ext *e, panel *p) {
    if (e->a.sinks) ext_sink(e, p);
    ext_end(e, p);
}

/* -- splits ----------------------------------------------------------------------------------------------- */

/* max and sum, in the two rows behind O^T. */
static void ext_put_state(const ext *e, const panel *p, float *state) {
    float *row = state + e->a.DV * GG_NR;
    for (int j = 0; j < GG_NV; j++) vf_store(row + j * GG_VW, p->max[j]), vf_store(row + GG_NR + j * GG_VW, p->sum[j]);
}
static void ext_get_state(const ext *e, panel *p, const float *state) {
    const float *row = state + e->a.DV * GG_NR;
    for (int j = 0; j < GG_NV; j++) p->max[j] = vf_load(row + j * GG_VW), p->sum[j] = vf_load(row + GG_NR + j * GG_VW);
}

static void ext_merge(const ext *e, float *total, const float *part) {
    const int64_t MAX = e->a.DV, SUM = MAX + 1; /* rows */
    for (int64_t j = 0; j < GG_NR; j += GG_VW) {
        const vf a = vf_load(total + MAX * GG_NR + j), b = vf_load(part + MAX * GG_NR + j), max = vf_max(a, b);
        const vf base = vf_select(max == -INFINITY, vf_zero(), max);
        const vf keep = vf_exp_neg(a - base), more = vf_exp_neg(b - base);
        for (int64_t row = 0; row <= SUM; row++) {
            float *to = total + row * GG_NR + j;
            vf_store(to, vf_load(to) * keep + vf_load(part + row * GG_NR + j) * more);
        }
        vf_store(total + MAX * GG_NR + j, max);
    }
}

/* A panel whose splits are merged one after another as they are found. */
static void ext_panel(const ext *e, panel *p) {
    const int64_t n = ext_splits(p->s.M, p->s.N);
    ext_load_queries(e, p);
    ext_split(e, p, 0, n);
    for (int64_t i = 1; i < n; i++) {
        ext_put_state(e, p, e->ot);
        if (i == 1) memcpy(e->sum, e->ot, ext_state(e) * sizeof(float));
        else ext_merge(e, e->sum, e->ot);
        ext_split(e, p, i, n);
    }
    if (n > 1) {
        ext_put_state(e, p, e->ot);
        ext_merge(e, e->sum, e->ot);
        memcpy(e->ot, e->sum, ext_state(e) * sizeof(float));
        ext_get_state(e, p, e->ot);
    }
    ext_finish(e, p);
}

/* Split i of n alone, whose state waits for the others. */
static void ext_split_panel(const ext *e, panel *p, int64_t i, int64_t n, float *state) {
    ext_load_queries(e, p);
    ext_split(e, p, i, n);
    ext_put_state(e, p, e->ot);
    memcpy(state, e->ot, ext_state(e) * sizeof(float));
}

static void ext_merge_panel(const ext *e, panel *p, int64_t n, const float *states) {
    memcpy(e->ot, states, ext_state(e) * sizeof(float));
    for (int64_t i = 1; i < n; i++) ext_merge(e, e->ot, states + i * ext_state(e));
    ext_get_state(e, p, e->ot);
    ext_finish(e, p);
}

/* -- tasks ------------------------------------------------------------------------------------------------ */

/* The most panels that a head's sequences can have. */
static int64_t ext_panels(const attn *a) {
    if (a->cu_q == NULL) return a->B * gg_ceil_div(a->N, GG_NR);
    return a->N == 0 ? 0 : a->N / GG_NR + a->sequences;
}

/* How many units of work a panel is. */
static int64_t ext_spread(const attn *a) {
    return a->cu_q == NULL && a->B * a->H < EXT_SPLIT_HEADS ? ext_splits(a->M, a->N) : 1;
}

static int64_t ext_units(const ext *e, int stage) {
    const int64_t panels = e->a.H * ext_panels(&e->a), spread = ext_spread(&e->a);
    switch (stage) {
    case EXT_CHECK: return e->a.cu_q != NULL;
    case EXT_PANELS: return panels * spread;
    default: return spread > 1 ? panels : 0;
    }
}

static int64_t ext_tasks(const gg_call *c, int stage) {
    const ext e = ext_open(c, NULL);
    const int64_t keys = stage == EXT_PANELS ? attn_sees(&e.a) / ext_spread(&e.a) : ext_spread(&e.a);
    const int64_t flops = 2 * GG_NR * keys * (e.a.DK + e.a.DV);
    return gg_ceil_div(ext_units(&e, stage), gg_max(1, ATTN_TASK_FLOPS / gg_max(1, flops)));
}

/* A unit is a panel or a split of one; a task holds as many as make it worth handing over. */
static void ext_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const ext e = ext_open(c, scratch);
    const attn *a = &e.a;
    if (stage == EXT_CHECK) {
        attn_check(c, a, EXT_CU_Q);
        return;
    }
    const int64_t panels = ext_panels(a), spread = ext_spread(a), parts = stage == EXT_PANELS ? spread : 1;
    const int64_t units = ext_units(&e, stage), tasks = ext_tasks(c, stage), last = gg_cut(units, end, tasks);
    panel p = { 0 };
    int64_t number = 0, before = 0, here = -1; /* the sequence at hand, and the panels before and in it */
    for (int64_t u = gg_cut(units, begin, tasks); u < last; u++) {
        const int64_t unit = u / parts, part = u % parts, at = unit % panels;
        if (at == 0 || here < 0) number = -1, before = here = 0;
        while (at >= before + here && number + 1 < a->sequences) {
            before += here;
            p.s = attn_sequence(a, ++number);
            here = gg_ceil_div(p.s.N, GG_NR);
        }
        if (at >= before + here) continue;                      /* packed sequences have fewer panels than they might */
        const int64_t first = (before + here - 1 - at) * GG_NR; /* the longest of a causal sequence first */
        p.h = unit / panels;
        p.nq = gg_min(GG_NR, p.s.N - first);
        p.lead = p.nq <= GG_VW ? GG_NR - GG_VW : 0;
        p.q0 = first - p.lead;
        if (spread == 1) {
            ext_panel(&e, &p);
            continue;
        }
        float *states = (float *)c->work + unit * spread * ext_state(&e);
        if (stage == EXT_PANELS) ext_split_panel(&e, &p, part, spread, states + part * ext_state(&e));
        else ext_merge_panel(&e, &p, spread, states);
    }
}

static int64_t ext_work(const gg_call *c) {
    const ext e = ext_open(c, NULL);
    return ext_units(&e, EXT_MERGE) * ext_spread(&e.a) * ext_state(&e) * (int64_t)sizeof(float);
}

static int64_t ext_scratch(const gg_call *c) { return ext_open(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(flash_attn_ext, .stages = EXT_STAGES, .tasks = ext_tasks, .run = ext_run, .work = ext_work,
          .scratch = ext_scratch);
