/* Attributes of sums along an axis. */
#pragma once
#include <stdint.h>

typedef struct gg_cumsum_attrs {
    int64_t axis;
    int32_t reverse;
} gg_cumsum_attrs;
