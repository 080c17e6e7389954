"""Ops over a group of ranks, each of which runs a graph of its own; see `ggrad.distributed`.

One rule holds for all gradients: what is differentiated is the sum of the losses of all ranks.  So the gradient of a
collective is its transpose: what went from one rank to another comes back the other way.

They are Python callbacks, which a run calls one after another in the order in which they were made.  Before a graph's
first run the ranks compare what they are about to do, so that nobody waits for what never comes.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np

from ..core.dtype import BF16, F16, F32, I32, bf16_values
from ..core.errors import DistributedError
from ..core.op import Any4, Op, ensure, op
from ..core.tensor import Pack, Spec, Tensor, Update, View, tensor
from ..jit.callback import Callback
from .elementwise import scale
from .layout import broadcast_to

__all__ = [
    "after", "all_gather", "all_reduce", "all_to_all", "broadcast", "counted_once",
    "reduce_scatter", "reduce_to", "replicated", "shift",
]  # fmt: skip

Moved = Annotated[Tensor, (F32, F16, BF16, I32)]  # sums of halves are f32 on the way, and rounded once


@runtime_checkable
class Communicator(Protocol):
    """What a collective asks of its group: a `ggrad.distributed.Comm`."""

    rank: int
    size: int
    ranks: tuple[int, ...]

    def exchange(self, value: Any) -> list: ...
    def all_reduce(self, a: np.ndarray, *, ordered: bool = False) -> np.ndarray: ...
    def all_gather(self, a: np.ndarray) -> np.ndarray: ...
    def reduce_scatter(self, a: np.ndarray) -> np.ndarray: ...
    def all_to_all(self, a: np.ndarray) -> np.ndarray: ...
    def shift(self, a: np.ndarray, by: int) -> np.ndarray: ...
    def broadcast(self, a: np.ndarray, root: int = 0) -> np.ndarray: ...
    def waiting(self, what: object) -> Any: ...


# -- the ops ----------------------------------------------------------------------------------------------------


@op(layout="contiguous")
def all_reduce(x: Moved, *, comm: Any):
    """The sum of x over all ranks, the same bits on each.

    Args:
        x: of the same shape on all ranks.
        comm: the group, a `ggrad.distributed.Comm`.
    """
    _check_group(comm)
    return x.spec


@all_reduce.grad
def _(t, dout):
    return (all_reduce(dout, **t.attrs),)


@all_reduce.reference
def _(x, *, comm):
    return comm.all_reduce(x)


@op(layout="any")
def replicated(x: Moved, *, comm: Any):
    """x, which all ranks have alike: a parameter, say.  Its gradient is the sum over all ranks; nothing is sent before.

    Args:
        x: of the same shape on all ranks.
        comm: the group.
    """
    _check_group(comm)
    return View(x, x.shape, x.strides)


@replicated.grad
def _(t, dout):
    return (all_reduce(dout, **t.attrs),)


@replicated.reference
def _(x, *, comm):
    return x


@op(layout="any")
def counted_once(x: Moved, *, comm: Any):
    """x, which all ranks have alike, as their shares of it: a loss that each of them makes as a whole, say.

    The sum over the ranks, which is what gradients are of, then has it once: its gradient is divided by their number.
    """
    _check_group(comm)
    return View(x, x.shape, x.strides)


@counted_once.grad
def _(t, dout):
    return (scale(dout, factor=1 / t.attrs["comm"].size),)


@counted_once.reference
def _(x, *, comm):
    return x


@op(layout="contiguous")
def all_gather(x: Moved, *, axis: int, comm: Any):
    """The arrays of all ranks one after another along an axis, in the order of ranks.

    Args:
        x: of the same shape on all ranks.
        axis: which grows by the number of ranks.
        comm: the group.
    """
    _check_group(comm)
    _check_axis("axis", axis, x)
    return Spec(_resized(x.shape, axis, x.shape[axis] * comm.size), x.dtype)


@all_gather.grad
def _(t, dout):
    return (reduce_scatter(dout, **t.attrs),)


@all_gather.reference
def _(x, *, axis, comm):
    return _joined(comm.all_gather(x), axis)


@op(layout="contiguous")
def reduce_scatter(x: Moved, *, axis: int, comm: Any):
    """The sum of x over all ranks, cut along an axis: each rank has its part.

    Args:
        x: of the same shape on all ranks, its axis a multiple of their number.
        axis: which is cut.
        comm: the group.
    """
    _check_group(comm)
    _check_cut("axis", axis, x, comm)
    return Spec(_resized(x.shape, axis, x.shape[axis] // comm.size), x.dtype)


@reduce_scatter.grad
def _(t, dout):
    return (all_gather(dout, **t.attrs),)


@reduce_scatter.reference
def _(x, *, axis, comm):
    return comm.reduce_scatter(_cut(x, axis, comm.size))


@op(layout="contiguous")
def all_to_all(x: Moved, *, split: int, join: int, comm: Any):
    """Cut along one axis, each rank gets its part of every rank's array, and has them one after another along another.

    Args:
        x: of the same shape on all ranks, its axis `split` a multiple of their number.
        split: the axis that is cut.
        join: the axis along which what comes is put together, in the order of ranks; it may be the same.
        comm: the group.
    """
    _check_group(comm)
    _check_axis("join", join, x)
    _check_cut("split", split, x, comm)
    shape = _resized(x.shape, split, x.shape[split] // comm.size)
    return Spec(_resized(shape, join, shape[join] * comm.size), x.dtype)


@all_to_all.grad
def _(t, dout):
    split, join, comm = t.attrs["split"], t.attrs["join"], t.attrs["comm"]
    return (all_to_all(dout, split=join, join=split, comm=comm),)


@all_to_all.reference
def _(x, *, split, join, comm):
    return _joined(comm.all_to_all(_cut(x, split, comm.size)), join)


@op(layout="contiguous")
def shift(x: Moved, *, by: int = 1, comm: Any):
    """What rank - by has, in a ring: each rank's x goes to rank + by.

    Args:
        x: of the same shape on all ranks.
        by: how far.
        comm: the group.
    """
    _check_group(comm)
    return x.spec


@shift.grad
def _(t, dout):
    return (shift(dout, by=-t.attrs["by"], comm=t.attrs["comm"]),)


@shift.reference
def _(x, *, by, comm):
    return comm.shift(x, by)


@op(layout="contiguous")
def broadcast(x: Moved, *, root: int = 0, comm: Any):
    """What rank `root` has, on all ranks.

    Args:
        x: of the same shape on all ranks; only the root's values are used.
        root: a rank of the group.
        comm: the group.
    """
    _check_group(comm)
    _check_root(root, comm)
    return x.spec


@broadcast.grad
def _(t, dout):
    return (reduce_to(dout, **t.attrs),)


@broadcast.reference
def _(x, *, root, comm):
    return comm.broadcast(x, root)


@op(layout="contiguous")
def reduce_to(x: Moved, *, root: int = 0, comm: Any):
    """The sum of x over all ranks, on rank `root`; zeros on the others.

    Args:
        x: of the same shape on all ranks.
        root: a rank of the group.
        comm: the group.
    """
    _check_group(comm)
    _check_root(root, comm)
    return x.spec


@reduce_to.grad
def _(t, dout):
    return (broadcast(dout, **t.attrs),)


@reduce_to.reference
def _(x, *, root, comm):
    total = comm.all_reduce(x)
    return total if comm.rank == root else np.zeros_like(total)


@op(layout="any")
def after(*xs: Any4):
    """The first one.  The others are computed too, though nothing else may need them: a collective that one rank does
    not use, and the others do.  Their gradients are zero.
    """
    ensure(len(xs) > 0, "nothing is given")
    return View(xs[0], xs[0].shape, xs[0].strides)


@after.grad
def _(t, dout):
    return (dout, *(broadcast_to(tensor(0.0), shape=x.shape) if x.dtype.is_float else None for x in t.src[1:]))


@after.reference
def _(*xs):
    return xs[0]


@op(layout="contiguous")
def all_reduce_bucket(*xs, comm: Any, ordered: bool = False):
    """The sums of several tensors over all ranks, sent as one.

    Args:
        xs: of the same shapes on all ranks.
        comm: the group.
        ordered: let the bits depend on the values alone, and not on which rank has which of them: the terms of each
            element are added from the least to the largest, in double precision, and the sum is rounded once.
    """
    _check_group(comm)
    ensure(len(xs) > 0, "nothing to add up")
    return Pack(**{f"x{i}": Spec(x.shape) for i, x in enumerate(xs)})


@all_reduce_bucket.reference
def _(*xs, comm, ordered):
    flat = comm.all_reduce(np.concatenate([x.reshape(-1) for x in xs]), ordered=ordered)
    return _unpacked(flat, [x.shape for x in xs])


@op(layout="contiguous")
def reduce_scatter_bucket(*xs, comm: Any, ordered: bool = False):
    """The sums of several tensors over all ranks, laid out one after another and cut into equal parts: each rank has
    its part, the last ones with zeros behind the end.

    Args:
        xs, comm, ordered: as of `all_reduce_bucket`.
    """
    _check_group(comm)
    ensure(len(xs) > 0, "nothing to add up")
    return Spec((-(-sum(x.size for x in xs) // comm.size),))


@reduce_scatter_bucket.reference
def _(*xs, comm, ordered):
    total = sum(x.size for x in xs)
    rows = np.zeros((comm.size, -(-total // comm.size)), xs[0].dtype)
    rows.reshape(-1)[:total] = np.concatenate([x.reshape(-1) for x in xs])
    return comm.all_reduce(rows, ordered=True)[comm.rank] if ordered else comm.reduce_scatter(rows)


@op(layout="contiguous")
def all_gather_into(*tensors, comm: Any, own: int):
    """Writes into leaves what the ranks have of them: laid out one after another, each rank has an equal part.

    Args:
        tensors: first this rank's part in pieces, then the leaves.
        comm: the group.
        own: how many pieces there are, which differs between ranks.
    """
    _check_group(comm)
    ensure(0 <= own < len(tensors), f"own={own} of {len(tensors)} tensors leaves no leaves to write")
    whole, here = (sum(x.size for x in some) for some in (tensors[own:], tensors[:own]))
    part = -(-whole // comm.size)
    belongs = min(max(whole - comm.rank * part, 0), part)
    ensure(here == belongs, f"the pieces have {here} of {whole} elements, and rank {comm.rank} has {belongs}")
    return Update(*tensors[own:])


@all_gather_into.reference
def _(*tensors, comm, own):
    shapes = [x.shape for x in tensors[own:]]
    total = sum(x.size for x in tensors[own:])
    part = np.zeros(-(-total // comm.size), tensors[own].dtype)
    mine = np.concatenate([part[:0], *(x.reshape(-1) for x in tensors[:own])])
    part[: mine.size] = mine
    return _unpacked(comm.all_gather(part).reshape(-1)[:total], shapes)


# -- their kernels ----------------------------------------------------------------------------------------------


def _told(t: Tensor, arrays: list) -> tuple[np.ndarray, ...]:
    """What the node's reference says, in the precision that its inputs are stored in."""
    comm, sources = t.attrs["comm"], [s for s in t.src if s is not None]
    wide = [bf16_values(a) if s.dtype is BF16 else a for s, a in zip(sources, arrays, strict=True)]
    if t.op in SUMS:  # of integers too, so that one beyond i32 is found and not wrapped
        wider = {F16: np.float32, I32: np.int64}
        wide = [a.astype(wider.get(s.dtype, a.dtype)) for s, a in zip(sources, wide, strict=True)]
    with comm.waiting(t):
        made = t.op.compute_reference(wide, t.attrs)  # type: ignore[union-attr]
    return made if t.parts or t.updates else (made,)


