"""Normalisation along the last axis: to mean 0 and variance 1, to mean square 1, or to length 1."""

from typing import Any

import numpy as np

from ..core.errors import ShapeError
from ..core.op import ensure, op
from ..core.tensor import Pack, Spec, Tensor
from ..diff.autodiff import through, through_gradients_of
from .elementwise import div, mul, scale, sub
from .layout import concat, cont, reshape, unbroadcast
from .reduce import mean, sum_rows
from .unary import clamp, sqr, sqrt

__all__ = ["group_norm", "l2_norm", "l2_norm_back", "norm", "norm_back", "rms_norm", "rms_norm_back"]


@op(inplace=("x",))
def norm(x, weight=None, bias=None, *, eps: float = 1e-5):
    """(x - mean) / sqrt(variance + eps) along the last axis, times `weight`, plus `bias`: LayerNorm.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    Args:
        x: [..., n].
        weight, bias: [n]; either may be left out.
        eps: added to the variance, the mean of (x - mean)^2.
    """
    return _normalised(x, eps, weight=weight, bias=bias)


@norm.grad
def _(t, dout, *, needs):
    x, weight, bias = t.src
    if not needs[1]:
        dx = norm_back(dout, x, weight, eps=t.attrs["eps"], weight_gradient=False) if needs[0] else None
        return dx, None, unbroadcast(dout, bias.shape) if needs[2] else None
    dx, dweight, dbias = norm_back(dout, x, weight, eps=t.attrs["eps"])
    return dx, _kept_alone(dweight), None if bias is None else _kept_alone(dbias)


@norm.reference
def _(x, weight, bias, *, eps):
    out = _hat(x, eps, centred=True)[0]
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@op(inplace=("x",))
def rms_norm(x, weight=None, *, eps: float = 1e-5):
    """x / sqrt(mean of x^2 + eps) along the last axis, times `weight`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        x: [..., n].
        weight: [n], may be left out.
        eps: added to the mean of the squares.
    """
    return _normalised(x, eps, weight=weight)


@rms_norm.grad
def _(t, dout, *, needs):
    x, weight = t.src
    if not needs[1]:
        return rms_norm_back(dout, x, weight, eps=t.attrs["eps"], weight_gradient=False), None
    dx, dweight = rms_norm_back(dout, x, weight, eps=t.attrs["eps"])
    return dx, _kept_alone(dweight)


@rms_norm.reference
def _(x, weight, *, eps):
    out = _hat(x, eps, centred=False)[0]
    return out if weight is None else out * weight


@op(inplace=("x",))
def l2_norm(x, *, eps: float = 1e-12):
    """x / max(|x|, eps) along the last axis, with the length |x| = sqrt(sum of x^2).

    Args:
        x: [..., n].
        eps: rows that are not longer are divided by it; their gradient is that of a constant divisor.
    """
    return _normalised(x, eps)


@l2_norm.grad
def _(t, dout):
    return (l2_norm_back(dout, t.src[0], **t.attrs),)


@l2_norm.reference
@np.errstate(all="ignore")
def _(x, *, eps):
    return x / np.maximum(_length(x), eps)


@op
def l2_norm_back(dout, x, *, eps: float = 1e-12):
    """The gradient of `l2_norm`: (dout - y * sum of y * dout) / |x| with y = x / |x|, or dout / eps if |x| <= eps."""
    ensure(dout.shape == x.shape, "dout and x have different shapes")
    return _normalised(x, eps)


@l2_norm_back.reference
@np.errstate(all="ignore")
def _(dout, x, *, eps):
    length = _length(x)
    y = x / length
    return np.where(length <= eps, dout / eps, (dout - y * (y * dout).sum(axis=-1, keepdims=True)) / length)


@l2_norm_back.grad
def _(t, d, *, needs):
    x = t.src[1]
    dx = _l2_norm_twice(t, d, needs=[False, True])[1] if needs[1] else None
    return l2_norm_back(d, x, **t.attrs), dx


@through_gradients_of
def _l2_norm_twice(x, *, eps):
    return div(x, sqrt(clamp(sum_rows(sqr(x)), min=eps * eps, max=np.inf)))


