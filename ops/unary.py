"""Functions of one element.

A gradient is one pass, too: `<name>_back(dout, x)`, or of the result y instead of x where the slope follows
from it with all its digits, so that x need not be kept.  (Of a tanh that was rounded to 1 it would be 0, and of an elu
rounded to -1.)  They are differentiated by way of other functions: second derivatives are rare.

At NaN values and gradients are NaN, those of functions with kinks too.
"""

import math
from collections.abc import Callable

import numpy as np

from ..core.builtin import provides
from ..core.op import Op, ensure, op
from ..core.tensor import Tensor, tensor
from .elementwise import add, div, mul, neg, scale, sub

__all__ = [
    "abs",
    "abs_back",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "celu",
    "clamp",
    "clamp_back",
    "cos",
    "cos_back",
    "cosh",
    "elu",
    "elu_back",
    "erf",

    "exp",
    "exp2",
    "expm1",
    "expm1_back",
    "floor",
    "gelu",
    "gelu_back",
    "gelu_erf",
    "gelu_erf_back",
    "gelu_quick",
    "gelu_quick_back",
    "hardsigmoid",
    "hardsigmoid_back",
    "hardswish",
    "hardswish_back",
    "hardtanh",
    "leaky_relu",
    "leaky_relu_back",
    "log",
    "log1p",
    "log2",
    "log10",
    "logsigmoid",
    "mish",
    "reciprocal",
    "relu",
    "relu6",
    "relu_back",
    "round",
    "rsqrt",
    "selu",
    "sgn",
    "sigmoid",
    "sigmoid_back",
    "silu",
    "silu_back",
    "sin",
    "sin_back",
    "sinh",
    "softplus",
    "softplus_back",
    "softsign",
    "sqr",
    "sqr_back",
    "sqrt",
    "sqrt_back",
    "step",
    "tan",
    "tanh",
    "tanh_back",
    "tanhshrink",
    "trunc",
    "xielu",
    "xielu_back",
]  # fmt: skip


def np_silenced(function: Callable) -> Callable:
    """The function, without NumPy's warnings about infinities and NaN: here they are values like others."""

    def silent(*args, **kwargs):
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return silent


def _of_x(back: Op) -> Callable:
    """The gradient rule of a function whose slope is computed from its input, with the same attributes."""
    return lambda t, dout: (back(dout, t.src[0], **t.attrs),)


def _of_result(back: Op) -> Callable:
    """The gradient rule of a function whose slope is computed from its result."""
    return lambda t, dout: (back(dout, t, **t.attrs),)


def _bent(back: Op, bend: Callable) -> None:
    """Give `back` its gradients: by dout what it does to dout itself, by x the bend, the slope's own slope.

    `bend(p, x, **attrs)` is p times that.
    """

    @back.grad
    def _(t, d, *, needs):
        dout, x = t.src
        return back(d, x, **t.attrs) if needs[0] else None, bend(mul(d, dout), x, **t.attrs) if needs[1] else None


def _straight(back: Op) -> None:
    """The same of a function that is straight but for its kinks."""
    back.grad(lambda t, d: (back(d, t.src[1], **t.attrs), None))


def _flat(t, dout):
    """The gradient rule of a function that is constant between its jumps: nothing goes back."""
    return (None,)


def _same(dout, x):
    ensure(dout.shape == x.shape, "the two differ in shape")
    return x.spec


# -- arithmetic ---------------------------------------------------------------------------------------------


@provides
@op(layout="any", inplace=("x",))
def sqr(x):
    """x * x, elementwise"""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def sqr_back(dout, x):
    """2 * x * dout, elementwise"""
    return _same(dout, x)


sqr.grad(_of_x(sqr_back))
sqr.reference(np_silenced(np.square))
sqr_back.reference(np_silenced(lambda dout, x: 2 * x * dout))
_bent(sqr_back, lambda p, x: scale(p, factor=2))


