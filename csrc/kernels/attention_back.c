/* Attention, backward: a tile of keys at a time, one key in each vector lane, five products.
 *
 *   P = exp((scale Q) K^T - top)    dS = P (dO V^T - delta)    delta = rowsum(dO O) - dlse
 *   dV += P^T dO    dK += dS^T (scale Q)    dQ += scale dS K
 *
 * The weights are P / total: rows of dO and delta are divided by total beforehand, so P need not be.  delta is a
 * chain in the order of dO V^T, where dropout's factor is V's as it is O's: with one visible key dS is exactly 0.
 * That is done once for all tiles: rows of scale Q and dO / total then lie one behind another.
 *
 * dq is the sum of the key tiles' parts in an order that follows from the sequence's own lengths: the keys are cut
 * into chunks, and each chunk's parts are summed, then the chunks.  Where heads are few, the chunks
 * are units of work, which put their sums into call->work, and a further stage adds them; else one unit does it all. */
#include "abi/attrs/attention.h"
#include "attention/attention.h"

enum {
    BACK_KEYS = 128,       /* the most keys and ... */
    BACK_STEP = 32,        /* tiles of keys begin at multiples of it: whole vectors, whatever their width */
    BACK_ROW = 144,        /* floats from one row of a tile to the next: rows that spread over the sets of a cache */
    BACK_QUERIES = 96,     /* ... queries of a tile */
    BACK_BLOCK = 64,       /* tiles that add up before their sum is added to the others' */
    BACK_CHUNKS = 8,       /* the most chunks of a sequence, and ... */
    BACK_CHUNK_KEYS = 256, /* ... the least keys of one */
    BACK_HEADS = 16,       /* heads of a batch that give work enough without chunks */
};
enum { BACK_OUT = SRC_V + 1, BACK_TOP, BACK_DOUT, BACK_TOTAL, BACK_MASK, BACK_DLSE, BACK_SINKS, BACK_CU_Q, BACK_CU_K };
enum { NO_GRADIENT, BY_HEAD, BY_TOKEN }; /* of q, k, v: how they lie */
enum { BACK_CHECK, BACK_ROWS, BACK_CHUNKS_OF_KEYS, BACK_SUM, BACK_D_SINKS, BACK_D_MASK, BACK_STAGES };

typedef struct back {
    attn a;
    const gg_tensor *out, *top, *dout;
    const gg_tensor *total, *dlse; /* NULL for those that there are none of */
    int qkv_gradient;
    gg_tensor dq, dk, dv;              /* [B, heads, N or M, D] however they lie, if asked for */
    const gg_tensor *d_sinks, *d_mask; /* NULL for those not asked for */
    /* Of all heads in call->work where more than one unit needs them, else of the group at hand: */
    int shares;
    float *top0;  /* [heads][N]: top, but 0 for a row without keys, whose weights are 0 and not NaN */
    float *delta; /* [heads][N] */
    float *q,
        *g; /* [heads][N] rows of scale Q and of dO / total; these rows, like others below, are of whole vectors */
    int64_t shared; /* floats of call->work so far */
    float *partial; /* in call->work, of the chunks after the first: their rows of dq, of all heads */
    /* A thread's own: */
    float *sum;           /* [group][N][DK]: dq of the chunk at hand */
    float *k, *v;         /* [BACK_KEYS][DK], [BACK_KEYS][DV]: of keys and values that are not f32 */
    float *kt, *vt;       /* [DK][BACK_ROW], [DV][BACK_ROW] */
    float *kp;            /* panels of GG_NR columns of K: [BACK_KEYS][GG_NR] each */
    float *sum_k, *sum_v; /* [BACK_KEYS] rows of dK, dV */
    float *p, *ds;        /* [BACK_QUERIES][BACK_ROW] */
    float *mask;          /* [BACK_QUERIES][BACK_ROW] */
    int64_t DKW, DVW;     /* DK and DV, in whole vectors */
    int32_t *keep;        /* [BACK_QUERIES][BACK_ROW]: -1 where dropout keeps, else 0 */
    float *dmask, *some;  /* [BACK_QUERIES][BACK_ROW]: of all heads and sequences, and of a block of them */
    int64_t floats;
} back;

/* Whether chunks are units of work of their own. */
static int back_spreads(const attn *a) { return a->cu_q == NULL && a->B * a->HK < BACK_HEADS; }

/* [B, heads, N, D] of what may be [B, N, heads, D]. */
static gg_tensor back_by_head(const gg_tensor *t, int by_token) {
    gg_tensor made = *t;
    if (by_token) {
        made.ne[1] = t->ne[2], made.ne[2] = t->ne[1];
        made.nb[1] = t->nb[2], made.nb[2] = t->nb[1];
    }
    return made;
}

