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
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from .builtin import builtin
from .dtype import ALL, BF16, F16, F32, I32, QUANTIZED, DType, bf16_bits, bf16_values
from .errors import GradientError, GraphError, NotComputedError, ShapeError
from .quant import dequantize, quantize, row_bytes

if TYPE_CHECKING:
    from .op import Op

ALIGN = 64  # bytes; every buffer starts at a multiple
MEM_ALIGN = 16  # bytes, ggml's; every part of a packed buffer starts at a multiple
MAX_DIMS = 4

_serials = itertools.count()


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


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

    def read(self, t: Tensor) -> np.ndarray: ...


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
        role: "param", "constant", "moment", "accumulator" of a leaf, "" of a result.
        prepared: of a frozen leaf: other forms of it that kernels made, each for as long as a session uses it.
    """

    __slots__ = (
        "shape", "dtype", "strides", "size", "nbytes", "_contiguous", "op", "src", "attrs", "base", "offset", "updates",
        "behind", "name", "role", "prepared", "_output", "serial", "_pack", "_parts", "_data", "values", "__weakref__",
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
        self.name, self.role, self._output = name, role, False
        self.prepared: WeakValueDictionary[tuple, np.ndarray] | None = None
        self.serial = next(_serials) if serial is None else serial  # sources come before what is made of them
        # A part holds the packed result, which therefore knows its parts only weakly: nothing is kept by a ring.
        self._pack = pack
        self._parts: list[weakref.ref[Tensor]] = []
        if pack is not None:
            pack.serials = [next(_serials) for _ in pack.fields]
        self._data: np.ndarray | None = None
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

        A quantized leaf also takes its blocks as they are: uint8 [..., bytes of a row].

        Raises:
            GraphError: this is a result, which only a run can set, or frozen.
            ShapeError: other shape, or values that the dtype cannot hold.
        """
        if not self.is_leaf:
            raise GraphError(f"{self.label()} is the result of {self.op.name}; only leaves can be set")  # type: ignore[union-attr]
        if self.frozen:
            raise GraphError(f"{self.label()} is frozen: its value never changes, since kernels may have packed it")
        array, memory = np.asarray(value), self.memory()
        if self.dtype.quantized and array.dtype == np.uint8:
            if array.shape != memory.shape:
                raise ShapeError(f"set({self.label()}): its blocks are uint8 {memory.shape}, not {array.shape}")
            memory[...] = array
            return self
        if array.shape != self.shape:
            raise ShapeError(f"set({self.label()}): the value has shape {array.shape}")
        memory[...] = converted(array, self.dtype, f"set({self.label()})")
        return self

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
        value: array or number, copied.  float64 becomes f32, int64 becomes i32 if it fits.  With a quantized
            dtype: floats, which are quantized, or uint8 [..., bytes of a row], which are the blocks.
        shape: instead of a value: of a leaf to be set later.
        dtype: default is the value's, else f32.
        name: for printing and for checkpoints.
        param: whether gradients are wanted with respect to it.
        frozen: the value is the last: `.set` refuses, and `.numpy()` is read-only. Then products that many small
            runs share keep it packed as they read it, which takes as much memory again, as f32.
        role: for the plan's accounts: "constant", "moment", "accumulator".

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
        array = np.asarray(value)
        dtype = dtype or natural_dtype(array)
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
        t.set(array)
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
    if array.dtype.kind in "iu":
        return I32
    if array.dtype.name == "bfloat16":  # ml_dtypes'
        return BF16
    hint = "; an attention mask may be boolean, other tensors use .astype" if array.dtype.kind == "b" else ""
    raise ShapeError(f"tensor(): no dtype for NumPy's {array.dtype}{hint}")


def converted(array: np.ndarray, dtype: DType, where: str) -> np.ndarray:
    """The array in the storage type of `dtype`, or a ShapeError that names the first value that is lost."""
    if dtype is I32:
        if array.dtype.kind not in "iu":
            raise ShapeError(f"{where}: i32 takes integers, not {array.dtype}")
        wrong = (array < -(2**31)) | (array >= 2**31)
        if wrong.any():
            raise ShapeError(f"{where}: {array[wrong].flat[0]} is outside of i32")
        return array.astype(np.int32)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ShapeError(f"{where}: {dtype} takes numbers, not {array.dtype}")
    with np.errstate(over="ignore"):
        if dtype is BF16:
            return bf16_bits(array.astype(np.float32))
        if dtype.quantized:
            return quantize(array, dtype)
        return array.astype(dtype.storage)


def whole_sizes(where: str, sizes: int | Iterable[int]) -> tuple[int, ...]:
    """Sizes as Python ints: of one, or of several, whatever integers they are.

    Raises:
        ShapeError: some are no integers, such as 2.7, True or "2".
    """
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
    if any(n < 0 for n in shape):
        raise ShapeError(f"{where}: negative size in {shape}")


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Zeroed bytes that begin at a multiple of `ALIGN`; pages come into being when touched."""
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def look(memory: np.ndarray, t: Tensor, offset: int, *, writable: bool) -> np.ndarray:
    """`t` as an array over contiguous memory in which it begins at `offset` bytes."""
    flat = memory.reshape(-1).view(np.uint8)
    shape, strides = t.shape, t.strides
    if t.dtype.quantized:  # bytes of whole rows
        shape, strides = (*shape[:-1], row_bytes(shape[-1], t.dtype)), (*strides[:-1], 1)
    array = np.ndarray(shape, t.dtype.storage, flat.data if flat.size else b"", offset if t.size else 0, strides)
    if t.dtype is BF16:
        array, writable = bf16_values(array), False
    elif t.dtype.quantized:
        array, writable = dequantize(array, t.dtype), False
    if not writable:
        array.flags.writeable = False
    return array


def _is_number(x) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def _shifted(t: Tensor, bias: float) -> Tensor:
    return builtin.scale(t, factor=1.0, bias=bias)


def _one_tuple(given: tuple) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], (int, np.integer)) else given
