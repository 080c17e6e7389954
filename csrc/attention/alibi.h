/* ALiBi: the slope that a head multiplies its mask with. */
#pragma once
#include <math.h>
#include <stdint.h>

/* Falling powers of 2^(-max_bias / n) for the first n of the heads, n a power of two; between those for the rest. */
static inline float gg_alibi_slope(int64_t heads, int64_t head, double max_bias) {
    if (max_bias <= 0) return 1;
    int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    return (float)(head < n ? exp2(-max_bias / n * (head + 1)) : exp2(-max_bias / 2 / n * (2 * (head - n) + 1)));
}
