/* Attributes of pooling. */
#pragma once
#include <stdint.h>

typedef struct gg_pool_2d_attrs {
    int32_t mode;
    int64_t kernel[4], stride[4], padding[4];
    int32_t count_padding;
} gg_pool_2d_attrs;

typedef struct gg_pool_2d_back_attrs {
    int32_t mode;
    int64_t kernel[4], stride[4], padding[4];
    int32_t count_padding;
    int64_t size[4];
} gg_pool_2d_back_attrs;