static back back_open(const gg_call *c, float *scratch) {
    const gg_flash_attn_back_attrs *at = c->attrs;
    back k = { .a = attn_open(c, BACK_MASK, BACK_SINKS, &at->rules),
               .out = &c->src[BACK_OUT],
               .top = &c->src[BACK_TOP],
               .total = attn_given(&c->src[BACK_TOTAL]),
               .dout = &c->src[BACK_DOUT],
               .dlse = attn_given(&c->src[BACK_DLSE]) };
    const gg_tensor *dst = c->dst;
    if (at->qkv_gradient) {
        const int by_token = at->qkv_gradient == BY_TOKEN;
        k.qkv_gradient = 1;
        k.dq = back_by_head(dst++, by_token), k.dk = back_by_head(dst++, by_token);
        k.dv = back_by_head(dst++, by_token);
    }
    if (at->sinks_gradient) k.d_sinks = dst++;
    if (at->mask_gradient) k.d_mask = dst++;
    const attn *a = &k.a;
    const int64_t tile = BACK_QUERIES * BACK_ROW;
    k.DKW = gg_round_up(a->DK, GG_VW), k.DVW = gg_round_up(a->DV, GG_VW);
    k.shares = back_spreads(a) || a->cu_q || k.d_sinks || k.d_mask;
    const int64_t rows = (k.shares ? a->B * a->H : a->group) * a->N;
    float *const base = k.shares ? c->work : scratch;
    int64_t *const used = k.shares ? &k.shared : &k.floats;
    k.top0 = gg_claim(base, used, rows);
    k.delta = gg_claim(base, used, rows);
    k.q = gg_claim(base, used, rows * k.DKW);
    k.g = gg_claim(base, used, rows * k.DVW);
    k.partial = c->work ? (float *)c->work + k.shared : NULL;
    k.sum = gg_claim(scratch, &k.floats, back_spreads(a) || a->M < 2 * BACK_CHUNK_KEYS ? 0 : a->group * a->N * a->DK);
    k.k = gg_claim(scratch, &k.floats, attn_copy_floats(a->k, BACK_KEYS));
    k.v = gg_claim(scratch, &k.floats, attn_copy_floats(a->v, BACK_KEYS));
    k.kt = gg_claim(scratch, &k.floats, a->DK * BACK_ROW);
    k.vt = gg_claim(scratch, &k.floats, a->DV * BACK_ROW);
    k.kp = gg_claim(scratch, &k.floats, gg_round_up(a->DK, GG_NR) * BACK_KEYS);
    k.sum_k = gg_claim(scratch, &k.floats, BACK_KEYS * k.DKW);
    k.sum_v = gg_claim(scratch, &k.floats, BACK_KEYS * k.DVW);
    k.p = gg_claim(scratch, &k.floats, tile);
    k.ds = gg_claim(scratch, &k.floats, tile);
    k.mask = gg_claim(scratch, &k.floats, a->mask ? tile : 0);
    k.keep = (int32_t *)gg_claim(scratch, &k.floats, attn_drops(a) ? tile : 0);
    k.dmask = gg_claim(scratch, &k.floats, k.d_mask ? tile : 0);
    k.some = gg_claim(scratch, &k.floats, k.d_mask ? tile : 0);
    return k;
}

/* Column d of the panels of keys. */
static inline float *back_panel(const back *k, int64_t d) { return k->kp + d / GG_NR * GG_NR * BACK_KEYS + d % GG_NR; }

/* -- chunks ----------------------------------------------------------------------------------------------- */

/* Keys k0 ... k1 - 1, and the queries q0 ... q1 - 1 that see some of them. */
typedef struct chunk {
    int64_t k0, k1, q0, q1;
} chunk;

static int64_t back_chunks(const attn_seq *s) { return attn_clamp(s->M / BACK_CHUNK_KEYS, 1, BACK_CHUNKS); }

/* What the keys from j on cost: how many queries see them, and what packing them is worth. */
static int64_t back_cost(const attn_seq *s, int64_t j) {
    const int64_t end = gg_min(j + BACK_STEP, s->M);
    return gg_max(0, seq_last(s, end - 1) - seq_first(s, j)) + BACK_STEP / 2;
}

/* Chunks begin at multiples of BACK_STEP, and hold about the same number of visible pairs.  Returns how many there are. */
static int64_t back_cut(const attn_seq *s, chunk chunks[BACK_CHUNKS]) {
    const int64_t n = back_chunks(s);
    int64_t all = 0, sum = 0, j = 0;
    for (int64_t t = 0; t < s->M && n > 1; t += BACK_STEP) all += back_cost(s, t);
    for (int64_t i = 0; i < n; i++) {
        chunk *c = &chunks[i];
        c->k0 = j;
        if (i == n - 1) j = s->M;
        while (j < s->M) {
            const int64_t cost = back_cost(s, j);
            if ((2 * sum + cost) * n > 2 * all * (i + 1)) break; /* ends nearer to this chunk's share without it */
            sum += cost;
            j = gg_min(j + BACK_STEP, s->M);
        }
        c->k1 = j;
        c->q0 = c->q1 = 0;
        if (c->k0 < c->k1) {
            c->q0 = seq_first(s, c->k0);
            c->q1 = gg_max(c->q0, seq_last(s, c->k1 - 1));
            if (c->k0 < s->prefix) c->q1 = s->N;
        }
    }
    return n;
}

/* Where in call->work the rows of dq of chunk i > 0 begin, in floats: those of head 0, row q0. */
static int64_t back_partial(const attn *a, const chunk *chunks, int64_t i) {
    int64_t at = 0;
    for (int64_t c = 1; c < i; c++) at += a->B * a->H * (chunks[c].q1 - chunks[c].q0) * a->DK;
    return at;
}

/* -- what a tile needs ------------------------------------------------------------------------------------ */

/* y = factor * x, n elements. */
static void back_scale(const float *x, int64_t n, float factor, float *y) {
    int64_t i = 0;
    for (; i + GG_VW <= n; i += GG_VW) vf_store(y + i, vf_load(x + i) * factor);
    for (; i < n; i++) y[i] = x[i] * factor;
}

/* Where in top0 and delta, and as rows in q and g, a head's rows begin. */
static int64_t back_row(const back *k, int64_t b, int64_t h) {
    return (k->shares ? b * k->a.H + h : h % k->a.group) * k->a.N;
}

/* Rows i0..i1 of a head.  delta is (dO / total) . out, each dot product one chain, less dlse / total.  Where out is 0 any
 * dout adds nothing: a row that sees no key gives its sink no NaN. */
