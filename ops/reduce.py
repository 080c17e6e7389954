"""Sums and means, running sums, and where the largest value stands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.op import Int, ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .elementwise import scale
from .layout import broadcast_to, repeat_back, reshape

__all__ = ["argmax", "count_equal", "cumsum", "mean", "sum", "sum_rows"]


@op(layout="any")
def sum(x):
    return Spec(())


@sum.grad
def _(t, dout):
    x = t.src[0]
    return (broadcast_to(reshape(dout, (1,) * x.ndim), shape=x.shape),)


sum.reference(lambda x: np.sum(x))


@sum.call
def _(x: Tensor | ArrayLike, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
    """The sum of all elements, a scalar of shape (); or the sums along an axis, or along several.

    Args:
        x: f32; halves are cast.
        axis: None sums all.
        keepdims: whether what is summed stays as an axis of size 1.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice.
    """
    if axis is None and not keepdims:
        return sum.node(x)
    x = x if isinstance(x, Tensor) else tensor(x)
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    if not all(-x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) < len(axes):
        raise ShapeError(f"sum(x={x.spec}): {axis} must be axes of x, from {-x.ndim} to {x.ndim - 1}, each once")
    summed = {a % x.ndim for a in axes}
    kept = tuple(1 if a in summed else n for a, n in enumerate(x.shape))
    sums = repeat_back(x, shape=kept)
    return sums if keepdims else reshape(sums, tuple(n for a, n in enumerate(x.shape) if a not in summed))


@op(layout="any")
def sum_rows(x):
    """The sum along the last axis, which stays with size 1."""
    ensure(x.ndim > 0, "a scalar has no rows; gg.sum takes any shape")
    return Spec((*x.shape[:-1], 1))


@sum_rows.grad
def _(t, dout):
    return (broadcast_to(dout, shape=t.src[0].shape),)


sum_rows.reference(lambda x: np.sum(x, axis=-1, keepdims=True))


@op(layout="any")
def mean(x):
    """The mean along the last axis, which stays with size 1.  Of empty rows it is NaN."""
    ensure(x.ndim > 0, "a scalar has no rows; it is its own mean")
    return Spec((*x.shape[:-1], 1))


@mean.grad
def _(t, dout):
    x = t.src[0]
    return (broadcast_to(scale(dout, factor=1 / max(1, x.shape[-1])), shape=x.shape),)


@mean.reference
def _(x):
    with np.errstate(invalid="ignore"):
        return np.sum(x, axis=-1, keepdims=True) / np.float64(x.shape[-1])


@op(layout="any")
def argmax(x):
    """Where along the last axis the largest value stands, the first of equals; NaN counts as larger than all.

    The last axis is dropped.  Indices are i32, and no gradient goes through them.
    """
    ensure(x.ndim > 0, "a scalar has no rows")
    ensure(x.shape[-1] > 0 or x.size == 0 and 0 in x.shape[:-1], "rows of no elements have no largest one")
    return Spec(x.shape[:-1], I32)


@argmax.reference
def _(x):
    return np.argmax(x, axis=-1) if x.size else np.zeros(x.shape[:-1], np.int64)


@op(layout="any")
def cumsum(x, *, axis: int = -1, reverse: bool = False):
    """The running sum along an axis, each element included: from the first element on, or from the last in reverse."""
    ensure(-x.ndim <= axis < x.ndim, f"there is no axis {axis}")
    return x.spec


@cumsum.grad
def _(t, dout):
    return (cumsum(dout, axis=t.attrs["axis"], reverse=not t.attrs["reverse"]),)


@cumsum.reference
def _(x, *, axis, reverse):
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis) if reverse else np.cumsum(x, axis)


@op(layout="contiguous")
def count_equal(a: Int, b: Int):
    """At how many places two i32 tensors hold the same value: an i32 scalar, of shape ()."""
    ensure(a.shape == b.shape, "the two differ in shape")
    ensure(a.size < 2**31, "i32 may not hold the count")
    return Spec((), I32)


count_equal.reference(lambda a, b: (a == b).sum())
