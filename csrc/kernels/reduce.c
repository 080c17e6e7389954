/* Sums over axes: sum, sum_rows, mean and repeat_back are one kernel, whose result's shape tiles the source's.
 *
 * Source elements have a kept index (which result they belong to) and a reduced one (which tile they are
 * in).  The reduced ones are cut into chunks, the kept ones into pieces; a task sums one chunk of one piece
 * into work memory, and a second stage adds the chunks up in order.  With a single chunk it writes the result.
 * Two ways to sum, by what is contiguous in the source:
 *   along  the reduced axis (a row's sum): vectors in f32 for 4096 elements, then double;
 *   across the kept axis (a bias gradient): rows are added onto rows, four at a time, and every 256 rows
 *          onto a second accumulator, so that errors stay small for any number of rows. */
#include "abi/attrs/reduce.h"
#include "walk/kernel.h"
#include "walk/nest.h"

enum {
    REDUCE_ALONG = 4096, /* elements summed in f32 */
    REDUCE_WIDTH = 1024, /* columns across which rows are added at a time */
    REDUCE_ROWS = 256,
    REDUCE_CHUNKS = 32,
};

typedef struct reduce_plan {
    int64_t offset;        /* of the first element, from the source's address: a reversed axis ends there */
    int64_t kept, reduced; /* elements */
    int kept_rank, reduced_rank;
    int64_t kept_n[NEST_DIMS], kept_step[NEST_DIMS]; /* innermost first; bytes in the source */
    int64_t reduced_n[NEST_DIMS], reduced_step[NEST_DIMS];
    int along;
    int64_t chunks, pieces;
} reduce_plan;

/* The order of reduced axes is free: the one with the smallest step becomes the innermost. */
static void reduce_sort(reduce_plan *p) {
    for (int d = 0; d < p->reduced_rank; d++)
        if (p->reduced_step[d] < 0) {
            p->offset += (p->reduced_n[d] - 1) * p->reduced_step[d];
            p->reduced_step[d] = -p->reduced_step[d];
        }
    for (int d = 1; d < p->reduced_rank; d++)
        for (int e = d; e > 0 && p->reduced_step[e] < p->reduced_step[e - 1]; e--) {
            const int64_t n = p->reduced_n[e], step = p->reduced_step[e];
            p->reduced_n[e] = p->reduced_n[e - 1], p->reduced_step[e] = p->reduced_step[e - 1];
            p->reduced_n[e - 1] = n, p->reduced_step[e - 1] = step;
        }
    int last = 0;
    for (int d = 1; d < p->reduced_rank; d++)
        if (p->reduced_step[d] == p->reduced_n[last] * p->reduced_step[last]) {
            p->reduced_n[last] *= p->reduced_n[d];
        } else {
            last++;
            p->reduced_n[last] = p->reduced_n[d], p->reduced_step[last] = p->reduced_step[d];
        }
    p->reduced_rank = gg_min(p->reduced_rank, last + 1);
}

static void reduce_make(reduce_plan *p, const gg_call *c) {
    nest s;
    nest_axes(&s, c->src->ne, 2, (const gg_tensor *const[]){ c->dst, c->src });
    p->offset = 0;
    p->kept = gg_elements(c->dst);
    p->reduced = p->kept ? s.total / p->kept : 0;
    p->kept_rank = p->reduced_rank = 0;
    for (int d = 0; d < s.rank; d++) {
        const int reduced = s.step[d][0] == 0;
        const int at = reduced ? p->reduced_rank++ : p->kept_rank++;
        (reduced ? p->reduced_n : p->kept_n)[at] = s.n[d];
        (reduced ? p->reduced_step : p->kept_step)[at] = s.step[d][1];
    }
    reduce_sort(p);
    p->along = p->kept_rank == 0 || (p->reduced_rank > 0 && p->reduced_step[0] == 4);
    const int64_t total = p->kept * p->reduced, tasks = gg_max(1, total / GG_TASK_ELEMENTS);
    if (p->along) {
        p->pieces = gg_max(1, gg_min(p->kept, tasks));
        p->chunks = p->pieces >= 16 ? 1 : gg_min(REDUCE_CHUNKS, tasks / p->pieces);
    } else {
        p->pieces = gg_ceil_div(gg_max(1, p->kept), REDUCE_WIDTH);
        p->chunks = p->pieces >= 16 ? 1 : gg_min(REDUCE_CHUNKS / p->pieces, tasks / (2 * p->pieces));
        p->chunks = gg_min(p->chunks, p->reduced / 16);
    }
    p->chunks = gg_max(1, p->chunks);
}

