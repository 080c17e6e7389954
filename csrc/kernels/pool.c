/* Pooling of planes: the largest element of each window, or the mean with the padding as zeros.
 *
 *   x: [A, B, H, W]    dst, dout: [A, B, OH, OW]    all contiguous
 *
 * pool_2d_back gives the gradient to the first largest element in the window's own order, or to all alike.  Of planes `at`
 * with the shape of x, dst is what x holds where these have it: that is the gradient of pool_2d_back.
 * A NaN counts as larger than anything, so that it comes out. */
#include "../kernel.h"
#include "../simd.h"

enum { POOL_MAX, POOL_AVG }; /* PoolMode */

typedef struct pool {
    int64_t planes, H, W, OH, OW, KH, KW, sh, sw, ph, pw;
    int mode;
} pool;

static pool pool_describe(const gg_tensor *x, const gg_tensor *out, int mode, const int64_t *kernel,
                          const int64_t *stride, const int64_t *padding) {
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
    };
}

static int64_t pool_tasks_of(const pool *p, int64_t elements) {
    return elements == 0 ? 0 : gg_row_tasks(p->planes, p->H * p->W + 2 * p->OH * p->OW, 2);
}

static pool pool_of(const gg_call *c) {
    const gg_pool_2d_attrs *a = c->attrs;
    return pool_describe(c->src, c->dst, a->mode, a->kernel, a->stride, a->padding);
}

static int64_t pool_tasks(const gg_call *c, int stage) {
    (void)stage;
    const pool p = pool_of(c);
    return pool_tasks_of(&p, gg_elements(c->dst));
}

/* One row, the window's rows already taken together; with padding, if there is any. */
static int64_t pool_row(const pool *p) { return gg_round_up(p->W + 2 * p->pw, 16) + 16; }
static int64_t pool_scratch(const gg_call *c) {
    const pool p = pool_of(c);
    return pool_row(&p) * (int64_t)sizeof(float);
}

GG_INLINE float pool_larger(float a, float b) { return b > a || b != b ? b : a; }

/* Rows of the input that output row oh sees. */
static void pool_rows(const pool *p, int64_t oh, int64_t *first, int64_t *last) {
    const int64_t at = oh * p->sh - p->ph;
    *first = gg_max(0, at);
    *last = gg_min(p->H, at + p->KH);
}

GG_INLINE void pool_plane(const pool *p, const float *x, float *out, float *row, const int max, const int64_t KW,
                          const int64_t step) {
    const float outside = max ? -INFINITY : 0.0f, share = 1.0f / (float)(p->KH * p->KW);
    for (int64_t oh = 0; oh < p->OH; oh++, out += p->OW) {
        int64_t first, last;
        pool_rows(p, oh, &first, &last);
        for (int64_t i = 0; i < p->W + 2 * p->pw; i++) row[i] = outside;
        float *const inner = row + p->pw;
        for (int64_t ih = first; ih < last; ih++) {
            const float *const from = x + ih * p->W;
            if (max)
                for (int64_t i = 0; i < p->W; i++) inner[i] = pool_larger(inner[i], from[i]);
            else
                for (int64_t i = 0; i < p->W; i++) inner[i] += from[i];
        }
        for (int64_t ow = 0; ow < p->OW; ow++) {
            float value = row[ow * step];
            for (int64_t k = 1; k < KW; k++)
                value = max ? pool_larger(value, row[ow * step + k]) : value + row[ow * step + k];
            out[ow] = max ? value : value * share;
        }
    }
}

/* The first largest element of x in each window of a plane: there the output is added to dx, or taken from values. */
GG_INLINE void pool_places(const pool *p, const float *x, float *out, const float *values, float *dx) {
    for (int64_t oh = 0; oh < p->OH; oh++) {
        int64_t first, last;
        pool_rows(p, oh, &first, &last);
        for (int64_t ow = 0; ow < p->OW; ow++) {
            const int64_t left = gg_max(0, ow * p->sw - p->pw), right = gg_min(p->W, ow * p->sw - p->pw + p->KW);
            int64_t most = first * p->W + left;
            float value = x[most];
            for (int64_t ih = first; ih < last; ih++)
                for (int64_t iw = left; iw < right; iw++) {
                    const float here = x[ih * p->W + iw];
                    const int larger = here > value || (here != here && value == value);
                    most = larger ? ih * p->W + iw : most;
                    value = larger ? here : value;
                }
            if (dx != NULL) dx[most] += out[oh * p->OW + ow];
            else out[oh * p->OW + ow] = values[most];
        }
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
        if (c->src[1].data != NULL) pool_places(&p, (const float *)c->src[1].data + i * p.H * p.W, out, x, NULL);
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
    return pool_describe(c->dst, c->src, a->mode, a->kernel, a->stride, a->padding);
}

static int64_t pool_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    const pool p = pool_back_of(c);
    return pool_tasks_of(&p, gg_elements(c->dst));
}

static void pool_back_avg(const pool *p, const float *dout, float *dx) {
    const float share = 1.0f / (float)(p->KH * p->KW);
    for (int64_t oh = 0; oh < p->OH; oh++) {
        int64_t first, last;
        pool_rows(p, oh, &first, &last);
        for (int64_t ow = 0; ow < p->OW; ow++) {
            const int64_t left = gg_max(0, ow * p->sw - p->pw), right = gg_min(p->W, ow * p->sw - p->pw + p->KW);
            const float d = dout[oh * p->OW + ow] * share;
            for (int64_t ih = first; ih < last; ih++)
                for (int64_t iw = left; iw < right; iw++) dx[ih * p->W + iw] += d;
        }
    }
}

static void pool_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const pool p = pool_back_of(c);
    const int64_t tasks = pool_back_tasks(c, 0);
    for (int64_t i = gg_cut(p.planes, begin, tasks), last = gg_cut(p.planes, end, tasks); i < last; i++) {
        float *const dout = (float *)c->src[0].data + i * p.OH * p.OW;
        float *const dx = (float *)c->dst->data + i * p.H * p.W;
        memset(dx, 0, p.H * p.W * sizeof(float));
        if (p.mode == POOL_MAX) pool_places(&p, (const float *)c->src[1].data + i * p.H * p.W, dout, NULL, dx);
        else pool_back_avg(&p, dout, dx);
    }
}

GG_KERNEL(pool_2d_back, .stages = 1, .tasks = pool_back_tasks, .run = pool_back_run);
