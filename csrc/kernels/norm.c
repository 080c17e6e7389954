/* Normalisation along rows, and its gradients.
 *
 * Forward, with h = (x - mean) * r and r = 1 / sqrt(mean of (x - mean)^2 + eps):  y = h * weight + bias.
 * rms_norm is the same with a mean of 0: `centred` tells the two apart, a constant in each kernel.
 *
 * Backward, with g = dout * weight:  dx = r * (g - mean(g) - h * mean(g * h)),
 * dweight = sum over rows of dout * h,  dbias = sum over rows of dout.
 * Stage 0 sums dweight and dbias over chunks of rows, stage 1 over the chunks.  Mean and r are computed
 * again: the row is in the cache then, and one more look at it costs less than two more arrays. */
#include "abi/attrs/norm.h"
#include "walk/kernel.h"
#include "walk/rows.h"

/* x - mean = (x - shift) - rest: the mean to more than f32's precision, and the first difference is
 * exact where x lies near it, so that an offset common to the whole row does no harm. */
typedef struct norm_stats {
    float shift, rest, inverse;
    float mean_g, mean_gh; /* backward only */
} norm_stats;

/* In double throughout, for rows whose squares leave f32's range. */
static __attribute__((noinline)) norm_stats norm_wide_stats(const float *x, const float *dout, const float *weight,
                                                            int64_t n, float eps, int centred) {
    double mean = 0, squares = 0, sum_g = 0, sum_gd = 0;
    if (centred)
        for (int64_t i = 0; i < n; i++) mean += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) {
        const double d = x[i] - mean;
        squares += d * d;
        if (dout == NULL) continue;
        const double g = weight ? (double)dout[i] * weight[i] : dout[i];
        sum_g += g;
        sum_gd += g * d;
    }
    const double inverse = 1 / sqrt(squares / n + eps);
    const float shift = (float)mean;
    return (norm_stats){ shift, (float)(mean - shift), (float)inverse, (float)(sum_g / n),
                         (float)(sum_gd * inverse / n) };
}

enum { NORM_D, NORM_DD, NORM_G, NORM_GD, NORM_SUMS }; /* sums over a row, with d = x - shift and g = dout * weight */

GG_INLINE void norm_add(vf sums[NORM_SUMS], const float *x, const float *dout, const float *weight, float shift,
                        const int centred, const int weighted, const int backward, const int count) {
    const vf d = centred ? gg_take(x, count, shift) - shift : gg_take(x, count, 0);
    if (centred) sums[NORM_D] += d;
    sums[NORM_DD] += d * d;
    if (backward) {
        const vf g = weighted ? gg_take(dout, count, 0) * gg_take(weight, count, 0) : gg_take(dout, count, 0);
        if (centred) sums[NORM_G] += g;
        sums[NORM_GD] += g * d;
    }
}

GG_INLINE norm_stats norm_stats_of(const float *x, const float *dout, const float *weight, int64_t n, float eps,
                                   const int centred, const int weighted, const int backward) {
    norm_stats s = { 0 };
    if (centred) s.shift = (float)(gg_row_sum(x, n) / n);
    double total[NORM_SUMS] = { 0 };
    for (int64_t at = 0; at < n; at += GG_ROW_BLOCK) {
        const int64_t end = gg_min(n, at + GG_ROW_BLOCK);
        vf sums[2][NORM_SUMS] = { 0 };
        int64_t i = at;
        for (; i + 2 * GG_VW <= end; i += 2 * GG_VW) {
            norm_add(sums[0], x + i, dout + i, weight + i, s.shift, centred, weighted, backward, GG_VW);
            const int64_t j = i + GG_VW;
            norm_add(sums[1], x + j, dout + j, weight + j, s.shift, centred, weighted, backward, GG_VW);
        }
        for (; i < end; i += GG_VW) {
            const int count = (int)gg_min(GG_VW, end - i);
            if (count == GG_VW)
                norm_add(sums[0], x + i, dout + i, weight + i, s.shift, centred, weighted, backward, GG_VW);
            else norm_add(sums[1], x + i, dout + i, weight + i, s.shift, centred, weighted, backward, count);
        }
        for (int k = 0; k < NORM_SUMS; k++)
            if (k == NORM_DD || (k == NORM_GD && backward) || (k == NORM_D && centred) ||
                (k == NORM_G && centred && backward))
                total[k] += vf_sum(sums[0][k] + sums[1][k]);
    }
    const double each = 1.0 / n;
    const double rest = total[NORM_D] * each; /* about the rounding error of shift */
    double variance = total[NORM_DD] * each - rest * rest;
    if (variance < 0) variance = 0; /* false for NaN */
    if (!(variance < 1e34 && variance + eps > 1e-30))
        return norm_wide_stats(x, backward ? dout : NULL, weighted ? weight : NULL, n, eps, centred);
    const double inverse = 1 / sqrt(variance + eps);
    s.rest = (float)rest;
    s.inverse = (float)inverse;
    s.mean_g = (float)(total[NORM_G] * each);
    if (isfinite(total[NORM_G])) total[NORM_GD] -= rest * total[NORM_G];
    s.mean_gh = (float)(total[NORM_GD] * inverse * each);
    return s;
}