static void back_prepare(const back *k, int64_t b, int64_t h, int64_t i0, int64_t i1) {
    const int64_t DK = k->a.DK, DV = k->a.DV, first = back_row(k, b, h);
    const int64_t x_row = attn_step(k->a.q, 2), d_row = attn_step(k->dout, 1), o_row = attn_step(k->out, 1);
    const float *top = attn_row(k->top, 0, b, h), *total = k->total ? attn_row(k->total, 0, b, h) : NULL;
    const float *dlse = k->dlse ? attn_row(k->dlse, 0, b, h) : NULL;
    for (int64_t i = i0; i < i1; i += GG_VW) {
        const int n = (int)gg_min(GG_VW, i1 - i), soon = (int)attn_clamp(i1 - i - GG_VW, 0, GG_VW);
        const float *const x = attn_row(k->a.q, b, h, i), *const dout = attn_row(k->dout, b, i, h);
        const float *const o = attn_row(k->out, b, i, h);
        float *const q = k->q + (first + i) * k->DKW, *const g = k->g + (first + i) * k->DVW, share[GG_VW];
        attn_prefetch(x + GG_VW * x_row, x_row, soon, DK, 0);
        attn_prefetch(dout + GG_VW * d_row, d_row, soon, DV, 0);
        attn_prefetch(o + GG_VW * o_row, o_row, soon, DV, 0);
        for (int r = 0; r < n; r++) {
            share[r] = total == NULL || total[i + r] == 0 ? 1.0f : 1.0f / total[i + r];
            k->top0[first + i + r] = top[i + r] == -INFINITY ? 0 : top[i + r];
            back_scale(x + r * x_row, DK, k->a.rules.scale, q + r * k->DKW);
            back_scale(dout + r * d_row, DV, share[r], g + r * k->DVW);
        }
        vf sum = vf_zero();
        for (int64_t d = 0; d < DV; d += GG_VW) {
            vf gs[GG_VW], os[GG_VW];
            attn_load_turned(g + d, k->DVW, n, DV - d, gs);
            attn_load_turned(o + d, o_row, n, DV - d, os);
#pragma GCC unroll 16
            for (int c = 0; c < GG_VW; c++) sum = vf_select(os[c] == 0.0f, sum, sum + gs[c] * os[c]);
        }
        float delta[GG_VW];
        vf_store(delta, sum);
        for (int r = 0; r < n; r++) k->delta[first + i + r] = delta[r] - (dlse ? share[r] * dlse[i + r] : 0);
    }
}

/* What the products of one (query tile, key tile) share.  Rows and keys count from the tile's first. */
typedef struct pair {
    const back *k;
    const attn_seq *s;
    int64_t h, i0, j0; /* head, first query, first key */
    int64_t rows, keys;
    const float *top0, *delta, *q, *g; /* of row 0 */
    /* Row i sees the keys from i + behind up to i + ahead, and of the first `prefix` those up to i + reach. */
    int32_t behind, ahead, prefix, reach;
    int general; /* there is a mask, softcap or dropout */
    int masked;  /* dS is wanted for the mask's gradient, so without the softcap's derivative */
    int careful; /* some factor is not finite, and some pair hidden */
} pair;

static pair back_pair(const back *k, const attn_seq *s, int64_t h, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const attn *a = &k->a;
    pair t = { .k = k, .s = s, .h = h, .i0 = i0, .j0 = j0, .rows = i1 - i0, .keys = j1 - j0 };
    const attn_sight seen = seq_sight(s, i0, j0);
    t.behind = seen.behind, t.ahead = seen.ahead;
    t.prefix = (int32_t)gg_min(seen.prefix, t.keys);
    t.reach = t.prefix > 0 ? seen.reach : t.ahead;
    t.general = a->mask || a->rules.cap > 0 || attn_drops(a);
    const int64_t row = back_row(k, s->b, h) + s->q0 + i0;
    t.top0 = k->top0 + row, t.delta = k->delta + row;
    t.q = k->q + row * k->DKW, t.g = k->g + row * k->DVW;
    return t;
}

static int back_hides(const pair *t) { return t->k->a.mask || t->keys - 1 > t->ahead || t->rows - 1 + t->behind > 0; }

/* Of key j on, the rows from..to see something, in multiples of GG_MR: from for that very key, to for the GG_NR keys
 * that begin with it. */
static inline int64_t back_from(const pair *t, int64_t j) {
    return gg_min(t->rows, gg_max(0, j - t->reach) / GG_MR * GG_MR);
}
static inline int64_t back_to(const pair *t, int64_t j) {
    if (t->prefix > 0) return t->rows;
    return attn_clamp(gg_round_up(gg_max(0, j + GG_NR - t->behind), GG_MR), 0, t->rows);
}

/* The keys that row i does not see, of the vector of them that begins with key j, before any mask. */
GG_INLINE vi back_hidden(const pair *t, int32_t i, int32_t j) {
    const vi lane = vi_lanes();
    vi hidden = (lane > i + t->ahead - j) | (lane < i + t->behind - j);
    if (t->prefix > 0) hidden &= (lane >= t->prefix - j) | (lane > i + t->reach - j);
    return hidden;
}

/* -- P and dS --------------------------------------------------------------------------------------------- */

/* Scores of M rows to weights, in place: softcap, mask, causality, window.  Leaves the softcap's derivative in ds. */
static void back_weights(const pair *t, int64_t i, int64_t rows, int64_t j0) {
    const back *k = t->k;
    const float cap = k->a.rules.cap;
    for (int64_t r = i; r < i + rows; r++) {
        if (cap > 0) attn_cap(k->p + r * BACK_ROW + j0, GG_NR, cap, k->ds + r * BACK_ROW + j0);
        for (int v = 0; v < GG_NV; v++) {
            const int64_t at = r * BACK_ROW + j0 + v * GG_VW;
            vi hidden = back_hidden(t, (int32_t)r, (int32_t)(j0 + v * GG_VW));
            vf s = vf_load(k->p + at);
            if (k->a.mask) {
                const vf add = vf_load(k->mask + at);
                hidden |= add == -INFINITY;
                s += add;
            }
            vf_store(k->p + at, vf_select(hidden, vf_set1(HIDDEN), attn_exp(s - t->top0[r])));
        }
    }
}

GG_INLINE void back_product_tile(const int M, int64_t depth, const float *a, int64_t a_row, const float *bt,
                                 float *to) {
    vf c[GG_MR][GG_NV];
    gg_micro(M, depth, a, a_row, 1, bt, BACK_ROW, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) vf_store(to + m * BACK_ROW + v * GG_VW, c[m][v]);
}

static void back_product(int64_t M, int64_t depth, const float *a, int64_t a_row, const float *bt, float *to) {
    GG_EACH_M(M, back_product_tile, depth, a, a_row, bt, to)
}

/* P and dS of up to GG_MR rows from i and GG_NR keys from j, whatever the mask, softcap and dropout.  P is left without
 * what dropout drops, as dV wants it. */
