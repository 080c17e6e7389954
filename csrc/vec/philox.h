/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011): four random words for a counter of four and a key of two, in
 * every lane of a vector. */
#pragma once
#include "vec/simd.h"

typedef uint64_t gg_pairs __attribute__((vector_size(GG_VECTOR_BYTES)));

/* The product of the lower halves of each lane of x and of m. */
GG_INLINE gg_pairs philox_product(gg_pairs x, uint32_t m) {
    const gg_pairs by = (gg_pairs){ 0 } + m;
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    return (gg_pairs)_mm512_mul_epu32((__m512i)x, (__m512i)by);
#elif defined(__AVX2__) && GG_VECTOR_BYTES == 32
    return (gg_pairs)_mm256_mul_epu32((__m256i)x, (__m256i)by);
#elif defined(__SSE2__) && GG_VECTOR_BYTES == 16
    return (gg_pairs)_mm_mul_epu32((__m128i)x, (__m128i)by);
#else
    return (x & 0xffffffff) * by;
#endif
}

/* Even and odd lanes go apart, one to each lane of 64 bits, of which only the lower halves count: products look at
 * nothing else, and xors mix halves with their like. */
GG_INLINE void vu_philox(vu c0, vu c1, vu c2, vu c3, uint32_t key0, uint32_t key1, vu words[4]) {
    gg_pairs c[2][4] = { { (gg_pairs)c0, (gg_pairs)c1, (gg_pairs)c2, (gg_pairs)c3 },
                         { (gg_pairs)c0 >> 32, (gg_pairs)c1 >> 32, (gg_pairs)c2 >> 32, (gg_pairs)c3 >> 32 } };
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            const gg_pairs left = philox_product(c[odd][0], 0xD2511F53u),
                           right = philox_product(c[odd][2], 0xCD9E8D57u);
            c[odd][0] = right >> 32 ^ c[odd][1] ^ key0;
            c[odd][1] = right;
            c[odd][2] = left >> 32 ^ c[odd][3] ^ key1;
            c[odd][3] = left;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++) words[w] = (vu)((c[0][w] & 0xffffffff) | c[1][w] << 32);
}
