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
from pathlib import Path

import numpy as np

from .. import ops
from ..core.errors import FormatError, ShapeError
from ..core.tensor import Tensor, tensor
from ..files.gguf import GgufFile
from . import peft_layout
from .config import Config
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

    def save(self, path: str | os.PathLike[str], c: Config) -> None:
        """Write a GGUF file that llama.cpp loads as an adapter; or, where the name does not end with .gguf, a folder in
        peft's layout.  Old files stay until new ones are whole."""
        if Path(path).suffix != ".gguf":
            settings = {
                "r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rslora, "lora_dropout": self.dropout,
            }  # fmt: skip
            peft_layout.save(path, {name: t.numpy() for name, t in self.matrices.items()}, c, settings)
            return
        with replaced(path) as unfinished:
            out = Out(unfinished, c.arch)
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


def read(path: str | os.PathLike[str], c: Config, weights: Weights) -> Lora:
    """The adapter of a GGUF file, or of a folder in peft's layout.

    Raises:
        FormatError: it is none, or not one of this model.
    """
    if os.path.isdir(path):
        values, config = peft_layout.load(path, c)
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
            raise FormatError(f"{path}: r and lora_alpha must be positive numbers, not {rank!r} and {alpha!r}")
        lora = Lora(rank, float(alpha), bool(config.get("use_rslora", False)))
    else:
        values, alpha = _of_gguf(path, c.arch)
        lora = Lora(0, alpha)
    pairs = [n.removesuffix(A) for n in values if n.endswith(A)]
    if not pairs or {n for p in pairs for n in (p + A, p + B)} != set(values):
        raise FormatError(f"{path}: it must hold pairs of tensors called ...{A} and ...{B}")
    ranks = {values[p + A].shape[0] for p in pairs}
    if len(ranks) != 1 or (lora.rank and ranks != {lora.rank}):
        raise FormatError(f"{path}: its matrices have the ranks {sorted(ranks)}; all must have one, as is said")
    [lora.rank] = ranks
    lora.alpha = lora.alpha or float(lora.rank)
    for name in pairs:
        if name not in weights:
            raise FormatError(f"{path}: it tunes {name!r}, which the model does not have")
        a, b, shape = values[name + A], values[name + B], weights[name].shape
        if len(shape) != 2 or a.shape != (lora.rank, shape[1]) or b.shape != (shape[0], lora.rank):
            raise FormatError(
                f"{path}: beside {name!r} of shape {shape} must be {A} [{lora.rank}, columns] and {B} [rows, "
                f"{lora.rank}], not {a.shape} and {b.shape}"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise FormatError(f"{path}: the adapter of {name!r} has values that are no finite numbers")
        _add(lora, name, a, b)
    return lora


def _of_gguf(path: str | os.PathLike[str], arch: str) -> tuple[dict[str, np.ndarray], float]:
    """Matrices by name, and alpha, of an adapter's file."""
    with GgufFile(path) as file:
        kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
        if kind != ("adapter", "lora"):
            raise FormatError(f"{path}: its general.type and adapter.type are {kind}, and must be ('adapter', 'lora')")
        if (other := file.metadata.get("general.architecture")) != arch:
            raise FormatError(f"{path}: it is an adapter of a model of {other}, and this one is of {arch}")
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < 1e9:
            raise FormatError(f"{path}: its adapter.lora.alpha is {alpha!r}")
        return {name: np.array(t.numpy(), np.float32) for name, t in Weights(file).items()}, float(alpha)


def _add(lora: Lora, name: str, a: np.ndarray, b: np.ndarray) -> None:
    for ending, value in ((A, a), (B, b)):
        lora.matrices[name + ending] = tensor(value.astype(np.float32), name=name + ending, param=True)
