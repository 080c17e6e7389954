/* solve_tri: x of a x = b, or of a^T x = b, by substitution; only a's lower triangle is read.
 *
 *   a: [A, B, n, n]    b, dst: [A, B, n, m]    contiguous */
#include "abi/attrs/solve.h"
#include "vec/simd.h"
#include "walk/kernel.h"

static int64_t solve_tasks(const gg_call *c, int stage) {
    (void)stage;
    const gg_tensor *x = c->dst;
    return gg_elements(x) == 0 ? 0 : gg_row_tasks(x->ne[0] * x->ne[1], x->ne[2] * x->ne[3], x->ne[2]);
}

static void solve_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const int transposed = ((const gg_solve_tri_attrs *)c->attrs)->transposed;
    const int64_t n = c->dst->ne[2], m = c->dst->ne[3], systems = c->dst->ne[0] * c->dst->ne[1];
    const int64_t tasks = solve_tasks(c, 0);
    for (int64_t s = gg_cut(systems, begin, tasks), last = gg_cut(systems, end, tasks); s < last; s++) {
        const float *const a = (const float *)c->src[0].data + s * n * n;
        const float *const b = (const float *)c->src[1].data + s * n * m;
        float *const x = (float *)c->dst->data + s * n * m;
        for (int64_t step = 0; step < n; step++) {
            const int64_t i = transposed ? n - 1 - step : step;
            float *const row = x + i * m;
            if (row != b + i * m) memcpy(row, b + i * m, m * sizeof(float));
            for (int64_t known = 0; known < step; known++) {
                const int64_t j = transposed ? n - 1 - known : known;
                const float factor = transposed ? a[j * n + i] : a[i * n + j];
                for (int64_t k = 0; k < m; k++) row[k] -= factor * x[j * m + k];
            }
            for (int64_t k = 0; k < m; k++) row[k] /= a[i * n + i];
        }
    }
}

GG_KERNEL(solve_tri, .stages = 1, .tasks = solve_tasks, .run = solve_run);