static void back_general_tile(const pair *t, int64_t i, int64_t rows, int64_t j) {
    const back *k = t->k;
    const int capped = k->a.rules.cap > 0 && !t->masked, drops = attn_drops(&k->a);
    float dp[GG_MR * BACK_ROW];
    back_product(rows, k->a.DK, t->q + i * k->DKW, k->DKW, k->kt + j, k->p + i * BACK_ROW + j);
    back_weights(t, i, rows, j);
    back_product(rows, k->a.DV, t->g + i * k->DVW, k->DVW, k->vt + j, dp);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t v = 0; v < GG_NR; v += GG_VW) {
            const int64_t at = (i + m) * BACK_ROW + j + v;
            const vf weight = vf_load(k->p + at);
            const vi hidden = (vi)weight == HIDDEN_BITS;
            vf dweight = vf_load(dp + m * BACK_ROW + v);
            if (drops) {
                const vi keep = vi_load(k->keep + at);
                dweight = (vf)((vi)dweight & keep);
                vf_store(k->p + at, vf_select(hidden, weight, (vf)((vi)weight & keep)));
            }
            vf x = weight * (dweight - t->delta[i + m]);
            if (capped) x *= vf_load(k->ds + at);
            vf_store(k->ds + at, vf_select(hidden, vf_zero(), x));
        }
}

/* The same without those: exp and dS while the products are in registers.  Not `whole`: the rows see keys of the first vector
 * alone. */
GG_INLINE void back_pair_tile(const int M, const int edge, const int whole, const pair *t, int64_t i, int64_t j) {
    const back *k = t->k;
    const int64_t DK = k->a.DK, DV = k->a.DV, q_row = k->DKW, g_row = k->DVW;
    float *p = k->p + i * BACK_ROW + j, *ds = k->ds + i * BACK_ROW + j;
    const int vectors = whole ? GG_NV : 1;
    vf c[GG_MR][GG_NV] = { 0 };
    if (whole) gg_micro(M, DK, t->q + i * q_row, q_row, 1, k->kt + j, BACK_ROW, c);
    else attn_micro_thin(M, DK, t->q + i * q_row, q_row, 1, k->kt + j, BACK_ROW, 0, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        const vf top = vf_set1(t->top0[i + m]);
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) {
            vf x = v < vectors ? attn_exp(c[m][v] - top) : vf_zero();
            if (edge && v < vectors)
                x = vf_select(back_hidden(t, (int32_t)i + m, (int32_t)j + v * GG_VW), vf_set1(HIDDEN), x);
            vf_store(p + m * BACK_ROW + v * GG_VW, x);
        }
    }
    if (whole) gg_micro(M, DV, t->g + i * g_row, g_row, 1, k->vt + j, BACK_ROW, c);
    else {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) c[m][0] = vf_zero();
        attn_micro_thin(M, DV, t->g + i * g_row, g_row, 1, k->vt + j, BACK_ROW, 0, c);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        const vf delta = vf_set1(t->delta[i + m]);
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) {
            const vf weight = vf_load(p + m * BACK_ROW + v * GG_VW);
            vf x = v < vectors ? weight * (c[m][v] - delta) : vf_zero();
            if (edge && v < vectors) x = vf_select((vi)weight == HIDDEN_BITS, vf_zero(), x);
            vf_store(ds + m * BACK_ROW + v * GG_VW, x);
        }
    }
}

static void back_pairs(const pair *t) {
    for (int64_t j = 0; j < t->keys; j += GG_NR) {
        const int64_t last_key = gg_min(j + GG_NR, t->keys) - 1, whole = back_from(t, j + GG_VW), to = back_to(t, j);
        for (int64_t i = back_from(t, j); i < to; i += GG_MR) {
            const int64_t M = gg_min(GG_MR, t->rows - i);
            const int all = last_key <= i + t->ahead && j >= i + M - 1 + t->behind;
            if (t->general) back_general_tile(t, i, M, j);
            else if (M == GG_MR && all) back_pair_tile(GG_MR, 0, 1, t, i, j);
            else if (M == GG_MR && i < whole && !t->careful) back_pair_tile(GG_MR, 1, 0, t, i, j);
            else { GG_EACH_M(M, back_pair_tile, 1, 1, t, i, j) }
        }
    }
}

/* -- dQ, dK, dV ------------------------------------------------------------------------------------------- */

/* c[m] += A B for a single vector of columns, without the pairs that P hides: P[m * p_m + k * p_k] is the weight of (m, k).  The
 * same bits where all factors are finite. */
static void back_micro_visible(int M, int64_t depth, const float *A, int64_t a_row, int64_t a_col, const float *B,
                               int64_t b_row, const float *P, int64_t p_m, int64_t p_k, vf c[GG_MR]) {
    for (int m = 0; m < M; m++)
        for (int64_t k = 0; k < depth; k++) {
            const float weight = P[m * p_m + k * p_k];
            if (weight != 0 || !signbit(weight)) c[m] += A[m * a_row + k * a_col] * vf_load(B + k * b_row);
        }
}

/* M rows of sum = w^T a or where not `set` += it, of each the vectors from a column on. */
GG_INLINE void back_key_rows(const int M, const int vectors, int64_t n, const float *w, const float *a, int64_t a_row,
                             int set, float *sum) {
    vf c[GG_MR][GG_NV];
    gg_micro_part(M, vectors, n, w, 1, BACK_ROW, a, a_row, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++, sum += a_row)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vf_store(sum + v * GG_VW, set ? c[m][v] : vf_load(sum + v * GG_VW) + c[m][v]);
}

/* sum[keys] += w[rows][keys]^T a[rows], rows of W floats: dv from dout and P, dk from q and dS.  *fresh has a bit for each GG_NR
 * keys of which sum holds nothing yet. */
