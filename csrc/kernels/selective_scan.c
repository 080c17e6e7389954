/* selective_scan: Mamba's scan, of a state that decays at a pace of its head's and its column's:
 *
 *   S'[c][j] = S[c][j] exp(dt[h] A[h][j]) + x[c] dt[h] B[j]        y[c] = sum over j of S'[c][j] C[j]
 *
 *   x, y: [N, T, H, D]   dt: [N, T, H]   A: [H, S] or [H, 1]   B, C: [N, T, G, S]   s: [N, H, D, S]
 *   states: [snapshots N, H, D, S], after the last token, then after the one before, and so on; all contiguous
 *
 * A channel c is an element of a head h = c / D; the H / G heads of a group share B and C.  Channels next to each other are
 * the lanes of a vector, heads of one element (Mamba 1) as well as elements of one head (Mamba 2), so that nothing
 * is expanded and only sums over channels cross lanes.  A task has some heads of a group.
 *
 * selective_scan_back goes through chunks of tokens as delta_scan_back does.  With d the gradient of S' and e the decay:
 *
 *   d += dy C   dC += dy S'   dB += d x dt   (x dt)' = d B   p = d S e   dA += p dt   dt' += p A   d = d e */
#include "abi/attrs/scan.h"
#include "walk/kernel.h"
#include "walk/rows.h"
#include "recurrent/scan.h"

enum { SEL_S, SEL_X, SEL_DT, SEL_A, SEL_B, SEL_C, SEL_DY, SEL_DSTATES }; /* sources */
enum { SEL_DS, SEL_DX, SEL_DDT, SEL_DA, SEL_DB, SEL_DC };                /* results of the gradient */

typedef struct sel {
    int64_t N, T, H, D, G, S, width; /* width: columns of A, S or 1 */
    int64_t parts;                   /* of a group's heads */
    const float *s, *x, *dt, *A, *B, *C;
} sel;

static sel sel_of(const gg_call *c) {
    const gg_tensor *x = &c->src[SEL_X], *A = &c->src[SEL_A], *B = &c->src[SEL_B];
    sel s = {
        .N = x->ne[0],
        .T = x->ne[1],
        .H = x->ne[2],
        .D = x->ne[3],
        .G = B->ne[2],
        .S = B->ne[3],
        .width = A->ne[3],
        .s = c->src[SEL_S].data,
        .x = x->data,
        .dt = c->src[SEL_DT].data,
        .A = A->data,
        .B = B->data,
        .C = c->src[SEL_C].data,
    };
    s.parts = scan_parts(s.N * s.G, s.H / s.G);
    return s;
}

/* Channels side by side: `count` of them, beginning with c of sequence n; each one's head, or the one of them all. */
typedef struct sel_lanes {
    int64_t n, g, c;
    int count, same;
    int64_t head[GG_VW];
} sel_lanes;

static sel_lanes sel_lanes_of(const sel *s, int64_t n, int64_t g, int64_t begin, int64_t end) {
    sel_lanes l = { .n = n, .g = g, .c = begin, .count = (int)gg_min(GG_VW, end - begin) };
    for (int i = 0; i < l.count; i++) l.head[i] = (begin + i) / s->D;
    l.same = l.count == GG_VW && l.head[0] == l.head[GG_VW - 1];
    return l;
}

/* What a token brings to some channels. */
typedef struct sel_token {
    vf x, dt;
    const float *B, *C;
    int64_t at; /* of its first channel in x, y and their gradients */
} sel_token;

/* What heads have, `step` floats apart, for each channel. */
GG_INLINE vf sel_heads(const sel *s, const sel_lanes *l, const float *from, int64_t step) {
    if (l->same) return vf_set1(from[l->head[0] * step]);
    if (s->D == 1 && step == 1) return vf_load_n(from + l->c, l->count, 0);
    float lane[GG_VW] = { 0 };
    for (int i = 0; i < l->count; i++) lane[i] = from[l->head[i] * step];
    return vf_load(lane);
}

GG_INLINE sel_token sel_at(const sel *s, const sel_lanes *l, int64_t t) {
    const int64_t token = l->n * s->T + t, shared = (token * s->G + l->g) * s->S;
    sel_token k = { .B = s->B + shared, .C = s->C + shared, .at = token * s->H * s->D + l->c };
    k.x = vf_load_n(s->x + k.at, l->count, 0);
    k.dt = sel_heads(s, l, s->dt + token * s->H, 1);
    return k;
}

