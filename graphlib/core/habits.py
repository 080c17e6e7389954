"""What Python and NumPy lead one to write with a tensor: operators and methods, each of which is an op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .builtin import builtin
from .dtype import I32, DTypeLike
from .errors import ShapeError

if TYPE_CHECKING:
    from .tensor import Tensor

Axes = int | Sequence[int] | None


class Habits:
    """Of tensors.  `==` is identity, since tensors are keys of dicts; `ggrad.equal` compares values."""

    __slots__ = ()
    shape: tuple[int, ...]

    # -- operators --------------------------------------------------------------------------------

    def __add__(self, other):
        return _scaled(self, 1.0, other) if _scales(self, other) else builtin.add(self, other)

    def __radd__(self, other):
        return _scaled(self, 1.0, other) if _scales(self, other) else builtin.add(other, self)

    def __sub__(self, other):
        return _scaled(self, 1.0, -other) if _scales(self, other) else builtin.sub(self, other)

    def __rsub__(self, other):
        return _scaled(self, -1.0, other) if _scales(self, other) else builtin.sub(other, self)

    def __mul__(self, other):
        return _scaled(self, other) if _scales(self, other) else builtin.mul(self, other)

    def __rmul__(self, other):
        return _scaled(self, other) if _scales(self, other) else builtin.mul(other, self)

    def __truediv__(self, other):
        return builtin.div(self, other)

    def __rtruediv__(self, other):
        return builtin.div(other, self)

    def __floordiv__(self, other):
        return builtin.library.floor_divide(self, other)

    def __rfloordiv__(self, other):
        return builtin.library.floor_divide(other, self)

    def __mod__(self, other):
        return builtin.library.remainder(self, other)

    def __rmod__(self, other):
        return builtin.library.remainder(other, self)

    def __matmul__(self, other):
        return builtin.matmul(self, other)

    def __rmatmul__(self, other):
        return builtin.matmul(other, self)

    def __neg__(self):
        return builtin.mul(self, -1) if self.dtype is I32 else builtin.neg(self)  # type: ignore[attr-defined]

    def __pow__(self, exponent):
        if _is_number(exponent) and exponent == 2:
            return builtin.sqr(self)
        if _is_number(exponent) and exponent == 0.5:
            return builtin.sqrt(self)
        return builtin.library.pow(self, exponent)

    def __rpow__(self, base):
        return builtin.library.pow(base, self)

    def __abs__(self):
        return builtin.abs(self)

    def __lt__(self, other):
        return builtin.library.less(self, other)

    def __le__(self, other):
        return builtin.library.less_equal(self, other)

    def __gt__(self, other):
        return builtin.library.greater(self, other)

    def __ge__(self, other):
        return builtin.library.greater_equal(self, other)

    # -- as a sequence ----------------------------------------------------------------------------

    def __getitem__(self, index):
        return builtin.indexed(self, index)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    # -- layout -----------------------------------------------------------------------------------

    def reshape(self, *shape) -> Tensor:
        """The same elements in another shape; one size may be -1.  See `ggrad.reshape`."""
        return builtin.reshape(self, shape=_one_tuple(shape))

    def permute(self, *axes) -> Tensor:
        """The axes in another order: axis i of the result is axis `axes[i]` of this."""
        return builtin.permute(self, axes=_one_tuple(axes))

    def transpose(self, *axes) -> Tensor:
        """Two axes exchanged, by default the last two; or with as many as there are all in that order."""
        axes = _one_tuple(axes)
        if len(axes) not in (0, 2, len(self.shape)):
            raise ShapeError(f"transpose(x={self.spec}): two axes, or all {len(self.shape)}, not {axes}")  # type: ignore[attr-defined]
        if len(axes) == len(self.shape) != 2:
            return self.permute(axes)
        return builtin.transpose(self, *axes)

    @property
    def T(self) -> Tensor:
        """The last two axes exchanged."""
        return builtin.transpose(self)

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """The axes from `start` to `end`, both included, as one."""
        n = len(self.shape)
        if not n:
            return self.reshape(1)
        first, last = start + n * (start < 0), end + n * (end < 0)
        if not 0 <= first <= last < n:
            raise ShapeError(f"flatten(x={self.spec}): no axes from {start} to {end}")  # type: ignore[attr-defined]
        return self.reshape(*self.shape[:first], int(np.prod(self.shape[first : last + 1])), *self.shape[last + 1 :])

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Without axes of size 1: all of them, or those named."""
        n = len(self.shape)
        named = range(n) if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
        if axis is not None and not all(-n <= a < n and self.shape[a] == 1 for a in named):
            raise ShapeError(f"squeeze(x={self.spec}): {axis} must be axes of size 1")  # type: ignore[attr-defined]
        gone = {a % n for a in named if self.shape[a] == 1}
        return self.reshape(tuple(size for a, size in enumerate(self.shape) if a not in gone))

    def unsqueeze(self, axis: int) -> Tensor:
        """With an axis of size 1 more, at that place of the result."""
        n = len(self.shape) + 1
        if not -n <= axis < n:
            raise ShapeError(f"unsqueeze(x={self.spec}): {axis} must be from {-n} to {n - 1}")  # type: ignore[attr-defined]
        at = axis % n
        return self.reshape((*self.shape[:at], 1, *self.shape[at:]))

    def split(self, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """Views of pieces along an axis: of so many elements each, the last one perhaps of fewer; or of these sizes."""
        n = len(self.shape)
        spec = self.spec  # type: ignore[attr-defined]
        if not -n <= axis < n:
            raise ShapeError(f"split(x={spec}): there is no axis {axis}")
        whole = self.shape[axis]
        if isinstance(sizes, (int, np.integer)):
            if sizes < 1:
                raise ShapeError(f"split(x={spec}): pieces of {sizes} elements")
            sizes = [min(sizes, whole - at) for at in range(0, whole, int(sizes))]
        if sum(sizes) != whole or min(sizes, default=0) < 0:
            raise ShapeError(f"split(x={spec}): pieces of {[*sizes]} do not make up {whole} along axis {axis}")
        ends = np.cumsum([0, *sizes]).tolist()
        before = (slice(None),) * (axis % n)
        return tuple(self[(*before, slice(a, b))] for a, b in pairwise(ends))

    def astype(self, dtype: DTypeLike) -> Tensor:
        """In another dtype: `ggrad.F16`, "f16" or np.float16.  See `ggrad.cast`."""
        return builtin.cast(self, dtype=dtype)

    # -- reductions, and functions of elements ----------------------------------------------------

    def sum(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.sum`."""
        return builtin.library.sum(self, axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.mean`."""
        return builtin.library.mean(self, axis, keepdims=keepdims)

    def max(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.max`."""
        return builtin.library.amax(self, axis, keepdims=keepdims)

    def min(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.min`."""
        return builtin.library.amin(self, axis, keepdims=keepdims)

    def prod(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.prod`."""
        return builtin.library.prod(self, axis, keepdims=keepdims)

    def var(self, axis: Axes = None, *, correction: float = 1, keepdims: bool = False) -> Tensor:
        """See `ggrad.var`."""
        return builtin.library.var(self, axis, correction=correction, keepdims=keepdims)

    def std(self, axis: Axes = None, *, correction: float = 1, keepdims: bool = False) -> Tensor:
        """See `ggrad.std`."""
        return builtin.library.std(self, axis, correction=correction, keepdims=keepdims)

    def argmax(self, axis: int = -1, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.argmax`."""
        return builtin.library.argmax(self, axis, keepdims=keepdims)

    def argmin(self, axis: int = -1, *, keepdims: bool = False) -> Tensor:
        """See `ggrad.argmin`."""
        return builtin.library.argmin(self, axis, keepdims=keepdims)

    def softmax(self, axis: int = -1) -> Tensor:
        """See `ggrad.softmax`."""
        return builtin.library.softmax(self, axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        """See `ggrad.log_softmax`."""
        return builtin.library.log_softmax(self, axis)

    def exp(self) -> Tensor:
        """See `ggrad.exp`."""
        return builtin.library.exp(self)

    def log(self) -> Tensor:
        """See `ggrad.log`."""
        return builtin.library.log(self)

    def sqrt(self) -> Tensor:
        """See `ggrad.sqrt`."""
        return builtin.sqrt(self)

    def tanh(self) -> Tensor:
        """See `ggrad.tanh`."""
        return builtin.library.tanh(self)

    def relu(self) -> Tensor:
        """See `ggrad.relu`."""
        return builtin.library.relu(self)

    def sigmoid(self) -> Tensor:
        """See `ggrad.sigmoid`."""
        return builtin.library.sigmoid(self)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def _scales(t: Any, number: Any) -> bool:
    """Whether it is a number that `scale` takes; i32 and a whole number stay i32."""
    return _is_number(number) and not (t.dtype is I32 and isinstance(number, (int, np.integer)))


def _scaled(t: Any, factor: float, bias: float = 0.0) -> Tensor:
    return builtin.scale(t, factor=factor, bias=bias)


def _one_tuple(given: tuple) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], (int, np.integer)) else given
