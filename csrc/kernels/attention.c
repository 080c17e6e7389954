/* Attention, forward and backward, without the score matrix.
 *
 *   q: [B, H, N, DK]   k: [B, HK, M, DK]   v: [B, HK, M, DV]   mask: [Bm, Hm, N or more, M]
 *   out, dout: [B, N, H, DV]   lse, dlse: [B, H, N]
 *
 * Query head h reads kv head h / (H / HK).  Query i sees the keys j <= i + shift; a mask of -inf hides others.
 * Hidden pairs contribute nothing, whatever lies in their rows of q, k, v, dout.
 *
 * Forward, a panel of GG_NR queries at a time, one query in each vector lane:
 *
 *   S^T = K (scale Q)^T    softmax down the columns    O^T = V^T P^T
 *
 * Backward, a tile of keys at a time, one key in each vector lane, five products:
 *
 *   P = exp((scale Q) K^T - lse)    dS = P (dO V^T - delta)    delta = rowsum(dO O) - dlse
 *   dV^T += dO^T P    dK^T += (scale Q)^T dS    dQ += dS (scale K)
 *
 * Each score is one FMA chain of scaled query and key in both, so P is exp(s - lse) of the very same s: for
 * a score of 1e30 too.  delta is a chain in the order of dO V^T: with one visible key dS is exactly 0.
 *
 * A product over keys or queries passes over hidden pairs with a weight of 0, which is harmless where the other
 * factor is finite.  Where it is not, which is found while packing, the product goes pair by pair: hidden
 * pairs carry the weight HIDDEN, a negative zero, which no exponential gives. */
#include "../convert.h"
#include "../microkernel.h"
#include "../pack.h"
#include "../vector_math.h"

enum {
    EXT_KEYS = 256,            /* keys whose scores a panel holds */
    BACK_KEYS = 128,           /* keys and ... */
    BACK_QUERIES = 96,         /* ... queries of a backward tile */
    ATTN_TASK_FLOPS = 1 << 19, /* the least that a task should hold, 5 to 10 us */
    BACK_UNITS = 32,           /* pieces into which the backward is cut if its kv heads are fewer ... */
    BACK_CHUNKS = 8,           /* ... but no head into more than this: each has a dq of its own */
};
enum { NO_CAUSAL, TOP_LEFT, BOTTOM_RIGHT };
enum { SRC_Q, SRC_K, SRC_V };
enum { EXT_MASK = SRC_V + 1 };
enum { EXT_OUT, EXT_LSE };
enum { BACK_OUT = SRC_V + 1, BACK_LSE, BACK_DOUT, BACK_MASK, BACK_DLSE };
enum { BACK_DQ, BACK_DK, BACK_DV };

