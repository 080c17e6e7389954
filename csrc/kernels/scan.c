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
 *   D += dy r   dr += dy S'   dk += v D   db += sa D   dw += D S   dv = D k   dsa = D b   da += dsa S   D = D w + dsa a */
#include "../kernel.h"
#include "../pack.h"
#include "../rows.h"

enum { SCAN_R, SCAN_W, SCAN_K, SCAN_A, SCAN_B, SCAN_VECTORS };
enum { SCAN_GROUP = 16 }; /* rows in a task of the forward: a multiple of GG_VW */

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

/* The sum of each vector's lanes. */
GG_INLINE vf scan_sums(vf x[GG_VW]) {
    vf_transpose(x);
    for (int half = GG_VW / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[half + i];
    return x[0];
}

/* Lanes beyond the last column stay zero, whatever is multiplied with them. */
GG_INLINE vf scan_within(const scan *s, int64_t j, vf x) {
    return j + GG_VW <= s->S ? x : vf_select(vi_lanes() < (int32_t)(s->S - j), x, vf_zero());
}

/* One token for some rows: the new state, sa, and y. */
GG_INLINE void scan_step_of(const scan *s, const int delta, const int rows, const float *const *x, const float *v,
                            const float *old, float *new, float *sa, float *y) {
    vf sum[GG_VW] = { 0 };
    if (delta) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
            for (int64_t j = 0; j < s->step; j += GG_VW)
                sum[i] += vf_load(old + i * s->step + j) * vf_load(x[SCAN_A] + j);
        vf_store(sa, scan_sums(sum));
        for (int i = 0; i < GG_VW; i++) sum[i] = vf_zero();
    }
    for (int64_t j = 0; j < s->step; j += GG_VW) {
        const vf w = vf_load(x[SCAN_W] + j), k = vf_load(x[SCAN_K] + j), r = vf_load(x[SCAN_R] + j);
        const vf b = delta ? vf_load(x[SCAN_B] + j) : vf_zero();
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vf state = vf_load(old + i * s->step + j) * w + v[i] * k;
            if (delta) state += sa[i] * b;
            state = scan_within(s, j, state);
            vf_store(new + i * s->step + j, state);
            sum[i] += state * r;
        }
    }
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

static int64_t scan_tasks(const gg_call *c, int stage) {
    (void)stage;
    const scan s = scan_of(c);
    return s.N * s.H * gg_ceil_div(s.V, SCAN_GROUP);
}

static int64_t scan_scratch(const gg_call *c) {
    const scan s = scan_of(c);
    return (GG_VW * s.step + SCAN_VECTORS * s.step + GG_VW) * (int64_t)sizeof(float);
}

static void scan_rows(const gg_call *c, const scan *s, int64_t n, int64_t h, int64_t i, int rows, float *scratch) {
    const gg_tensor *states = &c->dst[1];
    const int64_t head = (n * s->H + h) * s->V + i; /* its first row, of all rows of a set of states */
    const int64_t set = s->N * s->H * s->V * s->S, snapshots = states->ne[0] / s->N;
    float *const state = scratch, *const padded = state + GG_VW * s->step, *const sa = padded + SCAN_VECTORS * s->step;
    scan_read(s, (const float *)s->state->data + head * s->S, rows, state);
    if (s->T == 0) scan_write(s, state, rows, (float *)states->data + head * s->S);
    for (int64_t t = 0; t < s->T; t++) {
        const float *x[SCAN_VECTORS];
        const int64_t token = scan_token(s, n, t, h), slot = s->T - 1 - t;
        scan_vectors(s, token, padded, x);
        scan_step(s, rows, x, (const float *)s->v->data + token * s->V + i, state, state, sa,
                  (float *)c->dst[0].data + token * s->V + i);
        if (slot < snapshots) scan_write(s, state, rows, (float *)states->data + slot * set + head * s->S);
    }
}

static void scan_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const scan s = scan_of(c);
    const int64_t groups = gg_ceil_div(s.V, SCAN_GROUP);
    for (int64_t task = begin; task < end; task++) {
        const int64_t i0 = task % groups * SCAN_GROUP, i1 = gg_min(s.V, i0 + SCAN_GROUP);
        for (int64_t i = i0; i < i1; i += GG_VW)
            scan_rows(c, &s, task / groups / s.H, task / groups % s.H, i, (int)gg_min(GG_VW, i1 - i), scratch);
    }
}

GG_KERNEL(delta_scan, .stages = 1, .tasks = scan_tasks, .run = scan_run, .scratch = scan_scratch);

/* -- delta_scan_back ------------------------------------------------------------------------------ */

enum { SCAN_DY = 5, SCAN_DSTATES = 6 };                                     /* sources, then a and b */
enum { SCAN_DR, SCAN_DW, SCAN_DK, SCAN_DV, SCAN_DSTATE, SCAN_DA, SCAN_DB }; /* results */

static scan scan_back_of(const gg_call *c) { return scan_describe(c->src, &c->src[7], &c->src[8]); }

