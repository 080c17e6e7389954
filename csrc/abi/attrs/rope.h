/* Attributes of rotary positions. */
#pragma once
#include <stdint.h>

typedef struct gg_rope_attrs {
    int64_t n_dims;
    int32_t mode;
    int64_t n_ctx_orig;
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    int64_t sections[4], offset;
} gg_rope_attrs;

typedef gg_rope_attrs gg_rope_back_attrs;
