/* Attributes of convolutions. */
#pragma once
#include <stdint.h>

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
