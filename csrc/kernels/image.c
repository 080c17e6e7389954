/* interpolate: planes resampled along both axes, each output a weighted sum of a few elements; and its transpose.
 *
 *   interpolate       x: [A, B, H, W], dst: [A, B, OH, OW]
 *   interpolate_back  dout: [A, B, OH, OW], dst: [A, B, H, W]    all contiguous
 *
 * An element that is made very much larger has the gradient of very many outputs, so these add up in double.
 *
 * The weights of an axis depend on its sizes alone, so both axes' are in the scratch of a thread, made once a call. */
#include "abi/attrs/image.h"
#include "vec/simd.h"
#include "walk/kernel.h"

enum { IMAGE_NEAREST, IMAGE_BILINEAR, IMAGE_BICUBIC }; /* InterpolationMode */

/* Output i is the sum over t < count[i] of weight[i * taps + t] times element from[i * taps + t]. */
typedef struct image_axis {
    int64_t n, out, taps;
    int32_t *count, *from;
    float *weight;
} image_axis;

static double image_step(int64_t n, int64_t out, int align_corners) {
    return align_corners && n > 1 && out > 1 ? (double)(n - 1) / (double)(out - 1) : (double)n / (double)out;
}

static int64_t image_taps(int64_t n, int64_t out, const gg_interpolate_attrs *a) {
    if (a->mode == IMAGE_NEAREST) return 1;
    if (a->mode == IMAGE_BICUBIC) return 4;
    if (!a->antialias) return 2;
    return gg_min(n, 2 * (int64_t)ceil(fmax(1, image_step(n, out, a->align_corners))) + 2);
}

static int64_t image_axis_bytes(int64_t out, int64_t taps) { return gg_round_up(out * (2 * taps + 1), 16) * 4; }

/* A weight that is nothing but rounding has no part; elements beyond an edge are the one at the edge. */
static void image_add_tap(image_axis *x, int64_t i, int64_t from, double weight) {
    if (fabs(weight) < 1e-9) return;
    int64_t at = i * x->taps + x->count[i];
    from = gg_max(0, gg_min(x->n - 1, from));
    if (x->count[i] > 0 && x->from[at - 1] == from) {
        x->weight[at - 1] += (float)weight;
        return;
    }
    x->count[i]++;
    x->from[at] = (int32_t)from;
    x->weight[at] = (float)weight;
}

static double image_cubic_near(double x) { return ((-0.75 + 2) * x - (-0.75 + 3)) * x * x + 1; }
static double image_cubic_far(double x) { return ((-0.75 * x + 5 * 0.75) * x - 8 * 0.75) * x + 4 * 0.75; }

static void image_fill(image_axis *x, const gg_interpolate_attrs *a) {
    const double step = image_step(x->n, x->out, a->align_corners), centre = a->align_corners ? 0 : 0.5;
    const double support = fmax(1, step);
    const int aligned = a->align_corners && x->n > 1;
    for (int64_t i = 0; i < x->out; i++) {
        x->count[i] = 0;
        if (a->mode == IMAGE_NEAREST) {
            image_add_tap(x, i, aligned && x->out > 1 ? i * (x->n - 1) / (x->out - 1) : i * x->n / x->out, 1);
            continue;
        }
        if (a->antialias && a->mode == IMAGE_BILINEAR) {
            const double at = ((double)i + centre) * step;
            const int64_t first = (int64_t)fmax(at - support + centre, 0);
            const int64_t last = (int64_t)fmin(at + support + centre, (double)x->n);
            double total = 0;
            for (int64_t j = first; j < last; j++) total += fmax(0, 1 - fabs((double)j - at + centre) / support);
            for (int64_t j = first; j < last; j++) {
                const double w = fmax(0, 1 - fabs((double)j - at + centre) / support);
                if (w > 0) image_add_tap(x, i, j, w / total);
            }
            continue;
        }
        const double at = ((double)i + centre) * step - centre, whole = floor(at), rest = at - whole;
        const int64_t k = (int64_t)whole;
        if (a->mode == IMAGE_BICUBIC) {
            image_add_tap(x, i, k - 1, image_cubic_far(rest + 1));
            image_add_tap(x, i, k, image_cubic_near(rest));
            image_add_tap(x, i, k + 1, image_cubic_near(1 - rest));
            image_add_tap(x, i, k + 2, image_cubic_far(2 - rest));
        } else {
            image_add_tap(x, i, k, 1 - rest);
            image_add_tap(x, i, k + 1, rest);
        }
    }
}

/* The two axes, and a plane of which one is done. */
typedef struct image {
    int64_t planes;
    image_axis h, w;
} image;

static image image_describe(const gg_tensor *x, const gg_tensor *out, const gg_interpolate_attrs *a) {
    image m = { .planes = x->ne[0] * x->ne[1] };
    image_axis *const axes[2] = { &m.h, &m.w };
    for (int d = 0; d < 2; d++) {
        axes[d]->n = x->ne[2 + d];
        axes[d]->out = out->ne[2 + d];
        axes[d]->taps = image_taps(x->ne[2 + d], out->ne[2 + d], a);
    }
    return m;
}