static void back_keys(const pair *t, const float *a, int64_t W, const float *w, uint32_t *fresh, float *sum) {
    for (int64_t j = 0; j < t->keys; j += GG_NR) {
        if (back_from(t, j) >= back_to(t, j)) continue;
        const uint32_t bit = UINT32_C(1) << (j / GG_NR);
        const int set = (*fresh & bit) != 0;
        *fresh &= ~bit;
        int64_t key = j, end;
        const int64_t stop = gg_min(j + GG_NR, t->keys);
        for (int64_t tiles = gg_ceil_div(stop - j, GG_MR); tiles > 0; tiles--, key = end) {
            end = key + (stop - key) / tiles;
            /* the rows that see some of these keys */
            const int64_t from = attn_clamp(key - t->reach, 0, t->rows);
            const int64_t n = (t->prefix > 0 ? t->rows : attn_clamp(end - t->behind, from, t->rows)) - from;
            const float *ai = a + from * W, *wi = w + from * BACK_ROW + key, *pi = t->k->p + from * BACK_ROW + key;
            float *to = sum + key * W;
            int64_t d = 0;
            if (t->careful)
                for (; d < W; d += GG_VW) {
                    vf c[GG_MR] = { 0 };
                    back_micro_visible((int)(end - key), n, wi, 1, BACK_ROW, ai + d, W, pi, 1, BACK_ROW, c);
                    for (int64_t m = 0; m < end - key; m++) {
                        float *put = to + m * W + d;
                        vf_store(put, set ? c[m] : vf_load(put) + c[m]);
                    }
                }
            for (; d + GG_NR <= W; d += GG_NR) GG_EACH_M(end - key, back_key_rows, GG_NV, n, wi, ai + d, W, set, to + d)
            for (; d < W; d += GG_VW) GG_EACH_M(end - key, back_key_rows, 1, n, wi, ai + d, W, set, to + d)
        }
    }
}

/* dq += scale c for M rows and the columns from d that there are. */
GG_INLINE void back_put_queries(const int M, const int vectors, const vf c[GG_MR][GG_NV], float scale, float *dq,
                                int64_t row, int64_t DK, int64_t d) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *to = dq + m * row + d + v * GG_VW;
            const int64_t left = DK - d - v * GG_VW;
            if (left >= GG_VW) vf_store(to, vf_load(to) + c[m][v] * scale);
            else vf_store_n(to, vf_load_n(to, (int)left, 0) + c[m][v] * scale, (int)left);
        }
}

/* dq of M rows from i += scale dS K over n keys from j. */
GG_INLINE void back_query_tile(const int M, const pair *t, int64_t i, int64_t j, int64_t n, float *dq, int64_t row) {
    const back *k = t->k;
    const float scale = k->a.rules.scale, *ds = k->ds + i * BACK_ROW + j;
    int64_t d = 0;
    vf c[GG_MR][GG_NV];
    for (; d + GG_NR <= k->DKW; d += GG_NR) {
        gg_micro(M, n, ds, BACK_ROW, 1, back_panel(k, d) + j * GG_NR, GG_NR, c);
        back_put_queries(M, GG_NV, c, scale, dq, row, k->a.DK, d);
    }
    for (; d < k->DKW; d += GG_VW) {
        gg_micro_part(M, 1, n, ds, BACK_ROW, 1, back_panel(k, d) + j * GG_NR, GG_NR, c);
        back_put_queries(M, 1, c, scale, dq, row, k->a.DK, d);
    }
}

static void back_visible_queries(const pair *t, int M, int64_t i, int64_t j, int64_t n, float *dq, int64_t row) {
    const back *k = t->k;
    const int64_t at = i * BACK_ROW + j;
    for (int64_t d = 0; d < k->DKW; d += GG_VW) {
        vf c[GG_MR] = { 0 };
        back_micro_visible(M, n, k->ds + at, BACK_ROW, 1, back_panel(k, d) + j * GG_NR, GG_NR, k->p + at, BACK_ROW, 1,
                           c);
        for (int m = 0; m < M; m++)
            back_put_queries(1, 1, (const vf[GG_MR][GG_NV]){ { c[m] } }, k->a.rules.scale, dq + m * row, row, k->a.DK,
                             d);
    }
}

/* dq += scale dS K, rows of DK that lie `row` apart. */
static void back_queries(const pair *t, float *dq, int64_t row) {
    for (int64_t i = 0; i < t->rows; i += GG_MR) {
        const int M = (int)gg_min(GG_MR, t->rows - i);
        /* keys that some of these rows see, from a multiple of GG_NR on */
        const int64_t begin = t->prefix > 0 ? 0 : gg_max(0, i + t->behind) / GG_NR * GG_NR;
        const int64_t n = gg_min(t->keys, i + M + t->reach) - begin;
        if (n <= 0) continue;
        float *to = dq + i * row;
        if (t->careful) back_visible_queries(t, M, i, begin, n, to, row);
        else GG_EACH_M(M, back_query_tile, t, i, begin, n, to, row)
    }
}

/* -- tiles ------------------------------------------------------------------------------------------------ */

/* Copies the mask of rows and keys; keys beyond the last one are hidden.  Returns whether some pair is visible. */
static int back_mask(const pair *t) {
    const back *k = t->k;
    const gg_tensor *mask = k->a.mask;
    int seen = 0;
    for (int64_t i = 0; i < t->rows; i++) {
        float *to = k->mask + i * BACK_ROW;
        const char *from = gg_at(mask, t->s->b % mask->ne[0], t->h % mask->ne[1], t->s->q0 + t->i0 + i);
        gg_to_f32_row(mask->dtype, from + (t->s->k0 + t->j0) * gg_float_bytes(mask->dtype), to, t->keys);
        for (int64_t j = 0; j < t->keys; j++) seen |= to[j] != -INFINITY;
        for (int64_t j = t->keys; j < gg_round_up(t->keys, GG_NR); j++) to[j] = -INFINITY;
    }
    return seen;
}

/* Which pairs dropout keeps, four keys of GG_VW blocks at a time.  A tile of the mask may begin within a block, where
 * a packed sequence does not begin with one. */
static void back_keep(const pair *t) {
    int32_t *to = t->k->keep;
    for (int64_t i = 0; i < t->rows; i++, to += BACK_ROW)
        for (int64_t j = -(t->j0 % 4); j < t->keys; j += 4 * GG_VW) {
            int32_t words[4 * GG_VW];
            vi keep[4];
            const vu query = (vu){ 0 } + (uint32_t)(t->i0 + i), block = (vu)vi_lanes() + (uint32_t)((t->j0 + j) / 4);
            attn_keep(&t->k->a, t->s, t->h, query, block, keep);
            for (int w = 0; w < 4; w++) vi_store(words + w * GG_VW, keep[w]);
            const int64_t end = gg_min(4 * GG_VW, BACK_KEYS - j);
            for (int64_t l = gg_max(0, -j); l < end; l++) to[j + l] = words[l % 4 * GG_VW + l / 4];
        }
}

