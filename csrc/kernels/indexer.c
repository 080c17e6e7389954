/* The lightning indexer and its gradients.
 *
 *   q: [B, N, H, E]   k: [B, M, 1, E]   weights: [B, 1, N, H]   mask: [B or 1, 1, N, M]   out, dout: [B, 1, N, M]
 *
 *   S = Q K^T    out = sum over heads of w relu(S) + mask
 *   G = dout w where S > 0    dQ = G K    dK = G^T Q    dw = dout . relu(S)
 *
 * What the mask hides reaches nothing: its slope of 0 is harmless beside finite rows, and others are passed over.
 *
 * A panel of GG_NR keys is turned, one key in each vector lane, and a query's heads are the rows of a tile.  Forward,
 * and for dQ and dw, a task has some queries and goes through all keys; for dK it has some keys and goes through all
 * queries: so whoever adds up a gradient owns it. */
#include "abi/attrs/indexer.h"
#include "walk/rows.h"
#include "gemm/pack.h"

enum { QUERIES = 16 }; /* that share a panel of keys */
enum { INDEXER_TASK_FLOPS = 1 << 19 };
enum { DQ, DK, DW };
enum { BY_QUERIES, BY_KEYS, STAGES };

typedef struct indexer {
    const gg_tensor *q, *k, *weights, *mask; /* mask: NULL if there is none */
    int64_t B, N, H, M, E;
    int64_t step; /* floats from one copied row to the next */
    int64_t wide; /* E and the zeros after it */
    float *panel; /* [E][GG_NR] */
    float *rows;  /* [GG_NR][step] of k, or [H][step] of q */
    float *w;     /* [H] */
    float *s;     /* [H][GG_NR]: S, then G */
    float *sum;   /* of dQ, [QUERIES][H][step]; of dK, [GG_NR][step] */
    float *some;  /* the same of a block of terms */
    float *dw;    /* of a block, [QUERIES][H] */
    int64_t floats;
} indexer;

static indexer open_indexer(const gg_tensor *src, float *scratch) {
    indexer x = { .q = src, .k = src + 1, .weights = src + 2, .mask = src[3].data ? src + 3 : NULL };
    x.B = x.q->ne[0], x.N = x.q->ne[1], x.H = x.q->ne[2], x.E = x.q->ne[3], x.M = x.k->ne[1];
    x.step = gg_line_step(x.E);
    x.wide = gg_round_up(x.E, 16);
    x.panel = gg_claim(scratch, &x.floats, x.E * GG_NR);
    x.rows = gg_claim(scratch, &x.floats, gg_max(x.H, GG_NR) * x.step);
    x.w = gg_claim(scratch, &x.floats, x.H);
    x.s = gg_claim(scratch, &x.floats, x.H * GG_NR);
    x.sum = gg_claim(scratch, &x.floats, gg_max(QUERIES * x.H, GG_NR) * x.step);
    x.some = gg_claim(scratch, &x.floats, gg_max(QUERIES * x.H, GG_NR) * x.step);
    x.dw = gg_claim(scratch, &x.floats, QUERIES * x.H);
    return x;
}

static const float *row_at(const gg_tensor *t, int64_t b, int64_t i) { return (const float *)gg_at(t, b, i, 0); }

/* The keys of a panel, turned. */
static void turn_keys(const indexer *x, int64_t b, int64_t m, int64_t keys) {
    const gg_lines lines = { .data = (const char *)row_at(x->k, b, m), .dtype = GG_F32, .line = x->k->nb[1], .k = 4 };
    gg_pack_columns(&lines, keys, x->E, x->panel);
}

/* Returns whether all of them are finite. */
static int copy_rows(const indexer *x, const char *from, int64_t stride, int64_t n) {
    vf odd = vf_zero();
    for (int64_t i = 0; i < n; i++, from += stride) {
        float *const to = x->rows + i * x->step;
        memcpy(to, from, x->E * sizeof(float));
        for (int64_t e = x->E; e < x->wide; e++) to[e] = 0;
        for (int64_t e = 0; e < x->wide; e += GG_VW) odd += vf_load(to + e) * 0.0f;
    }
    return vf_sum(odd) == 0;
}

