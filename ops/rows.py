"""Rows picked by index: embeddings, and the scatter that is their gradient."""

import numpy as np

from ..errors import IndexRangeError
from ..op import Int, Weight, ensure, op
from ..tensor import Spec

__all__ = ["get_rows", "get_rows_back"]


@op(layout="any")
def get_rows(x: Weight, ids: Int):
    """Row ids[...] of x[R, n] for each id, as f32: [..., n].  An id outside of 0 ... R-1 stops the run."""
    ensure(x.ndim == 2, "x must have two axes, [rows, n]")
    ensure(ids.ndim <= 3, "ids may have three axes at most")
    return Spec((*ids.shape, x.shape[1]))


@get_rows.grad
def _(t, dout):
    x, ids = t.src
    return get_rows_back(dout, ids, rows=x.shape[0]), None


@get_rows.reference
def _(x, ids):
    _check("get_rows", ids, len(x))
    return x[ids]


@op(layout="contiguous")
def get_rows_back(dout, ids: Int, *, rows: int):
    """For each of `rows` rows the sum of those rows of `dout` that have its id, in order; zeros for an id not there."""
    ensure(
        ids.ndim <= 3 and dout.shape[:-1] == ids.shape and dout.ndim > 0,
        "dout must have the shape of ids and one more axis",
    )
    ensure(rows >= 0, f"rows={rows} is negative")
    return Spec((rows, dout.shape[-1]))


@get_rows_back.grad
def _(t, dout):
    return get_rows(dout, t.src[1]), None


@get_rows_back.reference
def _(dout, ids, *, rows):
    _check("get_rows_back", ids, rows)
    out = np.zeros((rows, dout.shape[-1]))
    np.add.at(out, ids, dout)
    return out


def _check(name: str, ids: np.ndarray, rows: int) -> None:
    wrong = (ids < 0) | (ids >= rows)
    if wrong.any():
        raise IndexRangeError(f"{name}: ids holds {ids[wrong].flat[0]}, and must be from 0 to {rows - 1}")
