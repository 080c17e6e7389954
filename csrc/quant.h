/* ggml's quantized blocks as f32: one decoder for each type, whatever reads them.
 *
 * A block begins at an even address.  Products of a scale and a small integer are exact in f32, so a value has one
 * rounding at most and is the same on every instruction set. */
#pragma once
#include "convert.h"

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

typedef uint8_t gg_bytes __attribute__((vector_size(GG_VW)));
typedef int8_t gg_signed_bytes __attribute__((vector_size(GG_VW)));

GG_INLINE vi vi_load_bytes(const uint8_t *p) {
    gg_bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
}
GG_INLINE vi vi_load_signed_bytes(const uint8_t *p) {
    gg_signed_bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
}

GG_INLINE vi vi_lanes(void) {
    vi lanes;
    for (int i = 0; i < GG_VW; i++) lanes[i] = i;
    return lanes;
}

/* Bits first, first + 1, ... of a word, as 16 or 0: the fifth bits of that many values. */
GG_INLINE vi gg_fifth_bits(uint32_t word, int first) {
    const vu shifted = (vu)vi_set1((int32_t)word) >> (vu)(vi_lanes() + first);
    return (vi)((shifted & 1) << 4);
}

/* 32 values from 16 bytes of pairs: y = d (q - zero) + m, where q has a fifth bit if there is a word of those. */
GG_INLINE void gg_decode_pairs(const uint8_t *pairs, const uint8_t *fifth, float d, int zero, float m, float *y) {
    uint32_t word = 0;
    if (fifth != NULL) memcpy(&word, fifth, sizeof word);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += GG_VW) {
        const vi packed = vi_load_bytes(pairs + i);
        vi low = packed & 15, high = packed >> 4;
        if (fifth != NULL) {
            low |= gg_fifth_bits(word, i);
            high |= gg_fifth_bits(word, i + 16);
        }
        vf_store(y + i, __builtin_convertvector(low - zero, vf) * d + m);
        vf_store(y + i + 16, __builtin_convertvector(high - zero, vf) * d + m);
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

/* Two groups share 32 bytes: one has the low halves, the other the high ones. */
GG_INLINE void gg_decode_k(const uint8_t *block, const uint8_t *fifths, const uint8_t *pairs, float *y) {
    const float d = gg_half_at(block), e = gg_half_at(block + 2);
    for (int g = 0; g < 8; g++, y += 32) {
        int scale, minimum;
        gg_group_of_k(block + 4, g, &scale, &minimum);
        const float s = d * (float)scale, m = -(e * (float)minimum);
        const uint8_t *const from = pairs + g / 2 * 32;
#pragma GCC unroll 8
        for (int i = 0; i < 32; i += GG_VW) {
            vi q = (vi_load_bytes(from + i) >> (g & 1) * 4) & 15;
            if (fifths != NULL) q |= ((vi_load_bytes(fifths + i) >> g) & 1) << 4;
            vf_store(y + i, __builtin_convertvector(q, vf) * s + m);
        }
    }
}

GG_INLINE void gg_decode_q6_k(const uint8_t *block, float *y) {
    const float d = gg_half_at(block + 208);
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    for (int half = 0; half < 2; half++, low += 64, high += 32)
        for (int g = 0; g < 8; g++, y += 16) { /* 16 values each */
            const int quarter = g / 2, at = g % 2 * 16;
            const float s = d * (float)(int8_t)scales[half * 8 + g];
#pragma GCC unroll 4
            for (int i = at; i < at + 16; i += GG_VW) {
                const vi four = (vi_load_bytes(low + quarter % 2 * 32 + i) >> quarter / 2 * 4) & 15;
                const vi two = (vi_load_bytes(high + i) >> quarter * 2) & 3;
                vf_store(y + i - at, __builtin_convertvector((four | two << 4) - 32, vf) * s);
            }
        }
}

GG_INLINE void gg_decode_q8_0(const uint8_t *block, float *y) {
    const float d = gg_half_at(block);
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += GG_VW)
        vf_store(y + i, __builtin_convertvector(vi_load_signed_bytes(block + 2 + i), vf) * d);
}

/* n elements, whole blocks of them, to y. */
static inline void gg_dequantize(int dtype, const void *blocks, float *y, int64_t n) {
    const uint8_t *b = blocks;
    const float *const end = y + n;
    switch (dtype) {
    case GG_Q4_0:
        for (; y < end; y += 32, b += 18) gg_decode_pairs(b + 2, NULL, gg_half_at(b), 8, 0, y);
        break;
    case GG_Q4_1:
        for (; y < end; y += 32, b += 20) gg_decode_pairs(b + 4, NULL, gg_half_at(b), 0, gg_half_at(b + 2), y);
        break;
    case GG_Q5_0:
        for (; y < end; y += 32, b += 22) gg_decode_pairs(b + 6, b + 2, gg_half_at(b), 16, 0, y);
        break;
    case GG_Q5_1:
        for (; y < end; y += 32, b += 24) gg_decode_pairs(b + 8, b + 4, gg_half_at(b), 0, gg_half_at(b + 2), y);
        break;
    case GG_Q8_0:
        for (; y < end; y += 32, b += 34) gg_decode_q8_0(b, y);
        break;
    case GG_Q4_K:
        for (; y < end; y += 256, b += 144) gg_decode_k(b, NULL, b + 16, y);
        break;
    case GG_Q5_K:
        for (; y < end; y += 256, b += 176) gg_decode_k(b, b + 16, b + 48, y);
        break;
    case GG_Q6_K:
        for (; y < end; y += 256, b += 210) gg_decode_q6_k(b, y);
        break;
    }
}
