/* The list of all kernels written in C.  A new one adds its name here and its file to all_kernels.h. */
#pragma once
#define GG_KERNELS(X) \
    X(add) \
    X(flash_attn_ext) \
    X(flash_attn_back)
