"""Softmax along the last axis, with an additive mask, ALiBi's slopes and sinks."""

import numpy as np

from ..core.op import Half, ensure, op
from ..core.tensor import Spec, tensor
from .attention import alibi_slopes
from .elementwise import mul, sub
from .elementwise import scale as times
from .layout import repeat_back, reshape, slice_back, unbroadcast
from .reduce import sum_rows

__all__ = ["soft_max", "soft_max_back", "soft_max_sinks_back"]


@op(inplace=("x",))
def soft_max(x, mask: Half | None = None, sinks=None, *, scale: float = 1.0, max_bias: float = 0.0):
    """The softmax along the last axis of scale * x + slope * mask.

    Where the mask is -inf, `x` is not looked at.  A row in which all is masked out gives zeros.

    Args:
        x: [..., rows, n]; with max_bias or sinks [..., H, rows, n].
        mask: f32, f16 or bf16 [..., rows or more, n]; rows beyond those of `x` are not read.  Along the axes
            before the last it is tiled as the operands of `add` are: each size divides that of `x`.
        sinks: [H], a logit for each head that takes its share of every row's sum, and gives it to no place.
        scale: of `x`.
        max_bias: of ALiBi: the mask is multiplied with a slope for each head.  Without it, slopes are 1.
    """
    _check(x, mask, sinks, max_bias)
    return x.spec


@soft_max.grad
def _(t, dout, *, needs):
    x, mask, sinks = t.src
    scale, max_bias = t.attrs["scale"], t.attrs["max_bias"]
    dx = dmask = dsinks = None
    if needs[1]:
        dscores = soft_max_back(dout, t)
        dx = dscores if scale == 1 else times(dscores, factor=scale)
        if max_bias > 0:
            dscores = mul(dscores, tensor(alibi_slopes(x.shape[-3], max_bias)[:, None, None]))
        dmask = _mask_gradient(dscores, mask)
    elif needs[0]:
        dx = soft_max_back(dout, t, scale=scale)
    if needs[2]:
        of_rows = soft_max_sinks_back(dout, t, x, sinks, mask, **t.attrs)
        dsinks = reshape(repeat_back(of_rows, shape=(*sinks.shape, 1, 1)), sinks.shape)
    return dx, dmask, dsinks


@soft_max.reference
def _(x, mask, sinks, *, scale, max_bias):
    scores = _scores(x, mask, scale, max_bias)
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
    shift = np.where(largest == -np.inf, 0, largest)
    weights = np.exp(scores - shift)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - shift)
    return weights / np.where(total == 0, 1, total)


@op
def soft_max_sinks_back(dout, y, x, sinks, mask: Half | None = None, *, scale: float = 1.0, max_bias: float = 0.0):
    """What each row adds to the gradient of `soft_max` by its sink, from its result y: [..., H, rows, 1].

    It is -(the sink's share) * sum of dout * y along the row.
    """
    ensure(dout.shape == y.shape == x.shape, "dout, y and x have different shapes")
    _check(x, mask, sinks, max_bias)
    return Spec((*x.shape[:-1], 1))


@soft_max_sinks_back.reference
def _(dout, y, x, sinks, mask, *, scale, max_bias):
    scores = _scores(x, mask, scale, max_bias)
    dout = np.where(y == 0, 0, dout)
    dot = (dout * y).sum(axis=-1, keepdims=True)
    if x.shape[-1] == 0:
        return dot
    best = y.argmax(axis=-1)[..., None]
    score, share = np.take_along_axis(scores, best, axis=-1), np.take_along_axis(y, best, axis=-1)
    return np.where(dot == 0, 0, -dot * share * np.exp(sinks[:, None, None] - score))


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


@soft_max_back.grad
def _(t, d, *, needs):
    dout, y = t.src
    scale, dy = t.attrs["scale"], None
    if needs[1]:
        forth = mul(d, sub(dout, sum_rows(mul(dout, y))))
        dy = times(sub(forth, mul(dout, sum_rows(mul(d, y)))), factor=scale)
    return soft_max_back(d, y, scale=scale), dy


def _check(x, mask, sinks, max_bias: float) -> None:
    ensure(x.ndim >= 1, "a scalar has no last axis")
    ensure(max_bias >= 0, f"max_bias={max_bias} must not be negative")
    ensure(max_bias == 0 or mask is not None, f"max_bias={max_bias} multiplies a mask, and there is none")
    ensure(x.ndim >= 3 or (max_bias == 0 and sinks is None), "with max_bias or sinks, x must be [..., H, rows, n]")
    if mask is not None:
        _check_mask(x.shape, mask.shape)
    if sinks is not None:
        ensure(sinks.shape == x.shape[-3:-2], f"sinks must have one logit for each of {x.shape[-3]} heads")


def _scores(x, mask, scale: float, max_bias: float):
    """What the softmax is taken of."""
    if mask is None:
        return scale * x
    tiled = _tiled_mask(mask, x.shape)
    slopes = alibi_slopes(x.shape[-3], max_bias)[:, None, None] if max_bias > 0 else 1
    return np.where(tiled == -np.inf, -np.inf, scale * x + slopes * tiled)


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