static const float HIDDEN = -0.0f;
static const int32_t HIDDEN_BITS = INT32_MIN;
static const int32_t attn_lane[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

typedef struct attn {
    const gg_tensor *q, *k, *v, *mask; /* mask: NULL if there is none */
    int64_t B, H, HK, N, M, DK, DV;
    int64_t group; /* query heads of a kv head */
    int64_t shift; /* query i sees the keys j <= i + shift */
    float scale, max_bias, cap;
} attn;

static const gg_tensor *attn_given(const gg_tensor *t) { return t->data != NULL ? t : NULL; }

static attn attn_open(const gg_call *c, const gg_tensor *mask, float scale, float max_bias, float cap, int causal) {
    const gg_tensor *q = &c->src[SRC_Q], *k = &c->src[SRC_K], *v = &c->src[SRC_V];
    const int64_t N = q->ne[2], M = k->ne[2];
    const int64_t shifts[] = { [NO_CAUSAL] = M, [TOP_LEFT] = 0, [BOTTOM_RIGHT] = M - N };
    return (attn){
        .q = q,
        .k = k,
        .v = v,
        .mask = attn_given(mask), //
        .B = q->ne[0],
        .H = q->ne[1],
        .HK = k->ne[1],
        .N = N,
        .M = M,
        .DK = q->ne[3],
        .DV = v->ne[3],
        .group = k->ne[1] ? q->ne[1] / k->ne[1] : 1,
        .shift = shifts[causal],
        .scale = scale,
        .max_bias = max_bias,
        .cap = cap,
    };
}

/* Number of keys that query i sees, before any mask. */
static inline int64_t attn_sees(const attn *a, int64_t i) { return gg_max(0, gg_min(i + 1 + a->shift, a->M)); }
/* The first query that sees key j. */
static inline int64_t attn_first(const attn *a, int64_t j) { return gg_max(0, gg_min(j - a->shift, a->N)); }

static inline const float *attn_row(const gg_tensor *t, int64_t b, int64_t h, int64_t i) {
    return (const float *)gg_at(t, b, h, i);
}
static inline int64_t attn_step(const gg_tensor *t, int axis) { return t->nb[axis] / (int64_t)sizeof(float); }

/* -- transposing ------------------------------------------------------------------------------------------ */

/* The part of a square that rows and cols leave of it, zero elsewhere. */
static __attribute__((noinline)) void attn_copy_edge(const float *x, int64_t x_row, int64_t rows, int64_t cols,
                                                     float edge[GG_VW * GG_VW]) {
    memset(edge, 0, GG_VW * GG_VW * sizeof(float));
    for (int64_t r = 0; r < gg_min(rows, GG_VW); r++)
        for (int64_t c = 0; c < gg_min(cols, GG_VW); c++) edge[r * GG_VW + c] = x[r * x_row + c];
}

/* The square whose corner is x, zero outside of rows and cols, turned: square[c] lane r = x[r][c]. */
GG_INLINE void attn_load_turned(const float *x, int64_t x_row, int64_t rows, int64_t cols, vf square[GG_VW]) {
    float edge[GG_VW * GG_VW];
    if (rows < GG_VW || cols < GG_VW) {
        attn_copy_edge(x, x_row, rows, cols, edge);
        x = edge, x_row = GG_VW;
    }
#pragma GCC unroll 16
    for (int i = 0; i < GG_VW; i++, x += x_row) square[i] = vf_load(x);
    vf_transpose(square);
}

/* y[c][r] = factor * x[r][c] for r < rows and c < cols, and 0 for rows <= r < width. */
static void attn_transpose(const float *x, int64_t x_row, int64_t rows, int64_t cols, float factor, float *y,
                           int64_t y_row, int64_t width) {
    for (int64_t r = 0; r < width; r += GG_VW)
        for (int64_t c = 0; c < cols; c += GG_VW) {
            vf square[GG_VW];
            attn_load_turned(x + r * x_row + c, x_row, rows - r, cols - c, square);
            float edge[GG_VW * GG_VW], *to = y + c * y_row + r;
            const int whole = r + GG_VW <= width && c + GG_VW <= cols;
            float *put = whole ? to : edge;
            const int64_t put_row = whole ? y_row : GG_VW;
#pragma GCC unroll 16
            for (int i = 0; i < GG_VW; i++, put += put_row) vf_store(put, square[i] * factor);
            if (!whole)
                for (int64_t i = 0; i < gg_min(GG_VW, cols - c); i++)
                    memcpy(to + i * y_row, edge + i * GG_VW, gg_min(GG_VW, width - r) * sizeof(float));
        }
}

/* y[r][c] = factor * x[r][c], y without gaps.  Returns whether all of it is finite. */
static int attn_pack(const float *x, int64_t x_row, int64_t rows, int64_t cols, float factor, float *y) {
    vf odd = vf_zero();
    float odd_tail = 0;
    for (int64_t r = 0; r < rows; r++, x += x_row, y += cols) {
        int64_t c = 0;
        for (; c + GG_VW <= cols; c += GG_VW) {
            const vf piece = vf_load(x + c);
            odd += piece * 0.0f;
            vf_store(y + c, piece * factor);
        }
        for (; c < cols; c++) {
            odd_tail += x[c] * 0.0f;
            y[c] = x[c] * factor;
        }
    }
    return vf_sum(odd) + odd_tail == 0;
}

static int attn_finite(const float *x, int64_t x_row, int64_t rows, int64_t cols) {
    vf odd = vf_zero();
    float odd_tail = 0;
    for (int64_t r = 0; r < rows; r++, x += x_row) {
        int64_t c = 0;
        for (; c + GG_VW <= cols; c += GG_VW) odd += vf_load(x + c) * 0.0f;
        for (; c < cols; c++) odd_tail += x[c] * 0.0f;
    }
    return vf_sum(odd) + odd_tail == 0;
}

/* Asks for rows that will be needed soon. */
GG_INLINE void attn_prefetch(const float *x, int64_t x_row, int64_t rows, int64_t cols, const int write) {
    for (int64_t r = 0; r < rows; r++, x += x_row)
        for (int64_t c = 0; c < cols; c += 16) {
            if (write) __builtin_prefetch(x + c, 1, 2);
            else __builtin_prefetch(x + c, 0, 2);
        }
}

/* -- softcap ---------------------------------------------------------------------------------------------- */

/* s = cap tanh(s / cap), and where asked for its derivative.  Not to be inlined: the product must be rounded
 * before anything is added to it, or the backward would see other scores than the forward. */
static __attribute__((noinline)) void attn_cap(float *s, int64_t n, float cap, float *slope) {
    for (int64_t i = 0; i < n; i += GG_VW) {
        const vf t = vf_tanh(vf_load(s + i) / cap);
        vf_store(s + i, t * cap);
        if (slope != NULL) vf_store(slope + i, 1.0f - t * t);
    }
}

/* -- products --------------------------------------------------------------------------------------------- */

/* gg_micro of a single vector, onto what c holds: c[m][v] += A B[.., v]. */
GG_INLINE void attn_micro_thin(const int M, int64_t depth, const float *A, int64_t a_row, int64_t a_col, const float *B,
                               int64_t b_row, const int v, vf c[GG_MR][GG_NV]) {
    vf sum[GG_MR];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sum[m] = c[m][v];
    B += v * GG_VW;
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k++, A += a_col, B += b_row) {
        const vf b = vf_load(B);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) sum[m] += A[m * a_row] * b;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) c[m][v] = sum[m];
}

/* gg_micro onto what c holds, without the pairs that P hides: P[m * p_m + k * p_k + j * p_j], with p_j 0 or 1, is
 * the weight of (m, k, j).  The same bits where all factors are finite. */
static void attn_micro_visible(int M, int64_t depth, const float *A, int64_t a_row, int64_t a_col, const float *B,
                               int64_t b_row, const float *P, int64_t p_m, int64_t p_k, int p_j, vf c[GG_MR][GG_NV]) {
    for (int m = 0; m < M; m++)
        for (int j = 0; j < GG_NV; j++) {
            vf sum = c[m][j];
            for (int64_t k = 0; k < depth; k++) {
                const float *p = P + m * p_m + k * p_k;
                const vf weight = p_j ? vf_load(p + j * GG_VW) : vf_set1(*p);
                const vf more = sum + A[m * a_row + k * a_col] * vf_load(B + k * b_row + j * GG_VW);
                sum = vf_select((vi)weight == HIDDEN_BITS, sum, more);
            }
            c[m][j] = sum;
        }
}

/* -- forward ---------------------------------------------------------------------------------------------- */

typedef struct ext {
    attn a;
    const gg_tensor *out, *lse;
    float *qt;   /* [DK][GG_NR], scaled */
    float *ot;   /* [DV][GG_NR] */
    float *s;    /* [EXT_KEYS][GG_NR]: scores, then weights */
    float *mask; /* [EXT_KEYS][GG_NR] */
    float *rows; /* [GG_NR][EXT_KEYS]: of a mask that is not f32 */
    int64_t floats;
} ext;

static float *attn_take(float *base, int64_t *used, int64_t floats) {
    float *here = base ? base + *used : NULL;
    *used += gg_round_up(floats, 16);
    return here;
}

