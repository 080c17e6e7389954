/* Two operands, element by element, with tiling broadcast; and one operand times a number.
 * Sources have any strides; the destination is contiguous and may lie exactly on a source. */
#include "../kernel.h"
#include "../nest.h"

static int64_t elem_tasks(const gg_call *c, int stage) {
    (void)stage;
    return nest_tasks(gg_elements(c->dst), 1);
}

static void elem_walk(const gg_call *c, int64_t begin, int64_t end, nest_row *row) {
    const gg_tensor *const arrays[] = { c->dst, &c->src[0], &c->src[1] };
    const int64_t tasks = elem_tasks(c, 0);
    nest s;
    nest_make(&s, c->dst->ne, 1, 1 + c->n_src, arrays);
    nest_walk(&s, nest_cut(s.total, begin, tasks), nest_cut(s.total, end, tasks), row, c->attrs);
}

/* Defines the kernel `name`: VALUE is an expression of the vectors x and y. */
#define ELEM_BINARY(name, VALUE) \
    static void elem_##name##_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        (void)attrs; \
        float lanes[2][GG_VW], *out = (float *)at[0]; \
        const nest_floats a = nest_floats_at(at[1], step[1], lanes[0]); \
        const nest_floats b = nest_floats_at(at[2], step[2], lanes[1]); \
        int64_t i = 0; \
        for (; i + GG_VW <= n; i += GG_VW) { \
            const vf x = nest_load(a, i), y = nest_load(b, i); \
            vf_store(out + i, VALUE); \
        } \
        if (i < n) { \
            const vf x = nest_load_n(a, i, n - i), y = nest_load_n(b, i, n - i); \
            vf_store_n(out + i, VALUE, (int)(n - i)); \
        } \
    } \
    static void elem_##name##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        (void)stage, (void)scratch; \
        elem_walk(c, begin, end, elem_##name##_row); \
    } \
    GG_KERNEL(name, .stages = 1, .tasks = elem_tasks, .run = elem_##name##_run)

ELEM_BINARY(add, x + y);
ELEM_BINARY(sub, x - y);
ELEM_BINARY(mul, (x * y));
ELEM_BINARY(div, x / y);

/* The leaf is both the first source and the destination. */
GG_KERNEL(accumulate, .stages = 1, .tasks = elem_tasks, .run = elem_add_run);

static void elem_scale_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    const gg_scale_attrs *number = attrs;
    const vf factor = vf_set1(number->factor);
    /* adding -0 changes nothing, adding 0 would change -0 */
    const vf bias = vf_set1(number->bias == 0 ? -0.0f : number->bias);
    float lanes[GG_VW], *out = (float *)at[0];
    const nest_floats x = nest_floats_at(at[1], step[1], lanes);
    int64_t i = 0;
    for (; i + GG_VW <= n; i += GG_VW) vf_store(out + i, nest_load(x, i) * factor + bias);
    if (i < n) vf_store_n(out + i, nest_load_n(x, i, n - i) * factor + bias, (int)(n - i));
}

static void elem_scale_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    elem_walk(c, begin, end, elem_scale_row);
}

GG_KERNEL(scale, .stages = 1, .tasks = elem_tasks, .run = elem_scale_run);
