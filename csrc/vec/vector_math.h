/* Functions of vectors of f32, right over the whole range: infinities, NaN (which stays NaN), denormals.
 * Bounds in ulp are against exact values, as tests/test_vector_math.py measures them.  Polynomials are minimax
 * fits.  vf_exp, which more kernels need, is in simd.h. */
#pragma once
#include "vec/simd.h"

/* c[0] + c[1] x + ... + c[n - 1] x^(n - 1), by Horner. */
GG_INLINE vf vf_polynomial(vf x, const float *c, const int n) {
    vf p = vf_set1(c[n - 1]);
    for (int i = n - 2; i >= 0; i--) p = p * x + c[i];
    return p;
}
#define VF_POLYNOMIAL(x, ...) \
    vf_polynomial(x, (const float[]){ __VA_ARGS__ }, (int)(sizeof((const float[]){ __VA_ARGS__ }) / sizeof(float)))

/* exp(x) - 1 for x <= 20 (above it is not meant to be used), within 1 ulp below 0.
 * x = n ln2 + r as in vf_exp; 2^n (exp(r) - 1) + (2^n - 1) loses nothing near 0. */
GG_INLINE vf vf_expm1_below20(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = vf_max(vf_set1(-30.0f), x);
    const vf shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    vf r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    const vf p = VF_POLYNOMIAL(r, 0.49999997f, 0.166665465f, 0.0416674428f, 0.00836625323f, 0.00138699473f);
    const vf power = vf_exp2i((vi)shifted - 0x4b400000);
    return power * (p * (r * r) + r) + (power - 1.0f);
}

/* exp(x) - 1, within 2 ulp; above 20, 1 is less than half an ulp of exp(x). */
GG_INLINE vf vf_expm1(vf x) { return vf_select(x > 20.0f, vf_exp(x), vf_expm1_below20(vf_min(vf_set1(20.0f), x))); }

/* Without what follows the point; from 2^23 on all numbers are whole. */
GG_INLINE vf vf_trunc(vf x) {
    const vi small = vf_abs(x) < 8388608.0f;
    const vf whole = __builtin_convertvector(__builtin_convertvector(vf_select(small, x, vf_zero()), vi), vf);
    return vf_select(small, whole, x);
}
GG_INLINE vf vf_floor(vf x) {
    const vf whole = vf_trunc(x);
    return whole - vf_select(whole > x, vf_set1(1.0f), vf_zero());
}
GG_INLINE vf vf_ceil(vf x) {
    const vf whole = vf_trunc(x);
    return whole + vf_select(whole < x, vf_set1(1.0f), vf_zero());
}
/* Halves away from 0.  x - trunc(x) is exact, where x + 0.5 would round. */
GG_INLINE vf vf_round(vf x) {
    const vf whole = vf_trunc(x), rest = x - whole;
    const vf up = vf_select(rest >= 0.5f, vf_set1(1.0f), vf_zero());
    return whole + up - vf_select(rest <= -0.5f, vf_set1(1.0f), vf_zero());
}

/* log(1 + f) + e ln2 for sqrt(1/2) <= 1 + f <= sqrt(2) and whole e. */
GG_INLINE vf vf_log_parts(vf f, vf e) {
    const vf p = VF_POLYNOMIAL(f, 0.333333135f, -0.250000089f, 0.200020716f, -0.166679889f, 0.142203584f, -0.124062337f,
                               0.118835486f, -0.116700985f, 0.0674926937f);
    const vf z = f * f;
    vf y = f * z * p;
    y = y + e * -2.12194440054690580e-4f;
    y = y - 0.5f * z;
    return (f + y) + e * 0.693359375f;
}

/* The natural logarithm, within 1 ulp; -inf at 0, NaN below. */
GG_INLINE vf vf_log(vf x) {
    const vi tiny = x < 1.17549435e-38f; /* denormal, or not positive */
    const vi bits = (vi)vf_select(tiny, x * 8388608.0f, x);
    const vi e =
        vi_sub(bits, vi_set1(0x3f3504f3)) >> 23; /* rounds down, so that the rest is from sqrt(1/2) to sqrt(2) */
    const vf f = (vf)vi_sub(bits, e << 23) - 1.0f;
    const vf exponent = __builtin_convertvector(e + (tiny & -23), vf);
    vf y = vf_log_parts(f, exponent);
    y = vf_select(x < INFINITY, y, x);
    y = vf_select(x == 0.0f, vf_set1(-INFINITY), y);
    return vf_select(x < 0.0f, vf_set1(NAN), y);
}