static ext ext_open(const gg_call *c, float *scratch) {
    const gg_flash_attn_ext_attrs *at = c->attrs;
    ext e = { .a = attn_open(c, &c->src[EXT_MASK], at->scale, at->max_bias, at->logit_softcap, at->causal),
              .out = &c->dst[EXT_OUT],
              .lse = &c->dst[EXT_LSE] };
    e.qt = attn_take(scratch, &e.floats, e.a.DK * GG_NR);
    e.ot = attn_take(scratch, &e.floats, e.a.DV * GG_NR);
    e.s = attn_take(scratch, &e.floats, EXT_KEYS * GG_NR);
    e.mask = attn_take(scratch, &e.floats, e.a.mask ? EXT_KEYS * GG_NR : 0);
    e.rows = attn_take(scratch, &e.floats, e.a.mask && e.a.mask->dtype != GG_F32 ? EXT_KEYS * GG_NR : 0);
    return e;
}

/* ggml's ALiBi: 2^(-max_bias / n)^(h + 1) for the first n heads, n a power of two; between those for the rest. */
static float ext_slope(const attn *a, int64_t h) {
    if (a->max_bias <= 0) return 1.0f;
    int64_t n = 1;
    while (2 * n <= a->H) n *= 2;
    const float m0 = powf(2.0f, -a->max_bias / n), m1 = powf(2.0f, -a->max_bias / 2 / n);
    return h < n ? powf(m0, h + 1) : powf(m1, 2 * (h - n) + 1);
}

static int ext_seen(const float *mask, int64_t nq) {
    for (int64_t i = 0; i < nq; i++)
        if (mask[i] != -INFINITY) return 1;
    return 0;
}

