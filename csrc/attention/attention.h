/* Attention: what its forward and its backward share.
 *
 *   q: [B, H, N, DK]   k: [B, HK, M, DK]   v: [B, HK, M, DV]   mask: [Bm, Hm, N or more, M]
 *   out, dout: [B, N, H, DV]   lse, top, total, dlse: [B, H, N]
 *
 * Query head h reads kv head h / (H / HK).  All is done sequence by sequence, with queries and keys counted from the
 * sequence's first: so a sequence gives the same bits alone, in a batch and packed with others.
 *
 * Hidden pairs contribute nothing, whatever lies in their rows of q, k, v, dout.  A product over keys or queries
 * passes over them with a weight of 0, which is harmless where the other factor is finite.  Where it is not, which
 * is found while packing, the product goes pair by pair: hidden pairs carry the weight HIDDEN, a negative
 * zero, which no exponential gives. */
#pragma once
#include "abi/attrs/attention.h"
#include "vec/convert.h"
#include "vec/philox.h"
#include "vec/vector_math.h"
#include "walk/rows.h"
#include "gemm/microkernel.h"
#include "gemm/pack.h"

enum { ATTN_TASK_FLOPS = 1 << 19 }; /* the least that a task should hold, 5 to 10 us */
enum { NO_CAUSAL, TOP_LEFT, BOTTOM_RIGHT };
enum { SRC_Q, SRC_K, SRC_V };

static const float HIDDEN = -0.0f;
static const int32_t HIDDEN_BITS = INT32_MIN;
static const int64_t FAR = INT64_C(1) << 40; /* no key is so far away */

typedef struct attn_rules {
    float scale, cap;
    int causal;
    int64_t left, right, prefix; /* as the user gave them: -1 for no bound */
    double kept;                 /* of 2^32 random words */
    uint32_t dropout_key;
} attn_rules;

static attn_rules attn_rules_of(const gg_attention_rules *given) {
    return (attn_rules){ .scale = given->scale,
                         .cap = given->logit_softcap,
                         .causal = given->causal,
                         .left = given->window[0],
                         .right = given->window[1],
                         .prefix = given->prefix,
                         .kept = rint((1.0 - given->dropout_p) * 4294967296.0),
                         .dropout_key = (uint32_t)given->dropout_key };
}

typedef struct attn {
    const gg_tensor *q, *k, *v;
    const gg_tensor *mask, *sinks, *cu_q, *cu_k, *seed; /* NULL for those that there are none of */
    attn_rules rules;
    int64_t B, H, HK, N, M, DK, DV;
    int64_t group;     /* query heads of a kv head */
    int64_t sequences; /* rows of the batch; or packed ones, and one more for the rows behind the last of them */
} attn;

static const gg_tensor *attn_given(const gg_tensor *t) { return t->data != NULL ? t : NULL; }

/* After the source `sinks` come cu_seqlens_q, cu_seqlens_k and seed. */
static attn attn_open(const gg_call *c, int mask, int sinks, const gg_attention_rules *rules) {
    const gg_tensor *q = &c->src[SRC_Q], *k = &c->src[SRC_K], *v = &c->src[SRC_V];
    attn a = { .q = q,
               .k = k,
               .v = v,
               .mask = attn_given(&c->src[mask]),
               .sinks = attn_given(&c->src[sinks]),
               .cu_q = attn_given(&c->src[sinks + 1]),
               .cu_k = attn_given(&c->src[sinks + 2]),
               .seed = attn_given(&c->src[sinks + 3]),
               .rules = attn_rules_of(rules),
               .B = q->ne[0],
               .H = q->ne[1],
               .HK = k->ne[1],
               .N = q->ne[2],
               .M = k->ne[2],
               .DK = q->ne[3],
               .DV = v->ne[3],
               .group = k->ne[1] ? q->ne[1] / k->ne[1] : 1 };
    a.sequences = a.cu_q ? a.cu_q->ne[3] : a.B;
    return a;
}

/* -- sequences, and who sees what in them ----------------------------------------------------------------- */

/* Query i sees the keys from i + shift - left up to i + shift + right, and of the first `prefix` those up to
 * i + shift + prefix_right. */
typedef struct attn_seq {
    int64_t number, b; /* of all sequences; row of the batch */
    int64_t q0, k0;    /* its first query and key */
    int64_t N, M;
    int64_t shift, left, right, prefix, prefix_right;
} attn_seq;