def group_norm(x: Tensor, n_groups: int, eps: float = 1e-5) -> Tensor:
    """`norm` of groups of channels at once: of x[..., C, H, W] groups of ceil(C / n_groups), the last has the rest.

    Source: Wu and He 2018, arXiv:1803.08494.

    Raises:
        ShapeError: fewer than three axes, or no group.
    """
    if x.ndim < 3 or n_groups < 1:
        raise ShapeError(f"group_norm(x={x.spec}, n_groups={n_groups}): x must be [..., C, H, W], in 1 group or more")
    batch, channels = x.shape[:-3], x.shape[-3]
    each = -(-channels // n_groups)
    whole = channels // each if each else 0

    def normalised(part: Tensor, groups: int) -> Tensor:
        rows = reshape(part, (*batch, groups, part.size // max(1, groups * int(np.prod(batch)))))
        return reshape(norm(rows, eps=eps), part.shape)

    if whole * each == channels:
        return normalised(x, whole) if x.size else x
    first, rest = x[..., : whole * each, :, :], x[..., whole * each :, :, :]
    return concat(normalised(first, whole), normalised(rest, 1), axis=-3) if x.size else x


@op
def norm_back(dout, x, weight=None, *, eps: float = 1e-5, weight_gradient: Any = True):
    """Gradients of `norm`: (dx, dweight, dbias) packed; dx alone without a weight, or if its gradient is not wanted."""
    dx = _normalised(x, eps, weight=weight)
    ensure(dout.shape == x.shape, "dout and x have different shapes")
    ensure(isinstance(weight_gradient, bool), f"weight_gradient must be True or False, not {weight_gradient!r}")
    return dx if weight is None or not weight_gradient else Pack(dx=dx, dweight=weight.spec, dbias=weight.spec)


@norm_back.reference
def _(dout, x, weight, *, eps, weight_gradient):
    made = _back(dout, x, weight, eps, centred=True)
    return made if weight is None or weight_gradient else made[0]


@norm_back.grad
@through
def _(dout, x, weight, *, eps, weight_gradient):
    made = _back_of_ops(dout, sub(x, mean(x)), weight, eps, centred=True)
    return made if weight is None or weight_gradient else made[0]


@op
def rms_norm_back(dout, x, weight=None, *, eps: float = 1e-5, weight_gradient: Any = True):
    """Gradients of `rms_norm`: (dx, dweight) packed; dx alone without a weight, or if its gradient is not wanted."""
    dx = _normalised(x, eps, weight=weight)
    ensure(dout.shape == x.shape, "dout and x have different shapes")
    ensure(isinstance(weight_gradient, bool), f"weight_gradient must be True or False, not {weight_gradient!r}")
    return dx if weight is None or not weight_gradient else Pack(dx=dx, dweight=weight.spec)


@rms_norm_back.reference
def _(dout, x, weight, *, eps, weight_gradient):
    made = _back(dout, x, weight, eps, centred=False)
    return made if weight is None else made[:2] if weight_gradient else made[0]


@rms_norm_back.grad
@through
def _(dout, x, weight, *, eps, weight_gradient):
    made = _back_of_ops(dout, x, weight, eps, centred=False)
    return made if weight is None or weight_gradient else made[0]


def _back_of_ops(dout: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, centred: bool):
    """What `_back` says, made of ops; x has mean 0 where it is centred."""
    root = sqrt(scale(mean(sqr(x)), factor=1, bias=eps))
    hat, g = div(x, root), dout if weight is None else mul(dout, weight)
    dx = sub(g, mul(hat, mean(mul(g, hat))))
    dx = div(sub(dx, mean(g)) if centred else dx, root)
    if weight is None:
        return dx
    dweight = unbroadcast(mul(dout, hat), weight.shape)
    return (dx, dweight, unbroadcast(dout, weight.shape)) if centred else (dx, dweight)


def _normalised(x, eps: float, **affine) -> Spec:
    ensure(x.ndim >= 1, "a scalar has no last axis")
    ensure(eps >= 0, f"eps must not be negative: {eps}")
    for name, t in affine.items():
        ensure(t is None or t.shape == x.shape[-1:], f"{name} must have the shape ({x.shape[-1]},) of x's last axis")
    return x.spec


def _kept_alone(dweight):
    """A copy: a parameter's gradient outlives the step, and would keep the large dx beside it alive."""
    return cont(dweight)


def _hat(x, eps: float, *, centred: bool):
    """Normalised rows, and what they were multiplied with."""
    if centred and x.shape[-1]:
        x = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt(_mean(x * x) + eps)
    return x * inverse, inverse


def _back(dout, x, weight, eps: float, *, centred: bool):
    hat, inverse = _hat(x, eps, centred=centred)
    g = dout if weight is None else dout * weight
    dx = g - hat * _mean(g * hat)
    if centred:
        dx = dx - _mean(g)
    dx = dx * inverse
    if weight is None:
        return dx
    rows = tuple(range(x.ndim - 1))
    return dx, (dout * hat).sum(axis=rows), dout.sum(axis=rows)


def _length(x):
    return np.sqrt((x * x).sum(axis=-1, keepdims=True))


def _mean(x):
    """Along the last axis, which may be empty."""
    return x.sum(axis=-1, keepdims=True) / max(1, x.shape[-1])
