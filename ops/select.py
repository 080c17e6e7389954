"""Choosing, comparing, logic, powers: two operands, element by element, broadcast; and ops of i32.

Truth is an i32 of 1 or 0, as comparisons give it; whatever is not 0 counts as true.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.op import Int, Number, ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .elementwise import add, div, mul, scale, sub
from .layout import stop_gradient, unbroadcast
from .unary import abs, atan, exp, log, sqr, sqrt, trunc

__all__ = [
    "atan2",
    "equal",
    "floor_divide",
    "fmod",
    "greater",
    "greater_equal",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "larger_back",
    "lerp",
    "less",
    "less_equal",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "masked_fill",
    "maximum",
    "minimum",
    "not_equal",
    "pow",
    "remainder",
    "where",
    "xlogy",
]  # fmt: skip


def _broadcast(*xs) -> Spec:
    """The shape that all fill, f32, by NumPy's rule."""
    try:
        return Spec(np.broadcast_shapes(*(x.shape for x in xs)))
    except ValueError:
        raise ShapeError(f"shapes {', '.join(str(x.shape) for x in xs)} do not fit") from None


# -- choosing -----------------------------------------------------------------------------------------------


@op(layout="any")
def where(condition: Int, a: Number, b: Number):
    """a where the condition is not 0, else b: of f32 or of i32, broadcast as NumPy does.

    What is not chosen is not looked at: a NaN there does no harm, and its gradient is 0.
    """
    ensure(a.dtype is b.dtype, "dtypes of a and b differ; gg.cast makes them equal")
    return Spec(_broadcast(condition, a, b).shape, a.dtype)


@where.grad
def _(t, dout, *, needs):
    condition, a, b = t.src
    zero = tensor(0.0)
    da = unbroadcast(where(condition, dout, zero), a.shape) if needs[1] else None
    db = unbroadcast(where(condition, zero, dout), b.shape) if needs[2] else None
    return None, da, db


where.reference(lambda condition, a, b: np.where(condition != 0, a, b))


def masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """`x` with `value` where the mask, an i32 that broadcasts, is not 0; no gradient comes from there.

    Raises:
        ShapeError: the mask is larger than `x`, or of another dtype.
    """
    mask = mask if isinstance(mask, Tensor) else tensor(np.asarray(mask, np.int32))
    filled = where(mask, tensor(value, dtype=I32 if x.dtype is I32 else None), x)
    if filled.shape != x.shape:
        raise ShapeError(f"masked_fill(x={x.spec}): a mask {mask.shape} is larger than x")
    return filled


@op(layout="any", inplace=("a", "b"))
def maximum(a, b):
    """The larger of a and b, broadcast.  Of equal ones each has half of the gradient."""
    return _broadcast(a, b)


@op(layout="any", inplace=("a", "b"))
def minimum(a, b):
    """The smaller of a and b, broadcast.  Of equal ones each has half of the gradient."""
    return _broadcast(a, b)


@op(layout="any", inplace=("dout",))
def larger_back(dout, a, b):
    """dout where a is larger than b, half of it where they are equal, else 0; NaN where either is."""
    ensure(dout.shape == _broadcast(a, b).shape, "dout must have the shape that a and b fill")
    return dout.spec


@maximum.grad
def _(t, dout, *, needs):
    a, b = t.src
    da = unbroadcast(larger_back(dout, a, b), a.shape) if needs[0] else None
    return da, unbroadcast(larger_back(dout, b, a), b.shape) if needs[1] else None


@minimum.grad
def _(t, dout, *, needs):
    a, b = t.src
    da = unbroadcast(larger_back(dout, b, a), a.shape) if needs[0] else None
    return da, unbroadcast(larger_back(dout, a, b), b.shape) if needs[1] else None


maximum.reference(np.maximum)
minimum.reference(np.minimum)


@larger_back.reference
def _(dout, a, b):
    return np.where(a > b, dout, np.where(a == b, dout / 2, np.where(a < b, 0.0, np.nan)))


larger_back.grad(lambda t, d: (larger_back(d, t.src[1], t.src[2]), None, None))


# -- comparisons and logic ------------------------------------------------------------------------------------


def _compare(a, b) -> Spec:
    ensure(a.dtype is b.dtype, "dtypes differ; gg.cast makes them equal")
    return Spec(_broadcast(a, b).shape, I32)