/* Only in a run: it looks at cu_seqlens. */
static attn_seq attn_sequence(const attn *a, int64_t number) {
    const attn_rules *r = &a->rules;
    attn_seq s = { .number = number, .b = number, .N = a->N, .M = a->M };
    int beyond = 0; /* the rows behind the last packed sequence see nothing */
    if (a->cu_q != NULL) {
        const int32_t *q = (const int32_t *)a->cu_q->data + number, *k = (const int32_t *)a->cu_k->data + number;
        beyond = number == a->sequences - 1;
        s.b = 0, s.q0 = *q, s.k0 = *k;
        s.N = (beyond ? a->N : q[1]) - s.q0;
        s.M = (beyond ? a->M : k[1]) - s.k0;
    }
    s.shift = r->causal == TOP_LEFT ? 0 : s.M - s.N;
    s.left = r->left < 0 ? FAR : gg_min(r->left, FAR);
    s.right = beyond ? -FAR : r->causal != NO_CAUSAL ? 0 : r->right < 0 ? FAR : gg_min(r->right, FAR);
    s.prefix_right = r->causal != NO_CAUSAL ? s.right : FAR;
    const int none = beyond || (s.left == FAR && s.right == s.prefix_right); /* the window has no bounds to widen */
    s.prefix = none ? 0 : gg_min(r->prefix, s.M);
    return s;
}

static inline int64_t attn_clamp(int64_t x, int64_t low, int64_t high) { return gg_max(low, gg_min(x, high)); }

/* Query i sees the keys begin ... end - 1 and 0 ... prefix - 1, before any mask. */
static inline int64_t seq_begin(const attn_seq *s, int64_t i) { return attn_clamp(i + s->shift - s->left, 0, s->M); }
static inline int64_t seq_end(const attn_seq *s, int64_t i) { return attn_clamp(i + s->shift + s->right + 1, 0, s->M); }
static inline int64_t seq_prefix(const attn_seq *s, int64_t i) {
    return attn_clamp(i + s->shift + s->prefix_right + 1, 0, s->prefix);
}
/* Key j is seen by the queries first ... last - 1. */
static inline int64_t seq_first(const attn_seq *s, int64_t j) {
    return attn_clamp(j - s->shift - (j < s->prefix ? s->prefix_right : s->right), 0, s->N);
}
static inline int64_t seq_last(const attn_seq *s, int64_t j) {
    return j < s->prefix ? s->N : attn_clamp(j - s->shift + s->left + 1, 0, s->N);
}

/* What a tile sees before any mask, counted from its first query and its first key: query l the keys l + behind ...
 * l + ahead, and of the first `prefix` those up to l + reach. */
typedef struct attn_sight {
    int32_t behind, ahead, prefix, reach;
} attn_sight;

static inline attn_sight seq_sight(const attn_seq *s, int64_t i, int64_t j) {
    enum { FAR_OFF = 1 << 16 }; /* beyond all queries and keys of a tile */
    const int64_t at = i + s->shift - j;
    return (attn_sight){ .behind = (int32_t)attn_clamp(at - s->left, -FAR_OFF, FAR_OFF),
                         .ahead = (int32_t)attn_clamp(at + s->right, -FAR_OFF, FAR_OFF),
                         .prefix = (int32_t)attn_clamp(s->prefix - j, 0, FAR_OFF),
                         .reach = (int32_t)attn_clamp(at + s->prefix_right, -FAR_OFF, FAR_OFF) };
}

/* About how many keys a query sees, as far as shapes say. */
static int64_t attn_sees(const attn *a) {
    const attn_rules *r = &a->rules;
    int64_t keys = a->cu_q ? gg_ceil_div(a->M, gg_max(1, a->sequences - 1)) : a->M;
    const int64_t right = r->causal != NO_CAUSAL ? 0 : r->right;
    if (r->left >= 0 && right >= 0 && r->left < keys && right < keys)
        keys = gg_min(keys, r->left + right + 1 + gg_min(keys, r->prefix));
    return keys;
}