/* The mask of keys *lo..*hi, at most EXT_KEYS, into e->mask; narrows them to those that some query sees. */
static void ext_mask(const ext *e, int64_t b, int64_t h, int64_t q0, int64_t nq, int64_t *lo, int64_t *hi) {
    const gg_tensor *mask = e->a.mask;
    const int64_t n = *hi - *lo;
    const char *row = gg_at(mask, b % mask->ne[0], h % mask->ne[1], q0);
    if (mask->dtype == GG_F32)
        attn_transpose((const float *)row + *lo, attn_step(mask, 2), nq, n, ext_slope(&e->a, h), e->mask, GG_NR, GG_NR);
    else {
        for (int64_t i = 0; i < nq; i++, row += mask->nb[2])
            gg_to_f32_row(mask->dtype, row + *lo * 2, e->rows + i * EXT_KEYS, n);
        attn_transpose(e->rows, EXT_KEYS, nq, n, ext_slope(&e->a, h), e->mask, GG_NR, GG_NR);
    }
    int64_t first = 0, end = n;
    while (end > 0 && !ext_seen(e->mask + (end - 1) * GG_NR, nq)) end--;
    while (first < end && !ext_seen(e->mask + first * GG_NR, nq)) first++;
    if (first > 0) memmove(e->mask, e->mask + first * GG_NR, (end - first) * GG_NR * sizeof(float));
    *hi = *lo + end;
    *lo += first;
}

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
static void ext_scores(const ext *e, const float *k, int64_t n, int64_t whole) {
    const int64_t DK = e->a.DK, k_row = attn_step(e->a.k, 2);
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

/* Hides key j of n from the lanes before `ahead` + j. */
static void ext_hide(float *s, int64_t n, int64_t ahead) {
    for (int64_t j = 0; j < n; j++)
        for (int v = 0; v < GG_NV; v++) {
            float *at = s + j * GG_NR + v * GG_VW;
            const vi hidden = vi_load(attn_lane) + v * GG_VW < (int32_t)(ahead + j);
            vf_store(at, vf_select(hidden, vf_set1(-INFINITY), vf_load(at)));
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

/* Writes HIDDEN over the weights of n keys where the mask (or NULL) or causality hides them. */
static void ext_mark(float *p, const float *mask, int64_t n, int64_t ahead) {
    for (int64_t j = 0; j < n; j++)
        for (int v = 0; v < GG_NV; v++) {
            const int64_t at = j * GG_NR + v * GG_VW;
            vi hidden = vi_load(attn_lane) + v * GG_VW < (int32_t)gg_max(0, gg_min(ahead + j, GG_NR));
            if (mask != NULL) hidden |= vf_load(mask + at) == -INFINITY;
            vf_store(p + at, vf_select(hidden, vf_set1(HIDDEN), vf_load(p + at)));
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
static void ext_values(const ext *e, const float *v, int64_t n, int64_t whole, const vf keep[GG_NV]) {
    const int64_t DV = e->a.DV, v_row = attn_step(e->a.v, 2);
    int64_t d = 0;
    for (; d + GG_MR <= DV; d += GG_MR) ext_value_tile(GG_MR, n, whole, v + d, v_row, e->s, keep, e->ot + d * GG_NR);
    GG_EACH_M(DV - d, ext_value_tile, n, whole, v + d, v_row, e->s, keep, e->ot + d * GG_NR)
}

static void ext_visible_values(const ext *e, const float *v, int64_t n, const vf keep[GG_NV]) {
    for (int64_t d = 0; d < e->a.DV; d++) {
        vf c[GG_MR][GG_NV] = { 0 };
        attn_micro_visible(1, n, v + d, 1, attn_step(e->a.v, 2), e->s, GG_NR, e->s, 0, GG_NR, 1, c);
        ext_put_values(1, c, keep, e->ot + d * GG_NR);
    }
}

/* Queries q0 and up to GG_NR - 1 more of one head. */
static void ext_panel(const ext *e, int64_t b, int64_t h, int64_t q0) {
    const attn *a = &e->a;
    const int64_t hk = h / a->group, nq = gg_min(GG_NR, a->N - q0);
    const int64_t all_see = attn_sees(a, q0), some_see = attn_sees(a, q0 + nq - 1);
    const int64_t k_row = attn_step(a->k, 2), v_row = attn_step(a->v, 2);
    const float *k = attn_row(a->k, b, hk, 0), *v = attn_row(a->v, b, hk, 0);

    attn_transpose(attn_row(a->q, b, h, q0), attn_step(a->q, 2), nq, a->DK, a->scale, e->qt, GG_NR, GG_NR);
    memset(e->ot, 0, a->DV * GG_NR * sizeof(float));
    if (q0 > 0) attn_prefetch(attn_row(a->q, b, h, q0 - GG_NR), attn_step(a->q, 2), GG_NR, a->DK, 0);
    attn_prefetch((float *)gg_at(e->out, b, q0, h), attn_step(e->out, 1), nq, a->DV, 1);
    vf max[GG_NV], sum[GG_NV], keep[GG_NV];
    for (int j = 0; j < GG_NV; j++) max[j] = vf_set1(-INFINITY), sum[j] = vf_zero();

    for (int64_t k0 = 0; k0 < some_see; k0 += EXT_KEYS) {
        int64_t lo = k0, hi = gg_min(k0 + EXT_KEYS, some_see);
        if (a->mask) ext_mask(e, b, h, q0, nq, &lo, &hi);
        if (lo >= hi) continue;
        const int64_t n = hi - lo, open = gg_max(0, gg_min(n, all_see - lo)); /* keys that causality hides from none */
        const int64_t whole = gg_max(0, gg_min(n, q0 + a->shift + (GG_NV - 1) * GG_VW - lo + 1));
        ext_scores(e, k + lo * k_row, n, whole);
        if (a->cap > 0) attn_cap(e->s, n * GG_NR, a->cap, NULL);
        if (a->mask) ext_add_mask(e->s, e->mask, n * GG_NR);
        if (open < n) ext_hide(e->s + open * GG_NR, n - open, lo + open - a->shift - q0);

        const int64_t holes = a->mask ? 0 : open; /* the first key that may be hidden from some lane */
        const int careful = holes < n && !attn_finite(v + (lo + holes) * v_row, v_row, n - holes, a->DV);
        vf block_max[GG_NV], block_sum[GG_NV], base[GG_NV];
        for (int j = 0; j < GG_NV; j++) block_max[j] = max[j], block_sum[j] = vf_zero();
        for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < GG_NV; j++) block_max[j] = vf_max(block_max[j], vf_load(e->s + i * GG_NR + j * GG_VW));
        for (int j = 0; j < GG_NV; j++) {
            base[j] = vf_select(block_max[j] == -INFINITY, vf_zero(), block_max[j]); /* no key yet: exp(-inf - 0) */
            keep[j] = vf_exp_neg(max[j] - base[j]);
            max[j] = block_max[j];
        }
        ext_exp(0, e->s, whole, base, block_sum);
        ext_exp(GG_NV - 1, e->s + whole * GG_NR, n - whole, base, block_sum);
        if (careful) ext_mark(e->s, a->mask ? e->mask : NULL, n, lo - a->shift - q0);
        for (int j = 0; j < GG_NV; j++) sum[j] = sum[j] * keep[j] + block_sum[j];
        if (careful) ext_visible_values(e, v + lo * v_row, n, keep);
        else ext_values(e, v + lo * v_row, n, whole, keep);
    }

    float lse[GG_NR];
    for (int j = 0; j < GG_NV; j++) {
        const vf inverse = vf_select(sum[j] == 0.0f, vf_zero(), 1.0f / sum[j]);
        for (int64_t d = 0; d < a->DV; d++) {
            float *o = e->ot + d * GG_NR + j * GG_VW;
            vf_store(o, vf_load(o) * inverse);
        }
        vf_store(lse + j * GG_VW, max[j] + vf_log(sum[j]));
    }
    attn_transpose(e->ot, GG_NR, a->DV, nq, 1.0f, (float *)gg_at(e->out, b, q0, h), attn_step(e->out, 1), a->DV);
    memcpy((float *)gg_at(e->lse, 0, b, h) + q0, lse, nq * sizeof(float));
}

/* A unit is a panel; a task holds as many as make it worth handing over. */
static int64_t ext_units(const attn *a) { return a->B * a->H * gg_ceil_div(a->N, GG_NR); }

static int64_t ext_tasks(const gg_call *c, int stage) {
    (void)stage;
    const ext e = ext_open(c, NULL);
    const int64_t units = ext_units(&e.a), flops = 2 * GG_NR * e.a.M * (e.a.DK + e.a.DV);
    return gg_ceil_div(units, gg_max(1, ATTN_TASK_FLOPS / gg_max(1, flops)));
}

static void ext_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const ext e = ext_open(c, scratch);
    const int64_t units = ext_units(&e.a), tasks = ext_tasks(c, stage), panels = gg_ceil_div(e.a.N, GG_NR);
    const int64_t last = gg_cut(units, end, tasks);
    for (int64_t u = gg_cut(units, begin, tasks); u < last; u++) {
        const int64_t head = u / panels, panel = panels - 1 - u % panels; /* the longest of a causal head first */
        ext_panel(&e, head / e.a.H, head % e.a.H, panel * GG_NR);
    }
}

static int64_t ext_scratch(const gg_call *c) { return ext_open(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(flash_attn_ext, .stages = 1, .tasks = ext_tasks, .run = ext_run, .scratch = ext_scratch);

/* -- backward --------------------------------------------------------------------------------------------- */

/* A unit is a chunk of the keys of one kv head: it owns their dk and dv.  A head of a single chunk has dq in place;
 * else chunk 0 has, the others have it in call->work, and a second stage adds them up in order. */
typedef struct back {
    attn a;
    const gg_tensor *out, *lse, *dout, *dlse; /* dlse: NULL if there is none */
    const gg_tensor *dq, *dk, *dv;
    float *partial; /* [chunks - 1][B, H, N, DK] */
    int64_t chunks;
    float *delta;     /* [group][N] */
    float *lse_base;  /* [group][N]: lse, but 0 for a row without keys, whose weights are 0 and not NaN */
    float *kt, *vt;   /* [DK][BACK_KEYS], [DV][BACK_KEYS] */
    float *kp;        /* panels of GG_NR columns of scale K: [BACK_KEYS][GG_NR] each */
    float *dkt, *dvt; /* [DK][BACK_KEYS], [DV][BACK_KEYS] */
    float *q, *g;     /* [BACK_QUERIES][DK] of scale Q, [BACK_QUERIES][DV] of dO */
    float *p, *ds;    /* [BACK_QUERIES][BACK_KEYS] */
    float *mask;      /* [BACK_QUERIES][BACK_KEYS] */
    int64_t floats;
} back;

static back back_open(const gg_call *c, float *scratch) {
    const gg_flash_attn_back_attrs *at = c->attrs;
    back k = { .a = attn_open(c, &c->src[BACK_MASK], at->scale, 0, at->logit_softcap, at->causal),
               .out = &c->src[BACK_OUT],
               .lse = &c->src[BACK_LSE],
               .dout = &c->src[BACK_DOUT],
               .dlse = attn_given(&c->src[BACK_DLSE]),
               .dq = &c->dst[BACK_DQ],
               .dk = &c->dst[BACK_DK],
               .dv = &c->dst[BACK_DV],
               .partial = c->work };
    const int64_t DK = k.a.DK, DV = k.a.DV, heads = k.a.B * k.a.HK;
    k.chunks =
        gg_min(gg_min(BACK_CHUNKS, gg_ceil_div(BACK_UNITS, gg_max(1, heads))), gg_ceil_div(k.a.M, 2 * BACK_KEYS));
    k.chunks = gg_max(1, k.chunks);
    k.delta = attn_take(scratch, &k.floats, k.a.group * k.a.N);
    k.lse_base = attn_take(scratch, &k.floats, k.a.group * k.a.N);
    k.kt = attn_take(scratch, &k.floats, DK * BACK_KEYS);
    k.vt = attn_take(scratch, &k.floats, DV * BACK_KEYS);
    k.kp = attn_take(scratch, &k.floats, gg_round_up(DK, GG_NR) * BACK_KEYS);
    k.dkt = attn_take(scratch, &k.floats, DK * BACK_KEYS);
    k.dvt = attn_take(scratch, &k.floats, DV * BACK_KEYS);
    k.q = attn_take(scratch, &k.floats, BACK_QUERIES * DK);
    k.g = attn_take(scratch, &k.floats, BACK_QUERIES * DV);
    k.p = attn_take(scratch, &k.floats, BACK_QUERIES * BACK_KEYS);
    k.ds = attn_take(scratch, &k.floats, BACK_QUERIES * BACK_KEYS);
    k.mask = attn_take(scratch, &k.floats, k.a.mask ? BACK_QUERIES * BACK_KEYS : 0);
    return k;
}

/* The first key of a chunk.  Chunks hold whole tiles, and about the same number of visible pairs. */
static int64_t back_chunk(const back *k, int64_t chunk) {
    const attn *a = &k->a;
    if (chunk == k->chunks) return a->M;
    int64_t all = 0, sum = 0, j = 0;
    for (int64_t t = 0; t < a->M; t += BACK_KEYS) all += a->N - attn_first(a, t) + BACK_QUERIES;
    for (; j < a->M && sum * k->chunks < all * chunk; j += BACK_KEYS) sum += a->N - attn_first(a, j) + BACK_QUERIES;
    return gg_min(j, a->M);
}

/* delta[i] = dout[i] . out[i] - dlse[i], each dot product one chain; and the lse to subtract. */
static void back_rows(const back *k, int64_t b, int64_t h, float *delta, float *lse_base) {
    const int64_t N = k->a.N, DV = k->a.DV, g_row = attn_step(k->dout, 1), o_row = attn_step(k->out, 1);
    for (int64_t i = 0; i < N; i += GG_VW) {
        const float *g = attn_row(k->dout, b, i, h), *o = attn_row(k->out, b, i, h);
        vf sum = vf_zero();
        for (int64_t d = 0; d < DV; d += GG_VW) {
            vf gs[GG_VW], os[GG_VW];
            attn_load_turned(g + d, g_row, N - i, DV - d, gs);
            attn_load_turned(o + d, o_row, N - i, DV - d, os);
#pragma GCC unroll 16
            for (int c = 0; c < GG_VW; c++) sum += gs[c] * os[c];
        }
        if (i + GG_VW <= N) vf_store(delta + i, sum);
        else vf_store_n(delta + i, sum, (int)(N - i));
    }
    if (k->dlse != NULL) {
        const float *dlse = attn_row(k->dlse, 0, b, h);
        for (int64_t i = 0; i < N; i++) delta[i] -= dlse[i];
    }
    const float *lse = attn_row(k->lse, 0, b, h);
    for (int64_t i = 0; i < N; i++) lse_base[i] = lse[i] == -INFINITY ? 0 : lse[i];
}

/* What the products of one (query tile, key tile) share.  Rows and keys count from the tile's first. */
typedef struct pair {
    const back *k;
    const float *lse, *delta; /* of row 0 */
    int64_t rows, keys;
    int64_t ahead; /* row i sees the keys j <= i + ahead */
    int careful;   /* some factor is not finite, and some pair hidden */
} pair;

/* The first row of the tiles in which some row sees key j: a multiple of GG_MR. */
static inline int64_t back_from(const pair *t, int64_t j) {
    return gg_min(t->rows, gg_max(0, j - t->ahead) / GG_MR * GG_MR);
}

/* The last key that row i sees, counted from key j, of a tile's GG_NR. */
static inline int32_t back_last_lane(const pair *t, int64_t i, int64_t j) {
    return (int32_t)gg_max(-1, gg_min(i + t->ahead - j, GG_NR));
}

/* Scores of M rows to weights, in place: softcap, mask, causality.  Leaves the softcap's derivative in ds. */
static void back_weights(const pair *t, int64_t i, int64_t rows, int64_t j0) {
    const back *k = t->k;
    for (int64_t r = i; r < i + rows; r++) {
        if (k->a.cap > 0) attn_cap(k->p + r * BACK_KEYS + j0, GG_NR, k->a.cap, k->ds + r * BACK_KEYS + j0);
        for (int64_t j = j0; j < j0 + GG_NR; j += GG_VW) {
            float *p = k->p + r * BACK_KEYS + j;
            vi hidden = vi_load(attn_lane) > back_last_lane(t, r, j);
            vf s = vf_load(p);
            if (k->a.mask) {
                const vf add = vf_load(k->mask + r * BACK_KEYS + j);
                hidden |= add == -INFINITY;
                s += add;
            }
            vf_store(p, vf_select(hidden, vf_set1(HIDDEN), vf_exp_neg(s - t->lse[r])));
        }
    }
}

GG_INLINE void back_product_tile(const int M, int64_t depth, const float *a, const float *bt, float *to) {
    vf c[GG_MR][GG_NV];
    gg_micro(M, depth, a, depth, 1, bt, BACK_KEYS, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) vf_store(to + m * BACK_KEYS + v * GG_VW, c[m][v]);
}

static void back_product(int64_t M, int64_t depth, const float *a, const float *bt, float *to) {
    GG_EACH_M(M, back_product_tile, depth, a, bt, to)
}

/* P and dS of up to GG_MR rows from i and GG_NR keys from j, whatever the mask and softcap. */
static void back_general_tile(const pair *t, int64_t i, int64_t rows, int64_t j) {
    const back *k = t->k;
    float dp[GG_MR * BACK_KEYS];
    back_product(rows, k->a.DK, k->q + i * k->a.DK, k->kt + j, k->p + i * BACK_KEYS + j);
    back_weights(t, i, rows, j);
    back_product(rows, k->a.DV, k->g + i * k->a.DV, k->vt + j, dp);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t v = 0; v < GG_NR; v += GG_VW) {
            const vf weight = vf_load(k->p + (i + m) * BACK_KEYS + j + v);
            float *to = k->ds + (i + m) * BACK_KEYS + j + v;
            vf x = weight * (vf_load(dp + m * BACK_KEYS + v) - t->delta[i + m]);
            if (k->a.cap > 0) x *= vf_load(to);
            vf_store(to, vf_select((vi)weight == HIDDEN_BITS, vf_zero(), x));
        }
}

/* The same without mask and softcap: exp and dS while the products are in registers. */
GG_INLINE void back_pair_tile(const int M, const int causal, const int whole, const pair *t, int64_t i, int64_t j) {
    const back *k = t->k;
    const int64_t DK = k->a.DK, DV = k->a.DV;
    float *p = k->p + i * BACK_KEYS + j, *ds = k->ds + i * BACK_KEYS + j;
    const int vectors = whole ? GG_NV : 1;
    vf c[GG_MR][GG_NV] = { 0 };
    if (whole) gg_micro(M, DK, k->q + i * DK, DK, 1, k->kt + j, BACK_KEYS, c);
    else attn_micro_thin(M, DK, k->q + i * DK, DK, 1, k->kt + j, BACK_KEYS, 0, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        const vf lse = vf_set1(t->lse[i + m]);
        const vi last = vi_set1(back_last_lane(t, i + m, j));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf x = vf_exp_neg(c[m][v] - lse);
            if (causal) x = vf_select(vi_load(attn_lane) + v * GG_VW > last, vf_set1(HIDDEN), x);
            vf_store(p + m * BACK_KEYS + v * GG_VW, x);
        }
    }
    if (whole) gg_micro(M, DV, k->g + i * DV, DV, 1, k->vt + j, BACK_KEYS, c);
    else {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) c[m][0] = vf_zero();
        attn_micro_thin(M, DV, k->g + i * DV, DV, 1, k->vt + j, BACK_KEYS, 0, c);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        const vf delta = vf_set1(t->delta[i + m]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const vf weight = vf_load(p + m * BACK_KEYS + v * GG_VW);
            vf x = weight * (c[m][v] - delta);
            if (causal) x = vf_select((vi)weight == HIDDEN_BITS, vf_zero(), x);
            vf_store(ds + m * BACK_KEYS + v * GG_VW, x);
        }
    }
}

static void back_pairs(const pair *t) {
    const int general = t->k->a.mask || t->k->a.cap > 0;
    for (int64_t j = 0; j < t->keys; j += GG_NR) {
        const int64_t last_key = gg_min(j + GG_NR, t->keys) - 1, whole = back_from(t, j + GG_VW);
        for (int64_t i = back_from(t, j); i < t->rows; i += GG_MR) {
            const int64_t M = gg_min(GG_MR, t->rows - i);
            if (general) back_general_tile(t, i, M, j);
            else if (M == GG_MR && last_key <= i + t->ahead) back_pair_tile(GG_MR, 0, 1, t, i, j);
            else if (M == GG_MR && i < whole && !t->careful) back_pair_tile(GG_MR, 1, 0, t, i, j);
            else { GG_EACH_M(M, back_pair_tile, 1, 1, t, i, j) }
        }
    }
}

GG_INLINE void back_add_columns(const int M, vf c[GG_MR][GG_NV], float *sum) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) {
            float *to = sum + m * BACK_KEYS + v * GG_VW;
            vf_store(to, vf_load(to) + c[m][v]);
        }
}

