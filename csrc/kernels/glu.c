/* Gated units: an activation of x, times a gate, and their gradients in one pass.
 * In split form x and the gate are two tensors, in single form the halves of the last axis of one. */
#include "abi/attrs/glu.h"
#include "vec/activation.h"
#include "walk/kernel.h"
#include "walk/nest.h"

enum { GLU_A, GLU_B };                          /* sources of the forward kernels */
enum { GLU_BACK_DOUT, GLU_BACK_A, GLU_BACK_B }; /* and of the gradients */
enum { GLU_OUT, GLU_X, GLU_GATE, GLU_ARRAYS };  /* the nest's arrays */
enum { GLU_DX, GLU_DGATE, GLU_DOUT, GLU_BACK_X, GLU_BACK_GATE, GLU_BACK_ARRAYS };

/* One half of the last axis. */
static gg_tensor glu_half(const gg_tensor *t, int second) {
    gg_tensor half = *t;
    half.ne[3] = t->ne[3] / 2;
    if (second) half.data = (char *)t->data + half.ne[3] * t->nb[3];
    return half;
}

/* x and the gate from a and b, or both from a if b was left out. */
static void glu_pair(const gg_tensor *a, const gg_tensor *b, int swapped, gg_tensor *x, gg_tensor *gate) {
    if (b->data != NULL) {
        *x = *a;
        *gate = *b;
    } else {
        *x = glu_half(a, swapped);
        *gate = glu_half(a, !swapped);
    }
}

static int64_t glu_tasks(const gg_call *c, int stage) {
    (void)stage;
    return nest_tasks(gg_elements(c->dst), 2);
}

static void glu_walk(const gg_call *c, int64_t begin, int64_t end, int swapped, nest_row *row) {
    gg_tensor x, gate;
    nest s;
    glu_pair(&c->src[GLU_A], &c->src[GLU_B], swapped, &x, &gate);
    const int64_t tasks = glu_tasks(c, 0);
    nest_make(&s, c->dst->ne, 1, GLU_ARRAYS, (const gg_tensor *const[]){ c->dst, &x, &gate });
    nest_walk(&s, nest_cut(s.total, begin, tasks), nest_cut(s.total, end, tasks), row, c->attrs);
}

static int64_t glu_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    return nest_tasks(gg_elements(&c->src[GLU_BACK_DOUT]), 4);
}

static void glu_back_walk(const gg_call *c, int64_t begin, int64_t end, int swapped, nest_row *row) {
    gg_tensor x, gate, dx, dgate, left_out = { 0 };
    nest s;
    glu_pair(&c->src[GLU_BACK_A], &c->src[GLU_BACK_B], swapped, &x, &gate);
    glu_pair(&c->dst[0], c->n_dst == 2 ? &c->dst[1] : &left_out, swapped, &dx, &dgate);
    const gg_tensor *const arrays[] = { &dx, &dgate, &c->src[GLU_BACK_DOUT], &x, &gate };
    const int64_t tasks = glu_back_tasks(c, 0);
    nest_make(&s, dx.ne, 2, GLU_BACK_ARRAYS, arrays);
    if (s.step[0][GLU_DX] != 4) nest_take_apart(&s);
    nest_walk(&s, nest_cut(s.total, begin, tasks), nest_cut(s.total, end, tasks), row, c->attrs);
}

