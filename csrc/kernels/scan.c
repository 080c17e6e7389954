/* delta_scan: a state that every token decays, corrects and adds to, one head at a time, row by row:
 *
 *   S'[i][j] = S[i][j] w[j] + v[i] k[j] + (sum over l of S[i][l] a[l]) b[j]        y[i] = sum over j of S'[i][j] r[j]
 *
 *   r, w, k, a, b: [N, T, H, S]   v, y: [N, T, H, V]   state: [N, H, V, S]   states: [snapshots N, H, V, S]
 *
 * all contiguous, a and b both there or both not.  states has the state after the last token, then after the one before, and
 * so on.  Rows i know nothing of each other, so they go in groups of as many as a vector has lanes: sums along j
 * end as the lanes of one vector.
 *
 * delta_scan_back keeps the state before every chunk of about sqrt(T) tokens, and goes from the last chunk to the first,
 * making the states within it again.  With D the gradient of S':
 *
 *   D += dy r   dr += dy S'   dk += v D   db += sa D   dw += D S   dv = D k   dsa = D b   da += dsa S   D = D w + dsa a
 *
 * What is summed over the rows of a head is first summed over parts of them, where heads are few, then over the parts. */
#include "abi/attrs/scan.h"
#include "walk/kernel.h"
#include "recurrent/scan.h"

enum { SCAN_R, SCAN_W, SCAN_K, SCAN_A, SCAN_B, SCAN_VECTORS };
enum { SCAN_GROUP = 16 }; /* rows that stay together: a multiple of GG_VW */

typedef struct scan {
    const gg_tensor *in[SCAN_VECTORS], *v, *state;
    int64_t N, T, H, V, S, step; /* floats from row to row of a state at hand: whole vectors */
    int delta;
} scan;

static scan scan_describe(const gg_tensor *src, const gg_tensor *a, const gg_tensor *b) {
    const gg_tensor *v = &src[3];
    return (scan){
        .in = { &src[0], &src[1], &src[2], a, b },
        .v = v,
        .state = &src[4],
        .N = v->ne[0],
        .T = v->ne[1],
        .H = v->ne[2],
        .V = v->ne[3],
        .S = src[0].ne[3],
        .step = gg_round_up(src[0].ne[3], GG_VW),
        .delta = a->data != NULL,
    };
}

static int64_t scan_token(const scan *s, int64_t n, int64_t t, int64_t h) { return (n * s->T + t) * s->H + h; }

/* The vectors of a token, with zeros behind them where they are no whole number of vectors. */
static void scan_vectors(const scan *s, int64_t token, float *padded, const float *x[SCAN_VECTORS]) {
    for (int i = 0; i < SCAN_VECTORS; i++) {
        if (s->in[i]->data == NULL) {
            x[i] = NULL;
            continue;
        }
        x[i] = (const float *)s->in[i]->data + token * s->S;
        if (s->S == s->step) continue;
        float *const to = padded + i * s->step;
        for (int64_t j = 0; j < s->step; j++) to[j] = j < s->S ? x[i][j] : 0;
        x[i] = to;
    }
}

/* Lanes beyond the last column stay zero, whatever is multiplied with them. */
GG_INLINE vf scan_within(const scan *s, int64_t j, vf x) {
    return j + GG_VW <= s->S ? x : vf_select(vi_lanes() < (int32_t)(s->S - j), x, vf_zero());
}

/* A vector of a row's new state, and what it adds to y. */
GG_INLINE vf scan_row(const int delta, const float *old, float *new, vf w, vf k, vf r, vf b, vf v, vf sa, vf sum) {
    vf state = vf_load(old) * w + v * k;
    if (delta) state += sa * b;
    vf_store(new, state);
    return sum + state * r;
}

