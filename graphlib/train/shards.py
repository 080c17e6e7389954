"""One optimizer for several ranks: each keeps the moments of a part of all parameters and makes its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.tensor import Tensor, tensor
from ..ops.collective import all_gather_into, all_reduce, all_reduce_bucket, reduce_scatter_bucket
from ..ops.optim import global_norm
from ..ops.unary import sqr, sqrt


@dataclass(frozen=True, eq=False)
class Piece:
    """Of a parameter what belongs to this rank.

    Attributes:
        leaf: a 1-D leaf that lies in the parameter's memory.
        begin, end: which of its elements, in order, those are.
        grad: their gradients, summed over the ranks.
    """

    param: Tensor
    leaf: Tensor
    begin: int
    end: int
    grad: Tensor


class Shards:
    """All parameters laid out one after another, cut into equal parts for the ranks of a group.

    Args:
        grads: of the parameters, this rank's.
        ordered: see `all_reduce_bucket`.
    """

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], comm: Any, *, ordered: bool) -> None:
        self.params, self.comm, self.pieces = params, comm, list[Piece]()
        mine = reduce_scatter_bucket(*grads, comm=comm, ordered=ordered)
        first = comm.rank * mine.size
        at = 0
        for p in params:
            begin, end = max(first - at, 0), min(first + mine.size - at, p.size)
            if begin < end:
                leaf = tensor(shape=(end - begin,), name=p.name)
                leaf._data = p.memory().reshape(-1)[begin:end]
                here = at + begin - first
                self.pieces.append(Piece(p, leaf, begin, end, mine[here : here + end - begin]))
            at += p.size

    def norm(self) -> Tensor:
        """Of the gradients of all ranks together: a scalar, the same bits on each."""
        square = tensor(0.0)
        if self.pieces:
            square = sqr(global_norm(*(piece.grad for piece in self.pieces)))
        return sqrt(all_reduce(square, comm=self.comm))

    def gather(self, stepped: Sequence[Tensor]) -> Tensor:
        """The node that brings all parameters up to date everywhere, after the steps of this rank's pieces."""
        return all_gather_into(*stepped, *self.params, comm=self.comm, own=len(stepped))

    def whole(self, moments: dict[str, Tensor], names: dict[str, Piece]) -> dict[str, Tensor]:
        """Moments of whole parameters, put together from those of all ranks.

        Args:
            moments: this rank's, by name, which all ranks of a parameter share.
            names: whose moment it is.
        """
        told = self.comm.exchange([(name, names[name].begin, m.memory().copy()) for name, m in moments.items()])
        shapes = {p.name: p.shape for p in self.params}
        made: dict[str, Tensor] = {}
        for name, begin, memory in (entry for rank in told for entry in rank):
            if name not in made:
                made[name] = tensor(shape=shapes[name.rpartition("/")[0]], name=name, role="moment")
            made[name].memory().reshape(-1)[begin : begin + memory.size] = memory
        return made

    def take(self, whole: dict[str, Tensor], moments: dict[str, Tensor], names: dict[str, Piece]) -> None:
        """The other way: this rank's moments from those of whole parameters."""
        for name, m in moments.items():
            m.memory()[...] = whole[name].memory().reshape(-1)[names[name].begin : names[name].end]


def summed(grads: Sequence[Tensor], comm: Any, *, ordered: bool) -> list[Tensor]:
    """The gradients' sums over the ranks, sent in buckets of some size."""
    made: list[Tensor] = []
    bucket: list[Tensor] = []
    for g in grads:
        bucket.append(g)
        if sum(b.nbytes for b in bucket) >= BUCKET or g is grads[-1]:
            sums = all_reduce_bucket(*bucket, comm=comm, ordered=ordered)
            made += sums if isinstance(sums, tuple) else (sums,)
            bucket = []
    return made


BUCKET = 1 << 25  # bytes
