/* The list of all kernels written in C.  A new one adds its name here and its file to all_kernels.h. */
#pragma once
#define GG_KERNELS(X) \
    X(accumulate) \
    X(add) \
    X(argmax) \
    X(cast) \
    X(cont) \
    X(div) \
    X(get_rows) \
    X(get_rows_back) \
    X(mean) \
    X(mul) \
    X(neg) \
    X(repeat) \
    X(repeat_back) \
    X(rope) \
    X(rope_back) \
    X(scale) \
    X(slice_add) \
    X(slice_back) \
    X(sub) \
    X(sum) \
    X(sum_rows) \
    X(zero_bytes)
