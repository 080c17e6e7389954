/* Softmax along rows of scale * x + slope * mask, with a sink in the sum or without; and its gradients.
 *
 * A place whose mask is -inf is masked out: whatever x holds there stays there.  A row with nothing but
 * masked places, or -inf, gives zeros; a NaN in any other place gives a row of NaN. */
#include "abi/attrs/softmax.h"
#include "vec/convert.h"
#include "vec/vector_math.h"
#include "walk/kernel.h"
#include "walk/rows.h"
#include "attention/alibi.h"

enum { SOFT_MAX_X, SOFT_MAX_MASK, SOFT_MAX_SINKS };

/* y = scale * x + slope * mask, with -inf where the mask says so; returns lanes' maxima, NaNs passed over. */
GG_INLINE vf soft_max_score(float *y, const float *x, const void *mask, int64_t i, float scale, float slope,
                            const int dtype, const int masked, const int count) {
    vf s = gg_take(x + i, count, 0) * scale;
    if (masked) {
        float lane[GG_VW];
        if (count < GG_VW)
            for (int k = 0; k < GG_VW; k++)
                lane[k] = k < count ? gg_load_as_f32(dtype, (const char *)mask + (i + k) * gg_float_bytes(dtype)) : 0;
        const vf m =
            count < GG_VW ? vf_load(lane) : vf_load_as_f32(dtype, (const char *)mask + i * gg_float_bytes(dtype));
        s = vf_select(m == -INFINITY, m, s + slope * m);
    }
    gg_give(y + i, s, count);
    return s;
}

/* sink: the logit of one more place, whose share goes nowhere; -inf: there is none. */
GG_INLINE void soft_max_row(float *y, const float *x, const void *mask, int64_t n, float scale, float slope, float sink,
                            const int dtype, const int masked) {
    vf most[2] = { vf_set1(-INFINITY), vf_set1(-INFINITY) };
    int64_t i = 0;
    for (; i + 2 * GG_VW <= n; i += 2 * GG_VW)
        for (int k = 0; k < 2; k++)
            most[k] = vf_max(soft_max_score(y, x, mask, i + k * GG_VW, scale, slope, dtype, masked, GG_VW), most[k]);
    for (; i + GG_VW <= n; i += GG_VW)
        most[0] = vf_max(soft_max_score(y, x, mask, i, scale, slope, dtype, masked, GG_VW), most[0]);
    if (i < n) soft_max_score(y, x, mask, i, scale, slope, dtype, masked, (int)(n - i));
    float largest = vf_largest(vf_max(most[0], most[1]));
    for (; i < n; i++) largest = y[i] > largest ? y[i] : largest;
    if (sink > largest) largest = sink;

    /* where all is -inf, exp(-inf - 0) = 0, and NaN is still NaN */
    const float shift = largest == -INFINITY ? 0 : largest;
    double total = exp((double)sink - shift);
    for (int64_t at = 0; at < n; at += GG_ROW_BLOCK) {
        const int64_t end = gg_min(n, at + GG_ROW_BLOCK);
        vf s[2] = { 0 };
        for (i = at; i + 2 * GG_VW <= end; i += 2 * GG_VW)
            for (int k = 0; k < 2; k++) {
                const vf e = vf_exp(vf_load(y + i + k * GG_VW) - shift);
                vf_store(y + i + k * GG_VW, e);
                s[k] += e;
            }
        for (; i < end; i += GG_VW) {
            const int count = (int)gg_min(GG_VW, end - i);
            const vf e = vf_exp(vf_load_n(y + i, count, -INFINITY) - shift);
            vf_store_n(y + i, e, count);
            s[0] += e;
        }
        total += vf_sum(s[0] + s[1]);
    }
    const float share = total == 0 ? 0 : (float)(1 / total);
    for (i = 0; i < n; i++) y[i] *= share;
}

static int64_t soft_max_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_rows(c->dst), c->dst->ne[3], 4);
}

GG_INLINE void soft_max_rows(const gg_call *c, int64_t begin, int64_t end, const int dtype, const int masked) {
    const gg_soft_max_attrs *attrs = c->attrs;
    const gg_tensor *mask = &c->src[SOFT_MAX_MASK], *sinks = &c->src[SOFT_MAX_SINKS];
    const int64_t n = c->dst->ne[3], heads = c->dst->ne[1];
    gg_walk x = gg_walk_from(&c->src[SOFT_MAX_X], begin);
    float *y = (float *)c->dst->data + begin * n;
    for (int64_t r = begin; r < end; r++, gg_walk_on(&x), y += n) {
        const void *m = masked ? gg_at(mask, x.i0 % mask->ne[0], x.i1 % mask->ne[1], x.i2 % mask->ne[2]) : NULL;
        const float slope = masked ? gg_alibi_slope(heads, x.i1, attrs->max_bias) : 1;
        const float sink = sinks->data ? ((const float *)sinks->data)[x.i1] : -INFINITY;
        soft_max_row(y, (const float *)x.row, m, n, attrs->scale, slope, sink, dtype, masked);
    }
}

