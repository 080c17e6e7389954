"""Normalisation along the last axis: to mean 0 and variance 1, or to mean square 1."""

import numpy as np

from ..op import ensure, op
from ..tensor import Pack, Spec
from .layout import cont, unbroadcast

__all__ = ["norm", "norm_back", "rms_norm", "rms_norm_back"]


@op(inplace=("x",))
def norm(x, weight=None, bias=None, *, eps: float = 1e-5):
    """(x - mean) / sqrt(variance + eps) along the last axis, times `weight`, plus `bias`: LayerNorm.

    Args:
        x: [..., n].
        weight, bias: [n]; either may be left out.
        eps: added to the variance, the mean of (x - mean)^2.
    """
    return _normalised(x, eps, weight=weight, bias=bias)


@norm.grad
def _(t, dout):
    x, weight, bias = t.src
    if weight is None:
        dbias = None if bias is None else unbroadcast(dout, bias.shape)
        return norm_back(dout, x, eps=t.attrs["eps"]), None, dbias
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

    Args:
        x: [..., n].
        weight: [n], may be left out.
        eps: added to the mean of the squares.
    """
    return _normalised(x, eps, weight=weight)


@rms_norm.grad
def _(t, dout):
    x, weight = t.src
    if weight is None:
        return rms_norm_back(dout, x, eps=t.attrs["eps"]), None
    dx, dweight = rms_norm_back(dout, x, weight, eps=t.attrs["eps"])
    return dx, _kept_alone(dweight)


@rms_norm.reference
def _(x, weight, *, eps):
    out = _hat(x, eps, centred=False)[0]
    return out if weight is None else out * weight


@op
def norm_back(dout, x, weight=None, *, eps: float = 1e-5):
    """Gradients of `norm`: (dx, dweight, dbias) packed, or where there is no weight dx alone."""
    dx = _normalised(x, eps, weight=weight)
    ensure(dout.shape == x.shape, "dout and x have different shapes")
    return dx if weight is None else Pack(dx=dx, dweight=weight.spec, dbias=weight.spec)


@norm_back.reference
def _(dout, x, weight, *, eps):
    return _back(dout, x, weight, eps, centred=True)


@op
def rms_norm_back(dout, x, weight=None, *, eps: float = 1e-5):
    """Gradients of `rms_norm`: (dx, dweight) packed, or where there is no weight dx alone."""
    dx = _normalised(x, eps, weight=weight)
    ensure(dout.shape == x.shape, "dout and x have different shapes")
    return dx if weight is None else Pack(dx=dx, dweight=weight.spec)


@rms_norm_back.reference
def _(dout, x, weight, *, eps):
    made = _back(dout, x, weight, eps, centred=False)
    return made if weight is None else made[:2]


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


def _mean(x):
    """Along the last axis, which may be empty."""
    return x.sum(axis=-1, keepdims=True) / max(1, x.shape[-1])
