/* sinkhorn: dst[t] = softmax of the rows of logits[t] + eps, then columns and rows in turn divided by sum + eps.
 *
 *   logits, dst, dout: [T, n, n], contiguous
 *
 * The first round divides columns only.  The gradient runs the rounds again, keeps what each gave, and goes back:
 * of b = a / s with s the sum of a's line + eps,  da = (db - sum of db b over the line) / s. */
#include "abi/attrs/hyper.h"
#include "vec/simd.h"
#include "walk/kernel.h"

/* Lines are columns: step n from element to element; or rows. */
GG_INLINE void hyper_divide(float *a, int64_t n, const int columns, float eps, float *sums) {
    for (int64_t line = 0; line < n; line++) {
        float *const at = columns ? a + line : a + line * n;
        const int64_t step = columns ? n : 1;
        float sum = eps;
        for (int64_t i = 0; i < n; i++) sum += at[i * step];
        for (int64_t i = 0; i < n; i++) at[i * step] /= sum;
        if (sums != NULL) sums[line] = sum;
    }
}

GG_INLINE void hyper_divide_back(float *d, const float *b, const float *sums, int64_t n, const int columns) {
    for (int64_t line = 0; line < n; line++) {
        const int64_t first = columns ? line : line * n, step = columns ? n : 1;
        float dot = 0;
        for (int64_t i = 0; i < n; i++) dot += d[first + i * step] * b[first + i * step];
        for (int64_t i = 0; i < n; i++) d[first + i * step] = (d[first + i * step] - dot) / sums[line];
    }
}

static void hyper_soft_max(const float *logits, float *a, int64_t n) {
    for (int64_t row = 0; row < n; row++, logits += n, a += n) {
        float most = -INFINITY, sum = 0;
        for (int64_t i = 0; i < n; i++) most = logits[i] > most || logits[i] != logits[i] ? logits[i] : most;
        for (int64_t i = 0; i < n; i++) sum += a[i] = expf(logits[i] - most);
        for (int64_t i = 0; i < n; i++) a[i] /= sum;
    }
}

static void hyper_add(float *a, int64_t size, float eps) {
    for (int64_t i = 0; i < size; i++) a[i] += eps;
}

static int64_t hyper_tasks(const gg_call *c, int stage) {
    (void)stage;
    const gg_sinkhorn_attrs *a = c->attrs;
    const gg_tensor *x = c->dst;
    return gg_elements(x) == 0 ? 0 : gg_row_tasks(x->ne[1], x->ne[2] * x->ne[3], 16 + 4 * a->n_iter);
}

static void hyper_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_sinkhorn_attrs *attrs = c->attrs;
    const int64_t n = c->dst->ne[3], T = c->dst->ne[1], tasks = hyper_tasks(c, 0);
    for (int64_t t = gg_cut(T, begin, tasks), last = gg_cut(T, end, tasks); t < last; t++) {
        float *const a = (float *)c->dst->data + t * n * n;
        hyper_soft_max((const float *)c->src->data + t * n * n, a, n);
        hyper_add(a, n * n, attrs->eps);
        for (int64_t round = 0; round < attrs->n_iter; round++) {
            if (round > 0) hyper_divide(a, n, 0, attrs->eps, NULL);
            hyper_divide(a, n, 1, attrs->eps, NULL);
        }
    }
}

GG_KERNEL(sinkhorn, .stages = 1, .tasks = hyper_tasks, .run = hyper_run);

/* What each division gave, with its sums. */
static int64_t hyper_back_scratch(const gg_call *c) {
    const gg_sinkhorn_attrs *a = c->attrs;
    const int64_t n = c->dst->ne[3];
    return (2 * a->n_iter + 1) * (n * n + n) * (int64_t)sizeof(float);
}

static void hyper_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const gg_sinkhorn_attrs *attrs = c->attrs;
    const int64_t n = c->dst->ne[3], T = c->dst->ne[1], tasks = hyper_tasks(c, 0), size = n * n, entry = size + n;
    const int64_t divisions = gg_max(0, 2 * attrs->n_iter - 1);
    for (int64_t t = gg_cut(T, begin, tasks), last = gg_cut(T, end, tasks); t < last; t++) {
        float *const soft = scratch, *const kept = soft + size, *const d = (float *)c->dst->data + t * size;
        hyper_soft_max((const float *)c->src[1].data + t * size, soft, n);
        for (int64_t i = 0; i < divisions; i++) { /* columns, then rows and columns in turn */
            float *const here = kept + i * entry;
            memcpy(here, i == 0 ? soft : here - entry, size * sizeof(float));
            if (i == 0) hyper_add(here, size, attrs->eps);
            hyper_divide(here, n, i % 2 == 0, attrs->eps, here + size);
        }
        memcpy(d, (const float *)c->src[0].data + t * size, size * sizeof(float));
        for (int64_t i = divisions - 1; i >= 0; i--) {
            const float *const here = kept + i * entry;
            hyper_divide_back(d, here, here + size, n, i % 2 == 0);
        }
        for (int64_t row = 0; row < n; row++) {
            float dot = 0;
            for (int64_t i = row * n; i < row * n + n; i++) dot += d[i] * soft[i];
            for (int64_t i = row * n; i < row * n + n; i++) d[i] = soft[i] * (d[i] - dot);
        }
    }
}

GG_KERNEL(sinkhorn_back, .stages = 1, .tasks = hyper_tasks, .run = hyper_back_run, .scratch = hyper_back_scratch);
