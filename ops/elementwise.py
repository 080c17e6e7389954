"""Two operands, element by element, with broadcasting: and one operand times a number.

Broadcasting is NumPy's: sizes are compared from the last axis, and along each they are equal or one of them is 1.
Either operand may be the smaller one, along different axes too.  With `tile=True` it is ggml's: the smaller size
divides the larger, and what has it is repeated.  That must be asked for, since it makes shapes fit that were a mistake.
"""

from typing import Annotated

import numpy as np

from ..core.builtin import provides
from ..core.errors import ShapeError
from ..core.op import Number, ensure, op
from ..core.tensor import Spec, Tensor
from .layout import reshape, unbroadcast

__all__ = ["add", "add1", "div", "mul", "neg", "scale", "sub"]


Rule = Annotated[bool, "of shapes: the kernel sees them, and needs no word of it"]


def _broadcast(a, b, tile: bool) -> Spec:
    """The shape that both operands, tensors or arrays, fill."""
    n = max(a.ndim, b.ndim)
    left, right = (1,) * (n - a.ndim) + a.shape, (1,) * (n - b.ndim) + b.shape
    pairs = [sorted(pair) for pair in zip(left, right, strict=True)]
    fits = all(i == j or 1 in (i, j) for i, j in pairs)
    tiles = all(i == j or 1 in (i, j) or (i and j % i == 0) for i, j in pairs)
    ensure(
        fits or tile and tiles,
        f"{a.shape} and {b.shape} do not fit: along each axis, from the last, sizes are equal or one is 1"
        + ("; tile=True, or gg.repeat, would repeat the smaller one" if tiles else ""),
    )
    return Spec(tuple(large if small else 0 for small, large in pairs))


def _of_one_dtype(a, b, tile: bool) -> Spec:
    """The broadcast shape, in the dtype that both have."""
    ensure(a.dtype is b.dtype, "dtypes differ; gg.cast makes them equal")
    return Spec(_broadcast(a, b, tile).shape, a.dtype)


def _tiled(x, shape):
    """`x` repeated to `shape`, for references."""
    old = (1,) * (len(shape) - x.ndim) + x.shape
    return np.tile(x.reshape(old), [m // n if n else 1 for n, m in zip(old, shape, strict=True)])


def _binary(function):
    """A reference from NumPy's function of two arrays of equal shape."""

    def reference(a, b, *, tile):
        shape = _broadcast(a, b, tile).shape
        return function(_tiled(a, shape), _tiled(b, shape))

    return reference


@provides
@op(layout="any", inplace=("a", "b"))
def add(a: Number, b: Number, *, tile: Rule = False):
    """a + b, of f32 or of i32, which wrap around, broadcast as NumPy does; with `tile` as ggml does, see the module."""
    return _of_one_dtype(a, b, tile)


@add.grad
def _(t, dout):
    a, b = t.src
    return unbroadcast(dout, a.shape), unbroadcast(dout, b.shape)


add.reference(_binary(np.add))


def add1(a: Tensor, b: Tensor) -> Tensor:
    """a + b where b has one element, and any shape.

    Args:
        a, b: f32 or i32, the same; f16 and bf16 are cast.

    Raises:
        ShapeError: `b` has not one element, or dtypes differ.
    """
    if b.size != 1:
        raise ShapeError(f"add1(a={a.spec}, b={b.spec}): b must have one element")
    return add(a, reshape(b, ()))


@provides
@op(layout="any", inplace=("a", "b"))
def sub(a: Number, b: Number, *, tile: Rule = False):
    """a - b, of f32 or of i32, which wrap around, broadcast as NumPy does; with `tile` as ggml does, see the module."""
    return _of_one_dtype(a, b, tile)


@sub.grad
def _(t, dout):
    a, b = t.src
    return unbroadcast(dout, a.shape), unbroadcast(neg(dout), b.shape)


sub.reference(_binary(np.subtract))


@provides
@op(layout="any", inplace=("a", "b"))
def mul(a: Number, b: Number, *, tile: Rule = False):
    """a * b, of f32 or of i32, which wrap around, broadcast as NumPy does; with `tile` as ggml does, see the module."""
    return _of_one_dtype(a, b, tile)


@mul.grad
def _(t, dout):
    a, b = t.src
    da, db = (mul(dout, x, tile=t.attrs["tile"]) for x in (b, a))
    return unbroadcast(da, a.shape), unbroadcast(db, b.shape)


mul.reference(_binary(np.multiply))


@provides
@op(layout="any", inplace=("a", "b"))
def div(a, b, *, tile: Rule = False):
    """a / b, broadcast as NumPy does; with `tile` as ggml does, see the module."""
    return _broadcast(a, b, tile)


@div.grad
def _(t, dout):
    a, b = t.src
    da = div(dout, b, tile=t.attrs["tile"])
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