@provides
@op(layout="any", inplace=("x",))
def sqrt(x):
    """The square root; NaN below 0.  Its gradient is infinite at 0.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("dout", "y"))
def sqrt_back(dout, y):
    """dout / (2 * y), of the result y, elementwise"""
    return _same(dout, y)


sqrt.grad(_of_result(sqrt_back))
sqrt.reference(np_silenced(np.sqrt))
sqrt_back.reference(np_silenced(lambda dout, y: 0.5 * dout / y))
_bent(sqrt_back, lambda p, y: scale(div(p, sqr(y)), factor=-0.5))


@op(layout="any", inplace=("x",))
def log(x):
    """The natural logarithm: -inf at 0, NaN below.  Elementwise."""
    return x.spec


log.grad(lambda t, dout: (div(dout, t.src[0]),))
log.reference(np_silenced(np.log))


@op(layout="any", inplace=("x",))
def exp(x):
    """e to the power of x, elementwise"""
    return x.spec


exp.grad(lambda t, dout: (mul(dout, t),))
exp.reference(np_silenced(np.exp))


@op(layout="any", inplace=("x",))
def expm1(x):
    """exp(x) - 1, exact near 0 too, elementwise"""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def expm1_back(dout, x):
    """dout * exp(x), elementwise"""
    return _same(dout, x)


expm1.grad(_of_x(expm1_back))
expm1.reference(np_silenced(np.expm1))
expm1_back.reference(np_silenced(lambda dout, x: dout * np.exp(x)))
_bent(expm1_back, lambda p, x: mul(p, exp(x)))


@op(layout="any", inplace=("x",))
def sin(x):
    """The sine, for x of any size.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def sin_back(dout, x):
    """dout * cos(x), elementwise"""
    return _same(dout, x)


sin.grad(_of_x(sin_back))
sin.reference(np_silenced(np.sin))
sin_back.reference(np_silenced(lambda dout, x: dout * np.cos(x)))
_bent(sin_back, lambda p, x: neg(mul(p, sin(x))))


@op(layout="any", inplace=("x",))
def cos(x):
    """The cosine, for x of any size.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def cos_back(dout, x):
    """-dout * sin(x), elementwise"""
    return _same(dout, x)


cos.grad(_of_x(cos_back))
cos.reference(np_silenced(np.cos))
cos_back.reference(np_silenced(lambda dout, x: -dout * np.sin(x)))
_bent(cos_back, lambda p, x: neg(mul(p, cos(x))))


@provides
@op(layout="any", inplace=("x",))
def abs(x):
    """|x|; its gradient at 0 is 0.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def abs_back(dout, x):
    """dout where x > 0, -dout where x < 0, 0 where x is 0, elementwise"""
    return _same(dout, x)


abs.grad(_of_x(abs_back))
abs.reference(np.abs)
abs_back.reference(np_silenced(lambda dout, x: np.select([x > 0, x < 0], [dout, -dout], x)))
_straight(abs_back)


@op(layout="any", inplace=("x",))
def clamp(x, *, min: float, max: float):
    """x, but not below `min` nor above `max`.  The gradient passes where min <= x <= max.  Elementwise."""
    ensure(min <= max, f"min {min} is above max {max}")
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def clamp_back(dout, x, *, min: float, max: float):
    """dout, but 0 where x is outside of min ... max, and NaN where it is NaN, elementwise"""
    return _same(dout, x)


clamp.grad(_of_x(clamp_back))
clamp.reference(lambda x, *, min, max: np.minimum(np.maximum(x, min), max))
clamp_back.reference(lambda dout, x, *, min, max: np.select([x != x, (x < min) | (x > max)], [x, 0], dout))
_straight(clamp_back)


# -- steps: constant but for jumps, so their gradient is 0 ---------------------------------------------------


@op(layout="any", inplace=("x",))
def sgn(x):
    """The sign of x: 1, -1, or 0 at 0.  No gradient goes through it.  Elementwise."""
    return x.spec


sgn.grad(_flat)
sgn.reference(np.sign)


@op(layout="any", inplace=("x",))
def step(x):
    """1 where x is above 0, else 0.  No gradient goes through it.  Elementwise."""
    return x.spec


step.grad(_flat)
step.reference(lambda x: np.heaviside(x, 0))


@op(layout="any", inplace=("x",))
def floor(x):
    """The largest whole number that is not above x.  No gradient goes through it.  Elementwise."""
    return x.spec


