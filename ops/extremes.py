"""The largest and smallest along axes, spread, softmax along any axis; elements taken and added by index; in order.

What a function chooses it chooses once: of equal elements the first has the whole gradient.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..core.dtype import F32
from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from .elementwise import add, neg, scale, sub
from .layout import broadcast_to, cast, concat, permute, reshape, slice_of, stop_gradient
from .reduce import Axes, argmax, axes_of, mean, without
from .reduce import sum as sum_of
from .rows import get_rows, get_rows_back
from .select import equal, isfinite, where
from .softmax import soft_max
from .sort import SortOrder, argsort
from .unary import exp, log, sqr, sqrt

__all__ = [
    "amax", "amin", "argmin", "eye", "flip", "full", "gather", "index_add", "linspace", "log_softmax", "logsumexp",
    "max", "min", "one_hot", "ones", "ones_like", "scatter_add", "softmax", "sort", "stack", "std", "take_along_axis",
    "var", "zeros", "zeros_like",
]  # fmt: skip


def _axis(name: str, x: Tensor, axis: int) -> int:
    return axes_of(name, x, int(axis))[0]


def _moved(x: Tensor, axis: int, to: int) -> Tensor:
    """One axis put elsewhere, a view."""
    order = [a for a in range(x.ndim) if a != axis]
    order.insert(to, axis)
    return x if order == [*range(x.ndim)] else permute(x, axes=tuple(order))


# -- by index -----------------------------------------------------------------------------------------------


def take_along_axis(x: Tensor, ids: Tensor, axis: int = -1) -> Tensor:
    """Along the axis the elements that `ids` names, NumPy's: of x[..., R, ...] and i32 ids[..., r, ...] the f32
    result[..., i, ...] = x[..., ids[..., i, ...], ...].

    Raises:
        ShapeError: other axes of the two differ.
        IndexRangeError: in the run, an index outside of 0 ... R-1.
    """
    ids = ids if isinstance(ids, Tensor) else tensor(ids)
    axis = _axis("take_along_axis", x, axis)
    if ids.ndim != x.ndim or any(m != n for a, (m, n) in enumerate(zip(x.shape, ids.shape, strict=True)) if a != axis):
        raise ShapeError(f"take_along_axis(x={x.spec}, ids={ids.spec}): they may differ along axis {axis} only")
    rows, wanted = _moved(x, axis, x.ndim - 1), _moved(ids, axis, x.ndim - 1)
    count = math.prod(rows.shape[:-1])
    taken = get_rows(reshape(rows, (count, x.shape[axis], 1)), reshape(wanted, (count, ids.shape[axis])))
    return _moved(reshape(taken, wanted.shape), x.ndim - 1, axis)


def gather(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    """`take_along_axis`, with the arguments in torch's order.

    Raises:
        ShapeError: as of `take_along_axis`.
    """
    return take_along_axis(x, ids, axis)


def scatter_add(x: Tensor, axis: int, ids: Tensor, source: Tensor) -> Tensor:
    """`x` with each element of `source` added at the place along the axis that `ids`, an i32 of its shape, names.

    Raises:
        ShapeError: `ids` and `source` have different shapes, or differ from `x` along other axes.
        IndexRangeError: in the run, an index out of range.
    """
    ids = ids if isinstance(ids, Tensor) else tensor(ids)
    axis = _axis("scatter_add", x, axis)
    fits = ids.shape == source.shape and ids.ndim == x.ndim
    if not fits or any(m != n for a, (m, n) in enumerate(zip(x.shape, ids.shape, strict=True)) if a != axis):
        raise ShapeError(
            f"scatter_add(x={x.spec}, ids={ids.spec}, source={source.spec}): "
            f"ids and source have one shape, which differs from that of x along axis {axis} only"
        )
    last = x.ndim - 1
    wanted, rows = _moved(ids, axis, last), _moved(source, axis, last)
    count, n = math.prod(wanted.shape[:-1]), ids.shape[axis]
    sums = get_rows_back(reshape(rows, (count, n, 1)), reshape(wanted, (count, n)), rows=x.shape[axis], batched=True)
    return add(x, _moved(reshape(sums, (*wanted.shape[:-1], x.shape[axis])), last, axis))


def index_add(x: Tensor, axis: int, ids: Tensor, source: Tensor) -> Tensor:
    """`x` with slice i of `source` along the axis added to its slice ids[i], ids an i32 vector.

    Raises:
        ShapeError: `source` has other sizes than `x` along other axes, or not as many slices as there are ids.
        IndexRangeError: in the run, an index out of range.
    """
    ids = ids if isinstance(ids, Tensor) else tensor(ids)
    axis = _axis("index_add", x, axis)
    wanted = (*x.shape[:axis], ids.size, *x.shape[axis + 1 :])
    if ids.ndim != 1 or source.shape != wanted:
        raise ShapeError(f"index_add(x={x.spec}, ids={ids.spec}, source={source.spec}): source must be {wanted}")
    rows = _moved(source, axis, 0)
    sums = get_rows_back(reshape(rows, (ids.size, math.prod(rows.shape[1:]))), ids, rows=x.shape[axis])
    return add(x, _moved(reshape(sums, (x.shape[axis], *rows.shape[1:])), 0, axis))


def one_hot(ids: Tensor, classes: int) -> Tensor:
    """1 at the place that each i32 id names, else 0: f32 [..., classes].  Of an id out of range all is 0.

    Raises:
        ShapeError: ids that are not i32.
    """
    ids = ids if isinstance(ids, Tensor) else tensor(ids)
    return cast(equal(reshape(ids, (*ids.shape, 1)), tensor(np.arange(classes, dtype=np.int32))), dtype=F32)


# -- extremes and order -------------------------------------------------------------------------------------


def amax(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """The largest element, of all or along axes; NaN if one of them is.  The gradient goes to the first of equals.

    Raises:
        ShapeError: an axis that `x` does not have, or nothing to choose from.
    """
    axes = axes_of("amax", x, axis)
    if not axes:
        return x
    kept = [a for a in range(x.ndim) if a not in axes]
    rows, n = permute(x, axes=(*kept, *axes)), math.prod(x.shape[a] for a in axes)
    rows = reshape(rows, (math.prod(x.shape[a] for a in kept), n))
    best = argmax(rows)
    return reshape(take_along_axis(rows, reshape(best, (*best.shape, 1))), without(x, axes, keepdims))


def amin(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """The smallest element, of all or along axes; see `amax`.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice; or no elements to look at.
    """
    return neg(amax(neg(x), axis, keepdims=keepdims))


def argmin(x: Tensor, axis: int = -1, *, keepdims: bool = False) -> Tensor:
    """Where along an axis the smallest value stands; see `argmax`.

    Raises:
        ShapeError: `x` is a scalar, i32 or quantized, or has no such axis, or one of no elements.
    """
    return argmax(neg(x), axis, keepdims=keepdims)


def max(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """`amax`: the largest element, of all or along axes.  `argmax` says where it stands.

    Raises:
        ShapeError: as of `amax`.
    """
    return amax(x, axis, keepdims=keepdims)


def min(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """`amin`: the smallest element, of all or along axes.  `argmin` says where it stands.

    Raises:
        ShapeError: as of `amin`.
    """
    return amin(x, axis, keepdims=keepdims)


def sort(x: Tensor, axis: int = -1, *, descending: bool = False) -> tuple[Tensor, Tensor]:
    """The elements along the axis in order, NaN last, and the i32 places that they came from.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: there is no such axis, or x is i32 or quantized.
    """
    axis = _axis("sort", x, axis)
    order = argsort(_moved(x, axis, x.ndim - 1), order=SortOrder.DESC if descending else SortOrder.ASC)
    ids = _moved(order, x.ndim - 1, axis)
    return take_along_axis(x, ids, axis), ids


# -- spread and softmax ---------------------------------------------------------------------------------------


def var(x: Tensor, axis: Axes = None, *, correction: float = 1, keepdims: bool = False) -> Tensor:
    """The variance: the sum of squared distances from the mean, over their number less `correction`.

    With the default 1 it is torch's, unbiased; NumPy's is that with 0.  Of fewer elements than that it is NaN or inf.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice; or x is i32 or quantized.
    """
    axes = axes_of("var", x, axis)
    n = math.prod(x.shape[a] for a in axes)
    middle = mean(x, axes, keepdims=True)
    squares = sum_of(sqr(sub(x, middle)), axes, keepdims=keepdims)
    rest = n - correction
    return scale(squares, factor=1 / rest if rest > 0 else math.inf)


def std(x: Tensor, axis: Axes = None, *, correction: float = 1, keepdims: bool = False) -> Tensor:
    """The root of `var`.  Where that is 0 the gradient is not finite.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: as of `var`.
    """
    return sqrt(var(x, axis, correction=correction, keepdims=keepdims))


def logsumexp(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) along axes, without an exponential that could overflow.  Of nothing but -inf it is -inf.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice; or x is i32 or quantized.
    """
    axes = axes_of("logsumexp", x, axis)
    top = stop_gradient(amax(x, axes, keepdims=True))
    shift = where(isfinite(top), top, tensor(0.0))
    total = add(log(sum_of(exp(sub(x, shift)), axes, keepdims=True)), shift)
    return reshape(total, without(x, axes, keepdims))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) over its sum along the axis; `soft_max` for any axis.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: there is no such axis, or x is i32 or quantized.
    """
    axis = _axis("softmax", x, axis)
    return _moved(soft_max(_moved(x, axis, x.ndim - 1)), x.ndim - 1, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of `softmax`, with all digits of small ones: x - logsumexp(x).

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: there is no such axis, or x is i32 or quantized.
    """
    axis = _axis("log_softmax", x, axis)
    top = stop_gradient(amax(x, axis, keepdims=True))
    shifted = sub(x, where(isfinite(top), top, tensor(0.0)))
    return sub(shifted, log(sum_of(exp(shifted), axis, keepdims=True)))