GG_INLINE vf norm_hat(vf x, norm_stats s, const int centred) {
    return (centred ? (x - s.shift) - s.rest : x) * s.inverse;
}

GG_INLINE void norm_write(float *y, const float *x, const float *weight, const float *bias, norm_stats s,
                          const int centred, const int weighted, const int biased, const int count) {
    vf out = norm_hat(gg_take(x, count, 0), s, centred);
    if (weighted) out *= gg_take(weight, count, 0);
    if (biased) out += gg_take(bias, count, 0);
    gg_give(y, out, count);
}

GG_INLINE void norm_rows(const gg_call *c, float eps, int64_t begin, int64_t end, const float *weight,
                         const float *bias, const int centred, const int weighted, const int biased) {
    const int64_t n = c->dst->ne[3];
    gg_walk x = gg_walk_from(&c->src[0], begin);
    float *y = (float *)c->dst->data + begin * n;
    for (int64_t r = begin; r < end; r++, gg_walk_on(&x), y += n) {
        const float *row = (const float *)x.row;
        const norm_stats s = norm_stats_of(row, row, row, n, eps, centred, 0, 0);
        int64_t i = 0;
        for (; i + GG_VW <= n; i += GG_VW)
            norm_write(y + i, row + i, weight + i, bias + i, s, centred, weighted, biased, GG_VW);
        if (i < n) norm_write(y + i, row + i, weight + i, bias + i, s, centred, weighted, biased, (int)(n - i));
    }
}

static int64_t norm_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_rows(c->dst), c->dst->ne[3], 2);
}

GG_INLINE void norm_range(const gg_call *c, float eps, int64_t begin, int64_t end, const int centred) {
    const float *weight = c->src[1].data, *bias = centred ? c->src[2].data : NULL, *none = c->src[0].data;
    if (weight && bias) norm_rows(c, eps, begin, end, weight, bias, centred, 1, 1);
    else if (weight) norm_rows(c, eps, begin, end, weight, none, centred, 1, 0);
    else if (bias) norm_rows(c, eps, begin, end, none, bias, centred, 0, 1);
    else norm_rows(c, eps, begin, end, none, none, centred, 0, 0);
}

GG_INLINE void norm_tasks_of(const gg_call *c, float eps, int64_t begin, int64_t end, const int centred) {
    const int64_t rows = gg_rows(c->dst), n = c->dst->ne[3], tasks = norm_tasks(c, 0);
    const int64_t to = gg_cut(rows, end, tasks);
    const int64_t some = c->n_followers > 0 && n > 0 ? gg_max(1, GG_ROW_BLOCK / n) : gg_max(1, rows);
    for (int64_t r = gg_cut(rows, begin, tasks), next; r < to; r = next) {
        next = gg_min(to, r + some);
        norm_range(c, eps, r, next, centred);
        gg_lead(c, r * n, (next - r) * n, 1, 0);
    }
}

static void norm_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    norm_tasks_of(c, ((const gg_norm_attrs *)c->attrs)->eps, begin, end, 1);
}

static void rms_norm_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    norm_tasks_of(c, ((const gg_rms_norm_attrs *)c->attrs)->eps, begin, end, 0);
}

GG_KERNEL(norm, .stages = 1, .tasks = norm_tasks, .run = norm_run, .leads = GG_FIRST_STAGE);
GG_KERNEL(rms_norm, .stages = 1, .tasks = norm_tasks, .run = rms_norm_run, .leads = GG_FIRST_STAGE);

/* -- gradients -------------------------------------------------------------------------------- */

enum { NORM_DOUT, NORM_X, NORM_WEIGHT };       /* sources */
enum { NORM_DX, NORM_DWEIGHT, NORM_DBIAS };    /* results; others than dx only where they are wanted */
enum { NORM_CHUNKS = 64, NORM_COLUMNS = 256 }; /* of rows at most in stage 0; of a task of stage 1 */

