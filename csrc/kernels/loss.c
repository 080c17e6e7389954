/* Cross entropy of rows of logits, with classes or with probabilities as targets, and its gradients.
 *
 * Every row is read once: block after block, each while it is in L1, with the sum of exponentials scaled
 * anew when a block brings a larger maximum.  Losses add up in double, rows of a task first, then tasks.  The largest
 * logit and the sum stay apart, for gradients too: the log of the sum, rounded to f32, would say nothing of 1e8. */
#include "abi/attrs/loss.h"
#include "vec/vector_math.h"
#include "walk/kernel.h"
#include "walk/rows.h"

enum { LOSS_DLOSS, LOSS_LOGITS, LOSS_TARGETS, LOSS_TOP, LOSS_TOTAL }; /* sources of both gradients, the first of them */

typedef struct loss_partial {
    double loss;
    int64_t rows; /* that count */
} loss_partial;

/* A row's largest element, NaNs passed over, and the sum of exp(x[i] - top): 0 of nothing but -inf, NaN where there is
 * one. */
typedef struct loss_sum {
    float top;
    double total;
} loss_sum;

/* What is taken from a row's elements: where all is -inf, exp(-inf - 0) = 0, and NaN is still NaN. */
static inline float loss_shift(float top) { return top == -INFINITY ? 0 : top; }

static inline loss_sum loss_sum_of(const float *x, int64_t n) {
    float top = -INFINITY;
    double total = 0;
    for (int64_t at = 0; at < n; at += GG_ROW_BLOCK) {
        const int64_t end = gg_min(n, at + GG_ROW_BLOCK);
        const float largest = gg_row_max(x + at, end - at);
        if (largest > top) {
            total *= exp((double)top - largest);
            top = largest;
        }
        const float shift = loss_shift(top);
        vf s[2] = { 0 };
        int64_t i = at;
        for (; i + 2 * GG_VW <= end; i += 2 * GG_VW)
            for (int k = 0; k < 2; k++) s[k] += vf_exp(vf_load(x + i + k * GG_VW) - shift);
        for (; i < end; i += GG_VW) s[0] += vf_exp(vf_load_n(x + i, (int)gg_min(GG_VW, end - i), -INFINITY) - shift);
        total += vf_sum(s[0] + s[1]);
    }
    return (loss_sum){ top, total };
}

/* Element r of a tensor of any strides, counted through. */
static inline void *loss_element(const gg_tensor *t, int64_t r) {
    return gg_row(t, r / t->ne[3]) + r % t->ne[3] * t->nb[3];
}

/* The class of row r; -1 where the row does not count. */
static inline int64_t loss_class(const gg_call *c, int input, int64_t r, int64_t classes, int64_t ignored) {
    const int64_t target = *(const int32_t *)loss_element(&c->src[input], r);
    if (target == ignored) return -1;
    if (target >= 0 && target < classes) return target;
    gg_report(c, GG_INDEX, input, target, classes);
    return -1;
}

static int64_t loss_row_tasks(const gg_tensor *logits) { return gg_row_tasks(gg_rows(logits), logits->ne[3], 3); }

/* Tasks and work memory of a loss: stage 0 sums over rows, stage 1 over the tasks before. */
static int64_t loss_tasks(const gg_call *c, int stage) { return stage == 0 ? loss_row_tasks(&c->src[0]) : 1; }
static int64_t loss_work(const gg_call *c) { return loss_tasks(c, 0) * (int64_t)sizeof(loss_partial); }

static loss_partial loss_total(const gg_call *c) {
    const loss_partial *partial = c->work;
    loss_partial total = { 0, 0 };
    for (int64_t i = 0; i < loss_tasks(c, 0); i++) {
        total.loss += partial[i].loss;
        total.rows += partial[i].rows;
    }
    return total;
}

