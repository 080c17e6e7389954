"""Sums and means, and where the largest value stands."""

import numpy as np

from ..dtype import I32
from ..op import ensure, op
from ..tensor import Spec
from .elementwise import scale
from .layout import broadcast_to, reshape

__all__ = ["argmax", "mean", "sum", "sum_rows"]


@op(layout="any")
def sum(x):
    """The sum of all elements, a scalar of shape ()."""
    return Spec(())


@sum.grad
def _(t, dout):
    x = t.src[0]
    return (broadcast_to(reshape(dout, (1,) * x.ndim), shape=x.shape),)


sum.reference(lambda x: np.sum(x))


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