floor.grad(_flat)
floor.reference(np.floor)


@op(layout="any", inplace=("x",))
def ceil(x):
    """The smallest whole number that is not below x.  No gradient goes through it.  Elementwise."""
    return x.spec


ceil.grad(_flat)
ceil.reference(np.ceil)


@op(layout="any", inplace=("x",))
def round(x):
    """The nearest whole number, halves away from 0.  No gradient goes through it.  Elementwise."""
    return x.spec


round.grad(_flat)


@round.reference
@np_silenced
def _(x):
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0)


@op(layout="any", inplace=("x",))
def trunc(x):
    """x without what follows its point: towards 0.  No gradient goes through it.  Elementwise."""
    return x.spec


trunc.grad(_flat)
trunc.reference(np.trunc)


# -- activations --------------------------------------------------------------------------------------------


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


@op(layout="any", inplace=("x",))
def sigmoid(x):
    """1 / (1 + exp(-x)), elementwise"""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def sigmoid_back(dout, x):
    """dout * s * (1 - s) with s = sigmoid(x), elementwise"""
    return _same(dout, x)


sigmoid.grad(_of_x(sigmoid_back))
sigmoid.reference(np_silenced(_sigmoid))
sigmoid_back.reference(np_silenced(lambda dout, x: dout * (_sigmoid(x) * _sigmoid(-x))))
_bent(sigmoid_back, lambda p, x: neg(mul(sigmoid_back(p, x), tanh(scale(x, factor=0.5)))))


@op(layout="any", inplace=("x",))
def tanh(x):
    """The hyperbolic tangent.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def tanh_back(dout, x):
    """dout * (1 - tanh(x)^2) = dout * 4 e / (1 + e)^2 with e = exp(-2 |x|), elementwise"""
    return _same(dout, x)


tanh.grad(_of_x(tanh_back))
tanh.reference(np.tanh)
tanh_back.reference(np_silenced(lambda dout, x: dout * (4 * _sigmoid(2 * x) * _sigmoid(-2 * x))))
_bent(tanh_back, lambda p, x: scale(mul(tanh_back(p, x), tanh(x)), factor=-2))


@op(layout="any", inplace=("x",))
def relu(x):
    """x where it is above 0, else 0; its gradient at 0 is 0.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("dout", "y"))
def relu_back(dout, y):
    """dout where the result y is above 0, else 0; NaN where it is NaN, elementwise"""
    return _same(dout, y)


relu.grad(_of_result(relu_back))
relu.reference(lambda x: np.maximum(x, 0))
relu_back.reference(lambda dout, y: np.select([y > 0, y <= 0], [dout, 0], y))
_straight(relu_back)


@op(layout="any", inplace=("x",))
def leaky_relu(x, *, negative_slope: float = 0.01):
    """x where it is above 0, else negative_slope * x.  Elementwise.

    Source: Maas, Hannun and Ng 2013.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def leaky_relu_back(dout, x, *, negative_slope: float = 0.01):
    """dout where x is above 0, else negative_slope * dout; NaN where it is NaN, elementwise"""
    return _same(dout, x)


leaky_relu.grad(_of_x(leaky_relu_back))
leaky_relu.reference(np_silenced(lambda x, *, negative_slope: np.where(x > 0, x, negative_slope * x)))
leaky_relu_back.reference(
    np_silenced(lambda dout, x, *, negative_slope: np.select([x > 0, x <= 0], [dout, negative_slope * dout], x))
)
_straight(leaky_relu_back)


@op(layout="any", inplace=("x",))
def elu(x):
    """x where it is above 0, else exp(x) - 1.  Elementwise.

    Source: Clevert, Unterthiner and Hochreiter 2015, arXiv:1511.07289.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def elu_back(dout, x):
    """dout where x is above 0, else dout * exp(x), elementwise"""
    return _same(dout, x)


elu.grad(_of_x(elu_back))
elu.reference(np_silenced(lambda x: np.where(x > 0, x, np.expm1(x))))
elu_back.reference(np_silenced(lambda dout, x: np.where(x > 0, dout, dout * np.exp(x))))
_bent(elu_back, lambda p, x: mul(mul(p, step(neg(x))), exp(clamp(x, min=-math.inf, max=0))))


