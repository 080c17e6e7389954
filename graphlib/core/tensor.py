"""Tensors: the nodes of graphs.

A `Tensor` says what a value is (shape, dtype, layout) and how it comes about (op, sources,
attributes).  A leaf, which no op made, also owns the memory of its value; results live in the
memory of the graph that was last run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from .builtin import builtin
from .calls import Call, call_at_hand
from .dtype import ALL, BF16, F16, F32, I32, QUANTIZED, DType, bf16_bits, bf16_values
from .errors import GradientError, GraphError, NotComputedError, ShapeError
from .exchange import CPU, array_of, dlpack_of
from .quant import dequantize, quantize, row_bytes

if TYPE_CHECKING:
    from .op import Op

ALIGN = 64  # bytes; every buffer starts at a multiple
MEM_ALIGN = 16  # bytes, ggml's; every part of a packed buffer starts at a multiple
MAX_DIMS = 4
MOST_ELEMENTS = 1 << 60  # whose bytes C counts

_serials = itertools.count()


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@lru_cache(1 << 12)
def contiguous_strides(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis, without gaps; of quantized rows from block to block."""
    strides, step, block = [], dtype.nbytes, dtype.block
    for n in reversed(shape):
        strides.append(step)
        step, block = n // block * step, 1
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a fresh, contiguous result."""

    shape: tuple[int, ...]
    dtype: DType = F32

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.dtype.bytes_of(prod(self.shape))

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        return contiguous_strides(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Pack:
    """Several results in one buffer, one after another: the shape rule of a packed op returns one.

    Every part begins at a multiple of `MEM_ALIGN` bytes; the padding between them is zero.
    """

    op_of_parts: Op  # set where it is declared: the op of the views that the parts are
    wanted: tuple[bool, ...] | None = None  # of an op that makes some of its results: which of all; see `op.results`

    def __init__(self, **fields: Spec) -> None:
        self.fields = fields
        self.serials: list[int] = []  # of the parts, once there is a tensor
        self.offsets: list[int] = []
        end = 0
        for spec in fields.values():  # the only place that lays a packed buffer out
            self.offsets.append(end)
            end += round_up(spec.nbytes, MEM_ALIGN)
        self.nbytes = end

    def part(self, packed: Tensor, index: int) -> Tensor:
        """A look at one of the parts of the tensor that is laid out like this."""
        spec = [*self.fields.values()][index]
        return Tensor(
            spec.shape, spec.dtype, spec.strides, self.op_of_parts, (packed,), {"index": index},
            base=packed, offset=self.offsets[index], serial=self.serials[index],
        )  # fmt: skip


@dataclass(frozen=True)
class View:
    """Another look at `base`'s buffer: the shape rule of an op that moves no data returns one."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    offset: int = 0  # bytes from the first element of `base`
    behind: tuple[Tensor, ...] = ()  # what is complete before anything reads the view


class Update:
    """An op that writes into leaves it was given: its shape rule returns the targets, which must be inputs.

    The result is a look at the first target after the update.
    """

    def __init__(self, *targets: Tensor) -> None:
        self.targets = targets


class Run(Protocol):
    """Something that has computed values and can show them."""

    def read(self, t: Tensor) -> np.ndarray:
        """Its value, read-only, until the next run."""

    def lend(self, t: Tensor) -> np.ndarray:
        """Its value in the dtype's storage type, for whoever wants it to stay as it is."""


