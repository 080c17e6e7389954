"""Our ops against numbers of ggml's: values, and gradients of sum(out * w) or of a scalar result.

The files in golden/ggml were written by ggml itself (commit d99724f2b141, CPU, f32).  GGRAD_GOLDEN=<folder> runs
over another set.  A file that is missing fails, and so does one that nothing here knows.

Tolerance: 2e-5 of the largest magnitude, about 170 roundings of f32: both sides round, and add up some tens of
terms in different orders.  ROUGH lists where ggml itself rounds more, and why.
"""

import inspect
import json
import os
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg

GOLDEN = Path(os.environ.get("GGRAD_GOLDEN", Path(__file__).parent / "golden")) / "ggml"
BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]
RTOL = 2e-5

# -- how each case is said in ggrad ---------------------------------------------------------------------------
# `i` holds the inputs by name, `p` the parameters of the file.  Shapes are ggml's reversed.


def unary(*names):
    return {name: lambda i, p, f=name: getattr(gg, f)(i.x) for name in names}


def glu(name):
    return {
        f"{name}_single": lambda i, p: getattr(gg, name)(i.x),
        f"{name}_swapped": lambda i, p: getattr(gg, name)(i.x, swapped=True),
        f"{name}_split": lambda i, p: getattr(gg, name)(i.a, i.b),
    }