/* log(1 + x) for 0 <= x <= 1, within 1 ulp. */
GG_INLINE vf vf_log1p_of_fraction(vf x) {
    const vi upper = x > 0.41421354f;
    return vf_log_parts(vf_select(upper, (x - 1.0f) * 0.5f, x), vf_select(upper, vf_set1(1.0f), vf_zero()));
}

/* 1 / (1 + exp(-x)), within 3 ulp at both ends; *other is 1 minus that, as exactly. */
GG_INLINE vf vf_sigmoids(vf x, vf *other) {
    const vf e = vf_exp(-vf_abs(x)), near1 = 1.0f / (1.0f + e), near0 = e * near1;
    const vi positive = x >= 0.0f;
    *other = vf_select(positive, near0, near1);
    return vf_select(positive, near1, near0);
}
GG_INLINE vf vf_sigmoid(vf x) {
    vf other;
    return vf_sigmoids(x, &other);
}

/* tanh, within 1.5 ulp. */
GG_INLINE vf vf_tanh(vf x) {
    const vf a = vf_abs(x), z = x * x;
    const vf p = VF_POLYNOMIAL(z, -0.333332807f, 0.133314058f, -0.0537365153f, 0.0206281673f, -0.00569229666f);
    const vf near0 = x + x * z * p;
    const vf far = 1.0f - 2.0f / (vf_exp(a + a) + 1.0f);
    const vf with_sign = (vf)((vi)far | ((vi)x & INT32_MIN));
    return vf_select(a < 0.625f, near0, with_sign);
}

/* log(1 + exp(x)), within 2 ulp. */
GG_INLINE vf vf_softplus(vf x) { return vf_max(vf_zero(), x) + vf_log1p_of_fraction(vf_exp(-vf_abs(x))); }

/* The chance that a normal variable is below x, (1 + erf(x / sqrt(2))) / 2, within 7 ulp down to 1e-37;
 * *density is its derivative, exp(-x^2 / 2) / sqrt(2 pi).
 * Below 0 it is exp(-x^2 / 2) M(|x|) where M is smooth: a polynomial of q = (y - c) / (y + c), over y + c. */
GG_INLINE vf vf_normal(vf x, vf *density) {
    const float c = 3.75f;
    const vf y = vf_min(vf_set1(15.0f), vf_abs(x));
    /* y^2 = h^2 + (y - h)(y + h) where h^2 is exact: rounding y^2 would cost 50 ulp at the end */
    const vf h = (vf)((vi)y & ~0xfff), rest = (y - h) * (y + h) * 0.5f;
    const vf e = vf_exp(h * h * -0.5f) * VF_POLYNOMIAL(rest, 1.0f, -1.0f, 0.5f, -0.166666667f, 0.0416666667f);
    const vf w = 1.0f / (y + c), q = (y - c) * w;
    const vf p = VF_POLYNOMIAL(q, 0.750294089f, -0.58818841f, 0.352939278f, -0.151518837f, 0.0374944694f,
                               0.00119234668f, -0.00417513307f, 0.000518595974f, 0.000451035594f);
    const vf tail = e * (p * w);
    *density = e * 0.398942280401432678f;
    return vf_select(x < 0.0f, tail, 1.0f - tail);
}

/* Sine (quarter 0) or cosine (quarter 1), within 2 ulp.
 * x = n pi/2 + r with pi/2 in four terms, of which n (up to 2^13) times each of the first three is exact;
 * larger ones go to the C library one by one. */
