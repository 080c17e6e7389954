"""Runs a graph in NumPy, in double precision, from each op's reference: what the kernels are judged by."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..core.dtype import BF16, I32, bf16_bits, bf16_values
from ..core.errors import IndexRangeError, NotComputedError, not_whole
from ..core.op import Op, part
from ..core.quant import dequantize
from ..core.tensor import Tensor
from ..graph import Graph
from .finite import check_finite


@np.errstate(all="ignore")  # NaN and infinities come out, as they do of kernels
def evaluate(
    graph: Graph, values: dict[Tensor, np.ndarray], keep: set[Tensor] | None = None
) -> dict[Tensor, np.ndarray]:
    """Values of the graph's tensors, given those of its leaves.

    Args:
        values: of every leaf; not changed.
        keep: forget every other result as soon as its last user has run; None keeps all.

    Returns:
        float64 and int64 arrays; a packed result is a tuple of its parts.  A leaf that the graph
        updates has its new value, as has the update's result.
    """
    env = {t: np.asarray(v, np.float64 if t.dtype.is_float else np.int64) for t, v in values.items()}
    uses = Counter(s for t in graph.nodes for s in t.src if s is not None)
    kept = None
    if keep is not None:  # of a packed result all parts, and of a part all of the result
        kept = keep | {p for t in keep for p in t.parts} | {t.base for t in keep if t.op is part}
    for t in graph.nodes:
        src = [None if s is None else env[s] for s in t.src]
        if t.op is part:
            env[t] = src[0][t.attrs["index"]]  # type: ignore[index]
        elif t.updates:
            made = _compute(t, src)
            for leaf, value in zip(t.updates, made, strict=True):
                env[leaf] = value
            env[t] = made[0]
        else:
            env[t] = _checked(t, _compute(t, src))
        if kept is not None:
            for s in t.src:
                if s is not None:
                    uses[s] -= 1
                    if not uses[s] and not s.is_leaf and s not in kept:
                        del env[s]
    return env


def _compute(t: Tensor, src: list[np.ndarray | None]):
    op: Op = t.op  # type: ignore[assignment]
    try:
        return op.compute_reference(src, t.attrs)
    except IndexRangeError as error:  # in the words of a native run
        found = str(error).removeprefix(f"{op.name}: ")
        raise IndexRangeError(
            f"{op.name}({op._given(list(t.src))}): {found}. What is made of it was not computed"
        ) from None


def run(graph: Graph, *, finite: bool = False) -> None:
    """`graph.compute(backend="reference")`: leaves give their values, updated ones are written back.

    Args:
        finite: raise NotFiniteError, and update no leaf, if some result is not.
    """
    if isinstance(shown := graph._shown, ReferenceRun):
        shown.whole = False
    kept = graph.kept
    kept |= {owner for t in kept if not (owner := t.storage[0]).is_leaf}
    values = {leaf: leaf_value(leaf) for leaf in graph.leaves}
    env = evaluate(graph, values, None if finite else kept)
    if finite:
        check_finite([t for t in graph.nodes if not t.is_view], lambda t: values[t] if t in values else env[t])
    for t in graph.nodes:
        for leaf in t.updates:
            leaf.memory()[...] = bf16_bits(env[leaf]) if leaf.dtype is BF16 else env[leaf]
    result = ReferenceRun({t.serial: env[t] for t in kept})
    graph._shown = result
    for t in kept:
        t.storage[0]._run = result


def leaf_value(leaf: Tensor) -> np.ndarray:
    """A leaf's value in double precision (int64 for i32)."""
    memory = leaf.memory()
    if leaf.dtype is BF16:
        memory = bf16_values(memory)
    elif leaf.dtype.quantized:
        memory = dequantize(memory, leaf.dtype)
    return memory.astype(np.int64 if leaf.dtype is I32 else np.float64)


class ReferenceRun:
    """The values that a run in NumPy has kept, by their tensors' numbers: tensors hold it, and it holds none."""

    def __init__(self, values: dict[int, np.ndarray]) -> None:
        self.values = values
        self.whole = True  # until a later run of the graph begins

    def read(self, t: Tensor) -> np.ndarray:
        if not self.whole:
            raise not_whole(t)
        value = self.values.get(t.serial)
        if value is None:
            value = self._through_owner(t)
        if isinstance(value, tuple):
            value = _flat(t, value)
        value = np.asarray(value).view()
        value.flags.writeable = False
        return value

    def _through_owner(self, t: Tensor) -> np.ndarray:
        """A view or part of a value that was kept, cut from it."""
        owner, offset = t.storage
        whole = self.values.get(owner.serial)
        if whole is None:
            raise NotComputedError(
                f"{t.label()} cannot be read: gg.set_output(t) before graph.compute() keeps its bytes"
            )
        flat = np.ascontiguousarray(_flat(owner, whole) if isinstance(whole, tuple) else whole)
        wide = flat.itemsize // owner.dtype.nbytes  # strides count bytes of the storage type
        strides = tuple(s * wide for s in t.strides)
        return np.ndarray(t.shape, flat.dtype, flat.reshape(-1).data if flat.size else b"", offset * wide, strides)


def _flat(packed: Tensor, values: tuple[np.ndarray, ...]) -> np.ndarray:
    """A packed result as its 1-D buffer, padding zero."""
    flat = np.zeros(packed.shape)
    for p, value in zip(packed.parts, values, strict=True):
        start = p.offset // packed.dtype.nbytes
        flat[start : start + p.size] = value.reshape(-1)
    return flat


def _checked(t: Tensor, made):
    """What a reference gave, in the shapes and dtypes that the shape rule promised."""
    values = made if t.is_packed else (made,)
    out = []
    for p, value in zip(t.outputs, values, strict=True):
        value = np.asarray(value, np.float64 if p.dtype.is_float else np.int64)
        assert value.shape == p.shape, f"the reference of {t.op.name} gave {value.shape} for {p.spec}"  # type: ignore[union-attr]
        out.append(value)
    return tuple(out) if t.is_packed else out[0]
