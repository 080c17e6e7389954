/* Gradients of sparse latent attention; see sparse_mla.h.
 *
 *   P = exp((scale Q) X^T - top) / total    dS = scale P (dO X^T - delta)    delta = rowsum(dO O) - dlse
 *   dQ = dS X    dX = dS^T Q + P^T dO    dsinks = - sum over tokens of exp(sinks - top) / total delta, or with lse instead
 *   of the top, and no total
 *
 * Many tokens see the same row, so tokens are cut into units, and a unit adds up the gradients of the rows that its
 * tokens may see in memory of its own; a last stage adds up the units', in their order.  Units are cut by shape; how
 * many rows each may see follows from lengths, and is worked out in the first stage, but all of them together never
 * take more than shapes allow: ranges of tokens one after another overlap by a window at most.
 *
 * Scores are the forward's, to the bit; delta is one chain in the order of dO X^T, so that with one visible row and no
 * sink dS is exactly 0. */
#include "attention/sparse_mla.h"

static const mla_sources SOURCES = { .kv = 4, .table = -1, .cu = 8 };
enum { SRC_DOUT = 1, SRC_OUT, SRC_LSE, SRC_DLSE = 18, SRC_TOTAL };
enum { DQ, DKV, DSINKS = DKV + SIDES, L1NORM }; /* results; DKV and L1NORM of each side */
enum { LOCATE, UNITS, REDUCE, STAGES };
enum {
    MOST_UNITS = 64, /* tasks that there may be ... */
    FEWEST = 8,      /* ... and that there are whatever memory they take, if there are as many blocks */
};

/* The rows that a unit's tokens may see, counted through all rows, and where their gradients are among all units'. */
typedef struct unit {
    int64_t begin[SIDES], end[SIDES], at[SIDES];
} unit;

typedef struct grad {
    mla a;
    const gg_tensor *dout, *out, *lse, *dlse, *total;            /* dlse and total: NULL if there is none */
    const gg_tensor *dq, *d_kv[SIDES], *d_sinks, *l1norm[SIDES]; /* NULL for those that are not wanted */
    int64_t units;
    unit *unit;              /* [units] */
    double *sinks;           /* [units][N1] */
    float *partial[SIDES];   /* [rows of all units][wide], of the sides whose d_kv is wanted */
    int64_t work;            /* bytes */
    float *q, *g, *sum;      /* [lanes][step]: of q, of dout, and of dq */
    float *qt, *gt;          /* [panels][D][GG_NR]: scaled q, dout */
    float *ot;               /* [D][GG_NR] */
    float *lse_base, *delta; /* [panels * GG_NR]; lse or top, but 0 where all scores are -inf, whose weights are 0 */
    float *inverse;          /* [panels * GG_NR], of the total */
    float *ones;             /* [GG_NR] */
    float *p, *ds;           /* [MLA_ROWS][GG_NR] */
    float *x, *dx;           /* [MLA_ROWS][step] */
    int64_t *rows;           /* [MLA_ROWS] of a list */
    int32_t *slots;
    int64_t *seen; /* [block] */
    int64_t floats;
} grad;

/* Rows that so many units may see, all of them together. */
static int64_t most_rows(const mla *a, int side, int64_t units) {
    const mla_side *s = &a->side[side];
    if (s->kv == NULL) return 0;
    int64_t overlap = s->kv->ne[1]; /* of units one after another: within one sequence */
    if (side == ORI && a->left >= 0 && a->right >= 0) overlap = gg_min(overlap, a->left + a->right);
    return s->rows + (units - 1) * overlap;
}

/* As many as there is work for, but they are not to need more memory than q and kv do. */
static int64_t count_units(const mla *a) {
    const double flops = 10.0 * a->tokens * a->N1 * a->D * mla_most_seen(a);
    int64_t units = gg_min(gg_min(mla_blocks(a), MOST_UNITS), (int64_t)(flops / MLA_TASK_FLOPS));
    const int64_t rows = a->tokens * a->N1 + a->side[ORI].rows + a->side[CMP].rows;
    while (units > FEWEST && most_rows(a, ORI, units) + most_rows(a, CMP, units) > rows) units--;
    return gg_max(1, units);
}

