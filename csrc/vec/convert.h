/* Rows of f16 and bf16 to f32 and back.
 *
 * To the nearest, ties to even; overflow gives inf, denormals of both sides are kept, a NaN stays a NaN
 * (quiet, with the upper bits of its payload).  The element functions below say what the rows do: they
 * finish a row where the hardware's conversions take only whole vectors, and give the same bits.
 * The caller's rounding mode must be the default one. */
#pragma once
#include "abi/ggrad.h"
#include "vec/simd.h"

#if defined(GG_HAS_AVX2) || defined(__aarch64__)
#define GG_HAS_F16 1 /* vector conversions in hardware */
#endif

GG_INLINE uint32_t gg_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
GG_INLINE float gg_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Selects instead of branches, so that loops over these are vectorised. */
GG_INLINE float gg_f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t normal = magnitude + (112u << 23); /* the biases are 15 and 127 */
    const uint32_t tiny = gg_bits(gg_float(magnitude + (113u << 23)) - gg_float(113u << 23));
    const uint32_t special = magnitude | (magnitude > 0x0f800000 ? 0x7fc00000 : 0x7f800000);
    const uint32_t finite = magnitude < 1u << 23 ? tiny : normal;
    return gg_float(sign | (magnitude >= 0x0f800000 ? special : finite));
}

GG_INLINE uint16_t gg_f32_to_f16(float x) {
    const uint32_t u = gg_bits(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* in 0.5 ... 1 one ulp is 2^-24, the smallest f16: the sum rounds where the result must */
    const uint32_t tiny = gg_bits(gg_float(magnitude) + 0.5f) - gg_bits(0.5f);
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
    const uint32_t finite = magnitude < 113u << 23 ? tiny : normal;
    return (uint16_t)(sign | (magnitude >= 143u << 23 ? special : finite));
}

GG_INLINE float gg_bf16_to_f32(uint16_t h) { return gg_float((uint32_t)h << 16); }

GG_INLINE uint16_t gg_f32_to_bf16(float x) {
    const uint32_t u = gg_bits(x), nan = u >> 16 | 0x40;
    const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* A vector of f32 from GG_VW halves. */
GG_INLINE vf vf_load_f16(const uint16_t *x) {
#if defined(GG_HAS_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(GG_HAS_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    float lane[GG_VW];
    for (int i = 0; i < GG_VW; i++) lane[i] = gg_f16_to_f32(x[i]);
    return vf_load(lane);
#endif
}

GG_INLINE vf vf_load_bf16(const uint16_t *x) {
    typedef uint16_t half_vector __attribute__((vector_size(GG_VECTOR_BYTES / 2), aligned(2), may_alias));
    typedef uint32_t word_vector __attribute__((vector_size(GG_VECTOR_BYTES)));
    return (vf)(__builtin_convertvector(*(const half_vector *)x, word_vector) << 16);
}

GG_INLINE void vf_store_f16(uint16_t *y, vf x) {
#if defined(GG_HAS_AVX512)
    _mm256_storeu_si256((__m256i *)y, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(GG_HAS_AVX2)
    _mm_storeu_si128((__m128i *)y, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u16(y, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    float lane[GG_VW];
    vf_store(lane, x);
    for (int i = 0; i < GG_VW; i++) y[i] = gg_f32_to_f16(lane[i]);
#endif
}

static inline void gg_f16_to_f32_row(const uint16_t *x, float *y, int64_t n) {
    int64_t i = 0;
#if defined(GG_HAS_F16)
    for (; i + GG_VW <= n; i += GG_VW) vf_store(y + i, vf_load_f16(x + i));
#endif
    for (; i < n; i++) y[i] = gg_f16_to_f32(x[i]);
}

static inline void gg_f32_to_f16_row(const float *x, uint16_t *y, int64_t n) {
    int64_t i = 0;
#if defined(GG_HAS_F16)
    for (; i + GG_VW <= n; i += GG_VW) vf_store_f16(y + i, vf_load(x + i));
#endif
    for (; i < n; i++) y[i] = gg_f32_to_f16(x[i]);
}

static inline void gg_bf16_to_f32_row(const uint16_t *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = gg_bf16_to_f32(x[i]);
}

static inline void gg_f32_to_bf16_row(const float *x, uint16_t *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = gg_f32_to_bf16(x[i]);
}

/* For code that is written once for the three dtypes: with a constant dtype the choice vanishes. */
GG_INLINE int64_t gg_float_bytes(const int dtype) { return dtype == GG_F32 ? 4 : 2; }

GG_INLINE float gg_load_as_f32(const int dtype, const void *x) {
    switch (dtype) {
    case GG_F16: return gg_f16_to_f32(*(const uint16_t *)x);
    case GG_BF16: return gg_bf16_to_f32(*(const uint16_t *)x);
    default: return *(const float *)x;
    }
}

GG_INLINE vf vf_load_as_f32(const int dtype, const void *x) {
    switch (dtype) {
    case GG_F16: return vf_load_f16(x);
    case GG_BF16: return vf_load_bf16(x);
    default: return vf_load(x);
    }
}

static inline void gg_to_f32_row(int dtype, const void *x, float *y, int64_t n) {
    switch (dtype) {
    case GG_F16: gg_f16_to_f32_row(x, y, n); break;
    case GG_BF16: gg_bf16_to_f32_row(x, y, n); break;
    default: memcpy(y, x, n * sizeof(float));
    }
}