@op(layout="any")
def equal(a: Number, b: Number):
    """1 where a == b, else 0, i32: of f32 or of i32, broadcast.  NaN equals nothing."""
    return _compare(a, b)


@op(layout="any")
def not_equal(a: Number, b: Number):
    """1 where a != b, else 0, i32: of f32 or of i32, broadcast.  NaN differs from everything."""
    return _compare(a, b)


@op(layout="any")
def less(a: Number, b: Number):
    """1 where a < b, else 0, i32: of f32 or of i32, broadcast.  At NaN it is 0."""
    return _compare(a, b)


@op(layout="any")
def less_equal(a: Number, b: Number):
    """1 where a <= b, else 0, i32: of f32 or of i32, broadcast.  At NaN it is 0."""
    return _compare(a, b)


equal.reference(np.equal)
not_equal.reference(np.not_equal)
less.reference(np.less)
less_equal.reference(np.less_equal)


def greater(a: Tensor, b: Tensor) -> Tensor:
    """1 where a > b, else 0, i32; see `less`.

    Raises:
        ShapeError: they do not broadcast, or their dtypes differ.
    """
    return less(b, a)


def greater_equal(a: Tensor, b: Tensor) -> Tensor:
    """1 where a >= b, else 0, i32; see `less_equal`.

    Raises:
        ShapeError: they do not broadcast, or their dtypes differ.
    """
    return less_equal(b, a)


@op(layout="any", inplace=("a", "b"))
def logical_and(a: Int, b: Int):
    """1 where neither a nor b is 0, else 0, broadcast."""
    return _compare(a, b)


@op(layout="any", inplace=("a", "b"))
def logical_or(a: Int, b: Int):
    """1 where a or b is not 0, else 0, broadcast."""
    return _compare(a, b)


@op(layout="any", inplace=("a", "b"))
def logical_xor(a: Int, b: Int):
    """1 where one of a and b is 0, and only one, else 0, broadcast."""
    return _compare(a, b)


logical_and.reference(np.logical_and)
logical_or.reference(np.logical_or)
logical_xor.reference(np.logical_xor)


def logical_not(a: Tensor) -> Tensor:
    """1 where the i32 `a` is 0, else 0.

    Args:
        a: i32 of any shape.

    Raises:
        ShapeError: `a` is not i32.
    """
    return equal(a, tensor(0))


def isnan(x: Tensor) -> Tensor:
    """1 where x is NaN, else 0, i32.

    Args:
        x: f32 or i32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is quantized.
    """
    return not_equal(x, x)


def isinf(x: Tensor) -> Tensor:
    """1 where x is an infinity of either sign, else 0, i32.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return equal(abs(x), tensor(math.inf))


def isfinite(x: Tensor) -> Tensor:
    """1 where x is neither infinite nor NaN, else 0, i32.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return less(abs(x), tensor(math.inf))


# -- powers, and other functions of two ----------------------------------------------------------------------


@op(layout="any", inplace=("a", "b"))
def pow(a, b):
    return _broadcast(a, b)


@pow.grad
def _(t, dout, *, needs):
    a, b = t.src
    zero = tensor(0.0)
    da = db = None
    if needs[0]:  # 0 ^ -1 times 0 would be NaN
        slope = mul(b, pow.node(a, sub(b, tensor(1.0))))
        da = unbroadcast(mul(dout, where(equal(b, zero), zero, slope)), a.shape)
    if needs[1]:  # the limit at 0 of what goes there faster than the logarithm
        flat = logical_and(equal(a, zero), less_equal(zero, b))
        db = unbroadcast(mul(dout, where(flat, zero, mul(t, log(where(flat, tensor(1.0), a))))), b.shape)
    return da, db


@pow.reference
def _(a, b):
    with np.errstate(all="ignore"):
        return np.power(a, b)