static void copy_weights(const indexer *x, int64_t b, int64_t n) {
    const char *from = gg_at(x->weights, b, 0, n);
    memcpy(x->w, from, x->H * sizeof(float));
}

GG_INLINE void score_tile(const int M, int64_t E, const float *q, int64_t q_row, const float *panel, float *s) {
    vf c[GG_MR][GG_NV];
    gg_micro(M, E, q, q_row, 1, panel, GG_NR, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < GG_NV; v++) vf_store(s + m * GG_NR + v * GG_VW, c[m][v]);
}

/* s[H][GG_NR] of one query and the panel. */
static void score_heads(const indexer *x, int64_t b, int64_t n) {
    const float *const q = row_at(x->q, b, n);
    const int64_t q_row = x->q->nb[2] / (int64_t)sizeof(float);
    for (int64_t h = 0; h < x->H; h += GG_MR)
        GG_EACH_M(gg_min(GG_MR, x->H - h), score_tile, x->E, q + h * q_row, q_row, x->panel, x->s + h * GG_NR)
}

/* The mask of a query and a panel's keys as f32, 0 if there is none. */
static void load_mask(const indexer *x, int64_t b, int64_t n, int64_t m, int64_t keys, float to[GG_NR]) {
    for (int64_t j = 0; j < GG_NR; j++) to[j] = 0;
    if (x->mask == NULL) return;
    const char *const from = gg_at(x->mask, b % x->mask->ne[0], 0, n) + m * gg_float_bytes(x->mask->dtype);
    gg_to_f32_row(x->mask->dtype, from, to, keys);
}

/* -- forward ------------------------------------------------------------------------------------------------ */

static void score_query(const indexer *x, const gg_tensor *out, int64_t b, int64_t n, int64_t m, int64_t keys) {
    float total[GG_NR], mask[GG_NR];
    score_heads(x, b, n);
    copy_weights(x, b, n);
    load_mask(x, b, n, m, keys, mask);
    for (int v = 0; v < GG_NR; v += GG_VW) {
        vf sum = vf_zero();
        for (int64_t h = 0; h < x->H; h++) sum += x->w[h] * vf_max(vf_zero(), vf_load(x->s + h * GG_NR + v));
        const vf add = vf_load(mask + v);
        vf_store(total + v, x->mask == NULL ? sum : vf_select(add == -INFINITY, add, sum + add));
    }
    memcpy((float *)gg_at(out, b, 0, n) + m, total, keys * sizeof(float));
}

static int64_t count_tasks(const indexer *x, int64_t units, int64_t flops) {
    return gg_min(units, gg_max(1, (int64_t)(2.0 * x->B * x->N * x->M * x->H * x->E * flops / INDEXER_TASK_FLOPS)));
}

static int64_t query_units(const indexer *x) { return x->B * gg_ceil_div(x->N, QUERIES); }

static int64_t indexer_tasks(const gg_call *c, int stage) {
    (void)stage;
    const indexer x = open_indexer(c->src, NULL);
    return count_tasks(&x, query_units(&x), 1);
}

static void indexer_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const indexer x = open_indexer(c->src, scratch);
    const int64_t units = query_units(&x), tasks = indexer_tasks(c, stage), blocks = gg_ceil_div(x.N, QUERIES);
    for (int64_t u = gg_cut(units, begin, tasks), last = gg_cut(units, end, tasks); u < last; u++) {
        const int64_t b = u / blocks, n0 = u % blocks * QUERIES, n1 = gg_min(x.N, n0 + QUERIES);
        for (int64_t m = 0; m < x.M; m += GG_NR) {
            const int64_t keys = gg_min(GG_NR, x.M - m);
            turn_keys(&x, b, m, keys);
            for (int64_t n = n0; n < n1; n++) score_query(&x, c->dst, b, n, m, keys);
        }
    }
}