/* All whole vectors of four rows: what is the same for all of them is loaded once, and the sums stay in registers. */
GG_INLINE void scan_four_rows(const scan *s, const int delta, const float *const *x, const float *v, const float *sa,
                              const float *old, float *new, vf sum[4]) {
    const int64_t n = s->step;
    const vf v0 = vf_set1(v[0]), v1 = vf_set1(v[1]), v2 = vf_set1(v[2]), v3 = vf_set1(v[3]), none = vf_zero();
    const vf a0 = delta ? vf_set1(sa[0]) : none, a1 = delta ? vf_set1(sa[1]) : none;
    const vf a2 = delta ? vf_set1(sa[2]) : none, a3 = delta ? vf_set1(sa[3]) : none;
    vf s0 = none, s1 = none, s2 = none, s3 = none;
    const float *const ws = x[SCAN_W], *const ks = x[SCAN_K], *const rs = x[SCAN_R], *const bs = x[SCAN_B];
    const int64_t whole = s->S / GG_VW * GG_VW;
    for (int64_t j = 0; j < whole; j += GG_VW) {
        const vf w = vf_load(ws + j), k = vf_load(ks + j), r = vf_load(rs + j), b = delta ? vf_load(bs + j) : none;
        s0 = scan_row(delta, old + j, new + j, w, k, r, b, v0, a0, s0);
        s1 = scan_row(delta, old + n + j, new + n + j, w, k, r, b, v1, a1, s1);
        s2 = scan_row(delta, old + 2 * n + j, new + 2 * n + j, w, k, r, b, v2, a2, s2);
        s3 = scan_row(delta, old + 3 * n + j, new + 3 * n + j, w, k, r, b, v3, a3, s3);
    }
    sum[0] = s0, sum[1] = s1, sum[2] = s2, sum[3] = s3;
}

/* Some columns of the new state, row by row. */
GG_INLINE void scan_columns(const scan *s, const int delta, const int rows, int64_t j, const float *const *x,
                            const float *v, const float *sa, const float *old, float *new, vf sum[GG_VW]) {
    const vf w = vf_load(x[SCAN_W] + j), k = vf_load(x[SCAN_K] + j), r = vf_load(x[SCAN_R] + j);
    const vf b = delta ? vf_load(x[SCAN_B] + j) : vf_zero();
    for (int i = 0; i < rows; i++) {
        vf state = vf_load(old + i * s->step + j) * w + v[i] * k;
        if (delta) state += sa[i] * b;
        state = scan_within(s, j, state);
        vf_store(new + i * s->step + j, state);
        sum[i] += state * r;
    }
}

/* The sums of a along the rows, of four at a time. */
GG_INLINE void scan_forgotten(const scan *s, const float *a, const float *old, vf sum[4]) {
    const int64_t n = s->step;
    vf s0 = vf_zero(), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t j = 0; j < n; j += GG_VW) {
        const vf x = vf_load(a + j);
        s0 += vf_load(old + j) * x;
        s1 += vf_load(old + n + j) * x;
        s2 += vf_load(old + 2 * n + j) * x;
        s3 += vf_load(old + 3 * n + j) * x;
    }
    sum[0] = s0, sum[1] = s1, sum[2] = s2, sum[3] = s3;
}

/* One token for some rows: the new state, sa, and y. */
GG_INLINE void scan_step_of(const scan *s, const int delta, const int rows, const float *const *x, const float *v,
                            const float *old, float *new, float *sa, float *y) {
    vf sum[GG_VW];
    const int fours = rows / 4 * 4;
    if (delta) {
        for (int i = 0; i < fours; i += 4) scan_forgotten(s, x[SCAN_A], old + i * s->step, sum + i);
        for (int i = fours; i < GG_VW; i++) {
            sum[i] = vf_zero();
            for (int64_t j = 0; i < rows && j < s->step; j += GG_VW)
                sum[i] += vf_load(old + i * s->step + j) * vf_load(x[SCAN_A] + j);
        }
        vf_store(sa, scan_sums(sum));
    }
    for (int i = 0; i < fours; i += 4)
        scan_four_rows(s, delta, x, v + i, sa + i, old + i * s->step, new + i * s->step, sum + i);
    for (int i = fours; i < GG_VW; i++) sum[i] = vf_zero();
    const int64_t whole = s->S / GG_VW * GG_VW, after = fours * s->step;
    if (fours < rows)
        for (int64_t j = 0; j < whole; j += GG_VW)
            scan_columns(s, delta, rows - fours, j, x, v + fours, sa + fours, old + after, new + after, sum + fours);
    if (whole < s->S) scan_columns(s, delta, rows, whole, x, v, sa, old, new, sum);
    const vf out = scan_sums(sum);
    if (y != NULL) vf_store_n(y, out, rows);
}