static int64_t scan_chunk(const scan *s) { return gg_max(1, (int64_t)ceil(sqrt((double)s->T))); }

static int64_t scan_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    const scan s = scan_back_of(c);
    return s.N * s.H; /* sums over rows are a head's own */
}

static int64_t scan_back_scratch(const gg_call *c) {
    const scan s = scan_back_of(c);
    const int64_t chunk = scan_chunk(&s), chunks = gg_ceil_div(s.T, chunk);
    return ((chunks + chunk + 2) * GG_VW * s.step + chunk * GG_VW + SCAN_VECTORS * s.step) * (int64_t)sizeof(float);
}

/* The memory of a task. */
typedef struct scan_memory {
    float *kept;   /* the state before each chunk */
    float *states; /* before each token of a chunk, and after the last */
    float *d;      /* the gradient of the state */
    float *sa;     /* of each token of a chunk */
    float *padded;
} scan_memory;

static scan_memory scan_divide(const scan *s, float *scratch) {
    const int64_t chunk = scan_chunk(s), size = GG_VW * s->step;
    scan_memory m = { .kept = scratch };
    m.states = m.kept + gg_ceil_div(s->T, chunk) * size;
    m.d = m.states + (chunk + 1) * size;
    m.sa = m.d + size;
    m.padded = m.sa + chunk * GG_VW;
    return m;
}

GG_INLINE void scan_add(float *to, vf x, int64_t count) {
    if (count >= GG_VW) vf_store(to, vf_load(to) + x);
    else vf_store_n(to, vf_load_n(to, (int)count, 0) + x, (int)count);
}

/* One token backwards: d is the gradient of the state after it, then of that before it. */
GG_INLINE void scan_back_step_of(const gg_call *c, const scan *s, const int delta, const int rows,
                                 const float *const *x, int64_t token, int64_t first, const float *old,
                                 const float *new, const float *sa, float *d) {
    const float *const dy = c->src[SCAN_DY].data ? (const float *)c->src[SCAN_DY].data + token * s->V + first : NULL;
    const float *const v = (const float *)s->v->data + token * s->V + first;
    vf dv[GG_VW] = { 0 }, dsa[GG_VW] = { 0 };
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
            dv[i] += g * k;
            if (delta) {
                db += sa[i] * g;
                dsa[i] += g * b;
            }
        }
        scan_add((float *)c->dst[SCAN_DR].data + at, dr, count);
        scan_add((float *)c->dst[SCAN_DW].data + at, dw, count);
        scan_add((float *)c->dst[SCAN_DK].data + at, dk, count);
        if (delta) scan_add((float *)c->dst[SCAN_DB].data + at, db, count);
    }
    vf_store_n((float *)c->dst[SCAN_DV].data + token * s->V + first, scan_sums(dv), rows);
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
        if (delta) scan_add((float *)c->dst[SCAN_DA].data + token * s->S + j, da, s->S - j);
    }
}

static void scan_back_step(const gg_call *c, const scan *s, int rows, const float *const *x, int64_t token,
                           int64_t first, const float *old, const float *new, const float *sa, float *d) {
    if (s->delta && rows == GG_VW) scan_back_step_of(c, s, 1, GG_VW, x, token, first, old, new, sa, d);
    else if (s->delta) scan_back_step_of(c, s, 1, rows, x, token, first, old, new, sa, d);
    else if (rows == GG_VW) scan_back_step_of(c, s, 0, GG_VW, x, token, first, old, new, sa, d);
    else scan_back_step_of(c, s, 0, rows, x, token, first, old, new, sa, d);
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
    const int64_t chunk = scan_chunk(s), size = GG_VW * s->step, head = (n * s->H + h) * s->V + first;
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
            scan_back_step(c, s, rows, x, token, first, old, old + size, m->sa + (t - t0) * GG_VW, m->d);
        }
    }
    scan_write(s, m->d, rows, (float *)c->dst[SCAN_DSTATE].data + head * s->S);
}

static void scan_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const scan s = scan_back_of(c);
    const scan_memory m = scan_divide(&s, scratch);
    static const int summed[] = { SCAN_DR, SCAN_DW, SCAN_DK, SCAN_DA, SCAN_DB };
    for (int64_t task = begin; task < end; task++) {
        const int64_t n = task / s.H, h = task % s.H;
        for (int64_t t = 0; t < s.T; t++)
            for (int i = 0; i < (s.delta ? 5 : 3); i++)
                memset((float *)c->dst[summed[i]].data + scan_token(&s, n, t, h) * s.S, 0, s.S * sizeof(float));
        for (int64_t i = 0; i < s.V; i += GG_VW) scan_back_rows(c, &s, n, h, i, (int)gg_min(GG_VW, s.V - i), &m);
    }
}

GG_KERNEL(delta_scan_back, .stages = 1, .tasks = scan_back_tasks, .run = scan_back_run, .scratch = scan_back_scratch);