/* States in memory to columns of lanes, and back. */
static void sel_read(const sel *s, const sel_lanes *l, const float *from, float *to) {
    from += (l->n * s->H * s->D + l->c) * s->S;
    for (int64_t j = 0; j < s->S; j++)
        for (int i = 0; i < GG_VW; i++) to[j * GG_VW + i] = i < l->count ? from[i * s->S + j] : 0;
}
static void sel_write(const sel *s, const sel_lanes *l, const float *from, float *to) {
    to += (l->n * s->H * s->D + l->c) * s->S;
    for (int i = 0; i < l->count; i++)
        for (int64_t j = 0; j < s->S; j++) to[i * s->S + j] = from[j * GG_VW + i];
}

/* A's rows of the lanes' heads, as columns of lanes. */
static void sel_paces(const sel *s, const sel_lanes *l, float *to) {
    for (int64_t j = 0; j < s->width; j++) vf_store(to + j * GG_VW, sel_heads(s, l, s->A + j, s->width));
}

/* One token: the new state from the old one, which may be the same memory, and y.  `decays` is left with exp(dt A), a column
 * for each of A's. */
GG_INLINE vf sel_step(const sel *s, const sel_token *k, const float *paces, const float *old, float *new,
                      float *decays) {
    const vf write = k->x * k->dt;
    vf y[4] = { 0 };
    for (int64_t j = 0; j < s->width; j++) vf_store(decays + j * GG_VW, vf_exp(k->dt * vf_load(paces + j * GG_VW)));
    const int64_t step = s->width == s->S ? GG_VW : 0;
    int64_t j = 0;
    for (; j + 4 <= s->S; j += 4)
        for (int i = 0; i < 4; i++) {
            const int64_t at = (j + i) * GG_VW;
            const vf state = vf_load(old + at) * vf_load(decays + (j + i) * step) + write * k->B[j + i];
            vf_store(new + at, state);
            y[i] += state * k->C[j + i];
        }
    for (; j < s->S; j++) {
        const vf state = vf_load(old + j * GG_VW) * vf_load(decays + j * step) + write * k->B[j];
        vf_store(new + j * GG_VW, state);
        y[0] += state * k->C[j];
    }
    return (y[0] + y[1]) + (y[2] + y[3]);
}

/* Where the heads of a part begin, counted within the group. */
static int64_t sel_cut(const sel *s, int64_t part) { return gg_cut(s->H / s->G, part, s->parts); }

/* -- selective_scan ------------------------------------------------------------------------------- */

static int64_t sel_tasks(const gg_call *c, int stage) {
    (void)stage;
    const sel s = sel_of(c);
    return s.N * s.G * s.parts;
}

static int64_t sel_scratch(const gg_call *c) {
    const sel s = sel_of(c);
    return (s.S + 2 * s.width) * GG_VW * (int64_t)sizeof(float);
}

static void sel_channels(const gg_call *c, const sel *s, const sel_lanes *l, float *scratch) {
    float *const state = scratch, *const paces = state + s->S * GG_VW, *const decays = paces + s->width * GG_VW;
    float *const y = c->dst[0].data, *const states = c->dst[1].data;
    const int64_t set = s->N * s->H * s->D * s->S, snapshots = c->dst[1].ne[0] / s->N;
    sel_read(s, l, s->s, state);
    sel_paces(s, l, paces);
    if (s->T == 0) sel_write(s, l, state, states);
    for (int64_t t = 0; t < s->T; t++) {
        const sel_token k = sel_at(s, l, t);
        vf_store_n(y + k.at, sel_step(s, &k, paces, state, state, decays), l->count);
        if (s->T - 1 - t < snapshots) sel_write(s, l, state, states + (s->T - 1 - t) * set);
    }
}

static void sel_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const sel s = sel_of(c);
    for (int64_t task = begin; task < end; task++) {
        const int64_t part = task % s.parts, group = task / s.parts, g = group % s.G, heads = s.H / s.G;
        const int64_t first = (g * heads + sel_cut(&s, part)) * s.D, last = (g * heads + sel_cut(&s, part + 1)) * s.D;
        for (int64_t at = first; at < last; at += GG_VW) {
            const sel_lanes l = sel_lanes_of(&s, group / s.G, g, at, last);
            sel_channels(c, &s, &l, scratch);
        }
    }
}

