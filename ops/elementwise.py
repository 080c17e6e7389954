"""Two operands, element by element, with broadcasting: and one operand times a number.

Broadcasting tiles, as in ggml: sizes are compared from the last axis, and along each the smaller
operand's divides the larger's.  Either operand may be the smaller one, along different axes too.
"""

import numpy as np

from ..core.builtin import provides
from ..core.errors import ShapeError
from ..core.op import ensure, op
from ..core.tensor import Spec, Tensor
from .layout import reshape, unbroadcast

__all__ = ["add", "add1", "div", "mul", "neg", "scale", "sub"]


def _broadcast(a, b) -> Spec:
    """The shape that both operands, tensors or arrays, fill."""
    n = max(a.ndim, b.ndim)
    left, right = (1,) * (n - a.ndim) + a.shape, (1,) * (n - b.ndim) + b.shape
    pairs = [sorted(pair) for pair in zip(left, right, strict=True)]
    fits = all(i == j or 1 in (i, j) or (i and j % i == 0) for i, j in pairs)
    ensure(fits, f"{a.shape} and {b.shape} do not fit")
    return Spec(tuple(large if small else 0 for small, large in pairs))


def _tiled(x, shape):
    """`x` repeated to `shape`, for references."""
    old = (1,) * (len(shape) - x.ndim) + x.shape
    return np.tile(x.reshape(old), [m // n if n else 1 for n, m in zip(old, shape, strict=True)])


def _binary(function):
    """A reference from NumPy's function of two arrays of equal shape."""

    def reference(a, b):
        shape = _broadcast(a, b).shape
        return function(_tiled(a, shape), _tiled(b, shape))

    return reference


@provides
@op(layout="any", inplace=("a", "b"))
def add(a, b):
    """a + b, broadcast."""
    return _broadcast(a, b)


@add.grad
def _(t, dout):
    a, b = t.src
    return unbroadcast(dout, a.shape), unbroadcast(dout, b.shape)


add.reference(_binary(np.add))


def add1(a: Tensor, b: Tensor) -> Tensor:
    """a + b where b has one element, and any shape."""
    if b.size != 1:
        raise ShapeError(f"add1(a={a.spec}, b={b.spec}): b must have one element")
    return add(a, reshape(b, ()))


@provides
@op(layout="any", inplace=("a", "b"))
def sub(a, b):
    """a - b, broadcast."""
    return _broadcast(a, b)


@sub.grad
def _(t, dout):
    a, b = t.src
    return unbroadcast(dout, a.shape), unbroadcast(neg(dout), b.shape)


sub.reference(_binary(np.subtract))


@provides
@op(layout="any", inplace=("a", "b"))
def mul(a, b):
    """a * b, broadcast."""
    return _broadcast(a, b)


@mul.grad
def _(t, dout):
    a, b = t.src
    return unbroadcast(mul(dout, b), a.shape), unbroadcast(mul(dout, a), b.shape)


mul.reference(_binary(np.multiply))


@provides
@op(layout="any", inplace=("a", "b"))
def div(a, b):
    """a / b, broadcast."""
    return _broadcast(a, b)


@div.grad
def _(t, dout):
    a, b = t.src
    da = div(dout, b)
    return unbroadcast(da, a.shape), unbroadcast(neg(mul(da, t)), b.shape)


div.reference(_binary(np.divide))


@provides
@op(layout="any", inplace=("x",))
def scale(x, *, factor: float, bias: float = 0.0):
    """factor * x + bias, with two numbers."""
    return x.spec


@scale.grad
def _(t, dout):
    return (scale(dout, factor=t.attrs["factor"]),)


scale.reference(lambda x, *, factor, bias: factor * x + bias)


@provides
@op(layout="any", inplace=("x",))
def neg(x):
    """-x"""
    return x.spec


@neg.grad
def _(t, dout):
    return (neg(dout),)


neg.reference(np.negative)
