/* Two operands, element by element, with tiling broadcast; and one operand times a number. */
#include "abi/attrs/elementwise.h"
#include "walk/each.h"
#include "walk/kernel.h"

/* Rows of f32 of the kernel `name`: VALUE is an expression of the vectors x and y. */
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
    }

ELEM_BINARY(add, x + y)
ELEM_BINARY(sub, x - y)
ELEM_BINARY(mul, (x * y))
ELEM_BINARY(div, x / y)

/* i32 wraps around. */
EACH_INTS(add_ints, (int32_t)((uint32_t)x + (uint32_t)y))
EACH_INTS(sub_ints, (int32_t)((uint32_t)x - (uint32_t)y))
EACH_INTS(mul_ints, (int32_t)((uint32_t)x * (uint32_t)y))

EACH_KERNEL_BY_DTYPE(add, elem_add_row, each_add_ints);
EACH_KERNEL_BY_DTYPE(sub, elem_sub_row, each_sub_ints);
EACH_KERNEL_BY_DTYPE(mul, elem_mul_row, each_mul_ints);
EACH_KERNEL(div, elem_div_row);

/* The leaf is both the first source and the destination. */
EACH_KERNEL(accumulate, elem_add_row);

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

EACH_KERNEL(scale, elem_scale_row);