/* Packs keys j0..j1.  Returns whether all of them are finite. */
static int back_load_keys(const back *k, const attn_seq *s, int64_t hk, int64_t j0, int64_t j1) {
    const attn *a = &k->a;
    const int64_t keys = j1 - j0, wide = gg_round_up(keys, GG_NR), DK = a->DK, DV = a->DV;
    int64_t k_row, v_row;
    const float *kj = attn_rows(a->k, s->b, hk, s->k0 + j0, keys, k->k, &k_row);
    const float *vj = attn_rows(a->v, s->b, hk, s->k0 + j0, keys, k->v, &v_row);
    attn_transpose(kj, k_row, keys, DK, 1.0f, k->kt, BACK_ROW, wide);
    attn_transpose(vj, v_row, keys, DV, attn_rescale(a), k->vt, BACK_ROW, wide);
    for (int64_t d = 0; d < DK; d += GG_VW) {
        float *to = back_panel(k, d);
        for (int64_t j = 0; j < keys; j++, to += GG_NR) {
            const float *from = kj + j * k_row + d;
            vf_store(to, d + GG_VW <= DK ? vf_load(from) : vf_load_n(from, (int)(DK - d), 0));
        }
    }
    return gg_rows_finite(kj, k_row, keys, DK) && gg_rows_finite(vj, v_row, keys, DV);
}

/* P and dS of a tile whose keys are packed.  Returns whether there are any. */
static int back_scores(pair *t, int finite_keys) {
    const back *k = t->k;
    const attn *a = &k->a;
    if (a->mask && !back_mask(t)) return 0;
    if (attn_drops(a)) back_keep(t);
    t->careful = back_hides(t) && !(finite_keys && gg_rows_finite(t->q, k->DKW, t->rows, a->DK) &&
                                    gg_rows_finite(t->g, k->DVW, t->rows, a->DV));
    back_pairs(t);
    return 1;
}

/* Where the rows of dq go, of which `first` is the first. */
typedef struct back_dq {
    float *at;
    int64_t head, row, first; /* head, row: floats from one head of the group, or row, to the next */
} back_dq;

static void back_add(const float *from, float *to, int64_t n) {
    for (int64_t e = 0; e < n; e++) to[e] += from[e];
}

static float *back_dq_row(back_dq dq, int64_t g, int64_t i) { return dq.at + g * dq.head + (i - dq.first) * dq.row; }

/* The sums of key j of a tile to its gradients, or where those hold some in addition to them. */
static void back_put_keys(const back *k, int64_t j, uint32_t fresh, uint32_t set, float *dk, float *dv) {
    const uint32_t here = UINT32_C(1) << (j / GG_NR);
    const float rescale = attn_rescale(&k->a), *sum_k = k->sum_k + j * k->DKW, *sum_v = k->sum_v + j * k->DVW;
    if (fresh & here) return;
    if (set & here) {
        for (int64_t d = 0; d < k->a.DK; d++) dk[d] += sum_k[d];
        for (int64_t d = 0; d < k->a.DV; d++) dv[d] += sum_v[d] * rescale;
        return;
    }
    back_scale(sum_k, k->a.DK, 1.0f, dk);
    back_scale(sum_v, k->a.DV, rescale, dv);
}

/* One tile of keys, j0..j1 of kv head hk, against every query that sees them. */
static void back_key_tile(const back *k, const attn_seq *s, int64_t hk, int64_t j0, int64_t j1, back_dq dq) {
    const attn *a = &k->a;
    const int64_t keys = j1 - j0, DK = a->DK, DV = a->DV, first = seq_first(s, j0);
    const int64_t last = j0 < s->prefix ? s->N : seq_last(s, j1 - 1);
    const int finite = back_load_keys(k, s, hk, j0, j1);
    float *const dk = (float *)gg_at(&k->dk, s->b, hk, s->k0 + j0), *const dv =
                                                                        (float *)gg_at(&k->dv, s->b, hk, s->k0 + j0);
    const int64_t dk_row = attn_step(&k->dk, 2), dv_row = attn_step(&k->dv, 2);
    attn_prefetch(dk, dk_row, keys, DK, 1);
    attn_prefetch(dv, dv_row, keys, DV, 1);
    uint32_t fresh = ~UINT32_C(0), fresh_v = fresh; /* of sum_k, and always the same, of sum_v */
    uint32_t set = 0;                               /* a bit for each GG_NR keys whose gradients hold a sum */
    int64_t terms = 0;

    for (int64_t g = 0; g < a->group; g++) {
        int64_t i1;
        for (int64_t i0 = first; i0 < last; i0 = i1) {
            i1 = gg_min(last, gg_round_up(i0 + 1, BACK_QUERIES));
            pair t = back_pair(k, s, hk * a->group + g, i0, i1, j0, j1);
            attn_prefetch(back_dq_row(dq, g, i0), dq.row, t.rows, DK, 1);
            if (i1 < last) {
                attn_prefetch(t.q + t.rows * k->DKW, k->DKW, gg_min(BACK_QUERIES, last - i1), DK, 0);
                attn_prefetch(t.g + t.rows * k->DVW, k->DVW, gg_min(BACK_QUERIES, last - i1), DV, 0);
            }
            if (!back_scores(&t, finite)) continue;
            back_keys(&t, t.g, k->DVW, k->p, &fresh_v, k->sum_v);
            back_keys(&t, t.q, k->DKW, k->ds, &fresh, k->sum_k);
            back_queries(&t, back_dq_row(dq, g, i0), dq.row);
            if (++terms % BACK_BLOCK > 0) continue;
            for (int64_t j = 0; j < keys; j++) back_put_keys(k, j, fresh, set, dk + j * dk_row, dv + j * dv_row);
            set |= ~fresh;
            fresh = fresh_v = ~UINT32_C(0);
        }
    }
    for (int64_t j = 0; j < keys; j++) {
        if (fresh & ~set & UINT32_C(1) << (j / GG_NR)) {
            memset(dk + j * dk_row, 0, DK * sizeof(float));
            memset(dv + j * dv_row, 0, DV * sizeof(float));
        }
        back_put_keys(k, j, fresh, set, dk + j * dk_row, dv + j * dv_row);
    }
}