def _softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@op(layout="any", inplace=("x",))
def softplus(x):
    """log(1 + exp(x)), elementwise"""
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def softplus_back(dout, x):
    """dout * sigmoid(x), elementwise"""
    return _same(dout, x)


softplus.grad(_of_x(softplus_back))
softplus.reference(np_silenced(_softplus))
softplus_back.reference(np_silenced(lambda dout, x: dout * _sigmoid(x)))
_bent(softplus_back, sigmoid_back)


@op(layout="any", inplace=("x",))
def silu(x):
    """x * sigmoid(x), also called swish, elementwise

    Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def silu_back(dout, x):
    """dout * (s + x * s * (1 - s)) with s = sigmoid(x), elementwise"""
    return _same(dout, x)


def np_silu(x, sharpness=1.0):
    return x * _sigmoid(sharpness * x)


def np_silu_slope(x, sharpness=1.0):
    s = _sigmoid(sharpness * x)
    return s + sharpness * x * s * _sigmoid(-sharpness * x)


silu.grad(_of_x(silu_back))
silu.reference(np_silenced(np_silu))
silu_back.reference(np_silenced(lambda dout, x: dout * np_silu_slope(x)))
_bent(silu_back, lambda p, x: _silu_bend(p, x, 1.0))


def _silu_bend(p, x, sharpness: float):
    """p c s (1 - s) (2 + c x (1 - 2 s)), with the sharpness c and s = sigmoid(c x)."""
    scaled = scale(x, factor=sharpness)
    turn = scale(mul(scaled, tanh(scale(scaled, factor=0.5))), factor=-1, bias=2)  # 1 - 2 s is -tanh(c x / 2)
    return scale(mul(sigmoid_back(p, scaled), turn), factor=sharpness)


@op(layout="any", inplace=("x",))
def gelu_quick(x):
    """x * sigmoid(1.702 * x), elementwise

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def gelu_quick_back(dout, x):
    """dout * (s + 1.702 * x * s * (1 - s)) with s = sigmoid(1.702 * x), elementwise"""
    return _same(dout, x)


gelu_quick.grad(_of_x(gelu_quick_back))
gelu_quick.reference(np_silenced(lambda x: np_silu(x, 1.702)))
gelu_quick_back.reference(np_silenced(lambda dout, x: dout * np_silu_slope(x, 1.702)))
_bent(gelu_quick_back, lambda p, x: _silu_bend(p, x, 1.702))


@op(layout="any", inplace=("x",))
def gelu(x):
    """x * (1 + tanh(u)) / 2 with u = sqrt(2/pi) * (x + 0.044715 * x^3).

    It is computed as it stands here; ggml takes it from a table of f16, which is off by up to 0.002.  Elementwise.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def gelu_back(dout, x):
    """dout * (s + x * s * (1 - s) * 2u') with s = sigmoid(2u) and `gelu`'s u, elementwise"""
    return _same(dout, x)


_GELU = 2 * math.sqrt(2 / math.pi)


def np_gelu(x):
    return x * _sigmoid(_GELU * (x + 0.044715 * x**3))


def np_gelu_slope(x):
    s, other = _sigmoid(_GELU * (x + 0.044715 * x**3)), _sigmoid(-_GELU * (x + 0.044715 * x**3))
    y = np.clip(x, -32, 32)  # beyond, s * (1 - s) is 0
    return s + s * other * _GELU * y * (1 + 3 * 0.044715 * y**2)


gelu.grad(_of_x(gelu_back))
gelu.reference(np_silenced(np_gelu))
gelu_back.reference(np_silenced(lambda dout, x: dout * np_gelu_slope(x)))


def _gelu_bend(p, x):
    """p s (1 - s) (2 v' + x (v'' + (1 - 2 s) v'^2)), with v = 2u and s = sigmoid(v)."""
    x = clamp(x, min=-32, max=32)  # beyond, s (1 - s) is 0
    square = sqr(x)
    v = scale(mul(x, scale(square, factor=0.044715, bias=1)), factor=_GELU)
    first = scale(square, factor=_GELU * 3 * 0.044715, bias=_GELU)
    second = scale(x, factor=_GELU * 6 * 0.044715)
    turn = sub(second, mul(sqr(first), tanh(scale(v, factor=0.5))))  # 1 - 2 s is -tanh(v / 2)
    return mul(sigmoid_back(p, v), add(scale(first, factor=2), mul(x, turn)))


_bent(gelu_back, _gelu_bend)


@op(layout="any", inplace=("x",))
def gelu_erf(x):
    """x times the chance that a normal variable is below x: x * (1 + erf(x / sqrt(2))) / 2.  Elementwise.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def gelu_erf_back(dout, x):
    """dout * (P(x) + x * P'(x)) with P(x) = (1 + erf(x / sqrt(2))) / 2, elementwise"""
    return _same(dout, x)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _normal(x):
    return 0.5 * _erfc(-x / math.sqrt(2))


