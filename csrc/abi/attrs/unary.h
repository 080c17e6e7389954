/* Attributes of functions of one element. */
#pragma once
#include <stdint.h>

typedef struct gg_leaky_relu_attrs {
    float negative_slope;
} gg_leaky_relu_attrs;

typedef gg_leaky_relu_attrs gg_leaky_relu_back_attrs;

typedef struct gg_clamp_attrs {
    float min, max;
} gg_clamp_attrs;

typedef gg_clamp_attrs gg_clamp_back_attrs;

typedef struct gg_xielu_attrs {
    float alpha_n, alpha_p, beta, eps;
} gg_xielu_attrs;

typedef gg_xielu_attrs gg_xielu_back_attrs;