static void *take_bytes(char *base, int64_t *used, int64_t bytes) {
    char *here = base ? base + *used : NULL;
    *used += gg_round_up(bytes, 64);
    return here;
}

static grad open_grad(const gg_call *c, float *scratch) {
    grad f = { .a = mla_open(c, SOURCES, c->attrs),
               .dout = &c->src[SRC_DOUT],
               .out = &c->src[SRC_OUT],
               .lse = &c->src[SRC_LSE],
               .dlse = mla_given(&c->src[SRC_DLSE]),
               .total = mla_given(&c->src[SRC_TOTAL]) };
    const mla *a = &f.a;
    const int32_t *wanted = ((const gg_sparse_flash_mla_grad_attrs *)c->attrs)->wanted;
    f.dq = gg_result(c, wanted, DQ), f.d_sinks = gg_result(c, wanted, DSINKS);
    for (int side = 0; side < SIDES; side++) {
        f.d_kv[side] = gg_result(c, wanted, DKV + side);
        f.l1norm[side] = gg_result(c, wanted, L1NORM + side);
    }

    f.units = count_units(a);
    f.work = mla_table_bytes(a);
    f.unit = take_bytes(c->work, &f.work, f.units * (int64_t)sizeof(unit));
    f.sinks = take_bytes(c->work, &f.work, f.units * a->N1 * (int64_t)sizeof(double));
    for (int side = 0; side < SIDES; side++)
        if (f.d_kv[side] != NULL)
            f.partial[side] =
                take_bytes(c->work, &f.work, most_rows(a, side, f.units) * a->wide * (int64_t)sizeof(float));

    const int64_t panels = gg_ceil_div(a->lanes, GG_NR);
    f.q = gg_claim(scratch, &f.floats, a->lanes * a->step);
    f.g = gg_claim(scratch, &f.floats, a->lanes * a->step);
    f.sum = gg_claim(scratch, &f.floats, a->lanes * a->step);
    f.qt = gg_claim(scratch, &f.floats, panels * GG_NR * a->D);
    f.gt = gg_claim(scratch, &f.floats, panels * GG_NR * a->D);
    f.ot = gg_claim(scratch, &f.floats, GG_NR * a->D);
    f.lse_base = gg_claim(scratch, &f.floats, panels * GG_NR);
    f.delta = gg_claim(scratch, &f.floats, panels * GG_NR);
    f.inverse = gg_claim(scratch, &f.floats, panels * GG_NR);
    f.ones = gg_claim(scratch, &f.floats, GG_NR);
    f.p = gg_claim(scratch, &f.floats, MLA_ROWS * GG_NR);
    f.ds = gg_claim(scratch, &f.floats, MLA_ROWS * GG_NR);
    f.x = gg_claim(scratch, &f.floats, MLA_ROWS * a->step);
    f.dx = gg_claim(scratch, &f.floats, MLA_ROWS * a->step);
    f.rows = (int64_t *)gg_claim(scratch, &f.floats, MLA_ROWS * 2);
    f.slots = (int32_t *)gg_claim(scratch, &f.floats, MLA_ROWS);
    f.seen = (int64_t *)gg_claim(scratch, &f.floats, a->block * 2);
    return f;
}

/* The first token of a unit: units hold whole blocks. */
static int64_t unit_token(const grad *f, int64_t u) {
    return gg_min(f->a.tokens, gg_cut(mla_blocks(&f->a), u, f->units) * f->a.block);
}

