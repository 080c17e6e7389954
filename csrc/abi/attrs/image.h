/* Attributes of images. */
#pragma once
#include <stdint.h>

typedef struct gg_interpolate_attrs {
    int64_t size[4];
    int32_t mode, align_corners, antialias;
} gg_interpolate_attrs;

typedef struct gg_interpolate_back_attrs {
    int64_t size[4];
    int32_t mode, align_corners, antialias;
    int64_t shape[4];
} gg_interpolate_back_attrs;