static void scan_step(const scan *s, int rows, const float *const *x, const float *v, const float *old, float *new,
                      float *sa, float *y) {
    if (s->delta && rows == GG_VW) scan_step_of(s, 1, GG_VW, x, v, old, new, sa, y);
    else if (s->delta) scan_step_of(s, 1, rows, x, v, old, new, sa, y);
    else if (rows == GG_VW) scan_step_of(s, 0, GG_VW, x, v, old, new, sa, y);
    else scan_step_of(s, 0, rows, x, v, old, new, sa, y);
}

/* Rows of a state in memory to rows of whole vectors, and back. */
static void scan_read(const scan *s, const float *from, int rows, float *to) {
    for (int i = 0; i < rows; i++)
        for (int64_t j = 0; j < s->step; j++) to[i * s->step + j] = j < s->S ? from[i * s->S + j] : 0;
}
static void scan_write(const scan *s, const float *from, int rows, float *to) {
    for (int i = 0; i < rows; i++) memcpy(to + i * s->S, from + i * s->step, s->S * sizeof(float));
}

/* -- delta_scan ----------------------------------------------------------------------------------- */

static scan scan_of(const gg_call *c) { return scan_describe(c->src, &c->src[5], &c->src[6]); }

/* In how many parts the rows of a head are cut: where heads are few, several threads shall find work. */
static int64_t scan_row_parts(const scan *s) { return scan_parts(s->N * s->H, gg_ceil_div(s->V, SCAN_GROUP)); }

static int64_t scan_first_row(const scan *s, int64_t part) {
    return gg_min(s->V, gg_cut(gg_ceil_div(s->V, SCAN_GROUP), part, scan_row_parts(s)) * SCAN_GROUP);
}

static int64_t scan_tasks(const gg_call *c, int stage) {
    (void)stage;
    const scan s = scan_of(c);
    return s.N * s.H * scan_row_parts(&s);
}

static int64_t scan_scratch(const gg_call *c) {
    const scan s = scan_of(c);
    return ((gg_round_up(s.V, SCAN_GROUP) + SCAN_VECTORS) * s.step + GG_VW) * (int64_t)sizeof(float);
}

/* Token by token, all rows of a part: its vectors are then at hand for all of them. */
static void scan_rows(const gg_call *c, const scan *s, int64_t n, int64_t h, int64_t first, int64_t last,
                      float *scratch) {
    const int32_t *wanted = ((const gg_delta_scan_attrs *)c->attrs)->wanted;
    const gg_tensor *y = gg_result(c, wanted, 0), *states = gg_result(c, wanted, 1);
    const int64_t head = (n * s->H + h) * s->V + first; /* its first row, of all rows of a set of states */
    const int64_t set = s->N * s->H * s->V * s->S, snapshots = states ? states->ne[0] / s->N : 0;
    float *const sa = scratch, *const padded = sa + GG_VW, *const state = padded + SCAN_VECTORS * s->step;
    scan_read(s, (const float *)s->state->data + head * s->S, (int)(last - first), state);
    if (s->T == 0 && states) scan_write(s, state, (int)(last - first), (float *)states->data + head * s->S);
    for (int64_t t = 0; t < s->T; t++) {
        const float *x[SCAN_VECTORS];
        const int64_t token = scan_token(s, n, t, h), slot = s->T - 1 - t;
        scan_vectors(s, token, padded, x);
        for (int64_t i = first; i < last; i += GG_VW) {
            float *const rows = state + (i - first) * s->step;
            scan_step(s, (int)gg_min(GG_VW, last - i), x, (const float *)s->v->data + token * s->V + i, rows, rows, sa,
                      y ? (float *)y->data + token * s->V + i : NULL);
        }
        if (slot < snapshots)
            scan_write(s, state, (int)(last - first), (float *)states->data + slot * set + head * s->S);
    }
}

static void scan_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const scan s = scan_of(c);
    const int64_t parts = scan_row_parts(&s);
    for (int64_t task = begin; task < end; task++) {
        const int64_t head = task / parts, part = task % parts;
        scan_rows(c, &s, head / s.H, head % s.H, scan_first_row(&s, part), scan_first_row(&s, part + 1), scratch);
    }
}

GG_KERNEL(delta_scan, .stages = 1, .tasks = scan_tasks, .run = scan_run, .scratch = scan_scratch);

