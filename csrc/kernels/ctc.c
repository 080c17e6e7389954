/* Connectionist temporal classification: the probability of all paths of a target, and how it depends on each class.
 *
 * A path goes through 2 n + 1 states, the n labels of a target with blanks around them: at each time it stays, goes on
 * by one, or by two from a label to another one.  For each time and state, `alpha` is the log of the probability of all
 * beginnings that are there, `beta` of all ends from there; both in relation to the largest of their time, whose sum
 * stays in double, so that long sequences lose no digits.  A sequence of the batch is a task. */
#include "abi/attrs/loss.h"
#include "vec/vector_math.h"
#include "walk/kernel.h"

enum { CTC_BEFORE = 2 }; /* states that there are not, and nothing comes from */

/* A sequence.  Rows of `pitch` floats, of which CTC_BEFORE come before the first state. */
typedef struct ctc_paths {
    int64_t time, states, pitch;
    const char *seen; /* log_probs [time, classes] */
    int64_t seen_step;
    int32_t *class_of;   /* of each state */
    float *skip, *ahead; /* 0 where a state may be reached from two before, and may go on to two after; else -inf */
    float *emitted, *alpha, *beta;
    float *rows; /* alpha of every time */
} ctc_paths;

static int64_t ctc_pitch(const gg_tensor *targets) { return gg_round_up(2 * targets->ne[3] + 1 + 4 * GG_VW, 16); }

/* Where things lie in a thread's scratch; returns how many floats that are. */
static int64_t ctc_place(ctc_paths *p, float *base, int64_t rows) {
    float **const places[] = { &p->skip, &p->ahead, &p->emitted, &p->alpha, &p->beta };
    int64_t used = p->pitch;
    p->class_of = (int32_t *)base;
    for (int i = 0; i < 5; i++, used += p->pitch) *places[i] = base ? base + used : NULL;
    p->rows = base ? base + used : NULL;
    return used + rows * p->pitch;
}

/* Labels of sequence b into states; 0 where a length or a label is out of range, which is reported. */
static int ctc_read(const gg_call *c, int first, int64_t b, int64_t blank, ctc_paths *p) {
    const gg_tensor *seen = &c->src[first], *targets = seen + 1;
    const int64_t time = *(const int32_t *)((char *)seen[2].data + b * seen[2].nb[3]);
    const int64_t labels = *(const int32_t *)((char *)seen[3].data + b * seen[3].nb[3]);
    if (time < 0 || time > seen->ne[2]) return gg_report(c, GG_INDEX, first + 2, time, seen->ne[2] + 1), 0;
    if (labels < 0 || labels > targets->ne[3]) return gg_report(c, GG_INDEX, first + 3, labels, targets->ne[3] + 1), 0;
    p->time = time;
    p->states = 2 * labels + 1;
    p->seen = gg_at(seen, 0, b, 0);
    p->seen_step = seen->nb[2];
    for (int64_t i = 0; i < p->pitch; i++) p->skip[i] = p->ahead[i] = -INFINITY;
    const char *given = gg_at(targets, 0, 0, b);
    for (int64_t s = 0; s < p->states; s++) {
        const int64_t label = s % 2 ? *(const int32_t *)(given + s / 2 * targets->nb[3]) : blank;
        if (label < 0 || label >= seen->ne[3]) return gg_report(c, GG_INDEX, first + 1, label, seen->ne[3]), 0;
        p->class_of[s] = (int32_t)label;
        if (s % 2 && s > 1 && p->class_of[s - 2] != label) p->skip[CTC_BEFORE + s] = p->ahead[CTC_BEFORE + s - 2] = 0;
    }
    return 1;
}

static void ctc_emit(const ctc_paths *p, int64_t t) {
    const float *seen = (const float *)(p->seen + t * p->seen_step);
    for (int64_t s = 0; s < p->states; s++) p->emitted[s] = seen[p->class_of[s]];
}

/* x where `way` is 0, else -inf. */
GG_INLINE vf ctc_if(vf way, vf x) { return vf_select(way == 0.0f, x, vf_set1(-INFINITY)); }

/* log(exp(a) + exp(b) + exp(c)) */
GG_INLINE vf ctc_log_sum(vf a, vf b, vf c) {
    const vf top = vf_max(vf_max(a, b), c), shift = vf_select(vf_abs(top) == INFINITY, vf_zero(), top);
    return shift + vf_log(vf_exp(a - shift) + vf_exp(b - shift) + vf_exp(c - shift));
}

/* Every state less the largest, which is returned; states that there are not are -inf. */
static double ctc_settle(float *x, int64_t states, int64_t pitch) {
    float top = -INFINITY;
    for (int64_t s = 0; s < states; s++) top = x[CTC_BEFORE + s] > top ? x[CTC_BEFORE + s] : top;
    for (int64_t s = 0; s < states && isfinite(top); s++) x[CTC_BEFORE + s] -= top;
    for (int64_t i = CTC_BEFORE + states; i < pitch; i++) x[i] = -INFINITY;
    x[0] = x[1] = -INFINITY;
    return top == INFINITY ? 0 : top;
}

/* alpha of the next time, in place: from the last state down each vector is read before it is written. */
static void ctc_step(const ctc_paths *p, float *to, const float *from) {
    for (int64_t s = 0; s < p->states; s += GG_VW) {
        const float *at = from + CTC_BEFORE + s;
        const vf skipped = ctc_if(vf_load(p->skip + CTC_BEFORE + s), vf_load(at - 2));
        vf_store(to + CTC_BEFORE + s, ctc_log_sum(vf_load(at), vf_load(at - 1), skipped) + vf_load(p->emitted + s));
    }
}