GG_KERNEL(selective_scan, .stages = 1, .tasks = sel_tasks, .run = sel_run, .scratch = sel_scratch);

/* -- selective_scan_back -------------------------------------------------------------------------- */

static float *sel_result(const gg_call *c, int i) {
    const gg_tensor *t = gg_result(c, ((const gg_selective_scan_back_attrs *)c->attrs)->wanted, i);
    return t ? t->data : NULL;
}

/* Sums over the channels of a group have an array for each part of them, dA one for each sequence, where these are several. */
static int64_t sel_shared(const sel *s) { return s->N * s->T * s->G * s->S; }
static int64_t sel_of_heads(const sel *s) { return s->H * s->width; }
static int64_t sel_apart(const sel *s) {
    return s->parts > 1 ? 2 * s->parts * sel_shared(s) : 0;
} /* floats before dA's */

static int64_t sel_back_work(const gg_call *c) {
    const sel s = sel_of(c);
    return (sel_apart(&s) + (s.N > 1 ? s.N * sel_of_heads(&s) : 0)) * (int64_t)sizeof(float);
}

static int64_t sel_back_scratch(const gg_call *c) {
    const sel s = sel_of(c);
    const int64_t chunk = scan_chunk(s.T), size = s.S * GG_VW, pace = s.width * GG_VW;
    const int64_t kept = gg_ceil_div(s.T, chunk) + chunk + 2; /* states, and d */
    return (kept * size + (chunk + 3) * pace) * (int64_t)sizeof(float);
}

/* The memory of a task, and where its sums go. */
typedef struct sel_memory {
    float *kept;   /* the state before each chunk */
    float *states; /* before each token of a chunk, and after the last */
    float *decays; /* of each token of a chunk */
    float *d;      /* the gradient of the state */
    float *paces;
    float *dA_lanes, *dA_chunk; /* of all tokens, and of a chunk's */
    float *dA, *dB, *dC;        /* NULL for those that are not wanted, and so below: */
    float *ds, *dx, *ddt;
} sel_memory;

static sel_memory sel_divide(const gg_call *c, const sel *s, int64_t n, int64_t part, float *scratch) {
    const int64_t chunk = scan_chunk(s->T), size = s->S * GG_VW, pace = s->width * GG_VW;
    sel_memory m = { .kept = scratch };
    m.states = m.kept + gg_ceil_div(s->T, chunk) * size;
    m.d = m.states + (chunk + 1) * size;
    m.decays = m.d + size;
    m.paces = m.decays + chunk * pace;
    m.dA_lanes = m.paces + pace;
    m.dA_chunk = m.dA_lanes + pace;
    float *const work = c->work;
    m.ds = sel_result(c, SEL_DS), m.dx = sel_result(c, SEL_DX), m.ddt = sel_result(c, SEL_DDT);
    m.dA = sel_result(c, SEL_DA), m.dB = sel_result(c, SEL_DB), m.dC = sel_result(c, SEL_DC);
    if (m.dB && s->parts > 1) m.dB = work + 2 * part * sel_shared(s);
    if (m.dC && s->parts > 1) m.dC = work + (2 * part + 1) * sel_shared(s);
    if (m.dA && s->N > 1) m.dA = work + sel_apart(s) + n * sel_of_heads(s);
    return m;
}