GG_INLINE vf vf_sin_from(vf x, const int quarter) {
    const float magic = 12582912.0f, bound = 12000.0f;
    const vf shifted = x * 0.636619772367581343f + magic, n = shifted - magic;
    vf r = x - n * 1.5703125f;
    r = r - n * 4.837512969970703125e-4f;
    r = r - n * 7.549533620476723e-8f;
    r = r - n * 2.563344151594519e-12f;
    const vf z = r * r;
    const vf sine = r + r * z * VF_POLYNOMIAL(z, -0.166666672f, 0.0083333794f, -0.000198530761f, 2.83279473e-06f);
    const vf cosine =
        1.0f - 0.5f * z + z * z * VF_POLYNOMIAL(z, 0.0416666679f, -0.001388898f, 2.48220222e-05f, -2.88812345e-07f);
    const vi turn = vi_sub((vi)shifted, vi_set1(0x4b400000 - quarter)); /* in quarters */
    vf y = vf_select((turn & 1) != 0, cosine, sine);
    y = (vf)((vi)y ^ (turn & 2) << 30);
    const vi beyond = ~(vf_abs(x) <= bound);
    if (__builtin_expect(vi_any(beyond), 0)) {
        float lane[GG_VW], value[GG_VW];
        vf_store(lane, x);
        vf_store(value, y);
        for (int i = 0; i < GG_VW; i++)
            if (!(fabsf(lane[i]) <= bound)) value[i] = quarter ? cosf(lane[i]) : sinf(lane[i]);
        y = vf_load(value);
    }
    return y;
}
GG_INLINE vf vf_sin(vf x) { return vf_sin_from(x, 0); }
GG_INLINE vf vf_cos(vf x) { return vf_sin_from(x, 1); }

GG_INLINE vf vf_sqrt(vf x) {
    float lane[GG_VW];
    vf_store(lane, x);
    for (int i = 0; i < GG_VW; i++) lane[i] = sqrtf(lane[i]); /* one instruction */
    return vf_load(lane);
}

/* x with the sign of another number. */
GG_INLINE vf vf_signed(vf x, vf sign) { return (vf)(((vi)x & INT32_MAX) | ((vi)sign & INT32_MIN)); }

/* 2^x, within 1 ulp: x = n + r with |r| <= 1/2. */
GG_INLINE vf vf_exp2(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = vf_min(vf_set1(129.0f), vf_max(vf_set1(-151.0f), x));
    const vf shifted = x + magic, r = x - (shifted - magic);
    const vi i = (vi)shifted - 0x4b400000, half = i >> 1;
    return vf_exp_polynomial(r * 0.693147180559945309f) * vf_exp2i(half) * vf_exp2i(i - half);
}

/* The logarithm to base 2, within 2 ulp, and exact of powers of 2. */
GG_INLINE vf vf_log2(vf x) {
    const vi tiny = x < 1.17549435e-38f;
    const vi bits = (vi)vf_select(tiny, x * 8388608.0f, x);
    const vi e = vi_sub(bits, vi_set1(0x3f3504f3)) >> 23;
    const vf f = (vf)vi_sub(bits, e << 23) - 1.0f;
    vf y = vf_log_parts(f, vf_zero()) * 1.44269504088896341f + __builtin_convertvector(e + (tiny & -23), vf);
    y = vf_select(x < INFINITY, y, x);
    y = vf_select(x == 0.0f, vf_set1(-INFINITY), y);
    return vf_select(x < 0.0f, vf_set1(NAN), y);
}

/* log(1 + x), within 2 ulp: what 1 + x loses in rounding is added, divided by 1 + x. */
GG_INLINE vf vf_log1p(vf x) {
    const vf u = vf_rounded(1.0f + x), lost = x - (u - 1.0f);
    const vf y = vf_log(u) + lost / u;
    const vi plain = (vf_abs(x) < 3.0e-8f) | (u == 0.0f) | ~(x < 1e30f); /* x itself, -inf, and where nothing is lost */
    return vf_select(plain, vf_select(vf_abs(x) < 3.0e-8f, x, vf_log(u)), y);
}

/* The error function, within 4 ulp: near 0 an odd polynomial, beyond 1 what is missing to 1. */
GG_INLINE vf vf_erf(vf x) {
    const vf a = vf_abs(x), z = x * x;
    const vf near0 = x * VF_POLYNOMIAL(z, 1.12837917f, -0.376126258f, 0.112835851f, -0.0268538119f, 0.00518832756f,
                                       -0.000801019251f, 7.85385769e-05f);
    vf density;
    const vf far = vf_signed(1.0f - 2.0f * vf_normal(a * -1.41421356237309505f, &density), x);
    return vf_select(a < 1.0f, near0, vf_select(x != x, x, far));
}