static int64_t image_tables(const image *m) {
    return image_axis_bytes(m->h.out, m->h.taps) + image_axis_bytes(m->w.out, m->w.taps);
}

/* Fills the tables; returns the memory behind them. */
static float *image_prepare(image *m, const gg_interpolate_attrs *a, char *scratch) {
    image_axis *const axes[2] = { &m->h, &m->w };
    for (int d = 0; d < 2; d++) {
        image_axis *const x = axes[d];
        x->count = (int32_t *)scratch;
        x->from = x->count + x->out;
        x->weight = (float *)(x->from + x->out * x->taps);
        image_fill(x, a);
        scratch += image_axis_bytes(x->out, x->taps);
    }
    return (float *)scratch;
}

static int64_t image_tasks_of(const image *m, int64_t elements) {
    return elements == 0 ? 0 : gg_row_tasks(m->planes, m->h.n * m->w.out + m->h.out * m->w.out, 4);
}

static int64_t image_scratch_of(const image *m) { return image_tables(m) + m->h.n * m->w.out * (int64_t)sizeof(float); }

static int64_t image_tasks(const gg_call *c, int stage) {
    (void)stage;
    const image m = image_describe(c->src, c->dst, c->attrs);
    return image_tasks_of(&m, gg_elements(c->dst));
}
static int64_t image_scratch(const gg_call *c) {
    const image m = image_describe(c->src, c->dst, c->attrs);
    return image_scratch_of(&m);
}

static void image_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    image m = image_describe(c->src, c->dst, c->attrs);
    float *const half = image_prepare(&m, c->attrs, scratch);
    const int64_t tasks = image_tasks(c, 0), OW = m.w.out;
    for (int64_t i = gg_cut(m.planes, begin, tasks), last = gg_cut(m.planes, end, tasks); i < last; i++) {
        const float *const x = (const float *)c->src->data + i * m.h.n * m.w.n;
        float *const out = (float *)c->dst->data + i * m.h.out * OW;
        for (int64_t h = 0; h < m.h.n; h++)
            for (int64_t o = 0; o < OW; o++) {
                double sum = 0;
                for (int64_t t = o * m.w.taps; t < o * m.w.taps + m.w.count[o]; t++)
                    sum += (double)m.w.weight[t] * x[h * m.w.n + m.w.from[t]];
                half[h * OW + o] = (float)sum;
            }
        for (int64_t o = 0; o < m.h.out; o++) {
            float *const to = out + o * OW;
            for (int64_t j = 0; j < OW; j++) to[j] = 0;
            for (int64_t t = o * m.h.taps; t < o * m.h.taps + m.h.count[o]; t++) {
                const float *const from = half + m.h.from[t] * OW;
                const float weight = m.h.weight[t];
                for (int64_t j = 0; j < OW; j++) to[j] += weight * from[j];
            }
        }
    }
}

GG_KERNEL(interpolate, .stages = 1, .tasks = image_tasks, .run = image_run, .scratch = image_scratch);

static image image_back_of(const gg_call *c) {
    gg_interpolate_attrs a;
    memcpy(&a, c->attrs, sizeof a);
    return image_describe(c->dst, c->src, &a);
}
static int64_t image_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    const image m = image_back_of(c);
    return image_tasks_of(&m, gg_elements(c->dst));
}
static int64_t image_back_scratch(const gg_call *c) {
    const image m = image_back_of(c);
    return image_tables(&m) + (m.h.n * m.w.out + m.w.n) * (int64_t)sizeof(double);
}

static void image_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    image m = image_back_of(c);
    double *const half = (double *)image_prepare(&m, c->attrs, scratch), *const row = half + m.h.n * m.w.out;
    const int64_t tasks = image_back_tasks(c, 0), OW = m.w.out;
    for (int64_t i = gg_cut(m.planes, begin, tasks), last = gg_cut(m.planes, end, tasks); i < last; i++) {
        const float *const dout = (const float *)c->src->data + i * m.h.out * OW;
        float *const dx = (float *)c->dst->data + i * m.h.n * m.w.n;
        memset(half, 0, m.h.n * OW * sizeof(double));
        for (int64_t o = 0; o < m.h.out; o++)
            for (int64_t t = o * m.h.taps; t < o * m.h.taps + m.h.count[o]; t++) {
                double *const to = half + m.h.from[t] * OW;
                const float weight = m.h.weight[t];
                for (int64_t j = 0; j < OW; j++) to[j] += weight * dout[o * OW + j];
            }
        for (int64_t h = 0; h < m.h.n; h++) {
            memset(row, 0, m.w.n * sizeof(double));
            for (int64_t o = 0; o < OW; o++)
                for (int64_t t = o * m.w.taps; t < o * m.w.taps + m.w.count[o]; t++)
                    row[m.w.from[t]] += m.w.weight[t] * half[h * OW + o];
            for (int64_t w = 0; w < m.w.n; w++) dx[h * m.w.n + w] = (float)row[w];
        }
    }
}

GG_KERNEL(interpolate_back, .stages = 1, .tasks = image_back_tasks, .run = image_back_run,
          .scratch = image_back_scratch);
