"""The sizes and options of a transformer, as its file's metadata have them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .metadata import Metadata

_SCALINGS = ("", "none", "linear", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys; see `ggrad.rope`."""

    n_dims: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0

    @classmethod
    def of(cls, m: Metadata, head_dim: int, context: int) -> Rope:
        kind = m.text("rope.scaling.type")
        if kind not in _SCALINGS:
            raise m.refuse(f"{m.arch}.rope.scaling.type", f"is {kind!r}; known are {', '.join(_SCALINGS[1:])}")
        factor = m.number("rope.scaling.factor", m.number("rope.scale_linear", 0.0))
        scaled = kind not in ("none", "longrope") and factor != 0
        return cls(
            n_dims=m.count("rope.dimension_count", head_dim, least=0),
            freq_base=m.number("rope.freq_base", 10000.0, least=1e-6),
            freq_scale=1 / factor if scaled else 1.0,
            ext_factor=m.number("rope.scaling.yarn_ext_factor", 1.0) if kind == "yarn" else 0.0,
            attn_factor=m.number("rope.scaling.attn_factor", 1.0) * m.number("rope.scaling.yarn_attn_factor", 1.0),
            beta_fast=m.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=m.number("rope.scaling.yarn_beta_slow", 1.0),
            n_ctx_orig=m.count("rope.scaling.original_context_length", context),
        )


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
        heads, kv_heads, hidden: for each layer.
        head_dim, value_dim: elements of a head's queries and keys, and of its values.
        window: keys that a layer with a window sees, 0 if there is none.
        context: tokens that the model was trained for.
    """

    arch: str
    layers: int
    width: int
    vocabulary: int
    context: int
    heads: list[int]
    kv_heads: list[int]
    head_dim: int
    value_dim: int
    hidden: list[int]
    eps: float
    rope: Rope
    window: int = 0
    experts: int = 0
    experts_used: int = 0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    embedding_scale: float = 0.0
    residual_scale: float = 0.0
    logit_scale: float = 0.0
    extra: Metadata | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, m: Metadata, vocabulary: int) -> Config:
        layers, width = m.count("block_count"), m.count("embedding_length")
        heads = m.by_layer("attention.head_count", layers, 0)
        most = max(heads) or 1
        if width % most and f"{m.arch}.attention.key_length" not in m.all:
            raise m.refuse(f"{m.arch}.embedding_length", f"is {width}, no multiple of {most} heads")
        head_dim = m.count("attention.key_length", width // most)
        context = m.count("context_length")
        kv_heads = m.by_layer("attention.head_count_kv", layers, None) if _has(m, "attention.head_count_kv") else heads
        for h, kv in zip(heads, kv_heads, strict=True):
            if h and (not kv or h % kv):
                raise m.refuse(f"{m.arch}.attention.head_count_kv", f"is {kv}, which does not divide {h} heads")
        experts, used = m.count("expert_count", 0, least=0), m.count("expert_used_count", 0, least=0)
        if used > experts or bool(used) != bool(experts):
            raise m.refuse(f"{m.arch}.expert_used_count", f"is {used} of {experts} experts")
        eps = m.number("attention.layer_norm_rms_epsilon", None)
        return cls(
            m.arch, layers, width, vocabulary, context, heads, kv_heads, head_dim,
            m.count("attention.value_length", head_dim),
            m.by_layer("feed_forward_length", layers, 0),
            m.number("attention.layer_norm_epsilon", 1e-5) if eps is None else eps,
            Rope.of(m, head_dim, context),
            window=m.count("attention.sliding_window", 0, least=0), experts=experts, experts_used=used,
            attn_softcap=m.number("attn_logit_softcapping", 0.0),
            final_softcap=m.number("final_logit_softcapping", 0.0),
            scale=m.number("attention.scale", 0.0), embedding_scale=m.number("embedding_scale", 0.0),
            residual_scale=m.number("residual_scale", 0.0), logit_scale=m.number("logit_scale", 0.0), extra=m,
        )  # fmt: skip


def _has(m: Metadata, key: str) -> bool:
    return f"{m.arch}.{key}" in m.all
