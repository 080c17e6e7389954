"""Thin matrices beside those of a model: W x + s B A x, where A is [rank, columns] and B [rows, rank] (LoRA, Hu et al.,
2021, https://arxiv.org/abs/2106.09685).  B is zero at first, so that a model with new adapters computes what it did.

s is alpha / rank, or alpha / sqrt(rank) with rank-stabilized scaling (Kalajdzievski, 2023,
https://arxiv.org/abs/2312.03732).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import ops
from ..core.errors import FormatError, ShapeError
from ..core.tensor import Tensor, tensor
from ..files.gguf import GgufFile
from .weights import Weights
from .writing import Out, replaced

A, B = ".lora_a", ".lora_b"


@dataclass
class Lora:
    """Adapters of a model.

    Attributes:
        rank, alpha, rslora: see above.
        dropout: the chance with which an element of what A reads is dropped while training.
        matrices: A and B by name, as "blk.0.attn_q.weight.lora_a".
    """

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    matrices: dict[str, Tensor] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """s"""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def names(self) -> list[str]:
        """Of the matrices that have an adapter."""
        return [n.removesuffix(A) for n in self.matrices if n.endswith(A)]

    def added(self, name: str, x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        """y, a product of the matrix and x, with what its adapter adds, if it has one."""
        a = self.matrices.get(f"{name}.weight{A}")
        if a is None:
            return y
        b = self.matrices[f"{name}.weight{B}"]
        if seed is not None and self.dropout:
            x = ops.dropout(x, seed, p=self.dropout, key=self.names.index(name + ".weight"))
        return y + ops.mul_mat(b, ops.mul_mat(a, x) * self.factor)

    def delta(self, name: str) -> np.ndarray:
        """What an adapter adds to its matrix, f32 [rows, columns]."""
        a, b = self.matrices[name + A].numpy(), self.matrices[name + B].numpy()
        return (b * np.float32(self.factor)) @ a

    def save(self, path: str | os.PathLike[str], arch: str) -> None:
        """Write a GGUF file that llama.cpp loads as an adapter.  The old file stays until the new one is whole."""
        with replaced(path) as unfinished:
            out = Out(unfinished, arch)
            out.string("general.type", "adapter")
            out.string("adapter.type", "lora")
            # llama.cpp divides by the rank; alpha 0 would mean a factor of 1 there
            out.float32("adapter.lora.alpha", self.factor * self.rank)
            for name, t in self.matrices.items():
                out.tensor(name, t.numpy())
            out.close()


def new(
    weights: Weights, *, rank: int, alpha: float, targets: Sequence[str], rslora: bool, dropout: float, seed: int
) -> Lora:
    """Adapters beside all matrices whose name ends with one of the targets.  A is random, of variance 1 / columns.

    Raises:
        ShapeError: numbers that make no sense, or targets that the model does not have.
    """
    if rank < 1 or not 0 <= dropout < 1 or not alpha > 0:
        raise ShapeError(f"add_lora(): rank={rank} and alpha={alpha} must be positive, and dropout={dropout} in [0, 1)")
    lora = Lora(rank, alpha, rslora, dropout)
    found = set()
    rng = np.random.default_rng(seed)
    for name, w in weights.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if w.ndim != 2 or part not in targets or not name.startswith("blk.") or not name.endswith(".weight"):
            continue
        found.add(part)
        rows, columns = w.shape
        _add(lora, name, rng.standard_normal((rank, columns)) / math.sqrt(columns), np.zeros((rows, rank)))
    if missing := [t for t in targets if t not in found]:
        there = sorted(
            {n.removesuffix(".weight").rpartition(".")[2] for n, w in weights.items() if w.ndim == 2} - found
        )
        raise ShapeError(
            f"add_lora(): the model's blocks have no matrices called {', '.join(missing)}; it has {', '.join(there)}"
        )
    return lora


def read(path: str | os.PathLike[str], arch: str, weights: Weights) -> Lora:
    """The adapter of a GGUF file.

    Raises:
        FormatError: it is none, or not one of this model.
    """
    with GgufFile(path) as file:
        kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
        if kind != ("adapter", "lora"):
            raise FormatError(f"{path}: its general.type and adapter.type are {kind}, and must be ('adapter', 'lora')")
        if (other := file.metadata.get("general.architecture")) != arch:
            raise FormatError(f"{path}: it is an adapter of an {other} model, and this one is {arch}")
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        tensors = Weights(file)
        values = {name: np.array(t.numpy(), np.float32) for name, t in tensors.items()}
    pairs = {n.removesuffix(A) for n in values if n.endswith(A)}
    if not pairs or {n for p in pairs for n in (p + A, p + B)} != set(values):
        raise FormatError(f"{path}: it must hold pairs of tensors called ...{A} and ...{B}")
    ranks = {values[p + A].shape[0] for p in pairs}
    if len(ranks) != 1:
        raise FormatError(f"{path}: its matrices have the ranks {sorted(ranks)}; all must have the same")
    [rank] = ranks
    lora = Lora(rank, alpha or float(rank))
    for name in [n.removesuffix(A) for n in values if n.endswith(A)]:
        if name not in weights:
            raise FormatError(f"{path}: it tunes {name!r}, which the model does not have")
        a, b, shape = values[name + A], values[name + B], weights[name].shape
        if len(shape) != 2 or a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
            raise FormatError(
                f"{path}: beside {name!r} of shape {shape} must be {A} [{rank}, columns] and {B} [rows, {rank}], "
                f"not {a.shape} and {b.shape}"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise FormatError(f"{path}: the adapter of {name!r} has values that are no finite numbers")
        _add(lora, name, a, b)
    return lora


def _add(lora: Lora, name: str, a: np.ndarray, b: np.ndarray) -> None:
    for ending, value in ((A, a), (B, b)):
        lora.matrices[name + ending] = tensor(value.astype(np.float32), name=name + ending, param=True)
