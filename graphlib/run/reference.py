"""Runs a graph in NumPy, in double precision, from each op's reference: what the kernels are judged by."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from ..compile.plan import Plan, plan
from ..core.calls import application
from ..core.dtype import BF16, I32, bf16_bits, bf16_values
from ..core.errors import GraphError, IndexRangeError, NotComputedError, not_whole
from ..core.op import Op, part
from ..core.program import Program
from ..core.quant import dequantize
from ..core.tensor import Tensor, converted
from .finite import check_finite
from .profile import Profile


@np.errstate(all="ignore")  # NaN and infinities come out, as they do of kernels
def evaluate(
    program: Program, values: dict[Tensor, np.ndarray], keep: set[Tensor] | None = None
) -> dict[Tensor, np.ndarray]:
    """Values of the program's tensors, given those of its leaves.

    Args:
        values: of every leaf; not changed.
        keep: forget every other result as soon as its last user has run; None keeps all.

    Returns:
        float64 and int64 arrays; a packed result is a tuple of its parts.  A leaf that the program
        updates has its new value, as has the update's result.
    """
    env = {t: np.asarray(v, np.float64 if t.dtype.is_float else np.int64) for t, v in values.items()}
    uses = Counter(s for t in program.nodes for s in t.src if s is not None)
    kept = None
    if keep is not None:  # of a packed result all parts, and of a part all of the result
        kept = keep | {p for t in keep for p in t.parts} | {t.base for t in keep if t.op is part}
    for t in program.nodes:
        src = [None if s is None else env[s] for s in t.src]
        if t.op is part:
            env[t] = src[0][t.attrs["index"]]  # type: ignore[index]
        elif t.updates:
            made = computed(t, src)
            for leaf, value in zip(t.updates, made, strict=True):
                env[leaf] = value
            env[t] = made[0]
        else:
            env[t] = as_promised(t, computed(t, src))
        if kept is not None:
            for s in t.src:
                if s is not None:
                    uses[s] -= 1
                    if not uses[s] and not s.is_leaf and s not in kept:
                        del env[s]
    return env


def computed(t: Tensor, src: list[np.ndarray | None]):
    op: Op = t.op  # type: ignore[assignment]
    try:
        return op.compute_reference(src, t.attrs)
    except IndexRangeError as error:  # in the words of a native run
        found = str(error).removeprefix(f"{op.name}: ")
        raise IndexRangeError(f"{application(t)}: {found}. What is made of it was not computed") from None


class ReferenceRun:
    """A program as the references run it: leaves give their values, updated ones are written back."""

    def __init__(self, program: Program, *, reuse: bool) -> None:
        self.kept, self.reuse = program.kept, reuse
        self._program = program
        self._shown: ReferenceValues | None = None  # of the last run

    @cached_property
    def plan(self) -> Plan:
        """That of a run by kernels, but for their work memory: the arrays are NumPy's."""
        return plan(self._program, self.kept, reuse=self.reuse)

    def run(self, threads: int) -> None:
        """Run every node, on this thread."""
        self._run(finite=False)

    def run_checked(self, threads: int) -> None:
        """Run every node, and raise NotFiniteError, having updated no leaf, if some result is not finite."""
        self._run(finite=True)

    def profile(self, threads: int) -> Profile:
        raise GraphError("compute(profile=True): only the native backend can be profiled")

    def _run(self, *, finite: bool) -> None:
        if self._shown is not None:
            self._shown.whole = False
        program = self._program
        kept = self.kept | {owner for t in self.kept if not (owner := t.storage[0]).is_leaf}
        values = {leaf: leaf_value(leaf) for leaf in program.leaves}
        env = evaluate(program, values, None if finite else kept)
        if finite:
            check_finite([t for t in program.nodes if not t.is_view], lambda t: values[t] if t in values else env[t])
        for t in program.nodes:
            for leaf in t.updates:
                leaf.memory()[...] = bf16_bits(env[leaf]) if leaf.dtype is BF16 else env[leaf]
        self._shown = ReferenceValues({t.serial: env[t] for t in kept})
        for t in kept:
            t.storage[0].values = self._shown


def leaf_value(leaf: Tensor) -> np.ndarray:
    """A leaf's value in double precision (int64 for i32)."""
    memory = leaf.memory()
    if leaf.dtype is BF16:
        memory = bf16_values(memory)
    elif leaf.dtype.quantized:
        memory = dequantize(memory, leaf.dtype)
    return memory.astype(np.int64 if leaf.dtype is I32 else np.float64)


class ReferenceValues:
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

    def lend(self, t: Tensor) -> np.ndarray:
        return converted(np.asarray(self.read(t)), t.dtype, t.label())

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


def as_promised(t: Tensor, made):
    """What a reference gave, in the shapes and dtypes that the shape rule promised."""
    values = made if t.is_packed else (made,)
    out = []
    for p, value in zip(t.outputs, values, strict=True):
        value = np.asarray(value, np.float64 if p.dtype.is_float else np.int64)
        assert value.shape == p.shape, f"the reference of {t.op.name} gave {value.shape} for {p.spec}"  # type: ignore[union-attr]
        out.append(value)
    return tuple(out) if t.is_packed else out[0]
