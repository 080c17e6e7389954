"""Models that are cut over ranks: each has a part of the weights, and all have the same activations between layers.

All ranks of the group get the same inputs and make the same loss.  What is differentiated is the sum over the ranks:

- `counted_once(loss, comm)` is the loss as every rank's share of it.
- A parameter that all ranks have alike, a norm's say, is used as `replicated(p, comm)`; one that is cut, as it is.

With data parallelism on top, ranks form two kinds of groups: `comm.split(comm.rank // parts)` are those that share a
model, `comm.split(comm.rank % parts)` those that have the same part of it, which a `Trainer` is given.
"""

from __future__ import annotations

import numpy as np

from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from ..ops import add, cross_entropy_class, get_rows, log, mul, mul_mat
from ..ops import sum as total
from ..ops.collective import all_gather, all_reduce, replicated
from ..ops.custom import custom
from .comm import Comm


def part_of(array: np.ndarray, axis: int, comm: Comm) -> np.ndarray:
    """This rank's equal part of an array along an axis.

    Raises:
        ShapeError: the axis is no multiple of the ranks.
    """
    array = np.asarray(array)
    if array.shape[axis] % comm.size:
        raise ShapeError(f"axis {axis} of {list(array.shape)} cannot be cut into {comm.size} equal parts")
    return np.split(array, comm.size, axis)[comm.rank]


class ColumnLinear:
    """y = x @ w.T + bias of which each rank makes a part of the features.

    Args:
        weight: the whole [m, k], m a multiple of the ranks; heads of attention are such features too.
        bias: the whole [m].
        comm: the ranks that share it.
        name: of the parameters, "<name>.weight" and "<name>.bias"; those of all ranks have the same.
        gather: let every rank have all features in the end.

    Attributes:
        weight: this rank's rows, [m / R, k].
        bias: this rank's part, or None.
    """

    def __init__(self, weight, comm: Comm, *, bias=None, name: str = "", gather: bool = False) -> None:
        self.comm, self.gather = comm, gather
        self.weight = _param(part_of(weight, 0, comm), name, "weight")
        self.bias = None if bias is None else _param(part_of(bias, 0, comm), name, "bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., k], the same on all ranks.  [..., m / R], or [..., m] if it is gathered."""
        y = mul_mat(self.weight, x)
        y = y if self.bias is None else add(y, self.bias)
        return all_gather(y, axis=y.ndim - 1, comm=self.comm) if self.gather else y


class RowLinear:
    """y = x @ w.T + bias of which each rank has a part of the inputs, as a `ColumnLinear` gave them.

    Args:
        weight: the whole [m, k], k a multiple of the ranks.
        bias: the whole [m]; all ranks have it.
        comm, name: as of `ColumnLinear`.

    Attributes:
        weight: this rank's columns, [m, k / R].
        bias: [m], or None.
    """

    def __init__(self, weight, comm: Comm, *, bias=None, name: str = "") -> None:
        self.comm = comm
        self.weight = _param(part_of(weight, 1, comm), name, "weight")
        self.bias = None if bias is None else _param(bias, name, "bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., k / R], this rank's part.  [..., m], the same on all ranks."""
        y = all_reduce(mul_mat(self.weight, x), self.comm)
        return y if self.bias is None else add(y, replicated(self.bias, self.comm))


class Embedding:
    """Rows of a table that is cut by rows: each rank has those of a part of the vocabulary.

    Args:
        weight: the whole [vocabulary, d], the vocabulary a multiple of the ranks.
        comm, name: as of `ColumnLinear`.

    Attributes:
        weight: this rank's rows.
    """

    def __init__(self, weight, comm: Comm, *, name: str = "") -> None:
        self.comm = comm
        self.weight = _param(part_of(weight, 0, comm), name, "weight")

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: i32 [...], the same on all ranks.  [n, d] of n tokens, the same on all ranks.

        Raises:
            ShapeError: in a run, a token that is not in the vocabulary.
        """
        tokens = tokens.reshape(-1)
        here, inside = _of_this_part(tokens, self.weight.shape[0], self.comm, ignore_index=None)
        rows = mul(get_rows(self.weight, here), inside.reshape(-1, 1))
        return all_reduce(rows, self.comm)


def cross_entropy(logits: Tensor, targets: Tensor, comm: Comm, *, ignore_index: int = -100) -> Tensor:
    """The mean cross entropy with classes of logits that are cut by classes: a scalar, the same on all ranks.

    No rank ever has all logits: three numbers a row are sent.

    Args:
        logits: [n, classes / R], this rank's.
        targets: i32 [n], classes of the whole vocabulary, the same on all ranks.
        comm: the ranks that share the classes.
        ignore_index: rows with this class count for nothing.

    Raises:
        ShapeError: shapes do not fit; in a run, a target that is no class.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ShapeError(
            f"cross_entropy(): {logits.spec} and {targets.spec} are not logits [n, classes] and targets [n]"
        )
    n, classes = logits.shape
    here, inside = _of_this_part(targets, classes, comm, ignore_index=ignore_index)
    lse = _lse(logits, here).reshape(n, 1)
    every = all_gather(lse, axis=1, comm=comm)
    lse = _lse(every, tensor(np.zeros(n, np.int32)))
    places = custom(here, function=lambda h: np.arange(n) * classes + h, shape=(n,), dtype=I32)
    chosen = all_reduce(mul(get_rows(logits.reshape(n * classes, 1), places).reshape(n), inside), comm)

    def weights(t: np.ndarray) -> np.ndarray:
        counted = t != ignore_index
        return counted / max(1, np.count_nonzero(counted))

    return total(mul(lse - chosen, custom(targets, function=weights, shape=(n,))))


def _lse(x: Tensor, some_class: Tensor) -> Tensor:
    """log(sum of exp) of each row; the classes only have to be some that are there."""
    _, top, rest, _ = cross_entropy_class(x, some_class, ignore_index=-1)
    return top + log(rest)


def _of_this_part(ids: Tensor, rows: int, comm: Comm, *, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Numbers of rows of the whole as those of this rank's part, 0 for what is not in it; and 1 where it is, else 0."""
    first, whole = comm.rank * rows, comm.size * rows

    def places(t: np.ndarray) -> np.ndarray:
        wrong = (t < 0) | (t >= whole)
        if ignore_index is not None:
            wrong &= t != ignore_index
        if wrong.any():
            raise ShapeError(f"{t[wrong].flat[0]} is not in a vocabulary of {whole}")
        return np.where((t >= first) & (t < first + rows), t - first, 0)

    def inside(t: np.ndarray) -> np.ndarray:
        return ((t >= first) & (t < first + rows)).astype(np.float32)

    return (
        custom(ids, function=places, shape=ids.shape, dtype=I32),
        custom(ids, function=inside, shape=ids.shape),
    )


def _param(array, name: str, which: str) -> Tensor:
    return tensor(np.asarray(array), name=f"{name}.{which}" if name else "", param=True)
