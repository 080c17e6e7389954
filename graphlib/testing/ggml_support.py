"""What ggml's own backward pass (version 0.21.0, `ggml_compute_backward`) does with each of its ops.

"full"; "partial": not for every shape, layout or input; "aborts": the process ends; "zero": of an op whose result is
an integer, or has no slope.
"""

_BY_ANSWER = {
    "full": """
        abs add cos diag_mask_inf diag_mask_zero dup exp expm1 im2col log mul neg permute pool_2d
        relu repeat repeat_back reshape rms_norm scale silu sin softplus sqr sqrt sum sum_rows
        transpose
    """,
    "aborts": """
        add_id add_rel_pos ceil clamp col2im_1d concat conv_2d conv_2d_dw conv_3d conv_transpose_1d
        conv_transpose_2d cross_entropy_loss_back cumsum custom diag dsv4_hc_comb dsv4_hc_post
        dsv4_hc_pre elu fill flash_attn_back flash_attn_ext floor gated_delta_net gated_linear_attn
        geglu geglu_erf geglu_quick gelu gelu_erf gelu_quick get_rel_pos get_rows_back group_norm
        hardsigmoid hardswish im2col_3d im2col_back l2_norm leaky_relu lightning_indexer map_custom1
        map_custom2 map_custom3 mul_mat_id norm out_prod pad pad_reflect_1d pool_1d pool_2d_back
        reglu rms_norm_back roll rope_back round rwkv_wkv6 rwkv_wkv7 set_rows sigmoid silu_back
        soft_max_back solve_tri ssm_conv ssm_scan swiglu_oai tanh timestep_embedding tri trunc
        upscale win_part win_unpart xielu
    """,
    "partial": """
        acc add1 cont cpy cross_entropy_loss div get_rows mean_rows mul_mat rope set soft_max sub swiglu
        view
    """,
    "zero": """
        arange argmax argsort count_equal opt_step_adamw opt_step_sgd sgn step top_k
    """,
}

GGML = {name: answer for answer, names in _BY_ANSWER.items() for name in names.split()}
