/* Attributes of attention. */
#pragma once
#include <stdint.h>

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