GG_INLINE void norm_write_back(float *dx, float *dweight, float *dbias, const float *dout, const float *weight,
                               const float *x, norm_stats s, const int centred, const int weighted, const int summed,
                               const int count) {
    const vf d = gg_take(dout, count, 0), h = norm_hat(gg_take(x, count, 0), s, centred);
    vf g = d;
    if (weighted) {
        g = vf_rounded(g * gg_take(weight, count, 0)); /* as it is in mean_g: a row of one element has the gradient 0 */
    }
    if (summed) {
        gg_give(dweight, gg_take(dweight, count, 0) + d * h, count);
        if (centred) gg_give(dbias, gg_take(dbias, count, 0) + d, count);
    }
    if (centred) g -= s.mean_g;
    gg_give(dx, (g - h * s.mean_gh) * s.inverse, count);
}

/* dweight and dbias point to this chunk's sums, or, where none are wanted, anywhere. */
GG_INLINE void norm_back_rows(const gg_call *c, float eps, int64_t begin, int64_t end, const float *weight,
                              float *dweight, float *dbias, const int centred, const int weighted, const int summed) {
    const int64_t n = c->src[NORM_X].ne[3];
    gg_walk dout = gg_walk_from(&c->src[NORM_DOUT], begin), x = gg_walk_from(&c->src[NORM_X], begin);
    float *dx = (float *)c->dst[NORM_DX].data + begin * n;
    for (int64_t r = begin; r < end; r++, gg_walk_on(&dout), gg_walk_on(&x), dx += n) {
        const float *d = (const float *)dout.row, *row = (const float *)x.row;
        const norm_stats s = norm_stats_of(row, d, weight, n, eps, centred, weighted, 1);
        int64_t i = 0;
        for (; i + GG_VW <= n; i += GG_VW)
            norm_write_back(dx + i, dweight + i, dbias + i, d + i, weight + i, row + i, s, centred, weighted, summed,
                            GG_VW);
        if (i < n)
            norm_write_back(dx + i, dweight + i, dbias + i, d + i, weight + i, row + i, s, centred, weighted, summed,
                            (int)(n - i));
    }
}

static int64_t norm_back_chunks(const gg_call *c) {
    const gg_tensor *x = &c->src[NORM_X];
    return gg_min(NORM_CHUNKS, gg_row_tasks(gg_rows(x), x->ne[3], 2));
}

static int64_t norm_back_tasks(const gg_call *c, int stage) {
    const int64_t n = c->src[NORM_X].ne[3];
    if (n == 0) return 0;
    if (stage == 0) return norm_back_chunks(c);
    return c->n_dst == 1 ? 0 : gg_ceil_div(n, NORM_COLUMNS);
}

/* work: [chunks, sums, n] with sums = dweight, dbias (norm) or dweight (rms_norm) */
static int64_t norm_back_work(const gg_call *c) {
    const int64_t sums = c->n_dst - 1;
    return norm_back_chunks(c) * sums * c->src[NORM_X].ne[3] * (int64_t)sizeof(float);
}

/* The sums of some rows of a chunk that has many. */
static int64_t norm_back_scratch(const gg_call *c) {
    return (c->n_dst - 1) * c->src[NORM_X].ne[3] * (int64_t)sizeof(float);
}

/* Adds up the rows of a chunk from the second block on, in `sums`, and adds each block's to the chunk's. */
static __attribute__((noinline)) void norm_back_more(const gg_call *c, float eps, int64_t begin, int64_t end,
                                                     int64_t block, const float *weight, float *total, float *sums,
                                                     int centred) {
    const int64_t n = c->src[NORM_X].ne[3], all = (c->n_dst - 1) * n;
    for (int64_t r = begin; r < end; r += block) {
        memset(sums, 0, all * sizeof(float));
        if (centred) norm_back_rows(c, eps, r, gg_min(end, r + block), weight, sums, sums + n, 1, 1, 1);
        else norm_back_rows(c, eps, r, gg_min(end, r + block), weight, sums, sums, 0, 1, 1);
        gg_add_row(total, sums, all);
    }
}

