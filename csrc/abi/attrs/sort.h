/* Attributes of sorting. */
#pragma once
#include <stdint.h>

typedef struct gg_argsort_attrs {
    int32_t order; /* 0: ascending, 1: descending */
} gg_argsort_attrs;

typedef struct gg_top_k_attrs {
    int64_t k;
} gg_top_k_attrs;
