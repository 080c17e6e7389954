"""Rows picked by index and rows replaced by index: embeddings, caches, and their gradients."""

from math import prod

import numpy as np

from ..core.builtin import provides
from ..core.dtype import I32
from ..core.errors import IndexRangeError, ShapeError
from ..core.op import Float, Half, Int, Weight, ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .layout import broadcast_to, reshape, slice_of, tiles

__all__ = ["get_rows", "get_rows_back", "indexed", "set_rows", "set_rows_back"]


@op(layout="any")
def get_rows(x: Weight, ids: Int):
    """Row ids[...] of x[R, n] for each id, as f32: [..., n].  An id outside of 0 ... R-1 stops the run.

    Of a batch x[..., R, n] each matrix has ids of its own, ids[..., r]: [..., r, n].
    """
    ensure(x.ndim >= 2, "x must have two axes or more: [rows, n]")
    if x.ndim == 2:
        ensure(ids.ndim <= 3, "ids may have three axes at most")
    else:
        ensure(ids.ndim == x.ndim - 1 and ids.shape[:-1] == x.shape[:-2], "ids must have a list for each matrix of x")
    return Spec((*ids.shape, x.shape[-1]))


@get_rows.grad
def _(t, dout):
    x, ids = t.src
    return get_rows_back(dout, ids, rows=x.shape[-2], batched=x.ndim > 2), None


@get_rows.reference
def _(x, ids):
    check_ids("get_rows", ids, x.shape[-2])
    return x[ids] if x.ndim == 2 else np.take_along_axis(x, ids[..., None], axis=-2)


@op(layout="contiguous")
def get_rows_back(dout, ids: Int, *, rows: int, batched: bool = False):
    """For each of `rows` rows the sum of those rows of `dout` that have its id, in order; zeros for an id not there.

    If it is batched, for each list ids[..., :] by itself: [..., rows, n].
    """
    ensure(
        ids.ndim <= 3 and dout.shape[:-1] == ids.shape and dout.ndim > 0,
        "dout must have the shape of ids and one more axis",
    )
    ensure(rows >= 0, f"rows={rows} is negative")
    ensure(ids.ndim > 0 or not batched, "one id is no list")
    return Spec((*(ids.shape[:-1] if batched else ()), rows, dout.shape[-1]))


@get_rows_back.grad
def _(t, dout):
    return get_rows(dout, t.src[1]), None


@get_rows_back.reference
def _(dout, ids, *, rows, batched):
    check_ids("get_rows_back", ids, rows)
    if not batched:
        out = np.zeros((rows, dout.shape[-1]))
        np.add.at(out, ids, dout)
        return out
    out = np.zeros((*ids.shape[:-1], rows, dout.shape[-1]))
    np.add.at(out, (*np.indices(ids.shape)[:-1], ids), dout)
    return out


@op(layout="any", inplace=("a",))
def set_rows(a: Half, b: Float, ids: Int):
    """A copy of a[..., R, n] with row ids[i] replaced by row i of b[..., r, n].  Of equal ids the last one counts.

    Args:
        a: f32, f16 or bf16; the result has its dtype.
        b: f32, rounded to that.
        ids: [..., r], tiled over the batch.  An id outside of 0 ... R-1 stops the run.
    """
    ensure(a.ndim >= 2 and a.ndim == b.ndim, "a and b must have two axes or more, and as many")
    ensure(b.shape[:-2] == a.shape[:-2] and b.shape[-1] == a.shape[-1], "a and b may differ only in their rows")
    check_lists(ids, a.shape, b.shape[-2])
    return a.spec


@set_rows.grad
def _(t, dout):
    _, b, ids = t.src
    zeros = broadcast_to(tensor(0.0), shape=b.shape)
    return set_rows(dout, zeros, ids), set_rows_back(dout, ids), None


@set_rows.reference
def _(a, b, ids):
    check_ids("set_rows", ids, a.shape[-2])
    out, ids = a.copy(), tiled_lists(ids, a.shape)
    for i in range(b.shape[-2]):
        np.put_along_axis(out, ids[..., i, None, None], b[..., i, None, :], axis=-2)
    return out