/* The angle whose tangent is x, within 3 ulp: brought to |x| <= tan(pi / 8) by turns of a quarter or half of pi / 2. */
GG_INLINE vf vf_atan(vf x) {
    const vf a = vf_abs(x);
    const vi beyond = a > 2.41421356237309505f, middle = (a > 0.414213562373095049f) & ~beyond;
    const vf t = vf_select(beyond, -1.0f / a, vf_select(middle, (a - 1.0f) / (a + 1.0f), a)), z = t * t;
    const vf turn =
        vf_select(beyond, vf_set1(1.57079632679489662f), vf_select(middle, vf_set1(0.785398163397448310f), vf_zero()));
    const vf lost = vf_select(beyond, vf_set1(-4.37113883e-8f), vf_select(middle, vf_set1(-2.18556941e-8f), vf_zero()));
    const vf p = VF_POLYNOMIAL(z, -0.333333234f, 0.199979244f, -0.142156294f, 0.102846596f, -0.0509580157f);
    return vf_select(x != x, x, vf_signed(turn + (t * z * p + (t + lost)), x));
}

/* asin of 0 <= a <= 1/2, as a + a^3 p(a^2). */
GG_INLINE vf vf_asin_near0(vf a) {
    const vf z = a * a;
    return a + a * z * VF_POLYNOMIAL(z, 0.166666727f, 0.0749881286f, 0.0450099495f, 0.0264991137f, 0.038196748f);
}

/* The angle whose sine is x, within 2 ulp; NaN beyond 1.  Above 1/2 it is pi/2 - 2 asin(sqrt((1 - x) / 2)). */
GG_INLINE vf vf_asin(vf x) {
    const vf a = vf_abs(x);
    const vi upper = a > 0.5f;
    const vf y = vf_asin_near0(vf_select(upper, vf_sqrt((1.0f - a) * 0.5f), a));
    return vf_signed(vf_select(upper, (1.57079632679489662f - 2.0f * y) - 4.37113883e-8f, y), x);
}

/* The angle whose cosine is x, within 2 ulp; NaN beyond 1. */
GG_INLINE vf vf_acos(vf x) {
    const vf a = vf_abs(x);
    const vi upper = a > 0.5f;
    const vf y = vf_asin_near0(vf_select(upper, vf_sqrt((1.0f - a) * 0.5f), a));
    const vf outer = vf_select(x < 0.0f, (3.14159265358979324f - 2.0f * y) - 8.74227766e-8f, 2.0f * y);
    const vf inner = 1.57079632679489662f - (vf_signed(y, x) + 4.37113883e-8f);
    return vf_select(upper, outer, inner);
}

/* Hyperbolic functions, within 3 ulp.  Above 20 the other exponential is nothing; half of exp(x) is taken in two
 * factors, since it may be finite where exp(x) is not. */
GG_INLINE vf vf_sinh(vf x) {
    const vf a = vf_abs(x), t = vf_expm1_below20(vf_min(vf_set1(20.0f), a)), h = vf_exp(a * 0.5f);
    return vf_signed(vf_select(a > 20.0f, 0.5f * h * h, 0.5f * (t + t / (t + 1.0f))), x);
}
GG_INLINE vf vf_cosh(vf x) {
    const vf a = vf_abs(x), e = vf_exp(vf_min(vf_set1(20.0f), a)), h = vf_exp(a * 0.5f);
    return vf_select(a > 20.0f, 0.5f * h * h, 0.5f * (e + 1.0f / e));
}

/* Their inverses, within 4 ulp, as logarithms of 1 and something. */
GG_INLINE vf vf_asinh(vf x) {
    const vf a = vf_abs(x), z = vf_min(vf_set1(1e18f), a) * vf_min(vf_set1(1e18f), a);
    const vf y = vf_log1p(a + z / (1.0f + vf_sqrt(1.0f + z)));
    return vf_signed(vf_select(a > 1e9f, vf_log(a) + 0.693147180559945309f, y), x);
}
GG_INLINE vf vf_acosh(vf x) {
    const vf t = x - 1.0f;
    const vf y = vf_select(x > 1e9f, vf_log(x) + 0.693147180559945309f, vf_log1p(t + vf_sqrt(t * (t + 2.0f))));
    return vf_select(t < 0.0f, vf_set1(NAN), y);
}
GG_INLINE vf vf_atanh(vf x) {
    const vf a = vf_abs(x);
    return vf_signed(0.5f * vf_log1p(2.0f * a / (1.0f - a)), x);
}
