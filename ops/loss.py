"""Cross entropy: of logits with classes, or with probabilities."""

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import I32
from ..core.errors import IndexRangeError, ShapeError
from ..core.op import Int, ensure, op
from ..core.tensor import Pack, Spec, Tensor, tensor
from ..diff.autodiff import through
from .elementwise import add, div, mul, neg, scale, sub
from .layout import broadcast_to, reshape, stop_gradient
from .reduce import sum as sum_of
from .reduce import sum_rows
from .unary import exp, log

__all__ = [
    "cross_entropy_class", "cross_entropy_class_back", "cross_entropy_loss", "cross_entropy_loss_back",
    "cross_entropy_soft", "cross_entropy_soft_back",
]  # fmt: skip


def cross_entropy_loss(
    logits: Tensor, targets: Tensor | ArrayLike, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """How far softmax(logits) is from the targets: -log of the probability given to them.  A scalar.

    Args:
        logits: [..., classes].
        targets: i32 of the shape logits.shape[:-1], a class for each row; or floats of the shape of the logits,
            a probability for each class, with ggml's meaning: -sum(targets * log_softmax(logits)).
        ignore_index: rows with this class count for nothing.
        reduction: "mean" over the rows that count (0 if none does), or "sum".

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    made, _ = _forward(logits, targets, ignore_index, reduction)
    return made[0]


def cross_entropy_loss_back(
    dloss: Tensor | ArrayLike,
    logits: Tensor,
    targets: Tensor | ArrayLike,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The gradient of `cross_entropy_loss` by the logits, for a scalar `dloss`.

    Args:
        dloss: f32, a scalar; logits: f32 [..., classes]; targets: as of `cross_entropy_loss`.

    Raises:
        ShapeError: as of `cross_entropy_loss`.
    """
    dloss = dloss if isinstance(dloss, Tensor) else tensor(dloss)
    if dloss.size != 1:
        raise ShapeError(f"cross_entropy_loss_back(): dloss must be a scalar, not {dloss.label()}")
    (loss, *_), targets = _forward(logits, targets, ignore_index, reduction)
    packed = loss.src[0]
    return packed.op.vjp(packed, [reshape(dloss, ()), *[None] * (len(packed.parts) - 1)], [True, False])[0]


def _forward(logits, targets, ignore_index: int, reduction: str):
    if reduction not in ("mean", "sum"):
        raise ShapeError(f"cross_entropy_loss(): reduction must be 'mean' or 'sum', not {reduction!r}")
    targets = targets if isinstance(targets, Tensor) else tensor(targets)
    mean = reduction == "mean"
    if targets.dtype is I32:
        return cross_entropy_class(logits, targets, ignore_index=ignore_index, mean=mean), targets
    return cross_entropy_soft(logits, targets, mean=mean), targets


# -- classes ------------------------------------------------------------------------------------------------


@op
def cross_entropy_class(logits, targets: Int, *, ignore_index: int = -100, mean: bool = True):
    """Cross entropy with classes; see `cross_entropy_loss`.

    Returns, packed: the loss; for each row its largest logit `top` and the sum `total` of exp(logits - top), 0 and 1 if
    it is ignored; and what a row weighs in the loss: 1 / number of rows that count, or 1 if `mean` is not wanted.
    Of logits of 1e8 the log of the sum alone, rounded to f32, would not know how many they are.
    """
    _check_classes(logits, targets)
    row = Spec(targets.shape)
    return Pack(loss=Spec(()), top=row, total=row, weight=Spec(()))


@cross_entropy_class.grad
def _(t, dloss, dtop, dtotal, dweight):  # the weight depends on no logit; of the top see `_through`
    logits, targets = t.src
    _, top, total, weight = t.parts
    dlogits = cross_entropy_class_back(
        _or_zero(dloss), logits, targets, top, total, weight, _through(dtotal, total),
        ignore_index=t.attrs["ignore_index"],
    )  # fmt: skip
    return dlogits, None


@cross_entropy_class.reference
def _(logits, targets, *, ignore_index, mean):
    counted = targets != ignore_index
    _check_values(targets[counted], logits.shape[-1])
    top, total = (np.where(counted, x, unused) for x, unused in zip(_top_and_total(logits), (0, 1), strict=True))
    weight = 1 / max(1, counted.sum()) if mean and counted.any() else float(not mean)
    is_target = np.arange(logits.shape[-1]) == targets[..., None]
    chosen = np.where(is_target, logits, 0).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.where(counted, np.log(total) + (top - chosen), 0).sum() * weight
    return loss, top, total, weight


@cross_entropy_class.counted
def _(t):
    ignored = t.attrs["ignore_index"]
    return t.src[1], lambda targets: int(np.count_nonzero(targets != ignored)), t.attrs["mean"]


@op(inplace=("logits",))
def cross_entropy_class_back(dloss, logits, targets: Int, top, total, weight, dlse=None, *, ignore_index: int = -100):
    """The gradient of `cross_entropy_class`, 0 in ignored rows:

    dloss * weight * (p - 1 at the target) + dlse * p, where p is softmax(logits) = exp(logits - top) / total and `dlse`
    the gradient by the log of the sum of exp(logits).
    """
    _check_classes(logits, targets)
    ensure(dloss.shape == weight.shape == (), "dloss and weight must be scalars")
    _check_rows(logits, top, total, dlse)
    return logits.spec


@cross_entropy_class_back.reference
def _(dloss, logits, targets, top, total, weight, dlse, *, ignore_index):
    counted = (targets != ignore_index)[..., None]
    _check_values(targets[counted[..., 0]], logits.shape[-1])
    is_target = np.arange(logits.shape[-1]) == targets[..., None]
    p = _softmax(logits, top, total)
    others = np.where(is_target, 0, p).sum(axis=-1, keepdims=True)  # p - 1 would be rounding where p is nearly 1
    less = np.where(is_target & (p > 0.5), -others, p - is_target)
    dlogits = dloss * weight * less
    return np.where(counted, dlogits if dlse is None else dlogits + dlse[..., None] * p, 0)


@cross_entropy_class_back.grad
def _(t, d, *, needs):
    dloss, logits, targets, top, total, weight, dlse = t.src
    zero, one = tensor(0.0), tensor(1.0)

    def again(dloss, weight, dlse=None):
        return cross_entropy_class_back(dloss, logits, targets, top, total, weight, dlse, **t.attrs)

    p = again(zero, one, broadcast_to(reshape(one, (1,) * top.ndim), shape=top.shape))  # in rows that count
    less = sum_of(mul(d, again(one, one)))  # p - 1 at the target
    factor = mul(dloss, weight) if dlse is None else add(reshape(dlse, (*top.shape, 1)), mul(dloss, weight))
    through_p = mul(mul(d, p), factor)
    of_rows = (reshape(sum_rows(x), top.shape) for x in (through_p, mul(d, p)))
    return (
        mul(less, weight), through_p, None, None, neg(div(next(of_rows), total)), mul(less, dloss),
        next(of_rows) if needs[6] else None,
    )  # fmt: skip


def _check_classes(logits, targets) -> None:
    ensure(logits.ndim >= 1, "logits need an axis of classes")
    ensure(
        targets.shape == logits.shape[:-1],
        f"targets must have the shape {logits.shape[:-1]}, a class for each row of the logits",
    )


def _check_values(targets: np.ndarray, classes: int) -> None:
    wrong = (targets < 0) | (targets >= classes)
    if wrong.any():
        raise IndexRangeError(f"targets holds {targets[wrong].flat[0]}, and must be from 0 to {classes - 1}")


# -- probabilities ------------------------------------------------------------------------------------------


@op
def cross_entropy_soft(logits, labels, *, mean: bool = True):
    """Cross entropy with probabilities: -sum(labels * log_softmax(logits)), over the number of rows if `mean`.

    A label of 0 counts for nothing, also where the logit is -inf.

    Returns, packed: the loss; and for each row its largest logit `top` and the sum `total` of exp(logits - top).
    """
    _check_labels(logits, labels)
    row = Spec(logits.shape[:-1])
    return Pack(loss=Spec(()), top=row, total=row)


@cross_entropy_soft.grad
def _(t, dloss, dtop, dtotal, *, needs):  # of the top see `_through`
    logits, labels = t.src
    (_, top, total), mean = t.parts, t.attrs["mean"]
    dlogits = dlabels = None
    if needs[0]:
        dlse = _through(dtotal, total)
        dlogits = cross_entropy_soft_back(_or_zero(dloss), logits, labels, top, total, dlse, mean=mean)
    if needs[1] and dloss is not None:
        row = scale(dloss, factor=1 / max(1, top.size)) if mean else dloss
        of_row = (*top.shape, 1)
        dlabels = mul(add(sub(reshape(top, of_row), logits), log(reshape(total, of_row))), row)
    return dlogits, dlabels


@cross_entropy_soft.reference
def _(logits, labels, *, mean):
    top, total = _top_and_total(logits)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(labels == 0, 0, labels * ((top[..., None] - logits) + np.log(total)[..., None]))
    return terms.sum() / (max(1, top.size) if mean else 1), top, total


@op(inplace=("logits", "labels"))
def cross_entropy_soft_back(dloss, logits, labels, top, total, dlse=None, *, mean: bool = True):
    """The gradient of `cross_entropy_soft` by the logits:

    dloss * (p * sum of labels - labels) / (number of rows if `mean`) + dlse * p, where p is softmax(logits) =
    exp(logits - top) / total and `dlse` the gradient by the log of the sum of exp(logits).
    """
    _check_labels(logits, labels)
    ensure(dloss.shape == (), "dloss must be a scalar")
    _check_rows(logits, top, total, dlse)
    return logits.spec


@cross_entropy_soft_back.reference
def _(dloss, logits, labels, top, total, dlse, *, mean):
    p = _softmax(logits, top, total)
    dlogits = (dloss / max(1, top.size) if mean else dloss) * (p * labels.sum(axis=-1, keepdims=True) - labels)
    return dlogits if dlse is None else dlogits + dlse[..., None] * p


@cross_entropy_soft_back.grad
@through
def _(dloss, logits, labels, top, total, dlse, *, mean):
    of_row = (*top.shape, 1)
    p = div(exp(sub(logits, reshape(stop_gradient(top), of_row))), reshape(total, of_row))
    dlogits = mul(sub(mul(p, sum_rows(labels)), labels), scale(dloss, factor=1 / max(1, top.size)) if mean else dloss)
    return dlogits if dlse is None else add(dlogits, mul(p, reshape(dlse, of_row)))


def _check_labels(logits, labels) -> None:
    ensure(logits.ndim >= 1, "logits need an axis of classes")
    ensure(
        labels.shape == logits.shape,
        f"labels must have the shape of the logits, a probability for each class; "
        f"classes themselves are i32 targets of the shape {logits.shape[:-1]}",
    )


def _check_rows(logits, top, total, dlse) -> None:
    for name, t in {"top": top, "total": total, "dlse": dlse}.items():
        ensure(t is None or t.shape == logits.shape[:-1], f"{name} must have a value for each row of the logits")


def _or_zero(dloss):
    return tensor(0.0) if dloss is None else dloss


def _through(dtotal, total):
    """The gradient by lse = top + log(total) that a gradient by the total is.

    The top is a constant in all of this: p does not depend on it, so that what goes through it and what the total
    gets from it always cancel.
    """
    return None if dtotal is None else mul(dtotal, total)


def _top_and_total(x):
    """Along the last axis: the largest, and the sum of exponentials of what is less than it by how much."""
    top = np.fmax.reduce(x, axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        return top, np.exp(x - _shift(top)[..., None]).sum(axis=-1)


def _softmax(x, top, total):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(x - _shift(top)[..., None]) / total[..., None]


def _shift(top):
    """Where all is -inf, exp(-inf - 0) is 0."""
    return np.where(top == -np.inf, 0, top)