@op(layout="any")
def set_rows_back(dout, ids: Int):
    """The gradient of `set_rows` by b: row ids[i] of dout[..., R, n] for each i, zeros if a later one has its id."""
    ensure(dout.ndim >= 2, "dout must have two axes or more: [rows, n]")
    ensure(ids.ndim > 0, "one id is no list")
    check_lists(ids, dout.shape, ids.shape[-1])
    return Spec((*dout.shape[:-2], ids.shape[-1], dout.shape[-1]))


@set_rows_back.grad
def _(t, dout):
    return set_rows(broadcast_to(tensor(0.0), shape=t.src[0].shape), dout, t.src[1]), None


@set_rows_back.reference
def _(dout, ids):
    check_ids("set_rows_back", ids, dout.shape[-2])
    ids = tiled_lists(ids, dout.shape)
    later = np.triu(np.ones((ids.shape[-1],) * 2, bool), 1)
    replaced = ((ids[..., :, None] == ids[..., None, :]) & later).any(axis=-1)
    return np.where(replaced[..., None], 0, np.take_along_axis(dout, ids[..., None], axis=-2))


def check_lists(ids, shape: tuple[int, ...], rows: int) -> None:
    ensure(ids.ndim > 0 and ids.shape[-1] == rows, f"ids must have one for each of {rows} rows")
    ensure(tiles(ids.shape[:-1], shape[:-2]), f"lists {ids.shape[:-1]} do not tile the batch {shape[:-2]}")


def tiled_lists(ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One list for each matrix of the shape."""
    batch = shape[:-2]
    lists = ids.reshape((1,) * (len(batch) + 1 - ids.ndim) + ids.shape)
    return np.tile(lists, [*(m // max(1, n) for m, n in zip(batch, lists.shape, strict=False)), 1])


def check_ids(name: str, ids: np.ndarray, rows: int) -> None:
    wrong = (ids < 0) | (ids >= rows)
    if wrong.any():
        raise IndexRangeError(f"{name}: ids holds {ids[wrong].flat[0]}, and must be from 0 to {rows - 1}")


def _short(index) -> str:
    return f"{index.dtype}{list(index.shape)}" if isinstance(index, (np.ndarray, Tensor)) else repr(index)


@provides
def indexed(x: Tensor, index) -> Tensor:
    """`x[index]`: what NumPy calls basic indexing, see `slice_of`, or one array that chooses along the first axis.

    An array of integers, a list of them, or an i32 tensor gathers, and so does a 1-D array of bool: a copy, by
    `get_rows`, with a gradient.  How many are chosen must be known when the graph is built: where a mask is itself a
    tensor, multiply by it.

    Args:
        x: f32, or halves, which give f32; with an array as index.

    Raises:
        ShapeError: an index out of range, or one that only NumPy understands; what to use instead is said.
    """
    if not isinstance(index, (list, np.ndarray, Tensor)) or np.ndim(index) == 0 and not isinstance(index, Tensor):
        return slice_of(x, index)
    where = f"{x.label()}[{_short(index)}]"
    if not x.ndim:
        raise ShapeError(f"{where}: a scalar has no axis to choose from")
    if isinstance(index, Tensor):
        if index.dtype is not I32:
            raise ShapeError(f"{where}: a tensor that chooses is of i32, not {index.dtype}; multiply by a mask")
        ids = index
    else:
        chosen = np.asarray(index)
        if chosen.dtype == bool:
            if chosen.shape != x.shape[:1]:
                raise ShapeError(f"{where}: a mask that chooses has shape {x.shape[:1]}; multiply by one of others")
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64) if not chosen.size else chosen
        if not np.issubdtype(chosen.dtype, np.integer):
            raise ShapeError(f"{where}: an array that chooses holds integers or bools, not {chosen.dtype}")
        n = x.shape[0]
        wrong = chosen[(chosen < -n) | (chosen >= n)]
        if wrong.size:
            raise ShapeError(f"{where}: index {wrong.flat[0]} is out of range for size {n}")
        ids = tensor(np.where(chosen < 0, chosen + n, chosen).astype(np.int32))
    rest = x.shape[1:]
    rows = get_rows(reshape(x, (x.shape[0], prod(rest))), reshape(ids, (ids.size,)))
    return reshape(rows, (*ids.shape, *rest))