/* -- delta_scan_back ------------------------------------------------------------------------------ */

enum { SCAN_DY = 5, SCAN_DSTATES = 6 };                                     /* sources, then a and b */
enum { SCAN_DR, SCAN_DW, SCAN_DK, SCAN_DV, SCAN_DSTATE, SCAN_DA, SCAN_DB }; /* results */

static scan scan_back_of(const gg_call *c) { return scan_describe(c->src, &c->src[7], &c->src[8]); }

static float *scan_result(const gg_call *c, int i) {
    const gg_tensor *t = gg_result(c, ((const gg_delta_scan_back_attrs *)c->attrs)->wanted, i);
    return t ? t->data : NULL;
}

/* The gradients that are sums over a head's rows: with several parts of rows each part has its own in c->work. */
enum { SUM_R, SUM_W, SUM_K, SUM_A, SUM_B, SUMS };
static const int scan_summed[SUMS] = { SCAN_DR, SCAN_DW, SCAN_DK, SCAN_DA, SCAN_DB };

/* How many of the first `end` of them are wanted. */
static int scan_sums_before(const gg_call *c, int end) {
    int count = 0;
    for (int i = 0; i < end; i++) count += scan_result(c, scan_summed[i]) != NULL;
    return count;
}

static int64_t scan_back_elements(const scan *s) { return s->N * s->T * s->H * s->S; }

static int64_t scan_back_tasks(const gg_call *c, int stage) {
    const scan s = scan_back_of(c);
    const int64_t parts = scan_row_parts(&s), elements = scan_back_elements(&s);
    if (stage == 0) return s.N * s.H * parts;
    return parts == 1 ? 0 : scan_sums_before(c, SUMS) * gg_ceil_div(elements, GG_TASK_ELEMENTS);
}

static int64_t scan_back_work(const gg_call *c) {
    const scan s = scan_back_of(c);
    const int64_t parts = scan_row_parts(&s);
    return parts == 1 ? 0 : parts * scan_sums_before(c, SUMS) * scan_back_elements(&s) * (int64_t)sizeof(float);
}

static int64_t scan_back_scratch(const gg_call *c) {
    const scan s = scan_back_of(c);
    const int64_t chunk = scan_chunk(s.T), chunks = gg_ceil_div(s.T, chunk);
    return ((chunks + chunk + 2) * GG_VW * s.step + chunk * GG_VW + SCAN_VECTORS * s.step) * (int64_t)sizeof(float);
}

/* The memory of a task. */
typedef struct scan_memory {
    float *kept;   /* the state before each chunk */
    float *states; /* before each token of a chunk, and after the last */
    float *d;      /* the gradient of the state */
    float *sa;     /* of each token of a chunk */
    float *padded;
    float *sums[SUMS]; /* NULL for those that are not wanted, and so below: */
    float *dv, *dstate;
} scan_memory;

static scan_memory scan_divide(const scan *s, float *scratch) {
    const int64_t chunk = scan_chunk(s->T), size = GG_VW * s->step;
    scan_memory m = { .kept = scratch };
    m.states = m.kept + gg_ceil_div(s->T, chunk) * size;
    m.d = m.states + (chunk + 1) * size;
    m.sa = m.d + size;
    m.padded = m.sa + chunk * GG_VW;
    return m;
}

