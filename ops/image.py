"""Ops of image models: interpolation, windows, relative positions, and the embedding of time steps."""

import enum
import math
from collections.abc import Sequence

import numpy as np

from ..core.errors import ShapeError
from ..core.op import ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .elementwise import add, mul
from .layout import concat, pad, permute, reshape
from .rows import get_rows
from .unary import cos, sin

__all__ = [
    "InterpolationMode", "add_rel_pos", "get_rel_pos", "interpolate", "interpolate_back", "timestep_embedding",
    "upscale", "win_part", "win_unpart",
]  # fmt: skip


class InterpolationMode(enum.IntEnum):
    """How an element between others comes about: the nearest one before it, or 2 or 4 along each axis, weighted."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2


Two = tuple[int, ...]


@op(layout="contiguous")
def interpolate(x, *, size: Two, mode: InterpolationMode, align_corners: bool = False, antialias: bool = False):
    """The last two axes of x[..., H, W] resampled to `size`.

    mode: "nearest", "bilinear" or "bicubic" (a = -0.75; elements beyond the edge are those at the edge).
    align_corners: the first and last elements of both grids lie on each other, instead of the outer edges.
    antialias: bilinear only: where it shrinks, a window as wide as the step, weighted like a tent.
    """
    ensure(x.ndim >= 2, "x must have two axes or more, [..., H, W]")
    _check_sizes(x.shape[-2:], size, mode, antialias)
    return Spec((*x.shape[:-2], *size))


@interpolate.grad
def _(t, dout):
    return (interpolate_back(dout, **t.attrs, shape=t.src[0].shape[-2:]),)


@interpolate.reference
def _(x, *, size, mode, align_corners, antialias):
    rows, columns = (_matrix(n, out, mode, align_corners, antialias) for n, out in zip(x.shape[-2:], size, strict=True))
    return _along(_along(x, columns, -1), rows, -2)


@op(layout="contiguous")
def interpolate_back(
    dout, *, size: Two, mode: InterpolationMode, align_corners: bool = False, antialias: bool = False, shape: Two
):
    """The transpose of `interpolate`, whose x had the last axes `shape`."""
    ensure(dout.ndim >= 2 and dout.shape[-2:] == size, f"dout must be [..., {', '.join(map(str, size))}]")
    _check_sizes(shape, size, mode, antialias)
    return Spec((*dout.shape[:-2], *shape))


@interpolate_back.grad
def _(t, g):
    return (interpolate(g, **{name: value for name, value in t.attrs.items() if name != "shape"}),)


@interpolate_back.reference
def _(dout, *, size, mode, align_corners, antialias, shape):
    rows, columns = (_matrix(n, out, mode, align_corners, antialias) for n, out in zip(shape, size, strict=True))
    return _along(_along(dout, rows.T, -2), columns.T, -1)


def upscale(x: Tensor, factor: int, mode: str | InterpolationMode = InterpolationMode.NEAREST) -> Tensor:
    """The last two axes `factor` times as long; see `interpolate`.

    Raises:
        ShapeError: fewer than two axes, or a factor below 1.
    """
    if x.ndim < 2 or factor < 1:
        raise ShapeError(f"upscale(x={x.spec}, factor={factor}): x must have two axes or more, and grow")
    return interpolate(x, size=(x.shape[-2] * factor, x.shape[-1] * factor), mode=mode)


def _check_sizes(shape, size, mode, antialias) -> None:
    ensure(len(size) == len(shape) == 2, f"sizes {size} and {tuple(shape)} must be pairs")
    ensure(min(*size, *shape) >= 1, f"there is nothing to interpolate from {tuple(shape)} to {size}")
    ensure(max(*size, *shape) < 2**31, f"{tuple(shape)} to {size} is too large")
    ensure(not antialias or mode is InterpolationMode.BILINEAR, "antialias is for the mode 'bilinear'")


def _along(x: np.ndarray, matrix: np.ndarray, axis: int) -> np.ndarray:
    """Each output from the elements that have a weight: NaN elsewhere has no part."""
    x = np.moveaxis(x, axis, -1)
    out = np.zeros((*x.shape[:-1], len(matrix)))
    for o, weights in enumerate(matrix):
        taken = np.flatnonzero(~np.isnan(weights))
        out[..., o] = x[..., taken] @ weights[taken]
    return np.moveaxis(out, -1, axis)


def _matrix(n: int, out: int, mode, align_corners: bool, antialias: bool) -> np.ndarray:
    """[out, n]: the weights; NaN where an element has no part."""
    matrix = np.full((out, n), np.nan)
    step = (n - 1) / (out - 1) if align_corners and n > 1 and out > 1 else n / out
    centre = 0.0 if align_corners else 0.5

    def put(o: int, at: int, weight: float) -> None:
        if abs(weight) < 1e-9:  # nothing but rounding
            return
        at = max(0, min(n - 1, at))
        matrix[o, at] = np.nan_to_num(matrix[o, at]) + weight

    for o in range(out):
        if mode is InterpolationMode.NEAREST:
            aligned = align_corners and n > 1 and out > 1
            put(o, o * (n - 1) // (out - 1) if aligned else o * n // out, 1.0)
        elif antialias:
            at, support = (o + centre) * step, max(1.0, step)
            seen = range(int(max(at - support + centre, 0)), int(min(at + support + centre, n)))
            tent = {j: w for j in seen if (w := 1 - abs(j - at + centre) / support) > 0}
            for j, w in tent.items():
                put(o, j, w / sum(tent.values()))
        else:
            at = (o + centre) * step - centre
            k, rest = math.floor(at), at - math.floor(at)
            if mode is InterpolationMode.BICUBIC:
                for j, distance in zip(range(k - 1, k + 3), (rest + 1, rest, 1 - rest, 2 - rest), strict=True):
                    put(o, j, _cubic(distance))
            else:
                put(o, k, 1 - rest)
                put(o, k + 1, rest)
    return matrix


def _cubic(x: float, a: float = -0.75) -> float:
    return ((a + 2) * x - (a + 3)) * x * x + 1 if x <= 1 else ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


# -- windows --------------------------------------------------------------------------------------------------


def win_part(x: Tensor, window: int) -> Tensor:
    """x[H, W, C] cut into windows, with zeros beyond the edge: [ceil(H / w) ceil(W / w), w, w, C], w = `window`.

    Source: Kirillov et al. 2023, "Segment Anything", arXiv:2304.02643.

    Raises:
        ShapeError: other axes, or a window below 1.
    """
    if x.ndim != 3 or window < 1:
        raise ShapeError(f"win_part(x={x.spec}, window={window}): x must be [H, W, C] and the window 1 or more")
    H, W, C = x.shape
    rows, columns = -(-H // window), -(-W // window)
    whole = pad(x, left=(0, 0, 0), right=(rows * window - H, columns * window - W, 0))
    tiles = permute(reshape(whole, (rows, window, columns, window * C)), axes=(0, 2, 1, 3))
    return reshape(tiles, (rows * columns, window, window, C))


def win_unpart(x: Tensor, size: Sequence[int]) -> Tensor:
    """What `win_part` made, back together: of x[windows, w, w, C] the [H, W, C], `size` = (H, W).

    Raises:
        ShapeError: other axes, or not as many windows as cover the size.
    """
    where = f"win_unpart(x={x.spec}, size={tuple(size)})"
    if x.ndim != 4 or x.shape[1] != x.shape[2] or x.shape[1] < 1 or len(size) != 2 or min(size) < 0:
        raise ShapeError(f"{where}: x must be [windows, w, w, C]")
    (H, W), window, C = size, x.shape[1], x.shape[3]
    rows, columns = -(-H // window), -(-W // window)
    if rows * columns != x.shape[0]:
        raise ShapeError(f"{where}: {rows} x {columns} windows cover that size")
    tiles = permute(reshape(x, (rows, columns, window, window * C)), axes=(0, 2, 1, 3))
    return reshape(tiles, (rows * window, columns * window, C))[:H, :W]


# -- relative positions ---------------------------------------------------------------------------------------


def get_rel_pos(a: Tensor, queries: int, keys: int) -> Tensor:
    """Rows of a[2 n - 1, C] by distance, f32 [queries, keys, C]: out[q, k] = a[keys - 1 - k + q], n = queries = keys.

    Source: Li et al. 2021, "MViTv2", arXiv:2112.01526.

    Raises:
        ShapeError: other sizes.
    """
    if a.ndim != 2 or queries != keys or queries < 1 or a.shape[0] != 2 * queries - 1:
        raise ShapeError(
            f"get_rel_pos(a={a.spec}, queries={queries}, keys={keys}): a has a row for each of 2 n - 1 distances"
        )
    distance = keys - 1 - np.arange(keys)[None, :] + np.arange(queries)[:, None]
    return get_rows(a, tensor(distance))


def add_rel_pos(a: Tensor, pw: Tensor, ph: Tensor) -> Tensor:
    """Attention scores a[B, Q, K K] plus terms by key row, ph, and by key column, pw, each [B, ..., K] with Q of them.

    Source: Li et al. 2021, "MViTv2", arXiv:2112.01526.

    Raises:
        ShapeError: sizes that do not fit.
    """
    K = pw.shape[-1] if pw.ndim else 0
    if pw.shape != ph.shape or a.ndim < 2 or a.shape[-1] != K * K or pw.size * K != a.size:
        raise ShapeError(
            f"add_rel_pos(a={a.spec}, pw={pw.spec}, ph={ph.spec}): of K columns a has K K for each row of pw"
        )
    grid = reshape(a, (pw.size // max(1, K), K, K))
    by_row, by_column = reshape(ph, (grid.shape[0], K, 1)), reshape(pw, (grid.shape[0], 1, K))
    return reshape(add(add(grid, by_row), by_column), a.shape)


# -- time steps -----------------------------------------------------------------------------------------------


def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """Of t[N] the [N, dim]: cos(t f), then sin(t f), where f = max_period ** (-i / half), half = dim // 2.

    An odd dim ends in zeros.

    Source: Vaswani et al. 2017, arXiv:1706.03762; of time steps, Ho, Jain and Abbeel 2020, arXiv:2006.11239.

    Raises:
        ShapeError: other axes, a dim below 2 or a max_period below 1.
    """
    if t.ndim != 1 or dim < 2 or max_period < 1:
        raise ShapeError(
            f"timestep_embedding(t={t.spec}, dim={dim}, max_period={max_period}): t must be [N], dim 2 or more"
        )
    half = dim // 2
    angle = mul(reshape(t, (t.shape[0], 1)), tensor(float(max_period) ** (-np.arange(half) / half)))
    both = concat(cos(angle), sin(angle), axis=1)
    return both if dim % 2 == 0 else pad(both, left=(0, 0), right=(0, 1))