/* n rows for all vectors, and the `thin` rows before them for the first. */
GG_INLINE void back_column_tile(const int M, int64_t n, int64_t thin, const float *a, int64_t a_col, const float *w,
                                float *sum) {
    vf c[GG_MR][GG_NV];
    gg_micro(M, n, a, 1, a_col, w, BACK_KEYS, c);
    attn_micro_thin(M, thin, a - thin * a_col, 1, a_col, w - thin * BACK_KEYS, BACK_KEYS, 0, c);
    back_add_columns(M, c, sum);
}

/* sum[D][keys] += a[rows][D]^T w[rows][keys]: dv from dout and P, dk from q and dS. */
static void back_columns(const pair *t, const float *a, int64_t D, const float *w, float *sum) {
    for (int64_t j = 0; j < t->keys; j += GG_NR) {
        const int64_t from = back_from(t, j), i = back_from(t, j + GG_VW), n = t->rows - i, thin = i - from;
        if (from == t->rows) break;
        const float *ai = a + i * D, *wi = w + i * BACK_KEYS + j, *pi = t->k->p + i * BACK_KEYS + j;
        float *to = sum + j;
        int64_t d = 0;
        if (t->careful)
            for (; d < D; d++) {
                vf c[GG_MR][GG_NV] = { 0 };
                attn_micro_visible(1, n, ai + d, 1, D, wi, BACK_KEYS, pi, 0, BACK_KEYS, 1, c);
                attn_micro_visible(1, thin, ai + d - thin * D, 1, D, wi - thin * BACK_KEYS, BACK_KEYS,
                                   pi - thin * BACK_KEYS, 0, BACK_KEYS, 1, c);
                back_add_columns(1, c, to + d * BACK_KEYS);
            }
        for (; d + GG_MR <= D; d += GG_MR) back_column_tile(GG_MR, n, thin, ai + d, D, wi, to + d * BACK_KEYS);
        GG_EACH_M(D - d, back_column_tile, n, thin, ai + d, D, wi, to + d * BACK_KEYS)
    }
}