class Tensor:
    """A value in a graph: a leaf made by `ggrad.tensor`, or the result of an op.

    Attributes:
        shape: sizes in NumPy order, outermost first; at most four.
        dtype: `F32`, `F16`, `BF16` or `I32`; of constants also a quantized one.
        strides: bytes from one element to the next, along each axis.
        size: number of elements.
        nbytes: bytes of the elements; of a packed result also the padding.
        op, src, attrs: how it comes about; of a leaf: None, (), {}.
        name: for printing; need not be unique.
        role: "param", "constant", "moment", "accumulator", "counter", "rng" of a leaf, "" of a result.
        bound: of a result: the array it is written to, see `bind`; else None.
        prepared: of a frozen leaf: other forms of it that kernels made, each for as long as a session uses it.
    """

    __slots__ = (
        "shape", "dtype", "strides", "size", "nbytes", "_contiguous", "op", "src", "attrs", "base", "offset", "updates",
        "behind", "call", "name", "role", "prepared", "_output", "serial", "_pack", "_parts", "_data", "bound",
        "values", "__weakref__",
    )  # fmt: skip
    __array_ufunc__ = None  # array * tensor is ours to compute, not NumPy's

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        strides: tuple[int, ...],
        op: Op | None = None,
        src: tuple[Tensor | None, ...] = (),
        attrs: dict[str, Any] | None = None,
        *,
        base: Tensor | None = None,
        offset: int = 0,
        name: str = "",
        role: str = "",
        pack: Pack | None = None,
        serial: int | None = None,
    ) -> None:
        self.shape, self.dtype, self.strides = shape, dtype, strides
        self.size = prod(shape)  # these are asked for so often that they are kept
        self.nbytes = dtype.bytes_of(self.size)
        self._contiguous: bool | None = None
        self.op, self.src, self.attrs = op, src, attrs or {}
        self.base, self.offset = base, offset  # of a view: the tensor it looks into, and how far (bytes)
        self.behind: tuple[Tensor, ...] = ()  # of a view: what is complete before anything reads it
        self.updates: tuple[Tensor, ...] = ()  # of an update: the leaves among its sources that it writes
        self.call: Call | None = call_at_hand() if op is not None else None  # of a function that it is part of
        self.name, self.role, self._output = name, role, False
        self.prepared: WeakValueDictionary[tuple, np.ndarray] | None = None
        self.serial = next(_serials) if serial is None else serial  # sources come before what is made of them
        # A part holds the packed result, which therefore knows its parts only weakly: nothing is kept by a ring.
        self._pack = pack
        self._parts: list[weakref.ref[Tensor]] = []
        if pack is not None:
            pack.serials = [next(_serials) for _ in pack.fields]
        self._data: np.ndarray | None = None
        self.bound: np.ndarray | None = None
        self.values: Run | None = None

    # -- what it is -----------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """Its shape and dtype."""
        return Spec(self.shape, self.dtype)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def ne(self) -> tuple[int, ...]:
        """The shape in ggml's order, innermost first, with four entries."""
        return (*reversed(self.shape), *(1,) * (MAX_DIMS - len(self.shape)))

    @property
    def nb(self) -> tuple[int, ...]:
        """The strides in ggml's order, innermost first, with four entries."""
        outer = max([self.dtype.nbytes, *(abs(s) * n for s, n in zip(self.strides, self.shape, strict=True))])
        return (*reversed(self.strides), *(outer,) * (MAX_DIMS - len(self.shape)))

    @property
    def param(self) -> bool:
        """Whether `build_backward_expand` differentiates with respect to it."""
        return self.role == "param"

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of a packed result: where each part begins, in bytes."""
        return () if self._pack is None else tuple(self._pack.offsets)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Of a packed result: its parts in order.  One that was dropped is made again."""
        if self._pack is None:
            return ()
        alive = [ref() for ref in self._parts] or [None] * len(self._pack.fields)
        parts = [self._pack.part(self, i) if p is None else p for i, p in enumerate(alive)]
        if any(p is None for p in alive):
            self._parts = [weakref.ref(p) for p in parts]
        return tuple(parts)

    @property
    def is_packed(self) -> bool:
        """Whether it is several results in one buffer."""
        return self._pack is not None

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the op produced: the parts of a packed result, or the tensor itself."""
        return self.parts or (self,)

    @property
    def frozen(self) -> bool:
        """Of a leaf: whether its value never changes."""
        return self.prepared is not None

    @property
    def is_leaf(self) -> bool:
        """Whether it has memory of its own, and is not computed."""
        return self.op is None

    @property
    def is_view(self) -> bool:
        """Whether it moves no data: its node runs no kernel."""
        return self.base is not None and not self.updates

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another without gaps, in order."""
        if self._contiguous is None:
            whole = contiguous_strides(self.shape, self.dtype)
            self._contiguous = not self.size or all(
                n == 1 or stride == step for n, stride, step in zip(self.shape, self.strides, whole, strict=True)
            )
        return self._contiguous

    @property
    def has_whole_rows(self) -> bool:
        """Whether the last axis is contiguous."""
        return not self.shape or self.shape[-1] <= 1 or self.strides[-1] == self.dtype.nbytes

    @property
    def storage(self) -> tuple[Tensor, int]:
        """The tensor that owns this one's memory, and where in it this one begins (bytes)."""
        owner, offset = self, 0
        while owner.base is not None:
            offset += owner.offset
            owner = owner.base
        return owner, offset

    @property
    def waits_for(self) -> Iterator[Tensor]:
        """The owners of memory that are complete before anything reads this view."""
        t = self
        while t.base is not None:
            yield from (s.storage[0] for s in t.behind)
            t = t.base

    @property
    def cell(self) -> tuple[Tensor, int]:
        """The same, where each part of a packed result is an owner."""
        cell, offset = self, 0
        while cell.base is not None and cell.op is not Pack.op_of_parts:
            offset += cell.offset
            cell = cell.base
        return cell, offset

    # -- its value ------------------------------------------------------------------------------

    @property
    def holds_value(self) -> bool:
        """Of a leaf: whether it was given one."""
        return self._data is not None

    def numpy(self) -> np.ndarray:
        """The value: a NumPy view, not a copy.

        Of a leaf it is writable, unless frozen; of a result read-only and current until the graph's next run.
        A bf16 or quantized value comes as a read-only float32 copy, since NumPy has no such type.  After
        `compute(backend="reference")` results are float64.

        Raises:
            NotComputedError: no run has made this value, or its bytes were given to another.
        """
        owner, offset = self.storage
        if owner.is_leaf:
            if owner._data is None:
                raise NotComputedError(f"{owner.label()} holds no value: set it with .set(array)")
            return look(owner._data, self, offset, writable=self is owner and not self.frozen)
        if owner.values is None:
            raise NotComputedError(
                f"{self.label()} cannot be read: no run has kept it. "
                "graph.compute() computes it, and gg.set_output(t) before that keeps its bytes"
            )
        return owner.values.read(self)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """For `np.asarray(t)`: the values, as `numpy` gives them, and its error before a run."""
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"{self.label()} cannot be an array of {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __buffer__(self, flags: int) -> memoryview:
        """For `memoryview(t)`, from Python 3.12 on: the values, as `numpy` gives them."""
        return self.numpy().data

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy: bool | None = None) -> object:
        """For `from_dlpack` of NumPy, torch, JAX: the value, not a copy, which stays valid without this tensor.

        Writing to a leaf's writes to the leaf.  A result's is the borrower's: while it is held, the graph's next run
        takes other memory.  A frozen leaf and a result of the reference backend come as copies.

        Raises:
            BufferError: it is asked for on another device or without the copy that it takes, or is quantized.
            NotComputedError: as `numpy`.
        """
        if dl_device not in (None, CPU) or stream is not None:
            raise BufferError(f"{self.label()} lies on the CPU, and is given away there only")
        if self.dtype.quantized:
            raise BufferError(f"{self.label()}: DLPack has no quantized dtypes; t.numpy() gives the values")
        array = self._lasting()
        if copy or not array.flags.writeable:
            if copy is False:
                raise BufferError(f"{self.label()} cannot be given away without a copy")
            array = array.copy()
        return dlpack_of(array, self.dtype, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's number of the CPU."""
        return CPU

    def _lasting(self) -> np.ndarray:
        """The value in the dtype's storage type, which no run overwrites unless this is a leaf."""
        owner, offset = self.storage
        if owner.is_leaf or owner.values is None:
            self.numpy()  # raises what there is to raise
            return stored(owner.memory(), self, offset, writable=not owner.frozen)
        return owner.values.lend(self)

    @property
    def output(self) -> bool:
        """Whether its value stays readable after a run: see `set_output`."""
        return self._output

    @output.setter
    def output(self, marked: bool) -> None:
        global _output_marks
        if self._output != bool(marked):
            self._output = bool(marked)
            _output_marks += 1

    def item(self) -> float | int:
        """The value of a tensor of one element, as a Python number."""
        return self.numpy().item()

    def set(self, value: ArrayLike) -> Tensor:
        """Copy `value` into a leaf, converting its dtype; shapes must be equal.  Returns the leaf.

        It may be an array of any library that lies on the CPU; a boolean one sets 0 and 1.  A quantized leaf
        also takes its blocks as they are: uint8 [..., bytes of a row].

        Raises:
            GraphError: this is a result, which only a run can set, or frozen.
            ShapeError: other shape, or values that the dtype cannot hold.
        """
        if not self.is_leaf:
            raise GraphError(f"{self.label()} is the result of {self.op.name}; only leaves can be set")  # type: ignore[union-attr]
        if self.frozen:
            raise GraphError(f"{self.label()} is frozen: its value never changes, since kernels may have packed it")
        self._fill(*array_of(value, f"set({self.label()})"))
        return self

    def _fill(self, array: np.ndarray, given: DType | None) -> None:
        """`set` of what `array_of` gave."""
        memory = self.memory()
        if not memory.flags.writeable:
            raise GraphError(f"{self.label()} is bound to a read-only array")
        if self.dtype.quantized and array.dtype == np.uint8:
            if array.shape != memory.shape:
                raise ShapeError(f"set({self.label()}): its blocks are uint8 {memory.shape}, not {array.shape}")
            memory[...] = array
            return
        if array.shape != self.shape:
            raise ShapeError(f"set({self.label()}): the value has shape {array.shape}")
        write(memory, array, given, self.dtype, f"set({self.label()})")

    def memory(self) -> np.ndarray:
        """The leaf's own bytes as NumPy sees them, made now if there are none yet."""
        if self._data is None:
            stored = (*self.shape[:-1], row_bytes(self.shape[-1], self.dtype)) if self.dtype.quantized else self.shape
            self._data = aligned_zeros(self.nbytes).view(self.dtype.storage).reshape(stored)
        return self._data

    # -- how it looks ---------------------------------------------------------------------------

    def label(self) -> str:
        """Name and spec, for messages."""
        return f"{self.name or (self.op.name if self.op else 'leaf')}: {self.spec}"

    def __repr__(self) -> str:
        made = (
            f" = {self.op.name}({', '.join('None' if s is None else str(s.spec) for s in self.src)})" if self.op else ""
        )
        return f"<{self.name + ': ' if self.name else ''}{self.spec}{made}>"

    # -- arithmetic -----------------------------------------------------------------------------

    def __add__(self, other):
        return _shifted(self, other) if _is_number(other) else builtin.add(self, other)

    def __radd__(self, other):
        return _shifted(self, other) if _is_number(other) else builtin.add(other, self)

    def __sub__(self, other):
        return _shifted(self, -other) if _is_number(other) else builtin.sub(self, other)

    def __rsub__(self, other):
        return builtin.scale(self, factor=-1.0, bias=other) if _is_number(other) else builtin.sub(other, self)

    def __mul__(self, other):
        return builtin.scale(self, factor=other) if _is_number(other) else builtin.mul(self, other)

    def __rmul__(self, other):
        return builtin.scale(self, factor=other) if _is_number(other) else builtin.mul(other, self)

    def __truediv__(self, other):
        return builtin.div(self, other)

    def __rtruediv__(self, other):
        return builtin.div(other, self)

    def __matmul__(self, other):
        return builtin.matmul(self, other)

    def __rmatmul__(self, other):
        return builtin.matmul(other, self)

    def __neg__(self):
        return builtin.neg(self)

    def __pow__(self, exponent):
        if exponent == 2:
            return builtin.sqr(self)
        if exponent == 0.5:
            return builtin.sqrt(self)
        raise ShapeError(
            f"{self.label()} ** {exponent!r}: only the powers 2 and 0.5 are ops; others are exp(p * log(x))"
        )

    def __abs__(self):
        return builtin.abs(self)

    def __getitem__(self, index):
        return builtin.indexed(self, index)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        raise TypeError("a tensor of a graph has no truth value before a run; compare .numpy() after it")

    def reshape(self, *shape) -> Tensor:
        """The same elements in another shape; one size may be -1.  See `ggrad.reshape`."""
        return builtin.reshape(self, shape=_one_tuple(shape))

    def permute(self, *axes) -> Tensor:
        """The axes in another order: axis i of the result is axis `axes[i]` of this."""
        return builtin.permute(self, axes=_one_tuple(axes))

    @property
    def T(self) -> Tensor:
        """The last two axes exchanged."""
        return builtin.transpose(self)


def tensor(
    value: ArrayLike | None = None,
    *,
    shape: tuple[int, ...] | int | None = None,
    dtype: DType | None = None,
    name: str = "",
    param: bool = False,
    frozen: bool = False,
    role: str = "constant",
) -> Tensor:
    """A leaf: memory of its own for a value that is given now, or set later.

    Args:
        value: array of any library, or number, copied.  float64 becomes f32, int64 becomes i32 if it fits, bool i32
            of 0 and 1.  With a quantized dtype: floats, which are quantized, or uint8 [..., bytes of a row], which
            are the blocks.
        shape: instead of a value: of a leaf to be set later.
        dtype: default is the value's, else f32.
        name: for printing and for checkpoints.
        param: whether gradients are wanted with respect to it.
        frozen: the value is the last: `.set` refuses, and `.numpy()` is read-only. Then products that many small
            runs share keep it packed as they read it, which takes as much memory again, as f32.
        role: for the plan's accounts: "constant", "moment", "accumulator", "counter".

    Raises:
        ShapeError: more than four axes, neither or both of value and shape, integers that are no i32,
            a param of an integer dtype, rows that are no whole number of blocks, or a frozen leaf without value.
        GradientError: a param of a quantized dtype.
        GraphError: a param that is frozen.
    """
    if (value is None) == (shape is None):
        raise ShapeError("tensor(): give either a value or a shape")
    if frozen and value is None:
        raise ShapeError("tensor(): a frozen leaf needs its value now")
    if value is not None:
        array, given = array_of(value)
        dtype = dtype or given or natural_dtype(array)
        shape = array.shape
    dtype = dtype or F32
    if dtype not in (*ALL, *QUANTIZED):
        raise ShapeError(
            f"tensor(): dtype must be one of {', '.join(d.name for d in (*ALL, *QUANTIZED))}, not {dtype!r}"
        )
    shape = whole_sizes("tensor()", shape)  # type: ignore[arg-type]
    if dtype.quantized:
        if value is not None and array.dtype == np.uint8 and shape:
            shape = (*shape[:-1], shape[-1] // dtype.nbytes * dtype.block)
        if not shape or shape[-1] % dtype.block:
            raise ShapeError(f"tensor(): rows of {dtype} are multiples of {dtype.block} elements; the shape is {shape}")
    check_shape("tensor()", shape)
    t = Tensor(shape, dtype, contiguous_strides(shape, dtype), name=name, role=role)
    if value is not None:
        t._fill(array, given)
    if frozen:
        set_frozen(t)
    if param:
        set_param(t)
    return t


def set_param(t: Tensor) -> Tensor:
    """Mark a leaf, f32, f16 or bf16 of any shape, as a parameter: `build_backward_expand` differentiates by it.

    Returns it.

    Raises:
        GraphError: it is a result, or frozen.
        ShapeError: it is i32.
        GradientError: it is quantized.
    """
    if not t.is_leaf:
        raise GraphError(f"{t.label()} is a result; only leaves can be parameters")
    if not t.dtype.is_float:
        raise ShapeError(f"{t.label()}: a parameter must be of a float dtype")
    if t.frozen:
        raise GraphError(
            f"{t.label()} is frozen, and training would change it. Train a copy: gg.tensor(t.numpy(), param=True)"
        )
    if t.dtype.quantized:
        raise GradientError(
            f"{t.label()}: quantized values move in steps, so there is no gradient by them. Keep it constant and "
            "train something beside it, or train a copy: gg.tensor(t.numpy(), param=True)"
        )
    t.role = "param"
    return t


def set_frozen(t: Tensor) -> Tensor:
    """Say that the value of a constant, of any shape and dtype, is the last: see `tensor`.

    Arrays that `.numpy()` gave before must not be written any more.  Returns it.

    Raises:
        GraphError: it is a result or a parameter, or holds no value yet.
    """
    if not t.is_leaf or t.role != "constant":
        raise GraphError(f"set_frozen({t.label()}): only constants can be frozen")
    if not t.holds_value:
        raise GraphError(f"set_frozen({t.label()}): it holds no value yet")
    if t.prepared is None:
        t.prepared = WeakValueDictionary()
    return t


def bind(t: Tensor, array: Any) -> Tensor:
    """Let a leaf read, or a result be written, where an array of another library lies: nothing is copied.

        gg.bind(x, torch_tensor)
        gg.bind(y, np.empty(y.shape, np.float32))

    The array is kept alive.  Runs see what it holds then; updates of the leaf write to it.  A result that is bound
    stays readable after a run, there and by `.numpy()`.

    Args:
        t: leaf or result of any shape, f32, f16, bf16 or i32.
        array: on the CPU, of its shape and dtype, without gaps and in order, aligned to its elements; writable, unless
            `t` is a constant that no graph updates.  None gives `t` memory of its own again, a leaf with its value.

    Returns:
        `t`.

    Raises:
        ShapeError: the array has another shape, dtype, order or device, or gaps.
        GraphError: it is read-only, or `t` is frozen, quantized, an update, or only a part of a result's memory.
    """
    if t.frozen or t.dtype.quantized or t.updates:
        kind = "frozen" if t.frozen else "quantized" if t.dtype.quantized else "an update, whose leaf can be bound"
        raise GraphError(f"bind({t.label()}): it is {kind}")
    cell, offset = t.cell
    if cell.is_leaf and cell is not t or cell.is_packed or offset or cell.size != t.size or not t.is_contiguous:
        raise GraphError(
            f"bind({t.label()}): it is a look at a part of {cell.label()}, or in another order; gg.cont copies it"
        )
    memory = None if array is None else _memory_of(array, t)
    if t.is_leaf:
        t._data = memory if memory is not None or t._data is None else _copy_of(t._data)
    else:
        cell.bound = memory
        set_output(t)
    global _bindings
    _bindings += 1
    return t


def _memory_of(array: Any, t: Tensor) -> np.ndarray:
    found, given = array_of(array, f"bind({t.label()})")
    if found.shape != t.shape or found.dtype != t.dtype.storage or (given is BF16) != (t.dtype is BF16):
        raise ShapeError(f"bind({t.label()}): the array is {given or found.dtype} of shape {found.shape}")
    if not found.flags.c_contiguous or not found.flags.aligned:
        raise ShapeError(f"bind({t.label()}): the array has gaps or another order, or is not aligned to its elements")
    if not found.flags.writeable and (not t.is_leaf or t.role != "constant"):
        raise GraphError(f"bind({t.label()}): the array is read-only, and would be written to")
    return found


def _copy_of(memory: np.ndarray) -> np.ndarray:
    own = aligned_zeros(memory.nbytes).view(memory.dtype).reshape(memory.shape)
    own[...] = memory
    return own


_bindings = 0


def bindings() -> int:
    """How often something was bound: by this sessions see when to look where their tensors lie."""
    return _bindings


def set_output(t: Tensor) -> Tensor:
    """Keep this value, of any shape and dtype, readable after a run: its bytes are given to no other.  Returns it."""
    t.output = True
    return t


def set_loss(t: Tensor) -> Tensor:
    """Mark a scalar result as the loss that `build_backward_expand` starts from.  Returns it.

    Raises:
        ShapeError: it has not one element.
        GraphError: it is a leaf.
    """
    if t.size != 1:
        raise ShapeError(f"set_loss({t.label()}): a loss is a scalar; gg.sum makes one")
    if t.is_leaf:
        raise GraphError(f"set_loss({t.label()}): a loss is a result, not a leaf")
    t.role = "loss"
    return t


_output_marks = 0


def output_marks() -> int:
    """How often a tensor was marked as an output, or no longer: by this graphs see when to plan again."""
    return _output_marks


def natural_dtype(array: np.ndarray) -> DType:
    """The dtype a NumPy array gets when none is asked for."""
    if array.dtype == np.float16:
        return F16
    if array.dtype.kind == "f":
        return F32
    if array.dtype.kind in "iub":
        return I32
    raise ShapeError(f"tensor(): no dtype for NumPy's {array.dtype}")


def converted(array: np.ndarray, dtype: DType, where: str) -> np.ndarray:
    """The array in the storage type of `dtype`, or a ShapeError that names the first value that is lost."""
    if dtype.quantized:
        return quantize(_numbers(array, dtype, where), dtype)
    made = np.empty(array.shape, dtype.storage)
    write(made, array, None, dtype, where)
    return made


def write(memory: np.ndarray, array: np.ndarray, given: DType | None, dtype: DType, where: str) -> None:
    """Copy an array into memory of `dtype`, in one pass where it can be.

    Args:
        array: numbers, or of `given`, if that is not None, the bits.

    Raises:
        ShapeError: the dtype cannot hold the values; names the first that is lost.
    """
    if given is not None and given is not dtype:
        array = bf16_values(array)
    if given is dtype:
        memory[...] = array
    elif dtype is I32:
        _check_whole(array, where)
        np.copyto(memory, array, casting="unsafe")
    elif dtype.quantized:
        memory[...] = quantize(_numbers(array, dtype, where), dtype)
    elif dtype is BF16:
        memory[...] = bf16_bits(_numbers(array, dtype, where).astype(np.float32, copy=False))
    else:
        with np.errstate(over="ignore"):
            np.copyto(memory, _numbers(array, dtype, where), casting="unsafe")


def _check_whole(array: np.ndarray, where: str) -> None:
    if array.dtype.kind not in "iub":
        raise ShapeError(f"{where}: i32 takes integers, not {array.dtype}")
    if not np.can_cast(array.dtype, np.int32):
        wrong = (array < -(2**31)) | (array >= 2**31)
        if wrong.any():
            raise ShapeError(f"{where}: {array[wrong].flat[0]} is outside of i32")


def _numbers(array: np.ndarray, dtype: DType, where: str) -> np.ndarray:
    if array.dtype.name == "bfloat16":  # ml_dtypes'
        return bf16_values(array.view(np.uint16))
    if array.dtype.kind not in "fiub":
        raise ShapeError(f"{where}: {dtype} takes numbers, not {array.dtype}")
    return array


def whole_sizes(where: str, sizes: int | Iterable[int]) -> tuple[int, ...]:
    """Sizes as Python ints: of one, or of several, whatever integers they are.

    Raises:
        ShapeError: some are no integers, such as 2.7, True or "2".
    """
    if type(sizes) is tuple and all(type(n) is int for n in sizes):
        return sizes
    try:
        given = (sizes,) if np.ndim(sizes) == 0 else tuple(sizes)  # type: ignore[arg-type]
        if any(isinstance(n, (bool, np.bool_)) for n in given):
            raise TypeError
        return tuple(index(n) for n in given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ShapeError(f"{where}: sizes are integers, not {sizes!r}") from None


def check_shape(where: str, shape: tuple[int, ...]) -> None:
    if len(shape) > MAX_DIMS:
        raise ShapeError(f"{where}: {len(shape)} axes {shape}; the most is {MAX_DIMS}")
    if shape and min(shape) < 0:
        raise ShapeError(f"{where}: negative size in {shape}")
    if prod([n for n in shape if n]) >= MOST_ELEMENTS:
        raise ShapeError(f"{where}: {shape} is more than 64 bits can count the bytes of")


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Zeroed bytes that begin at a multiple of `ALIGN`; pages come into being when touched."""
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def look(memory: np.ndarray, t: Tensor, offset: int, *, writable: bool) -> np.ndarray:
    """`t` as an array over contiguous memory in which it begins at `offset` bytes."""
    array = stored(memory, t, offset, writable=writable)
    if t.dtype is BF16:
        array = bf16_values(array)
    elif t.dtype.quantized:
        array = dequantize(array, t.dtype)
    else:
        return array
    array.flags.writeable = False
    return array


def stored(memory: np.ndarray, t: Tensor, offset: int, *, writable: bool) -> np.ndarray:
    """The same in the storage type of its dtype: bf16 as bits, quantized rows as bytes."""
    flat = memory.reshape(-1).view(np.uint8)
    shape, strides = t.shape, t.strides
    if t.dtype.quantized:  # bytes of whole rows
        shape, strides = (*shape[:-1], row_bytes(shape[-1], t.dtype)), (*strides[:-1], 1)
    array = np.ndarray(shape, t.dtype.storage, flat.data if flat.size else b"", offset if t.size else 0, strides)
    if not writable:
        array.flags.writeable = False
    return array


def _is_number(x) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def _shifted(t: Tensor, bias: float) -> Tensor:
    return builtin.scale(t, factor=1.0, bias=bias)


def _one_tuple(given: tuple) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], (int, np.integer)) else given
