/* Attributes of soft maxima. */
#pragma once
#include <stdint.h>

typedef struct gg_soft_max_attrs {
    float scale, max_bias;
} gg_soft_max_attrs;

typedef gg_soft_max_attrs gg_soft_max_sinks_back_attrs;

typedef struct gg_soft_max_back_attrs {
    float scale;
} gg_soft_max_back_attrs;
