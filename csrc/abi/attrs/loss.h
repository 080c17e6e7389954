/* Attributes of losses. */
#pragma once
#include <stdint.h>

typedef struct gg_cross_entropy_class_attrs {
    int64_t ignore_index;
    int32_t mean;
} gg_cross_entropy_class_attrs;

typedef struct gg_cross_entropy_class_back_attrs {
    int64_t ignore_index;
} gg_cross_entropy_class_back_attrs;

typedef struct gg_cross_entropy_soft_attrs {
    int32_t mean;
} gg_cross_entropy_soft_attrs;

typedef struct gg_cross_entropy_soft_back_attrs {
    int32_t mean;
} gg_cross_entropy_soft_back_attrs;
