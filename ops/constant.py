"""Values that depend on no other value: they are computed while the graph is built."""

import math

import numpy as np

from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from .layout import broadcast_to

__all__ = ["arange", "fill"]


def arange(start: float, stop: float, step: float = 1.0) -> Tensor:
    """start, start + step, ... as long as it is before `stop`: a constant of f32.

    Raises:
        ShapeError: the step is 0, or leads away from `stop`.
    """
    if step == 0 or (stop - start) / step < 0:
        raise ShapeError(f"arange({start}, {stop}, {step}): the step does not lead there")
    return tensor(start + step * np.arange(math.ceil((stop - start) / step)))


def fill(x: Tensor, value: float) -> Tensor:
    """`value` in the shape and dtype of `x`: a view of one element.  `x` is not looked at, and gets no gradient.

    Args:
        x: f32, f16, bf16 or i32 of any shape.

    Raises:
        ShapeError: `x` is quantized.
    """
    return broadcast_to(tensor(value, dtype=x.dtype), shape=x.shape)
