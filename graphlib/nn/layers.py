"""Layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from ..ops import (
    assign_rows,
    conv_1d,
    conv_2d,
    dropout,
    flash_attn_ext,
    get_rows,
    greater_equal,
    group_norm,
    mul_mat,
    norm,
    permute,
    reshape,
    rms_norm,
    rope,
    silu,
    where,
)  # fmt: skip
from .module import Module, filled, normal, uniform


class Linear(Module):
    """x W^T + b, of weight [out, in] and bias [out].

    x: [..., in].  Filled as torch's: evenly between -1 / sqrt(in) and 1 / sqrt(in).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        bound = max(1, inputs) ** -0.5
        self.weight = uniform(outputs, inputs, bound=bound)
        self.bias = uniform(outputs, bound=bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., out]."""
        y = mul_mat(self.weight, x)
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """Rows of weight [count, size] for ids of any shape.  Filled with normal random numbers."""

    def __init__(self, count: int, size: int) -> None:
        self.weight = normal(count, size)

    def forward(self, ids: Tensor) -> Tensor:
        """[..., size].

        Raises:
            IndexRangeError: at a run, for an id that there is not.
        """
        rows = get_rows(self.weight, reshape(ids, (ids.size,)))
        return reshape(rows, (*ids.shape, self.weight.shape[1]))


class LayerNorm(Module):
    """Rows of `size` elements, less their mean, over their standard deviation; times weight, plus bias.

    Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight, self.bias = filled(size, value=1.0), filled(size, value=0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape, [..., size]."""
        return norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Rows of `size` elements over the root of the mean of their squares, times weight.

    Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        self.eps = eps
        self.weight = filled(size, value=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape, [..., size]."""
        return rms_norm(x, self.weight, eps=self.eps)


class GroupNorm(Module):
    """Groups of channels of each image, less their mean, over their standard deviation; times weight, plus bias.

    Wu and He 2018, arXiv:1803.08494.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        self.groups, self.eps = groups, eps
        self.weight, self.bias = filled(channels, value=1.0), filled(channels, value=0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape, [N, channels, ...]."""
        wide = (self.weight.size, *(1,) * (x.ndim - 2))
        return group_norm(x, self.groups, eps=self.eps) * reshape(self.weight, wide) + reshape(self.bias, wide)


class Conv2d(Module):
    """Correlation with weight [out, in, KH, KW], plus bias [out]; x: [N, in, H, W].  Filled as torch's."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        bound = max(1, inputs * size[0] * size[1]) ** -0.5
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.weight = uniform(outputs, inputs, *size, bound=bound)
        self.bias = uniform(outputs, bound=bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, out, OH, OW]."""
        y = conv_2d(self.weight, x, self.stride, self.padding, self.dilation)
        return y if self.bias is None else y + reshape(self.bias, (self.bias.size, 1, 1))


class Conv1d(Module):
    """Correlation with weight [out, in, K], plus bias [out]; x: [N, in, W].  Filled as torch's."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1,
        bias: bool = True,
    ) -> None:  # fmt: skip
        bound = max(1, inputs * kernel) ** -0.5
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.weight = uniform(outputs, inputs, kernel, bound=bound)
        self.bias = uniform(outputs, bound=bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, out, OW]."""
        y = conv_1d(self.weight, x, self.stride, self.padding, self.dilation)
        return y if self.bias is None else y + reshape(self.bias, (self.bias.size, 1))


class Dropout(Module):
    """Elements set to 0 with probability p while training, others over 1 - p.

    Args:
        p: from 0 to 1.
        seed: an i32 leaf, a `gg.Rng`, which goes on from run to run, or a number.
    """

    def __init__(self, p: float, seed: Any) -> None:
        self.p, self._seed = p, seed

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape."""
        return dropout(x, p=self.p, seed=self._seed) if self.training and self.p > 0 else x


class KVCache:
    """Keys and values of the tokens so far, which `Attention` writes into: leaves [B, heads, places, size]."""

    def __init__(self, batch: int, heads: int, places: int, size: int) -> None:
        self.k = filled(batch, heads, places, size, value=0.0, param=False)
        self.v = filled(batch, heads, places, size, value=0.0, param=False)

    def write(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows in their places, and give all."""
        return assign_rows(self.k, k, pos), assign_rows(self.v, v, pos)


class Attention(Module):
    """Attention of `heads` query heads, that share `kv_heads` of keys and values, causal, with rotary positions.

    Parameters are called as in Llama's modules: q_proj, k_proj, v_proj, o_proj.

    Args:
        width: of rows that come in and go out.
        heads: of queries.
        kv_heads: a divisor of heads (Ainslie et al. 2023, arXiv:2305.13245); default heads.
        size: of a head; default width / heads.
        bias: of the first three projections.
        causal: whether a token sees only those up to it.
        freq_base: of rotary positions (Su et al. 2021, arXiv:2104.09864), in halves as Llama's; None for none.

    Raises:
        ShapeError: heads do not divide.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, size: int | None = None, *, bias: bool = False,
        causal: bool = True, freq_base: float | None = 10000.0,
    ) -> None:  # fmt: skip
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads or (size is None and width % heads):
            raise ShapeError(
                f"Attention: kv_heads={kv_heads} must divide heads={heads}, and they width={width}, or give a size"
            )
        self.heads, self.kv_heads, self.size = heads, kv_heads, size or width // heads
        self.causal, self.freq_base = causal, freq_base
        self.q_proj = Linear(width, heads * self.size, bias)
        self.k_proj = Linear(width, kv_heads * self.size, bias)
        self.v_proj = Linear(width, kv_heads * self.size, bias)
        self.o_proj = Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor, pos: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Of x's shape.

        Args:
            x: [B, T, width].
            pos: i32 [T], the tokens' positions; default 0, 1, ...
            cache: goes on from what it holds, and takes these tokens' keys and values at their positions.
        """
        B, T, _ = x.shape
        pos = tensor(np.arange(T, dtype=np.int32)) if pos is None else pos
        q, k, v = self._heads(self.q_proj(x), pos), self._heads(self.k_proj(x), pos), self._heads(self.v_proj(x))
        if cache is None:
            out: Any = flash_attn_ext(q, k, v, causal="bottom-right" if self.causal else None)
        else:
            k, v = cache.write(k, v, pos)
            places = tensor(np.arange(k.shape[2], dtype=np.int32)[None])
            seen = greater_equal(reshape(pos, (T, 1)), places)
            out = flash_attn_ext(q, k, v, where(seen, 0.0, -np.inf))
        return self.o_proj(reshape(out, (B, T, self.heads * self.size)))

    def _heads(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """[B, heads, T, size], turned by the tokens' positions if they are given."""
        B, T, width = x.shape
        x = reshape(x, (B, T, width // self.size, self.size))
        if pos is not None and self.freq_base is not None:
            x = rope(x, pos, mode="neox", n_dims=self.size, freq_base=self.freq_base)
        return permute(x, (0, 2, 1, 3))


class MLP(Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), as in Llama (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        self.gate_proj, self.up_proj = Linear(width, hidden, bias=False), Linear(width, hidden, bias=False)
        self.down_proj = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape, [..., width]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerBlock(Module):
    """Attention and an MLP, each of a norm of its input, and added to it; parameters are called as in Llama's layers.

    Args:
        width, heads, kv_heads, size, options: as of `Attention`.
        hidden: of the MLP.
        eps: of the norms.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, kv_heads: int | None = None, size: int | None = None, *,
        eps: float = 1e-6, **options: Any,
    ) -> None:  # fmt: skip
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, heads, kv_heads, size, **options)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, pos: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Of x's shape, [B, T, width]."""
        x = x + self.self_attn(self.input_layernorm(x), pos, cache)
        return x + self.mlp(self.post_attention_layernorm(x))