/* One token backwards: d is the gradient of the state after it, then of that before it. */
GG_INLINE void scan_back_step_of(const gg_call *c, const scan *s, const int delta, const int rows,
                                 const float *const *x, int64_t token, int64_t first, const float *old,
                                 const float *new, const float *sa, const scan_memory *m) {
    float *const d = m->d;
    float *const to_r = m->sums[SUM_R], *const to_w = m->sums[SUM_W], *const to_k = m->sums[SUM_K];
    float *const to_a = m->sums[SUM_A], *const to_b = m->sums[SUM_B];
    const float *const dy = c->src[SCAN_DY].data ? (const float *)c->src[SCAN_DY].data + token * s->V + first : NULL;
    const float *const v = (const float *)s->v->data + token * s->V + first;
    vf dv[GG_VW], dsa[GG_VW]; /* set by the first vector of each row: to clear them costs more than a pass */
    for (int i = s->step == 0 ? 0 : rows; i < GG_VW; i++) dv[i] = dsa[i] = vf_zero();
    for (int64_t j = 0; j < s->step; j += GG_VW) {
        const vf r = vf_load(x[SCAN_R] + j), k = vf_load(x[SCAN_K] + j), b = delta ? vf_load(x[SCAN_B] + j) : vf_zero();
        const int64_t at = token * s->S + j, count = s->S - j;
        vf dr = vf_zero(), dw = vf_zero(), dk = vf_zero(), db = vf_zero();
        for (int i = 0; i < rows; i++) {
            vf g = vf_load(d + i * s->step + j);
            if (dy != NULL) {
                g = scan_within(s, j, g + dy[i] * r);
                vf_store(d + i * s->step + j, g);
                dr += dy[i] * vf_load(new + i * s->step + j);
            }
            dw += g * vf_load(old + i * s->step + j);
            dk += v[i] * g;
            dv[i] = j == 0 ? g * k : dv[i] + g * k;
            if (delta) {
                db += sa[i] * g;
                dsa[i] = j == 0 ? g * b : dsa[i] + g * b;
            }
        }
        if (to_r) scan_add(to_r + at, dr, count);
        if (to_w) scan_add(to_w + at, dw, count);
        if (to_k) scan_add(to_k + at, dk, count);
        if (delta && to_b) scan_add(to_b + at, db, count);
    }
    if (m->dv) vf_store_n(m->dv + token * s->V + first, scan_sums(dv), rows);
    float by_sa[GG_VW];
    if (delta) vf_store(by_sa, scan_sums(dsa));
    for (int64_t j = 0; j < s->step; j += GG_VW) {
        const vf w = vf_load(x[SCAN_W] + j), a = delta ? vf_load(x[SCAN_A] + j) : vf_zero();
        vf da = vf_zero();
        for (int i = 0; i < rows; i++) {
            vf g = vf_load(d + i * s->step + j) * w;
            if (delta) {
                g += by_sa[i] * a;
                da += by_sa[i] * vf_load(old + i * s->step + j);
            }
            vf_store(d + i * s->step + j, scan_within(s, j, g));
        }
        if (delta && to_a) scan_add(to_a + token * s->S + j, da, s->S - j);
    }
}

static void scan_back_step(const gg_call *c, const scan *s, int rows, const float *const *x, int64_t token,
                           int64_t first, const float *old, const float *new, const float *sa, const scan_memory *m) {
    if (s->delta && rows == GG_VW) scan_back_step_of(c, s, 1, GG_VW, x, token, first, old, new, sa, m);
    else if (s->delta) scan_back_step_of(c, s, 1, rows, x, token, first, old, new, sa, m);
    else if (rows == GG_VW) scan_back_step_of(c, s, 0, GG_VW, x, token, first, old, new, sa, m);
    else scan_back_step_of(c, s, 0, rows, x, token, first, old, new, sa, m);
}

/* Add the gradient of the snapshot in a slot, if there is one. */
static void scan_add_snapshot(const gg_call *c, const scan *s, int64_t slot, int64_t head, int rows, float *d) {
    const gg_tensor *g = &c->src[SCAN_DSTATES];
    if (g->data == NULL || slot >= g->ne[0] / s->N) return;
    const float *const from = (const float *)g->data + (slot * s->N * s->H * s->V + head) * s->S;
    for (int i = 0; i < rows; i++)
        for (int64_t j = 0; j < s->S; j++) d[i * s->step + j] += from[i * s->S + j];
}

