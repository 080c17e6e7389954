/* Attributes of elementwise ops. */
#pragma once
#include <stdint.h>

typedef struct gg_scale_attrs {
    float factor, bias;
} gg_scale_attrs;