static void soft_max_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const int64_t rows = gg_rows(c->dst), tasks = soft_max_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    const gg_tensor *mask = &c->src[SOFT_MAX_MASK];
    if (mask->data == NULL) soft_max_rows(c, from, to, GG_F32, 0);
    else if (mask->dtype == GG_F32) soft_max_rows(c, from, to, GG_F32, 1);
    else if (mask->dtype == GG_F16) soft_max_rows(c, from, to, GG_F16, 1);
    else soft_max_rows(c, from, to, GG_BF16, 1);
}

GG_KERNEL(soft_max, .stages = 1, .tasks = soft_max_tasks, .run = soft_max_run);

/* The sum of dout * y along a row.  Where y is 0, dout is not looked at: a NaN that came from what was masked out
 * goes no further. */

GG_INLINE vf soft_max_live(const float *dout, vf y, const int count) {
    return vf_select(y == 0.0f, vf_zero(), gg_take(dout, count, 0));
}
GG_INLINE vf soft_max_term(const float *dout, const float *y, const int count) {
    const vf p = gg_take(y, count, 0);
    return p * soft_max_live(dout, p, count);
}

static double soft_max_dot(const float *dout, const float *y, int64_t n) {
    return GG_SUM_OVER_ROW(n, i, count, soft_max_term(dout + i, y + i, count));
}

/* The gradient by each row's sink: -(its share) * sum of dout * y.  The share is that of the largest y times the
 * ratio of the two, exp(sink - score): 1 minus the sum of all y would be lost in rounding where it is small. */

enum { SINKS_DOUT, SINKS_Y, SINKS_X, SINKS_SINKS, SINKS_MASK };

static float soft_max_mask_at(const gg_tensor *mask, gg_walk x, int64_t j) {
    const char *row = gg_at(mask, x.i0 % mask->ne[0], x.i1 % mask->ne[1], x.i2 % mask->ne[2]);
    return gg_load_as_f32(mask->dtype, row + j * mask->nb[3]);
}

static int64_t soft_max_sinks_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_rows(c->dst), c->src[SINKS_X].ne[3], 4);
}

static void soft_max_sinks_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_soft_max_sinks_back_attrs *attrs = c->attrs;
    const gg_tensor *mask = &c->src[SINKS_MASK];
    const float *sinks = c->src[SINKS_SINKS].data;
    const int64_t rows = gg_rows(c->dst), n = c->src[SINKS_X].ne[3], heads = c->dst->ne[1];
    const int64_t tasks = soft_max_sinks_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk douts = gg_walk_from(&c->src[SINKS_DOUT], from), ys = gg_walk_from(&c->src[SINKS_Y], from);
    gg_walk xs = gg_walk_from(&c->src[SINKS_X], from);
    for (int64_t r = from; r < to; r++, gg_walk_on(&douts), gg_walk_on(&ys), gg_walk_on(&xs)) {
        const float *dout = (const float *)douts.row, *y = (const float *)ys.row, *x = (const float *)xs.row;
        const double dot = soft_max_dot(dout, y, n);
        const float most = gg_row_max(y, n);
        int64_t best = 0;
        while (best < n - 1 && y[best] != most) best++;
        double score = n ? (double)attrs->scale * x[best] : 0;
        if (mask->data && n) score += gg_alibi_slope(heads, xs.i1, attrs->max_bias) * soft_max_mask_at(mask, xs, best);
        const double share = dot == 0 ? 0 : exp(sinks[xs.i1] - score) * y[best];
        ((float *)c->dst->data)[r] = (float)(-dot * share);
    }
}

GG_KERNEL(soft_max_sinks_back, .stages = 1, .tasks = soft_max_sinks_tasks, .run = soft_max_sinks_back_run);

/* dx = scale * y * (dout - sum of dout * y). */

static void soft_max_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const float scale = ((const gg_soft_max_back_attrs *)c->attrs)->scale;
    const int64_t rows = gg_rows(c->dst), n = c->dst->ne[3], tasks = soft_max_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk douts = gg_walk_from(&c->src[0], from), ys = gg_walk_from(&c->src[1], from);
    float *dx = (float *)c->dst->data + from * n;
    for (int64_t r = from; r < to; r++, gg_walk_on(&douts), gg_walk_on(&ys), dx += n) {
        const float *dout = (const float *)douts.row, *y = (const float *)ys.row;
        const float dot = (float)soft_max_dot(dout, y, n);
        int64_t i = 0;
        for (; i + GG_VW <= n; i += GG_VW) {
            const vf p = vf_load(y + i);
            vf_store(dx + i, scale * (p * (soft_max_live(dout + i, p, GG_VW) - dot)));
        }
        if (i < n) {
            const int count = (int)(n - i);
            const vf p = vf_load_n(y + i, count, 0);
            vf_store_n(dx + i, scale * (p * (soft_max_live(dout + i, p, count) - dot)), count);
        }
    }
}

GG_KERNEL(soft_max_back, .stages = 1, .tasks = soft_max_tasks, .run = soft_max_back_run);
