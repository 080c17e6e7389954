/* What the scans share: sums along a vector's lanes for many vectors at once, and how a backward pass divides the tokens. */
#pragma once
#include "gemm/pack.h"

/* The sum of each vector's lanes. */
GG_INLINE vf scan_sums(vf x[GG_VW]) {
    vf_transpose(x);
    for (int half = GG_VW / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[half + i];
    return x[0];
}

GG_INLINE void scan_add(float *to, vf x, int64_t count) {
    if (count >= GG_VW) vf_store(to, vf_load(to) + x);
    else vf_store_n(to, vf_load_n(to, (int)count, 0) + x, (int)count);
}

/* Tokens in a chunk: a backward pass keeps the state before each chunk, and makes those within one again. */
static inline int64_t scan_chunk(int64_t tokens) { return gg_max(1, (int64_t)ceil(sqrt((double)tokens))); }

/* In how many parts the work of one of `units` is cut, so that several threads find some: from shapes alone. */
static inline int64_t scan_parts(int64_t units, int64_t most) {
    enum { SCAN_TASKS = 16 };
    return units == 0 ? 1 : gg_max(1, gg_min(most, gg_ceil_div(SCAN_TASKS, units)));
}