def rope(i, p):
    names = ("n_dims", "n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
    return gg.rope(i.x, i.pos, i.get("ff"), mode=p["mode"], **{name: p[name] for name in names})


def rope_multi(i, p):
    names = ("n_dims", "mode", "sections", "freq_base", "freq_scale", "ext_factor", "attn_factor")
    return gg.rope_multi(i.x, i.pos.reshape(4, -1), **{name: p[name] for name in names})


def flash_attn(i, p):
    options = {name: p[name] for name in ("scale", "max_bias", "logit_softcap")}
    return gg.flash_attn_ext(i.q, i.k, i.v, i.get("mask"), sinks=i.get("sinks"), **options)


def attention(i, p):
    """One batch, decomposed in ggml; the mask is a constant of f32."""
    q, k, v = (t.reshape(1, *t.shape) for t in (i.q, i.k, i.v))
    return gg.flash_attn_ext(q, k, v, i.mask, scale=p["scale"])


def pad(i, p):
    pairs = p.get("lp_rp") or [n for right in p["p"] for n in (0, right)]
    x = i.x.reshape((1,) * (4 - i.x.ndim) + i.x.shape)
    return gg.pad(x, left=tuple(pairs[6::-2]), right=tuple(pairs[7::-2]))


def by_gradient(forward):
    """A *_back case: what it computes from dy is a gradient of ours.  Where x does not matter the file has none."""

    def run(i, p):
        x = gg.set_param(i.setdefault("x", np.zeros(i.dy.shape)))
        return gg.Graph().build_backward_expand(gg.sum(forward(i, p) * i.dy)).grad(x)

    return run


def cross_entropy_back(i, p):
    graph = gg.Graph()
    gg.set_param(i.logits)
    return graph.build_backward_expand(gg.cross_entropy_loss(i.logits, i.labels), seed=i.g).grad(i.logits)


def steps(p):
    """Strides, paddings and dilations of two axes, which ggml counts from the innermost."""
    return {name: (p[f"{c}1"], p[f"{c}0"]) for name, c in (("stride", "s"), ("padding", "p"), ("dilation", "d"))}


def pool_1d(i, p):
    return gg.pool_1d(i.x, p["op"], p["k0"], p["s0"], p["p0"])


def pool_2d(i, p):
    kernel, stride, padding = ((p[f"{c}1"], p[f"{c}0"]) for c in "ksp")
    return gg.pool_2d(i.x, mode=p["op"], kernel=kernel, stride=stride, padding=padding)


def interpolate(i, p):
    flags = dict(align_corners=bool(p["mode"] & 256), antialias=bool(p["mode"] & 512))
    return gg.interpolate(i.x, size=p["ne"][1::-1], mode=gg.InterpolationMode(p["mode"] & 255), **flags)


def rows_of(width, *results):
    return gg.concat(*(t.reshape(-1) for t in results), axis=0).reshape(-1, width)


def window(t, ne, strides, offset):
    return gg.view(t, shape=tuple(reversed(ne)), strides=(*reversed(strides), 4), offset=offset)


def ffn(x, g, wg, wu, wd, eps):
    normed = gg.rms_norm(x, g, eps=eps)
    return gg.mul_mat(wd, gg.swiglu(gg.mul_mat(wg, normed), gg.mul_mat(wu, normed)))


def llama_layer(i, p):
    tokens, heads, kv_heads, d = p["T"], p["n_head"], p["n_head_kv"], p["n_dims"]
    x = gg.get_rows(i.emb, i.tok)
    normed = gg.rms_norm(x, i.g1, eps=p["eps"])

    def project(w, n, rotate=True):
        t = gg.mul_mat(w, normed).reshape(tokens, n, d)
        if rotate:
            t = gg.rope(t, i.pos, mode="neox", freq_base=p["freq_base"])
        return t.permute(1, 0, 2).reshape(1, n, tokens, d)

    q, k, v = project(i.wq, heads), project(i.wk, kv_heads), project(i.wv, kv_heads, rotate=False)
    out = gg.flash_attn_ext(q, k, v, i.mask, scale=d**-0.5)
    x = x + gg.mul_mat(i.wo, out.reshape(tokens, heads * d))
    x = x + ffn(x, i.g2, i.wg, i.wu, i.wd, p["eps"])
    return gg.cross_entropy_loss(gg.mul_mat(i.out, x), i.labels)


CALLS = {
    # one operand
    **unary(
        "abs", "cos", "elu", "exp", "gelu", "gelu_erf", "gelu_quick", "log", "neg", "relu", "sigmoid", "silu", "sin"
    ),
    **unary("ceil", "expm1", "floor", "hardsigmoid", "hardswish", "round", "sgn", "step", "trunc"),
    **unary("softplus", "sqr", "sqrt", "sum", "sum_rows", "tanh", "argmax"),
    "mean": lambda i, p: gg.mean_rows(i.x),  # ggml's is per row
    "leaky_relu": lambda i, p: gg.leaky_relu(i.x, negative_slope=p["negative_slope"]),
    "count_equal": lambda i, p: gg.count_equal(i.a, i.b).reshape(1),
    "cumsum": lambda i, p: gg.cumsum(i.x),
    "clamp": lambda i, p: gg.clamp(i.x, min=p["min"], max=p["max"]),
    "scale": lambda i, p: gg.scale(i.x, factor=p["s"]),
    "scale_bias": lambda i, p: gg.scale(i.x, factor=p["s"], bias=p["b"]),
    "silu_back": by_gradient(lambda i, p: gg.silu(i.x)),
    "sgn_step_block": lambda i, p: (gg.step(i.x) + gg.sgn(i.x)) * i.y,
    "xielu": lambda i, p: gg.xielu(i.x, **{name: p[name] for name in ("alpha_n", "alpha_p", "beta", "eps")}),
    # two operands
    **{
        f"{op}_{how}": lambda i, p, f=op, tile=how == "bcast_repeat": getattr(gg, f)(i.a, i.b, tile=tile)
        for op, hows in {
            "add": ("same", "bcast_col", "bcast_repeat", "bcast_row", "bcast_scalar"),
            "sub": ("same", "bcast_const"),
            "mul": ("same", "bcast_col", "bcast_repeat", "bcast_row"),
            "div": ("same", "bcast_const"),
        }.items()
        for how in hows
    },
    "add1_a_only": lambda i, p: gg.add1(i.a, i.b),
    "multi_use": lambda i, p: i.x * i.x + (gg.sin(i.x) + 0.5 * i.x),
    "mse_loss": lambda i, p: gg.sum(gg.sqr(i.x - i.y)) * (1 / p["n"]),
    **glu("swiglu"),
    **glu("geglu"),
    **glu("geglu_erf"),
    **glu("geglu_quick"),
    **glu("reglu"),
    "swiglu_oai": lambda i, p: gg.swiglu_oai(i.a, i.b, alpha=p["alpha"], limit=p["limit"]),
    # copies, views, tiles
    "dup": lambda i, p: gg.dup(i.x),
    "cont_same": lambda i, p: gg.cont(i.x),
    "transpose_cont": lambda i, p: gg.cont(i.x.T),
    "permute_cont": lambda i, p: gg.cont(i.x.permute(1, 3, 0, 2)),  # ggml's 2, 0, 3, 1
    "permute_nocont": lambda i, p: i.x.permute(0, 2, 1, 3),
    "cont_2d_of_permute": lambda i, p: gg.cont(i.x.permute(0, 2, 1)).reshape(6, 8),
    "cpy_reshape": lambda i, p: gg.cpy(i.x, i.dst),
    "cpy_permuted": lambda i, p: gg.cpy(i.x.T, i.dst),
    "cast_f16": lambda i, p: gg.cast(gg.cast(i.x, dtype=gg.F16), dtype=gg.F32),
    "reshape": lambda i, p: gg.sqr(i.x.reshape(5, 3, 4)),
    "repeat": lambda i, p: gg.repeat(i.x, shape=(3, 2, 8, 6)),
    "repeat_4d": lambda i, p: gg.repeat_4d(i.x, 1, 2, 4, 10),
    "repeat_back": lambda i, p: gg.repeat_back(i.x, shape=(2, 1, 4, 3)),
    "acc": lambda i, p: gg.acc(i.a, i.b, strides=(p["nb2"], p["nb1"], 4), offset=p["offset"]),
    "set": lambda i, p: gg.set(i.a, i.b, strides=(p["nb2"], p["nb1"], 4), offset=p["offset"]),
    "set_1d": lambda i, p: gg.set_1d(i.a, i.b, p["offset"]),
    "view_1d_overlap": lambda i, p: window(i.x, [6], [], 0) + window(i.x, [6], [], 8),
    "view_2d_strided": lambda i, p: gg.cont(window(i.x, [3, 2], [p["nb1"]], p["offset"])),
    "view_3d": lambda i, p: gg.cont(window(i.x, p["ne"], [p["nb1"], p["nb2"]], p["offset"])),
    "view_4d": lambda i, p: gg.cont(window(i.x, p["ne"], [p["nb1"], p["nb2"], p["nb3"]], p["offset"])),
    **{f"concat_dim{d}": lambda i, p: gg.concat(i.a, i.b, axis=3 - p["dim"]) for d in range(4)},
    "pad": pad,
    "pad_ext": pad,
    "pad_circular": lambda i, p: gg.pad_circular(i.x, p["lp_rp"][4::-2], p["lp_rp"][5::-2]),
    "pad_reflect_1d": lambda i, p: gg.pad_reflect_1d(i.x, p["p0"], p["p1"]),
    "roll": lambda i, p: gg.roll(i.x, p["shift"][::-1]),
    "arange": lambda i, p: gg.neg(gg.neg(gg.arange(p["start"], p["stop"], p["step"]))),
    "fill": lambda i, p: gg.fill(i.x, p["c"]),
    "diag": lambda i, p: gg.diag(i.x),
    "diag_mask_inf": lambda i, p: gg.diag_mask_inf(i.x, p["n_past"]),
    "diag_mask_zero": lambda i, p: gg.diag_mask_zero(i.x, p["n_past"]),
    **{f"tri_{kind}": lambda i, p: gg.tri(i.x, p["type"]) for kind in ("lower", "lower_diag", "upper", "upper_diag")},
    # rows
    "get_rows": lambda i, p: gg.get_rows(i.x, i.idx),
    "get_rows_f16": lambda i, p: gg.get_rows(i.x, i.idx),
    "get_rows_batched": lambda i, p: gg.get_rows(i.x, i.idx),
    "set_rows": lambda i, p: gg.set_rows(i.a, i.b, i.idx),
    "get_rows_back": lambda i, p: gg.get_rows_back(i.dy, i.idx, rows=p["ne"][1]),
    # matrices
    **{
        f"mul_mat_{kind}": lambda i, p: gg.mul_mat(i.a, i.b)
        for kind in ("2d", "batched", "gqa", "k1", "vec", "f16_weight")
    },
    "mul_mat_src1_permuted": lambda i, p: gg.mul_mat(i.a, i.b.permute(1, 0, 2)),
    "mul_mat_id": lambda i, p: gg.mul_mat_id(i.get("as"), i.b, i.ids),
    "add_id": lambda i, p: gg.add_id(i.a, i.b, i.ids),
    "out_prod": lambda i, p: gg.out_prod(i.a, i.b),
    # norms, softmax, losses
    "group_norm": lambda i, p: gg.group_norm(i.x, p["n_groups"], eps=p["eps"]),
    "l2_norm": lambda i, p: gg.l2_norm(i.x, eps=p["eps"]),
    "norm": lambda i, p: gg.norm(i.x, eps=p["eps"]),
    "rms_norm": lambda i, p: gg.rms_norm(i.x, eps=p["eps"]),
    "rms_norm_affine": lambda i, p: gg.rms_norm(i.x, i.g, eps=p["eps"]) + i.h,
    "rms_norm_back": by_gradient(lambda i, p: gg.rms_norm(i.x, eps=p["eps"])),
    "soft_max": lambda i, p: gg.soft_max(i.x),
    "soft_max_ext_scale": lambda i, p: gg.soft_max(i.x, scale=p["scale"]),
    "soft_max_ext_mask_f32": lambda i, p: gg.soft_max(i.x, i.mask, scale=p["scale"]),
    "soft_max_sinks": lambda i, p: gg.soft_max(i.x, None, i.s, scale=p["scale"]),
    "soft_max_ext_mask_heads": lambda i, p: gg.soft_max(i.x, i.mask, scale=p["scale"]),
    "soft_max_ext_mask_f16_causal": lambda i, p: gg.soft_max(
        i.x, i.mask[:5], scale=p["scale"]
    ),  # ggml ignores more rows
    "diag_mask_inf_softmax": lambda i, p: gg.soft_max(gg.diag_mask_inf(i.x, p["n_past"])),
    "cross_entropy_loss": lambda i, p: gg.cross_entropy_loss(i.logits, i.labels),
    "cross_entropy_soft_labels": lambda i, p: gg.cross_entropy_loss(i.logits, i.labels),
    "cross_entropy_scaled": lambda i, p: gg.cross_entropy_loss(i.logits, i.labels) * p["s"],
    "cross_entropy_loss_back": cross_entropy_back,
    # positions and attention
    **{
        f"rope_{kind}": rope
        for kind in ("normal", "normal_partial", "neox", "neox_partial", "neox_yarn_ff", "yarn", "freq_factors")
    },
    **{f"rope_{kind}": rope_multi for kind in ("imrope", "mrope", "vision")},
    "rope_back": by_gradient(lambda i, p: gg.rope(i.x, i.pos, n_dims=p["n_dims"], freq_base=p["freq_base"])),
    **{
        f"flash_attn_{kind}": flash_attn
        for kind in (
            "f16_gqa_causal",
            "f16_sinks_softcap",
            "f32_alibi",
            "f32_batch",
            "f32_causal",
            "f32_gqa_causal",
            "f32_n64",
            "f32_nomask",
            "f32_sinks",
        )
    },
    **{f"flash_attn_{kind}": flash_attn for kind in ("f32_randmask_dv", "f32_softcap", "f32_vec1")},
    "attention_gqa": attention,
    "attention_mha_nomask": attention,
    # orders and choices
    "argsort_asc": lambda i, p: gg.argsort(i.x),
    "argsort_desc": lambda i, p: gg.argsort(i.x, order="desc"),
    "argsort_top_k": lambda i, p: gg.top_k(i.x, k=p["k"]),
    "lightning_indexer": lambda i, p: gg.lightning_indexer(i.q, i.k, i.weights, i.mask),
    # convolutions and images
    **{
        name: lambda i, p: gg.conv_2d(i.k, i.x, **steps(p))
        for name in ("conv2d_f32_im2col", "conv_2d", "conv_2d_direct")
    },
    **{name: lambda i, p: gg.conv_2d_dw(i.k, i.x, **steps(p)) for name in ("conv_2d_dw", "conv_2d_dw_direct")},
    # of several signals ggml's conv_1d makes [OC, N, OW], and calls that [N, OC, OW]
    "conv_1d": lambda i, p: gg.conv_1d(i.k, i.x, p["s0"], p["p0"], p["d0"]).permute(1, 0, 2).reshape(2, 4, 9),
    "conv_1d_dw": lambda i, p: gg.conv_1d_dw(i.k, i.x, p["s0"], p["p0"], p["d0"]),
    "conv_3d_direct": lambda i, p: gg.conv_3d(
        i.k, i.x, channels=p["IC"], stride=p["s"][::-1], padding=p["p"][::-1], dilation=p["d"][::-1]
    ),
    **{
        name: lambda i, p: gg.conv_transpose_1d(i.k, i.x, p["s0"], p["p0"], p["d0"])
        for name in ("conv_transpose_1d", "conv_transpose_1d_f16")
    },
    # of several images ggml's conv_transpose_2d_p0 does the first alone
    "conv_transpose_2d_p0": lambda i, p: gg.conv_transpose_2d(
        i.k, i.x * gg.tensor(np.array([1.0, 0.0]).reshape(2, 1, 1, 1)), p["stride"]
    ),
    "im2col_1d": lambda i, p: gg.im2col(i.x, i.k.shape[-1], p["s0"], p["p0"], p["d0"]),
    **{name: lambda i, p: gg.im2col(i.x, i.k.shape[-2:], **steps(p)) for name in ("im2col_2d", "im2col_2d_stride_dil")},
    "im2col_3d": lambda i, p: gg.im2col_3d(
        i.x, channels=p["IC"], stride=p["s"][::-1], padding=p["p"][::-1], dilation=p["d"][::-1], kernel=i.k.shape[1:]
    ),
    "im2col_back": lambda i, p: gg.im2col_back(i.dcol, i.k.shape[-2:], p["ne"][1::-1], **steps(p)),
    "col2im_1d": lambda i, p: gg.col2im_1d(i.x, p["oc"], p["s0"], p["p0"]),
    "ssm_conv": lambda i, p: gg.ssm_conv(i.sx, i.c),
    **dict.fromkeys(("pool_1d_avg", "pool_1d_max"), pool_1d),
    **dict.fromkeys(("pool_2d_avg", "pool_2d_avg_pad", "pool_2d_max", "pool_2d_max_pad"), pool_2d),
    "pool_2d_back_max": by_gradient(pool_2d),
    "upscale_nearest": lambda i, p: gg.upscale(i.x, p["scale"], "nearest"),
    "upscale_bilinear": lambda i, p: gg.upscale(i.x, p["scale"], "bilinear"),
    **dict.fromkeys(
        ("interp_bicubic", "interp_bilinear_align", "interp_bilinear_antialias_down", "interp_nearest_odd"), interpolate
    ),
    "win_part": lambda i, p: gg.win_part(i.x, p["w"]),
    "win_unpart": lambda i, p: gg.win_unpart(i.x, (p["h0"], p["w0"])),
    "get_rel_pos": lambda i, p: gg.get_rel_pos(i.a, p["qh"], p["kh"]),
    "add_rel_pos": lambda i, p: gg.add_rel_pos(i.a, i.pw, i.ph),
    "timestep_embedding": lambda i, p: gg.timestep_embedding(i.t, p["dim"], p["max_period"]),
    # hyper-connections, systems
    "dsv4_hc_comb": lambda i, p: gg.dsv4_hc_comb(i.mixes, i.scale, i.base, p["eps"], p["n_iter"]),
    "dsv4_hc_post": lambda i, p: gg.dsv4_hc_post(i.x, i.residual, i.post, i.comb),
    "dsv4_hc_pre": lambda i, p: gg.dsv4_hc_pre(i.x, i.weights),
    "solve_tri": lambda i, p: gg.solve_tri(i.A, i.B),
    # scans: ggml puts the states behind the outputs
    **{
        f"gated_delta_net{kind}": lambda i, p: rows_of(
            p["S"] * p["H_v"], *gg.gated_delta_net(i.q, i.k, i.v, i.g, i.beta, i.state, p["K"])
        )
        for kind in ("", "_K2", "_kda")
    },
    "gated_linear_attn": lambda i, p: rows_of(64, *gg.gated_linear_attn(i.k, i.v, i.q, i.g, i.state, p["scale"])),
    "rwkv_wkv6": lambda i, p: rows_of(64, *gg.rwkv_wkv6(i.k, i.v, i.r, i.tf, i.td, i.state)),
    "rwkv_wkv7": lambda i, p: rows_of(64, *gg.rwkv_wkv7(i.r, i.w, i.k, i.v, i.a, i.b, i.state)),
    **{
        f"ssm_scan_{kind}": lambda i, p: gg.concat(
            *(t.reshape(-1) for t in gg.ssm_scan(i.s, i.x, i.dt, i.A, i.B, i.C, i.ids, p["K"])), axis=0
        )
        for kind in ("mamba1", "mamba2", "mamba2_K3")
    },
    # small models
    "ffn_swiglu": lambda i, p: ffn(i.x, i.g, i.wg, i.wu, i.wd, p["eps"]),
    "mlp_ce": lambda i, p: gg.cross_entropy_loss(
        gg.mul_mat(i.w2, gg.relu(gg.mul_mat(i.w1, i.x) + i.b1)) + i.b2, i.labels
    ),
    "tiny_llama_layer": llama_layer,
}

F16_TABLE = "ggml looks gelu up in a table of f16 values: 11 bits, of an input rounded to f16 first"
F16_IM2COL = "ggml unfolds the image as f16; the gradients in graphlib/testing/cases/conv.py prove ours"
F16_KV = "ggml rounds q to f16 and adds up the values in f16, tens of them"
ROUGH = {
    **dict.fromkeys(["gelu", "gelu_quick", *glu("geglu"), *glu("geglu_quick")], (2e-3, F16_TABLE)),
    **dict.fromkeys(["flash_attn_f16_gqa_causal", "flash_attn_f16_sinks_softcap"], (2e-3, F16_KV)),
    "mul_mat_f16_weight": (1e-3, "ggml rounds the other operand to f16 too"),
    **dict.fromkeys(["conv_1d", "conv_1d_dw", "conv_2d", "conv_2d_dw"], (1e-3, F16_IM2COL)),
    **dict.fromkeys(
        ["conv_transpose_1d_f16", "conv_transpose_2d_p0"], (1e-3, "ggml rounds the image to f16 as the kernel is")
    ),
    "cast_f16": (1e-3, "our references do not round to f16"),
}

# files whose `out` was overwritten with zeros before it was read: their own loss = sum(out * w), which is not 0, proves
# it, and stands for the values instead
OVERWRITTEN = {"rms_norm"}

# what ggrad does not have yet: the name that will be an op (or an op's argument), and the cases waiting for it
NOT_YET = {}
QUANTIZED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
ON_THEIR_OWN = {"cast_f16_bf16", "top_k", "opt_step_adamw", "opt_step_sgd", "soft_max_ext_back"}  # tests below
ON_THEIR_OWN |= {"sample_gguf", *(f"quant_{name}" for name in QUANTIZED)}


class Inputs:
    """The inputs of a case as attributes."""

    def __init__(self, case: str, file) -> None:
        self._by_name = {}
        for key in file:
            if key.startswith("in_"):
                param = f"grad_{key[3:]}" in file
                self._by_name[key[3:]] = gg.tensor(file[key], name=key[3:], param=param)

    def __getattr__(self, name: str) -> gg.Tensor:
        return self._by_name[name]

    def get(self, name: str):
        return self._by_name.get(name)

    def setdefault(self, name: str, value):
        return self._by_name.setdefault(name, gg.tensor(value))


def read(case: str):
    names = [f"golden_ggml_{case}.npz", f"{case}.npz"]
    found = [GOLDEN / name for name in names if (GOLDEN / name).exists()]
    assert found, f"{names[0]} is missing in {GOLDEN}"
    return np.load(found[0])


def trimmed(array: np.ndarray) -> np.ndarray:
    """Without leading axes of size 1, which the files leave out."""
    while array.ndim and array.shape[0] == 1:
        array = array[0]
    return array


def require_close(got, expected, rtol, what):
    got, expected = trimmed(np.asarray(got)), trimmed(np.asarray(expected))
    assert got.shape == expected.shape, what
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * scale, err_msg=what)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CALLS)
def test_values_and_gradients_are_those_of_ggml(case, backend):
    file = read(case)
    meta = json.loads(str(file["meta"]))
    rtol, _ = ROUGH.get(case, (RTOL, ""))
    inputs = Inputs(case, file)
    out = CALLS[case](inputs, meta["params"])
    graph = gg.Graph().build_forward_expand(out)
    wanted = {key[5:]: file[key] for key in file if key.startswith("grad_")}
    if wanted:
        loss = gg.sum(out * gg.tensor(file["w"].reshape(out.shape))) if meta["loss"] == "sum(out*w)" else out
        graph.build_backward_expand(loss)
    graph.compute(backend=backend)

    if case in OVERWRITTEN:
        assert not file["out"].any() and file["loss"] != 0
    else:
        require_close(out.numpy(), file["out"], rtol, case)
    if wanted:
        terms = np.abs(file["w"] * out.numpy().reshape(file["w"].shape)).sum() if "w" in file else abs(file["loss"])
        assert abs(graph.loss.item() - file["loss"]) <= rtol * terms, "the loss"
    for name, gradient in wanted.items():
        require_close(graph.grad(getattr(inputs, name)).numpy(), gradient, rtol, f"gradient of {name}")


