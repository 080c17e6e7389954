/* Pooling of planes: the largest element of each window, or the mean, with the padding as zeros or without it.
 *
 *   x: [A, B, H, W]    dst, dout: [A, B, OH, OW]    all contiguous
 *
 * pool_2d_back gives the gradient to the first largest element in the window's own order, or to all alike.  Of planes `at`
 * with the shape of x, dst is what x holds where these have it: that is the gradient of pool_2d_back.
 * A NaN counts as larger than anything, so that it comes out. */
#include "abi/attrs/pool.h"
#include "walk/kernel.h"
#include "walk/rows.h"

enum { POOL_MAX, POOL_AVG }; /* PoolMode */

typedef struct pool {
    int64_t planes, H, W, OH, OW, KH, KW, sh, sw, ph, pw;
    int mode, count_padding;
} pool;

static pool pool_describe(const gg_tensor *x, const gg_tensor *out, int mode, const int64_t *kernel,
                          const int64_t *stride, const int64_t *padding, int count_padding) {
    return (pool){
        .planes = x->ne[0] * x->ne[1],
        .H = x->ne[2],
        .W = x->ne[3],
        .OH = out->ne[2],
        .OW = out->ne[3],
        .KH = kernel[0],
        .KW = kernel[1],
        .sh = stride[0],
        .sw = stride[1],
        .ph = padding[0],
        .pw = padding[1],
        .mode = mode,
        .count_padding = count_padding,
    };
}

static int64_t pool_tasks_of(const pool *p, int64_t elements) {
    return elements == 0 ? 0 : gg_row_tasks(p->planes, p->H * p->W + 2 * p->OH * p->OW, 2);
}

static pool pool_of(const gg_call *c) {
    const gg_pool_2d_attrs *a = c->attrs;
    return pool_describe(c->src, c->dst, a->mode, a->kernel, a->stride, a->padding, a->count_padding);
}

static int64_t pool_tasks(const gg_call *c, int stage) {
    (void)stage;
    const pool p = pool_of(c);
    return pool_tasks_of(&p, gg_elements(c->dst));
}

/* A padded row in scratch, and what whole vectors of outputs look at behind it. */
static int64_t pool_row(const pool *p) {
    const int64_t seen = gg_round_up(p->OW, GG_VW) * p->sw + p->KW, there = p->pw + gg_round_up(p->W + p->pw, GG_VW);
    return gg_round_up(gg_max(seen, there), GG_VW);
}

/* For outputs one row of the window's rows already taken together; for places all of them, and the places. */
static int64_t pool_scratch_of(const pool *p, int places) {
    const int64_t rows = places ? p->KH * pool_row(p) + gg_round_up(p->OW, GG_VW) : pool_row(p);
    return rows * (int64_t)sizeof(float);
}
static int64_t pool_scratch(const gg_call *c) {
    const pool p = pool_of(c);
    return pool_scratch_of(&p, c->src[1].data != NULL);
}

/* b > a or b a NaN ? b : a */
GG_INLINE vf pool_larger(vf a, vf b) { return vf_select(b != b, b, vf_max(b, a)); }
GG_INLINE vf pool_join(vf a, vf b, const int max) { return max ? pool_larger(a, b) : a + b; }

/* Rows of the input that output row oh sees. */
static void pool_rows(const pool *p, int64_t oh, int64_t *first, int64_t *last) {
    const int64_t at = oh * p->sh - p->ph;
    *first = gg_max(0, at);
    *last = gg_min(p->H, at + p->KH);
}

/* Columns of the input that an output column sees. */
static void pool_columns(const pool *p, int64_t ow, int64_t *first, int64_t *last) {
    const int64_t at = ow * p->sw - p->pw;
    *first = gg_max(0, at);
    *last = gg_min(p->W, at + p->KW);
}

/* By what the sum of a window is divided. */
static float pool_divisor(const pool *p, int64_t rows, int64_t columns) {
    return (float)(p->count_padding ? p->KH * p->KW : rows * columns);
}