static int64_t indexer_scratch(const gg_call *c) { return open_indexer(c->src, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(lightning_indexer, .stages = 1, .tasks = indexer_tasks, .run = indexer_run, .scratch = indexer_scratch);

/* -- backward ------------------------------------------------------------------------------------------------ */

/* S of a query and a panel becomes G; dw, if wanted, gets what these keys add.  Hidden and missing keys give 0, and
 * have a mask of -inf. */
static void slopes(const indexer *x, const gg_tensor *dout, int64_t b, int64_t n, int64_t m, int64_t keys, float *dw,
                   float mask[GG_NR]) {
    float d[GG_NR] = { 0 };
    score_heads(x, b, n);
    copy_weights(x, b, n);
    load_mask(x, b, n, m, keys, mask);
    memcpy(d, (const float *)gg_at(dout, b, 0, n) + m, keys * sizeof(float));
    for (int64_t j = keys; j < GG_NR; j++) mask[j] = -INFINITY;
    for (int64_t h = 0; h < x->H; h++) {
        vf sum = vf_zero();
        for (int v = 0; v < GG_NR; v += GG_VW) {
            float *const at = x->s + h * GG_NR + v;
            const vf s = vf_load(at), g = vf_load(d + v);
            const vi hidden = vf_load(mask + v) == -INFINITY;
            sum += vf_select(hidden, vf_zero(), g * vf_max(vf_zero(), s));
            const vf slope = vf_select(s > 0.0f, g * x->w[h], s); /* of NaN: NaN */
            vf_store(at, vf_select(hidden | (s <= 0.0f), vf_zero(), slope));
        }
        if (dw != NULL) dw[h] += vf_sum(sum);
    }
}

GG_INLINE void add_tile(const int M, const int vectors, int64_t n, const float *g, int64_t g_row, int64_t g_col,
                        const float *rows, int64_t step, float *to) {
    vf c[GG_MR][GG_NV];
    gg_micro_part(M, vectors, n, g, g_row, g_col, rows, step, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *at = to + m * step + v * GG_VW;
            vf_store(at, vf_load(at) + c[m][v]);
        }
}

/* to[m] += sum over n rows of g[m * g_row + i * g_col] rows[i], for `lines` of m. */
static void add_rows(const indexer *x, int64_t lines, int64_t n, const float *slope, int64_t g_row, int64_t g_col,
                     const float *from, float *to) {
    const int64_t step = x->step;
    for (int64_t e = 0, vectors; e < x->wide; e += vectors * GG_VW) {
        vectors = e + GG_NR <= x->wide ? GG_NV : 1;
        for (int64_t m = 0; m < lines; m += GG_MR) {
            const int64_t M = gg_min(GG_MR, lines - m);
            const float *const g = slope + m * g_row, *const rows = from + e;
            float *const at = to + m * step + e;
            if (vectors == GG_NV) GG_EACH_M(M, add_tile, GG_NV, n, g, g_row, g_col, rows, step, at)
            else GG_EACH_M(M, add_tile, 1, n, g, g_row, g_col, rows, step, at)
        }
    }
}

static void put_rows(const indexer *x, const float *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i++) memcpy(to + i * x->E, from + i * x->step, x->E * sizeof(float));
}

/* to += from, which begins anew. */
static void move_sums(float *to, float *from, int64_t n) {
    gg_add_row(to, from, n);
    memset(from, 0, n * sizeof(float));
}

static float *result_of(const gg_call *c, int i) {
    const gg_tensor *t = gg_result(c, ((const gg_lightning_indexer_back_attrs *)c->attrs)->wanted, i);
    return t ? t->data : NULL;
}

/* dQ and dw, or one of the two, of QUERIES queries. */
static void back_queries(const indexer *x, const gg_call *c, int64_t b, int64_t n0, int64_t n1) {
    const int64_t size = x->H * x->step, first = b * x->N + n0;
    float *const dq = result_of(c, DQ), *const all_dw = result_of(c, DW),
                 *const dw = all_dw + (all_dw ? first * x->H : 0);
    memset(x->sum, 0, (n1 - n0) * size * sizeof(float));
    memset(x->some, 0, (n1 - n0) * size * sizeof(float));
    if (dw) memset(dw, 0, (n1 - n0) * x->H * sizeof(float));
    const int64_t some = gg_sum_block(gg_ceil_div(x->M, GG_NR)) * GG_NR;
    memset(x->dw, 0, QUERIES * x->H * sizeof(float));
    for (int64_t m = 0; m < x->M; m += GG_NR) {
        const int64_t keys = gg_min(GG_NR, x->M - m);
        turn_keys(x, b, m, keys);
        const int finite = copy_rows(x, (const char *)row_at(x->k, b, m), x->k->nb[1], keys);
        for (int64_t n = n0; n < n1; n++) {
            float mask[GG_NR], *const to = x->some + (n - n0) * size;
            slopes(x, c->src, b, n, m, keys, dw ? x->dw + (n - n0) * x->H : NULL, mask);
            if (!dq) continue;
            if (finite) add_rows(x, x->H, keys, x->s, GG_NR, 1, x->rows, to);
            else
                for (int64_t j = 0; j < keys; j++)
                    if (mask[j] != -INFINITY) add_rows(x, x->H, 1, x->s + j, GG_NR, 1, x->rows + j * x->step, to);
        }
        if ((m + GG_NR) % some == 0 || m + GG_NR >= x->M) {
            if (dq) move_sums(x->sum, x->some, (n1 - n0) * size);
            if (dw) move_sums(dw, x->dw, (n1 - n0) * x->H);
        }
    }
    if (dq) put_rows(x, x->sum, (n1 - n0) * x->H, dq + first * x->H * x->E);
}

/* dK of a panel of keys. */
static void back_keys(const indexer *x, const gg_call *c, int64_t b, int64_t m) {
    const int64_t keys = gg_min(GG_NR, x->M - m);
    const int64_t size = keys * x->step, some = gg_sum_block(x->N);
    memset(x->sum, 0, size * sizeof(float));
    memset(x->some, 0, size * sizeof(float));
    turn_keys(x, b, m, keys);
    for (int64_t n = 0; n < x->N; n++) {
        float mask[GG_NR];
        const int finite = copy_rows(x, (const char *)row_at(x->q, b, n), x->q->nb[2], x->H);
        slopes(x, c->src, b, n, m, keys, NULL, mask);
        if (finite) add_rows(x, keys, x->H, x->s, 1, GG_NR, x->rows, x->some);
        else
            for (int64_t j = 0; j < keys; j++)
                if (mask[j] != -INFINITY) add_rows(x, 1, x->H, x->s + j, 1, GG_NR, x->rows, x->some + j * x->step);
        if ((n + 1) % some == 0 || n + 1 == x->N) move_sums(x->sum, x->some, size);
    }
    put_rows(x, x->sum, keys, result_of(c, DK) + (b * x->M + m) * x->E);
}

static int64_t back_units(const indexer *x, int stage) {
    return stage == BY_QUERIES ? query_units(x) : x->B * gg_ceil_div(x->M, GG_NR);
}

static int64_t indexer_back_tasks(const gg_call *c, int stage) {
    const indexer x = open_indexer(c->src + 1, NULL);
    const int some = stage == BY_QUERIES ? result_of(c, DQ) || result_of(c, DW) : result_of(c, DK) != NULL;
    return some ? count_tasks(&x, back_units(&x, stage), 2) : 0;
}

static void indexer_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const indexer x = open_indexer(c->src + 1, scratch);
    const int64_t units = back_units(&x, stage), tasks = indexer_back_tasks(c, stage);
    const int64_t size = stage == BY_QUERIES ? QUERIES : GG_NR;
    const int64_t blocks = gg_ceil_div(stage == BY_QUERIES ? x.N : x.M, size);
    for (int64_t u = gg_cut(units, begin, tasks), last = gg_cut(units, end, tasks); u < last; u++) {
        const int64_t b = u / blocks, first = u % blocks * size;
        if (stage == BY_QUERIES) back_queries(&x, c, b, first, gg_min(x.N, first + size));
        else back_keys(&x, c, b, first);
    }
}

static int64_t indexer_back_scratch(const gg_call *c) {
    return open_indexer(c->src + 1, NULL).floats * (int64_t)sizeof(float);
}

GG_KERNEL(lightning_indexer_back, .stages = STAGES, .tasks = indexer_back_tasks, .run = indexer_back_run,
          .scratch = indexer_back_scratch);
