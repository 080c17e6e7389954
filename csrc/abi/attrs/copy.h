/* Attributes of ops that move elements. */
#pragma once
#include <stdint.h>

typedef struct gg_repeat_attrs {
    int64_t shape[4];
} gg_repeat_attrs;

typedef gg_repeat_attrs gg_repeat_back_attrs;

typedef struct gg_slice_back_attrs {
    int64_t shape[4], starts[4], steps[4];
} gg_slice_back_attrs;

typedef struct gg_slice_add_attrs {
    int64_t starts[4], steps[4];
} gg_slice_add_attrs;

typedef struct gg_strided_back_attrs {
    int64_t shape[4], strides[4], offset;
} gg_strided_back_attrs;

typedef struct gg_acc_attrs {
    int64_t strides[4], offset;
} gg_acc_attrs;

typedef gg_acc_attrs gg_set_attrs;

typedef struct gg_triangle_attrs {
    int64_t diagonal;
    int32_t upper;
    float fill;
} gg_triangle_attrs;

typedef struct gg_concat_attrs {
    int64_t axis;
} gg_concat_attrs;