/* The log of the probability of all paths; with `rows` alpha of every time stays there. */
static double ctc_forward(const ctc_paths *p, float *rows) {
    double total = 0;
    const float *from = NULL;
    for (int64_t t = 0; t < p->time; t++) {
        float *to = rows ? rows + t * p->pitch : t % 2 ? p->beta : p->alpha;
        ctc_emit(p, t);
        if (t == 0) {
            for (int64_t s = 0; s < p->states; s++) to[CTC_BEFORE + s] = s < 2 ? p->emitted[s] : -INFINITY;
        } else {
            ctc_step(p, to, from);
        }
        total += ctc_settle(to, p->states, p->pitch);
        from = to;
    }
    if (!from) return p->states == 1 ? 0 : -INFINITY;
    const double last = from[CTC_BEFORE + p->states - 1];
    const double label = p->states > 1 ? from[CTC_BEFORE + p->states - 2] : -INFINITY;
    return total + log(exp(last) + exp(label));
}

static int64_t ctc_tasks(const gg_call *c, int stage) {
    (void)stage;
    return c->dst->ne[3];
}

static int64_t ctc_scratch(const gg_call *c) {
    ctc_paths p = { .pitch = ctc_pitch(&c->src[1]) };
    return ctc_place(&p, NULL, 0) * (int64_t)sizeof(float);
}

static void ctc_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const gg_ctc_attrs *attrs = c->attrs;
    ctc_paths p = { .pitch = ctc_pitch(&c->src[1]) };
    ctc_place(&p, scratch, 0);
    for (int64_t b = begin; b < end; b++)
        ((float *)c->dst->data)[b] = ctc_read(c, 0, b, attrs->blank, &p) ? (float)-ctc_forward(&p, NULL) : NAN;
}

GG_KERNEL(ctc, .stages = 1, .tasks = ctc_tasks, .run = ctc_run, .scratch = ctc_scratch);

/* -- the gradient -------------------------------------------------------------------------------- */

static int64_t ctc_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    return c->dst->ne[1];
}

static int64_t ctc_back_scratch(const gg_call *c) {
    ctc_paths p = { .pitch = ctc_pitch(&c->src[2]) };
    return ctc_place(&p, NULL, c->dst->ne[2]) * (int64_t)sizeof(float);
}

/* beta of the time before from that of time t, which `emitted` belongs to. */
static void ctc_step_back(const ctc_paths *p, float *to, float *from) {
    for (int64_t s = 0; s < p->states; s++) from[CTC_BEFORE + s] += p->emitted[s];
    for (int64_t s = 0; s < p->states; s += GG_VW) {
        const float *at = from + CTC_BEFORE + s;
        const vf ahead = ctc_if(vf_load(p->ahead + CTC_BEFORE + s), vf_load(at + 2));
        vf_store(to + CTC_BEFORE + s, ctc_log_sum(vf_load(at), vf_load(at + 1), ahead));
    }
    ctc_settle(to, p->states, p->pitch);
}

/* At one time a path is somewhere: the probabilities of all states, exp(alpha + beta) over their sum. */
static void ctc_give(const ctc_paths *p, const float *alpha, const float *beta, float dloss, float *dx) {
    double total = 0;
    float top = -INFINITY; /* both may be small where the other one is large */
    for (int64_t s = 0; s < p->states; s++) {
        p->emitted[s] = alpha[CTC_BEFORE + s] + beta[CTC_BEFORE + s];
        top = p->emitted[s] > top ? p->emitted[s] : top;
    }
    for (int64_t s = 0; s < p->states; s += GG_VW) {
        const int64_t n = gg_min(GG_VW, p->states - s);
        const vf share = vf_exp(vf_load_n(p->emitted + s, (int)n, -INFINITY) - top);
        vf_store(p->emitted + s, share);
        total += vf_sum(share);
    }
    const float factor = (float)(dloss / total);
    for (int64_t s = 0; s < p->states; s++) dx[p->class_of[s]] -= factor * p->emitted[s];
}

static void ctc_back_sequence(const ctc_paths *p, float dloss, float *dx, int64_t classes) {
    if (p->time == 0 || isinf(ctc_forward(p, p->rows))) return; /* no path, and not what is NaN */
    float *beta = p->alpha, *before = p->beta;
    for (int64_t s = 0; s < p->states; s++) beta[CTC_BEFORE + s] = s >= p->states - 2 ? 0 : -INFINITY;
    ctc_settle(beta, p->states, p->pitch);
    for (int64_t t = p->time - 1; t >= 0; t--) {
        ctc_give(p, p->rows + t * p->pitch, beta, dloss, dx + t * classes);
        ctc_emit(p, t);
        ctc_step_back(p, before, beta);
        float *const next = before;
        before = beta;
        beta = next;
    }
}

static void ctc_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    enum { DLOSSES, LOG_PROBS, TARGETS }; /* sources */
    const gg_ctc_back_attrs *attrs = c->attrs;
    const int64_t time = c->dst->ne[2], classes = c->dst->ne[3];
    ctc_paths p = { .pitch = ctc_pitch(&c->src[TARGETS]) };
    ctc_place(&p, scratch, time);
    for (int64_t b = begin; b < end; b++) {
        float *dx = (float *)c->dst->data + b * time * classes;
        memset(dx, 0, time * classes * sizeof(float));
        const float dloss = *(const float *)((char *)c->src[DLOSSES].data + b * c->src[DLOSSES].nb[3]);
        if (ctc_read(c, LOG_PROBS, b, attrs->blank, &p)) ctc_back_sequence(&p, dloss, dx, classes);
    }
}

GG_KERNEL(ctc_back, .stages = 1, .tasks = ctc_back_tasks, .run = ctc_back_run, .scratch = ctc_back_scratch);