/* The kernels `name` and `name`_back: expressions of the vectors x, gate and dout, and of the attributes a. */
#define GLU(name, VALUE, DX, DGATE) \
    static void glu_##name##_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        const gg_##name##_attrs *a = attrs; \
        float lanes[2][GG_VW], *out = (float *)at[GLU_OUT]; \
        const nest_floats xs = nest_floats_at(at[GLU_X], step[GLU_X], lanes[0]); \
        const nest_floats gates = nest_floats_at(at[GLU_GATE], step[GLU_GATE], lanes[1]); \
        for (int64_t i = 0; i < n; i += GG_VW) { \
            const int count = (int)gg_min(GG_VW, n - i), whole = count == GG_VW; \
            const vf x = whole ? nest_load(xs, i) : nest_load_n(xs, i, count); \
            const vf gate = whole ? nest_load(gates, i) : nest_load_n(gates, i, count); \
            const vf value = VALUE; \
            if (whole) vf_store(out + i, value); \
            else vf_store_n(out + i, value, count); \
        } \
        (void)a; \
    } \
    static void glu_##name##_back_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        const gg_##name##_attrs *a = attrs; \
        float lanes[3][GG_VW], *dxs = (float *)at[GLU_DX], *dgates = (float *)at[GLU_DGATE]; \
        const nest_floats douts = nest_floats_at(at[GLU_DOUT], step[GLU_DOUT], lanes[0]); \
        const nest_floats xs = nest_floats_at(at[GLU_BACK_X], step[GLU_BACK_X], lanes[1]); \
        const nest_floats gates = nest_floats_at(at[GLU_BACK_GATE], step[GLU_BACK_GATE], lanes[2]); \
        for (int64_t i = 0; i < n; i += GG_VW) { \
            const int count = (int)gg_min(GG_VW, n - i), whole = count == GG_VW; \
            const vf dout = whole ? nest_load(douts, i) : nest_load_n(douts, i, count); \
            const vf x = whole ? nest_load(xs, i) : nest_load_n(xs, i, count); \
            const vf gate = whole ? nest_load(gates, i) : nest_load_n(gates, i, count); \
            const vf dx = DX, dgate = DGATE; \
            if (whole) { \
                vf_store(dxs + i, dx); \
                vf_store(dgates + i, dgate); \
            } else { \
                vf_store_n(dxs + i, dx, count); \
                vf_store_n(dgates + i, dgate, count); \
            } \
        } \
        (void)a; \
    } \
    static void glu_##name##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        (void)stage, (void)scratch; \
        glu_walk(c, begin, end, ((const gg_##name##_attrs *)c->attrs)->swapped, glu_##name##_row); \
    } \
    static void glu_##name##_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        (void)stage, (void)scratch; \
        glu_back_walk(c, begin, end, ((const gg_##name##_attrs *)c->attrs)->swapped, glu_##name##_back_row); \
    } \
    GG_KERNEL(name, .stages = 1, .tasks = glu_tasks, .run = glu_##name##_run); \
    GG_KERNEL(name##_back, .stages = 1, .tasks = glu_back_tasks, .run = glu_##name##_back_run)

GLU(swiglu, act_silu(x) * gate, act_silu_slope(x) * gate * dout, act_silu(x) * dout);
GLU(geglu, act_gelu(x) * gate, act_gelu_slope(x) * gate * dout, act_gelu(x) * dout);
GLU(geglu_erf, act_gelu_erf(x) * gate, act_gelu_erf_slope(x) * gate * dout, act_gelu_erf(x) * dout);
GLU(geglu_quick, act_gelu_quick(x) * gate, act_gelu_quick_slope(x) * gate * dout, act_gelu_quick(x) * dout);
GLU(reglu, act_relu(x) * gate, act_relu_back(gate *dout, x), act_relu(x) * dout);

GG_INLINE vf glu_below(vf x, float limit) { return vf_min(vf_set1(limit), x); }
GG_INLINE vf glu_oai_gate(vf gate, float limit) { return 1.0f + vf_max(vf_set1(-limit), glu_below(gate, limit)); }

GLU(swiglu_oai, act_swish(glu_below(x, a->limit), a->alpha) * glu_oai_gate(gate, a->limit),
    vf_select(x > a->limit, vf_zero(), act_swish_slope(x, a->alpha) * glu_oai_gate(gate, a->limit) * dout),
    act_nan_of(gate,
               vf_select(vf_abs(gate) > a->limit, vf_zero(), act_swish(glu_below(x, a->limit), a->alpha) * dout)));

#undef GLU
