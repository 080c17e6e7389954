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
    double loss, weight; /* of the rows that count: 1 each, or what their classes weigh */
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
        total.weight += partial[i].weight;
    }
    return total;
}

/* labels * ((top - x) + log(total)), where labels of 0 count for nothing whatever x is. */
GG_INLINE vf loss_soft_terms(const float *x, const float *labels, float top, float log_total, const int count) {
    const vf p = gg_take(labels, count, 0);
    return vf_select(p == 0.0f, vf_zero(), p * ((top - gg_take(x, count, 0)) + log_total));
}

static double loss_soft_row(const float *x, const float *labels, int64_t n, loss_sum sum) {
    const float log_total = (float)log(sum.total);
    return GG_SUM_OVER_ROW(n, i, count, loss_soft_terms(x + i, labels + i, sum.top, log_total, count));
}

/* The same with labels that are all 1. */
static double loss_even_row(const float *x, int64_t n, loss_sum sum) {
    const float top = sum.top;
    return GG_SUM_OVER_ROW(n, i, count, top - gg_take(x + i, count, top)) + (double)n * log(sum.total);
}

/* What the classes weigh, and smoothing takes of a label and gives to each of all. */
typedef struct loss_classes {
    const float *weights; /* NULL: 1 each */
    float own, even;      /* of its label a target keeps `own`; `even` is what each class has */
    double total;         /* of the weights */
} loss_classes;

static loss_classes loss_classes_of(const gg_tensor *weights, int64_t n, float smoothing) {
    return (loss_classes){ .weights = weights->data,
                           .own = 1 - smoothing,
                           .even = smoothing / (float)n,
                           .total = !weights->data  ? (double)n
                                    : smoothing > 0 ? gg_row_sum(weights->data, n)
                                                    : 0 };
}

static float loss_weight(const loss_classes *k, int64_t target) { return k->weights ? k->weights[target] : 1; }

static double loss_class_row(const float *x, int64_t n, int64_t target, loss_sum sum, const loss_classes *k) {
    double loss = loss_weight(k, target) * (log(sum.total) + ((double)sum.top - x[target]));
    if (k->even > 0)
        loss = k->own * loss + k->even * (k->weights ? loss_soft_row(x, k->weights, n, sum) : loss_even_row(x, n, sum));
    return loss;
}

/* The last stage: what the rows come to.  The result is what a row counts in it; of no rows that count the loss is 0. */
static float loss_reduce(const gg_call *c, int reduction) {
    const loss_partial total = loss_total(c);
    const double weight = reduction != GG_MEAN ? 1 : total.weight != 0 ? 1 / total.weight : 0;
    if (reduction != GG_ROWS) *(float *)c->dst->data = (float)(total.weight != 0 ? total.loss * weight : 0);
    return (float)weight;
}

static void cross_entropy_class_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    enum { LOGITS, TARGETS, CLASS_WEIGHTS };
    enum { LOSS, TOP, TOTAL, WEIGHT }; /* results */
    const gg_cross_entropy_class_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[LOGITS];
    if (stage == 1) {
        *(float *)c->dst[WEIGHT].data = loss_reduce(c, attrs->reduction);
        return;
    }
    const int64_t rows = gg_rows(logits), classes = logits->ne[3], tasks = loss_tasks(c, 0);
    const loss_classes k = loss_classes_of(&c->src[CLASS_WEIGHTS], classes, attrs->label_smoothing);
    float *losses = attrs->reduction == GG_ROWS ? c->dst[LOSS].data : NULL;
    float *top = c->dst[TOP].data, *sums = c->dst[TOTAL].data;
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = gg_cut(rows, task, tasks), to = gg_cut(rows, task + 1, tasks);
        loss_partial partial = { 0, 0 };
        gg_walk x = gg_walk_from(logits, from);
        for (int64_t r = from; r < to; r++, gg_walk_on(&x)) {
            const int64_t target = loss_class(c, TARGETS, r, classes, attrs->ignore_index);
            double loss = 0;
            top[r] = 0;
            sums[r] = 1;
            if (target >= 0) {
                const loss_sum sum = loss_sum_of((const float *)x.row, classes);
                top[r] = sum.top;
                sums[r] = (float)sum.total;
                loss = loss_class_row((const float *)x.row, classes, target, sum, &k);
                partial.loss += loss;
                partial.weight += loss_weight(&k, target);
            }
            if (losses) losses[r] = (float)loss;
        }
        ((loss_partial *)c->work)[task] = partial;
    }
}

