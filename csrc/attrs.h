/* One struct for each op that takes attributes: the fields, in order, are the op's annotated
 * keyword-only parameters (float: float, int: int64_t, bool: int32_t, a tuple of ints: int64_t[4],
 * an IntEnum: int32_t).  A test compares the two, byte for byte. */

typedef struct gg_flash_attn_ext_attrs {
    float   scale, max_bias, logit_softcap;
    int32_t causal; /* 0: none, 1: top-left, 2: bottom-right */
} gg_flash_attn_ext_attrs;

typedef struct gg_flash_attn_back_attrs {
    float   scale, max_bias, logit_softcap;
    int32_t causal;
} gg_flash_attn_back_attrs;
