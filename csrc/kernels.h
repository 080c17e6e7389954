/* The list of all kernels written in C.  A new one adds its name here and its file to all_kernels.h. */
#pragma once
#define GG_KERNELS(X) \
    X(add) \
    X(norm) \
    X(norm_back) \
    X(rms_norm) \
    X(soft_max) \
    X(soft_max_back) \
    X(cross_entropy_class) \
    X(cross_entropy_class_back) \
    X(cross_entropy_soft) \
    X(cross_entropy_soft_back) \
    X(opt_step_adamw) \
    X(opt_step_sgd) \
    X(global_norm) \
    X(clip_factor) \
    X(rms_norm_back) \
    X(dropout) \
    X(get_rows) \
    X(get_rows_back) \
    X(rope) \
    X(rope_back) \
    X(flash_attn_ext) \
    X(flash_attn_back)