/* Where the index'th element of some axes lies, and in index[] its place along each. */
static int64_t reduce_seek(int rank, const int64_t *n, const int64_t *step, int64_t i, int64_t *index) {
    int64_t offset = 0;
    for (int d = 0; d < rank; d++) {
        index[d] = d == rank - 1 ? i : i % n[d];
        i = d == rank - 1 ? 0 : i / n[d];
        offset += index[d] * step[d];
    }
    return offset;
}

/* From the beginning of one row (axis 0) to that of the next. */
GG_INLINE int64_t reduce_next(int rank, const int64_t *n, const int64_t *step, int64_t *index) {
    int64_t offset = 0;
    for (int d = 1; d < rank; d++) {
        offset += step[d];
        if (++index[d] < n[d]) break;
        offset -= n[d] * step[d];
        index[d] = 0;
    }
    return offset;
}

/* The sum of n elements, in a fixed order. */
static float reduce_row(const char *x, int64_t n, int64_t step) {
    vf s[4] = { { 0 } };
    int64_t i = 0;
    if (step != 4) {
        float lane[4] = { 0 };
        for (; i + 4 <= n; i += 4)
            for (int k = 0; k < 4; k++) lane[k] += *(const float *)(x + (i + k) * step);
        float sum = (lane[0] + lane[1]) + (lane[2] + lane[3]);
        for (; i < n; i++) sum += *(const float *)(x + i * step);
        return sum;
    }
    const float *v = (const float *)x;
    for (; i + 4 * GG_VW <= n; i += 4 * GG_VW)
        for (int k = 0; k < 4; k++) s[k] += vf_load(v + i + k * GG_VW);
    for (; i + GG_VW <= n; i += GG_VW) s[0] += vf_load(v + i);
    if (i < n) s[1] += vf_load_n(v + i, (int)(n - i), 0);
    return vf_sum((s[0] + s[1]) + (s[2] + s[3]));
}

/* The sum over the reduced indices from .. to of the elements whose first is at x. */
static double reduce_along(const reduce_plan *p, const char *x, int64_t from, int64_t to) {
    int64_t index[NEST_DIMS] = { 0 };
    double sum = 0;
    if (p->reduced_rank <= 1) {
        const int64_t step = p->reduced_rank ? p->reduced_step[0] : 4;
        for (int64_t i = from; i < to; i += REDUCE_ALONG)
            sum += reduce_row(x + i * step, gg_min(REDUCE_ALONG, to - i), step);
        return sum;
    }
    x += reduce_seek(p->reduced_rank, p->reduced_n, p->reduced_step, from, index);
    while (from < to) {
        const int64_t n = gg_min(REDUCE_ALONG, gg_min(to - from, p->reduced_n[0] - index[0]));
        sum += reduce_row(x, n, p->reduced_step[0]);
        from += n;
        index[0] += n;
        x += n * p->reduced_step[0];
        if (index[0] == p->reduced_n[0]) {
            x += reduce_next(p->reduced_rank, p->reduced_n, p->reduced_step, index) - index[0] * p->reduced_step[0];
            index[0] = 0;
        }
    }
    return sum;
}

/* acc[i] += rows of x, with `step` bytes from element to element. */
static void reduce_add_rows(float *acc, const char *x, int64_t rows, int64_t row_step, int64_t n, int64_t step) {
    int64_t r = 0;
    if (step == 4)
        for (; r + 4 <= rows; r += 4) {
            const float *x0 = (const float *)(x + r * row_step), *x1 = (const float *)(x + (r + 1) * row_step);
            const float *x2 = (const float *)(x + (r + 2) * row_step), *x3 = (const float *)(x + (r + 3) * row_step);
            int64_t i = 0;
            for (; i + GG_VW <= n; i += GG_VW) {
                const vf s = (vf_load(x0 + i) + vf_load(x1 + i)) + (vf_load(x2 + i) + vf_load(x3 + i));
                vf_store(acc + i, vf_load(acc + i) + s);
            }
            for (; i < n; i++) acc[i] += (x0[i] + x1[i]) + (x2[i] + x3[i]);
        }
    for (; r < rows; r++) {
        const char *row = x + r * row_step;
        int64_t i = 0;
        if (step == 4)
            for (; i + GG_VW <= n; i += GG_VW) vf_store(acc + i, vf_load(acc + i) + vf_load((const float *)row + i));
        for (; i < n; i++) acc[i] += *(const float *)(row + i * step);
    }
}

