"""Optimizer steps, which write into the parameter and its moments; and gradient clipping by the norm of all."""

import numpy as np

from ..core.dtype import F32
from ..core.op import Half, Int, ensure, op
from ..core.tensor import Spec, Update
from .elementwise import div, mul

__all__ = ["clip_factor", "global_norm", "opt_step_adamw", "opt_step_count", "opt_step_sgd"]


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
