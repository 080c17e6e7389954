/* Functions of one element, and their gradients: <name>_back(dout, x), or (dout, y) where the slope follows from the
 * result with all its digits, as of a root, but not of a tanh that was rounded to 1. */
#include "abi/attrs/unary.h"
#include "vec/activation.h"
#include "walk/each.h"
#include "walk/kernel.h"

/* The kernel `name`: VALUE is an expression of the vector x and the attributes.  Whole vectors and the rest
 * of a row go through the same code, so that an element's bits do not depend on where tasks are cut. */
#define UNARY(name, VALUE) \
    static void unary_##name##_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        (void)attrs; \
        float lanes[GG_VW], *out = (float *)at[0]; \
        const nest_floats source = nest_floats_at(at[1], step[1], lanes); \
        for (int64_t i = 0; i < n; i += GG_VW) { \
            const int whole = n - i >= GG_VW; \
            const vf x = whole ? nest_load(source, i) : nest_load_n(source, i, n - i); \
            const vf value = VALUE; \
            if (whole) vf_store(out + i, value); \
            else vf_store_n(out + i, value, (int)(n - i)); \
        } \
    } \
    EACH_KERNEL(name, unary_##name##_row)

/* The kernel `name` of two sources: VALUE is an expression of dout and x. */
#define UNARY_BACK(name, VALUE) \
    static void unary_##name##_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        (void)attrs; \
        float lanes[2][GG_VW], *out = (float *)at[0]; \
        const nest_floats first = nest_floats_at(at[1], step[1], lanes[0]); \
        const nest_floats second = nest_floats_at(at[2], step[2], lanes[1]); \
        for (int64_t i = 0; i < n; i += GG_VW) { \
            const int whole = n - i >= GG_VW; \
            const vf dout = whole ? nest_load(first, i) : nest_load_n(first, i, n - i); \
            const vf x = whole ? nest_load(second, i) : nest_load_n(second, i, n - i); \
            const vf value = VALUE; \
            if (whole) vf_store(out + i, value); \
            else vf_store_n(out + i, value, (int)(n - i)); \
        } \
    } \
    EACH_KERNEL(name, unary_##name##_row)

GG_INLINE vf unary_leak(vf x, const gg_leaky_relu_attrs *a) { return x * a->negative_slope; }

UNARY(neg, -x);
UNARY(sqr, (x * x));
UNARY(sqrt, vf_sqrt(x));
UNARY(log, vf_log(x));
UNARY(exp, vf_exp(x));
UNARY(expm1, vf_expm1(x));
UNARY(exp2, vf_exp2(x));
UNARY(log2, vf_log2(x));
UNARY(log1p, vf_log1p(x));
UNARY(erf, vf_erf(x));
UNARY(tan, vf_sin(x) / vf_cos(x));
UNARY(asin, vf_asin(x));
UNARY(acos, vf_acos(x));
UNARY(atan, vf_atan(x));
UNARY(sinh, vf_sinh(x));
UNARY(cosh, vf_cosh(x));
UNARY(asinh, vf_asinh(x));
UNARY(acosh, vf_acosh(x));
UNARY(atanh, vf_atanh(x));
UNARY(sin, vf_sin(x));
UNARY(cos, vf_cos(x));
UNARY(abs, vf_abs(x));
UNARY(sigmoid, vf_sigmoid(x));
UNARY(tanh, vf_tanh(x));
UNARY(relu, act_relu(x));
UNARY(leaky_relu, vf_select(x > 0.0f, x, unary_leak(x, attrs)));
UNARY(elu, vf_select(x > 0.0f, x, vf_expm1_below20(x)));
UNARY(silu, act_silu(x));
UNARY(gelu, act_gelu(x));
UNARY(gelu_erf, act_gelu_erf(x));
UNARY(gelu_quick, act_gelu_quick(x));
UNARY(softplus, vf_softplus(x));

UNARY(hardsigmoid, vf_min(vf_set1(1.0f), vf_max(vf_zero(), (x + 3.0f) * (1.0f / 6.0f))));
UNARY(hardswish, vf_select(x <= -3.0f, vf_zero(), vf_select(x >= 3.0f, x, x *((x + 3.0f) * (1.0f / 6.0f)))));

/* Steps; a NaN stays one. */
UNARY(sgn, vf_select(x > 0.0f, vf_set1(1.0f), vf_select(x < 0.0f, vf_set1(-1.0f), x)));
UNARY(step, vf_select(x > 0.0f, vf_set1(1.0f), vf_select(x <= 0.0f, vf_zero(), x)));
UNARY(floor, vf_floor(x));
UNARY(ceil, vf_ceil(x));
UNARY(round, vf_round(x));
UNARY(trunc, vf_trunc(x));

GG_INLINE vf unary_xielu(vf x, const gg_xielu_attrs *a) {
    const vf p = vf_softplus(vf_set1(a->alpha_p)), slope = vf_softplus(vf_set1(a->alpha_n)), n = slope + a->beta;
    const vf below = n * vf_expm1_below20(vf_min(vf_set1(a->eps), x)) - slope * x; /* n x - beta x might be infinite */
    return vf_select(x > 0.0f, p * x * x + a->beta * x, below);
}
UNARY(xielu, unary_xielu(x, attrs));

GG_INLINE vf unary_clamp(vf x, const gg_clamp_attrs *a) { return vf_min(vf_set1(a->max), vf_max(vf_set1(a->min), x)); }
UNARY(clamp, unary_clamp(x, attrs));

/* Of x. */
UNARY_BACK(sqr_back, 2.0f * x * dout);
UNARY_BACK(expm1_back, vf_exp(x) * dout);
UNARY_BACK(sin_back, vf_cos(x) * dout);
UNARY_BACK(cos_back, vf_sin(x) * -dout);
UNARY_BACK(abs_back, vf_select(x > 0.0f, dout, vf_select(x < 0.0f, -dout, x))); /* what is left is 0 or NaN */
UNARY_BACK(leaky_relu_back, vf_select(x > 0.0f, dout, vf_select(x <= 0.0f, unary_leak(dout, attrs), x)));
UNARY_BACK(sigmoid_back, act_sigmoid_slope(x) * dout);
UNARY_BACK(tanh_back, act_tanh_slope(x) * dout);
UNARY_BACK(elu_back, vf_select(x > 0.0f, dout, vf_exp(vf_min(vf_zero(), x)) * dout));
UNARY_BACK(silu_back, act_silu_slope(x) * dout);
UNARY_BACK(gelu_back, act_gelu_slope(x) * dout);
UNARY_BACK(gelu_erf_back, act_gelu_erf_slope(x) * dout);
UNARY_BACK(gelu_quick_back, act_gelu_quick_slope(x) * dout);
UNARY_BACK(softplus_back, vf_sigmoid(x) * dout);

UNARY_BACK(hardsigmoid_back, act_nan_of(x, vf_select((x <= -3.0f) | (x >= 3.0f), vf_zero(), dout * (1.0f / 6.0f))));
UNARY_BACK(hardswish_back,
           vf_select(x <= -3.0f, vf_zero(), vf_select(x >= 3.0f, dout, dout *((x + 1.5f) * (1.0f / 3.0f)))));

GG_INLINE vf unary_xielu_back(vf dout, vf x, const gg_xielu_attrs *a) {
    const vf p = vf_softplus(vf_set1(a->alpha_p)), n = vf_softplus(vf_set1(a->alpha_n)) + a->beta;
    const vf below = n * vf_select(x > a->eps, vf_set1(-1.0f), vf_expm1_below20(vf_min(vf_zero(), x)));
    return dout * (vf_select(x > 0.0f, 2.0f * p * x, below) + a->beta);
}
UNARY_BACK(xielu_back, unary_xielu_back(dout, x, attrs));

GG_INLINE vf unary_clamp_back(vf dout, vf x, const gg_clamp_attrs *a) {
    return act_nan_of(x, vf_select((x < a->min) | (x > a->max), vf_zero(), dout));
}
UNARY_BACK(clamp_back, unary_clamp_back(dout, x, attrs));

/* Of the result, which is what x stands for here. */
UNARY_BACK(sqrt_back, 0.5f * dout / x);
UNARY_BACK(relu_back, act_relu_back(dout, x));

#undef UNARY
#undef UNARY_BACK