/* dq = c, or dq += c, for M rows and the columns from d that there are. */
GG_INLINE void back_put_queries(const int M, const int vectors, vf c[GG_MR][GG_NV], float *dq, int64_t DK, int64_t d,
                                int first) {
    if (d + vectors * GG_VW <= DK) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                float *to = dq + m * DK + d + v * GG_VW;
                vf_store(to, first ? c[m][v] : vf_load(to) + c[m][v]);
            }
    } else {
        float tile[GG_MR * GG_NR];
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) vf_store(tile + m * GG_NR + v * GG_VW, c[m][v]);
        for (int64_t m = 0; m < M; m++)
            for (int64_t e = d; e < DK; e++) {
                const float x = tile[m * GG_NR + e - d];
                dq[m * DK + e] = first ? x : dq[m * DK + e] + x;
            }
    }
}

GG_INLINE void back_query_tile(const int M, const pair *t, int64_t i, int64_t n, float *dq, int first) {
    const back *k = t->k;
    const int64_t DK = k->a.DK;
    const float *ds = k->ds + i * BACK_KEYS;
    for (int64_t d = 0; d < DK; d += GG_NR) {
        const float *kp = k->kp + d * BACK_KEYS;
        vf c[GG_MR][GG_NV] = { 0 };
        if (DK - d <= GG_VW) {
            attn_micro_thin(M, n, ds, BACK_KEYS, 1, kp, GG_NR, 0, c);
            back_put_queries(M, 1, c, dq, DK, d, first);
        } else {
            gg_micro(M, n, ds, BACK_KEYS, 1, kp, GG_NR, c);
            back_put_queries(M, GG_NV, c, dq, DK, d, first);
        }
    }
}