/* The means of a row of outputs from their sums, without the padding. */
static void pool_means_of_row(const pool *p, float *out, int64_t rows) {
    for (int64_t ow = 0; ow < p->OW; ow++) {
        int64_t left, right;
        pool_columns(p, ow, &left, &right);
        out[ow] /= pool_divisor(p, rows, right - left);
    }
}

/* `count` columns of some rows, taken together. */
GG_INLINE vf pool_column(const float *x, int64_t W, int64_t rows, const int count, const int max) {
    const float outside = max ? -INFINITY : 0.0f;
    vf value = gg_take(x, count, outside);
    for (int64_t i = 1; i < rows; i++) value = pool_join(value, gg_take(x + i * W, count, outside), max);
    return value;
}

GG_INLINE void pool_plane(const pool *p, const float *x, float *out, float *row, const int max, const int64_t KW,
                          const int64_t step) {
    const float share = max || !p->count_padding ? 1.0f : 1.0f / (float)(p->KH * p->KW);
    for (int64_t i = 0; i < pool_row(p); i++) row[i] = max ? -INFINITY : 0.0f;
    for (int64_t oh = 0; oh < p->OH; oh++, out += p->OW) {
        int64_t first, last, i = 0;
        pool_rows(p, oh, &first, &last);
        const float *const from = x + first * p->W;
        for (; i + GG_VW <= p->W; i += GG_VW)
            vf_store(row + p->pw + i, pool_column(from + i, p->W, last - first, GG_VW, max));
        if (i < p->W) vf_store(row + p->pw + i, pool_column(from + i, p->W, last - first, (int)(p->W - i), max));
        for (int64_t ow = 0; ow < p->OW; ow += GG_VW) {
            vf value = vf_load_every(row + ow * step, step);
            for (int64_t k = 1; k < KW; k++) value = pool_join(value, vf_load_every(row + ow * step + k, step), max);
            if (!max) value *= share;
            if (ow + GG_VW <= p->OW) vf_store(out + ow, value);
            else vf_store_n(out + ow, value, (int)(p->OW - ow));
        }
        if (!max && !p->count_padding) pool_means_of_row(p, out, last - first);
    }
}

/* Where each window of an output row has its first largest element: offsets from the window's first row of x. */
GG_INLINE void pool_row_places(const pool *p, const float *rows, int64_t count, int32_t *at, const int64_t KW,
                               const int64_t step) {
    const int64_t width = pool_row(p);
    const vi columns = vi_lanes() * (int32_t)step;
    for (int64_t ow = 0; ow < p->OW; ow += GG_VW) {
        const vi left = columns + (int32_t)(ow * step - p->pw);
        vi place = -left & (left < 0); /* the first that exists, should none be larger than the padding */
        vf value = vf_set1(-INFINITY);
        for (int64_t r = 0; r < count; r++)
            for (int64_t k = 0; k < KW; k++) {
                const vf here = vf_load_every(rows + r * width + ow * step + k, step);
                const vi larger = (here > value) | ((here != here) & (value == value));
                place = (larger & (int32_t)(r * p->W + k)) | (~larger & place);
                value = vf_select(larger, here, value);
            }
        vi_store(at + ow, place + left);
    }
}

