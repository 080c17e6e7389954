/* Attributes of optimizers. */
#pragma once
#include <stdint.h>

typedef struct gg_clip_factor_attrs {
    float max_norm;
} gg_clip_factor_attrs;
