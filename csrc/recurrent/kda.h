/* What the kernels of Kimi Delta Attention share: a call's sizes, its sequences, its inputs as the recurrence takes
 * them (normalised, activated), and the recurrence itself, forward and in reverse, token by token. */
#pragma once
#include "abi/attrs/kda.h"
#include "vec/vector_math.h"
#include "walk/kernel.h"
#include "walk/rows.h"
#include "gemm/pack.h"

enum { KDA_Q, KDA_K, KDA_V, KDA_G, KDA_BETA, KDA_H0, KDA_A_LOG, KDA_DT_BIAS, KDA_CU, KDA_INPUTS };
enum { KDA_GATE_GIVEN, KDA_SOFTPLUS, KDA_LOWER_BOUND };
enum { KDA_BETA_GIVEN, KDA_SIGMOID, KDA_TWICE_SIGMOID };
enum { KDA_COLUMNS = 32 }; /* value channels are cut at multiples of it: whole panels for every instruction set */

static const float KDA_LARGEST_SAFE_GATE = 0.4f; /* above it a chunk's products of exp(g) might overflow */

/* One value head's gate: g = -A softplus(x) or bound * sigmoid(A x), with x = raw + bias; or as it is. */
typedef struct kda_gate {
    int form;
    float A, bound;
    const float *bias; /* [K] of this head, or NULL */
} kda_gate;

typedef struct kda {
    const gg_tensor *q, *k, *v, *g, *beta;
    const gg_tensor *h0, *cu;     /* NULL if left out */
    const float *A_log, *dt_bias; /* likewise */
    int64_t B, T, H, HV, K, V, N;
    int64_t group; /* value heads that share a q and k */
    int64_t step;  /* floats from row to row in scratch: whole panels can be read */
    float scale, bound;
    int l2norm, gate, beta_form, v_first;
} kda;

static inline const gg_tensor *kda_given(const gg_tensor *t) { return t->data != NULL ? t : NULL; }

static inline int64_t kda_padded(int64_t n) { return gg_round_up(n, KDA_COLUMNS) + 16; }

/* Inputs in the order of the enum. */
static inline kda kda_open(const gg_tensor *const *in, const gg_kda_form *form) {
    const gg_tensor *q = in[KDA_Q], *v = in[KDA_V], *cu = kda_given(in[KDA_CU]);
    return (kda){
        .q = q,
        .k = in[KDA_K],
        .v = v,
        .g = in[KDA_G],
        .beta = in[KDA_BETA],
        .h0 = in[KDA_H0] ? kda_given(in[KDA_H0]) : NULL,
        .cu = cu,
        .A_log = in[KDA_A_LOG]->data,
        .dt_bias = in[KDA_DT_BIAS]->data,
        .B = q->ne[0],
        .T = q->ne[1],
        .H = q->ne[2],
        .HV = v->ne[2],
        .K = q->ne[3],
        .V = v->ne[3],
        .N = cu ? cu->ne[3] - 1 : q->ne[0],
        .group = q->ne[2] ? v->ne[2] / q->ne[2] : 1,
        .step = kda_padded(q->ne[3]),
        .scale = form->scale,
        .bound = form->lower_bound,
        .l2norm = form->l2norm,
        .gate = form->gate,
        .beta_form = form->beta_form,
        .v_first = form->state_v_first,
    };
}

/* -- sequences -------------------------------------------------------------------------------------------- */

/* Tokens begin ... end - 1 of a batch. */
typedef struct kda_span {
    int64_t batch, begin, end;
} kda_span;

static inline int64_t kda_boundary(const kda *p, int64_t n) {
    return *(const int32_t *)((const char *)p->cu->data + n * p->cu->nb[3]);
}

static inline kda_span kda_sequence(const kda *p, int64_t n) {
    if (p->cu == NULL) return (kda_span){ n, 0, p->T };
    return (kda_span){ 0, kda_boundary(p, n), kda_boundary(p, n + 1) };
}

/* Whether cu_seqlens, source `input` of the call, are boundaries; reports the first that is none. */
static inline int kda_check_boundaries(const gg_call *c, const kda *p, int input) {
    if (p->cu == NULL) return 1;
    for (int64_t n = 0, last = 0; n <= p->N; n++) {
        const int64_t at = kda_boundary(p, n), least = n == p->N ? p->T : last, most = n == 0 && p->N > 0 ? 0 : p->T;
        if (at < least || at > most) {
            gg_report_between(c, GG_INDEX, input, at, least, most + 1);
            return 0;
        }
        last = at;
    }
    return 1;
}