/* One token backwards: d is the gradient of the state after it, then of that before it. */
static void sel_back_step(const gg_call *c, const sel *s, const sel_lanes *l, const sel_memory *m, int64_t t,
                          const float *old, const float *new, const float *decays) {
    const sel_token k = sel_at(s, l, t);
    const float *const dys = c->src[SEL_DY].data;
    const vf dy = dys == NULL ? vf_zero() : vf_load_n(dys + k.at, l->count, 0);
    const vf write = k.x * k.dt;
    const int64_t shared = ((l->n * s->T + t) * s->G + l->g) * s->S, step = s->width == s->S ? GG_VW : 0;
    const vi lanes_used = vi_lanes() < l->count;
    vf dwrite = vf_zero(), ddt = vf_zero();
    for (int64_t j0 = 0; j0 < s->S; j0 += GG_VW) {
        const int count = (int)gg_min(GG_VW, s->S - j0);
        vf dB[GG_VW], dC[GG_VW];
        for (int i = count; i < GG_VW; i++) dB[i] = dC[i] = vf_zero();
        for (int i = 0; i < count; i++) {
            const int64_t j = j0 + i, at = j * GG_VW;
            const vf after = vf_load(m->d + at), d = dys == NULL ? after : after + dy * k.C[j];
            const vf e = vf_load(decays + j * step);
            dC[i] = vf_select(lanes_used, dy * vf_load(new + at), vf_zero());
            dB[i] = vf_select(lanes_used, d * write, vf_zero());
            dwrite += d * k.B[j];
            const vf p = d * vf_load(old + at) * e;
            if (m->dA) vf_store(m->dA_chunk + j * step, vf_load(m->dA_chunk + j * step) + p * k.dt);
            ddt += p * vf_load(m->paces + j * step);
            vf_store(m->d + at, d * e);
        }
        if (m->dB) scan_add(m->dB + shared + j0, scan_sums(dB), count);
        if (m->dC && dys != NULL) scan_add(m->dC + shared + j0, scan_sums(dC), count);
    }
    if (m->dx) vf_store_n(m->dx + k.at, dwrite * k.dt, l->count);
    if (m->ddt == NULL) return;
    float lanes[GG_VW], *const to = m->ddt + (l->n * s->T + t) * s->H;
    vf_store(lanes, ddt + dwrite * k.x);
    if (l->same) to[l->head[0]] += vf_sum(vf_load(lanes));
    else
        for (int i = 0; i < l->count; i++) to[l->head[i]] += lanes[i];
}

/* Add the gradient of the snapshot in a slot, if there is one. */
static void sel_add_snapshot(const gg_call *c, const sel *s, const sel_lanes *l, int64_t slot, float *d) {
    const gg_tensor *g = &c->src[SEL_DSTATES];
    if (g->data == NULL || slot >= g->ne[0] / s->N) return;
    const float *const from = (const float *)g->data + ((slot * s->N + l->n) * s->H * s->D + l->c) * s->S;
    for (int i = 0; i < l->count; i++)
        for (int64_t j = 0; j < s->S; j++) d[j * GG_VW + i] += from[i * s->S + j];
}

static void sel_back_channels(const gg_call *c, const sel *s, const sel_lanes *l, const sel_memory *m) {
    const int64_t chunk = scan_chunk(s->T), size = s->S * GG_VW, pace = s->width * GG_VW;
    sel_read(s, l, s->s, m->states);
    sel_paces(s, l, m->paces);
    memset(m->dA_lanes, 0, pace * sizeof(float));
    for (int64_t t = 0; t < s->T; t++) {
        if (t % chunk == 0) memcpy(m->kept + t / chunk * size, m->states, size * sizeof(float));
        if (t + chunk >= s->T && t % chunk == 0) break; /* the last chunk, which comes first below */
        const sel_token k = sel_at(s, l, t);
        sel_step(s, &k, m->paces, m->states, m->states, m->decays);
    }
    memset(m->d, 0, size * sizeof(float));
    if (s->T == 0) sel_add_snapshot(c, s, l, 0, m->d);
    for (int64_t t0 = s->T == 0 ? -1 : (s->T - 1) / chunk * chunk; t0 >= 0; t0 -= chunk) {
        const int64_t t1 = gg_min(s->T, t0 + chunk);
        memcpy(m->states, m->kept + t0 / chunk * size, size * sizeof(float));
        for (int64_t t = t0; t < t1; t++) {
            float *const old = m->states + (t - t0) * size;
            const sel_token k = sel_at(s, l, t);
            sel_step(s, &k, m->paces, old, old + size, m->decays + (t - t0) * pace);
        }
        memset(m->dA_chunk, 0, pace * sizeof(float));
        for (int64_t t = t1 - 1; t >= t0; t--) {
            const float *const old = m->states + (t - t0) * size;
            sel_add_snapshot(c, s, l, s->T - 1 - t, m->d);
            sel_back_step(c, s, l, m, t, old, old + size, m->decays + (t - t0) * pace);
        }
        gg_add_row(m->dA_lanes, m->dA_chunk, pace);
    }
    if (m->ds) sel_write(s, l, m->d, m->ds);
    for (int i = 0; m->dA && i < l->count; i++)
        for (int64_t j = 0; j < s->width; j++) m->dA[l->head[i] * s->width + j] += m->dA_lanes[j * GG_VW + i];
}

