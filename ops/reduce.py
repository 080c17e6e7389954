"""Sums and means, running sums, and where the largest value stands."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.op import Int, ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .elementwise import mul, scale
from .layout import broadcast_to, concat, permute, repeat_back, reshape

__all__ = ["argmax", "count_equal", "cumsum", "mean", "mean_rows", "prod", "sum", "sum_rows"]

Axes = int | Sequence[int] | None


def axes_of(name: str, x: Tensor, axis: Axes) -> list[int]:
    """The axes counted from the first one, in order; None are all."""
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    if not all(-x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) < len(axes):
        raise ShapeError(f"{name}(x={x.spec}): {axis} must be axes of x, from {-x.ndim} to {x.ndim - 1}, each once")
    return sorted(a % x.ndim for a in axes)


def without(x: Tensor, axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    """The shape of what is reduced along these axes."""
    if keepdims:
        return tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    return tuple(n for a, n in enumerate(x.shape) if a not in axes)


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
    x = x if isinstance(x, Tensor) else tensor(x)
    if axis is None and not keepdims:
        return sum.node(x)
    axes = axes_of("sum", x, axis)
    return reshape(repeat_back(x, shape=without(x, axes, True)), without(x, axes, keepdims))


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
def mean_rows(x):
    """The mean along the last axis, which stays with size 1: ggml's `mean`.  Of empty rows it is NaN."""
    ensure(x.ndim > 0, "a scalar has no rows; gg.mean takes any shape")
    return Spec((*x.shape[:-1], 1))


@mean_rows.grad
def _(t, dout):
    x = t.src[0]
    return (broadcast_to(scale(dout, factor=1 / max(1, x.shape[-1])), shape=x.shape),)


@mean_rows.reference
def _(x):
    with np.errstate(invalid="ignore"):
        return np.sum(x, axis=-1, keepdims=True) / np.float64(x.shape[-1])


def mean(x: Tensor | ArrayLike, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
    """The mean of all elements, a scalar of shape (); or the means along an axis, or along several.  Of nothing NaN.

    Args:
        x: f32; halves are cast.
        axis: None is of all.
        keepdims: whether the axes stay with size 1.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice.
    """
    x = x if isinstance(x, Tensor) else tensor(x)
    axes = axes_of("mean", x, axis)
    if axes and axes == [x.ndim - 1]:
        return reshape(mean_rows(x), without(x, axes, keepdims))
    n = math.prod(x.shape[a] for a in axes)
    return scale(sum(x, axes, keepdims=keepdims), factor=1 / n if n else math.inf)


def prod(x: Tensor | ArrayLike, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
    """The product of all elements, or along axes; of nothing 1.  Zeros among them have their gradients too.

    Args:
        x: f32; halves are cast.
        axis: None is of all.
        keepdims: whether the axes stay with size 1.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice.
    """
    x = x if isinstance(x, Tensor) else tensor(x)
    axes = axes_of("prod", x, axis)
    kept = [a for a in range(x.ndim) if a not in axes]
    n = math.prod(x.shape[a] for a in axes)
    rows = reshape(permute(x, axes=(*kept, *axes)), (math.prod(x.shape[a] for a in kept), n))
    if n == 0:
        return broadcast_to(tensor(1.0), shape=without(x, axes, keepdims))
    while n > 1:  # halves of the rows by one another
        half = n // 2
        rest = [rows[:, 2 * half :]] if n % 2 else []
        rows = concat(mul(rows[:, :half], rows[:, half : 2 * half]), *rest, axis=-1)
        n = half + n % 2
    return reshape(rows, without(x, axes, keepdims))


@op(layout="any")
def argmax(x):
    ensure(x.ndim > 0, "a scalar has no rows")
    ensure(x.shape[-1] > 0 or x.size == 0 and 0 in x.shape[:-1], "rows of no elements have no largest one")
    return Spec(x.shape[:-1], I32)


@argmax.reference
def _(x):
    return np.argmax(x, axis=-1) if x.size else np.zeros(x.shape[:-1], np.int64)


@argmax.call
def _(x: Tensor | ArrayLike, axis: int = -1, *, keepdims: bool = False) -> Tensor:
    """Where along an axis the largest value stands, the first of equals; NaN counts as larger than all.

    Indices are i32, and no gradient goes through them.

    Args:
        x: f32; halves are cast.
        axis: the last one by default, as ggml's.
        keepdims: whether the axis stays with size 1.

    Raises:
        ShapeError: an axis that `x` does not have, or one of no elements.
    """
    x = x if isinstance(x, Tensor) else tensor(x)
    if not x.ndim:
        raise ShapeError(f"argmax(x={x.spec}): a scalar has no rows")
    (chosen,) = axes_of("argmax", x, int(axis))
    order = [*(a for a in range(x.ndim) if a != chosen), chosen]
    found = argmax.node(x if chosen == x.ndim - 1 else permute(x, axes=tuple(order)))
    return reshape(found, without(x, [chosen], True)) if keepdims else found


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
