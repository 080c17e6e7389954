"""A function of tensors as two programs, its results and its gradients, that are called on memory of others.

The gradients are told where the inputs, the results and the residuals lie which the first program left: whoever calls
both keeps these, so that any number of first calls may come before their second ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..core.builtin import builtin
from ..core.dtype import F32, DType
from ..core.errors import GraphError
from ..core.program import Program
from ..core.tensor import Tensor, contiguous_strides, tensor
from ..diff.autodiff import gradients_by
from ..ops.layout import view
from ..run.bound import Bound


@dataclass(frozen=True)
class Layout:
    """An array without gaps, whose axes lie in memory in some order.

    Attributes:
        shape: its sizes.
        dtype: of its elements.
        order: its axes, outermost first as they lie in memory.
    """

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: DType, strides: Sequence[int] | None = None) -> Layout | None:
        """That of an array with these strides, in elements; None if it has gaps or overlaps."""
        sizes, axes = tuple(shape), range(len(shape))
        in_order = cls(sizes, dtype, tuple(axes))
        if strides is None or in_order.lies(strides):
            return in_order
        made = cls(sizes, dtype, tuple(sorted(axes, key=lambda i: (sizes[i] != 1, -strides[i]))))
        return made if made.lies(strides) else None

    def lies(self, strides: Sequence[int]) -> bool:
        """Whether an array of this shape with these strides, in elements, lies like this."""
        return not prod(self.shape) or all(
            n == 1 or s == t for n, s, t in zip(self.shape, strides, self.strides, strict=True)
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """From one element to the next along each axis, in elements."""
        steps, step = [0] * len(self.shape), 1
        for axis in reversed(self.order):
            steps[axis], step = step, step * self.shape[axis]
        return tuple(steps)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.dtype.bytes_of(prod(self.shape))

    def leaf(self) -> tuple[Tensor, Tensor]:
        """A leaf that lies like this, and the tensor of this shape that looks at it."""
        t = tensor(shape=tuple(self.shape[i] for i in self.order), dtype=self.dtype)
        if self.order == tuple(range(len(self.order))):
            return t, t
        return t, builtin.permute(t, axes=tuple(self.order.index(i) for i in range(len(self.order))))


@dataclass(frozen=True)
class Strided:
    """An array with gaps, or whose elements are seen more than once, that is only read.

    Attributes:
        shape: its sizes.
        dtype: of its elements.
        strides: from one element to the next along each axis, in elements, 0 or more.
    """

    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...]

    def leaf(self) -> tuple[Tensor, Tensor]:
        """A leaf from the first element to the last, and the tensor that looks at what is meant of it."""
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        t = tensor(shape=size if prod(self.shape) else 0, dtype=self.dtype)
        return t, view(t, self.shape, [step * self.dtype.nbytes for step in self.strides])


class Compiled:
    """Results of some leaves, as two programs: `of` makes them of a function.

    Args:
        leaves: what comes with each call.
        views: of each leaf the tensor to differentiate by: itself, or a look at it.
        results: what is made of them.
        wanted: of which leaves gradients may be asked for; of those that are floats there are some.

    Attributes:
        results: the layouts of what the first program writes.
    """

    def __init__(
        self, leaves: Sequence[Tensor], views: Sequence[Tensor], results: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        self._leaves, self._views = list(leaves), list(views)
        self._results = _apart(results)
        self.results = [_layout(y) for y in self._results]
        self._wanted = [x for x, w in zip(views, wanted, strict=True) if w and x.dtype.is_float]

    @classmethod
    def of(cls, function: Callable, inputs: Sequence[Layout | Strided], wanted: Sequence[bool]) -> Compiled:
        """Of a function from tensors to a tensor or a tuple of tensors, for arguments that lie like this.

        Raises:
            GraphError: it gives something else.
        """
        pairs = [layout.leaf() for layout in inputs]
        leaves, views = [leaf for leaf, _ in pairs], [view for _, view in pairs]
        made = function(*views)
        results = made if isinstance(made, tuple) else (made,)
        if not all(isinstance(y, Tensor) for y in results):
            raise GraphError(f"the function must give a tensor or a tuple of tensors, not {made!r}")
        return cls(leaves, views, results, wanted)

    @property
    def inputs(self) -> list[Layout]:
        """How the leaves lie, if they have no gaps."""
        return [_layout(x) for x in self._views]

    @cached_property
    def _gradients(self) -> list[Tensor | None]:
        douts = [_as_float(y, view) for y, (_, view) in zip(self._results, self._douts, strict=True)]
        starts = {y: d for y, d in zip(self._results, douts, strict=True) if d is not None}
        found = dict(zip(self._wanted, gradients_by(self._wanted, starts), strict=True))
        made = [found.get(x) for x in self._views]
        cast = [
            g if g is None or g.dtype is dtype else builtin.cast(g, dtype=dtype)
            for g, dtype in zip(made, [leaf.dtype for leaf in self._leaves], strict=True)
        ]
        apart = iter(_apart([g for g in cast if g is not None]))
        return [None if g is None else next(apart) for g in cast]

    @cached_property
    def _douts(self) -> list[tuple[Tensor, Tensor]]:
        return [layout.leaf() for layout in self.results]

    @cached_property
    def gradients(self) -> list[Layout | None]:
        """By each leaf; None where the results do not depend on it, or it was not wanted."""
        return [None if g is None else _layout(g) for g in self._gradients]

    @cached_property
    def _backward(self) -> tuple[Bound, set[Tensor], list[Tensor]]:
        """The program of the gradients, the cells that it reads, and those that are neither input nor result."""
        forward = Program()
        forward.expand(self._results)
        program = Program(given=forward.nodes)
        roots = [g for g in self._gradients if g is not None]
        program.expand(roots)
        program.roots.extend(roots)
        written = [g.cell[0] for g in roots]
        douts = [leaf for leaf, _ in self._douts]
        read = _cells_read(program)
        residuals_and_results = {cell for cell in read if cell.storage[0] in program.given}
        results = {y.cell[0] for y in self._results}
        residuals = sorted(residuals_and_results - results, key=lambda t: t.serial)
        saved = [t for t in (*self._leaves, *(y.cell[0] for y in self._results)) if t in read]
        return Bound(program, [*saved, *residuals, *douts, *written]), read, residuals

    @cached_property
    def residuals(self) -> list[Layout]:
        """What the gradients read beside leaves and results."""
        return [_layout(t) for t in self._backward[2]]

    @cached_property
    def saves(self) -> list[bool]:
        """Which inputs, and then which results, the gradients read."""
        read = self._backward[1]
        return [t in read for t in (*self._leaves, *(y.cell[0] for y in self._results))]

    @cached_property
    def plain(self) -> Bound:
        """Called with the addresses of inputs and results."""
        return self._forward([])

    @cached_property
    def forward(self) -> Bound:
        """Called with the addresses of inputs, results and residuals."""
        return self._forward(self._backward[2])

    @property
    def backward(self) -> Bound:
        """Called with the addresses of the inputs and results that are saved, of the residuals, of the gradients of the
        results, and of those to be written, without the Nones."""
        return self._backward[0]

    def _forward(self, residuals: list[Tensor]) -> Bound:
        program = Program()
        program.expand(self._results)
        program.roots.extend([*self._results, *residuals])
        return Bound(program, [*self._leaves, *(y.cell[0] for y in self._results), *residuals])


def _cells_read(program: Program) -> set[Tensor]:
    return {s.cell[0] for t in program.nodes if not t.is_view for s in t.src if s is not None}


def _as_float(y: Tensor, dout: Tensor) -> Tensor | None:
    """The gradient of a result, f32; None of integers, which have none."""
    if not y.dtype.is_float:
        return None
    return dout if dout.dtype is F32 else builtin.cast(dout, dtype=F32)


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values, each of which has all of some memory that is its alone: copies, where they have not."""
    taken: set[Tensor] = set()
    made = []
    for t in tensors:
        cell, offset = t.cell
        alone = not cell.is_leaf and not cell.is_packed and cell not in taken and offset == 0 and t.size == cell.size
        if t.updates or not alone or _dense(t) is None:
            t = builtin.cont(t)
        taken.add(t.cell[0])
        made.append(t)
    return made


def _dense(t: Tensor) -> Layout | None:
    return Layout.of(t.shape, t.dtype, [s // t.dtype.nbytes for s in t.strides])


def _layout(t: Tensor) -> Layout:
    layout = _dense(t)
    assert layout is not None, f"{t.label()} has gaps: {t.strides}, not {contiguous_strides(t.shape, t.dtype)}"
    return layout
