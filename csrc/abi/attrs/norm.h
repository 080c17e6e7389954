/* Attributes of normalizations. */
#pragma once
#include <stdint.h>

typedef struct gg_norm_attrs {
    float eps;
} gg_norm_attrs;

typedef struct gg_norm_back_attrs {
    float eps;
} gg_norm_back_attrs;

typedef struct gg_rms_norm_attrs {
    float eps;
} gg_rms_norm_attrs;

typedef struct gg_rms_norm_back_attrs {
    float eps;
} gg_rms_norm_back_attrs;

typedef struct gg_l2_norm_attrs {
    float eps;
} gg_l2_norm_attrs;

typedef gg_l2_norm_attrs gg_l2_norm_back_attrs;