/* -- inputs ----------------------------------------------------------------------------------------------- */

static inline const float *kda_row(const gg_tensor *t, int64_t b, int64_t token, int64_t head) {
    return (const float *)gg_at(t, b, token, head);
}

/* q or k of a token times `times`, divided by its norm where asked for, in whole vectors; returns 1 / norm. */
static inline float kda_load_key(const kda *p, const float *from, float times, float *to) {
    const float r = p->l2norm ? (float)(1 / sqrt(gg_row_dot(from, from, p->K) + 1e-6)) : 1;
    for (int64_t i = 0; i < p->K; i += GG_VW) {
        const int count = (int)gg_min(GG_VW, p->K - i);
        vf_store(to + i, gg_take(from + i, count, 0) * r * times);
    }
    return r;
}

static inline kda_gate kda_gate_of(int form, float bound, const float *A_log, const float *dt_bias, int64_t head,
                                   int64_t K) {
    return (kda_gate){ form, A_log ? (float)exp(A_log[head]) : 1, bound, dt_bias ? dt_bias + head * K : NULL };
}

static inline kda_gate kda_gate_for(const kda *p, int64_t head) {
    return kda_gate_of(p->gate, p->bound, p->A_log, p->dt_bias, head, p->K);
}

GG_INLINE vf kda_gate_x(const kda_gate *t, const float *raw, int64_t i, const int count) {
    const vf x = gg_take(raw + i, count, 0);
    return t->bias ? x + gg_take(t->bias + i, count, 0) : x;
}

/* g of channels i ... i + count - 1; 0 in the lanes after them. */
GG_INLINE vf kda_gate_at(const kda_gate *t, const float *raw, int64_t i, const int count) {
    vf g = kda_gate_x(t, raw, i, count);
    if (t->form == KDA_SOFTPLUS) g = vf_softplus(g) * -t->A;
    else if (t->form == KDA_LOWER_BOUND) g = vf_sigmoid(g * t->A) * t->bound;
    if (count == GG_VW) return g;
    float lane[GG_VW];
    vf_store(lane, g);
    return vf_load_n(lane, count, 0);
}

/* dg, the gradient of the activated row, becomes that of the raw one, in `to`; it is added to bias[K], which
 * may be NULL, and the sum by log A is returned. */
static inline double kda_gate_row_back(const kda_gate *t, const float *dg, const float *raw, int64_t K, float *to,
                                       float *bias) {
    if (t->form == KDA_GATE_GIVEN) {
        if (to != NULL) memcpy(to, dg, K * sizeof(float));
        return 0;
    }
    vf by_A = vf_zero();
    for (int64_t i = 0; i < K; i += GG_VW) {
        const int count = (int)gg_min(GG_VW, K - i);
        const vf x = kda_gate_x(t, raw, i, count), d = gg_take(dg + i, count, 0);
        vf dx, share;
        if (t->form == KDA_SOFTPLUS) {
            dx = vf_sigmoid(x) * -t->A * d;
            share = d * -t->A * vf_softplus(x);
        } else {
            vf other;
            const vf s = vf_sigmoids(x * t->A, &other);
            dx = d * (s * other * t->A * t->bound); /* the slope first: a saturated one is 0, whatever A is */
            share = dx * x;
        }
        if (count < GG_VW) { /* lanes after the row hold 0 but for 0 * inf */
            float lane[GG_VW];
            vf_store(lane, share);
            share = vf_load_n(lane, count, 0);
        }
        by_A += share;
        if (to != NULL) gg_give(to + i, dx, count);
        if (bias != NULL) gg_give(bias + i, gg_take(bias + i, count, 0) + dx, count);
    }
    return vf_sum(by_A);
}

static inline float kda_sigmoid(float x, float *slope) {
    vf other;
    const vf s = vf_sigmoids(vf_set1(x), &other);
    *slope = s[0] * other[0];
    return s[0];
}

static inline float kda_beta(int form, float raw) {
    float slope;
    return form == KDA_BETA_GIVEN ? raw : (float)form * kda_sigmoid(raw, &slope);
}

static inline float kda_beta_back(int form, float raw, float dbeta) {
    if (form == KDA_BETA_GIVEN) return dbeta;
    float slope;
    kda_sigmoid(raw, &slope);
    return dbeta * (float)form * slope;
}

static inline float kda_raw_beta(const kda *p, int64_t b, int64_t token, int64_t head) {
    const gg_tensor *t = p->beta;
    return *(const float *)((const char *)t->data + b * t->nb[1] + token * t->nb[2] + head * t->nb[3]);
}