def exists(name: str) -> bool:
    """Whether ggrad has an op of the name, or an op's argument (`op.argument`)."""
    op, _, argument = name.partition(".")
    if not hasattr(gg, op):
        return False
    return not argument or argument in inspect.signature(getattr(gg, op)).parameters


@pytest.mark.parametrize("name", NOT_YET)
def test_what_waits_for_an_op_is_checked_once_it_exists(name):
    assert not exists(name), f"{name} exists now: move its cases from NOT_YET to CALLS"


def test_every_file_is_known_and_every_case_has_its_file():
    files = {path.stem.removeprefix("golden_ggml_") for path in GOLDEN.glob("*.npz")}
    waiting = {case for cases in NOT_YET.values() for case in cases}
    assert files == set(CALLS) | waiting | ON_THEIR_OWN
    assert not set(CALLS) & waiting


def test_the_copy_stays_small():
    own = Path(__file__).parent / "golden"
    assert sum(path.stat().st_size for path in own.rglob("*") if path.is_file()) <= 8 * 2**20


# -- cases with a form of their own ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_soft_max_ext_back(backend):
    """ggml gives the softmax, not its input: the input is its logarithm."""
    file = read("soft_max_ext_back")
    scale = json.loads(str(file["meta"]))["params"]["scale"]
    x = gg.tensor(np.log(file["in_y"].astype(np.float64)) / scale, param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.soft_max(x, scale=scale) * gg.tensor(file["in_dy"])))
    require_close(graph.compute(backend=backend).grad(x).numpy(), file["out"], RTOL, "soft_max_ext_back")