/* The first largest element of x in each window of a plane: there the output is added to dx, or taken from values. */
GG_INLINE void pool_places(const pool *p, const float *x, float *out, const float *values, float *dx, float *scratch) {
    const int64_t width = pool_row(p);
    float *const rows = scratch;
    int32_t *const at = (int32_t *)(rows + p->KH * width);
    for (int64_t i = 0; i < p->KH * width; i++) rows[i] = -INFINITY;
    for (int64_t oh = 0; oh < p->OH; oh++, out += p->OW) {
        int64_t first, last;
        pool_rows(p, oh, &first, &last);
        const int64_t start = first * p->W;
        for (int64_t r = 0; r < last - first; r++)
            memcpy(rows + r * width + p->pw, x + start + r * p->W, p->W * sizeof(float));
        if (p->KW == 2 && p->sw == 2) pool_row_places(p, rows, last - first, at, 2, 2);
        else pool_row_places(p, rows, last - first, at, p->KW, p->sw);
        if (dx != NULL)
            for (int64_t ow = 0; ow < p->OW; ow++) dx[start + at[ow]] += out[ow];
        else
            for (int64_t ow = 0; ow < p->OW; ow++) out[ow] = values[start + at[ow]];
    }
}

static void pool_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const pool p = pool_of(c);
    const int64_t tasks = pool_tasks(c, 0);
    for (int64_t i = gg_cut(p.planes, begin, tasks), last = gg_cut(p.planes, end, tasks); i < last; i++) {
        const float *const x = (const float *)c->src->data + i * p.H * p.W;
        float *const out = (float *)c->dst->data + i * p.OH * p.OW;
        const int square = p.KW == 2 && p.sw == 2;
        if (c->src[1].data != NULL)
            pool_places(&p, (const float *)c->src[1].data + i * p.H * p.W, out, x, NULL, scratch);
        else if (p.mode == POOL_MAX && square) pool_plane(&p, x, out, scratch, 1, 2, 2);
        else if (p.mode == POOL_MAX) pool_plane(&p, x, out, scratch, 1, p.KW, p.sw);
        else if (square) pool_plane(&p, x, out, scratch, 0, 2, 2);
        else pool_plane(&p, x, out, scratch, 0, p.KW, p.sw);
    }
}

GG_KERNEL(pool_2d, .stages = 1, .tasks = pool_tasks, .run = pool_run, .scratch = pool_scratch);

/* -- pool_2d_back --------------------------------------------------------------------------------- */

static pool pool_back_of(const gg_call *c) {
    const gg_pool_2d_back_attrs *a = c->attrs;
    return pool_describe(c->dst, c->src, a->mode, a->kernel, a->stride, a->padding, a->count_padding);
}

static int64_t pool_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    const pool p = pool_back_of(c);
    return pool_tasks_of(&p, gg_elements(c->dst));
}

static int64_t pool_back_scratch(const gg_call *c) {
    const pool p = pool_back_of(c);
    return p.mode == POOL_MAX ? pool_scratch_of(&p, 1) : 0;
}

static void pool_back_avg(const pool *p, const float *dout, float *dx) {
    for (int64_t oh = 0; oh < p->OH; oh++) {
        int64_t first, last;
        pool_rows(p, oh, &first, &last);
        for (int64_t ow = 0; ow < p->OW; ow++) {
            int64_t left, right;
            pool_columns(p, ow, &left, &right);
            const float d = dout[oh * p->OW + ow] / pool_divisor(p, last - first, right - left);
            for (int64_t ih = first; ih < last; ih++)
                for (int64_t iw = left; iw < right; iw++) dx[ih * p->W + iw] += d;
        }
    }
}

static void pool_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const pool p = pool_back_of(c);
    const int64_t tasks = pool_back_tasks(c, 0);
    for (int64_t i = gg_cut(p.planes, begin, tasks), last = gg_cut(p.planes, end, tasks); i < last; i++) {
        float *const dout = (float *)c->src[0].data + i * p.OH * p.OW;
        float *const dx = (float *)c->dst->data + i * p.H * p.W;
        memset(dx, 0, p.H * p.W * sizeof(float));
        if (p.mode == POOL_MAX) pool_places(&p, (const float *)c->src[1].data + i * p.H * p.W, dout, NULL, dx, scratch);
        else pool_back_avg(&p, dout, dx);
    }
}

GG_KERNEL(pool_2d_back, .stages = 1, .tasks = pool_back_tasks, .run = pool_back_run, .scratch = pool_back_scratch);