/* -- dq, dk, dv of a head --------------------------------------------------------------------------------- */

static void back_chunk(const back *k, const attn_seq *s, int64_t hk, const chunk *c, back_dq dq) {
    int64_t end;
    for (int64_t j = c->k0, tiles = gg_ceil_div(c->k1 - j, BACK_KEYS); tiles > 0; tiles--, j = end) {
        end = gg_min(c->k1, j + gg_round_up(gg_ceil_div(c->k1 - j, tiles), BACK_STEP));
        back_key_tile(k, s, hk, j, end, dq);
    }
}

static void back_zero_rows(const back *k, back_dq dq, int64_t i0, int64_t i1) {
    const size_t row = k->a.DK * sizeof(float);
    for (int64_t g = 0; g < k->a.group && i0 < i1; g++) {
        float *to = back_dq_row(dq, g, i0);
        if (dq.row == k->a.DK) memset(to, 0, (i1 - i0) * row);
        else
            for (int64_t i = i0; i < i1; i++, to += dq.row) memset(to, 0, row);
    }
}

static back_dq back_in_place(const back *k, const attn_seq *s, int64_t hk) {
    return (back_dq){ .at = (float *)gg_at(&k->dq, s->b, hk * k->a.group, s->q0),
                      .head = attn_step(&k->dq, 1),
                      .row = attn_step(&k->dq, 2) };
}

/* Chunk i of a kv head: a unit of work where chunks are spread. */
static void back_unit(const back *k, int64_t number, int64_t hk, int64_t i) {
    const attn *a = &k->a;
    const attn_seq s = attn_sequence(a, number);
    chunk chunks[BACK_CHUNKS];
    back_cut(&s, chunks);
    const chunk *c = &chunks[i];
    back_dq dq = back_in_place(k, &s, hk);
    if (i > 0) {
        dq.first = c->q0, dq.row = a->DK, dq.head = (c->q1 - c->q0) * a->DK;
        dq.at = k->partial + back_partial(a, chunks, i) + (s.b * a->H + hk * a->group) * dq.head;
    }
    back_zero_rows(k, dq, i > 0 ? c->q0 : 0, i > 0 ? c->q1 : s.N);
    back_chunk(k, &s, hk, c, dq);
}

/* All chunks of a kv head. */
static void back_head(const back *k, int64_t number, int64_t hk) {
    const attn *a = &k->a;
    const attn_seq s = attn_sequence(a, number);
    chunk chunks[BACK_CHUNKS];
    const int64_t n = back_cut(&s, chunks);
    const back_dq dq = back_in_place(k, &s, hk), sum = { .at = k->sum, .head = a->N * a->DK, .row = a->DK };
    for (int64_t g = 0; g < a->group && !k->shares; g++) back_prepare(k, s.b, hk * a->group + g, 0, s.N);
    back_zero_rows(k, dq, 0, s.N);
    back_chunk(k, &s, hk, &chunks[0], dq);
    for (int64_t i = 1; i < n; i++) {
        const chunk *c = &chunks[i];
        back_zero_rows(k, sum, c->q0, c->q1);
        back_chunk(k, &s, hk, c, sum);
        for (int64_t g = 0; g < a->group; g++)
            for (int64_t q = c->q0; q < c->q1; q++) back_add(back_dq_row(sum, g, q), back_dq_row(dq, g, q), a->DK);
    }
}

/* Rows of dq of all heads: the first chunk has its sums there, the others' are added in order. */
static void back_sum(const back *k, int64_t row, int64_t end) {
    const attn *a = &k->a;
    const attn_seq s = attn_sequence(a, 0); /* all are alike */
    chunk chunks[BACK_CHUNKS];
    const int64_t n = back_cut(&s, chunks);
    for (int64_t i = 1; i < n; i++) {
        const chunk *c = &chunks[i];
        const float *part = k->partial + back_partial(a, chunks, i);
        for (int64_t r = row; r < end; r++) {
            const int64_t head = r / a->N, q = r % a->N;
            if (q < c->q0 || q >= c->q1) continue;
            back_add(part + (head * (c->q1 - c->q0) + q - c->q0) * a->DK,
                     (float *)gg_at(&k->dq, head / a->H, head % a->H, q), a->DK);
        }
    }
}

/* -- gradients of sinks and mask -------------------------------------------------------------------------- */

/* d_sinks[h] = -sum of exp(sink - lse) (rowsum(dout out) - dlse), over all rows. */
static void back_sink(const back *k, int64_t h) {
    const attn *a = &k->a;
    const float sink = ((const float *)a->sinks->data)[h];
    double all = 0;
    for (int64_t b = 0; b < a->B && sink != -INFINITY; b++) {
        const int64_t first = back_row(k, b, h);
        for (int64_t i = first; i < first + a->N; i++) {
            const float weight = attn_exp(vf_set1(sink - k->top0[i]))[0]; /* times total, by which delta is divided */
            all -= (double)weight * k->delta[i];
        }
    }
    ((float *)k->d_sinks->data)[h] = (float)all;
}