static void cross_entropy_class_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    enum { LOSS, TOP, TOTAL, WEIGHT }; /* results */
    const gg_cross_entropy_class_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[0];
    if (stage == 1) {
        const loss_partial total = loss_total(c);
        const double weight = attrs->mean ? (total.rows ? 1.0 / total.rows : 0.0) : 1.0;
        *(float *)c->dst[LOSS].data = (float)(total.rows ? total.loss * weight : 0);
        *(float *)c->dst[WEIGHT].data = (float)weight;
        return;
    }
    const int64_t rows = gg_rows(logits), classes = logits->ne[3], tasks = loss_tasks(c, 0);
    float *top = c->dst[TOP].data, *sums = c->dst[TOTAL].data;
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = gg_cut(rows, task, tasks), to = gg_cut(rows, task + 1, tasks);
        loss_partial partial = { 0, 0 };
        gg_walk x = gg_walk_from(logits, from);
        for (int64_t r = from; r < to; r++, gg_walk_on(&x)) {
            const int64_t target = loss_class(c, 1, r, classes, attrs->ignore_index);
            top[r] = 0;
            sums[r] = 1;
            if (target < 0) continue;
            const loss_sum sum = loss_sum_of((const float *)x.row, classes);
            top[r] = sum.top;
            sums[r] = (float)sum.total;
            partial.loss += log(sum.total) + ((double)sum.top - ((const float *)x.row)[target]);
            partial.rows++;
        }
        ((loss_partial *)c->work)[task] = partial;
    }
}

GG_KERNEL(cross_entropy_class, .stages = 2, .tasks = loss_tasks, .run = cross_entropy_class_run, .work = loss_work);

static int64_t loss_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    return loss_row_tasks(&c->src[LOSS_LOGITS]);
}

/* dlogits = w * (p * sum of labels - labels) + dlse * p, with p = exp(x - shift) * inverse: of a row, for labels and for
 * none, with and without a gradient that comes in through lse.  The difference is taken before w, when it is nearly
 * exact. */
typedef struct loss_row {
    float shift, inverse, w, sum, dlse;
} loss_row;

static loss_row loss_row_of(const gg_call *c, int64_t r, float w) {
    const float top = *(const float *)loss_element(&c->src[LOSS_TOP], r);
    const float total = *(const float *)loss_element(&c->src[LOSS_TOTAL], r);
    return (loss_row){ .shift = loss_shift(top), .inverse = 1 / total, .w = w };
}

GG_INLINE vf loss_p(vf x, loss_row row) { return vf_exp(x - row.shift) * row.inverse; }

GG_INLINE void loss_write_back(float *dx, const float *x, const float *labels, loss_row row, const int soft,
                               const int through_lse, const int count) {
    const vf p = loss_p(gg_take(x, count, 0), row);
    vf d = row.w * (soft ? p * row.sum - gg_take(labels, count, 0) : p);
    if (through_lse) d += row.dlse * p;
    gg_give(dx, d, count);
}

GG_INLINE void loss_row_back(float *dx, const float *x, const float *labels, int64_t n, loss_row row, const int soft,
                             const int through_lse) {
    int64_t i = 0;
    for (; i + GG_VW <= n; i += GG_VW) loss_write_back(dx + i, x + i, labels + i, row, soft, through_lse, GG_VW);
    if (i < n) loss_write_back(dx + i, x + i, labels + i, row, soft, through_lse, (int)(n - i));
}

/* With classes: labels are 1 at the target; 0 in rows that do not count.  Where the target has most of p, p - 1 would be
 * but the rounding of p: there it is minus the sum of all others. */
static void cross_entropy_class_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    enum { WEIGHT = LOSS_TOTAL + 1, DLSE }; /* sources */
    const gg_cross_entropy_class_back_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[LOSS_LOGITS];
    const float w = *(const float *)c->src[LOSS_DLOSS].data * *(const float *)c->src[WEIGHT].data;
    const int64_t rows = gg_rows(logits), n = logits->ne[3], tasks = loss_back_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk walk = gg_walk_from(logits, from);
    float *dx = (float *)c->dst->data + from * n;
    for (int64_t r = from; r < to; r++, gg_walk_on(&walk), dx += n) {
        const float *x = (const float *)walk.row;
        const int64_t target = loss_class(c, LOSS_TARGETS, r, n, attrs->ignore_index);
        if (target < 0) {
            memset(dx, 0, n * sizeof(float));
            continue;
        }
        loss_row row = loss_row_of(c, r, w);
        const float p = loss_p(vf_set1(x[target]), row)[0]; /* before it is overwritten: dx may lie on x */
        if (c->src[DLSE].data) {
            row.dlse = *(const float *)loss_element(&c->src[DLSE], r);
            loss_row_back(dx, x, x, n, row, 0, 1);
            dx[target] = w * (p - 1) + row.dlse * p;
        } else {
            loss_row_back(dx, x, x, n, row, 0, 0);
            if (p > 0.5f && n > 1)
                dx[target] = (float)-(gg_row_sum(dx, target) + gg_row_sum(dx + target + 1, n - target - 1));
            else dx[target] = w * (p - 1);
        }
    }
}

