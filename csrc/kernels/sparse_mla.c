/* Sparse latent attention, forward; see sparse_mla.h.
 *
 * A first stage finds the sequences and checks their lengths; then blocks of tokens are independent.  A panel goes
 * through its rows with a running maximum, which begins at the sink:
 *
 *   M' = max(M, s)    sum = sum exp(M - M') + exp(s - M')    out = out exp(M - M') + exp(s - M') x */
#include "attention/sparse_mla.h"

static const mla_sources SOURCES = { .kv = 1, .table = 5, .cu = 7 };
enum { OUT, LSE, TOP, TOTAL };
enum { LOCATE, ATTEND, STAGES };

typedef struct forward {
    mla a;
    const gg_tensor *out, *lse, *top, *total;
    float *q;         /* [lanes][step], then the sums of weighted rows */
    float *qt;        /* [panels][D][GG_NR], scaled */
    float *max, *sum; /* [panels * GG_NR] */
    float *keep;      /* [GG_NR]: what is left of a lane's sums under a new maximum */
    float *s;         /* [MLA_ROWS][GG_NR]: scores, then weights */
    float *x;         /* [MLA_ROWS][step] */
    int64_t *rows;    /* [MLA_ROWS] of a list */
    int32_t *slots;   /* [MLA_ROWS] */
    int64_t *seen;    /* [block]: rows that each token sees */
    int64_t floats;
} forward;

static forward open_forward(const gg_call *c, float *scratch) {
    forward f = { .a = mla_open(c, SOURCES, c->attrs),
                  .out = &c->dst[OUT],
                  .lse = &c->dst[LSE],
                  .top = &c->dst[TOP],
                  .total = &c->dst[TOTAL] };
    const mla *a = &f.a;
    const int64_t panels = gg_ceil_div(a->lanes, GG_NR);
    f.q = gg_claim(scratch, &f.floats, a->lanes * a->step);
    f.qt = gg_claim(scratch, &f.floats, panels * GG_NR * a->D);
    f.max = gg_claim(scratch, &f.floats, panels * GG_NR);
    f.sum = gg_claim(scratch, &f.floats, panels * GG_NR);
    f.keep = gg_claim(scratch, &f.floats, GG_NR);
    f.s = gg_claim(scratch, &f.floats, MLA_ROWS * GG_NR);
    f.x = gg_claim(scratch, &f.floats, MLA_ROWS * a->step);
    f.rows = (int64_t *)gg_claim(scratch, &f.floats, MLA_ROWS * 2);
    f.slots = (int32_t *)gg_claim(scratch, &f.floats, MLA_ROWS);
    f.seen = (int64_t *)gg_claim(scratch, &f.floats, a->block * 2);
    return f;
}

/* The softmax begins with the sinks, if there are any. */
static void begin_lanes(const forward *f, int64_t lanes) {
    const mla *a = &f->a;
    for (int64_t l = 0; l < lanes; l++) {
        f->max[l] = -INFINITY;
        if (a->sinks != NULL)
            memcpy(&f->max[l], (const char *)a->sinks->data + l % a->N1 * a->sinks->nb[3], sizeof(float));
        f->sum[l] = f->max[l] == -INFINITY ? 0 : 1;
    }
    for (int64_t l = lanes; l < gg_round_up(lanes, GG_NR); l++) f->max[l] = f->sum[l] = 0;
    memset(f->q, 0, lanes * a->step * sizeof(float));
}

static void add_piece(const forward *f, const mla_piece *p) {
    const mla *a = &f->a;
    float *const max = f->max + p->panel * GG_NR, *const sum = f->sum + p->panel * GG_NR;
    mla_scores(a, p, f->qt + p->panel * GG_NR * a->D, f->s);
    for (int64_t j = 0; j < p->n; j++) {
        if (j == p->open) j = p->close;
        if (j == p->n) break;
        for (int v = p->v0; v < p->v1; v++) {
            float *at = f->s + j * GG_NR + v * GG_VW;
            vf_store(at, vf_select(mla_visible(p, v, j), vf_load(at), vf_set1(-INFINITY)));
        }
    }
    for (int v = p->v0; v < p->v1; v++) {
        const vf before = vf_load(max + v * GG_VW);
        float *const s = f->s + v * GG_VW;
        vf most = before, total = vf_zero();
        for (int64_t j = 0; j < p->n; j++) most = vf_max(most, vf_load(s + j * GG_NR));
        const vf base = vf_select(most == -INFINITY, vf_zero(), most); /* no row yet: exp(-inf - 0) */
        const vf keep = vf_select(before == base, vf_set1(1.0f), vf_exp_neg(before - base)); /* of a sink of inf: all */
        for (int64_t j = 0; j < p->n; j++) {
            const vf weight = vf_exp_neg(vf_load(s + j * GG_NR) - base);
            total += weight;
            vf_store(s + j * GG_NR, weight);
        }
        vf_store(max + v * GG_VW, most);
        vf_store(sum + v * GG_VW, vf_load(sum + v * GG_VW) * keep + total);
        vf_store(f->keep + v * GG_VW, keep);
    }
    mla_sums(a, p, f->s, f->keep, f->q + p->panel * GG_NR * a->step);
}

static void add_list(const forward *f, int side, const mla_run *r, int64_t k) {
    const mla *a = &f->a;
    const int64_t width = a->side[side].list->ne[3], first = k * a->N1 / GG_NR;
    for (int64_t at = 0, n; at < width;) {
        n = mla_listed(a, side, r, k, &at, f->rows, f->slots);
        if (n == 0) break;
        for (int64_t j = 0; j < n; j++) mla_copy_row(a, mla_at(a->side[side].kv, f->rows[j]), f->x + j * a->step);
        f->seen[k] += n;
        for (int64_t panel = first; panel * GG_NR < (k + 1) * a->N1; panel++) {
            const mla_piece p = mla_list_piece(a, k, panel, f->x, n);
            add_piece(f, &p);
        }
    }
}