/* The mask's rows and keys of a tile, over all heads and sequences that they were tiled to. */
static void back_mask_tile(const back *k, int64_t bm, int64_t hm, int64_t r0, int64_t c0) {
    const attn *a = &k->a;
    const gg_tensor *to = k->d_mask;
    const int64_t r1 = gg_min(to->ne[2], r0 + BACK_QUERIES), c1 = gg_min(a->M, c0 + BACK_KEYS);
    const int64_t tile = BACK_QUERIES * BACK_ROW;
    int64_t terms = 0; /* in k->some */
    memset(k->dmask, 0, tile * sizeof(float));
    memset(k->some, 0, tile * sizeof(float));
    for (int64_t number = 0; number < a->sequences; number++) {
        const attn_seq s = attn_sequence(a, number);
        const int64_t i0 = gg_max(0, r0 - s.q0), j0 = gg_max(0, c0 - s.k0), j1 = gg_min(s.M, c1 - s.k0);
        const int64_t i1 = gg_min(s.N, r1 - s.q0);
        if (s.b % to->ne[0] != bm || i0 >= i1 || j0 >= j1) continue;
        int64_t packed = -1; /* the kv head whose keys are */
        int finite = 0;
        for (int64_t h = hm; h < a->H; h += to->ne[1]) {
            pair t = back_pair(k, &s, h, i0, i1, j0, j1);
            t.masked = 1;
            if (packed != h / a->group) finite = back_load_keys(k, &s, packed = h / a->group, j0, j1);
            if (!back_scores(&t, finite)) continue;
            for (int64_t j = 0; j < t.keys; j += GG_NR)
                for (int64_t i = back_from(&t, j); i < back_to(&t, j); i++) {
                    float *sum = k->some + (s.q0 + i0 + i - r0) * BACK_ROW + s.k0 + j0 + j - c0;
                    const float *ds = k->ds + i * BACK_ROW + j;
                    for (int64_t e = 0; e < gg_min(GG_NR, t.keys - j); e++) sum[e] += ds[e];
                }
            if (++terms % BACK_BLOCK == 0) {
                back_add(k->some, k->dmask, tile);
                memset(k->some, 0, tile * sizeof(float));
            }
        }
    }
    back_add(k->some, k->dmask, tile);
    for (int64_t r = r0; r < r1; r++)
        memcpy((float *)gg_at(to, bm, hm, r) + c0, k->dmask + (r - r0) * BACK_ROW, (c1 - c0) * sizeof(float));
}

/* -- tasks ------------------------------------------------------------------------------------------------ */

/* How many chunks are units, for sequences that are all alike. */
static int64_t back_spread(const attn *a) {
    const attn_seq s = { .M = a->M };
    return back_spreads(a) ? back_chunks(&s) : 1;
}

static int64_t back_units(const back *k, int stage) {
    const attn *a = &k->a;
    switch (stage) {
    case BACK_CHECK: return a->cu_q != NULL;
    case BACK_ROWS: return k->shares ? a->B * a->H * gg_ceil_div(a->N, BACK_QUERIES) : 0;
    case BACK_CHUNKS_OF_KEYS: return k->qkv_gradient ? a->sequences * a->HK * back_spread(a) : 0;
    case BACK_SUM: return k->qkv_gradient && back_spread(a) > 1 ? a->B * a->H * a->N : 0;
    case BACK_D_SINKS: return k->d_sinks ? a->H : 0;
    default:
        if (k->d_mask == NULL) return 0;
        return k->d_mask->ne[0] * k->d_mask->ne[1] * gg_ceil_div(k->d_mask->ne[2], BACK_QUERIES) *
               gg_ceil_div(a->M, BACK_KEYS);
    }
}

static int64_t back_flops(const back *k, int stage) {
    const attn *a = &k->a;
    const int64_t rows = a->cu_q ? gg_ceil_div(a->N, a->sequences) : a->N;
    switch (stage) {
    case BACK_CHECK: return 0;
    case BACK_ROWS: return 32 * BACK_QUERIES * (a->DK + a->DV);
    case BACK_CHUNKS_OF_KEYS: return 5 * a->group * rows * attn_sees(a) / back_spread(a) * (a->DK + a->DV);
    case BACK_SUM: return 8 * a->DK * back_spread(a);
    case BACK_D_SINKS: return 8 * a->B * a->N * a->DV;
    default:
        return 4 * BACK_QUERIES * BACK_KEYS * (a->DK + a->DV) *
               gg_ceil_div(a->B * a->H, k->d_mask->ne[0] * k->d_mask->ne[1]);
    }
}

static int64_t back_tasks(const gg_call *c, int stage) {
    const back k = back_open(c, NULL);
    const int64_t units = back_units(&k, stage);
    return units == 0 ? 0 : gg_ceil_div(units, gg_max(1, ATTN_TASK_FLOPS / gg_max(1, back_flops(&k, stage))));
}

static void back_run_unit(const back *k, int stage, int64_t u) {
    const attn *a = &k->a;
    if (stage == BACK_D_SINKS) back_sink(k, u);
    else if (stage == BACK_ROWS) {
        const int64_t blocks = gg_ceil_div(a->N, BACK_QUERIES), head = u / blocks, i = u % blocks * BACK_QUERIES;
        back_prepare(k, head / a->H, head % a->H, i, gg_min(a->N, i + BACK_QUERIES));
    } else if (stage == BACK_D_MASK) {
        const gg_tensor *m = k->d_mask;
        const int64_t across = gg_ceil_div(a->M, BACK_KEYS), down = gg_ceil_div(m->ne[2], BACK_QUERIES);
        const int64_t head = u / across / down;
        back_mask_tile(k, head / m->ne[1], head % m->ne[1], u / across % down * BACK_QUERIES, u % across * BACK_KEYS);
    } else if (back_spreads(a)) {
        const int64_t chunks = back_spread(a), head = u / chunks;
        back_unit(k, head / a->HK, head % a->HK, u % chunks);
    } else back_head(k, u / a->HK, u % a->HK);
}

static void back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const back k = back_open(c, scratch);
    const int64_t tasks = back_tasks(c, stage), units = back_units(&k, stage);
    const int64_t first = gg_cut(units, begin, tasks), last = gg_cut(units, end, tasks);
    if (stage == BACK_CHECK) attn_check(c, &k.a, BACK_CU_Q);
    else if (stage == BACK_SUM) back_sum(&k, first, last);
    else
        for (int64_t u = first; u < last; u++) back_run_unit(&k, stage, u);
}

static int64_t back_work(const gg_call *c) {
    const back k = back_open(c, NULL);
    int64_t floats = k.shared;
    if (k.qkv_gradient && back_spread(&k.a) > 1 && k.a.B > 0) {
        const attn_seq s = attn_sequence(&k.a, 0);
        chunk chunks[BACK_CHUNKS];
        const int64_t n = back_cut(&s, chunks);
        floats += back_partial(&k.a, chunks, n);
    }
    return floats * (int64_t)sizeof(float);
}

static int64_t back_scratch(const gg_call *c) { return back_open(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(flash_attn_back, .stages = BACK_STAGES, .tasks = back_tasks, .run = back_run, .work = back_work,
          .scratch = back_scratch);