GG_INLINE void norm_back_stages(const gg_call *c, float eps, int stage, int64_t begin, int64_t end, float *scratch,
                                const int centred) {
    const int64_t rows = gg_rows(&c->src[NORM_X]), n = c->src[NORM_X].ne[3];
    const int64_t chunks = norm_back_chunks(c), sums = c->n_dst - 1;
    const float *weight = c->src[NORM_WEIGHT].data;
    if (stage == 0) {
        for (int64_t chunk = begin; chunk < end; chunk++) {
            const int64_t from = gg_cut(rows, chunk, chunks), to = gg_cut(rows, chunk + 1, chunks);
            if (sums == 0) {
                float *dx = c->dst[NORM_DX].data;
                if (weight == NULL) norm_back_rows(c, eps, from, to, dx, dx, dx, centred, 0, 0);
                else norm_back_rows(c, eps, from, to, weight, dx, dx, centred, 1, 0);
            } else {
                float *total = (float *)c->work + chunk * sums * n;
                const int64_t some = gg_min(gg_sum_block(to - from), to - from);
                memset(total, 0, sums * n * sizeof(float));
                norm_back_rows(c, eps, from, from + some, weight, total, total + (centred ? n : 0), centred, 1, 1);
                if (from + some < to) norm_back_more(c, eps, from + some, to, some, weight, total, scratch, centred);
            }
            gg_lead(c, from * n, (to - from) * n, 1, 0);
        }
        return;
    }
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = task * NORM_COLUMNS, to = gg_min(n, from + NORM_COLUMNS);
        for (int64_t k = 0; k < sums; k++) {
            const float *partial = (const float *)c->work + k * n;
            float *restrict total = c->dst[NORM_DWEIGHT + k].data;
            memcpy(total + from, partial + from, (to - from) * sizeof(float));
            for (int64_t chunk = 1; chunk < chunks; chunk++) {
                const float *restrict part = partial + chunk * sums * n;
                for (int64_t i = from; i < to; i++) total[i] += part[i];
            }
        }
    }
}

static void norm_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    norm_back_stages(c, ((const gg_norm_back_attrs *)c->attrs)->eps, stage, begin, end, scratch, 1);
}

static void rms_norm_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    norm_back_stages(c, ((const gg_rms_norm_back_attrs *)c->attrs)->eps, stage, begin, end, scratch, 0);
}

GG_KERNEL(norm_back, .stages = 2, .tasks = norm_back_tasks, .run = norm_back_run, .work = norm_back_work,
          .scratch = norm_back_scratch, .leads = GG_FIRST_STAGE);
GG_KERNEL(rms_norm_back, .stages = 2, .tasks = norm_back_tasks, .run = rms_norm_back_run, .work = norm_back_work,
          .scratch = norm_back_scratch, .leads = GG_FIRST_STAGE);

/* -- l2_norm -------------------------------------------------------------------------------------- */

typedef struct l2_stats {
    float length;
    float dot; /* of x / length with dout */
    int held;  /* the length is eps instead: a constant */
} l2_stats;

GG_INLINE l2_stats l2_stats_of(const float *x, const float *dout, int64_t n, float eps, const int backward) {
    double squares = gg_row_dot(x, x, n), products = backward ? gg_row_dot(x, dout, n) : 0;
    if (!(squares < 1e34 && squares > 1e-30)) { /* squares of f32 may have left its range */
        squares = products = 0;
        for (int64_t i = 0; i < n; i++) {
            squares += (double)x[i] * x[i];
            if (backward) products += (double)x[i] * dout[i];
        }
    }
    const double length = sqrt(squares);
    if (length <= eps) return (l2_stats){ .length = eps, .held = 1 };
    return (l2_stats){ .length = (float)length, .dot = (float)(products / length) };
}

GG_INLINE void l2_write(float *out, const float *x, const float *dout, l2_stats s, const int backward,
                        const int count) {
    vf y = gg_take(x, count, 0) / s.length;
    if (backward) {
        const vf d = gg_take(dout, count, 0);
        y = (s.held ? d : d - y * s.dot) / s.length;
    }
    gg_give(out, y, count);
}

GG_INLINE void l2_rows(const gg_call *c, int64_t begin, int64_t end, float eps, const int backward) {
    const int64_t n = c->dst->ne[3], rows = gg_rows(c->dst), tasks = norm_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk douts = gg_walk_from(&c->src[NORM_DOUT], from), xs = gg_walk_from(&c->src[backward ? NORM_X : 0], from);
    float *out = (float *)c->dst->data + from * n;
    for (int64_t r = from; r < to; r++, gg_walk_on(&douts), gg_walk_on(&xs), out += n) {
        const float *x = (const float *)xs.row, *dout = (const float *)douts.row;
        const l2_stats s = l2_stats_of(x, dout, n, eps, backward);
        int64_t i = 0;
        for (; i + GG_VW <= n; i += GG_VW) l2_write(out + i, x + i, dout + i, s, backward, GG_VW);
        if (i < n) l2_write(out + i, x + i, dout + i, s, backward, (int)(n - i));
    }
}

static void l2_norm_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    l2_rows(c, begin, end, ((const gg_l2_norm_attrs *)c->attrs)->eps, 0);
}

static void l2_norm_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    l2_rows(c, begin, end, ((const gg_l2_norm_back_attrs *)c->attrs)->eps, 1);
}

GG_KERNEL(l2_norm, .stages = 1, .tasks = norm_tasks, .run = l2_norm_run);
GG_KERNEL(l2_norm_back, .stages = 1, .tasks = norm_tasks, .run = l2_norm_back_run);
