"""Pooling: the largest element of each window, or its mean."""

import enum

import numpy as np

from ..core.errors import ShapeError
from ..core.op import Float, ensure, op
from ..core.tensor import Spec, Tensor
from .layout import reshape

__all__ = ["PoolMode", "pool_1d", "pool_2d", "pool_2d_back"]


class PoolMode(enum.IntEnum):
    """What becomes of a window: its maximum, or its mean."""

    MAX = 0
    AVG = 1


Two = tuple[int, ...]


@op(layout="contiguous")
def pool_2d(
    x, at: Float | None = None, *, mode: PoolMode, kernel: Two, stride: Two, padding: Two = (0, 0),
    count_padding: bool = True,
):  # fmt: skip
    """Windows over the last two axes of x[..., H, W]: [..., (H + 2 padding - kernel) // stride + 1, ...].

    mode: "max", in which padding has no part, or "avg", in which it counts as zeros, as ggml's does, or with
    count_padding=False not at all: the sum is divided by how many elements of the window lie inside x.  `kernel`,
    `stride` and `padding` are pairs.  The gradient of a maximum goes to the first of equal elements.  With `at`, of the
    shape of x, the result is what x holds where `at` has its maximum; `at` has no gradient.
    """
    ensure(at is None or (mode is PoolMode.MAX and at.shape == x.shape), "at must have the shape of x, and mode be max")
    return Spec((*x.shape[:-2], *_windows(x.shape, kernel, stride, padding)))


@pool_2d.grad
def _(t, dout):
    x, at = t.src
    largest = None if t.attrs["mode"] is PoolMode.AVG else x if at is None else at
    return pool_2d_back(dout, largest, **t.attrs, size=x.shape[-2:]), None


@pool_2d.reference
def _(x, at, *, mode, kernel, stride, padding, count_padding):
    if at is not None:
        flat = _seen(x, kernel, stride, padding, 0.0)
        flat = flat.reshape(*flat.shape[:-2], kernel[0] * kernel[1])
        return np.take_along_axis(flat, _first(at, kernel, stride, padding)[..., None], axis=-1)[..., 0]
    windows = _seen(x, kernel, stride, padding, -np.inf if mode is PoolMode.MAX else 0.0)
    if mode is PoolMode.MAX:
        return windows.max((-2, -1))
    return windows.sum((-2, -1)) / _divisor(x.shape[-2:], kernel, stride, padding, count_padding)


@op(layout="contiguous")
def pool_2d_back(
    dout, x: Float | None = None, *, mode: PoolMode, kernel: Two, stride: Two, padding: Two = (0, 0),
    count_padding: bool = True, size: Two,
):  # fmt: skip
    """The gradient of `pool_2d` by x, whose last axes have `size`.  A maximum needs x itself."""
    ensure(dout.ndim >= 2 and len(size) == 2, "dout must be [..., OH, OW] and size a pair")
    shape = (*dout.shape[:-2], *size)
    out = _windows(shape, kernel, stride, padding)
    ensure(dout.shape[-2:] == out, f"the last axes of dout must be {out}")
    ensure(mode is PoolMode.AVG or (x is not None and x.shape == shape), f"the gradient of a maximum needs x={shape}")
    return Spec(shape)


@pool_2d_back.reference
def _(dout, x, *, mode, kernel, stride, padding, count_padding, size):
    (ph, pw), (kh, kw) = padding, kernel
    dx = np.zeros((*dout.shape[:-2], size[0] + 2 * ph, size[1] + 2 * pw))
    if mode is PoolMode.AVG:
        each = dout / _divisor(size, kernel, stride, padding, count_padding)
        for i, j in np.ndindex(kh, kw):
            _at(dx, i, j, dout.shape, stride)[...] += each
    else:
        first = _first(x, kernel, stride, padding)
        for i, j in np.ndindex(kh, kw):
            _at(dx, i, j, dout.shape, stride)[...] += np.where(first == i * kw + j, dout, 0)
    return dx[..., ph : ph + size[0], pw : pw + size[1]]


@pool_2d_back.grad
def _(t, d):
    options = {name: value for name, value in t.attrs.items() if name != "size"}
    return pool_2d(d, t.src[1], **options), None


def pool_1d(x: Tensor, mode: str | PoolMode, kernel: int, stride: int, padding: int = 0) -> Tensor:
    """Windows along the last axis of x[..., W], "max" or "avg": [..., (W + 2 padding - kernel) // stride + 1].

    Padding has no part in either: as in ggml a mean is of what lies inside x, while `pool_2d` counts zeros there.

    Raises:
        ShapeError: a scalar, more than three axes, or a window that does not fit.
    """
    where = f"pool_1d(x={x.spec}, kernel={kernel}, stride={stride}, padding={padding})"
    if not 1 <= x.ndim <= 3:
        raise ShapeError(f"{where}: x must have one to three axes")
    rows = reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    try:
        out = pool_2d(
            rows, mode=mode, kernel=(1, kernel), stride=(1, stride), padding=(0, padding), count_padding=False
        )
    except ShapeError as error:
        raise ShapeError(f"{where}: {str(error).partition('): ')[2]}") from None
    return reshape(out, (*x.shape[:-1], out.shape[-1]))


def _windows(shape, kernel, stride, padding) -> tuple[int, ...]:
    ensure(len(shape) >= 2, "x must have two axes or more, [..., H, W]")
    for name, values, least in (("kernel", kernel, 1), ("stride", stride, 1), ("padding", padding, 0)):
        ensure(len(values) == 2 and min(values) >= least, f"{name}={tuple(values)} must be two numbers from {least}")
    ensure(all(p < k for p, k in zip(padding, kernel, strict=True)), f"padding {padding} is not less than {kernel}")
    out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape[-2:], kernel, stride, padding, strict=True))
    ensure(min(shape[-2:]) >= 1 and min(out) >= 1, f"no window of {kernel} fits into {tuple(shape[-2:])}")
    return out


def _seen(x, kernel, stride, padding, outside) -> np.ndarray:
    """[..., OH, OW, KH, KW]: a view of the padded planes."""
    edges = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    padded = np.pad(x, edges, constant_values=outside)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, (-2, -1))[..., :: stride[0], :: stride[1], :, :]


def _divisor(size, kernel, stride, padding, count_padding):
    """By what the sum of each window is divided."""
    return np.prod(kernel) if count_padding else _seen(np.ones(size), kernel, stride, padding, 0.0).sum((-2, -1))


def _first(x, kernel, stride, padding) -> np.ndarray:
    """Which element of each window is the first largest."""
    windows = _seen(x, kernel, stride, padding, -np.inf)
    inside = _seen(np.zeros(x.shape), kernel, stride, padding, -1.0) == 0  # of equal ones a place that exists
    rank = np.where(np.isnan(windows), np.inf, windows)
    best = (rank == rank.max((-2, -1), keepdims=True)) & inside
    nan = np.isnan(windows)
    best = np.where(nan.any((-2, -1), keepdims=True), nan, best)
    return best.reshape(*best.shape[:-2], kernel[0] * kernel[1]).argmax(-1)


def _at(dx, i, j, out, stride) -> np.ndarray:
    """The elements that are (i, j) of their windows."""
    (OH, OW), (sh, sw) = out[-2:], stride
    return dx[..., i : i + (OH - 1) * sh + 1 : sh, j : j + (OW - 1) * sw + 1 : sw]
