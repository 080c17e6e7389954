/* ggml's quantized blocks as f32: one decoder for each type, whatever reads them.
 *
 * A block begins at an even address.  Products of a scale and a small integer are exact in f32, so a value has one
 * rounding at most and is the same on every instruction set. */
#pragma once
#include "vec/convert.h"

enum { GG_LONGEST_BLOCK = 256 }; /* elements */

/* Elements of a block; 1 of types that are not quantized. */
static inline int64_t gg_block(int dtype) { return dtype < GG_Q4_0 ? 1 : dtype < GG_Q4_K ? 32 : 256; }

static inline int64_t gg_block_bytes(int dtype) {
    static const uint8_t bytes[] = { 18, 20, 22, 24, 34, 144, 176, 210 };
    return bytes[dtype - GG_Q4_0];
}

static inline int gg_quantized(int dtype) { return dtype >= GG_Q4_0; }

GG_INLINE float gg_half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
#if defined(GG_HAS_AVX2)
    return _cvtsh_ss(h);
#else
    return gg_f16_to_f32(h);
#endif
}

/* GG_VW bytes as 32-bit integers.  By intrinsics: of __builtin_convertvector GCC makes a move for every byte. */
GG_INLINE vi vi_load_bytes(const uint8_t *p) {
#if defined(GG_HAS_AVX512)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(GG_HAS_AVX2)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    uint32_t four;
    memcpy(&four, p, sizeof four);
#if defined(__x86_64__)
    const __m128i zero = _mm_setzero_si128(), bytes = _mm_cvtsi32_si128((int)four);
    return (vi)_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero);
#elif defined(__aarch64__)
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    return (vi){ p[0], p[1], p[2], p[3] };
#endif
#endif
}
GG_INLINE vi vi_load_signed_bytes(const uint8_t *p) {
#if defined(GG_HAS_AVX512)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(GG_HAS_AVX2)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (vi_load_bytes(p) ^ 128) - 128;
#endif
}

/* Bits first, first + 1, ... of a word, as 16 or 0: the fifth bits of that many values, which do not cross the word's
 * middle. */
GG_INLINE vi gg_fifth_bits(uint32_t word, const int first) {
    const vu words = (vu)vi_set1((int32_t)(first < 16 ? word << 4 : word));
    return (vi)(words >> (vu)(vi_lanes() + (first < 16 ? first : first - 4))) & 16;
}

/* What decoders give at a time: 32 values, in registers if the caller makes something of them at once. */
enum { GG_GROUP = 32, GG_GROUP_VECTORS = GG_GROUP / GG_VW };

#if defined(GG_HAS_AVX512)
/* Of values of four bits a table of all sixteen is one register; the index is the low half of a byte. */
GG_INLINE vf gg_look_up(vf table, vi index) { return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table); }
#endif

/* From 16 bytes of pairs: y = d (q - zero) + m, where q has a fifth bit if there is a word of those. */
GG_INLINE void gg_decode_pairs(const uint8_t *pairs, const uint8_t *fifth, float d, int zero, float m,
                               vf y[GG_GROUP_VECTORS]) {
#if defined(GG_HAS_AVX512)
    if (fifth == NULL) {
        const vf table = __builtin_convertvector(vi_lanes() - zero, vf) * d + m;
        const vi packed = vi_load_bytes(pairs);
        y[0] = gg_look_up(table, packed);
        y[1] = gg_look_up(table, packed >> 4);
        return;
    }
#endif
    uint32_t word = 0;
    if (fifth != NULL) memcpy(&word, fifth, sizeof word);
#pragma GCC unroll 4
    for (int v = 0; v < GG_GROUP_VECTORS / 2; v++) {
        const vi packed = vi_load_bytes(pairs + v * GG_VW);
        vi low = packed & 15, high = packed >> 4;
        if (fifth != NULL) {
            low |= gg_fifth_bits(word, v * GG_VW);
            high |= gg_fifth_bits(word, v * GG_VW + 16);
        }
        y[v] = __builtin_convertvector(low - zero, vf) * d + m;
        y[v + GG_GROUP_VECTORS / 2] = __builtin_convertvector(high - zero, vf) * d + m;
    }
}

/* The scale and minimum, 6 bits each, of group g of eight, packed into twelve bytes. */
GG_INLINE void gg_group_of_k(const uint8_t *packed, int g, int *scale, int *minimum) {
    if (g < 4) {
        *scale = packed[g] & 63;
        *minimum = packed[g + 4] & 63;
    } else {
        *scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
        *minimum = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
    }
}

/* Group g of eight.  Two groups share 32 bytes: one has the low halves, the other the high ones. */
GG_INLINE void gg_decode_k(const uint8_t *block, const uint8_t *fifths, const uint8_t *pairs, int g,
                           vf y[GG_GROUP_VECTORS]) {
    const float d = gg_half_at(block), e = gg_half_at(block + 2);
    int scale, minimum;
    gg_group_of_k(block + 4, g, &scale, &minimum);
    const float s = d * (float)scale, m = -(e * (float)minimum);
    const uint8_t *const from = pairs + g / 2 * 32;
#if defined(GG_HAS_AVX512)
    if (fifths == NULL) {
        const vf table = __builtin_convertvector(vi_lanes(), vf) * s + m;
        y[0] = gg_look_up(table, vi_load_bytes(from) >> (g & 1) * 4);
        y[1] = gg_look_up(table, vi_load_bytes(from + GG_VW) >> (g & 1) * 4);
        return;
    }
#endif
#pragma GCC unroll 8
    for (int v = 0; v < GG_GROUP_VECTORS; v++) {
        vi q = (vi_load_bytes(from + v * GG_VW) >> (g & 1) * 4) & 15;
        if (fifths != NULL) q |= ((vi_load_bytes(fifths + v * GG_VW) >> g) & 1) << 4;
        y[v] = __builtin_convertvector(q, vf) * s + m;
    }
}