/* -- states ----------------------------------------------------------------------------------------------- */

/* In scratch a block of a state is [K][step], value channels v0 ... v0 + width along a row. */

static inline void kda_load_state(const gg_tensor *t, int v_first, int64_t n, int64_t head, int64_t v0, int64_t width,
                                  int64_t K, float *S, int64_t step) {
    if (t == NULL) {
        for (int64_t k = 0; k < K; k++) memset(S + k * step, 0, width * sizeof(float));
    } else if (v_first) {
        for (int64_t v = 0; v < width; v += GG_VW)
            gg_transpose(GG_F32, gg_at(t, n, head, v0 + v), t->nb[2], (int)gg_min(GG_VW, width - v), K, S + v, step);
    } else {
        for (int64_t k = 0; k < K; k++)
            memcpy(S + k * step, (const float *)gg_at(t, n, head, k) + v0, width * sizeof(float));
    }
}

static inline void kda_store_state(const gg_tensor *t, int v_first, int64_t n, int64_t head, int64_t v0, int64_t width,
                                   int64_t K, const float *S, int64_t step) {
    if (!v_first) {
        for (int64_t k = 0; k < K; k++) memcpy((float *)gg_at(t, n, head, k) + v0, S + k * step, width * sizeof(float));
        return;
    }
    for (int64_t v = 0; v < width; v++) {
        float *to = (float *)gg_at(t, n, head, v0 + v);
        for (int64_t k = 0; k < K; k++) to[k] = S[k * step + v];
    }
}

/* -- token by token --------------------------------------------------------------------------------------- */

/* A token of a value head, and the part of its value channels at hand. */
typedef struct kda_token {
    const float *a, *q, *k; /* decay exp(g), scaled query, key: [K] */
    const float *v, *beta;  /* [width]; beta: of every channel, or NULL */
    float same_beta;
} kda_token;

GG_INLINE void kda_step_columns(const int vectors, const int count, int64_t K, const kda_token *t, int64_t v, float *S,
                                int64_t step, float *d, float *o) {
    vf sum[4] = { 0 }, written[4];
    for (int64_t k = 0; k < K; k++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            float *at = S + k * step + v + j * GG_VW;
            const vf decayed = gg_take(at, count, 0) * t->a[k];
            gg_give(at, decayed, count);
            sum[j] += decayed * t->k[k];
        }
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
        const int64_t i = v + j * GG_VW;
        const vf beta = t->beta ? gg_take(t->beta + i, count, 0) : vf_set1(t->same_beta);
        written[j] = beta * (gg_take(t->v + i, count, 0) - sum[j]);
        if (d != NULL) gg_give(d + i, written[j], count);
        sum[j] = vf_zero();
    }
    for (int64_t k = 0; k < K; k++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            float *at = S + k * step + v + j * GG_VW;
            const vf state = gg_take(at, count, 0) + written[j] * t->k[k];
            gg_give(at, state, count);
            sum[j] += state * t->q[k];
        }
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++)
        if (o != NULL) gg_give(o + v + j * GG_VW, sum[j], count);
}

/* S: the state after the token; d and o, either of which may be NULL: what it wrote, and its result. */
static inline void kda_step(int64_t K, int64_t width, const kda_token *t, float *S, int64_t step, float *d, float *o) {
    int64_t v = 0;
    for (; v + 4 * GG_VW <= width; v += 4 * GG_VW) kda_step_columns(4, GG_VW, K, t, v, S, step, d, o);
    for (; v + GG_VW <= width; v += GG_VW) kda_step_columns(1, GG_VW, K, t, v, S, step, d, o);
    if (v < width) kda_step_columns(1, (int)(width - v), K, t, v, S, step, d, o);
}

/* The inputs of one token in scratch: a, q, k of p->step floats each. */
static inline kda_token kda_load_token(const kda *p, const kda_gate *gate, int64_t b, int64_t token, int64_t head,
                                       float *scratch) {
    float *a = scratch, *q = a + p->step, *k = q + p->step;
    const int64_t h = head / p->group;
    kda_load_key(p, kda_row(p->q, b, token, h), p->scale, q);
    kda_load_key(p, kda_row(p->k, b, token, h), 1, k);
    const float *raw = kda_row(p->g, b, token, head);
    for (int64_t i = 0; i < p->K; i += GG_VW)
        vf_store(a + i, vf_exp(kda_gate_at(gate, raw, i, (int)gg_min(GG_VW, p->K - i))));
    return (kda_token){ .a = a, .q = q, .k = k, .v = kda_row(p->v, b, token, head) };
}
