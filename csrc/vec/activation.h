/* Activation functions of vectors and their slopes, for the unary kernels and the gated ones. */
#pragma once
#include "vec/vector_math.h"

GG_INLINE vf act_silu(vf x) { return x * vf_sigmoid(x); }

/* (x s(x))' = s + x s (1 - s), with s = sigmoid */
GG_INLINE vf act_silu_slope(vf x) {
    vf other;
    const vf s = vf_sigmoids(x, &other);
    return s + x * s * other;
}

/* gelu's tanh form, x (1 + tanh(u)) / 2, is x sigmoid(2u); this is 2u = 2 sqrt(2/pi) (x + 0.044715 x^3). */
GG_INLINE vf act_gelu_argument(vf x) { return x * (1.59576912160573071f + 0.0713548162726002527f * (x * x)); }

GG_INLINE vf act_gelu(vf x) { return x * vf_sigmoid(act_gelu_argument(x)); }

GG_INLINE vf act_gelu_slope(vf x) {
    vf other;
    const vf s = vf_sigmoids(act_gelu_argument(x), &other);
    /* beyond 32, s (1 - s) is 0 and x^3 might not be finite */
    const vf y = vf_min(vf_set1(32.0f), vf_max(vf_set1(-32.0f), x));
    return s + s * other * (y * (1.59576912160573071f + 0.214064448817800758f * (y * y)));
}

GG_INLINE vf act_gelu_erf(vf x) {
    vf density;
    return x * vf_normal(x, &density);
}

GG_INLINE vf act_gelu_erf_slope(vf x) {
    vf density;
    const vf p = vf_normal(x, &density);
    return p + x * density;
}

GG_INLINE vf act_relu(vf x) { return vf_max(vf_zero(), x); }

/* The gradient at x, or at NaN that. */
GG_INLINE vf act_nan_of(vf x, vf gradient) { return vf_select(x != x, x, gradient); }

GG_INLINE vf act_relu_back(vf dout, vf x) { return act_nan_of(x, vf_select(x <= 0.0f, vf_zero(), dout)); }

GG_INLINE vf act_sigmoid_slope(vf x) {
    vf other;
    const vf s = vf_sigmoids(x, &other);
    return s * other;
}

/* 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): no difference of what is nearly equal. */
GG_INLINE vf act_tanh_slope(vf x) {
    const vf a = vf_abs(x), e = vf_exp(-(a + a)), half = 2.0f / (1.0f + e);
    return e * half * half;
}

/* silu of another sharpness. */
GG_INLINE vf act_swish(vf x, float alpha) { return x * vf_sigmoid(alpha * x); }

GG_INLINE vf act_swish_slope(vf x, float alpha) {
    vf other;
    const vf s = vf_sigmoids(alpha * x, &other);
    return s + x * (alpha * s * other); /* alpha * x may be infinite */
}

GG_INLINE vf act_gelu_quick(vf x) { return act_swish(x, 1.702f); }
GG_INLINE vf act_gelu_quick_slope(vf x) { return act_swish_slope(x, 1.702f); }
