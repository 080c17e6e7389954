/* dropout: out[i] = word(i) < kept ? x[i] * 2^32 / kept : 0, with a random word for each element.
 *
 * Words are Philox4x32-10's, of counter (block, block >> 32, 0, 0) and key (seed, attribute key).  A group of 64 elements draws from 16 blocks: element i of it takes word i / 16 of block
 * i % 16, so that vectors of any width find their words side by side. */
#include "abi/attrs/dropout.h"
#include "vec/philox.h"
#include "walk/kernel.h"

enum { DROPOUT_X, DROPOUT_SEED };
enum { DROPOUT_BLOCKS = 16, DROPOUT_GROUP = 64 };

static void dropout_words(uint64_t group, uint32_t seed, uint32_t key, uint32_t words[4][DROPOUT_BLOCKS]) {
    const uint64_t first = group * DROPOUT_BLOCKS;
    for (int at = 0; at < DROPOUT_BLOCKS; at += GG_VW) {
        const vu block = (vu){ 0 } + (uint32_t)(first + at) + (vu)vi_lanes(),
                 upper = (vu){ 0 } + (uint32_t)(first >> 32);
        vu w[4];
        vu_philox(block, upper, (vu){ 0 }, (vu){ 0 }, seed, key, w);
        for (int i = 0; i < 4; i++) vi_store((int32_t *)words[i] + at, (vi)w[i]);
    }
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