static void back_visible_queries(const pair *t, int M, int64_t i, int64_t n, float *dq, int first) {
    const back *k = t->k;
    for (int64_t d = 0; d < k->a.DK; d += GG_NR) {
        vf c[GG_MR][GG_NV] = { 0 };
        attn_micro_visible(M, n, k->ds + i * BACK_KEYS, BACK_KEYS, 1, k->kp + d * BACK_KEYS, GG_NR,
                           k->p + i * BACK_KEYS, BACK_KEYS, 1, 0, c);
        for (int m = 0; m < M; m++) back_put_queries(1, GG_NV, c + m, dq + m * k->a.DK, k->a.DK, d, first);
    }
}

/* dq[rows][DK] = dS (scale K), or += after the first key tile. */
static void back_queries(const pair *t, float *dq, int first) {
    for (int64_t i = 0; i < t->rows; i += GG_MR) {
        const int M = (int)gg_min(GG_MR, t->rows - i);
        const int64_t n = gg_min(t->keys, i + M + t->ahead); /* keys that the last of these rows sees */
        float *to = dq + i * t->k->a.DK;
        if (t->careful) back_visible_queries(t, M, i, n, to, first);
        else GG_EACH_M(M, back_query_tile, t, i, n, to, first)
    }
}

/* Copies the mask of rows and keys; keys beyond the last one are hidden.  Returns whether some pair is visible. */
static int back_mask(const back *k, int64_t b, int64_t h, int64_t i0, int64_t rows, int64_t j0, int64_t keys) {
    const gg_tensor *mask = k->a.mask;
    int seen = 0;
    for (int64_t i = 0; i < rows; i++) {
        float *to = k->mask + i * BACK_KEYS;
        const char *from = gg_at(mask, b % mask->ne[0], h % mask->ne[1], i0 + i);
        gg_to_f32_row(mask->dtype, from + j0 * gg_float_bytes(mask->dtype), to, keys);
        for (int64_t j = 0; j < keys; j++) seen |= to[j] != -INFINITY;
        for (int64_t j = keys; j < gg_round_up(keys, GG_NR); j++) to[j] = -INFINITY;
    }
    return seen;
}