@pytest.mark.parametrize("backend", BACKENDS)
def test_top_k_chooses_what_ggml_does(backend):
    """ggml's order is none in particular."""
    file = read("top_k")
    top = gg.top_k(gg.tensor(file["in_x"]), k=3)
    gg.Graph().build_forward_expand(top).compute(backend=backend)
    np.testing.assert_array_equal(np.sort(top.numpy()), np.sort(file["out"]))


@pytest.mark.native
@pytest.mark.parametrize(
    "dtype, bits, values", [("F16", "f16_bits", "f16_as_f32"), ("BF16", "bf16_bits", "bf16_as_f32")]
)
def test_roundings_to_halves_are_those_of_ggml(dtype, bits, values):
    """To the bit, of leaves and in kernels; of a NaN only that it is one."""
    file, dtype = read("cast_f16_bf16"), getattr(gg, dtype)
    number = ~np.isnan(file["in_x"])
    leaf = gg.tensor(file["in_x"], dtype=dtype)
    np.testing.assert_array_equal(leaf.memory().view(np.uint16)[number], file[bits][number])
    there = gg.cast(gg.tensor(file["in_x"]), dtype=dtype)
    back = gg.cast(there, dtype=gg.F32)
    gg.Graph().build_forward_expand(there, back).compute(backend="native")
    np.testing.assert_array_equal(there.numpy().astype(np.float32), file[values])
    np.testing.assert_array_equal(back.numpy(), file[values])


