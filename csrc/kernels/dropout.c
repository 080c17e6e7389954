/* dropout: out[i] = word(i) < kept ? x[i] * 2^32 / kept : 0, with a random word for each element.
 *
 * Words are Philox4x32-10's (Salmon, Moraes, Dror and Shaw, 2011), of counter (block, block >> 32, 0, 0) and key
 * (seed, attribute key).  A group of 64 elements draws from 16 blocks: element i of it takes word i / 16 of block
 * i % 16, so that vectors of any width find their words side by side. */
#include "../kernel.h"
#include "../simd.h"

enum { DROPOUT_X, DROPOUT_SEED };
enum { DROPOUT_BLOCKS = 16, DROPOUT_GROUP = 64 };

typedef uint64_t dropout_lanes __attribute__((vector_size(GG_VECTOR_BYTES)));

/* The product of the lower halves of each lane of x and of m. */
GG_INLINE dropout_lanes dropout_product(dropout_lanes x, uint32_t m) {
    const dropout_lanes by = (dropout_lanes){ 0 } + m;
#if defined(__AVX512F__) && GG_VECTOR_BYTES == 64
    return (dropout_lanes)_mm512_mul_epu32((__m512i)x, (__m512i)by);
#elif defined(__AVX2__) && GG_VECTOR_BYTES == 32
    return (dropout_lanes)_mm256_mul_epu32((__m256i)x, (__m256i)by);
#elif defined(__SSE2__) && GG_VECTOR_BYTES == 16
    return (dropout_lanes)_mm_mul_epu32((__m128i)x, (__m128i)by);
#else
    return (x & 0xffffffff) * by;
#endif
}

/* The words of GG_VW blocks, the even and the odd ones apart, a block to each 64-bit lane.
 * Only the lower halves of lanes count: products look at nothing else, and xors mix halves with their like. */
GG_INLINE void dropout_blocks(uint64_t first, uint32_t seed, uint32_t key, uint32_t words[4][DROPOUT_BLOCKS], int at) {
    dropout_lanes c[2][4];
    for (int odd = 0; odd < 2; odd++) {
        uint64_t block[GG_VW / 2];
        for (int lane = 0; lane < GG_VW / 2; lane++) block[lane] = first + 2 * lane + odd;
        memcpy(&c[odd][0], block, sizeof block);
        c[odd][1] = c[odd][0] >> 32;
        c[odd][2] = c[odd][3] = (dropout_lanes){ 0 };
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            const dropout_lanes left = dropout_product(c[odd][0], 0xD2511F53u),
                                right = dropout_product(c[odd][2], 0xCD9E8D57u);
            c[odd][0] = right >> 32 ^ c[odd][1] ^ seed;
            c[odd][1] = right;
            c[odd][2] = left >> 32 ^ c[odd][3] ^ key;
            c[odd][3] = left;
        }
        seed += 0x9E3779B9u;
        key += 0xBB67AE85u;
    }
    for (int w = 0; w < 4; w++) vi_store((int32_t *)words[w] + at, (vi)((c[0][w] & 0xffffffff) | c[1][w] << 32));
}

static void dropout_words(uint64_t group, uint32_t seed, uint32_t key, uint32_t words[4][DROPOUT_BLOCKS]) {
    for (int at = 0; at < DROPOUT_BLOCKS; at += GG_VW)
        dropout_blocks(group * DROPOUT_BLOCKS + at, seed, key, words, at);
}

static int64_t dropout_groups(const gg_call *c) { return gg_ceil_div(gg_elements(c->dst), DROPOUT_GROUP); }

static int64_t dropout_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(dropout_groups(c), DROPOUT_GROUP, 2);
}

static void dropout_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_dropout_attrs *p = c->attrs;
    const int64_t groups = dropout_groups(c), tasks = dropout_tasks(c, 0), n = gg_elements(c->dst);
    const int64_t g0 = gg_cut(groups, begin, tasks), g1 = gg_cut(groups, end, tasks);
    const float *const x = c->src[DROPOUT_X].data;
    float *const out = c->dst->data;
    const int64_t first = g0 * DROPOUT_GROUP, last = gg_min(n, g1 * DROPOUT_GROUP);
    const double kept = rint((1.0 - p->p) * 4294967296.0); /* of 2^32 words */
    if (kept == 4294967296.0) {
        if (out != x) memcpy(out + first, x + first, (last - first) * sizeof(float));
        return;
    }
    if (kept == 0) {
        memset(out + first, 0, (last - first) * sizeof(float));
        return;
    }
    const float scale = (float)(4294967296.0 / kept);
    const uint32_t below = (uint32_t)kept, seed = *(const uint32_t *)c->src[DROPOUT_SEED].data;
    for (int64_t g = g0; g < g1; g++) {
        uint32_t words[4][DROPOUT_BLOCKS];
        dropout_words((uint64_t)g, seed, (uint32_t)p->key, words);
        const uint32_t *const word = words[0];
        const int64_t base = g * DROPOUT_GROUP;
        const int members = (int)gg_min(DROPOUT_GROUP, n - base);
        int i = 0;
        const vi sign = vi_set1(INT32_MIN), limit = vi_set1((int32_t)below) ^ sign; /* flips unsigned order to signed */
        for (; i + GG_VW <= members; i += GG_VW) {
            const vi keep = (vi_load((const int32_t *)word + i) ^ sign) < limit;
            vf_store(out + base + i, (vf)(keep & (vi)(vf_load(x + base + i) * scale)));
        }
        for (; i < members; i++) out[base + i] = word[i] < below ? x[base + i] * scale : 0;
    }
}

GG_KERNEL(dropout, .stages = 1, .tasks = dropout_tasks, .run = dropout_run);