def np_gelu_erf(x):
    return x * _normal(x)


def np_gelu_erf_slope(x):
    return _normal(x) + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


gelu_erf.grad(_of_x(gelu_erf_back))
gelu_erf.reference(np_silenced(np_gelu_erf))
gelu_erf_back.reference(np_silenced(lambda dout, x: dout * np_gelu_erf_slope(x)))


def _gelu_erf_bend(p, x):
    """p P'(x) (2 - x^2)"""
    square = sqr(clamp(x, min=-12, max=12))  # beyond, P' is nothing
    bell = scale(exp(scale(square, factor=-0.5)), factor=1 / math.sqrt(2 * math.pi))
    return mul(p, mul(bell, scale(square, factor=-1, bias=2)))


_bent(gelu_erf_back, _gelu_erf_bend)


@op(layout="any", inplace=("x",))
def hardsigmoid(x):
    """(x + 3) / 6, but not below 0 nor above 1, elementwise

    Source: Howard et al. 2019, arXiv:1905.02244.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def hardsigmoid_back(dout, x):
    """dout / 6 where -3 < x < 3, else 0; NaN where x is NaN, elementwise"""
    return _same(dout, x)


hardsigmoid.grad(_of_x(hardsigmoid_back))
hardsigmoid.reference(np_silenced(lambda x: np.minimum(np.maximum((x + 3) / 6, 0), 1)))
hardsigmoid_back.reference(np_silenced(lambda dout, x: np.select([x != x, (x <= -3) | (x >= 3)], [x, 0], dout / 6)))
_straight(hardsigmoid_back)


@op(layout="any", inplace=("x",))
def hardswish(x):
    """x * hardsigmoid(x): 0 up to -3, x from 3 on, elementwise

    Source: Howard et al. 2019, arXiv:1905.02244.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def hardswish_back(dout, x):
    """dout * (2x + 3) / 6 where -3 < x < 3; below 0, above dout, elementwise"""
    return _same(dout, x)


hardswish.grad(_of_x(hardswish_back))
hardswish.reference(np_silenced(lambda x: np.select([x <= -3, x >= 3], [0, x], x * ((x + 3) / 6))))
hardswish_back.reference(np_silenced(lambda dout, x: np.select([x <= -3, x >= 3], [0, dout], dout * ((2 * x + 3) / 6))))
_bent(hardswish_back, lambda p, x: scale(hardsigmoid_back(p, x), factor=2))


@op(layout="any", inplace=("x",))
def xielu(x, *, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-6):
    """p * x^2 + beta * x where x is above 0, else n * (exp(min(x, eps)) - 1 - x) + beta * x.

    Args:
        alpha_p: p is softplus(alpha_p).
        alpha_n: n is beta + softplus(alpha_n).
        beta: the slope at 0.
        eps: a little below 0.

    Source: Huang and Schlag, "Deriving Activation Functions Using Integration", arXiv:2411.13010.  Elementwise.
    """
    return x.spec


@op(layout="any", inplace=("dout", "x"))
def xielu_back(dout, x, *, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-6):
    """dout * (2 * p * x + beta) where x is above 0, else dout * (n * (exp(x) - 1) + beta), or where x is above eps
    dout * (beta - n), as the definition of `xielu` has it.  Elementwise."""
    return _same(dout, x)


