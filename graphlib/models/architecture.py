"""How architectures are built, under the names that GGUF files have for them.

Each is a function from a `Builder` and the tokens' embeddings to the states from which the head makes logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import ops
from ..core.tensor import Tensor
from .builder import Builder
from .config import Rope
from .latent import deepseek2
from .recurrent import mamba, mamba2
from .rwkv import rwkv7


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    Attributes:
        name: as general.architecture says it.
        build: states [batch, tokens, width] of embeddings of the same shape.
        targets: last parts of the names of the matrices that are tuned unless others are asked for.
        recurrent: it carries states from token to token, so that sequences cannot share a row.
    """

    name: str
    build: Callable[[Builder, Tensor], Tensor]
    targets: tuple[str, ...]
    recurrent: bool = False


@dataclass(frozen=True)
class Style:
    """What transformers differ in, where the file does not say it.

    Attributes:
        rope: which elements are turned together; "" for none.
        norm: "rms" or "layer".
        unit: of the feed-forward part; "gelu" has no gate.
        local: whether a layer has the window, where there is one.
        local_rope: how positions turn in those layers.
        turned: whether positions turn anything in a layer.
        before, after: whether each part has a norm before it, and one after it.
        whole_qk: queries and keys are normalized over all heads at once.
        scaled: embeddings are multiplied with the root of the width.
    """

    rope: str = "normal"
    norm: str = "rms"
    unit: str = "swiglu"
    local: Callable[[int], bool] = lambda i: False
    local_rope: Callable[[Rope], Rope] = lambda r: r
    turned: Callable[[int], bool] = lambda i: True
    before: bool = True
    after: bool = False
    whole_qk: bool = False
    scaled: bool = False


def transformer(style: Style) -> Callable[[Builder, Tensor], Tensor]:
    """Blocks of attention and a feed-forward part, each added to what comes in."""

    def build(b: Builder, x: Tensor) -> Tensor:
        c = b.config
        if style.scaled:
            x = x * math.sqrt(c.width)
        if c.embedding_scale:
            x = x * c.embedding_scale
        if b.has("position_embd.weight"):
            x = x + ops.get_rows(b.weights["position_embd.weight"], b.positions)
        for i in range(c.layers):
            n = f"blk.{i}."
            h = b.norm(n + "attn_norm", x, style.norm) if style.before else x
            a = _self_attention(b, i, h, style)
            if style.after:
                a = b.norm(n + "post_attention_norm", a, style.norm)
            x = x + (a * c.residual_scale if c.residual_scale else a)
            h = b.norm(n + "ffn_norm", x, style.norm) if style.before else x
            f = _feed_forward(b, i, h, style)
            if style.after:
                f = b.norm(n + "post_ffw_norm", f, style.norm)
            x = x + (f * c.residual_scale if c.residual_scale else f)
            b.blocks.append(x)
        return b.norm("output_norm", x, style.norm)

    return build


def _self_attention(b: Builder, i: int, x: Tensor, style: Style) -> Tensor:
    c, n = b.config, f"blk.{i}."
    heads, kv_heads = c.heads[i], c.kv_heads[i]
    rows, k_rows, v_rows = heads * c.head_dim, kv_heads * c.head_dim, kv_heads * c.value_dim
    if b.has(n + "attn_qkv.weight"):
        qkv = b.product(n + "attn_qkv", x, rows + k_rows + v_rows)
        q, k, v = qkv[..., :rows], qkv[..., rows : rows + k_rows], qkv[..., rows + k_rows :]
    else:
        q, k, v = (b.product(n + "attn_" + w, x, r) for w, r in (("q", rows), ("k", k_rows), ("v", v_rows)))
    normed = b.has(n + "attn_q_norm.weight")
    if normed and style.whole_qk:
        q, k = b.norm(n + "attn_q_norm", q), b.norm(n + "attn_k_norm", k)
    q, k, v = b.heads(q, heads), b.heads(k, kv_heads), b.heads(v, kv_heads)
    if normed and not style.whole_qk:
        q, k = b.norm(n + "attn_q_norm", q), b.norm(n + "attn_k_norm", k)
    local = bool(c.window) and style.local(i)
    if style.rope and style.turned(i):
        rope = style.local_rope(c.rope) if local else c.rope
        q, k = b.rope(q, style.rope, rope), b.rope(k, style.rope, rope)
    out = b.attention(
        i, q, k, v, scale=c.scale or c.head_dim**-0.5, window=c.window if local else 0, softcap=c.attn_softcap
    )
    return b.product(n + "attn_output", out, c.width)


def _feed_forward(b: Builder, i: int, x: Tensor, style: Style) -> Tensor:
    n = f"blk.{i}."
    if b.has(n + "ffn_gate_inp.weight"):
        return b.experts(i, x)
    if style.unit == "gelu":
        return b.product(n + "ffn_down", ops.gelu(b.product(n + "ffn_up", x)), x.shape[-1])
    return b.gated(i, x, style.unit)


def _unscaled(rope: Rope, base: float | None = None) -> Rope:
    return replace(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0, freq_base=base or rope.freq_base)


_SEPARATE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_FUSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")

ARCHITECTURES: dict[str, Architecture] = {
    name: Architecture(name, transformer(style), targets)
    for name, style, targets in (
        ("llama", Style(), _SEPARATE),
        ("qwen2", Style(rope="neox"), _SEPARATE),
        ("qwen3", Style(rope="neox"), _SEPARATE),
        ("qwen3moe", Style(rope="neox"), _SEPARATE),
        ("gemma", Style(rope="neox", unit="geglu", scaled=True), _SEPARATE),
        (
            "gemma2",
            Style(rope="neox", unit="geglu", scaled=True, after=True, local=lambda i: i % 2 == 0),
            _SEPARATE,
        ),
        (
            "gemma3",
            Style(
                rope="neox", unit="geglu", scaled=True, after=True, local=lambda i: i % 6 < 5,
                local_rope=lambda r: _unscaled(r, 10000.0),
            ),
            _SEPARATE,
        ),
        ("phi3", Style(rope="neox"), _FUSED),
        ("smollm3", Style(turned=lambda i: (i + 1) % 4 != 0), _SEPARATE),
        ("granite", Style(), _SEPARATE),
        (
            "olmo2",
            Style(
                rope="neox", before=False, after=True, whole_qk=True, local=lambda i: i % 4 < 3, local_rope=_unscaled
            ),
            _SEPARATE,
        ),
        ("gpt2", Style(rope="", norm="layer", unit="gelu"), _FUSED),
        ("starcoder2", Style(rope="neox", norm="layer", unit="gelu"), _SEPARATE),
    )
}  # fmt: skip
_LATENT = ("attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_output")
_MIX = ("time_mix_receptance", "time_mix_key", "time_mix_value", "time_mix_output")
_SCAN = ("ssm_in", "ssm_x", "ssm_dt", "ssm_out")
for _architecture in (
    Architecture("deepseek2", deepseek2, (*_LATENT, "ffn_gate", "ffn_up", "ffn_down")),
    Architecture("mamba", mamba, _SCAN, recurrent=True),
    Architecture("mamba2", mamba2, _SCAN, recurrent=True),
    Architecture("rwkv7", rwkv7, (*_MIX, "channel_mix_key", "channel_mix_value"), recurrent=True),
):
    ARCHITECTURES[_architecture.name] = _architecture
