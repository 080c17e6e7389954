/* Attributes of gated units. */
#pragma once
#include <stdint.h>

typedef struct gg_swiglu_attrs {
    int32_t swapped;
} gg_swiglu_attrs;

typedef gg_swiglu_attrs gg_swiglu_back_attrs;

typedef gg_swiglu_attrs gg_geglu_attrs;

typedef gg_swiglu_attrs gg_geglu_back_attrs;

typedef gg_swiglu_attrs gg_geglu_erf_attrs;

typedef gg_swiglu_attrs gg_geglu_erf_back_attrs;

typedef gg_swiglu_attrs gg_geglu_quick_attrs;

typedef gg_swiglu_attrs gg_geglu_quick_back_attrs;

typedef gg_swiglu_attrs gg_reglu_attrs;

typedef gg_swiglu_attrs gg_reglu_back_attrs;

typedef struct gg_swiglu_oai_attrs {
    float alpha, limit;
    int32_t swapped;
} gg_swiglu_oai_attrs;

typedef gg_swiglu_oai_attrs gg_swiglu_oai_back_attrs;
