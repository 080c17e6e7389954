/* Attributes of hyper-connections. */
#pragma once
#include <stdint.h>

typedef struct gg_sinkhorn_attrs {
    float eps;
    int64_t n_iter;
} gg_sinkhorn_attrs;

typedef gg_sinkhorn_attrs gg_sinkhorn_back_attrs;