/* out[i], i < n: the sums over the reduced indices from .. to of the elements whose first is at x + i * step. */
static void reduce_across(const reduce_plan *p, const char *x, int64_t n, int64_t from, int64_t to, float *out) {
    const int64_t step = p->kept_step[0];
    int64_t index[NEST_DIMS] = { 0 }, rows = 0;
    _Alignas(64) float acc[REDUCE_WIDTH];
    memset(acc, 0, n * sizeof(float));
    memset(out, 0, n * sizeof(float));
    x += reduce_seek(p->reduced_rank, p->reduced_n, p->reduced_step, from, index);
    while (from < to) {
        int64_t m = 1;
        if (p->reduced_rank == 0) {
            reduce_add_rows(acc, x, 1, 0, n, step);
        } else {
            m = gg_min(REDUCE_ROWS - rows, gg_min(to - from, p->reduced_n[0] - index[0]));
            reduce_add_rows(acc, x, m, p->reduced_step[0], n, step);
            index[0] += m;
            x += m * p->reduced_step[0];
            if (index[0] == p->reduced_n[0]) {
                x += reduce_next(p->reduced_rank, p->reduced_n, p->reduced_step, index) - index[0] * p->reduced_step[0];
                index[0] = 0;
            }
        }
        from += m;
        rows += m;
        if (rows == REDUCE_ROWS || from == to) {
            for (int64_t i = 0; i < n; i++) out[i] += acc[i];
            memset(acc, 0, n * sizeof(float));
            rows = 0;
        }
    }
}

static int64_t reduce_tasks(const gg_call *c, int stage) {
    reduce_plan p;
    reduce_make(&p, c);
    if (p.kept == 0) return 0;
    if (stage == 0) return p.chunks * p.pieces;
    return p.chunks == 1 ? 0 : gg_row_tasks(p.kept, 1, p.chunks);
}

/* The chunks' sums: double along, f32 across.  [chunks, kept] */
static int64_t reduce_work(const gg_call *c) {
    reduce_plan p;
    reduce_make(&p, c);
    return p.chunks == 1 ? 0 : p.chunks * p.kept * (p.along ? sizeof(double) : sizeof(float));
}

static void reduce_partial(const reduce_plan *p, const gg_call *c, int64_t task, float divisor) {
    const int64_t chunk = task / p->pieces, piece = task % p->pieces;
    const int64_t from = gg_cut(p->reduced, chunk, p->chunks), to = gg_cut(p->reduced, chunk + 1, p->chunks);
    int64_t k = p->along ? gg_cut(p->kept, piece, p->pieces) : nest_cut(p->kept, piece, p->pieces);
    const int64_t end = p->along ? gg_cut(p->kept, piece + 1, p->pieces) : nest_cut(p->kept, piece + 1, p->pieces);
    float *out = c->dst->data;
    if (p->reduced == 0) {
        for (; k < end; k++) out[k] = 0 / divisor;
        return;
    }
    int64_t index[NEST_DIMS] = { 0 };
    const char *x =
        (const char *)c->src->data + p->offset + reduce_seek(p->kept_rank, p->kept_n, p->kept_step, k, index);
    while (k < end) {
        int64_t n = p->kept_rank ? gg_min(end - k, p->kept_n[0] - index[0]) : 1;
        if (p->along) {
            const int64_t step = p->kept_rank ? p->kept_step[0] : 0;
            for (int64_t i = 0; i < n; i++) {
                const double sum = reduce_along(p, x + i * step, from, to);
                if (p->chunks == 1) out[k + i] = (float)(sum / divisor);
                else ((double *)c->work)[chunk * p->kept + k + i] = sum;
            }
        } else {
            n = gg_min(n, REDUCE_WIDTH);
            float *sums = p->chunks == 1 ? out + k : (float *)c->work + chunk * p->kept + k;
            reduce_across(p, x, n, from, to, sums);
            if (p->chunks == 1 && divisor != 1)
                for (int64_t i = 0; i < n; i++) sums[i] /= divisor;
        }
        k += n;
        if (p->kept_rank == 0) return;
        index[0] += n;
        x += n * p->kept_step[0];
        if (index[0] == p->kept_n[0]) {
            x += reduce_next(p->kept_rank, p->kept_n, p->kept_step, index) - index[0] * p->kept_step[0];
            index[0] = 0;
        }
    }
}