GG_KERNEL(cross_entropy_class, .stages = 2, .tasks = loss_tasks, .run = cross_entropy_class_run, .work = loss_work);

static int64_t loss_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    return loss_row_tasks(&c->src[LOSS_LOGITS]);
}

/* dlogits = w * (p * sum of labels - labels) + dlse * p, with p = exp(x - shift) * inverse: of a row, for each kind of
 * labels, with and without a gradient that comes in through lse.  The difference is taken before w, when it is nearly
 * exact. */
enum loss_labels { LOSS_NONE, LOSS_EVEN, LOSS_GIVEN }; /* 0, `even`, or `even` times what is given */

typedef struct loss_row {
    float shift, inverse, w, sum, even, dlse;
} loss_row;

/* `weight` times the gradient of the row's loss, which one number may be for all. */
static float loss_dloss(const gg_call *c, int64_t r, float weight) {
    const gg_tensor *dloss = &c->src[LOSS_DLOSS];
    return weight * *(const float *)(gg_elements(dloss) == 1 ? dloss->data : loss_element(dloss, r));
}

static loss_row loss_row_of(const gg_call *c, int64_t r, float w) {
    const float top = *(const float *)loss_element(&c->src[LOSS_TOP], r);
    const float total = *(const float *)loss_element(&c->src[LOSS_TOTAL], r);
    return (loss_row){ .shift = loss_shift(top), .inverse = 1 / total, .w = w };
}

GG_INLINE vf loss_p(vf x, loss_row row) { return vf_exp(x - row.shift) * row.inverse; }

GG_INLINE void loss_write_back(float *dx, const float *x, const float *labels, loss_row row, const int kind,
                               const int through_lse, const int count) {
    const vf p = loss_p(gg_take(x, count, 0), row);
    vf d = p;
    if (kind == LOSS_EVEN) d = p * row.sum - row.even;
    if (kind == LOSS_GIVEN) d = p * row.sum - row.even * gg_take(labels, count, 0);
    d *= row.w;
    if (through_lse) d += row.dlse * p;
    gg_give(dx, d, count);
}

GG_INLINE void loss_row_back_of(float *dx, const float *x, const float *labels, int64_t n, loss_row row, const int kind,
                                const int through_lse) {
    int64_t i = 0;
    for (; i + GG_VW <= n; i += GG_VW) loss_write_back(dx + i, x + i, labels + i, row, kind, through_lse, GG_VW);
    if (i < n) loss_write_back(dx + i, x + i, labels + i, row, kind, through_lse, (int)(n - i));
}

static void loss_row_back(float *dx, const float *x, const float *labels, int64_t n, loss_row row, int kind) {
    if (row.dlse == 0) {
        if (kind == LOSS_NONE) loss_row_back_of(dx, x, x, n, row, LOSS_NONE, 0);
        else if (kind == LOSS_EVEN) loss_row_back_of(dx, x, x, n, row, LOSS_EVEN, 0);
        else loss_row_back_of(dx, x, labels, n, row, LOSS_GIVEN, 0);
    } else {
        if (kind == LOSS_NONE) loss_row_back_of(dx, x, x, n, row, LOSS_NONE, 1);
        else if (kind == LOSS_EVEN) loss_row_back_of(dx, x, x, n, row, LOSS_EVEN, 1);
        else loss_row_back_of(dx, x, labels, n, row, LOSS_GIVEN, 1);
    }
}

/* With classes: labels are 1 at the target; 0 in rows that do not count.  Where the target has most of p, p - 1 would be
 * but the rounding of p: there it is minus the sum of all others. */
