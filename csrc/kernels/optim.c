/* Optimizer steps, in one pass over a parameter, and the norm of all gradients that they are clipped by. */
#include "abi/attrs/optim.h"
#include "vec/simd.h"
#include "walk/kernel.h"

enum { OPTIM_CHUNK = 16384 }; /* elements of a task */

static int64_t optim_chunks(const gg_tensor *t) { return gg_ceil_div(gg_elements(t), OPTIM_CHUNK); }

static int64_t opt_step_tasks(const gg_call *c, int stage) {
    (void)stage;
    return optim_chunks(c->dst);
}

/* What the gradient is multiplied with; false where it is no finite number: then the step is skipped. */
static int opt_step_factor(const gg_tensor *factor, float *value) {
    *value = factor->data ? *(const float *)factor->data : 1;
    return isfinite(*value);
}

static void opt_step_adamw_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    enum { X, GRAD, M, V, HYPER, FACTOR };                    /* sources */
    enum { ALPHA, BETA1, BETA2, EPS, DECAY, BETA1H, BETA2H }; /* of hyper */
    float factor;
    if (!opt_step_factor(&c->src[FACTOR], &factor)) return;
    const float *hyper = c->src[HYPER].data;
    const float alpha = hyper[ALPHA], eps = hyper[EPS], beta1h = hyper[BETA1H], beta2h = hyper[BETA2H];
    const float beta1 = hyper[BETA1], beta2 = hyper[BETA2], rest1 = 1 - beta1, rest2 = 1 - beta2;
    const float decay = alpha * hyper[DECAY]; /* 1 - decay would be rounded where it is small */
    const int64_t to = gg_min(gg_elements(c->dst), end * OPTIM_CHUNK);
    float *restrict x = c->dst[0].data, *restrict m = c->dst[1].data, *restrict v = c->dst[2].data;
    const float *restrict grad = c->src[GRAD].data;
    for (int64_t i = begin * OPTIM_CHUNK; i < to; i++) {
        const float g = grad[i] * factor;
        m[i] = beta1 * m[i] + rest1 * g;
        v[i] = beta2 * v[i] + rest2 * g * g;
        const float root = sqrtf(v[i] * beta2h) + eps;
        const float step = alpha * (m[i] * beta1h) / root;
        x[i] -= decay * x[i] + (root == 0 ? 0 : step);
    }
}

static void opt_step_sgd_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    enum { X, GRAD, HYPER, FACTOR }; /* sources */
    float factor;
    if (!opt_step_factor(&c->src[FACTOR], &factor)) return;
    const float *hyper = c->src[HYPER].data;
    const float alpha = hyper[0], decay = alpha * hyper[1];
    const int64_t to = gg_min(gg_elements(c->dst), end * OPTIM_CHUNK);
    float *restrict x = c->dst->data;
    const float *restrict grad = c->src[GRAD].data;
    for (int64_t i = begin * OPTIM_CHUNK; i < to; i++) x[i] -= decay * x[i] + alpha * (grad[i] * factor);
}

GG_KERNEL(opt_step_adamw, .stages = 1, .tasks = opt_step_tasks, .run = opt_step_adamw_run);
GG_KERNEL(opt_step_sgd, .stages = 1, .tasks = opt_step_tasks, .run = opt_step_sgd_run);

/* -- the norm ---------------------------------------------------------------------------------- */

/* The sum of squares, in double lanes: exact where a square would leave f32's range. */
static double optim_squares(const float *x, int64_t n) {
    typedef float half __attribute__((vector_size(GG_VECTOR_BYTES / 2), aligned(4), may_alias));
    typedef double vd __attribute__((vector_size(GG_VECTOR_BYTES)));
    enum { WIDTH = GG_VW / 2 };
    vd s[4] = { 0 };
    int64_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH)
        for (int k = 0; k < 4; k++) {
            const vd wide = __builtin_convertvector(*(const half *)(x + i + k * WIDTH), vd);
            s[k] += wide * wide;
        }
    s[0] = (s[0] + s[1]) + (s[2] + s[3]);
    double total = 0;
    for (int k = 0; k < WIDTH; k++) total += s[0][k];
    for (; i < n; i++) total += (double)x[i] * x[i];
    return total;
}

static int64_t global_norm_chunks(const gg_call *c) {
    int64_t chunks = 0;
    for (int i = 0; i < c->n_src; i++) chunks += optim_chunks(&c->src[i]);
    return chunks;
}

/* Stage 0 sums chunks of all inputs, counted through; stage 1 sums the chunks. */
static int64_t global_norm_tasks(const gg_call *c, int stage) { return stage == 0 ? global_norm_chunks(c) : 1; }
static int64_t global_norm_work(const gg_call *c) { return global_norm_chunks(c) * (int64_t)sizeof(double); }

static void global_norm_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    double *partial = c->work;
    if (stage == 1) {
        const int64_t chunks = global_norm_chunks(c);
        double total = 0;
        for (int64_t i = 0; i < chunks; i++) total += partial[i];
        *(float *)c->dst->data = (float)sqrt(total);
        return;
    }
    int64_t first = 0; /* chunk of the input at hand */
    for (int i = 0; i < c->n_src && first < end; i++) {
        const int64_t n = gg_elements(&c->src[i]), chunks = optim_chunks(&c->src[i]);
        const float *x = c->src[i].data;
        for (int64_t k = gg_max(0, begin - first); k < gg_min(chunks, end - first); k++)
            partial[first + k] = optim_squares(x + k * OPTIM_CHUNK, gg_min(OPTIM_CHUNK, n - k * OPTIM_CHUNK));
        first += chunks;
    }
}

GG_KERNEL(global_norm, .stages = 2, .tasks = global_norm_tasks, .run = global_norm_run, .work = global_norm_work);

/* max_norm / norm if the norm is larger, else 1; NaN where it is no finite number. */
static int64_t clip_factor_tasks(const gg_call *c, int stage) {
    (void)c, (void)stage;
    return 1;
}

static void clip_factor_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)begin, (void)end, (void)scratch;
    const float max_norm = ((const gg_clip_factor_attrs *)c->attrs)->max_norm, norm = *(const float *)c->src->data;
    *(float *)c->dst->data = !isfinite(norm) ? NAN : norm > max_norm ? max_norm / norm : 1;
}

GG_KERNEL(clip_factor, .stages = 1, .tasks = clip_factor_tasks, .run = clip_factor_run);