/* What each unit may see. */
static void find_units(const grad *f) {
    const mla *a = &f->a;
    int64_t at[SIDES] = { 0 };
    for (int64_t u = 0; u < f->units; u++) {
        unit *const w = &f->unit[u];
        *w = (unit){ 0 };
        const int64_t end = unit_token(f, u + 1);
        for (mla_run r = { .token = unit_token(f, u) }; r.token < end; r.token += r.n) {
            r = mla_next(a, r.token, end);
            for (int side = 0; side < SIDES && r.b >= 0; side++) {
                if (a->side[side].kv == NULL) continue;
                const int64_t lo = mla_sees(a, side, r.b, r.i).lo, hi = mla_sees(a, side, r.b, r.i + r.n - 1).hi;
                if (lo >= hi) continue;
                if (w->end[side] == 0) w->begin[side] = a->sequence[r.b].start[side] + lo;
                w->end[side] = a->sequence[r.b].start[side] + hi;
            }
        }
        for (int side = 0; side < SIDES; side++) {
            w->at[side] = at[side];
            at[side] += w->end[side] - w->begin[side];
        }
    }
}

/* -- one block of tokens ----------------------------------------------------------------------------------- */

GG_INLINE void spread_tile(const int M, const int vectors, int64_t lanes, const float *ds, const float *q,
                           const float *p, const float *g, int64_t step, float *to, int64_t to_step) {
    vf c[GG_MR][GG_NV];
    gg_micro_part(M, vectors, lanes, ds, GG_NR, 1, q, step, c);
    gg_micro_onto(M, vectors, lanes, p, GG_NR, 1, g, step, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *at = to + m * to_step + v * GG_VW;
            vf_store(at, vf_load(at) + c[m][v]);
        }
}

/* to[n][wide] += ds q + p g, over the lanes of a piece. */
static void spread(const grad *f, const mla_piece *piece, float *to, int64_t to_step) {
    const mla *a = &f->a;
    const int64_t step = a->step, lanes = piece->l1 - piece->l0, lane = piece->panel * GG_NR + piece->l0;
    const float *const q = f->q + lane * step, *const g = f->g + lane * step;
    for (int64_t d = 0, vectors; d < a->wide; d += vectors * GG_VW) {
        vectors = d + GG_NR <= a->wide ? GG_NV : 1;
        for (int64_t j = 0; j < piece->n; j += GG_MR) {
            const int64_t M = gg_min(GG_MR, piece->n - j), at = j * GG_NR + piece->l0;
            const float *const ds = f->ds + at, *const p = f->p + at;
            float *const x = to + j * to_step + d;
            if (vectors == GG_NV) GG_EACH_M(M, spread_tile, GG_NV, lanes, ds, q + d, p, g + d, step, x, to_step)
            else GG_EACH_M(M, spread_tile, 1, lanes, ds, q + d, p, g + d, step, x, to_step)
        }
    }
}

/* P and dS of a piece, what it adds to dq, and to its rows' gradients at `to`; NULL: these are not wanted. */
static void add_piece(const grad *f, const mla_piece *p, float *to, int64_t to_step) {
    const mla *a = &f->a;
    const int64_t lane = p->panel * GG_NR;
    mla_scores(a, p, f->qt + lane * a->D, f->p);
    mla_scores(a, p, f->gt + lane * a->D, f->ds);
    for (int v = p->v0; v < p->v1; v++) {
        const vf lse = vf_load(f->lse_base + lane + v * GG_VW), delta = vf_load(f->delta + lane + v * GG_VW);
        const vf inverse = vf_load(f->inverse + lane + v * GG_VW);
        for (int64_t j = 0; j < p->n; j++) {
            float *const pj = f->p + j * GG_NR + v * GG_VW, *const dj = f->ds + j * GG_NR + v * GG_VW;
            vf weight = vf_exp(vf_load(pj) - lse) * inverse;
            vf slope = weight * (vf_load(dj) - delta) * a->scale;
            if (j < p->open || j >= p->close) {
                const vi visible = mla_visible(p, v, j);
                weight = vf_select(visible, weight, vf_zero());
                slope = vf_select(visible, slope, vf_zero());
            }
            vf_store(pj, weight);
            vf_store(dj, slope);
        }
    }
    if (f->dq != NULL) mla_sums(a, p, f->ds, f->ones, f->sum + lane * a->step);
    if (to != NULL) spread(f, p, to, to_step);
}