xielu.grad(_of_x(xielu_back))


@xielu.reference
@np_silenced
def _(x, *, alpha_n, alpha_p, beta, eps):
    slope = _softplus(alpha_n)  # n - beta
    below = (beta + slope) * np.expm1(np.minimum(x, eps)) - slope * x
    return np.where(x > 0, _softplus(alpha_p) * x * x + beta * x, below)


@xielu_back.reference
@np_silenced
def _(dout, x, *, alpha_n, alpha_p, beta, eps):
    below = (beta + _softplus(alpha_n)) * np.where(x > eps, -1, np.expm1(x))
    return dout * (np.where(x > 0, 2 * _softplus(alpha_p) * x, below) + beta)


def _xielu_bend(p, x, *, alpha_n: float, alpha_p: float, beta: float, eps: float):
    """2 p where x is above 0, n exp(x) up to eps, 0 between."""
    above = scale(step(x), factor=2 * float(_softplus(alpha_p)))
    below = mul(exp(clamp(x, min=-math.inf, max=0)), step(scale(x, factor=-1, bias=eps)))
    return mul(p, add(above, scale(below, factor=beta + float(_softplus(alpha_n)))))


_bent(xielu_back, _xielu_bend)


# -- more of analysis: their gradients are made of other ops --------------------------------------------------


def _inverse(of: Callable) -> Callable:
    """The gradient rule dout / of(x)."""
    return lambda t, dout: (div(dout, of(t.src[0])),)


@op(layout="any", inplace=("x",))
def exp2(x):
    """2 to the power of x, elementwise"""
    return x.spec


exp2.grad(lambda t, dout: (scale(mul(dout, t), factor=math.log(2)),))
exp2.reference(np_silenced(np.exp2))


@op(layout="any", inplace=("x",))
def log2(x):
    """The logarithm to base 2, exact of powers of 2: -inf at 0, NaN below.  Elementwise."""
    return x.spec


log2.grad(lambda t, dout: (div(scale(dout, factor=1 / math.log(2)), t.src[0]),))
log2.reference(np_silenced(np.log2))


