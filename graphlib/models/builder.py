"""Blocks that architectures are made of, in a graph that is being built: norms, products with adapters beside them,
rotary embedding, attention over a cache or over packed sequences, feed-forward units, experts.

Activations are [batch, tokens, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..core.dtype import I32
from ..core.errors import FormatError
from ..core.tensor import Tensor, tensor
from .config import Config, Rope

if TYPE_CHECKING:
    from .lora import Lora
    from .weights import Weights

UNITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": ops.swiglu, "geglu": ops.geglu}


class Memory:
    """What a model remembers of the tokens before: leaves that a run of the graph writes.

    Attributes:
        length: tokens that there is room for.
        new: i32 [2], (0, tokens of the run that are read); what fills them up to the graph's number is not.
        used: i32 [2], (0, tokens that are remembered with those).
        leaves: by name, as "k 0".
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.new = tensor(shape=(2,), dtype=I32, name="new")
        self.used = tensor(shape=(2,), dtype=I32, name="used")
        self.leaves: dict[str, Tensor] = {}

    def leaf(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same one for every graph of the model."""
        if name not in self.leaves:
            self.leaves[name] = tensor(np.zeros(shape, np.float32), name=name)
        return self.leaves[name]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.leaves.values())


@dataclass
class Builder:
    """A graph under construction.

    Attributes:
        positions: i32 [tokens].
        cu_seqlens: i32 [sequences + 1] where sequences are packed one after another (batch is 1).
        memory: with one the tokens follow those that it holds, and become part of it (batch is 1).
        context: tokens of the longest sequence that the graph is meant for.
        seed: of dropout beside adapters; None for none.
        blocks: outputs of the blocks, in order.
        updates: nodes that write to the memory, which must be in the graph.
    """

    config: Config
    weights: Weights
    positions: Tensor
    context: int
    cu_seqlens: Tensor | None = None
    memory: Memory | None = None
    lora: Lora | None = None
    seed: Tensor | None = None

    def __post_init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.updates: list[Tensor] = []

    def has(self, name: str) -> bool:
        return name in self.weights

    def vector(self, name: str, n: int) -> Tensor:
        w = self.weights[name]
        if w.size != n:
            raise FormatError(f"{self.weights.file.path}: tensor {name!r} has {w.size} elements, and must have {n}")
        return w if w.ndim == 1 else w.reshape(n)

    def embedding(self, tokens: Tensor) -> Tensor:
        """[batch, tokens, width]"""
        table = self.weights["token_embd.weight"]
        if table.ndim != 2 or table.shape[1] != self.config.width:
            raise FormatError(
                f"{self.weights.file.path}: tensor 'token_embd.weight' is {table.shape}, and its rows must have "
                f"{self.config.width} elements"
            )
        return ops.get_rows(table, tokens)

    def product(self, name: str, x: Tensor, rows: int | None = None) -> Tensor:
        """x[..., columns] times a matrix [rows, columns] of the file; its bias and adapter are added."""
        w = self.weights[name + ".weight"]
        if w.ndim != 2 or w.shape[1] != x.shape[-1] or (rows is not None and w.shape[0] != rows):
            raise FormatError(
                f"{self.weights.file.path}: tensor {w.name!r} is {w.shape}, and must be "
                f"[{'any' if rows is None else rows}, {x.shape[-1]}]"
            )
        y = ops.mul_mat(w, x)
        if self.has(name + ".bias"):
            y = y + self.vector(name + ".bias", w.shape[0])
        return y if self.lora is None else self.lora.added(name, x, y, self.seed)

    def norm(self, name: str, x: Tensor, kind: str = "rms") -> Tensor:
        """ "rms": x over its root mean square; "layer": with the mean taken away, and a bias."""
        w = self.vector(name + ".weight", x.shape[-1])
        if kind == "rms":
            return ops.rms_norm(x, w, eps=self.config.eps)
        bias = self.vector(name + ".bias", x.shape[-1]) if self.has(name + ".bias") else None
        return ops.norm(x, w, bias, eps=self.config.eps)

    def heads(self, x: Tensor, n: int) -> Tensor:
        """[batch, tokens, n, head_dim]"""
        return x.reshape(*x.shape[:2], n, x.shape[2] // n)

    def rope(self, x: Tensor, mode: str, rope: Rope | None = None, *, offset: int = 0) -> Tensor:
        """x[batch, tokens, heads, head_dim] turned by the tokens' positions."""
        r = rope or self.config.rope
        return ops.rope(
            x, self.positions, self._frequency_factors(r), n_dims=r.n_dims, mode=mode, n_ctx_orig=r.n_ctx_orig,
            freq_base=r.freq_base, freq_scale=r.freq_scale, ext_factor=r.ext_factor, attn_factor=r.attn_factor,
            beta_fast=r.beta_fast, beta_slow=r.beta_slow, offset=offset,
        )  # fmt: skip

    def attention(
        self, i: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention; a window w shows each query its own key and the w - 1 before.

        q: [batch, tokens, heads, head_dim]; k, v: with kv heads.

        Returns:
            [batch, tokens, heads * value_dim]
        """
        batch, length, heads, _ = q.shape
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        cu_q = cu_k = self.cu_seqlens
        if self.memory is not None:
            k, v = self._remembered(f"k {i}", k), self._remembered(f"v {i}", v)
            cu_q, cu_k = self.memory.new, self.memory.used
        out: Tensor = ops.flash_attn_ext(  # type: ignore[assignment]
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=scale, causal="bottom-right",
            window=(window - 1, -1) if window else None, logit_softcap=softcap,
        )  # fmt: skip
        return out.reshape(batch, length, heads * v.shape[-1])

    def gated(self, i: int, x: Tensor, unit: str) -> Tensor:
        """down(unit(gate(x), up(x))), or with both halves in one matrix."""
        n = f"blk.{i}."
        if self.has(n + "ffn_gate.weight"):
            y = UNITS[unit](self.product(n + "ffn_gate", x), self.product(n + "ffn_up", x))
        else:
            both = self.product(n + "ffn_up", x)
            half = both.shape[-1] // 2
            y = UNITS[unit](both[..., :half], both[..., half:])
        return self.product(n + "ffn_down", y, x.shape[-1])

    def experts(
        self, i: int, x: Tensor, *, gate: str = "softmax", normalized: bool = True, factor: float = 1.0
    ) -> Tensor:
        """A few experts for each token, weighed by how they were chosen."""
        c, n = self.config, f"blk.{i}."
        batch, length, width = x.shape
        flat = x.reshape(batch * length, width)
        scores = self.product(n + "ffn_gate_inp", flat, c.experts)
        odds = ops.soft_max(scores) if gate == "softmax" else ops.sigmoid(scores)
        biased = odds
        if self.has(n + "exp_probs_b.bias"):
            biased = odds + self.vector(n + "exp_probs_b.bias", c.experts)
        ids = ops.top_k(biased, k=c.experts_used)
        chosen = ops.get_rows(odds.reshape(batch * length, c.experts, 1), ids)  # [tokens, used, 1]
        if normalized:
            chosen = chosen / ops.sum(chosen, axis=1, keepdims=True)
        if factor != 1.0:
            chosen = chosen * factor
        rows = flat.reshape(batch * length, 1, width)
        first, up = (ops.mul_mat_id(self.weights[f"{n}ffn_{w}_exps.weight"], rows, ids) for w in ("gate", "up"))
        y = ops.mul_mat_id(self.weights[n + "ffn_down_exps.weight"], ops.swiglu(first, up), ids)
        return ops.sum(y * chosen, axis=1).reshape(batch, length, width)

    def _remembered(self, name: str, rows: Tensor) -> Tensor:
        """All rows of this kind so far, [1, heads, room, size], the new ones at their positions."""
        assert self.memory is not None
        _, heads, _, size = rows.shape
        leaf = self.memory.leaf(name, (1, heads, self.memory.length, size))
        written = ops.assign_rows(leaf, rows, self.positions)
        self.updates.append(written)
        return written

    def _frequency_factors(self, rope: Rope) -> Tensor | None:
        """What the file divides each pair's frequency by; some have one list for long sequences."""
        long = self.context > rope.n_ctx_orig
        for name in ("rope_freqs.weight", f"rope_factors_{'long' if long else 'short'}.weight"):
            if self.has(name):
                return self.vector(name, rope.n_dims // 2)
        return None