/* l1norm += the mean over heads of the weights of a list's entries, of which the piece has some heads. */
static void add_l1norm(const grad *f, const mla_piece *p, float *l1norm) {
    for (int64_t j = 0; j < p->n; j++) {
        vf sum = vf_zero();
        for (int v = p->v0; v < p->v1; v++) sum += vf_load(f->p + j * GG_NR + v * GG_VW);
        l1norm[f->slots[j]] += vf_sum(sum) / (float)f->a.N1;
    }
}

static float *partial_row(const grad *f, const unit *w, int side, int64_t row) {
    if (f->d_kv[side] == NULL) return NULL;
    return f->partial[side] + (w->at[side] + row - w->begin[side]) * f->a.wide;
}

static void add_list(const grad *f, const unit *w, int side, const mla_run *r, int64_t k) {
    const mla *a = &f->a;
    const int64_t width = a->side[side].list->ne[3], first = k * a->N1 / GG_NR;
    float *const l1norm = f->l1norm[side] ? (float *)f->l1norm[side]->data + (r->token + k) * width : NULL;
    float *const dx = f->d_kv[side] ? f->dx : NULL;
    if (l1norm) memset(l1norm, 0, width * sizeof(float));
    for (int64_t at = 0; at < width;) {
        const int64_t n = mla_listed(a, side, r, k, &at, f->rows, f->slots);
        for (int64_t j = 0; j < n; j++) mla_copy_row(a, mla_at(a->side[side].kv, f->rows[j]), f->x + j * a->step);
        f->seen[k] += n;
        if (dx) memset(dx, 0, n * a->step * sizeof(float));
        for (int64_t panel = first; n > 0 && panel * GG_NR < (k + 1) * a->N1; panel++) {
            const mla_piece p = mla_list_piece(a, k, panel, f->x, n);
            add_piece(f, &p, dx, a->step);
            if (l1norm) add_l1norm(f, &p, l1norm);
        }
        for (int64_t j = 0; dx && j < n; j++) {
            float *const to = partial_row(f, w, side, f->rows[j]);
            const float *const from = dx + j * a->step;
            for (int64_t d = 0; d < a->wide; d += GG_VW) vf_store(to + d, vf_load(to + d) + vf_load(from + d));
        }
    }
}

static void add_range(const grad *f, const unit *w, int side, const mla_run *r) {
    const mla *a = &f->a;
    const mla_range first = mla_sees(a, side, r->b, r->i), last = mla_sees(a, side, r->b, r->i + r->n - 1);
    mla_count_range(a, side, r, f->seen);
    for (int64_t j0 = first.lo; j0 < last.hi; j0 += MLA_ROWS) {
        const int64_t n = gg_min(MLA_ROWS, last.hi - j0);
        mla_copy_range(a, side, r, j0, n, f->x);
        for (int64_t panel = 0; panel * GG_NR < r->n * a->N1; panel++) {
            const mla_piece p = mla_range_piece(a, side, r, panel, f->x, j0, n);
            const int64_t row = a->sequence[r->b].start[side] + j0 + (p.x - f->x) / a->step;
            if (p.n > 0) add_piece(f, &p, partial_row(f, w, side, row), a->wide);
        }
    }
}