@pytest.mark.parametrize("backend", BACKENDS)
def test_adamw_takes_the_steps_of_ggml(backend):
    file = read("opt_step_adamw")
    x, m, v = gg.tensor(file["w0"], param=True), *(gg.tensor(np.zeros((5, 7)), role="moment") for _ in "mv")
    grad, hyper = gg.tensor(shape=(5, 7)), gg.tensor(shape=7)
    graph = gg.Graph().build_forward_expand(gg.opt_step_adamw(x, grad, m, v, hyper))
    for step in range(4):
        grad.set(file["grads"][step])
        hyper.set(file["params"][step])
        graph.compute(backend=backend)
        for leaf, name in ((x, "w"), (m, "m"), (v, "v")):
            require_close(leaf.numpy(), file[name][step], RTOL, f"{name} after step {step}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sgd_takes_the_steps_of_ggml(backend):
    file = read("opt_step_sgd")
    x, grad, hyper = gg.tensor(file["w0"], param=True), gg.tensor(shape=(5, 7)), gg.tensor(shape=2)
    graph = gg.Graph().build_forward_expand(gg.opt_step_sgd(x, grad, hyper))
    for step in range(4):
        grad.set(file["grads"][step])
        hyper.set(file["params"][step])
        graph.compute(backend=backend)
        require_close(x.numpy(), file["w"][step], RTOL, f"w after step {step}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_values_are_those_of_ggml(name, backend):
    """Blocks decode to the same bits.  ggml's own product rounds the other operand to 8 bits first, so ours is compared
    with the exact product of the decoded values, from which ggml's is up to 2 % away."""
    file = read(f"quant_{name}")
    w, x = gg.tensor(file["qbytes"], dtype=getattr(gg, name.upper())), gg.tensor(file["x"], param=True)
    np.testing.assert_array_equal(w.numpy(), file["deq"])
    whole, rows = gg.cast(w, dtype=gg.F32), gg.get_rows(w, gg.tensor(file["get_rows_idx"]))
    out = gg.mul_mat(w, x)
    graph = gg.Graph().build_forward_expand(whole, rows)
    graph.build_backward_expand(gg.sum(out * gg.tensor(file["wt"])))
    gg.set_output(out)
    graph.compute(backend=backend)
    np.testing.assert_array_equal(whole.numpy(), file["deq"])
    np.testing.assert_array_equal(rows.numpy(), file["get_rows"])
    require_close(out.numpy(), file["out_exact_deq"], 1e-6, name)
    require_close(out.numpy(), file["out"], 2e-2, name)
    require_close(graph.grad(x).numpy(), file["grad_x"], 1e-6, name)


def test_a_gguf_file_is_read_as_ggml_reads_it():
    file, leaves = read("sample_gguf"), gg.load_gguf(GOLDEN / "golden_ggml_sample.gguf")
    assert set(leaves) == {key[2:] for key in file if key.startswith("t_")}
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf.numpy(), file[f"t_{name}"])
    assert leaves["q8.weight"].dtype is gg.Q8_0 and leaves["bf16.weight"].dtype is gg.BF16
    np.testing.assert_array_equal(leaves["q4.weight"].memory(), file["raw_q4.weight"])
    frozen = gg.load_gguf(GOLDEN / "golden_ggml_sample.gguf", frozen=True)
    assert all(leaf.frozen for leaf in frozen.values()) and not any(leaf.frozen for leaf in leaves.values())