static void loss_class_row_back(float *dx, const float *x, int64_t n, int64_t target, loss_row row, float w,
                                const loss_classes *k) {
    const float weight = loss_weight(k, target), p = loss_p(vf_set1(x[target]), row)[0]; /* dx may lie on x */
    if (k->even > 0) {
        row.w = w;
        row.even = k->even;
        row.sum = k->own * weight + k->even * (float)k->total;
        loss_row_back(dx, x, k->weights, n, row, k->weights ? LOSS_GIVEN : LOSS_EVEN);
        dx[target] = w * (k->own * weight * (p - 1) + k->even * ((float)k->total * p - weight)) + row.dlse * p;
        return;
    }
    row.w = w * weight;
    loss_row_back(dx, x, NULL, n, row, LOSS_NONE);
    if (p > 0.5f && n > 1 && row.dlse == 0)
        dx[target] = (float)-(gg_row_sum(dx, target) + gg_row_sum(dx + target + 1, n - target - 1));
    else dx[target] = row.w * (p - 1) + row.dlse * p;
}

static void cross_entropy_class_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    enum { WEIGHT = LOSS_TOTAL + 1, DLSE, CLASS_WEIGHTS }; /* sources */
    const gg_cross_entropy_class_back_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[LOSS_LOGITS];
    const float weight = *(const float *)c->src[WEIGHT].data;
    const int64_t rows = gg_rows(logits), n = logits->ne[3], tasks = loss_back_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    const loss_classes k = loss_classes_of(&c->src[CLASS_WEIGHTS], n, attrs->label_smoothing);
    gg_walk walk = gg_walk_from(logits, from);
    float *dx = (float *)c->dst->data + from * n;
    for (int64_t r = from; r < to; r++, gg_walk_on(&walk), dx += n) {
        const int64_t target = loss_class(c, LOSS_TARGETS, r, n, attrs->ignore_index);
        if (target < 0) {
            memset(dx, 0, n * sizeof(float));
            continue;
        }
        loss_row row = loss_row_of(c, r, 0);
        if (c->src[DLSE].data) row.dlse = *(const float *)loss_element(&c->src[DLSE], r);
        loss_class_row_back(dx, (const float *)walk.row, n, target, row, loss_dloss(c, r, weight), &k);
    }
}

GG_KERNEL(cross_entropy_class_back, .stages = 1, .tasks = loss_back_tasks, .run = cross_entropy_class_back_run);

/* -- probabilities as targets ---------------------------------------------------------------------- */

static void cross_entropy_soft_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    enum { LOSS, TOP, TOTAL }; /* results */
    const gg_cross_entropy_soft_attrs *attrs = c->attrs;
    const gg_tensor *logits = &c->src[0], *labels = &c->src[1];
    if (stage == 1) {
        loss_reduce(c, attrs->reduction);
        return;
    }
    const int64_t rows = gg_rows(logits), n = logits->ne[3], tasks = loss_tasks(c, 0);
    float *losses = attrs->reduction == GG_ROWS ? c->dst[LOSS].data : NULL;
    float *top = c->dst[TOP].data, *sums = c->dst[TOTAL].data;
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = gg_cut(rows, task, tasks), to = gg_cut(rows, task + 1, tasks);
        loss_partial partial = { 0, (double)(to - from) };
        gg_walk x = gg_walk_from(logits, from), p = gg_walk_from(labels, from);
        for (int64_t r = from; r < to; r++, gg_walk_on(&x), gg_walk_on(&p)) {
            const loss_sum sum = loss_sum_of((const float *)x.row, n);
            const double loss = loss_soft_row((const float *)x.row, (const float *)p.row, n, sum);
            top[r] = sum.top;
            sums[r] = (float)sum.total;
            partial.loss += loss;
            if (losses) losses[r] = (float)loss;
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
    const float weight = attrs->mean ? 1 / (float)rows : 1;
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk walk = gg_walk_from(logits, from), labels = gg_walk_from(&c->src[LOSS_TARGETS], from);
    float *dx = (float *)c->dst->data + from * n;
    for (int64_t r = from; r < to; r++, gg_walk_on(&walk), gg_walk_on(&labels), dx += n) {
        const float *x = (const float *)walk.row, *p = (const float *)labels.row;
        loss_row row = loss_row_of(c, r, loss_dloss(c, r, weight));
        row.sum = (float)gg_row_sum(p, n);
        row.even = 1;
        if (c->src[DLSE].data) row.dlse = *(const float *)loss_element(&c->src[DLSE], r);
        loss_row_back(dx, x, p, n, row, LOSS_GIVEN);
    }
}

GG_KERNEL(cross_entropy_soft_back, .stages = 1, .tasks = loss_back_tasks, .run = cross_entropy_soft_back_run);
