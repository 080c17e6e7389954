/* Vectors of the width of this instruction set's registers, with GNU C vector extensions.
 *
 * The width matters: a type wider than the register is taken apart through memory, silently and
 * 10 to 40 times slower.  So isa.h sets GG_VECTOR_BYTES for each instruction set. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "vec/isa.h"

#define GG_INLINE static inline __attribute__((always_inline))

enum { GG_VW = GG_VECTOR_BYTES / 4 }; /* floats in a vector */

typedef float vf __attribute__((vector_size(GG_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(GG_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(GG_VECTOR_BYTES)));
typedef float vf_unaligned __attribute__((vector_size(GG_VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(GG_VECTOR_BYTES), aligned(4), may_alias));

GG_INLINE vf vf_load(const float *p) { return *(const vf_unaligned *)p; }
GG_INLINE void vf_store(float *p, vf x) { *(vf_unaligned *)p = x; }
GG_INLINE vi vi_load(const int32_t *p) { return *(const vi_unaligned *)p; }
GG_INLINE void vi_store(int32_t *p, vi x) { *(vi_unaligned *)p = x; }
GG_INLINE vf vf_set1(float x) { return x - (vf){ 0 }; }
GG_INLINE vi vi_set1(int32_t x) { return x - (vi){ 0 }; }
GG_INLINE vf vf_zero(void) { return (vf){ 0 }; }

/* 0, 1, 2, ... */
GG_INLINE vi vi_lanes(void) {
    vi lanes;
    for (int i = 0; i < GG_VW; i++) lanes[i] = i;
    return lanes;
}

/* Sums and differences that may wrap around. */
GG_INLINE vi vi_add(vi a, vi b) { return (vi)((vu)a + (vu)b); }
GG_INLINE vi vi_sub(vi a, vi b) { return (vi)((vu)a - (vu)b); }

/* where ? a : b, lane by lane; `where` comes from a comparison, so its lanes are 0 or -1. */
GG_INLINE vf vf_select(vi where, vf a, vf b) { return (vf)((where & (vi)a) | (~where & (vi)b)); }

/* a > b ? a : b, so that a NaN in b survives. */
GG_INLINE vf vf_max(vf a, vf b) {
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    return _mm512_max_ps(a, b);
#elif defined(__AVX__) && GG_VECTOR_BYTES == 32
    return _mm256_max_ps(a, b);
#elif defined(__SSE2__) && GG_VECTOR_BYTES == 16
    return _mm_max_ps(a, b);
#else
    return vf_select(a > b, a, b);
#endif
}

/* a < b ? a : b, so that a NaN in b survives. */
GG_INLINE vf vf_min(vf a, vf b) {
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    return _mm512_min_ps(a, b);
#elif defined(__AVX__) && GG_VECTOR_BYTES == 32
    return _mm256_min_ps(a, b);
#elif defined(__SSE2__) && GG_VECTOR_BYTES == 16
    return _mm_min_ps(a, b);
#else
    return vf_select(a < b, a, b);
#endif
}

GG_INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* Lane i is x's lane i ^ k: neighbours, pairs, quads or halves change places. */
#if GG_VECTOR_BYTES == 16
#define GG_SWAPPED(x, k) __builtin_shufflevector(x, x, 0 ^ k, 1 ^ k, 2 ^ k, 3 ^ k)
#elif GG_VECTOR_BYTES == 32
#define GG_SWAPPED(x, k) __builtin_shufflevector(x, x, 0 ^ k, 1 ^ k, 2 ^ k, 3 ^ k, 4 ^ k, 5 ^ k, 6 ^ k, 7 ^ k)
#else
#define GG_SWAPPED(x, k) \
    __builtin_shufflevector(x, x, 0 ^ k, 1 ^ k, 2 ^ k, 3 ^ k, 4 ^ k, 5 ^ k, 6 ^ k, 7 ^ k, 8 ^ k, 9 ^ k, 10 ^ k, \
                            11 ^ k, 12 ^ k, 13 ^ k, 14 ^ k, 15 ^ k)
#endif

/* The sum of all lanes, in a fixed order: halves onto halves. */
GG_INLINE float vf_sum(vf x) {
#if GG_VECTOR_BYTES >= 64
    x += GG_SWAPPED(x, 8);
#endif
#if GG_VECTOR_BYTES >= 32
    x += GG_SWAPPED(x, 4);
#endif
    x += GG_SWAPPED(x, 2);
    return x[0] + x[1];
}

/* The largest lane; NaNs may be passed over. */
GG_INLINE float vf_largest(vf x) {
#if GG_VECTOR_BYTES >= 64
    x = vf_max(x, GG_SWAPPED(x, 8));
#endif
#if GG_VECTOR_BYTES >= 32
    x = vf_max(x, GG_SWAPPED(x, 4));
#endif
    x = vf_max(x, GG_SWAPPED(x, 2));
    return x[0] > x[1] ? x[0] : x[1];
}

/* The first n lanes of p (0 <= n <= GG_VW), zero (or `fill`) in the others; nothing behind them is touched. */
GG_INLINE vf vf_load_n(const float *p, int n, float fill) {
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    return _mm512_mask_loadu_ps(vf_set1(fill), (__mmask16)((1u << n) - 1), p);
#elif defined(__AVX2__) && GG_VECTOR_BYTES == 32
    const vi some = vi_set1(n) > (vi){ 0, 1, 2, 3, 4, 5, 6, 7 };
    const vf x = _mm256_maskload_ps(p, (__m256i)some);
    return fill == 0 ? x : vf_select(some, x, vf_set1(fill));
#else
    float lane[GG_VW];
    for (int i = 0; i < GG_VW; i++) lane[i] = i < n ? p[i] : fill;
    return vf_load(lane);
#endif
}
GG_INLINE void vf_store_n(float *p, vf x, int n) {
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x);
#else /* AVX2's masked store is slow on some CPUs */
    float lane[GG_VW];
    vf_store(lane, x);
    const float *from = lane;
    for (int half = GG_VW / 2; half > 0; half /= 2)
        if (n & half) {
            memcpy(p, from, half * sizeof(float));
            p += half;
            from += half;
        }
    if (n == GG_VW) memcpy(p, lane, sizeof lane);
#endif
}

/* Elements 0, 2, 4, ... of two vectors side by side. */
#if GG_VECTOR_BYTES == 16
#define GG_EVEN(x, y) __builtin_shufflevector(x, y, 0, 2, 4, 6)
#elif GG_VECTOR_BYTES == 32
#define GG_EVEN(x, y) __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14)
#else
#define GG_EVEN(x, y) __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#endif

/* p[0], p[step], p[2 step], ...; of step 2 the element behind the last one is looked at too. */
GG_INLINE vf vf_load_every(const float *p, int64_t step) {
    if (step == 1) return vf_load(p);
    if (step == 2) return GG_EVEN(vf_load(p), vf_load(p + GG_VW));
    vf x;
    for (int i = 0; i < GG_VW; i++) x[i] = p[i * step];
    return x;
}

/* x, of which the compiler sees no further how it came about: a product stays rounded, and does not become part of an FMA. */
GG_INLINE vf vf_rounded(vf x) {
#if defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

/* Whether any lane of a comparison's result is set. */
GG_INLINE int vi_any(vi where) {
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0;
#elif defined(__AVX2__) && GG_VECTOR_BYTES == 32
    return _mm256_movemask_ps((__m256)where) != 0;
#elif defined(__SSE2__) && GG_VECTOR_BYTES == 16
    return _mm_movemask_ps((__m128)where) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < GG_VW; i++) any |= where[i];
    return any != 0;
#endif
}

/* 2^n for integers n in [-126, 127]. */
GG_INLINE vf vf_exp2i(vi n) { return (vf)((n + 127) << 23); }

/* exp(r) within 0.1 ulp before rounding, for |r| <= ln2 / 2, and exactly 1 at 0. */
GG_INLINE vf vf_exp_polynomial(vf r) {
    vf p = vf_set1(1.3814449776e-3f);
    p = p * r + 8.3687026054e-3f;
    p = p * r + 4.1668329388e-2f;
    p = p * r + 1.6666521132e-1f;
    p = p * r + 4.9999994040e-1f;
    p = p * r + 1.0f;
    return p * r + 1.0f;
}

/* exp(x), within 1 ulp; exp(0) = 1 exactly, inf above 88.73, 0 below -104, NaN for NaN.
 * x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite, ln2 in two terms), and 2^n in two factors
 * so that neither end overflows early. */
GG_INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = vf_min(vf_set1(89.0f), vf_max(vf_set1(-104.0f), x));
    const vf shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    const vi i = (vi)shifted - 0x4b400000, half = i >> 1;
    const vf r = x - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
    return vf_exp_polynomial(r) * vf_exp2i(half) * vf_exp2i(i - half);
}

/* exp(x) for x <= 0 (right up to 88, though): as vf_exp, but 0 already below -87. */
GG_INLINE vf vf_exp_neg(vf x) {
    const float magic = 12582912.0f;
    const vf shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    const vf r = x - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
    const vf y =
        vf_exp_polynomial(r) * (vf)vi_add((vi)shifted << 23, vi_set1(0x3f800000)); /* 2^n: magic's own bits fall off */
    return (vf)((vi)y & ~(x < -87.0f));
}