SUMS = (all_reduce, reduce_scatter, reduce_to)
COLLECTIVES: tuple[Op, ...] = (
    *SUMS, all_gather, all_to_all, shift, broadcast, all_reduce_bucket, reduce_scatter_bucket, all_gather_into,
)  # fmt: skip


def agree(nodes: Sequence[Tensor]) -> None:
    """Whether all ranks of each group are about to do the same with it.

    Raises:
        DistributedError: on all of them; it names the first node that differs.
    """
    groups: dict[tuple, tuple[Communicator, list[str]]] = {}
    for t in nodes:
        comm = t.attrs["comm"]
        if comm.size > 1:
            groups.setdefault((comm.ranks, id(comm)), (comm, []))[1].append(_described(t))
    for _, (comm, lines) in sorted(groups.items(), key=lambda group: group[0][0]):  # one order for all ranks
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        with comm.waiting("the comparison of graphs before their first run"):
            if len(set(comm.exchange(digest))) > 1:
                _say_where(comm, comm.exchange(lines))


def _described(t: Tensor) -> str:
    attrs = [f"{name}={value!r}" for name, value in t.attrs.items() if name not in ("comm", "own")]
    shapes = [str(s.spec) for s in t.src[t.attrs.get("own", 0) :] if s is not None]
    return f"{t.op.name}({', '.join(shapes + attrs)}) over ranks {list(t.attrs['comm'].ranks)}"  # type: ignore[union-attr]