GG_KERNEL(cross_entropy_class_back, .stages = 1, .tasks = loss_back_tasks, .run = cross_entropy_class_back_run);

/* -- probabilities as targets ---------------------------------------------------------------------- */

/* labels * ((top - x) + log(total)), where labels of 0 count for nothing whatever x is. */
GG_INLINE vf loss_soft_terms(const float *x, const float *labels, float top, float log_total, const int count) {
    const vf p = gg_take(labels, count, 0);
    return vf_select(p == 0.0f, vf_zero(), p * ((top - gg_take(x, count, 0)) + log_total));
}

static double loss_soft_row(const float *x, const float *labels, int64_t n, loss_sum sum) {
    const float log_total = (float)log(sum.total);
    return GG_SUM_OVER_ROW(n, i, count, loss_soft_terms(x + i, labels + i, sum.top, log_total, count));
}

static void cross_entropy_soft_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    enum { LOSS, TOP, TOTAL }; /* results */
    const gg_cross_entropy_soft_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[0], *labels = &c->src[1];
    if (stage == 1) {
        const loss_partial total = loss_total(c);
        *(float *)c->dst[LOSS].data = (float)(attrs->mean && total.rows ? total.loss / total.rows : total.loss);
        return;
    }
    const int64_t rows = gg_rows(logits), n = logits->ne[3], tasks = loss_tasks(c, 0);
    float *top = c->dst[TOP].data, *sums = c->dst[TOTAL].data;
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = gg_cut(rows, task, tasks), to = gg_cut(rows, task + 1, tasks);
        loss_partial partial = { 0, to - from };
        gg_walk x = gg_walk_from(logits, from), p = gg_walk_from(labels, from);
        for (int64_t r = from; r < to; r++, gg_walk_on(&x), gg_walk_on(&p)) {
            const loss_sum sum = loss_sum_of((const float *)x.row, n);
            top[r] = sum.top;
            sums[r] = (float)sum.total;
            partial.loss += loss_soft_row((const float *)x.row, (const float *)p.row, n, sum);
        }
        ((loss_partial *)c->work)[task] = partial;
    }
}

GG_KERNEL(cross_entropy_soft, .stages = 2, .tasks = loss_tasks, .run = cross_entropy_soft_run, .work = loss_work);

static void cross_entropy_soft_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    enum { DLSE = LOSS_TOTAL + 1 }; /* source */
    const gg_cross_entropy_soft_back_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[LOSS_LOGITS];
    const int64_t rows = gg_rows(logits), n = logits->ne[3], tasks = loss_back_tasks(c, 0);
    const float dloss = *(const float *)c->src[LOSS_DLOSS].data, w = attrs->mean ? dloss / (float)rows : dloss;
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk walk = gg_walk_from(logits, from), labels = gg_walk_from(&c->src[LOSS_TARGETS], from);
    float *dx = (float *)c->dst->data + from * n;
    for (int64_t r = from; r < to; r++, gg_walk_on(&walk), gg_walk_on(&labels), dx += n) {
        const float *x = (const float *)walk.row, *p = (const float *)labels.row;
        loss_row row = loss_row_of(c, r, w);
        row.sum = (float)gg_row_sum(p, n);
        if (c->src[DLSE].data) {
            row.dlse = *(const float *)loss_element(&c->src[DLSE], r);
            loss_row_back(dx, x, p, n, row, 1, 1);
        } else {
            loss_row_back(dx, x, p, n, row, 1, 0);
        }
    }
}

GG_KERNEL(cross_entropy_soft_back, .stages = 1, .tasks = loss_back_tasks, .run = cross_entropy_soft_back_run);
