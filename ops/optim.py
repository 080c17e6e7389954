"""Optimizer steps, which write into the parameter and its moments; and gradient clipping by the norm of all."""

import enum

import numpy as np

from ..core.dtype import F32
from ..core.op import Half, Int, ensure, op
from ..core.tensor import Spec, Update
from .elementwise import div, mul

__all__ = [
    "StepRule", "clip_factor", "global_norm", "opt_step", "opt_step_adamw", "opt_step_count", "opt_step_sgd",
]  # fmt: skip


class StepRule(enum.IntEnum):
    """How `opt_step` steps."""

    MOMENTUM = 0
    ADAM = 1
    RMSPROP = 2
    ADAGRAD = 3
    LION = 4
    AVERAGE = 5


@op(layout="contiguous")
def opt_step_adamw(x: Half, grad, m: Half, v: Half, hyper, factor=None):
    """A step of AdamW, written into the leaves `x`, `m` and `v`.

        g = grad * factor
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        x = x * (1 - alpha * decay) - alpha * m * beta1h / (sqrt(v * beta2h) + eps)

    Where the root and eps are 0, as of an element that never had a gradient, only the decay is taken.  If `factor` is
    not finite, as after a gradient with NaN, nothing is written: the step is skipped.

    Sources: Kingma and Ba 2014, arXiv:1412.6980; Loshchilov and Hutter 2017, arXiv:1711.05101.

    Args:
        x: the parameter, an f32 leaf; m and v: its moments, of the same shape.
        grad: of any layout.
        hyper: f32 [7], alpha, beta1, beta2, eps, decay, beta1h = 1 / (1 - beta1^t) and beta2h = 1 / (1 - beta2^t)
            for the step t = 1, 2, ...
        factor: a scalar, default 1; see `clip_factor`.
    """
    _check_step(grad, hyper, factor, 7, x=x, m=m, v=v)
    ensure(x is not m and x is not v and m is not v, "x, m and v must be three leaves")
    return Update(x, m, v)


@opt_step_adamw.reference
def _(x, grad, m, v, hyper, factor):
    if factor is not None and not np.isfinite(factor):
        return x, m, v
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = hyper
    g = grad if factor is None else grad * factor
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    root = np.sqrt(v * beta2h) + eps
    step = np.where(root == 0, 0, alpha * m * beta1h / np.where(root == 0, 1, root))
    return x - (alpha * decay * x + step), m, v


@op(layout="contiguous")
def opt_step_sgd(x: Half, grad, hyper, factor=None):
    """A step of gradient descent, written into the leaf `x`: x * (1 - alpha * decay) - alpha * grad * factor.

    If `factor` is not finite, as after a gradient with NaN, nothing is written: the step is skipped.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, for the decay.

    Args:
        x: the parameter, an f32 leaf.
        grad: of any layout.
        hyper: f32 [2], alpha and decay.
        factor: a scalar, default 1; see `clip_factor`.
    """
    _check_step(grad, hyper, factor, 2, x=x)
    return Update(x)


@opt_step_sgd.reference
def _(x, grad, hyper, factor):
    if factor is not None and not np.isfinite(factor):
        return (x,)
    alpha, decay = hyper
    return (x - (alpha * decay * x + alpha * (grad if factor is None else grad * factor)),)


_STATES = {  # that a rule has, and that it may have
    StepRule.MOMENTUM: ("a", "a"),
    StepRule.ADAM: ("ab", "abc"),
    StepRule.RMSPROP: ("a", "abc"),
    StepRule.ADAGRAD: ("a", "a"),
    StepRule.LION: ("a", "a"),
    StepRule.AVERAGE: ("", ""),
}


@op(layout="contiguous")
def opt_step(
    x: Half, grad, hyper, factor=None, a: Half | None = None, b: Half | None = None, c: Half | None = None, *,
    rule: StepRule,
):  # fmt: skip
    """A step of x by a rule, written into the leaf `x` and its states `a`, `b` and `c`.

    With g = grad * factor + coupled * x, and own numbers of each rule, x becomes x * (1 - alpha * decoupled) -
    alpha * step, where step is::

        momentum  a = own0 * a + own1 * g; a, or g + own0 * a if own2
        adam      a = own0 * a + (1 - own0) * g; b = own1 * b + (1 - own1) * g^2; c = max(c, b), if it is there;
                  a * own3 / (sqrt((c or b) * own4) + own2)
        rmsprop   a = own0 * a + (1 - own0) * g^2; b = own0 * b + (1 - own0) * g; s = g / (sqrt(a - b^2) + own1);
                  c = own2 * c + s; c or s
        adagrad   a = a + g^2; g / (sqrt(a) + own0)
        lion      the sign of own0 * a + (1 - own0) * g; a = own1 * a + (1 - own1) * g

    and by the rule "average" x becomes x + own0 * (grad - x).  What is divided by a root and eps that are 0 is 0.  If
    `factor` is not finite, as after a gradient with NaN, nothing is written: the step is skipped.

    Sources: Sutskever et al. 2013, On the importance of initialization and momentum in deep learning; Kingma and Ba
    2014, arXiv:1412.6980; Reddi et al. 2018, On the Convergence of Adam and Beyond; Hinton 2012, Lecture 6e; Duchi et
    al. 2011, Adaptive Subgradient Methods; Chen et al. 2023, arXiv:2302.06675.

    Args:
        x: the parameter, an f32 leaf; a, b, c: its states, of the same shape.
        grad: of any layout.
        hyper: f32 [8], alpha, coupled, decoupled, and the rule's own numbers.
        factor: a scalar, default 1; see `clip_factor`.
    """
    states = {name: t for name, t in {"a": a, "b": b, "c": c}.items() if t is not None}
    _check_step(grad, hyper, factor, 8, x=x, **states)
    least, most = _STATES[rule]
    ensure(
        {*least} <= {*states} <= {*most},
        f"the rule {rule.name.lower()} has {' and '.join(least) or 'no states'}"
        + (f", and may have {' and '.join(n for n in most if n not in least)}" if most != least else ""),
    )
    targets = [x, *states.values()]
    ensure(len({*targets}) == len(targets), "x and its states must be different leaves")
    return Update(*targets)


