"""Cross entropy: of logits with classes, or with probabilities."""

import numpy as np
from numpy.typing import ArrayLike

from ..autodiff import through
from ..dtype import I32
from ..errors import IndexRangeError, ShapeError
from ..op import Int, ensure, op
from ..tensor import Pack, Spec, Tensor, tensor
from .elementwise import add, mul, neg, scale, sub
from .layout import broadcast_to, reshape
from .reduce import sum as total
from .reduce import sum_rows
from .unary import exp

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
    """The gradient of `cross_entropy_loss` by the logits, for a scalar `dloss`."""
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

    Returns, packed: the loss; for each row the log of the sum of exp(logits), 0 if it is ignored; and what a row
    weighs in the loss: 1 / number of rows that count, or 1 if `mean` is not wanted.
    """
    _check_classes(logits, targets)
    return Pack(loss=Spec(()), lse=Spec(targets.shape), weight=Spec(()))


@cross_entropy_class.grad
def _(t, dloss, dlse, dweight):  # the weight depends on no logit
    logits, targets = t.src
    _, lse, weight = t.parts
    dlogits = cross_entropy_class_back(
        _or_zero(dloss), logits, targets, lse, weight, dlse, ignore_index=t.attrs["ignore_index"]
    )
    return dlogits, None


@cross_entropy_class.reference
def _(logits, targets, *, ignore_index, mean):
    counted = targets != ignore_index
    _check_values(targets[counted], logits.shape[-1])
    lse = np.where(counted, _log_sum_exp(logits), 0)
    weight = 1 / max(1, counted.sum()) if mean and counted.any() else float(not mean)
    is_target = np.arange(logits.shape[-1]) == targets[..., None]
    chosen = np.where(is_target, logits, 0).sum(axis=-1)
    return np.where(counted, lse - chosen, 0).sum() * weight, lse, weight


@op(inplace=("logits",))
def cross_entropy_class_back(dloss, logits, targets: Int, lse, weight, dlse=None, *, ignore_index: int = -100):
    """The gradient of `cross_entropy_class`, 0 in ignored rows:

    dloss * weight * (softmax(logits) - 1 at the target) + dlse * softmax(logits).
    """
    _check_classes(logits, targets)
    ensure(dloss.shape == weight.shape == (), "dloss and weight must be scalars")
    _check_lse(logits, lse, dlse)
    return logits.spec


@cross_entropy_class_back.reference
def _(dloss, logits, targets, lse, weight, dlse, *, ignore_index):
    counted = (targets != ignore_index)[..., None]
    _check_values(targets[counted[..., 0]], logits.shape[-1])
    is_target = np.arange(logits.shape[-1]) == targets[..., None]
    p = np.exp(logits - lse[..., None])
    dlogits = dloss * weight * (p - is_target)
    return np.where(counted, dlogits if dlse is None else dlogits + dlse[..., None] * p, 0)


@cross_entropy_class_back.grad
def _(t, d, *, needs):
    dloss, logits, targets, lse, weight, dlse = t.src
    zero, one = tensor(0.0), tensor(1.0)

    def again(dloss, weight, dlse=None):
        return cross_entropy_class_back(dloss, logits, targets, lse, weight, dlse, **t.attrs)

    p = again(zero, one, broadcast_to(reshape(one, (1,) * lse.ndim), shape=lse.shape))  # in rows that count
    less = total(mul(d, again(one, one)))  # p - 1 at the target
    factor = mul(dloss, weight) if dlse is None else add(reshape(dlse, (*lse.shape, 1)), mul(dloss, weight))
    through_p = mul(mul(d, p), factor)
    of_rows = (reshape(sum_rows(x), lse.shape) for x in (through_p, mul(d, p)))
    return (
        mul(less, weight), through_p, None, neg(next(of_rows)), mul(less, dloss),
        next(of_rows) if needs[5] else None,
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

    Returns, packed: the loss; and for each row the log of the sum of exp(logits).
    """
    _check_labels(logits, labels)
    return Pack(loss=Spec(()), lse=Spec(logits.shape[:-1]))


@cross_entropy_soft.grad
def _(t, dloss, dlse, *, needs):
    logits, labels = t.src
    lse, mean = t.parts[1], t.attrs["mean"]
    dlogits = dlabels = None
    if needs[0]:
        dlogits = cross_entropy_soft_back(_or_zero(dloss), logits, labels, lse, dlse, mean=mean)
    if needs[1] and dloss is not None:
        row = scale(dloss, factor=1 / max(1, lse.size)) if mean else dloss
        dlabels = mul(sub(reshape(lse, (*lse.shape, 1)), logits), row)
    return dlogits, dlabels


@cross_entropy_soft.reference
def _(logits, labels, *, mean):
    lse = _log_sum_exp(logits)
    terms = np.where(labels == 0, 0, labels * (lse[..., None] - logits))
    return terms.sum() / (max(1, lse.size) if mean else 1), lse


@op(inplace=("logits", "labels"))
def cross_entropy_soft_back(dloss, logits, labels, lse, dlse=None, *, mean: bool = True):
    """The gradient of `cross_entropy_soft` by the logits:

    dloss * (softmax(logits) * sum of labels - labels) / (number of rows if `mean`) + dlse * softmax(logits).
    """
    _check_labels(logits, labels)
    ensure(dloss.shape == (), "dloss must be a scalar")
    _check_lse(logits, lse, dlse)
    return logits.spec


@cross_entropy_soft_back.reference
def _(dloss, logits, labels, lse, dlse, *, mean):
    p = np.exp(logits - lse[..., None])
    dlogits = (dloss / max(1, lse.size) if mean else dloss) * (p * labels.sum(axis=-1, keepdims=True) - labels)
    return dlogits if dlse is None else dlogits + dlse[..., None] * p


@cross_entropy_soft_back.grad
@through
def _(dloss, logits, labels, lse, dlse, *, mean):
    p = exp(sub(logits, reshape(lse, (*lse.shape, 1))))
    dlogits = mul(sub(mul(p, sum_rows(labels)), labels), scale(dloss, factor=1 / max(1, lse.size)) if mean else dloss)
    return dlogits if dlse is None else add(dlogits, mul(p, reshape(dlse, (*lse.shape, 1))))


def _check_labels(logits, labels) -> None:
    ensure(logits.ndim >= 1, "logits need an axis of classes")
    ensure(
        labels.shape == logits.shape,
        f"labels must have the shape of the logits, a probability for each class; "
        f"classes themselves are i32 targets of the shape {logits.shape[:-1]}",
    )


def _check_lse(logits, lse, dlse) -> None:
    for name, t in {"lse": lse, "dlse": dlse}.items():
        ensure(t is None or t.shape == logits.shape[:-1], f"{name} must have a value for each row of the logits")


def _or_zero(dloss):
    return tensor(0.0) if dloss is None else dloss


def _log_sum_exp(x):
    """Along the last axis."""
    largest = x.max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(largest == -np.inf, 0, largest)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - shift).sum(axis=-1)) + shift[..., 0]