static void reduce_combine(const reduce_plan *p, const gg_call *c, int64_t from, int64_t to, float divisor) {
    float *out = c->dst->data;
    if (p->along) {
        for (int64_t k = from; k < to; k++) {
            double sum = 0;
            for (int64_t i = 0; i < p->chunks; i++) sum += ((const double *)c->work)[i * p->kept + k];
            out[k] = (float)(sum / divisor);
        }
        return;
    }
    const float *sums = c->work;
    memcpy(out + from, sums + from, (to - from) * sizeof(float));
    for (int64_t i = 1; i < p->chunks; i++)
        for (int64_t k = from; k < to; k++) out[k] += sums[i * p->kept + k];
    if (divisor != 1)
        for (int64_t k = from; k < to; k++) out[k] /= divisor;
}

static void reduce_divided(const gg_call *c, int stage, int64_t begin, int64_t end, float divisor) {
    reduce_plan p;
    reduce_make(&p, c);
    if (stage == 0) {
        for (int64_t task = begin; task < end; task++) reduce_partial(&p, c, task, divisor);
    } else {
        const int64_t tasks = gg_row_tasks(p.kept, 1, p.chunks);
        reduce_combine(&p, c, nest_cut(p.kept, begin, tasks), nest_cut(p.kept, end, tasks), divisor);
    }
}

static void reduce_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    reduce_divided(c, stage, begin, end, 1);
}

static void reduce_mean_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    reduce_divided(c, stage, begin, end, (float)c->src->ne[3]);
}

GG_KERNEL(sum, .stages = 2, .tasks = reduce_tasks, .run = reduce_run, .work = reduce_work);
GG_KERNEL(sum_rows, .stages = 2, .tasks = reduce_tasks, .run = reduce_run, .work = reduce_work);
GG_KERNEL(repeat_back, .stages = 2, .tasks = reduce_tasks, .run = reduce_run, .work = reduce_work);
GG_KERNEL(mean, .stages = 2, .tasks = reduce_tasks, .run = reduce_mean_run, .work = reduce_work);

/* -- argmax --------------------------------------------------------------------------------------- */

/* The result has no last axis, so its axes stand one further to the right than the source's. */
static int64_t reduce_argmax_tasks(const gg_call *c, int stage) {
    (void)stage;
    const int64_t rows = gg_rows(c->src);
    return rows == 0 || c->src->ne[3] == 0 ? 0 : gg_row_tasks(rows, c->src->ne[3], 1);
}

static int64_t reduce_argmax_row(const char *x, int64_t n, int64_t step) {
    if (step == 4) { /* the largest value first, then where it stands */
        const float *v = (const float *)x;
        vf most[4];
        vi strange = vi_set1(0);
        for (int k = 0; k < 4; k++) most[k] = vf_set1(v[0]);
        int64_t i = 0;
        for (; i + 4 * GG_VW <= n; i += 4 * GG_VW)
            for (int k = 0; k < 4; k++) {
                const vf y = vf_load(v + i + k * GG_VW);
                strange |= (vi)(y != y);
                most[k] = vf_max(most[k], y);
            }
        for (; i < n; i += GG_VW) {
            const int count = (int)gg_min(GG_VW, n - i);
            const vf y = count == GG_VW ? vf_load(v + i) : vf_load_n(v + i, count, v[0]);
            strange |= (vi)(y != y);
            most[0] = vf_max(most[0], y);
        }
        const int any = vi_any(strange);
        float lane[GG_VW], largest = v[0];
        vf_store(lane, vf_max(vf_max(most[0], most[1]), vf_max(most[2], most[3])));
        for (int k = 0; k < GG_VW; k++)
            if (lane[k] > largest) largest = lane[k];
        const vf wanted = vf_set1(largest);
        for (i = 0; i + GG_VW <= n; i += GG_VW) { /* pass over what has not got it */
            const vf y = vf_load(v + i);
            if (vi_any(any ? (vi)(y != y) : (vi)(y == wanted))) break;
        }
        for (; any ? v[i] == v[i] : v[i] != largest; i++) {}
        return i;
    }
    int64_t best = 0;
    float largest = *(const float *)x;
    for (int64_t i = 1; i < n && largest == largest; i++) {
        const float y = *(const float *)(x + i * step);
        if (y > largest || y != y) largest = y, best = i;
    }
    return best;
}

static void reduce_argmax_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const int64_t rows = gg_rows(c->src), tasks = reduce_argmax_tasks(c, 0);
    int32_t *out = c->dst->data;
    for (int64_t r = gg_cut(rows, begin, tasks); r < gg_cut(rows, end, tasks); r++)
        out[r] = (int32_t)reduce_argmax_row(gg_row(c->src, r), c->src->ne[3], c->src->nb[3]);
}