@opt_step.reference
def _(x, grad, hyper, factor, a, b, c, *, rule):
    if factor is not None and not np.isfinite(factor):
        return tuple(t for t in (x, a, b, c) if t is not None)
    alpha, coupled, decoupled, *own = hyper
    g = grad * (1 if factor is None else factor) + coupled * x
    if rule is StepRule.MOMENTUM:
        a = own[0] * a + own[1] * g
        step = g + own[0] * a if own[2] else a
    elif rule is StepRule.ADAM:
        a, b = own[0] * a + (1 - own[0]) * g, own[1] * b + (1 - own[1]) * g * g
        c = c if c is None else np.maximum(c, b)
        step = _over(a * own[3], np.sqrt((b if c is None else c) * own[4]) + own[2])
    elif rule is StepRule.RMSPROP:
        a = own[0] * a + (1 - own[0]) * g * g
        b = b if b is None else own[0] * b + (1 - own[0]) * g
        step = _over(g, np.sqrt(a if b is None else np.maximum(0, a - b * b)) + own[1])
        c = c if c is None else own[2] * c + step
        step = step if c is None else c
    elif rule is StepRule.ADAGRAD:
        a = a + g * g
        step = _over(g, np.sqrt(a) + own[0])
    elif rule is StepRule.LION:
        step, a = np.sign(own[0] * a + (1 - own[0]) * g), own[1] * a + (1 - own[1]) * g
    else:
        return (x + own[0] * (grad - x),)
    return tuple(t for t in (x - (alpha * decoupled * x + alpha * step), a, b, c) if t is not None)


def _over(x, root):
    return np.where(root == 0, 0, x / np.where(root == 0, 1, root))


@op(layout="contiguous")
def opt_step_count(steps: Int, factor):
    """One more, written into the leaf `steps`, an i32 scalar; not if `factor`, a scalar, is not finite, at which steps
    are skipped: so the count is of the steps that were made."""
    ensure(steps.shape == () and factor.shape == (), "steps and factor must be scalars")
    return Update(steps)


opt_step_count.reference(lambda steps, factor: (steps + int(np.isfinite(factor)),))


@op(layout="contiguous")
def global_norm(*xs):
    """The root of the sum of squares of all elements of all tensors: a scalar.  Squares and sums are double."""
    return Spec(())


@global_norm.grad
def _(t, dout):
    unit = div(dout, t)
    return tuple(mul(x, unit) for x in t.src)


@global_norm.reference
def _(*xs):
    return np.sqrt(sum(np.square(x).sum() for x in xs))


@op
def clip_factor(norm, *, max_norm: float):
    """What gradients of that norm are multiplied with so that it is at most `max_norm`; 1 if it is.

    A norm that is not finite gives NaN, at which optimizer steps are skipped.

    Source: Pascanu, Mikolov and Bengio 2012, arXiv:1211.5063.
    """
    ensure(norm.shape == (), "norm must be a scalar")
    ensure(max_norm > 0, f"max_norm must be positive: {max_norm}")
    return norm.spec


@clip_factor.reference
def _(norm, *, max_norm):
    return max_norm / np.maximum(norm, max_norm) if np.isfinite(norm) else np.nan


def _check_step(grad, hyper, factor, n: int, **targets) -> None:
    for name, t in targets.items():
        ensure(
            t.dtype is F32,
            f"{name} is {t.dtype}: parameters and moments are stepped in f32, where small steps are not rounded away; "
            "keep the parameter in f32 and cast it where it is used",
        )
        ensure(t.shape == grad.shape, f"{name} and grad have different shapes")
    ensure(hyper.shape == (n,), f"hyper must have {n} values")
    ensure(factor is None or factor.size == 1, "factor must be a scalar")