/* Everything of a block's lanes that its pieces need.  `sum` holds out for a while. */
static void begin_lanes(const grad *f, const mla_run *r) {
    const mla *a = &f->a;
    const int64_t lanes = r->n * a->N1;
    mla_turn(a, f->q, lanes, a->scale, f->qt);
    mla_turn(a, f->g, lanes, 1.0f, f->gt);
    mla_copy_lanes(a, f->out, r, f->sum);
    for (int64_t l = 0; l < lanes; l += GG_NR) {
        mla_turn(a, f->sum + l * a->step, gg_min(GG_NR, lanes - l), 1.0f, f->ot);
        for (int v = 0; v < GG_NV; v++) {
            const float *const g = f->gt + l * a->D + v * GG_VW, *const o = f->ot + v * GG_VW;
            vf sum = vf_zero();
            for (int64_t d = 0; d < a->D; d++) sum += vf_load(g + d * GG_NR) * vf_load(o + d * GG_NR);
            vf_store(f->delta + l + v * GG_VW, sum);
        }
    }
    for (int64_t k = 0; k < r->n; k++)
        for (int64_t h = 0, l = k * a->N1; h < a->N1; h++, l++) {
            const float lse = mla_lse_at(f->lse, r->token + k)[h];
            const float total = f->total != NULL ? mla_lse_at(f->total, r->token + k)[h] : 1;
            f->lse_base[l] = lse == -INFINITY ? 0 : lse;
            f->inverse[l] = total == 0 ? 1 : 1 / total;
            if (f->dlse != NULL) f->delta[l] -= mla_lse_at(f->dlse, r->token + k)[h];
        }
    for (int64_t l = lanes; l < gg_round_up(lanes, GG_NR); l++) f->lse_base[l] = f->delta[l] = f->inverse[l] = 0;
    memset(f->sum, 0, lanes * a->step * sizeof(float));
    memset(f->seen, 0, r->n * sizeof(int64_t));
}

/* What the sinks' share of each softmax adds to their gradients: nothing of a token that sees nothing. */
static void add_sinks(const grad *f, const mla_run *r, double *sinks) {
    const mla *a = &f->a;
    for (int64_t h = 0; h < a->N1; h++) {
        float sink;
        memcpy(&sink, (const char *)a->sinks->data + h * a->sinks->nb[3], sizeof sink);
        for (int64_t k = 0; k < r->n; k++) {
            const int64_t l = k * a->N1 + h;
            if (f->seen[k] == 0) continue;
            const float lse = mla_lse_at(f->lse, r->token + k)[h];
            const float share = sink == lse ? sink != -INFINITY : vf_exp(vf_set1(sink - f->lse_base[l]))[0];
            sinks[h] -= (double)share * f->inverse[l] * f->delta[l];
        }
    }
}

static int lanes_finite(const mla *a, const float *x, int64_t lanes) {
    int finite = 1;
    for (int64_t l = 0; finite && l < lanes; l++) finite = gg_row_finite(x + l * a->step, a->D);
    return finite;
}

static void run_tokens(const grad *f, const unit *w, double *sinks, const mla_run *r) {
    const mla *a = &f->a;
    const int64_t lanes = r->n * a->N1;
    float *const dq = f->dq ? (float *)f->dq->data + r->token * a->N1 * a->D : NULL;
    if (r->b < 0) {
        if (dq) memset(dq, 0, lanes * a->D * sizeof(float));
        for (int side = 0; side < SIDES; side++) {
            if (f->l1norm[side] == NULL) continue;
            const int64_t width = a->side[side].list->ne[3];
            memset((float *)f->l1norm[side]->data + r->token * width, 0, r->n * width * sizeof(float));
        }
        return;
    }
    mla_copy_lanes(a, a->q, r, f->q);
    mla_copy_lanes(a, f->dout, r, f->g);
    int some = 0;
    const int finite = mla_ends_finite(a, r, &some);
    if (some && !(finite && lanes_finite(a, f->q, lanes) && lanes_finite(a, f->g, lanes))) {
        for (int64_t k = 0; k < r->n; k++) run_tokens(f, w, sinks, &(mla_run){ r->b, r->token + k, r->i + k, 1 });
        return;
    }
    begin_lanes(f, r);
    for (int side = 0; side < SIDES; side++) {
        if (a->side[side].kv == NULL) continue;
        if (a->side[side].list == NULL) add_range(f, w, side, r);
        else
            for (int64_t k = 0; k < r->n; k++) add_list(f, w, side, r, k);
    }
    for (int64_t l = 0; dq && l < lanes; l++) memcpy(dq + l * a->D, f->sum + l * a->step, a->D * sizeof(float));
    if (f->d_sinks != NULL) add_sinks(f, r, sinks);
}

