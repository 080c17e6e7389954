/* Attributes of losses. */
#pragma once
#include <stdint.h>

enum gg_reduction { GG_ROWS = 0, GG_SUM = 1, GG_MEAN = 2 };

typedef struct gg_cross_entropy_class_attrs {
    int64_t ignore_index;
    float label_smoothing;
    int32_t reduction;
} gg_cross_entropy_class_attrs;

typedef struct gg_cross_entropy_class_back_attrs {
    int64_t ignore_index;
    float label_smoothing;
} gg_cross_entropy_class_back_attrs;

typedef struct gg_cross_entropy_soft_attrs {
    int32_t reduction;
} gg_cross_entropy_soft_attrs;

typedef struct gg_cross_entropy_soft_back_attrs {
    int32_t mean;
} gg_cross_entropy_soft_back_attrs;
