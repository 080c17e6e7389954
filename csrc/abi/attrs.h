/* One struct for each op that takes attributes: the fields, in order, are the op's annotated
 * keyword-only parameters (float: float, int: int64_t, bool: int32_t, a tuple of ints: int64_t[4],
 * an IntEnum: int32_t).  A test compares the two, byte for byte. */
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
typedef struct gg_get_rows_back_attrs {
    int64_t rows;
    int32_t batched;
} gg_get_rows_back_attrs;
typedef struct gg_l2_norm_attrs {
    float eps;
} gg_l2_norm_attrs;
typedef gg_l2_norm_attrs gg_l2_norm_back_attrs;
typedef struct gg_cumsum_attrs {
    int64_t axis;
    int32_t reverse;
} gg_cumsum_attrs;
typedef struct gg_soft_max_attrs {
    float scale, max_bias;
} gg_soft_max_attrs;
typedef gg_soft_max_attrs gg_soft_max_sinks_back_attrs;
typedef struct gg_soft_max_back_attrs {
    float scale;
} gg_soft_max_back_attrs;
enum gg_reduction { GG_ROWS = 0, GG_SUM = 1, GG_MEAN = 2 };
typedef struct gg_cross_entropy_class_attrs {
    int64_t ignore_index;
    float label_smoothing;
    int32_t reduction;
} gg_cross_entropy_class_attrs;
typedef struct gg_cross_entropy_class_back_attrs {
    int64_t ignore_index;
    float label_smoothing;
} gg_cross_entropy_class_back_attrs;
typedef struct gg_cross_entropy_soft_attrs {
    int32_t reduction;
} gg_cross_entropy_soft_attrs;
typedef struct gg_cross_entropy_soft_back_attrs {
    int32_t mean;
} gg_cross_entropy_soft_back_attrs;
typedef struct gg_clip_factor_attrs {
    float max_norm;
} gg_clip_factor_attrs;

typedef struct gg_rope_attrs {
    int64_t n_dims;
    int32_t mode;
    int64_t n_ctx_orig;
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    int64_t sections[4], offset;
} gg_rope_attrs;

typedef gg_rope_attrs gg_rope_back_attrs;

typedef struct gg_scale_attrs {
    float factor, bias;
} gg_scale_attrs;

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

typedef struct gg_dropout_attrs {
    float p;
    int64_t key;
} gg_dropout_attrs;

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

/* Who sees whom, and how scores become weights: both directions of attention begin with it.  Its size is a multiple of its
 * alignment, so that what follows lies where the op's record has it. */
typedef struct gg_attention_rules {
    float scale, logit_softcap;
    int32_t causal; /* 0: none, 1: top-left, 2: bottom-right */
    int64_t window[4], prefix;
    float dropout_p;
    int64_t dropout_key;
} gg_attention_rules;

typedef struct gg_flash_attn_ext_attrs {
    gg_attention_rules rules;
    float max_bias;
} gg_flash_attn_ext_attrs;

typedef struct gg_flash_attn_back_attrs {
    gg_attention_rules rules;
    int32_t qkv_gradient, sinks_gradient, mask_gradient;
} gg_flash_attn_back_attrs;

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

/* Convolutions: what is common comes first. */
typedef struct gg_conv_3d_attrs {
    int64_t channels, stride[4], padding[4], dilation[4];
} gg_conv_3d_attrs;
typedef struct gg_conv_3d_back_x_attrs {
    int64_t channels, stride[4], padding[4], dilation[4], size[4];
} gg_conv_3d_back_x_attrs;
typedef struct gg_conv_3d_back_k_attrs {
    int64_t channels, stride[4], padding[4], dilation[4], shape[4];
} gg_conv_3d_back_k_attrs;
typedef struct gg_im2col_3d_attrs {
    int64_t channels, stride[4], padding[4], dilation[4], kernel[4];
} gg_im2col_3d_attrs;
typedef struct gg_im2col_3d_back_attrs {
    int64_t channels, stride[4], padding[4], dilation[4], kernel[4], size[4];
} gg_im2col_3d_back_attrs;
typedef struct gg_conv_dw_attrs {
    int64_t stride[4], padding[4], dilation[4];
} gg_conv_dw_attrs;
typedef struct gg_conv_dw_back_x_attrs {
    int64_t stride[4], padding[4], dilation[4], size[4];
} gg_conv_dw_back_x_attrs;
typedef struct gg_conv_dw_back_k_attrs {
    int64_t stride[4], padding[4], dilation[4], kernel[4];
} gg_conv_dw_back_k_attrs;

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

typedef struct gg_interpolate_attrs {
    int64_t size[4];
    int32_t mode, align_corners, antialias;
} gg_interpolate_attrs;
typedef struct gg_interpolate_back_attrs {
    int64_t size[4];
    int32_t mode, align_corners, antialias;
    int64_t shape[4];
} gg_interpolate_back_attrs;

typedef struct gg_sinkhorn_attrs {
    float eps;
    int64_t n_iter;
} gg_sinkhorn_attrs;
typedef gg_sinkhorn_attrs gg_sinkhorn_back_attrs;

typedef struct gg_solve_tri_attrs {
    int32_t transposed;
} gg_solve_tri_attrs;

/* How inputs of Kimi Delta Attention are taken: all its ops begin with it. */
typedef struct gg_kda_form {
    float scale;
    int32_t l2norm;
    int32_t gate; /* 0: given, 1: softplus, 2: lower bound */
    float lower_bound;
    int32_t beta_form; /* 0: given, 1: sigmoid, 2: twice that */
    int32_t state_v_first;
} gg_kda_form;

typedef struct gg_kda_attrs {
    gg_kda_form form;
    int64_t chunk_size;
    int32_t final_state;
    int32_t keep; /* 0: nothing, 1: states, 2: all */
} gg_kda_attrs;

typedef struct gg_kda_back_attrs {
    gg_kda_form form;
    int64_t chunk_size;
    int64_t needs; /* bits: dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias */
} gg_kda_back_attrs;

typedef struct gg_kda_recurrent_attrs {
    gg_kda_form form;
    int32_t final_state;
} gg_kda_recurrent_attrs;

typedef struct gg_kda_recurrent_pool_attrs {
    gg_kda_form form;
} gg_kda_recurrent_pool_attrs;

typedef struct gg_kda_gate_attrs {
    int32_t gate;
    float lower_bound;
} gg_kda_gate_attrs;

typedef gg_kda_gate_attrs gg_kda_gate_back_attrs;

typedef struct gg_sparse_flash_mla_attrs {
    float softmax_scale;
    int64_t cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right;
    int32_t layout_q, layout_kv;
} gg_sparse_flash_mla_attrs;
typedef gg_sparse_flash_mla_attrs gg_sparse_flash_mla_grad_attrs;

typedef struct gg_argsort_attrs {
    int32_t order; /* 0: ascending, 1: descending */
} gg_argsort_attrs;

typedef struct gg_top_k_attrs {
    int64_t k;
} gg_top_k_attrs;
