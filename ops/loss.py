"""Cross entropy: of logits with classes, or with probabilities."""

import enum
from math import inf, prod

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import I32
from ..core.errors import IndexRangeError, ShapeError
from ..core.op import Counted, Int, ensure, op
from ..core.tensor import Pack, Spec, Tensor, tensor
from ..diff.autodiff import pull_back, through
from .elementwise import add, div, mul, neg, scale, sub
from .extremes import take_along_axis
from .layout import broadcast_to, reshape, stop_gradient
from .reduce import sum as sum_of
from .reduce import sum_rows
from .select import not_equal, where
from .unary import exp, log, sqr

__all__ = [
    "Reduction", "cross_entropy_class", "cross_entropy_class_back", "cross_entropy_loss", "cross_entropy_loss_back",
    "cross_entropy_soft", "cross_entropy_soft_back",
]  # fmt: skip


class Reduction(enum.IntEnum):
    """What becomes of the losses of rows: they stay, are added up, or their mean over those that count is taken."""

    NONE = 0
    SUM = 1
    MEAN = 2


def cross_entropy_loss(
    logits: Tensor,
    targets: Tensor | ArrayLike,
    *,
    class_weights: Tensor | ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """How far softmax(logits) is from the targets: -log of the probability given to them.  A scalar, unless reduction
    is "none".

    Args:
        logits: [..., classes].
        targets: i32 of the shape logits.shape[:-1], a class for each row; or floats of the shape of the logits,
            a probability for each class, with ggml's meaning: -sum(targets * log_softmax(logits)).
        class_weights: f32 [classes], what each class counts; the mean is over these weights of the targets that
            are classes, and over the rows with probabilities.  They have no gradient.
        ignore_index: rows with this class count for nothing.
        label_smoothing: the part of each target, 0 to 1, that is spread evenly over all classes (Szegedy et al. 2016).
        z_loss: how much of the square of log(sum(exp(logits))) is added to the loss of each row that counts, which
            keeps the logits from drifting (Chowdhery et al. 2022, PaLM, 5).
        reduction: "mean" over the rows that count (0 if none does), "sum", or "none": a loss for each row.

    Raises:
        ShapeError: shapes or dtypes do not fit, or label_smoothing or z_loss is out of range.
    """
    given = (class_weights, ignore_index, label_smoothing, z_loss, reduction)
    return _forward("cross_entropy_loss", logits, targets, *given)


def cross_entropy_loss_back(
    dloss: Tensor | ArrayLike,
    logits: Tensor,
    targets: Tensor | ArrayLike,
    *,
    class_weights: Tensor | ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """The gradient of `cross_entropy_loss` by the logits.

    Args:
        dloss: f32, of the loss's shape.
        logits: f32 [..., classes]; targets and the rest: as of `cross_entropy_loss`.

    Raises:
        ShapeError: as of `cross_entropy_loss`, or dloss is of another shape.
    """
    dloss = as_tensor(dloss)
    given = (class_weights, ignore_index, label_smoothing, z_loss, reduction)

    def loss_of(logits):
        return _forward("cross_entropy_loss_back", logits, targets, *given)

    shape = logits.shape[:-1] if reduced("cross_entropy_loss_back", reduction) is Reduction.NONE else ()
    if dloss.size != prod(shape):
        raise ShapeError(f"cross_entropy_loss_back(): dloss must have the shape {shape}, not {dloss.label()}")
    [dlogits] = pull_back(loss_of, [logits], [reshape(dloss, shape)], [True])
    assert dlogits is not None
    return dlogits


def _forward(who, logits, targets, class_weights, ignore_index, label_smoothing, z_loss, reduction) -> Tensor:
    reduction = reduced(who, reduction)
    check_range(who, label_smoothing, z_loss)
    targets = as_tensor(targets)
    if targets.dtype is I32:
        loss, top, total, weight = cross_entropy_class(
            logits, targets, class_weights,
            ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip
    else:
        labels = _smoothed(targets, label_smoothing, class_weights)
        loss, top, total = cross_entropy_soft(logits, labels, reduction=reduction)
        weight = tensor(1.0 if reduction is not Reduction.MEAN else 1 / max(1, top.size))
    if not z_loss:
        return loss
    squares = scale(sqr(add(top, log(total))), factor=z_loss)  # of rows that do not count 0
    return add(loss, squares if reduction is Reduction.NONE else mul(sum_of(squares), weight))


def check_range(who: str, label_smoothing: float, z_loss: float) -> None:
    for name, value, most in (("label_smoothing", label_smoothing, 1.0), ("z_loss", z_loss, inf)):
        if not 0 <= value <= most:
            raise ShapeError(f"{who}(): {name} must be from 0 to {most}, not {value!r}")


def reduced(who: str, given: Reduction | str) -> Reduction:
    try:
        return Reduction[given.upper()] if isinstance(given, str) else Reduction(given)
    except (KeyError, ValueError):
        choices = " or ".join(repr(r.name.lower()) for r in Reduction)
        raise ShapeError(f"{who}(): reduction must be {choices}, not {given!r}") from None


def as_tensor(x: Tensor | ArrayLike) -> Tensor:
    return x if isinstance(x, Tensor) else tensor(x)


def _smoothed(labels: Tensor, smoothing: float, class_weights: Tensor | None) -> Tensor:
    """Labels of which a part is spread over all classes, and each counts what its class does."""
    if smoothing:
        labels = scale(labels, factor=1 - smoothing, bias=smoothing / max(1, labels.shape[-1]))
    return labels if class_weights is None else mul(labels, stop_gradient(as_tensor(class_weights)))


# -- classes ------------------------------------------------------------------------------------------------


@op
def cross_entropy_class(
    logits, targets: Int, class_weights=None, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: Reduction = Reduction.MEAN,
):  # fmt: skip
    """Cross entropy with classes; see `cross_entropy_loss`.

    Returns, packed: the loss; for each row its largest logit `top` and the sum `total` of exp(logits - top), 0 and 1 if
    it is ignored; and what a row weighs in the loss: of a mean 1 / what the rows that count weigh together, else 1.
    Of logits of 1e8 the log of the sum alone, rounded to f32, would not know how many they are.
    """
    _check_classes(logits, targets, class_weights)
    row = Spec(targets.shape)
    loss = row if reduction is Reduction.NONE else Spec(())
    return Pack(loss=loss, top=row, total=row, weight=Spec(()))


@cross_entropy_class.grad
def _(t, dloss, dtop, dtotal, dweight):  # the weight depends on no logit; of the top see `_through`
    logits, targets, class_weights = t.src
    _, top, total, weight = t.parts
    dlogits = cross_entropy_class_back(
        _or_zero(dloss), logits, targets, top, total, weight, _through(dtotal, total), class_weights,
        ignore_index=t.attrs["ignore_index"], label_smoothing=t.attrs["label_smoothing"],
    )  # fmt: skip
    return dlogits, None, None


@cross_entropy_class.reference
def _(logits, targets, class_weights, *, ignore_index, label_smoothing, reduction):
    counted = targets != ignore_index
    _check_values(targets[counted], logits.shape[-1])
    weights, own, even = _labels(logits, targets, class_weights, label_smoothing)
    with np.errstate(divide="ignore", invalid="ignore"):
        top, total = (np.where(counted, x, unused) for x, unused in zip(_top_and_total(logits), (0, 1), strict=True))
        less = (top[..., None] - logits) + np.log(total)[..., None]  # -log of the probabilities
        terms = np.where(own != 0, own * less, 0) + np.where(even != 0, even * less, 0)
        losses = np.where(counted, terms.sum(axis=-1), 0)
    weights = np.where(counted, weights, 0)
    together = weights.sum() if reduction is Reduction.MEAN else 1
    weight = 1 / together if together else 0.0
    loss = losses if reduction is Reduction.NONE else (losses.sum() if weights.any() else 0) * weight
    return loss, top, total, weight


@cross_entropy_class.counted
def _(t):
    reduction = t.attrs["reduction"]
    if reduction is Reduction.NONE:
        return None
    return count_rows(t.src[1], t.attrs["ignore_index"], t.src[2], reduction is Reduction.MEAN)


def count_rows(targets: Tensor, ignored: int, class_weights: Tensor | None, mean: bool) -> Counted:
    """What `Op.counted` says of a loss."""

    def number(values):
        return int(np.count_nonzero(values != ignored))

    def weight(values):
        if class_weights is None:
            return number(values)
        return float(class_weights.numpy()[values[values != ignored]].sum())

    return targets, number, weight if mean else None


@op(inplace=("logits",))
def cross_entropy_class_back(
    dloss, logits, targets: Int, top, total, weight, dlse=None, class_weights=None, *, ignore_index: int = -100,
    label_smoothing: float = 0.0,
):  # fmt: skip
    """The gradient of `cross_entropy_class`, 0 in ignored rows:

    dloss * weight * (p * sum of the labels - labels) + dlse * p, where p is softmax(logits) = exp(logits - top) /
    total, the labels are (1 - label_smoothing) * class weight at the target and label_smoothing / classes * class
    weight everywhere, and `dlse` is the gradient by the log of the sum of exp(logits).  dloss is a scalar, or one for
    each row.
    """
    _check_classes(logits, targets, class_weights)
    ensure(dloss.shape in ((), targets.shape), "dloss must be a scalar, or have a value for each row of the logits")
    ensure(weight.shape == (), "weight must be a scalar")
    _check_rows(logits, top, total, dlse)
    return logits.spec


@cross_entropy_class_back.reference
def _(dloss, logits, targets, top, total, weight, dlse, class_weights, *, ignore_index, label_smoothing):
    counted = (targets != ignore_index)[..., None]
    _check_values(targets[counted[..., 0]], logits.shape[-1])
    _, own, even = _labels(logits, targets, class_weights, label_smoothing)
    p = _softmax(logits, top, total)
    is_target = np.arange(logits.shape[-1]) == targets[..., None]
    others = np.where(is_target, 0, p).sum(axis=-1, keepdims=True)  # p - 1 would be rounding where p is nearly 1
    weights = own.sum(axis=-1, keepdims=True)
    less = weights * np.where(is_target, np.where(p > 0.5, -others, p - 1), p) + (p * np.sum(even) - even)
    dlogits = _along_rows(dloss) * weight * less
    return np.where(counted, dlogits if dlse is None else dlogits + dlse[..., None] * p, 0)


@cross_entropy_class_back.grad
def _(t, d, *, needs):
    dloss, logits, targets, top, total, weight, dlse, class_weights = t.src
    zero, one = tensor(0.0), tensor(1.0)
    of_rows = (*top.shape, 1)

    def again(dloss, weight, dlse=None):
        return cross_entropy_class_back(dloss, logits, targets, top, total, weight, dlse, class_weights, **t.attrs)

    def row_sums(x):
        return reshape(sum_rows(x), top.shape)

    p = again(zero, one, broadcast_to(reshape(one, (1,) * top.ndim), shape=top.shape))  # in rows that count
    less = row_sums(mul(d, again(one, one)))  # p * sum of the labels - labels
    factor = mul(mul(dloss, weight), _label_sums(t))
    dp = mul(d, p)
    through_p = mul(dp, reshape(factor if dlse is None else add(factor, dlse), of_rows))
    return (
        (mul(less, weight) if dloss.shape else mul(sum_of(less), weight)), through_p, None, None,
        neg(div(row_sums(through_p), total)), sum_of(mul(less, dloss)), row_sums(dp) if needs[6] else None, None,
    )  # fmt: skip


def _label_sums(t: Tensor) -> Tensor:
    """Of a gradient's node: what the labels of each row add up to; of all rows, if that is 1 each."""
    _, _, targets, *_, class_weights = t.src
    smoothing = t.attrs["label_smoothing"]
    assert targets is not None
    if class_weights is None:
        return broadcast_to(tensor(1.0), shape=targets.shape)
    counted = not_equal(targets, tensor(t.attrs["ignore_index"]))
    ids = reshape(where(counted, targets, tensor(0)), (-1,))
    weights = reshape(take_along_axis(class_weights, ids, axis=0), targets.shape)
    return add(
        scale(weights, factor=1 - smoothing),
        scale(sum_of(class_weights), factor=smoothing / max(1, class_weights.size)),
    )


def _labels(logits, targets, class_weights, smoothing):
    """What each target weighs, and what the labels are made of: at the targets, and everywhere."""
    classes = logits.shape[-1]
    weights = np.ones(classes) if class_weights is None else class_weights
    at_target = np.where(np.arange(classes) == targets[..., None], weights, 0)
    even = smoothing / max(1, classes) * weights if smoothing else np.zeros(classes)
    return at_target.sum(axis=-1), (1 - smoothing) * at_target, even


def _along_rows(dloss):
    """One number, or one for each row, to multiply rows with."""
    return np.asarray(dloss)[..., None] if np.ndim(dloss) else dloss


def _check_classes(logits, targets, class_weights) -> None:
    ensure(logits.ndim >= 1, "logits need an axis of classes")
    ensure(
        targets.shape == logits.shape[:-1],
        f"targets must have the shape {logits.shape[:-1]}, a class for each row of the logits",
    )
    ensure(
        class_weights is None or class_weights.shape == logits.shape[-1:],
        f"class_weights must have the shape {logits.shape[-1:]}, one for each class",
    )


def _check_values(targets: np.ndarray, classes: int) -> None:
    wrong = (targets < 0) | (targets >= classes)
    if wrong.any():
        raise IndexRangeError(f"targets holds {targets[wrong].flat[0]}, and must be from 0 to {classes - 1}")


# -- probabilities ------------------------------------------------------------------------------------------


@op
def cross_entropy_soft(logits, labels, *, reduction: Reduction = Reduction.MEAN):
    """Cross entropy with probabilities: -sum(labels * log_softmax(logits)) of each row, their sum, or their mean.

    A label of 0 counts for nothing, also where the logit is -inf.

    Returns, packed: the loss; and for each row its largest logit `top` and the sum `total` of exp(logits - top).
    """
    _check_labels(logits, labels)
    row = Spec(logits.shape[:-1])
    return Pack(loss=row if reduction is Reduction.NONE else Spec(()), top=row, total=row)


@cross_entropy_soft.grad
def _(t, dloss, dtop, dtotal, *, needs):  # of the top see `_through`
    logits, labels = t.src
    (_, top, total), mean = t.parts, t.attrs["reduction"] is Reduction.MEAN
    dlogits = dlabels = None
    if needs[0]:
        dlse = _through(dtotal, total)
        dlogits = cross_entropy_soft_back(_or_zero(dloss), logits, labels, top, total, dlse, mean=mean)
    if needs[1] and dloss is not None:
        row = scale(dloss, factor=1 / max(1, top.size)) if mean else dloss
        of_row = (*top.shape, 1)
        less = add(sub(reshape(top, of_row), logits), log(reshape(total, of_row)))
        dlabels = mul(less, reshape(row, of_row) if row.shape else row)
    return dlogits, dlabels


@cross_entropy_soft.reference
def _(logits, labels, *, reduction):
    top, total = _top_and_total(logits)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(labels == 0, 0, labels * ((top[..., None] - logits) + np.log(total)[..., None]))
    if reduction is Reduction.NONE:
        return terms.sum(axis=-1), top, total
    return terms.sum() / (max(1, top.size) if reduction is Reduction.MEAN else 1), top, total


@op(inplace=("logits", "labels"))
def cross_entropy_soft_back(dloss, logits, labels, top, total, dlse=None, *, mean: bool = True):
    """The gradient of `cross_entropy_soft` by the logits:

    dloss * (p * sum of labels - labels) / (number of rows if `mean`) + dlse * p, where p is softmax(logits) =
    exp(logits - top) / total and `dlse` the gradient by the log of the sum of exp(logits).  dloss is a scalar, or one
    for each row.
    """
    _check_labels(logits, labels)
    ensure(dloss.shape in ((), top.shape), "dloss must be a scalar, or have a value for each row of the logits")
    _check_rows(logits, top, total, dlse)
    return logits.spec


@cross_entropy_soft_back.reference
def _(dloss, logits, labels, top, total, dlse, *, mean):
    p = _softmax(logits, top, total)
    factor = _along_rows(dloss) / (max(1, top.size) if mean else 1)
    dlogits = factor * (p * labels.sum(axis=-1, keepdims=True) - labels)
    return dlogits if dlse is None else dlogits + dlse[..., None] * p


@cross_entropy_soft_back.grad
@through
def _(dloss, logits, labels, top, total, dlse, *, mean):
    of_row = (*top.shape, 1)
    p = div(exp(sub(logits, reshape(stop_gradient(top), of_row))), reshape(total, of_row))
    factor = scale(dloss, factor=1 / max(1, top.size)) if mean else dloss
    dlogits = mul(sub(mul(p, sum_rows(labels)), labels), reshape(factor, of_row) if factor.shape else factor)
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