@pow.call
def _(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a ** b, f32, broadcast, with the special cases of C's pow: of negative numbers only whole powers, NaN of others;
    anything to the power 0 is 1, and 1 to any power, NaN included.

    Powers that are small whole numbers or halves are products and roots.  The gradient by `b` is NaN where `a` is
    negative.

    Raises:
        ShapeError: shapes that do not broadcast.
    """
    if not isinstance(b, Tensor) and np.ndim(b) == 0 and isinstance(a, Tensor):
        made = _POWERS.get(b)
        if made is not None:
            return made(a)
    return pow.node(a if isinstance(a, Tensor) else tensor(float(a)), b if isinstance(b, Tensor) else tensor(b))


_POWERS = {
    1.0: lambda x: x,
    2.0: sqr,
    3.0: lambda x: mul(sqr(x), x),
    4.0: lambda x: sqr(sqr(x)),
    0.5: sqrt,
    -1.0: lambda x: div(tensor(1.0), x),
    -0.5: lambda x: div(tensor(1.0), sqrt(x)),
    -2.0: lambda x: div(tensor(1.0), sqr(x)),
}


@op(layout="any")
def floor_divide(a: Int, b: Int):
    """a / b of i32, rounded down, broadcast.  By 0 it is 0."""
    return Spec(_broadcast(a, b).shape, I32)


@op(layout="any")
def remainder(a: Int, b: Int):
    """What `floor_divide` leaves of i32: a - b * floor(a / b), with the sign of b.  By 0 it is a."""
    return Spec(_broadcast(a, b).shape, I32)


@floor_divide.reference
def _(a, b):
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


@remainder.reference
def _(a, b):
    return np.where(b == 0, a, a % np.where(b == 0, 1, b))


def fmod(a: Tensor, b: Tensor) -> Tensor:
    """a - b * trunc(a / b) of f32: what is left, with the sign of a.  Its gradient by b is -trunc(a / b).

    Args:
        a, b: f32 that broadcast as NumPy's do; f16 and bf16 are cast.

    Raises:
        ShapeError: they do not broadcast, or are i32 or quantized.
    """
    return sub(a, mul(b, stop_gradient(trunc(div(a, b)))))


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), broadcast, without an exponential that could overflow.

    Args:
        a, b: f32 that broadcast as NumPy's do; f16 and bf16 are cast.

    Raises:
        ShapeError: they do not broadcast, or are i32 or quantized.
    """
    top = stop_gradient(maximum(a, b))
    shift = where(isfinite(top), top, tensor(0.0))  # inf - inf would be NaN
    return add(log(add(exp(sub(a, shift)), exp(sub(b, shift)))), shift)


def hypot(a: Tensor, b: Tensor) -> Tensor:
    """The root of a^2 + b^2, broadcast; squares beyond the range of f32 do no harm.  Its gradient at 0, 0 is NaN.

    Args:
        a, b: f32 that broadcast as NumPy's do; f16 and bf16 are cast.

    Raises:
        ShapeError: they do not broadcast, or are i32 or quantized.
    """
    size = maximum(abs(a), abs(b))
    top = stop_gradient(where(equal(size, tensor(0.0)), tensor(1.0), size))
    return mul(sqrt(add(sqr(div(a, top)), sqr(div(b, top)))), top)


def lerp(a: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
    """a + weight * (b - a), broadcast.

    Args:
        a, b, weight: f32 that broadcast as NumPy's do; f16 and bf16 are cast.

    Raises:
        ShapeError: they do not broadcast, or are i32 or quantized.
    """
    way = sub(b, a)
    return add(a, mul(way, weight) if isinstance(weight, Tensor) else scale(way, factor=weight))


def xlogy(a: Tensor, b: Tensor) -> Tensor:
    """a * log(b), broadcast, and 0 where a is 0, whatever b is.

    Args:
        a, b: f32 that broadcast as NumPy's do; f16 and bf16 are cast.

    Raises:
        ShapeError: they do not broadcast, or are i32 or quantized.
    """
    none = equal(a, tensor(0.0))
    return mul(a, log(where(none, tensor(1.0), b)))


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of the point (x, y), from -pi to pi, broadcast; 0 at (0, 0).

    Args:
        y, x: f32 that broadcast as NumPy's do; f16 and bf16 are cast.

    Raises:
        ShapeError: they do not broadcast, or are i32 or quantized.
    """
    zero, none = tensor(0.0), logical_and(equal(x, tensor(0.0)), equal(y, tensor(0.0)))
    turned = where(less(x, zero), tensor(math.pi), zero)
    steep = less(abs(x), abs(y))  # then the quotient the other way, so that neither end overflows
    one = tensor(1.0)
    flat = add(atan(div(y, where(logical_or(steep, none), one, x))), mul(turned, _sign(y)))
    upright = sub(scale(_sign(y), factor=math.pi / 2), atan(div(x, where(steep, y, one))))
    return where(steep, upright, where(none, mul(y, zero), flat))


def _sign(y: Tensor) -> Tensor:
    """1 where y is 0 or above, else -1."""
    return where(less(y, tensor(0.0)), tensor(-1.0), tensor(1.0))
