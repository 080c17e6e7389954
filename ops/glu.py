"""Gated units: an activation of one half, times the other.

Split form takes two tensors, the one to activate and the gate; single form takes one tensor, whose last axis
holds both: the first half is activated, or, swapped, the second.  A gradient is one pass: in split form
`<name>_back(dout, a, b)` gives da and db in one buffer, in single form `<name>_back(dout, a)` gives da.
"""

from collections.abc import Callable

import numpy as np

from ..core.op import Op, ensure, op
from ..core.tensor import Pack, Spec, Tensor
from ..diff.autodiff import through_gradients_of
from .elementwise import mul, scale
from .unary import (
    clamp,
    gelu,
    gelu_erf,
    gelu_quick,
    np_gelu,
    np_gelu_erf,
    np_gelu_erf_slope,
    np_gelu_slope,
    np_silenced,
    np_silu,
    np_silu_slope,
    relu,
    sigmoid,
    silu,
)

__all__ = [
    "geglu", "geglu_back", "geglu_erf", "geglu_erf_back", "geglu_quick", "geglu_quick_back", "reglu", "reglu_back",
    "swiglu", "swiglu_back", "swiglu_oai", "swiglu_oai_back",
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


def _gating(activation: Op) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, gate: mul(activation(x), gate)


def _product(activation: Callable, pull: Callable) -> tuple[Callable, Callable]:
    """Value and gradients of activation(x) * gate; `pull(x, d)` is d times the activation's slope."""
    return (
        lambda x, gate: activation(x) * gate,
        lambda dout, x, gate: (pull(x, dout * gate), dout * activation(x)),
    )


def _declare(unit: Op, back: Op, made_of: Callable, value: Callable, gradients: Callable) -> None:
    """Rules and references of a unit, from value(x, gate) and gradients(dout, x, gate) -> (dx, dgate).

    `made_of(x, gate)` is the unit made of other ops: through them go the gradients of `back`.
    """

    @unit.grad
    def _(t, dout):
        a, b = t.src
        made = back(dout, a, b, **t.attrs)
        return (made, None) if b is None else made

    @back.grad
    @through_gradients_of
    def _(a, b, *, swapped, **attrs):
        if b is not None:
            return made_of(a, b, **attrs)
        half = a.shape[-1] // 2
        first, second = a[..., :half], a[..., half:]
        return made_of(second, first, **attrs) if swapped else made_of(first, second, **attrs)

    @unit.reference
    @np_silenced
    def _(a, b, *, swapped, **attrs):
        return value(*_pair(a, b, swapped), **attrs)

    @back.reference
    @np_silenced
    def _(dout, a, b, *, swapped, **attrs):
        dx, dgate = gradients(dout, *_pair(a, b, swapped), **attrs)
        if b is not None:
            return dx, dgate
        return np.concatenate([dgate, dx] if swapped else [dx, dgate], axis=-1)


@op(layout="any", inplace=("a", "b"))
def swiglu(a, b=None, *, swapped: bool = False):
    """silu(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return _gated(a, b, swapped)


@op(layout="any")
def swiglu_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `swiglu`."""
    return _gated_back(dout, a, b, swapped)


_declare(swiglu, swiglu_back, _gating(silu), *_product(np_silu, lambda x, d: d * np_silu_slope(x)))


@op(layout="any", inplace=("a", "b"))
def geglu(a, b=None, *, swapped: bool = False):
    """gelu(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    `gelu` is that of the hyperbolic tangent.

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return _gated(a, b, swapped)


@op(layout="any")
def geglu_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `geglu`."""
    return _gated_back(dout, a, b, swapped)


_declare(geglu, geglu_back, _gating(gelu), *_product(np_gelu, lambda x, d: d * np_gelu_slope(x)))


@op(layout="any", inplace=("a", "b"))
def geglu_erf(a, b=None, *, swapped: bool = False):
    """gelu_erf(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return _gated(a, b, swapped)


@op(layout="any")
def geglu_erf_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `geglu_erf`."""
    return _gated_back(dout, a, b, swapped)


_declare(geglu_erf, geglu_erf_back, _gating(gelu_erf), *_product(np_gelu_erf, lambda x, d: d * np_gelu_erf_slope(x)))


@op(layout="any", inplace=("a", "b"))
def geglu_quick(a, b=None, *, swapped: bool = False):
    """gelu_quick(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return _gated(a, b, swapped)


@op(layout="any")
def geglu_quick_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `geglu_quick`."""
    return _gated_back(dout, a, b, swapped)


_declare(
    geglu_quick,
    geglu_quick_back,
    _gating(gelu_quick),
    *_product(lambda x: np_silu(x, 1.702), lambda x, d: d * np_silu_slope(x, 1.702)),
)


@op(layout="any", inplace=("a", "b"))
def reglu(a, b=None, *, swapped: bool = False):
    """relu(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return _gated(a, b, swapped)


@op(layout="any")
def reglu_back(dout, a, b=None, *, swapped: bool = False):
    """The gradients of `reglu`."""
    return _gated_back(dout, a, b, swapped)


_declare(
    reglu,
    reglu_back,
    _gating(relu),
    *_product(lambda x: np.maximum(x, 0), lambda x, d: np.select([x > 0, x <= 0], [d, 0], x)),
)


@op(layout="any", inplace=("a", "b"))
def swiglu_oai(a, b=None, *, alpha: float = 1.702, limit: float = 7.0, swapped: bool = False):
    """x * sigmoid(alpha * x) * (1 + gate), with x = min(a, limit) and the gate b held within -limit ... limit.

    Gradients pass where a <= limit, and where b lies within the limits.

    Source: OpenAI 2025, the model card of gpt-oss, arXiv:2508.10925.
    """
    return _gated_oai(a, b, limit, swapped)


@op(layout="any")
def swiglu_oai_back(dout, a, b=None, *, alpha: float = 1.702, limit: float = 7.0, swapped: bool = False):
    """The gradients of `swiglu_oai`."""
    _gated_oai(a, b, limit, swapped)
    return _gated_back(dout, a, b, swapped)


def _gated_oai(a, b, limit: float, swapped: bool) -> Spec:
    ensure(limit >= 0, f"limit={limit} must not be negative")
    return _gated(a, b, swapped)


def _oai(x, gate, *, alpha, limit):
    return np_silu(np.minimum(x, limit), alpha) * (1 + np.clip(gate, -limit, limit))


def _oai_back(dout, x, gate, *, alpha, limit):
    dx = np.where(x > limit, 0, dout * (1 + np.clip(gate, -limit, limit)) * np_silu_slope(x, alpha))
    beyond = np.abs(gate) > limit
    return dx, np.select([gate != gate, beyond], [gate, 0], dout * np_silu(np.minimum(x, limit), alpha))


def _oai_of_ops(x: Tensor, gate: Tensor, *, alpha: float, limit: float) -> Tensor:
    x, gate = clamp(x, min=-np.inf, max=limit), clamp(gate, min=-limit, max=limit)
    return mul(mul(x, sigmoid(scale(x, factor=alpha))), scale(gate, factor=1, bias=1))


_declare(swiglu_oai, swiglu_oai_back, _oai_of_ops, _oai, _oai_back)