def log10(x: Tensor) -> Tensor:
    """The logarithm to base 10: -inf at 0, NaN below.  Elementwise.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return scale(log(x), factor=1 / math.log(10))


@op(layout="any", inplace=("x",))
def log1p(x):
    """log(1 + x), exact near 0 too: -inf at -1, NaN below.  Elementwise."""
    return x.spec


log1p.grad(_inverse(lambda x: scale(x, factor=1, bias=1)))
log1p.reference(np_silenced(np.log1p))


@op(layout="any", inplace=("x",))
def erf(x):
    """The error function: twice the integral of exp(-t^2) from 0 to x, over the root of pi.  Elementwise."""
    return x.spec


erf.grad(lambda t, dout: (scale(mul(dout, exp(neg(sqr(t.src[0])))), factor=2 / math.sqrt(math.pi)),))
erf.reference(np.vectorize(math.erf, otypes=[np.float64]))


@op(layout="any", inplace=("x",))
def tan(x):
    """The tangent, for x of any size.  Elementwise."""
    return x.spec


tan.grad(_inverse(lambda x: sqr(cos(x))))
tan.reference(np_silenced(np.tan))


@op(layout="any", inplace=("x",))
def asin(x):
    """The angle, -pi/2 to pi/2, whose sine is x; NaN beyond 1.  Elementwise."""
    return x.spec


def _leg(x):
    """The root of 1 - x^2, whose digits (1 - x)(1 + x) keeps near 1."""
    return sqrt(mul(scale(x, factor=-1, bias=1), scale(x, factor=1, bias=1)))


asin.grad(_inverse(_leg))
asin.reference(np_silenced(np.arcsin))


@op(layout="any", inplace=("x",))
def acos(x):
    """The angle, 0 to pi, whose cosine is x; NaN beyond 1.  Elementwise."""
    return x.spec


acos.grad(_inverse(lambda x: neg(_leg(x))))
acos.reference(np_silenced(np.arccos))


@op(layout="any", inplace=("x",))
def atan(x):
    """The angle, -pi/2 to pi/2, whose tangent is x.  Elementwise."""
    return x.spec


def _hypotenuse(x):
    """The root of 1 + x^2; of large x, whose squares may be infinite, |x|."""
    root, size = sqrt(scale(sqr(clamp(x, min=-1e9, max=1e9)), factor=1, bias=1)), abs(x)
    return add(root, relu(sub(size, root)))


@atan.grad
def _(t, dout):
    root = _hypotenuse(t.src[0])
    return (div(div(dout, root), root),)


atan.reference(np.arctan)


@op(layout="any", inplace=("x",))
def sinh(x):
    """The hyperbolic sine, (exp(x) - exp(-x)) / 2.  Elementwise."""
    return x.spec


@op(layout="any", inplace=("x",))
def cosh(x):
    """The hyperbolic cosine, (exp(x) + exp(-x)) / 2.  Elementwise."""
    return x.spec


sinh.grad(lambda t, dout: (mul(dout, cosh(t.src[0])),))
sinh.reference(np_silenced(np.sinh))
cosh.grad(lambda t, dout: (mul(dout, sinh(t.src[0])),))
cosh.reference(np_silenced(np.cosh))


@op(layout="any", inplace=("x",))
def asinh(x):
    """The inverse of `sinh`.  Elementwise."""
    return x.spec


asinh.grad(_inverse(_hypotenuse))
asinh.reference(np_silenced(np.arcsinh))


@op(layout="any", inplace=("x",))
def acosh(x):
    """The inverse of `cosh` for x from 1 on; NaN below.  Elementwise."""
    return x.spec


acosh.grad(_inverse(lambda x: mul(sqrt(scale(x, factor=1, bias=-1)), sqrt(scale(x, factor=1, bias=1)))))
acosh.reference(np_silenced(np.arccosh))


@op(layout="any", inplace=("x",))
def atanh(x):
    """The inverse of `tanh`: infinite at 1 and -1, NaN beyond.  Elementwise."""
    return x.spec


atanh.grad(_inverse(lambda x: mul(scale(x, factor=-1, bias=1), scale(x, factor=1, bias=1))))
atanh.reference(np_silenced(np.arctanh))


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x): infinite at 0, NaN below.  Elementwise.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return div(tensor(1.0), sqrt(x))


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, elementwise

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return div(tensor(1.0), x)


def mish(x: Tensor) -> Tensor:
    """x * tanh(softplus(x)).  Source: Misra, arXiv:1908.08681.  Elementwise.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return mul(x, tanh(softplus(x)))


def selu(x: Tensor) -> Tensor:
    """lambda * (x where it is above 0, else alpha * (exp(x) - 1)).

    Source: Klambauer et al., arXiv:1706.02515, for lambda = 1.0507 and alpha = 1.6733.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    alpha, size = 1.6732632423543772, 1.0507009873554805
    return scale(add(relu(x), scale(neg(relu(neg(elu(x)))), factor=alpha)), factor=size)


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is above 0, else alpha * (exp(x / alpha) - 1).  Source: Barron, arXiv:1704.07483.  Elementwise.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return scale(elu(scale(x, factor=1 / alpha)), factor=alpha)


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)) = -log(1 + exp(-x)), elementwise

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return neg(softplus(neg(x)))


def hardtanh(x: Tensor, min: float = -1.0, max: float = 1.0) -> Tensor:
    """x, but not below `min` nor above `max`: `clamp` under its other name.  Elementwise.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: `min` is above `max`; or x is i32 or quantized.
    """
    return clamp(x, min=min, max=max)


def relu6(x: Tensor) -> Tensor:
    """x, but not below 0 nor above 6.  Elementwise.

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return clamp(x, min=0, max=6)


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|), elementwise

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return div(x, scale(abs(x), factor=1, bias=1))


def tanhshrink(x: Tensor) -> Tensor:
    """x - tanh(x), elementwise

    Args:
        x: f32 of any shape; f16 and bf16 are cast.

    Raises:
        ShapeError: x is i32 or quantized.
    """
    return sub(x, tanh(x))
