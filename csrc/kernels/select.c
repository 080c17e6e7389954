/* Choosing between two operands, comparing them, and logic: element by element, of any strides, broadcast.
 *
 * Truth is an i32, 1 or 0; whatever is not 0 counts as true. */
#include "walk/each.h"
#include "walk/kernel.h"

/* n elements of a row: of either the vector, or the value that fills all. */
GG_INLINE vi select_ints(const char *at, int64_t step, int64_t i) {
    return step == 0 ? vi_set1(*(const int32_t *)at) : vi_load((const int32_t *)at + i);
}

/* Words are moved as they are: of f32 and of i32. */
static void select_where_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    int32_t *const out = (int32_t *)at[0];
    int64_t i = 0;
    for (; i + GG_VW <= n; i += GG_VW) {
        const vi chosen = select_ints(at[1], step[1], i) != 0;
        const vi a = select_ints(at[2], step[2], i), b = select_ints(at[3], step[3], i);
        vi_store(out + i, (chosen & a) | (~chosen & b));
    }
    for (; i < n; i++) out[i] = each_int(at[1], step[1], i) ? each_int(at[2], step[2], i) : each_int(at[3], step[3], i);
}
EACH_KERNEL(where, select_where_row);

/* The kernel `name` of two f32 sources: VALUE is an expression of the vectors x and y. */
#define SELECT_FLOATS(name, VALUE) \
    static void select_##name##_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        (void)attrs; \
        float lanes[2][GG_VW], *out = (float *)at[0]; \
        const nest_floats a = nest_floats_at(at[1], step[1], lanes[0]); \
        const nest_floats b = nest_floats_at(at[2], step[2], lanes[1]); \
        for (int64_t i = 0; i < n; i += GG_VW) { \
            const int count = (int)gg_min(GG_VW, n - i); \
            const vf x = count == GG_VW ? nest_load(a, i) : nest_load_n(a, i, count); \
            const vf y = count == GG_VW ? nest_load(b, i) : nest_load_n(b, i, count); \
            const vf value = VALUE; \
            if (count == GG_VW) vf_store(out + i, value); \
            else vf_store_n(out + i, value, count); \
        } \
    } \
    EACH_KERNEL(name, select_##name##_row)

/* A NaN in either comes out: vf_max and vf_min keep that of their second operand. */
SELECT_FLOATS(maximum, vf_select(x != x, x, vf_max(x, y)));
SELECT_FLOATS(minimum, vf_select(x != x, x, vf_min(x, y)));

/* Of the operand a: dout where it is the larger one, half of it where both are equal, else 0; NaN where either is. */
static void select_larger_back_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    float lanes[3][GG_VW], *out = (float *)at[0];
    nest_floats source[3];
    for (int k = 0; k < 3; k++) source[k] = nest_floats_at(at[1 + k], step[1 + k], lanes[k]);
    for (int64_t i = 0; i < n; i += GG_VW) {
        const int count = (int)gg_min(GG_VW, n - i);
        vf v[3];
        for (int k = 0; k < 3; k++) v[k] = count == GG_VW ? nest_load(source[k], i) : nest_load_n(source[k], i, count);
        const vf dout = v[0], a = v[1], b = v[2];
        const vf rest = vf_select(a < b, vf_zero(), a + b); /* what is left has a NaN */
        const vf value = vf_select(a > b, dout, vf_select(a == b, dout * 0.5f, rest));
        if (count == GG_VW) vf_store(out + i, value);
        else vf_store_n(out + i, value, count);
    }
}
EACH_KERNEL(larger_back, select_larger_back_row);

/* powf is the C library's: within an ulp, with all its special cases. */
static void select_pow_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    const float *const a = (const float *)at[1], *const b = (const float *)at[2];
    float *const out = (float *)at[0];
    for (int64_t i = 0; i < n; i++) out[i] = powf(a[step[1] ? i : 0], b[step[2] ? i : 0]);
}
EACH_KERNEL(pow, select_pow_row);

/* -- comparisons: of two f32 sources, or of two i32 ones ----------------------------------------------------- */

#define SELECT_COMPARISON(name, OPERATOR) \
    static void select_##name##_floats(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        (void)attrs; \
        float lanes[2][GG_VW]; \
        int32_t *const out = (int32_t *)at[0]; \
        const nest_floats a = nest_floats_at(at[1], step[1], lanes[0]); \
        const nest_floats b = nest_floats_at(at[2], step[2], lanes[1]); \
        int64_t i = 0; \
        for (; i + GG_VW <= n; i += GG_VW) vi_store(out + i, (nest_load(a, i) OPERATOR nest_load(b, i)) & 1); \
        if (i < n) { \
            const vi value = (nest_load_n(a, i, n - i) OPERATOR nest_load_n(b, i, n - i)) & 1; \
            vf_store_n((float *)out + i, (vf)value, (int)(n - i)); \
        } \
    } \
    EACH_INTS(name##_ints, x OPERATOR y) \
    EACH_KERNEL_BY_DTYPE(name, select_##name##_floats, each_##name##_ints)

SELECT_COMPARISON(equal, ==);
SELECT_COMPARISON(not_equal, !=);
SELECT_COMPARISON(less, <);
SELECT_COMPARISON(less_equal, <=);

EACH_INTS(logical_and_row, x &&y)
EACH_KERNEL(logical_and, each_logical_and_row);
EACH_INTS(logical_or_row, x || y)
EACH_KERNEL(logical_or, each_logical_or_row);
EACH_INTS(logical_xor_row, !x != !y)
EACH_KERNEL(logical_xor, each_logical_xor_row);

/* -- quotients of i32, rounded down: by 0 the quotient is 0 and the rest what was divided ---------------------- */

/* In 64 bits: the smallest i32 over -1 wraps around. */
static int64_t select_quotient(int64_t x, int64_t y) {
    if (y == 0) return 0;
    const int64_t q = x / y;
    return q - (x % y != 0 && (x < 0) != (y < 0));
}
EACH_INTS(floor_divide_row, (int32_t)(uint32_t)select_quotient(x, y))
EACH_KERNEL(floor_divide, each_floor_divide_row);
EACH_INTS(remainder_row, (int32_t)(x - select_quotient(x, y) * y))
EACH_KERNEL(remainder, each_remainder_row);

#undef SELECT_FLOATS
#undef SELECT_COMPARISON