/* -- stages ------------------------------------------------------------------------------------------------- */

static void run_unit(const grad *f, int64_t u) {
    const mla *a = &f->a;
    const unit *const w = &f->unit[u];
    double *const sinks = f->sinks + u * a->N1;
    memset(sinks, 0, a->N1 * sizeof(double));
    for (int side = 0; side < SIDES; side++)
        if (f->d_kv[side] && w->end[side] > w->begin[side])
            memset(partial_row(f, w, side, w->begin[side]), 0,
                   (w->end[side] - w->begin[side]) * a->wide * sizeof(float));
    for (int64_t k = 0; k < GG_NR; k++) f->ones[k] = 1;
    const int64_t end = unit_token(f, u + 1);
    for (mla_run r = { .token = unit_token(f, u) }; r.token < end; r.token += r.n) {
        r = mla_next(a, r.token, gg_min(end, gg_round_up(r.token + 1, a->block)));
        run_tokens(f, w, sinks, &r);
    }
}

/* Rows of one side: what every unit that saw them has found, in order. */
static void reduce_rows(const grad *f, int side, int64_t from, int64_t to) {
    const mla *a = &f->a;
    if (from >= to || f->d_kv[side] == NULL) return;
    float *const d_kv = f->d_kv[side]->data;
    memset(d_kv + from * a->D, 0, (to - from) * a->D * sizeof(float));
    for (int64_t u = 0; u < f->units; u++) {
        const unit *const w = &f->unit[u];
        for (int64_t r = gg_max(from, w->begin[side]); r < gg_min(to, w->end[side]); r++) {
            const float *const part = partial_row(f, w, side, r);
            for (int64_t d = 0; d < a->D; d++) d_kv[r * a->D + d] += part[d];
        }
    }
}

static void reduce_sinks(const grad *f) {
    const mla *a = &f->a;
    for (int64_t h = 0; f->d_sinks != NULL && h < a->N1; h++) {
        double sum = 0;
        for (int64_t u = 0; u < f->units; u++) sum += f->sinks[u * a->N1 + h];
        ((float *)f->d_sinks->data)[h] = (float)sum;
    }
}

static int64_t grad_tasks(const gg_call *c, int stage) {
    if (stage == LOCATE) return 1;
    const mla a = mla_open(c, SOURCES, c->attrs);
    if (stage == UNITS) return count_units(&a);
    const int32_t *wanted = ((const gg_sparse_flash_mla_grad_attrs *)c->attrs)->wanted;
    if (!wanted[DKV + ORI] && !wanted[DKV + CMP] && !wanted[DSINKS]) return 0;
    return gg_row_tasks(a.side[ORI].rows + a.side[CMP].rows, a.D, 4);
}

static void grad_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const grad f = open_grad(c, scratch);
    const mla *a = &f.a;
    if (stage == LOCATE) {
        if (mla_locate(a, c, SOURCES)) find_units(&f);
    } else if (stage == UNITS) {
        for (int64_t u = begin; u < end; u++) run_unit(&f, u);
    } else {
        const int64_t ori = a->side[ORI].rows, all = ori + a->side[CMP].rows, tasks = grad_tasks(c, REDUCE);
        const int64_t from = gg_cut(all, begin, tasks), to = gg_cut(all, end, tasks);
        reduce_rows(&f, ORI, gg_min(from, ori), gg_min(to, ori));
        reduce_rows(&f, CMP, gg_max(from, ori) - ori, gg_max(to, ori) - ori);
        if (begin == 0) reduce_sinks(&f);
    }
}

static int64_t grad_work(const gg_call *c) { return open_grad(c, NULL).work; }

static int64_t grad_scratch(const gg_call *c) { return open_grad(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(sparse_flash_mla_grad, .stages = STAGES, .tasks = grad_tasks, .run = grad_run, .work = grad_work,
          .scratch = grad_scratch);
