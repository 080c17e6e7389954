"""Gated units: an activation of one half, times the other.

Split form takes two tensors, the one to activate and the gate; single form takes one tensor, whose last axis
holds both: the first half is activated, or, swapped, the second.  A gradient is one pass: in split form
`<name>_back(dout, a, b)` gives da and db in one buffer, in single form `<name>_back(dout, a)` gives da.
"""

from collections.abc import Callable

import numpy as np

from ..op import Op, ensure, op
from ..tensor import Pack, Spec
from .unary import _gelu, _gelu_erf, _gelu_erf_slope, _gelu_slope, _silenced, _silu, _silu_slope

__all__ = [
    "geglu", "geglu_back", "geglu_erf", "geglu_erf_back", "geglu_quick", "geglu_quick_back", "reglu", "reglu_back",
    "swiglu", "swiglu_back",
]  # fmt: skip


def _gated(a, b, swapped: bool) -> Spec:
    if b is not None:
        ensure(a.shape == b.shape, "the two differ in shape")
        ensure(not swapped, "swapped is for the single form; exchange a and b instead")
        return a.spec
    ensure(a.ndim > 0 and a.shape[-1] % 2 == 0, "the last axis cannot be halved")
    return Spec((*a.shape[:-1], a.shape[-1] // 2))


def _gated_back(dout, a, b, swapped: bool) -> Spec | Pack:
    out = _gated(a, b, swapped)
    ensure(dout.shape == out.shape, f"dout must have the result's shape {out.shape}")
    return a.spec if b is None else Pack(da=a.spec, db=b.spec)


def _pair(a, b, swapped: bool):
    """What is activated, and the gate."""
    if b is not None:
        return a, b
    first, second = np.split(a, 2, axis=-1)
    return (second, first) if swapped else (first, second)


def _declare(unit: Op, back: Op, activation: Callable, pull: Callable) -> None:
    """Rule and references of a unit, from its activation and `pull(x, d)`, d times the activation's slope."""

    @unit.grad
    def _(t, dout):
        a, b = t.src
        gradients = back(dout, a, b, **t.attrs)
        return (gradients, None) if b is None else gradients

    @unit.reference
    @_silenced
    def _(a, b, *, swapped):
        x, gate = _pair(a, b, swapped)
        return activation(x) * gate

    @back.reference
    @_silenced
    def _(dout, a, b, *, swapped):
        x, gate = _pair(a, b, swapped)
        dx, dgate = pull(x, dout * gate), dout * activation(x)
        if b is not None:
            return dx, dgate
        return np.concatenate([dgate, dx] if swapped else [dx, dgate], axis=-1)


@op(layout="any", inplace=("a", "b"))
def swiglu(a, b=None, *, swapped: bool = False):
    """silu(a) * b"""
    return _gated(a, b, swapped)


@op(layout="any")
def swiglu_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `swiglu`."""
    return _gated_back(dout, a, b, swapped)


_declare(swiglu, swiglu_back, _silu, lambda x, d: d * _silu_slope(x))


@op(layout="any", inplace=("a", "b"))
def geglu(a, b=None, *, swapped: bool = False):
    """gelu(a) * b, with the tanh form of gelu"""
    return _gated(a, b, swapped)


@op(layout="any")
def geglu_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `geglu`."""
    return _gated_back(dout, a, b, swapped)


_declare(geglu, geglu_back, _gelu, lambda x, d: d * _gelu_slope(x))


@op(layout="any", inplace=("a", "b"))
def geglu_erf(a, b=None, *, swapped: bool = False):
    """gelu_erf(a) * b"""
    return _gated(a, b, swapped)


@op(layout="any")
def geglu_erf_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `geglu_erf`."""
    return _gated_back(dout, a, b, swapped)


_declare(geglu_erf, geglu_erf_back, _gelu_erf, lambda x, d: d * _gelu_erf_slope(x))


@op(layout="any", inplace=("a", "b"))
def geglu_quick(a, b=None, *, swapped: bool = False):
    """gelu_quick(a) * b"""
    return _gated(a, b, swapped)


@op(layout="any")
def geglu_quick_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `geglu_quick`."""
    return _gated_back(dout, a, b, swapped)


_declare(geglu_quick, geglu_quick_back, lambda x: _silu(x, 1.702), lambda x, d: d * _silu_slope(x, 1.702))


@op(layout="any", inplace=("a", "b"))
def reglu(a, b=None, *, swapped: bool = False):
    """relu(a) * b"""
    return _gated(a, b, swapped)


@op(layout="any")
def reglu_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `reglu`."""
    return _gated_back(dout, a, b, swapped)


_declare(reglu, reglu_back, lambda x: np.maximum(x, 0), lambda x, d: np.where(x <= 0, 0, d))
