"""Thin matrices beside those of a model: W x + s B A x, where A is [rank, columns] and B [rows, rank] (LoRA, Hu et al.,
2021, https://arxiv.org/abs/2106.09685).  B is zero at first, so that a model with new adapters computes what it did."""

from __future__ import annotations

from ..core.tensor import Tensor


class Lora:
    def added(self, name: str, x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        return y