GG_KERNEL(argmax, .stages = 1, .tasks = reduce_argmax_tasks, .run = reduce_argmax_run);

/* -- cumsum --------------------------------------------------------------------------------------- */

enum { CUMSUM_LINES = 16 }; /* summed side by side, in double */

/* The axes as [outer, outer, along the sum, side by side]: what lies side by side in memory, if it can. */
static gg_tensor cumsum_turned(const gg_tensor *t, int64_t axis) {
    static const int order[4][4] = { { 1, 2, 0, 3 }, { 0, 2, 1, 3 }, { 0, 1, 2, 3 }, { 0, 1, 3, 2 } };
    gg_tensor turned = *t;
    for (int d = 0; d < 4; d++) {
        turned.ne[d] = t->ne[order[axis][d]];
        turned.nb[d] = t->nb[order[axis][d]];
    }
    return turned;
}

static int64_t cumsum_axis(const gg_call *c) {
    const int64_t axis = ((const gg_cumsum_attrs *)c->attrs)->axis;
    return axis < 0 ? axis + 4 : axis + 4 - c->dst->rank;
}

static int64_t cumsum_bundles(const gg_tensor *turned) {
    return turned->ne[0] * turned->ne[1] * gg_ceil_div(turned->ne[3], CUMSUM_LINES);
}

static int64_t cumsum_tasks(const gg_call *c, int stage) {
    (void)stage;
    if (gg_elements(c->dst) == 0) return 0;
    const gg_tensor out = cumsum_turned(c->dst, cumsum_axis(c));
    const int64_t bundles = cumsum_bundles(&out);
    return gg_row_tasks(bundles, gg_elements(&out) / bundles, 1);
}

static void cumsum_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const int reverse = ((const gg_cumsum_attrs *)c->attrs)->reverse;
    const gg_tensor out = cumsum_turned(c->dst, cumsum_axis(c)), x = cumsum_turned(c->src, cumsum_axis(c));
    const int64_t per_row = gg_ceil_div(out.ne[3], CUMSUM_LINES), tasks = cumsum_tasks(c, 0), n = out.ne[2];
    const int64_t bundles = cumsum_bundles(&out), last = gg_cut(bundles, end, tasks);
    for (int64_t bundle = gg_cut(bundles, begin, tasks); bundle < last; bundle++) {
        const int64_t row = bundle / per_row, first = bundle % per_row * CUMSUM_LINES;
        const int64_t lines = gg_min(CUMSUM_LINES, out.ne[3] - first);
        const char *from = gg_at(&x, row / x.ne[1], row % x.ne[1], reverse ? n - 1 : 0) + first * x.nb[3];
        char *to = gg_at(&out, row / x.ne[1], row % x.ne[1], reverse ? n - 1 : 0) + first * out.nb[3];
        const int64_t from_step = reverse ? -x.nb[2] : x.nb[2], to_step = reverse ? -out.nb[2] : out.nb[2];
        double sum[CUMSUM_LINES] = { 0 };
        for (int64_t i = 0; i < n; i++, from += from_step, to += to_step)
            for (int64_t k = 0; k < lines; k++) {
                sum[k] += *(const float *)(from + k * x.nb[3]);
                *(float *)(to + k * out.nb[3]) = (float)sum[k];
            }
    }
}

GG_KERNEL(cumsum, .stages = 1, .tasks = cumsum_tasks, .run = cumsum_run);

/* -- count_equal ---------------------------------------------------------------------------------- */

static int64_t count_equal_chunks(const gg_call *c) { return gg_row_tasks(gg_elements(c->src), 1, 1); }

static int64_t count_equal_tasks(const gg_call *c, int stage) { return stage == 0 ? count_equal_chunks(c) : 1; }

static int64_t count_equal_work(const gg_call *c) { return count_equal_chunks(c) * (int64_t)sizeof(int32_t); }

static void count_equal_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const int32_t *a = c->src[0].data, *b = c->src[1].data;
    const int64_t n = gg_elements(c->src), chunks = count_equal_chunks(c);
    int32_t *counts = c->work, *out = c->dst->data;
    if (stage == 1) {
        *out = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++) *out += counts[chunk];
        return;
    }
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int32_t equal = 0;
        for (int64_t i = gg_cut(n, chunk, chunks), to = gg_cut(n, chunk + 1, chunks); i < to; i++)
            equal += a[i] == b[i];
        counts[chunk] = equal;
    }
}

GG_KERNEL(count_equal, .stages = 2, .tasks = count_equal_tasks, .run = count_equal_run, .work = count_equal_work);
