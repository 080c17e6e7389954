"""Attention over latent keys and values, and a mixture of experts with some that every token uses: DeepSeek-V2 (2024,
https://arxiv.org/abs/2405.04434), as GGUF files of "deepseek2" have it.

Keys and values are expanded from a short row for each token; a part of each key, the same for all heads, is turned by
the position.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .. import ops
from ..core.errors import FormatError
from ..core.tensor import Tensor
from .builder import Builder


def deepseek2(b: Builder, x: Tensor) -> Tensor:
    """Blocks of latent attention and a feed-forward part; the first few of those have no experts."""
    m = b.config.extra
    assert m is not None
    for i in range(b.config.layers):
        n = f"blk.{i}."
        x = x + _attention(b, i, b.norm(n + "attn_norm", x))
        h = b.norm(n + "ffn_norm", x)
        if i < m.count("leading_dense_block_count", 0, least=0) or not b.config.experts:
            x = x + b.gated(i, h, "swiglu")
        else:
            x = x + _experts(b, i, h)
        b.blocks.append(x)
    return b.norm("output_norm", x)


def _attention(b: Builder, i: int, h: Tensor) -> Tensor:
    c, n = b.config, f"blk.{i}."
    m = c.extra
    assert m is not None
    heads, latent, turned = c.heads[i], m.count("attention.kv_lora_rank"), c.rope.n_dims
    head_dim = m.count("attention.key_length_mla", c.head_dim)
    value_dim = m.count("attention.value_length_mla", c.value_dim)
    plain = head_dim - turned
    if plain < 1:
        raise FormatError(f"{m.path}: of keys of {head_dim} elements {turned} cannot be turned")
    batch, length, _ = h.shape
    if b.has(n + "attn_q_a.weight"):
        q = b.product(n + "attn_q_b", b.norm(n + "attn_q_a_norm", b.product(n + "attn_q_a", h)), heads * head_dim)
    else:
        q = b.product(n + "attn_q", h, heads * head_dim)
    q = b.heads(q, heads)
    row = b.product(n + "attn_kv_a_mqa", h, latent + turned)
    short = b.norm(n + "attn_kv_a_norm", row[..., :latent])
    rope, scale = c.rope, head_dim**-0.5
    if rope.ext_factor and (times := m.number("rope.scaling.yarn_log_multiplier", 0.0)):
        longer = math.log(1 / rope.freq_scale)
        scale *= (1 + times * longer) ** 2
        rope = replace(rope, attn_factor=rope.attn_factor / (1 + 0.1 * longer))  # only the angles are YaRN's
    k_turned = b.rope(row[..., latent:].reshape(batch, length, 1, turned), "normal", rope)
    q = ops.concat(q[..., :plain], b.rope(q[..., plain:], "normal", rope), axis=3)
    if b.has(n + "attn_kv_b.weight"):
        kv = b.heads(b.product(n + "attn_kv_b", short, heads * (plain + value_dim)), heads)
        k_plain, v = kv[..., :plain], kv[..., plain:]
    else:
        k_plain, v = _expanded(b, n, short, heads, plain, value_dim)
    k = ops.concat(k_plain, ops.repeat(k_turned, shape=(batch, length, heads, turned)), axis=3)
    return b.product(n + "attn_output", b.attention(i, q, k, v, scale=scale), c.width)


def _expanded(b: Builder, n: str, short: Tensor, heads: int, plain: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Plain keys and values of newer files, which keep a matrix for each head: k_b transposed, v_b as it is."""
    batch, length, latent = short.shape
    k_b, v_b = b.weights[n + "attn_k_b.weight"], b.weights[n + "attn_v_b.weight"]
    if k_b.shape != (heads, latent, plain) or v_b.shape != (heads, value_dim, latent):
        raise FormatError(
            f"{b.weights.file.path}: {k_b.name!r} and {v_b.name!r} are {k_b.shape} and {v_b.shape}, and must be "
            f"{(heads, latent, plain)} and {(heads, value_dim, latent)}"
        )
    if k_b.dtype.quantized:
        raise FormatError(f"{b.weights.file.path}: {k_b.name!r} is {k_b.dtype}; ggrad reads it as f32, f16 or bf16")
    rows = ops.repeat(short.reshape(batch, 1, length, latent), shape=(batch, heads, length, latent))
    keys = ops.mul_mat(ops.transpose(k_b), rows)
    values = ops.mul_mat(v_b, rows)
    return keys.permute(0, 2, 1, 3), values.permute(0, 2, 1, 3)


def _experts(b: Builder, i: int, h: Tensor) -> Tensor:
    m, n = b.config.extra, f"blk.{i}."
    assert m is not None
    if m.count("expert_group_count", 1, least=0) > 1:
        raise FormatError(f"{m.path}: experts in groups are not known")
    gates = {0: "softmax", 1: "softmax", 2: "sigmoid"}
    kind = m.count("expert_gating_func", 1, least=0)
    if kind not in gates:
        raise m.refuse(f"{m.arch}.expert_gating_func", f"is {kind}; known are {', '.join(map(str, gates))}")
    chosen = b.experts(
        i, h, gate=gates[kind], normalized=m.flag("expert_weights_norm"),
        factor=m.number("expert_weights_scale", 1.0) or 1.0,
    )  # fmt: skip
    gate, up = b.product(n + "ffn_gate_shexp", h), b.product(n + "ffn_up_shexp", h)
    return chosen + b.product(n + "ffn_down_shexp", ops.swiglu(gate, up), h.shape[-1])