/* Group g of eight: a quarter of one half of the block, with a scale for every 16 values. */
GG_INLINE void gg_decode_q6_k(const uint8_t *block, int g, vf y[GG_GROUP_VECTORS]) {
    const float d = gg_half_at(block + 208);
    const int half = g / 4, quarter = g % 4;
    const uint8_t *const low = block + half * 64 + quarter % 2 * 32, *const high = block + 128 + half * 32;
#pragma GCC unroll 8
    for (int v = 0; v < GG_GROUP_VECTORS; v++) {
        const float s = d * (float)(int8_t)block[192 + g * 2 + v * GG_VW / 16];
        const vi four = (vi_load_bytes(low + v * GG_VW) >> quarter / 2 * 4) & 15;
        const vi two = (vi_load_bytes(high + v * GG_VW) >> quarter * 2) & 3;
        y[v] = __builtin_convertvector((four | two << 4) - 32, vf) * s;
    }
}

/* Whether values are but a scale times integers, which in a sum of products can wait; a table already has it. */
GG_INLINE int gg_scale_can_wait(const int dtype) {
#if defined(GG_HAS_AVX512)
    if (dtype == GG_Q4_0) return 0;
#endif
    return dtype == GG_Q4_0 || dtype == GG_Q5_0 || dtype == GG_Q8_0;
}

/* Of such a type the integers.  Adding -0 changes nothing, of which compilers make nothing. */
GG_INLINE void gg_decode_integers(const int dtype, const uint8_t *b, vf y[GG_GROUP_VECTORS]) {
    switch (dtype) {
    case GG_Q4_0: gg_decode_pairs(b + 2, NULL, 1, 8, -0.0f, y); break;
    case GG_Q5_0: gg_decode_pairs(b + 6, b + 2, 1, 16, -0.0f, y); break;
    default:
#pragma GCC unroll 8
        for (int v = 0; v < GG_GROUP_VECTORS; v++)
            y[v] = __builtin_convertvector(vi_load_signed_bytes(b + 2 + v * GG_VW), vf);
    }
}

/* Group g of a block; blocks of 32 have but one. */
GG_INLINE void gg_decode_group(const int dtype, const uint8_t *b, int g, vf y[GG_GROUP_VECTORS]) {
    switch (dtype) {
    case GG_Q4_0: gg_decode_pairs(b + 2, NULL, gg_half_at(b), 8, -0.0f, y); break;
    case GG_Q4_1: gg_decode_pairs(b + 4, NULL, gg_half_at(b), 0, gg_half_at(b + 2), y); break;
    case GG_Q5_0: gg_decode_pairs(b + 6, b + 2, gg_half_at(b), 16, -0.0f, y); break;
    case GG_Q5_1: gg_decode_pairs(b + 8, b + 4, gg_half_at(b), 0, gg_half_at(b + 2), y); break;
    case GG_Q8_0: gg_decode_integers(GG_Q8_0, b, y);
#pragma GCC unroll 8
        for (int v = 0; v < GG_GROUP_VECTORS; v++) y[v] *= gg_half_at(b);
        break;
    case GG_Q4_K: gg_decode_k(b, NULL, b + 16, g, y); break;
    case GG_Q5_K: gg_decode_k(b, b + 16, b + 48, g, y); break;
    default: gg_decode_q6_k(b, g, y);
    }
}

/* GG_EACH_QUANTIZED(dtype, F, ...) calls F(constant, ...) for the type at hand. */
#define GG_EACH_QUANTIZED(dtype, F, ...) \
    switch (dtype) { \
    case GG_Q4_0: F(GG_Q4_0, __VA_ARGS__); break; \
    case GG_Q4_1: F(GG_Q4_1, __VA_ARGS__); break; \
    case GG_Q5_0: F(GG_Q5_0, __VA_ARGS__); break; \
    case GG_Q5_1: F(GG_Q5_1, __VA_ARGS__); break; \
    case GG_Q8_0: F(GG_Q8_0, __VA_ARGS__); break; \
    case GG_Q4_K: F(GG_Q4_K, __VA_ARGS__); break; \
    case GG_Q5_K: F(GG_Q5_K, __VA_ARGS__); break; \
    case GG_Q6_K: F(GG_Q6_K, __VA_ARGS__); break; \
    }

GG_INLINE void gg_dequantize_of(const int dtype, const uint8_t *b, float *y, int64_t n) {
    const int groups = (int)gg_block(dtype) / GG_GROUP;
    for (const float *const end = y + n; y < end; b += gg_block_bytes(dtype))
        for (int g = 0; g < groups; g++, y += GG_GROUP) {
            vf v[GG_GROUP_VECTORS];
            gg_decode_group(dtype, b, g, v);
#pragma GCC unroll 8
            for (int i = 0; i < GG_GROUP_VECTORS; i++) vf_store(y + i * GG_VW, v[i]);
        }
}

/* n elements, whole blocks of them, to y. */
static __attribute__((noinline, unused)) void gg_dequantize(int dtype, const void *blocks, float *y, int64_t n) {
    GG_EACH_QUANTIZED(dtype, gg_dequantize_of, blocks, y, n)
}