static void add_range(const forward *f, int side, const mla_run *r) {
    const mla *a = &f->a;
    const mla_range first = mla_sees(a, side, r->b, r->i), last = mla_sees(a, side, r->b, r->i + r->n - 1);
    mla_count_range(a, side, r, f->seen);
    for (int64_t j0 = first.lo; j0 < last.hi; j0 += MLA_ROWS) {
        const int64_t n = gg_min(MLA_ROWS, last.hi - j0);
        mla_copy_range(a, side, r, j0, n, f->x);
        for (int64_t panel = 0; panel * GG_NR < r->n * a->N1; panel++) {
            const mla_piece p = mla_range_piece(a, side, r, panel, f->x, j0, n);
            if (p.n > 0) add_piece(f, &p);
        }
    }
}

/* A token that sees nothing has 0 in its results, whatever its sinks, and 1 as its total. */
static void finish_lanes(const forward *f, const mla_run *r) {
    const mla *a = &f->a;
    const int64_t lanes = r->n * a->N1, first = r->token * a->N1;
    float *const out = (float *)f->out->data + first * a->D, *const lse = (float *)f->lse->data + first;
    float *const top = (float *)f->top->data + first, *const total = (float *)f->total->data + first;
    for (int64_t l = 0; l < lanes; l++) {
        const int seen = f->seen[l / a->N1] > 0;
        top[l] = !seen ? 0 : f->sum[l] != f->sum[l] ? NAN : f->max[l]; /* maxima pass NaN over */
        total[l] = seen ? f->sum[l] : 1;
    }
    for (int64_t l = 0; l < lanes; l += GG_VW) {
        const vf sum = vf_load(f->sum + l);
        vf_store(f->max + l, vf_load(f->max + l) + vf_log(sum));
        vf_store(f->sum + l, vf_select(sum == 0.0f, vf_zero(), 1.0f / sum));
    }
    for (int64_t l = 0; l < lanes; l++) {
        const int seen = f->seen[l / a->N1] > 0;
        lse[l] = seen ? f->max[l] : 0;
        for (int64_t d = 0; d < a->D; d++) out[l * a->D + d] = seen ? f->q[l * a->step + d] * f->sum[l] : 0;
    }
}

/* Lanes without a sequence. */
static void leave_lanes(const forward *f, const mla_run *r) {
    const int64_t first = r->token * f->a.N1, lanes = r->n * f->a.N1;
    memset((float *)f->out->data + first * f->a.D, 0, lanes * f->a.D * sizeof(float));
    memset((float *)f->lse->data + first, 0, lanes * sizeof(float));
    memset((float *)f->top->data + first, 0, lanes * sizeof(float));
    for (int64_t l = 0; l < lanes; l++) ((float *)f->total->data)[first + l] = 1;
}

static void attend(const forward *f, const mla_run *r) {
    const mla *a = &f->a;
    if (r->b < 0) {
        leave_lanes(f, r);
        return;
    }
    int some = 0;
    if (r->n > 1 && !mla_ends_finite(a, r, &some)) {
        for (int64_t k = 0; k < r->n; k++) attend(f, &(mla_run){ r->b, r->token + k, r->i + k, 1 });
        return;
    }
    const int64_t lanes = r->n * a->N1;
    mla_copy_lanes(a, a->q, r, f->q);
    mla_turn(a, f->q, lanes, a->scale, f->qt);
    begin_lanes(f, lanes);
    memset(f->seen, 0, r->n * sizeof(int64_t));
    for (int side = 0; side < SIDES; side++) {
        if (a->side[side].kv == NULL) continue;
        if (a->side[side].list == NULL) add_range(f, side, r);
        else
            for (int64_t k = 0; k < r->n; k++) add_list(f, side, r, k);
    }
    finish_lanes(f, r);
}

static int64_t forward_tasks(const gg_call *c, int stage) {
    if (stage == LOCATE) return 1;
    const mla a = mla_open(c, SOURCES, c->attrs);
    const int64_t flops = 4 * a.lanes * a.D * mla_most_seen(&a);
    return gg_ceil_div(mla_blocks(&a), gg_max(1, MLA_TASK_FLOPS / gg_max(1, flops)));
}

static void forward_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const forward f = open_forward(c, scratch);
    const mla *a = &f.a;
    if (stage == LOCATE) {
        mla_locate(a, c, SOURCES);
        return;
    }
    const int64_t tasks = forward_tasks(c, stage), blocks = mla_blocks(a);
    const int64_t first = gg_cut(blocks, begin, tasks), last = gg_cut(blocks, end, tasks);
    for (int64_t block = first; block < last; block++) {
        const int64_t next = gg_min(a->tokens, (block + 1) * a->block);
        for (mla_run r = { .token = block * a->block }; r.token < next; r.token += r.n) {
            r = mla_next(a, r.token, next);
            attend(&f, &r);
        }
    }
}

static int64_t forward_work(const gg_call *c) {
    const mla a = mla_open(c, SOURCES, c->attrs);
    return mla_table_bytes(&a);
}

static int64_t forward_scratch(const gg_call *c) { return open_forward(c, NULL).floats * (int64_t)sizeof(float); }

GG_KERNEL(sparse_flash_mla, .stages = STAGES, .tasks = forward_tasks, .run = forward_run, .work = forward_work,
          .scratch = forward_scratch);