/* The first stage of both: packed sequences begin at 0, do not fall, and end within the rows that there are. */
static void attn_check_ends(const gg_call *c, int input, int64_t rows) {
    const gg_tensor *t = &c->src[input];
    const int32_t *at = t->data;
    for (int64_t i = 0; i < t->ne[3]; i++) {
        const int64_t least = i > 0 ? at[i - 1] : 0, most = i > 0 ? rows : 0;
        if (at[i] < least || at[i] > most) gg_report_between(c, GG_INDEX, input, at[i], least, most + 1);
    }
}
static void attn_check(const gg_call *c, const attn *a, int cu_seqlens_q) {
    attn_check_ends(c, cu_seqlens_q, a->N);
    attn_check_ends(c, cu_seqlens_q + 1, a->M);
}

/* -- rows ------------------------------------------------------------------------------------------------- */

static inline const float *attn_row(const gg_tensor *t, int64_t b, int64_t h, int64_t i) {
    return (const float *)gg_at(t, b, h, i);
}
static inline int64_t attn_step(const gg_tensor *t, int axis) { return t->nb[axis] / (int64_t)sizeof(float); }

static int64_t attn_copy_floats(const gg_tensor *t, int64_t rows) { return t->dtype == GG_F32 ? 0 : rows * t->ne[3]; }

/* n rows of keys or values as f32, and how far apart: in place, or converted into `copy`. */
static const float *attn_rows(const gg_tensor *t, int64_t b, int64_t h, int64_t i, int64_t n, float *copy,
                              int64_t *step) {
    if (t->dtype == GG_F32) {
        *step = attn_step(t, 2);
        return attn_row(t, b, h, i);
    }
    const int64_t D = *step = t->ne[3];
    for (int64_t r = 0; r < n; r++) {
        const char *row = gg_at(t, b, h, i + r);
        if (gg_quantized(t->dtype)) gg_dequantize(t->dtype, row, copy + r * D, D);
        else gg_to_f32_row(t->dtype, row, copy + r * D, D);
    }
    return copy;
}

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

/* Asks for rows that will be needed soon.  (Whoever calls it must be inlined too: to the compiler, a function that does nothing
 * else does nothing.) */
GG_INLINE void attn_prefetch(const float *x, int64_t x_row, int64_t rows, int64_t cols, const int write) {
    for (int64_t r = 0; r < rows; r++, x += x_row)
        for (int64_t c = 0; c < cols; c += 16) {
            if (write) __builtin_prefetch(x + c, 1, 2);
            else __builtin_prefetch(x + c, 0, 2);
        }
}

/* -- exp ---------------------------------------------------------------------------------------------------- */

/* exp(x) for x <= 0, within 2 ulp; exactly 1 at 0, 0 below -87, and of x > 0 no matter what.  Both directions need the same, and
 * the weights are divided by their sum: so the error of ln2 in one term, which grows with -x, does not show. */
GG_INLINE vf attn_exp(vf x) {
    const float magic = 12583039.0f; /* 1.5 * 2^23, which rounds to an integer, and 127, the exponent of 1 */
    const vf shifted = x * 1.44269504088896341f + magic, r = x - (shifted - magic) * 0.693147180559945309f;
    const vf p = VF_POLYNOMIAL(r, 1.0f, 9.9999970701e-1f, 4.9999149193e-1f, 1.6667636582e-1f, 4.1897975375e-2f,
                               8.2903061503e-3f);
    return (vf)((vi)(p * (vf)((vi)shifted << 23)) & ~(x < -87.0f)); /* the rest of magic falls off */
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

/* -- dropout ---------------------------------------------------------------------------------------------- */

static int attn_drops(const attn *a) { return a->rules.kept < 4294967296.0; }
/* What kept weights are multiplied with; 1 without dropout. */
static float attn_rescale(const attn *a) { return a->rules.kept > 0 ? (float)(4294967296.0 / a->rules.kept) : 1.0f; }

/* Which of four keys a query keeps, where each lane is one block of four keys of one query: keep[w] is that of the
 * keys 4 block + w. */
GG_INLINE void attn_keep(const attn *a, const attn_seq *s, int64_t h, vu query, vu block, vi keep[4]) {
    const vu sign = (vu){ 0 } + 0x80000000u; /* flips unsigned order to signed */
    const vi below = (vi)(((vu){ 0 } + (uint32_t)a->rules.kept) ^ sign);
    vu words[4];
    vu_philox(block, query, (vu){ 0 } + (uint32_t)h, (vu){ 0 } + (uint32_t)s->number, *(const uint32_t *)a->seed->data,
              a->rules.dropout_key, words);
    for (int w = 0; w < 4; w++) keep[w] = (vi)(words[w] ^ sign) < below;
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
