"""The order of the elements of rows."""

import enum

import numpy as np

from ..core.dtype import I32
from ..core.op import ensure, op
from ..core.tensor import Spec

__all__ = ["SortOrder", "argsort", "top_k"]


class SortOrder(enum.IntEnum):
    """The numbers are ggml's."""

    ASC = 0
    DESC = 1


@op(layout="any")
def argsort(x, *, order: SortOrder = SortOrder.ASC):
    """Where each row's elements stand in order, i32 of the shape of `x`.  Of equal ones the first comes first; NaN
    comes last in either order."""
    ensure(x.ndim > 0, "a scalar has no rows")
    return Spec(x.shape, I32)


@argsort.reference
def _(x, *, order):
    return np.argsort(-x if order is SortOrder.DESC else x, axis=-1, kind="stable")


@op(layout="any")
def top_k(x, *, k: int):
    """Where each row's k largest elements stand, the largest first: i32 [..., k].  Of equal ones the first comes first;
    NaN is less than everything."""
    ensure(x.ndim > 0, "a scalar has no rows")
    ensure(0 <= k <= x.shape[-1], f"k={k} must be from 0 to {x.shape[-1]}, the elements of a row")
    return Spec((*x.shape[:-1], k), I32)


@top_k.reference
def _(x, *, k):
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]
