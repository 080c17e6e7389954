/* Attributes of sparse latent attention. */
#pragma once
#include <stdint.h>

typedef struct gg_sparse_flash_mla_attrs {
    float softmax_scale;
    int64_t cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right;
    int32_t layout_q, layout_kv;
} gg_sparse_flash_mla_attrs;

typedef gg_sparse_flash_mla_attrs gg_sparse_flash_mla_grad_attrs;
