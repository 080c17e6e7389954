"""Ops that move elements or only look at them another way: views, copies, windows, tiles."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..core.builtin import provides
from ..core.dtype import ALL, I32, DType
from ..core.errors import ShapeError
from ..core.op import Any4, AnyRows, Float, ensure, op
from ..core.tensor import Spec, Tensor, Update, View, contiguous_strides, tensor, whole_sizes

__all__ = [
    "acc", "accumulate", "broadcast_to", "cast", "concat", "cont", "cpy", "dup", "pad", "pad_circular", "pad_ext",
    "pad_reflect_1d", "permute", "repeat", "repeat_4d", "repeat_back", "reshape", "roll", "set", "set_1d", "set_2d",
    "slice_add", "slice_back", "slice_of", "slice_view", "stop_gradient", "strided_back", "transpose", "view",
    "wait_for",
]  # fmt: skip

# -- copies -------------------------------------------------------------------------------------------------


@provides
@op(layout="any", inplace=("x",))
def cont(x: Any4):
    """A contiguous copy of `x`, of any strides and dtype.  Ops that need whole rows insert it by themselves."""
    return x.spec


@cont.grad
def _(t, dout):
    return (dout,)


cont.reference(lambda x: x)


@provides
@op(layout="any")
def cast(x: AnyRows, *, dtype: DType):
    """`x` in another dtype: to the nearest value, ties to even; to i32 by truncation.  Quantized values are expanded.

    NaN and what i32 cannot hold become its least value, -2**31.
    Its gradient passes unchanged: gradients are f32 whatever the dtype of what they belong to.
    References compute in double precision, and so do not round.
    """
    ensure(not dtype.quantized, f"{dtype} is for leaves: gg.quantize makes its blocks, gg.tensor a leaf of them")
    ensure(dtype in ALL, f"no such dtype: {dtype!r}")
    return Spec(x.shape, dtype)


@cast.grad
def _(t, dout):
    return (dout,)


@cast.reference
def _(x, *, dtype):
    if dtype is not I32:
        return x.astype(np.float64)
    holds = (x > -(2**31) - 1) & (x < 2**31)
    return np.where(holds, np.trunc(x), -(2**31)).astype(np.int64)


def dup(x: Tensor) -> Tensor:
    """A contiguous copy of `x`: ggml's name for `cont`.

    Args:
        x: f32, f16, bf16 or i32 of any shape and strides.

    Raises:
        ShapeError: `x` is quantized.
    """
    return cont(x)


def cpy(a: Tensor, b: Tensor) -> Tensor:
    """The elements of `a`, in order, in the shape and the dtype of `b`, as ggml's cpy would leave them in `b`.

    It is a new value: `b` keeps its own, and only `a` gets a gradient.

    Raises:
        ShapeError: other number of elements.
    """
    if a.size != b.size:
        raise ShapeError(f"cpy(a={a.spec}, b={b.spec}): {a.size} elements do not fill {b.size}")
    a = reshape(a, b.shape)
    return cont(a) if a.dtype is b.dtype else cast(a, dtype=b.dtype)


# -- views --------------------------------------------------------------------------------------------------


@provides
@op(layout="any")
def reshape(x: AnyRows, *, shape: tuple[int, ...]):
    ensure(prod(shape) == x.size, f"{x.size} elements do not fill {shape}")
    _keep_rows(x, shape[-1:] == x.shape[-1:])
    strides = _regrouped_rows(x, shape)
    if strides is None:
        raise ShapeError(f"strides {x.strides} cannot be seen as {shape}")
    return View(x, shape, strides)


@reshape.grad
def _(t, dout):
    return (reshape(dout, t.src[0].shape),)


reshape.reference(lambda x, *, shape: x.reshape(shape))


@reshape.call
def _(x: Tensor, shape: int | Sequence[int], *more: int) -> Tensor:
    """The elements of `x`, in order, in another shape: a view, or of strides that do not allow one a copy.

    Args:
        x: any dtype and strides.
        shape: the new sizes, also one by one; one of them may be -1.

    Raises:
        ShapeError: other number of elements, or rows of quantized blocks that would be cut.
    """
    sizes = (*whole_sizes(f"reshape(x={x.spec})", shape), *whole_sizes(f"reshape(x={x.spec})", more))
    known = prod(n for n in sizes if n != -1)
    if sizes.count(-1) == 1 and known and x.size % known == 0:
        sizes = tuple(x.size // known if n == -1 else n for n in sizes)
    if prod(sizes) != x.size or any(n < 0 for n in sizes):
        raise ShapeError(f"reshape(x={x.spec}): {x.size} elements do not fill {tuple(sizes)}")
    if sizes == x.shape:
        return x
    x = x if x.dtype.quantized or _regrouped_rows(x, sizes) is not None else cont(x)
    return reshape.node(x, shape=sizes)


def _keep_rows(x: Tensor, kept: bool) -> None:
    ensure(kept or not x.dtype.quantized, f"rows of {x.dtype} blocks stay whole; gg.cast expands them")


def _regrouped_rows(x: Tensor, new: tuple[int, ...]) -> tuple[int, ...] | None:
    """`_regrouped`; a quantized row is one element."""
    if not x.dtype.quantized:
        return _regrouped(x.shape, x.strides, new)
    outer = _regrouped(x.shape[:-1], x.strides[:-1], new[:-1])
    return None if outer is None else (*outer, x.strides[-1])


def _regrouped(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that show an array in another shape, or None where that takes a copy."""
    if prod(shape) == 0:
        return tuple(0 for _ in new)
    # axes that lie one after another in memory are one run of elements: [size, innermost stride]
    runs: list[list[int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = [runs[-1][0] * n, stride]
        else:
            runs.append([n, stride])
    made: list[int] = []
    rest = list(new)
    for size, stride in reversed(runs):
        taken = 1
        while taken < size:
            n = rest.pop()
            if size % (taken * n):
                return None
            made.append(taken * stride)
            taken *= n
    made.extend(made[-1] if made else 4 for _ in rest)  # what is left has size 1
    return tuple(reversed(made))


@provides
@op(layout="any")
def permute(x: AnyRows, *, axes: tuple[int, ...]):
    """The axes of `x` in another order, a view: axis i of the result is axis `axes[i]` of `x` (NumPy's transpose)."""
    n = x.ndim
    ensure(sorted(a % n if -n <= a < n else a for a in axes) == list(range(n)), f"{axes} is no order of {n} axes")
    _keep_rows(x, axes[-1:] in ((-1,), (n - 1,)))
    return View(x, tuple(x.shape[a] for a in axes), tuple(x.strides[a] for a in axes))


@permute.grad
def _(t, dout):
    order = [a % dout.ndim for a in t.attrs["axes"]]
    return (permute(dout, axes=tuple(int(a) for a in np.argsort(order))),)


permute.reference(lambda x, *, axes: x.transpose(axes))


@provides
def transpose(x: Tensor, axis1: int = -1, axis2: int = -2) -> Tensor:
    """Two axes of `x` exchanged, the last two unless said otherwise: a view.

    Args:
        x: of any dtype; the last axis of a quantized one stays.

    Raises:
        ShapeError: axes that `x` does not have, or rows of blocks would be cut.
    """
    n = x.ndim
    if not all(-n <= a < n for a in (axis1, axis2)):
        raise ShapeError(f"transpose(x={x.spec}): no axes {axis1} and {axis2}")
    axes = list(range(n))
    axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
    return permute(x, axes=tuple(axes))


@provides
@op(layout="any")
def broadcast_to(x: Any4, *, shape: tuple[int, ...]):
    """`x` seen in a larger shape, a view with strides of 0: sizes of 1 grow, leading axes are added."""
    ensure(len(shape) >= x.ndim, f"{shape} has fewer axes")
    pad = len(shape) - x.ndim
    old = (1,) * pad + x.shape
    ensure(all(n in (1, m) for n, m in zip(old, shape, strict=True)), f"only sizes of 1 can grow, to {shape}")
    strides = (0,) * pad + x.strides
    return View(x, shape, tuple(s if n == m else 0 for s, n, m in zip(strides, old, shape, strict=True)))


@broadcast_to.grad
def _(t, dout):
    return (repeat_back(dout, shape=t.src[0].shape),)


broadcast_to.reference(lambda x, *, shape: np.broadcast_to(x, shape))


# -- windows: t[...] ----------------------------------------------------------------------------------------


@op(layout="any")
def slice_view(x: AnyRows, *, starts: tuple[int, ...], steps: tuple[int, ...], shape: tuple[int, ...]):
    """Along each axis the elements start, start + step, ..., as many as `shape` says: a view.

    Steps may be negative.
    """
    _check_window(starts, steps, shape, x.shape)
    _keep_rows(x, (starts[-1:], steps[-1:], shape[-1:]) == ((0,), (1,), x.shape[-1:]))
    strides = tuple(step * stride for step, stride in zip(steps, x.strides, strict=True))
    offset = sum(a * stride for a, stride in zip(starts, x.strides, strict=True)) if prod(shape) else 0
    return View(x, shape, strides, offset)


@slice_view.grad
def _(t, dout):
    return (slice_back(dout, shape=t.src[0].shape, starts=t.attrs["starts"], steps=t.attrs["steps"]),)


@slice_view.reference
def _(x, *, starts, steps, shape):
    return x[_window(starts, steps, shape)]


@op(layout="any")
def slice_back(dout: Any4, *, shape: tuple[int, ...], starts: tuple[int, ...], steps: tuple[int, ...]):
    """Zeros of a shape, with `dout` in the window that `slice_view` looks at."""
    _check_window(starts, steps, dout.shape, shape)
    return Spec(shape, dout.dtype)


@slice_back.grad
def _(t, dout):
    return (slice_view(dout, starts=t.attrs["starts"], steps=t.attrs["steps"], shape=t.src[0].shape),)


@slice_back.reference
def _(dout, *, shape, starts, steps):
    out = np.zeros(shape, dout.dtype)
    out[_window(starts, steps, dout.shape)] = dout
    return out


@op(layout="any", inplace=("a",))
def slice_add(a: Float, b: Float, *, starts: tuple[int, ...], steps: tuple[int, ...]):
    """A copy of `a` with `b` added to the window that `slice_view` looks at."""
    _check_window(starts, steps, b.shape, a.shape)
    return a.spec


@slice_add.grad
def _(t, dout):
    return dout, slice_view(dout, starts=t.attrs["starts"], steps=t.attrs["steps"], shape=t.src[1].shape)


@slice_add.reference
def _(a, b, *, starts, steps):
    out = a.copy()
    out[_window(starts, steps, b.shape)] += b
    return out


@slice_back.summed
def _(window, total):
    """It is added in place, without its zeros; windows that make up the whole are put side by side."""
    windows = [*_windows(total), window]
    if len(windows) > 1 and (axis := _tiled_axis(windows, total.shape)) is not None:
        windows.sort(key=lambda w: w.attrs["starts"][axis])
        return concat(*(w.src[-1] for w in windows), axis=axis)
    return slice_add(total, window.src[0], starts=window.attrs["starts"], steps=window.attrs["steps"])


_SIDE_BY_SIDE = 16  # the most windows that are looked through


def _windows(total: Tensor) -> list[Tensor]:
    """The nodes that brought the windows of which alone `total` is a sum; none if it has other terms, or too many."""
    added: list[Tensor] = []
    while total.op is slice_add and len(added) < _SIDE_BY_SIDE:
        added.append(total)
        total = total.src[0]  # type: ignore[assignment]
    return [*added, total] if total.op is slice_back else []


def _tiled_axis(windows: list[Tensor], shape: tuple[int, ...]) -> int | None:
    """The axis along which the windows lie one after another, without gaps, and fill the whole shape."""
    starts = {w.attrs["starts"] for w in windows}
    axes = [a for a in range(len(shape)) if len({s[a] for s in starts}) > 1]
    if len(axes) != 1 or any({*w.attrs["steps"]} != {1} for w in windows):
        return None
    (axis,), at = axes, 0
    for w in sorted(windows, key=lambda w: w.attrs["starts"][axes[0]]):
        piece = w.src[-1].shape  # type: ignore[union-attr]
        whole = (*shape[:axis], piece[axis], *shape[axis + 1 :])
        if w.attrs["starts"][axis] != at or piece != whole:
            return None
        at += piece[axis]
    return axis if at == shape[axis] else None


def _check_window(starts, steps, shape, whole) -> None:
    """Refuse windows that do not lie in an array of the shape `whole`."""
    ensure(
        len(starts) == len(steps) == len(shape) == len(whole), f"one start, step and size for each of {len(whole)} axes"
    )
    for a, step, n, size in zip(starts, steps, shape, whole, strict=True):
        ensure(
            n == 0 or (0 <= a < size and 0 <= a + (n - 1) * step < size), f"{starts}, {steps}, {shape} leave {whole}"
        )
    ensure(0 not in steps, f"a step of 0 in {steps}: gg.broadcast_to shows an element many times")


def _window(starts, steps, shape) -> tuple[slice, ...]:
    """NumPy's slices for a window."""
    ends = [a + n * step for a, step, n in zip(starts, steps, shape, strict=True)]
    return tuple(
        slice(a, None if end < 0 else end, step) if n else slice(0, 0)
        for a, end, step, n in zip(starts, ends, steps, shape, strict=True)
    )


def slice_of(x: Tensor, index) -> Tensor:
    """`x[index]` for integers, slices, `...` and None, as NumPy reads them: a view.

    Raises:
        ShapeError: an index out of range (integers only; slices are clipped, as in Python), or too many.
    """
    index = index if isinstance(index, tuple) else (index,)
    asked = index
    consuming = sum(i is not None and i is not Ellipsis for i in index)
    if consuming > x.ndim or sum(i is Ellipsis for i in index) > 1:
        raise ShapeError(f"{_asked(x, asked)}: too many indices for {x.ndim} axes")
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    at = index.index(Ellipsis)
    index = (*index[:at], *(slice(None),) * (x.ndim - consuming), *index[at + 1 :])

    starts, steps, sizes, shape = [], [], [], []
    sources = iter(x.shape)
    for i in index:
        if i is None:
            shape.append(1)
            continue
        n = next(sources)
        if isinstance(i, slice):
            start, stop, step = i.indices(n)
            taken = len(range(start, stop, step))
            shape.append(taken)
        elif isinstance(i, (int, np.integer)) and not isinstance(i, bool):
            if not -n <= i < n:
                raise ShapeError(f"{_asked(x, asked)}: index {i} is out of range for size {n}")
            start, step, taken = int(i) % n, 1, 1
        else:
            raise ShapeError(
                f"{_asked(x, asked)}: an index is an integer, a slice, ... or None, not {i!r}; an array "
                "may stand alone, x[ids], and gg.get_rows gathers from each of several lists"
            )
        starts.append(start if taken else 0)
        steps.append(step)
        sizes.append(taken)
    window = slice_view(x, starts=tuple(starts), steps=tuple(steps), shape=tuple(sizes))
    return reshape(window, shape)


def _asked(x: Tensor, index: tuple) -> str:
    return f"{x.label()}[{', '.join('...' if i is Ellipsis else str(i) for i in index)}]"


def pad(x: Tensor, left: Sequence[int], right: Sequence[int]) -> Tensor:
    """`x` with zeros around it: along each axis so many before and behind.

    Raises:
        ShapeError: not one number for each axis, or a negative one.
    """
    left, right = (whole_sizes(f"pad(x={x.spec})", sizes) for sizes in (left, right))
    if not len(left) == len(right) == x.ndim or any(n < 0 for n in (*left, *right)):
        raise ShapeError(f"pad(x={x.spec}): left {left} and right {right} must be {x.ndim} numbers from 0 each")
    shape = tuple(a + n + b for a, n, b in zip(left, x.shape, right, strict=True))
    return slice_back(x, shape=shape, starts=left, steps=(1,) * x.ndim)


def pad_ext(x: Tensor, left: Sequence[int], right: Sequence[int], *, circular: bool = False) -> Tensor:
    """`pad`, or where it is circular `pad_circular`: ggml's pad_ext and pad_ext_circular.

    Raises:
        ShapeError: not one number for each axis of `x`, or a negative one; and as of `pad_circular`.
    """
    return pad_circular(x, left, right) if circular else pad(x, left, right)


def pad_circular(x: Tensor, left: Sequence[int], right: Sequence[int]) -> Tensor:
    """`x` going on around itself: along each axis so many elements before its beginning and behind its end.

    Raises:
        ShapeError: not one number for each axis, a negative one, or an axis of no elements that cannot go on.
    """
    given = f"pad_circular(x={x.spec})"
    if not len(left) == len(right) == x.ndim or any(n < 0 for n in (*left, *right)):
        raise ShapeError(f"{given}: left {tuple(left)} and right {tuple(right)} must be {x.ndim} numbers from 0 each")
    for axis, (before, behind) in enumerate(zip(left, right, strict=True)):
        n = x.shape[axis]
        if before == behind == 0:
            continue
        if n == 0:
            raise ShapeError(f"{given}: axis {axis} has no elements to go on with")
        pieces, at = [], -before
        while at < n + behind:
            taken = min(n - at % n, n + behind - at)
            pieces.append(_run_of(x, axis, at % n, taken))
            at += taken
        x = concat(*pieces, axis=axis)
    return x


def pad_reflect_1d(x: Tensor, left: int, right: int) -> Tensor:
    """`x` with so many elements before and behind along the last axis, mirrored at its first and last element.

    Raises:
        ShapeError: more than the axis has beside the one it is mirrored at, or a negative number.
    """
    n = x.shape[-1] if x.ndim else 0
    if not (0 <= left < n and 0 <= right < n):
        raise ShapeError(f"pad_reflect_1d(x={x.spec}): left {left} and right {right} must be from 0 to {n - 1}")
    ends = [_run_of(x, -1, left, left, -1), x, _run_of(x, -1, n - 2, right, -1)]
    return concat(*(piece for piece in ends if piece.shape[-1] or piece is x), axis=-1)


def roll(x: Tensor, shifts: Sequence[int]) -> Tensor:
    """The elements of `x` moved on by so many places along each axis; what leaves at the end comes in at the front.

    Raises:
        ShapeError: not one number for each axis.
    """
    if len(shifts) != x.ndim:
        raise ShapeError(f"roll(x={x.spec}): {tuple(shifts)} must be one number for each of {x.ndim} axes")
    for axis, shift in enumerate(shifts):
        n = x.shape[axis]
        if n and shift % n:
            at = n - shift % n
            x = concat(_run_of(x, axis, at, n - at), _run_of(x, axis, 0, at), axis=axis)
    return x


def _run_of(x: Tensor, axis: int, start: int, n: int, step: int = 1) -> Tensor:
    """n elements of an axis."""
    axis %= x.ndim
    starts = tuple(start if a == axis and n else 0 for a in range(x.ndim))
    steps = tuple(step if a == axis else 1 for a in range(x.ndim))
    return slice_view(x, starts=starts, steps=steps, shape=(*x.shape[:axis], n, *x.shape[axis + 1 :]))


# -- ggml's views of bytes ----------------------------------------------------------------------------------


@op(layout="any")
def view(x: Any4, *, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0):
    # in elements, not in bytes
    ensure(x.is_contiguous, "x must be contiguous; gg.view copies it first where it is not")
    _check_strides(shape, strides, offset, x.size)
    return View(x, shape, tuple(s * x.dtype.nbytes for s in strides), offset * x.dtype.nbytes)


@view.grad
def _(t, dout):
    return (strided_back(dout, shape=t.src[0].shape, strides=t.attrs["strides"], offset=t.attrs["offset"]),)


@view.reference
def _(x, *, shape, strides, offset):
    return x.reshape(-1)[_strided_places(shape, strides, offset)]


@view.call
def _(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
    """Any look into the memory of a contiguous `x` (another is copied first), as ggml's view_1d to view_4d.

    Args:
        shape, strides: sizes, and bytes from one element to the next, outermost axis first.
        offset: bytes to the first element.

    Elements may be seen more than once; their gradients add up.

    Raises:
        ShapeError: the look goes beyond `x`, or does not begin or go on at elements; or `x` is quantized.
    """
    size = x.dtype.nbytes
    if any(n % size for n in (*strides, offset)):
        raise ShapeError(f"view(x={x.spec}): strides {tuple(strides)} and offset {offset} must be multiples of {size}")
    x = x if x.is_contiguous else cont(x)
    return view.node(x, shape=tuple(shape), strides=tuple(n // size for n in strides), offset=offset // size)


@op(layout="any")
def strided_back(dout: Float, *, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0):
    """Zeros of a shape, with `dout` added where `view` looks: what is seen more than once gets the sum."""
    _check_strides(dout.shape, strides, offset, prod(shape))
    return Spec(shape)


@strided_back.grad
def _(t, dout):
    dout = dout if dout.is_contiguous else cont(dout)
    return (view.node(dout, shape=t.src[0].shape, strides=t.attrs["strides"], offset=t.attrs["offset"]),)


@strided_back.reference
def _(dout, *, shape, strides, offset):
    out = np.zeros(prod(shape))
    np.add.at(out, _strided_places(dout.shape, strides, offset), dout)
    return out.reshape(shape)


@op(layout="any", inplace=("a",))
def acc(a: Float, b: Float, *, strides: tuple[int, ...], offset: int = 0):
    _check_strides(b.shape, strides, offset, a.size)
    return a.spec


@acc.grad
def _(t, dout):
    return dout, _looked_at(t, dout)


@acc.reference
def _(a, b, *, strides, offset):
    out = a.flatten()
    np.add.at(out, _strided_places(b.shape, strides, offset), b)
    return out.reshape(a.shape)


@acc.call
def _(a: Tensor, b: Tensor, strides: Sequence[int] | None = None, offset: int = 0) -> Tensor:
    """A copy of `a` with `b` added to a window of it.

    Args:
        a: f32, or halves, which are cast.
        b: what is added.
        strides: bytes from one element of the window to the next along each axis of `b`, outermost first, as `view`
            takes them; if left out, those of `a`.  Elements that the window meets twice get both.
        offset: bytes to the window's first element.

    Raises:
        ShapeError: the window does not lie in `a`, or does not begin or go on at elements.
    """
    return acc.node(a, b, **_window_in("acc", a, b, strides, offset))


@op(layout="any", inplace=("a",))
def set(a: Any4, b: Any4, *, strides: tuple[int, ...], offset: int = 0):
    ensure(a.dtype is b.dtype, "dtypes differ; gg.cast makes them equal")
    _check_strides(b.shape, strides, offset, a.size)
    ensure(not _overlap(b.shape, strides), f"with strides {strides}, elements of b would be written over each other")
    return a.spec


@set.grad
def _(t, dout):
    b = t.src[1]
    zeros = broadcast_to(tensor(0.0), shape=b.shape)
    return set.node(dout, zeros, strides=t.attrs["strides"], offset=t.attrs["offset"]), _looked_at(t, dout)


@set.reference
def _(a, b, *, strides, offset):
    out = a.flatten()
    out[_strided_places(b.shape, strides, offset)] = b
    return out.reshape(a.shape)


@set.call
def _(a: Tensor, b: Tensor, strides: Sequence[int] | None = None, offset: int = 0) -> Tensor:
    """A copy of `a` with `b` instead of a window of it; arguments as those of `acc`.

    Raises:
        ShapeError: the window does not lie in `a`, or meets an element twice; or dtypes differ.
    """
    return set.node(a, b, **_window_in("set", a, b, strides, offset))


def _looked_at(t: Tensor, dout: Tensor) -> Tensor:
    """Where `b` went, in the gradient of the result."""
    dout = dout if dout.is_contiguous else cont(dout)
    return view.node(dout, shape=t.src[1].shape, strides=t.attrs["strides"], offset=t.attrs["offset"])  # type: ignore[union-attr]


def set_1d(a: Tensor, b: Tensor, offset: int) -> Tensor:
    """`set` with the strides of `a`: of a vector `b`, instead of the elements from `offset` bytes on.

    Raises:
        ShapeError: as of `set`.
    """
    return set(a, b, offset=offset)


def set_2d(a: Tensor, b: Tensor, stride: int, offset: int) -> Tensor:
    """`set` of a matrix `b`, with `stride` bytes from row to row of the window.

    Raises:
        ShapeError: as of `set`.
    """
    return set(a, b, (stride, a.dtype.nbytes), offset)


def _window_in(name: str, a: Tensor, b: Tensor, strides: Sequence[int] | None, offset: int) -> dict[str, Any]:
    """Strides and offset in elements."""
    size = a.dtype.nbytes
    if strides is None:
        strides = contiguous_strides(a.shape, a.dtype)[a.ndim - b.ndim :] if b.ndim <= a.ndim else ()
    if any(n % size for n in (*strides, offset)):
        given = f"{name}(a={a.spec}, b={b.spec})"
        raise ShapeError(f"{given}: strides {tuple(strides)} and offset {offset} must be multiples of {size}")
    return {"strides": tuple(n // size for n in strides), "offset": offset // size}


def _overlap(shape, strides) -> bool:
    """Whether an element is met twice."""
    reach = 1
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            places = _strided_places(shape, strides, 0)
            return bool(np.unique(places).size < places.size)
        reach += stride * (n - 1)
    return False


def _check_strides(shape, strides, offset, size) -> None:
    ensure(len(shape) == len(strides), f"{len(strides)} strides for {len(shape)} axes")
    if prod(shape):
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        first, last = offset + sum(r for r in reach if r < 0), offset + sum(r for r in reach if r > 0)
        ensure(first >= 0 and last < size, f"elements {first} to {last} of {size} would be looked at")


def _strided_places(shape, strides, offset) -> np.ndarray:
    """The index of each element in the flat array that is looked into."""
    places = np.full(shape, offset)
    for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        places += (np.arange(n) * stride).reshape([n if a == axis else 1 for a in range(len(shape))])
    return places


# -- side by side -------------------------------------------------------------------------------------------


@op(layout="any")
def concat(*xs: Any4, axis: int = -1):
    """The arrays one after another along an axis."""
    ensure(len(xs) > 0, "nothing to join")
    first = xs[0]
    ensure(-first.ndim <= axis < first.ndim, f"there is no axis {axis}")
    axis %= first.ndim
    others = (*first.shape[:axis], *first.shape[axis + 1 :])
    for x in xs[1:]:
        ensure(x.dtype is first.dtype, "dtypes differ; gg.cast makes them equal")
        same = x.ndim == first.ndim and (*x.shape[:axis], *x.shape[axis + 1 :]) == others
        ensure(same, f"shapes differ along other axes than {axis}")
    return Spec((*first.shape[:axis], sum(x.shape[axis] for x in xs), *first.shape[axis + 1 :]), first.dtype)


@concat.grad
def _(t, dout):
    axis, at, gradients = t.attrs["axis"] % t.ndim, 0, []
    for x in t.src:
        starts = tuple(at if i == axis and x.size else 0 for i in range(t.ndim))
        gradients.append(slice_view(dout, starts=starts, steps=(1,) * t.ndim, shape=x.shape))
        at += x.shape[axis]
    return gradients


concat.reference(lambda *xs, axis: np.concatenate(xs, axis=axis))


# -- tiles --------------------------------------------------------------------------------------------------


@op(layout="any")
def repeat(x: Any4, *, shape: tuple[int, ...]):
    """`x` tiled until it fills `shape`; each size of `x` divides the new one's."""
    ensure(tiles(x.shape, shape), f"tiles of {x.shape} do not fill {shape}")
    return Spec(shape, x.dtype)


@repeat.grad
def _(t, dout):
    return (repeat_back(dout, shape=t.src[0].shape),)


@repeat.reference
def _(x, *, shape):
    old = (1,) * (len(shape) - x.ndim) + x.shape
    return np.tile(x, [m // n if n else 1 for n, m in zip(old, shape, strict=True)])


def repeat_4d(x: Tensor, *shape: int) -> Tensor:
    """`repeat`, with the sizes one by one, outermost first.

    Raises:
        ShapeError: tiles of the shape of `x` do not fill the new one.
    """
    return repeat(x, shape=shape)


@op(layout="any")
def repeat_back(x: Float, *, shape: tuple[int, ...]):
    """The sum of the tiles of that shape that `x` consists of: what a broadcast operand's gradient is."""
    ensure(tiles(shape, x.shape), f"tiles of {shape} do not fill {x.shape}")
    return Spec(shape)


@repeat_back.grad
def _(t, dout):
    return (repeat(dout, shape=t.src[0].shape),)


@repeat_back.reference
def _(x, *, shape):
    small = (1,) * (x.ndim - len(shape)) + shape
    if 0 in x.shape:
        return np.zeros(shape)
    split = [m for n, size in zip(small, x.shape, strict=True) for m in (size // n, n)]
    return x.reshape(split).sum(axis=tuple(range(0, 2 * x.ndim, 2))).reshape(shape)


def tiles(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether arrays of the first shape, side by side, fill the second.  An empty array fills no other."""
    pad = len(large) - len(small)
    if pad < 0:
        return False
    pairs = zip((1,) * pad + small, large, strict=True)
    return all(m % n == 0 if n else m == 0 for n, m in pairs)


def unbroadcast(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient of an operand of that shape, from that of the result it was broadcast to."""
    return gradient if gradient.shape == shape else repeat_back(gradient, shape=shape)


@op(layout="any")
def wait_for(x: Any4, *, others: Any):
    """`x`, which nothing reads before the other tensors are complete: so that their inputs' memory is free again."""
    return View(x, x.shape, x.strides, behind=tuple(others))


wait_for.grad(lambda t, dout: (dout,))
wait_for.reference(lambda x, *, others: x)


@op(layout="any")
def stop_gradient(x: Any4):
    """The same values, through which no gradient flows: a target that is computed, not learnt."""
    return View(x, x.shape, x.strides)


@stop_gradient.grad
def _(t, dout):
    return (None,)


stop_gradient.reference(lambda x: x)


# -- leaves that are written to -----------------------------------------------------------------------------


@provides
@op(layout="any")
def accumulate(total: Float, gradient: Float):
    """total += gradient, written into the leaf `total`."""
    ensure(total.shape == gradient.shape, "shapes differ")
    return Update(total)


accumulate.reference(lambda total, gradient: (total + gradient,))
