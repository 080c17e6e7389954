"""Makes the inputs of a case that an op is tried on: seeded values, in the layout under test."""

from __future__ import annotations

import numpy as np

from ..core.dtype import F32, I32
from ..core.tensor import Tensor, tensor

LAYOUTS = ("plain", "transposed", "reversed", "strided", "stride0")


class Maker:
    """m(2, 3) is a float parameter of shape [2, 3]; m.ints(4, below=3) an i32 constant.

    Args:
        layout: how the inputs lie in memory, one of `LAYOUTS`.  Of a shape with too few axes for a layout the
            next best is made.
        seed: of the values.
    """

    def __init__(self, layout: str = "plain", seed: int = 0) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
        self.layout = layout
        self.rng = np.random.default_rng(seed)
        self.leaves: list[Tensor] = []

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0, dtype=F32, param: bool = True) -> Tensor:
        """Values spread evenly over [low, high)."""
        return self._laid_out(self.rng.uniform(low, high, shape), dtype, param)

    def of(self, values, *, dtype=F32, param: bool = True) -> Tensor:
        """These values."""
        return self._laid_out(np.asarray(values), dtype, param)

    def ints(self, *shape: int, below: int, low: int = 0) -> Tensor:
        """i32 values in [low, below)."""
        return self._laid_out(self.rng.integers(low, below, shape), I32, False)

    def leaf(
        self, *shape: int, low: float = -2.0, high: float = 2.0, dtype=F32, param: bool = True, role: str = "constant"
    ) -> Tensor:
        """Always a plain leaf: for inputs that an op writes to."""
        values = self.rng.uniform(low, high, shape)
        return self._leaf(values.astype(np.int32) if dtype is I32 else values, dtype, param, role)

    def _leaf(self, values, dtype, param, role="constant") -> Tensor:
        t = tensor(values, dtype=dtype, param=param, role=role)
        self.leaves.append(t)
        return t

    def _laid_out(self, values: np.ndarray, dtype, param: bool) -> Tensor:
        from ..ops import broadcast_to, permute

        n = values.ndim
        if self.layout == "transposed" and n >= 2:
            order = (*range(n - 2), n - 1, n - 2)
            return permute(self._leaf(values.transpose(order), dtype, param), axes=order)
        if self.layout == "reversed" and n >= 1:
            back = (slice(None, None, -1),) * n
            return self._leaf(values[back], dtype, param)[back]
        if self.layout == "strided" and n >= 1:
            wide = np.repeat(values, 3, axis=-1)
            wide = np.repeat(wide, 2, axis=0) if n > 1 else wide
            return self._leaf(wide, dtype, param)[
                (slice(None, None, 2), *(slice(None),) * (n - 2), slice(None, None, 3))[-n:]
            ]
        if self.layout == "stride0" and n >= 1 and values.size:
            one = values[:1]
            return broadcast_to(self._leaf(one, dtype, param), shape=values.shape)
        return self._leaf(values, dtype, param)