# -- put together -------------------------------------------------------------------------------------------


def stack(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape side by side along a new axis.

    Raises:
        ShapeError: none, other shapes, or an axis that the result does not have.
    """
    xs = [x if isinstance(x, Tensor) else tensor(x) for x in xs]
    if not xs or any(x.shape != xs[0].shape for x in xs):
        raise ShapeError(f"stack(): shapes must be equal, and there must be some: {[x.shape for x in xs]}")
    n = xs[0].ndim + 1
    if not -n <= axis < n:
        raise ShapeError(f"stack(): the result has axes {-n} to {n - 1}, not {axis}")
    at = axis % n
    return concat(*(reshape(x, (*x.shape[:at], 1, *x.shape[at:])) for x in xs), axis=at)


def flip(x: Tensor, axis: Axes = None) -> Tensor:
    """The order along axes reversed, along all by default: a view.

    Args:
        x: f32, f16, bf16 or i32 of any shape.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice.
    """
    axes = axes_of("flip", x, axis)
    return slice_of(x, tuple(slice(None, None, -1) if a in axes else slice(None) for a in range(x.ndim)))


def full(shape: int | Sequence[int], value: float, dtype=F32) -> Tensor:
    """`value` in that shape: a view of one element."""
    return broadcast_to(tensor(value, dtype=dtype), shape=(shape,) if isinstance(shape, int) else tuple(shape))


def zeros(shape: int | Sequence[int], dtype=F32) -> Tensor:
    """0 in that shape: a view of one element."""
    return full(shape, 0, dtype)


def ones(shape: int | Sequence[int], dtype=F32) -> Tensor:
    """1 in that shape: a view of one element."""
    return full(shape, 1, dtype)


def zeros_like(x: Tensor) -> Tensor:
    """0 in the shape and dtype of `x`.

    Raises:
        ShapeError: `x` is quantized.
    """
    return full(x.shape, 0, x.dtype)


def ones_like(x: Tensor) -> Tensor:
    """1 in the shape and dtype of `x`.

    Raises:
        ShapeError: `x` is quantized.
    """
    return full(x.shape, 1, x.dtype)


def eye(n: int, m: int | None = None) -> Tensor:
    """1 on the diagonal, else 0: a constant, f32 [n, m], m = n by default."""
    return tensor(np.eye(n, m, dtype=np.float32))


def linspace(start: float, stop: float, n: int) -> Tensor:
    """n numbers from start to stop, both included, at equal distances: a constant of f32."""
    return tensor(np.linspace(start, stop, n))