/* Some heads of a group: their own sums begin with zero, and this part's of the group. */
static void sel_back_part(const gg_call *c, const sel *s, int64_t n, int64_t g, int64_t part, void *scratch) {
    const sel_memory m = sel_divide(c, s, n, part, scratch);
    const int64_t heads = s->H / s->G, h0 = g * heads + sel_cut(s, part), h1 = g * heads + sel_cut(s, part + 1);
    for (int64_t t = 0; t < s->T; t++) {
        const int64_t token = n * s->T + t, shared = (token * s->G + g) * s->S;
        if (m.dB) memset(m.dB + shared, 0, s->S * sizeof(float));
        if (m.dC) memset(m.dC + shared, 0, s->S * sizeof(float));
        if (m.ddt) memset(m.ddt + token * s->H + h0, 0, (h1 - h0) * sizeof(float));
    }
    if (m.dA) memset(m.dA + h0 * s->width, 0, (h1 - h0) * s->width * sizeof(float));
    for (int64_t at = h0 * s->D; at < h1 * s->D; at += GG_VW) {
        const sel_lanes l = sel_lanes_of(s, n, g, at, h1 * s->D);
        sel_back_channels(c, s, &l, &m);
    }
}

/* Sums of several arrays in c->work: of dB, dC and dA, in that order, those that have them. */
static int64_t sel_pieces(int64_t elements) { return gg_ceil_div(elements, GG_TASK_ELEMENTS); }

static void sel_total(float *to, const float *from, int64_t arrays, int64_t step, int64_t elements, int64_t piece) {
    const int64_t begin = piece * GG_TASK_ELEMENTS, end = gg_min(elements, begin + GG_TASK_ELEMENTS);
    enum { SOME = 256 };
    for (int64_t at = begin; at < end; at += SOME) {
        const int64_t n = gg_min(SOME, end - at);
        double sum[SOME] = { 0 };
        for (int64_t i = 0; i < arrays; i++)
            for (int64_t e = 0; e < n; e++) sum[e] += from[i * step + at + e];
        for (int64_t e = 0; e < n; e++) to[at + e] = (float)sum[e];
    }
}

/* In how many tasks the sums of dB, dC or dA are added up: none if it is not wanted, or has one sum. */
static int64_t sel_additions(const gg_call *c, const sel *s, int result) {
    if (sel_result(c, result) == NULL) return 0;
    if (result == SEL_DA) return s->N > 1 ? sel_pieces(sel_of_heads(s)) : 0;
    return s->parts > 1 ? sel_pieces(sel_shared(s)) : 0;
}

static int64_t sel_back_tasks(const gg_call *c, int stage) {
    const sel s = sel_of(c);
    if (stage == 0) return s.N * s.G * s.parts;
    return sel_additions(c, &s, SEL_DB) + sel_additions(c, &s, SEL_DC) + sel_additions(c, &s, SEL_DA);
}

static void sel_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const sel s = sel_of(c);
    for (int64_t task = begin; task < end; task++)
        if (stage == 0) {
            const int64_t group = task / s.parts;
            sel_back_part(c, &s, group / s.G, group % s.G, task % s.parts, scratch);
        } else {
            const int64_t shared = sel_shared(&s), heads = sel_of_heads(&s);
            const int64_t of_B = sel_additions(c, &s, SEL_DB), of_C = sel_additions(c, &s, SEL_DC);
            const float *const work = c->work;
            if (task < of_B) sel_total(sel_result(c, SEL_DB), work, s.parts, 2 * shared, shared, task);
            else if (task < of_B + of_C)
                sel_total(sel_result(c, SEL_DC), work + shared, s.parts, 2 * shared, shared, task - of_B);
            else sel_total(sel_result(c, SEL_DA), work + sel_apart(&s), s.N, heads, heads, task - of_B - of_C);
        }
}

GG_KERNEL(selective_scan_back, .stages = 2, .tasks = sel_back_tasks, .run = sel_back_run, .work = sel_back_work,
          .scratch = sel_back_scratch);