static void scan_back_rows(const gg_call *c, const scan *s, int64_t n, int64_t h, int64_t first, int rows,
                           const scan_memory *m) {
    const int64_t chunk = scan_chunk(s->T), size = GG_VW * s->step, head = (n * s->H + h) * s->V + first;
    const float *x[SCAN_VECTORS];
    float sa[GG_VW];
    scan_read(s, (const float *)s->state->data + head * s->S, rows, m->states);
    for (int64_t t = 0; t < s->T; t++) {
        const int64_t token = scan_token(s, n, t, h);
        if (t % chunk == 0) memcpy(m->kept + t / chunk * size, m->states, rows * s->step * sizeof(float));
        if (t + chunk >= s->T && t % chunk == 0) break; /* the last chunk, which comes first below */
        scan_vectors(s, token, m->padded, x);
        scan_step(s, rows, x, (const float *)s->v->data + token * s->V + first, m->states, m->states, sa, NULL);
    }
    memset(m->d, 0, size * sizeof(float));
    if (s->T == 0) scan_add_snapshot(c, s, 0, head, rows, m->d);
    for (int64_t t0 = s->T == 0 ? -1 : (s->T - 1) / chunk * chunk; t0 >= 0; t0 -= chunk) {
        const int64_t t1 = gg_min(s->T, t0 + chunk);
        memcpy(m->states, m->kept + t0 / chunk * size, rows * s->step * sizeof(float));
        for (int64_t t = t0; t < t1; t++) {
            const int64_t token = scan_token(s, n, t, h);
            float *const old = m->states + (t - t0) * size;
            scan_vectors(s, token, m->padded, x);
            scan_step(s, rows, x, (const float *)s->v->data + token * s->V + first, old, old + size,
                      m->sa + (t - t0) * GG_VW, NULL);
        }
        for (int64_t t = t1 - 1; t >= t0; t--) {
            const int64_t token = scan_token(s, n, t, h);
            const float *const old = m->states + (t - t0) * size;
            scan_add_snapshot(c, s, s->T - 1 - t, head, rows, m->d);
            scan_vectors(s, token, m->padded, x);
            scan_back_step(c, s, rows, x, token, first, old, old + size, m->sa + (t - t0) * GG_VW, m);
        }
    }
    if (m->dstate) scan_write(s, m->d, rows, m->dstate + head * s->S);
}

/* Some rows of a head. */
static void scan_back_part(const gg_call *c, const scan *s, int64_t n, int64_t h, int64_t part, void *scratch) {
    const int64_t parts = scan_row_parts(s), elements = scan_back_elements(s);
    const int64_t first = scan_first_row(s, part), last = scan_first_row(s, part + 1);
    const int64_t sums = scan_sums_before(c, SUMS);
    scan_memory m = scan_divide(s, scratch);
    m.dv = scan_result(c, SCAN_DV), m.dstate = scan_result(c, SCAN_DSTATE);
    for (int i = 0; i < SUMS; i++) {
        m.sums[i] = scan_result(c, scan_summed[i]);
        if (m.sums[i] == NULL) continue;
        if (parts > 1) m.sums[i] = (float *)c->work + (part * sums + scan_sums_before(c, i)) * elements;
        for (int64_t t = 0; t < s->T; t++) memset(m.sums[i] + scan_token(s, n, t, h) * s->S, 0, s->S * sizeof(float));
    }
    for (int64_t i = first; i < last; i += GG_VW) scan_back_rows(c, s, n, h, i, (int)gg_min(GG_VW, last - i), &m);
}

/* Add up the parts of the nth sum that is wanted, for some elements. */
static void scan_back_total(const gg_call *c, const scan *s, int64_t nth, int64_t begin, int64_t end) {
    const int64_t parts = scan_row_parts(s), elements = scan_back_elements(s);
    const int64_t step = scan_sums_before(c, SUMS) * elements;
    const float *const from = (const float *)c->work + nth * elements;
    int i = 0;
    while (scan_result(c, scan_summed[i]) == NULL || scan_sums_before(c, i) < nth) i++;
    float *const to = scan_result(c, scan_summed[i]);
    memcpy(to + begin, from + begin, (end - begin) * sizeof(float));
    for (int64_t part = 1; part < parts; part++)
        for (int64_t e = begin; e < end; e++) to[e] += from[part * step + e];
}

static void scan_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const scan s = scan_back_of(c);
    const int64_t parts = scan_row_parts(&s), elements = scan_back_elements(&s);
    for (int64_t task = begin; task < end; task++)
        if (stage == 0) {
            const int64_t head = task / parts;
            scan_back_part(c, &s, head / s.H, head % s.H, task % parts, scratch);
        } else {
            const int64_t pieces = gg_ceil_div(elements, GG_TASK_ELEMENTS), from = task % pieces * GG_TASK_ELEMENTS;
            scan_back_total(c, &s, task / pieces, from, gg_min(elements, from + GG_TASK_ELEMENTS));
        }
}

GG_KERNEL(delta_scan_back, .stages = 2, .tasks = scan_back_tasks, .run = scan_back_run, .work = scan_back_work,
          .scratch = scan_back_scratch);
