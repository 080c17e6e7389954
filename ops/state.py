"""Writing into leaves while a graph runs: caches, running statistics, states that outlive a run.

A leaf that is written has one value before and one after.  Nodes made before the write read the old one, its result
is the new one, and a node made after it that reads the leaf itself is refused, since it could mean either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import I32
from ..core.op import Any4, Float, Half, Int, ensure, op
from ..core.tensor import Tensor, Update, tensor
from .layout import broadcast_to, cont
from .rows import check_ids, check_lists, set_rows, set_rows_back, tiled_lists

__all__ = ["assign", "assign_rows"]


@op(layout="any")
def assign(leaf: Any4, value: Any4):
    ensure(leaf.shape == value.shape, "leaf and value differ in shape; gg.broadcast_to makes it larger")
    ensure(
        (leaf.dtype is I32) == (value.dtype is I32),
        f"the value is {value.dtype}, and the leaf {leaf.dtype}; gg.cast says that values are cut to integers",
    )
    return Update(leaf)


@assign.grad
def _(t, dout):
    return None, dout


assign.reference(lambda leaf, value: (value,))


@assign.call
def _(leaf: Tensor, value: Tensor | ArrayLike) -> Tensor:
    """Write `value` into a leaf when the graph runs; gives the leaf as it is then.

    Like any node it runs if it is a root of a graph, or something there reads its result.  What was made of the leaf
    before reads the old value.  Gradients go through the result to `value`.

    Args:
        leaf: f32, f16, bf16 or i32.
        value: of its shape, rounded to its dtype; integers for integers.

    Raises:
        ShapeError: another shape; integers for floats or the other way around; `leaf` is a result.
    """
    return assign.node(leaf, _apart(leaf, value))


@op(layout="any")
def assign_rows(leaf: Half, rows: Float, ids: Int):
    ensure(leaf.ndim >= 2 and leaf.ndim == rows.ndim, "leaf and rows must have two axes or more, and as many")
    ensure(
        rows.shape[:-2] == leaf.shape[:-2] and rows.shape[-1] == leaf.shape[-1],
        "leaf and rows may differ only in their rows",
    )
    check_lists(ids, leaf.shape, rows.shape[-2])
    return Update(leaf)


@assign_rows.grad
def _(t, dout):
    leaf, rows, ids = t.src
    zeros = broadcast_to(tensor(0.0), shape=rows.shape)
    return set_rows(dout, zeros, ids) if leaf.param else None, set_rows_back(dout, ids), None


@assign_rows.reference
def _(leaf, rows, ids):
    check_ids("assign_rows", ids, leaf.shape[-2])
    out, ids = leaf.copy(), tiled_lists(ids, leaf.shape)
    for i in range(rows.shape[-2]):
        np.put_along_axis(out, ids[..., i, None, None], rows[..., i, None, :], axis=-2)
    return (out,)


@assign_rows.call
def _(leaf: Tensor, rows: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """`assign` of some rows: row ids[i] of leaf[..., R, n] becomes row i of rows[..., r, n]; others are not touched.

    It is how a cache of keys and values grows: the time of a step does not depend on how many places there are.
    Where an id stops the run, rows of the others may have been written.

    Args:
        leaf: f32, f16 or bf16.
        rows: f32, rounded to that.
        ids: i32 [..., r], tiled over the batch.  Of equal ids the last one counts.  An id outside of 0 ... R-1
            stops the run.

    Raises:
        ShapeError: shapes do not fit; `leaf` is a result.
    """
    return assign_rows.node(leaf, _apart(leaf, rows), ids)


def _apart(leaf: Tensor, value: Tensor | ArrayLike) -> Tensor | ArrayLike:
    """The value, copied if it lies in the leaf: what is read while it is written has no order."""
    return cont(value) if isinstance(value, Tensor) and value.storage[0] is leaf else value