/* One tile of keys, j0..j1 of kv head hk, against every query that sees them. */
static void back_key_tile(const back *k, int64_t b, int64_t hk, int64_t j0, int64_t j1, float *dq, int first) {
    const attn *a = &k->a;
    const int64_t keys = j1 - j0, wide = gg_round_up(keys, GG_NR), DK = a->DK, DV = a->DV;
    const int64_t k_row = attn_step(a->k, 2), v_row = attn_step(a->v, 2), g_row = attn_step(k->dout, 1);
    const float *kj = attn_row(a->k, b, hk, j0), *vj = attn_row(a->v, b, hk, j0);
    attn_transpose(kj, k_row, keys, DK, 1.0f, k->kt, BACK_KEYS, wide);
    attn_transpose(vj, v_row, keys, DV, 1.0f, k->vt, BACK_KEYS, wide);
    for (int64_t d = 0; d < DK; d += GG_VW) {
        float *to = k->kp + d / GG_NR * GG_NR * BACK_KEYS + d % GG_NR;
        for (int64_t j = 0; j < keys; j++) {
            const float *from = kj + j * k_row + d;
            const vf piece = d + GG_VW <= DK ? vf_load(from) : vf_load_n(from, (int)(DK - d), 0);
            vf_store(to + j * GG_NR, piece * a->scale);
        }
    }
    const int finite = attn_finite(kj, k_row, keys, DK) && attn_finite(vj, v_row, keys, DV);
    memset(k->dkt, 0, DK * BACK_KEYS * sizeof(float));
    memset(k->dvt, 0, DV * BACK_KEYS * sizeof(float));

    for (int64_t g = 0; g < a->group; g++) {
        const int64_t h = hk * a->group + g;
        int64_t i1;
        for (int64_t i0 = attn_first(a, j0); i0 < a->N; i0 = i1) {
            i1 = gg_min(a->N, gg_round_up(i0 + 1, BACK_QUERIES));
            float *to = dq + (g * a->N + i0) * DK;
            pair t = { .k = k,
                       .lse = k->lse_base + g * a->N + i0,
                       .delta = k->delta + g * a->N + i0,
                       .rows = i1 - i0,
                       .keys = keys,
                       .ahead = i0 + a->shift - j0 };
            if (a->mask && !back_mask(k, b, h, i0, t.rows, j0, keys)) {
                if (first) memset(to, 0, t.rows * DK * sizeof(float));
                continue;
            }
            const int q_finite = attn_pack(attn_row(a->q, b, h, i0), attn_step(a->q, 2), t.rows, DK, a->scale, k->q);
            const int g_finite = attn_pack(attn_row(k->dout, b, i0, h), g_row, t.rows, DV, 1.0f, k->g);
            t.careful = (a->mask || keys - 1 > t.ahead) && !(finite && q_finite && g_finite);
            back_pairs(&t);
            back_columns(&t, k->g, DV, k->p, k->dvt);
            back_columns(&t, k->q, DK, k->ds, k->dkt);
            back_queries(&t, to, first);
        }
    }
    attn_transpose(k->dkt, BACK_KEYS, DK, keys, 1.0f, (float *)gg_at(k->dk, b, hk, j0), DK, DK);
    attn_transpose(k->dvt, BACK_KEYS, DV, keys, 1.0f, (float *)gg_at(k->dv, b, hk, j0), DV, DV);
}

static void back_unit(const back *k, int64_t b, int64_t hk, int64_t chunk) {
    const attn *a = &k->a;
    const int64_t begin = back_chunk(k, chunk), end = back_chunk(k, chunk + 1), head = b * a->H + hk * a->group;
    float *dq = (chunk == 0 ? k->dq->data : k->partial + (chunk - 1) * a->B * a->H * a->N * a->DK);
    dq += head * a->N * a->DK;
    for (int64_t g = 0; g < a->group; g++) {
        if (begin < end) back_rows(k, b, hk * a->group + g, k->delta + g * a->N, k->lse_base + g * a->N);
        if (chunk == 0)
            memset(dq + g * a->N * a->DK, 0, (begin < end ? attn_first(a, begin) : a->N) * a->DK * sizeof(float));
    }
    for (int64_t j = begin; j < end; j += BACK_KEYS)
        back_key_tile(k, b, hk, j, gg_min(end, j + BACK_KEYS), dq, j == begin);
}

/* Rows of dq of all heads: chunk 0 has its sum in place, the others' are added in order. */
static void back_reduce(const back *k, int64_t row, int64_t end) {
    const attn *a = &k->a;
    for (int64_t chunk = 1; chunk < k->chunks; chunk++) {
        const int64_t begin = back_chunk(k, chunk), first = begin < a->M ? attn_first(a, begin) : a->N;
        const float *part = k->partial + (chunk - 1) * a->B * a->H * a->N * a->DK;
        float *dq = k->dq->data;
        for (int64_t r = row; r < end; r++)
            if (r % a->N >= first)
                for (int64_t d = 0; d < a->DK; d++) dq[r * a->DK + d] += part[r * a->DK + d];
    }
}

static int64_t back_tasks(const gg_call *c, int stage) {
    const back k = back_open(c, NULL);
    const attn *a = &k.a;
    if (stage == 1) return k.chunks == 1 ? 0 : gg_row_tasks(a->B * a->H * a->N, a->DK, k.chunks);
    const int64_t flops = 5 * a->group * a->N * gg_ceil_div(a->M, k.chunks) * (a->DK + a->DV);
    return gg_ceil_div(a->B * a->HK * k.chunks, gg_max(1, ATTN_TASK_FLOPS / gg_max(1, flops)));
}

static void back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const back k = back_open(c, scratch);
    const attn *a = &k.a;
    const int64_t tasks = back_tasks(c, stage), all = stage == 1 ? a->B * a->H * a->N : a->B * a->HK * k.chunks;
    const int64_t first = gg_cut(all, begin, tasks), last = gg_cut(all, end, tasks);
    if (stage == 1) back_reduce(&k, first, last);
    else
        for (int64_t u = first; u < last; u++) back_unit(&k, u / k.chunks / a->HK, u / k.chunks % a->HK, u % k.chunks);
}

static int64_t back_work(const gg_call *c) {
    const back k = back_open(c, NULL);
    return (k.chunks - 1) * k.a.B * k.a.H * k.a.N * k.a.DK * (int64_t)sizeof(float);
}

static int64_t back_scratch(const gg_call *c) { return back_open(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(flash_attn_back, .stages = 2, .tasks = back_tasks, .run = back_run, .work = back_work,
          .scratch = back_scratch);
