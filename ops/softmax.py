"""Softmax along the last axis, with an additive mask."""

import numpy as np

from ..op import Half, ensure, op
from ..tensor import Spec
from .elementwise import scale as times
from .layout import slice_back, unbroadcast

__all__ = ["soft_max", "soft_max_back"]


@op(inplace=("x",))
def soft_max(x, mask: Half | None = None, *, scale: float = 1.0):
    """The softmax along the last axis of scale * x + mask.

    Where the mask is -inf, `x` is not looked at.  A row in which all is masked out gives zeros.

    Args:
        x: [..., rows, n].
        mask: f32, f16 or bf16 [..., rows or more, n]; rows beyond those of `x` are not read.  Along the axes
            before the last it is tiled as the operands of `add` are: each size divides that of `x`.
        scale: of `x`.
    """
    ensure(x.ndim >= 1, "a scalar has no last axis")
    if mask is not None:
        _check_mask(x.shape, mask.shape)
    return x.spec


@soft_max.grad
def _(t, dout, *, needs):
    mask = t.src[1]
    scale = t.attrs["scale"]
    if not needs[1]:
        return soft_max_back(dout, t, scale=scale), None
    dscores = soft_max_back(dout, t)
    dx = dscores if scale == 1 else times(dscores, factor=scale)
    return dx if needs[0] else None, _mask_gradient(dscores, mask)


@soft_max.reference
def _(x, mask, *, scale):
    scores = scale * x
    if mask is not None:
        tiled = _tiled_mask(mask, x.shape)
        scores = np.where(tiled == -np.inf, -np.inf, scores + tiled)
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


@op(inplace=("dout", "y"))
def soft_max_back(dout, y, *, scale: float = 1.0):
    """The gradient of `soft_max` by x, from its result: scale * y * (dout - sum of dout * y along the row).

    Where `y` is 0, `dout` is not looked at.
    """
    ensure(dout.shape == y.shape, "dout and y have different shapes")
    ensure(y.ndim >= 1, "a scalar has no last axis")
    return Spec(y.shape)


@soft_max_back.reference
def _(dout, y, *, scale):
    dout = np.where(y == 0, 0, dout)
    return scale * y * (dout - (dout * y).sum(axis=-1, keepdims=True))


def _check_mask(x: tuple[int, ...], mask: tuple[int, ...]) -> None:
    ensure(1 <= len(mask) <= len(x), f"the mask has {len(mask)} axes, x {len(x)}")
    ensure(mask[-1] == x[-1], f"rows of the mask have {mask[-1]} elements, rows of x {x[-1]}")
    for axis in range(2, len(mask) + 1):
        m, n = mask[-axis], x[-axis]
        fits = n % m == 0 if m else n == 0
        ensure(fits or (axis == 2 and m > n), f"{m} along axis {-axis} of the mask do not tile the {n} of x")


def _tiled_mask(mask, shape: tuple[int, ...]):
    """The mask as it applies to each element of x."""
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    return mask[np.ix_(*(np.arange(n) % max(1, m) for n, m in zip(shape, mask.shape, strict=True)))]


def _mask_gradient(dscores, mask):
    """The sum over all that a mask was tiled to; zero in rows that x does not have."""
    used = list(mask.shape)
    if mask.ndim >= 2:
        used[-2] = min(used[-2], dscores.shape[-2])
    dmask = unbroadcast(dscores, tuple(used))
    if dmask.shape == mask.shape:
        return dmask
    return slice_back(dmask, shape=mask.shape, starts=(0,) * mask.ndim, steps=(1,) * mask.ndim)