def _say_where(comm: Communicator, told: list[list[str]]) -> None:
    most = max(map(len, told))
    for i in range(most):
        here = [lines[i] if i < len(lines) else "nothing more" for lines in told]
        if len(set(here)) > 1:
            shown = "\n".join(f"  rank {r}: {what}" for r, what in zip(comm.ranks, here, strict=True))
            raise DistributedError(f"the graphs of the ranks differ; the first difference is collective {i}:\n{shown}")


for _op in COLLECTIVES:
    _op.in_python = Callback(_op.name, _told)
    _op.before_first_run = agree


# -- helpers ----------------------------------------------------------------------------------------------------


def _check_group(comm: Any) -> None:
    ensure(isinstance(comm, Communicator), f"comm must be a group of ranks, as distributed.init() gives, not {comm!r}")


def _check_axis(name: str, axis: int, x: Tensor) -> None:
    ensure(0 <= axis < x.ndim, f"{name}={axis} is no axis of x, which has {x.ndim}")


def _check_cut(name: str, axis: int, x: Tensor, comm: Communicator) -> None:
    _check_axis(name, axis, x)
    ensure(x.shape[axis] % comm.size == 0, f"{name}={axis} has {x.shape[axis]} places, not a multiple of {comm.size}")


def _check_root(root: int, comm: Communicator) -> None:
    ensure(0 <= root < comm.size, f"root={root} is no rank of a group of {comm.size}")


def _resized(shape: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    return (*shape[:axis], n, *shape[axis + 1 :])


def _cut(x: np.ndarray, axis: int, n: int) -> np.ndarray:
    """Into n parts along the axis: [n, ...]."""
    return np.stack(np.split(x, n, axis))


def _joined(parts: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(list(parts), axis)


def _unpacked(flat: np.ndarray, shapes: list[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
    ends = np.cumsum([int(np.prod(s)) for s in shapes])
    return tuple(part.reshape(s) for part, s in zip(np.split(flat, ends[:-1]), shapes, strict=True))
