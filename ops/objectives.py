"""Losses other than cross entropy: of numbers, of probabilities, of vectors that should be near or far, of preferences.

They are made of other ops.  `reduction` is "mean" over all losses, "sum", or "none": they stay as they are.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from .elementwise import add, div, mul, neg, scale, sub
from .extremes import take_along_axis
from .layout import reshape, stop_gradient, transpose
from .loss import Reduction, as_tensor, cross_entropy_loss, reduced
from .matmul import mul_mat
from .reduce import sum as sum_of
from .select import equal, less, maximum, minimum, not_equal, where, xlogy
from .unary import abs, exp, logsigmoid, relu, softplus, sqr, sqrt

__all__ = [
    "bce_with_logits_loss", "contrastive_loss", "cosine_embedding_loss", "cosine_similarity", "dpo_loss", "huber_loss",
    "kl_div_loss", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss", "triplet_margin_loss",
]  # fmt: skip


def mse_loss(x: Tensor, y: Tensor | ArrayLike, *, reduction: Reduction | str = "mean") -> Tensor:
    """(x - y)^2.

    Args:
        x: f32; y: f32 of the same shape.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes differ, or there is no such reduction.
    """
    return _reduce("mse_loss", sqr(_difference("mse_loss", x, y)), reduction)


def l1_loss(x: Tensor, y: Tensor | ArrayLike, *, reduction: Reduction | str = "mean") -> Tensor:
    """|x - y|, whose gradient where both are equal is 0.

    Args:
        x: f32; y: f32 of the same shape.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes differ, or there is no such reduction.
    """
    return _reduce("l1_loss", abs(_difference("l1_loss", x, y)), reduction)


def huber_loss(x: Tensor, y: Tensor | ArrayLike, *, delta: float = 1.0, reduction: Reduction | str = "mean") -> Tensor:
    """(x - y)^2 / 2 up to |x - y| = delta, from there on straight: delta * (|x - y| - delta / 2).

    Args:
        x: f32; y: f32 of the same shape.
        delta: above 0.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes differ, delta is not above 0, or there is no such reduction.

    Source: Huber 1964, Robust Estimation of a Location Parameter.
    """
    _require_positive("huber_loss", delta=delta)
    size = abs(_difference("huber_loss", x, y))
    near = minimum(size, tensor(delta))  # near * (size - near / 2), whose slope is `near` on both sides
    return _reduce("huber_loss", mul(near, sub(size, scale(near, factor=0.5))), reduction)


def smooth_l1_loss(
    x: Tensor, y: Tensor | ArrayLike, *, beta: float = 1.0, reduction: Reduction | str = "mean"
) -> Tensor:
    """`huber_loss` with delta = beta, divided by beta: its slope is 1 from there on.

    Args:
        x: f32; y: f32 of the same shape.
        beta: above 0; at 0 it would be `l1_loss`.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes differ, beta is not above 0, or there is no such reduction.
    """
    _require_positive("smooth_l1_loss", beta=beta)
    return scale(huber_loss(x, y, delta=beta, reduction=reduction), factor=1 / beta)


def bce_with_logits_loss(
    logits: Tensor,
    targets: Tensor | ArrayLike,
    *,
    weight: Tensor | ArrayLike | None = None,
    pos_weight: Tensor | ArrayLike | None = None,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """-(targets * log(p) + (1 - targets) * log(1 - p)) with p = sigmoid(logits), exact also where p is nearly 0 or 1.

    Args:
        logits: f32; targets: f32 of the same shape, 0 to 1.
        weight: what each loss counts, broadcast over them.
        pos_weight: what log(p) counts beside log(1 - p), broadcast over the logits.
        reduction: "mean" over all elements, "sum" or "none".

    Raises:
        ShapeError: shapes do not fit, or there is no such reduction.
    """
    targets = as_tensor(targets)
    _require_same("bce_with_logits_loss", logits, targets)
    if pos_weight is None:
        losses = sub(softplus(logits), mul(logits, targets))
    else:
        positive = mul(mul(targets, as_tensor(pos_weight)), softplus(neg(logits)))
        losses = add(positive, mul(scale(targets, factor=-1.0, bias=1.0), softplus(logits)))
    if losses.shape != logits.shape:
        raise ShapeError(f"bce_with_logits_loss(logits={logits.spec}): pos_weight has more axes")
    return _reduce("bce_with_logits_loss", losses if weight is None else mul(losses, as_tensor(weight)), reduction)


def nll_loss(
    log_probs: Tensor,
    targets: Tensor | ArrayLike,
    *,
    class_weights: Tensor | ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """-log_probs at the targets.  `cross_entropy_loss` is the same of `log_softmax`, in one pass.

    Args:
        log_probs: f32 [..., classes].
        targets: i32 of the shape log_probs.shape[:-1], a class for each row.
        class_weights: f32 [classes], what each class counts; the mean is over these weights.
        ignore_index: rows with this class count for nothing.
        reduction: "mean" over the rows that count (0 if none does), "sum" or "none".

    Raises:
        ShapeError: shapes do not fit, or there is no such reduction.
        IndexRangeError: in the run, a target that is no class.
    """
    targets, reduction = as_tensor(targets), reduced("nll_loss", reduction)
    if targets.shape != log_probs.shape[:-1]:
        raise ShapeError(
            f"nll_loss(log_probs={log_probs.spec}, targets={targets.spec}): "
            f"targets must have the shape {log_probs.shape[:-1]}, a class for each row"
        )
    rows = (targets.size,)
    ids = reshape(targets, rows)
    counted = not_equal(ids, tensor(ignore_index))
    ids = where(counted, ids, tensor(0))
    if class_weights is None:
        weights = where(counted, tensor(1.0), tensor(0.0))
    else:
        weights = where(counted, take_along_axis(stop_gradient(as_tensor(class_weights)), ids, 0), tensor(0.0))
    chosen = take_along_axis(reshape(log_probs, (*rows, log_probs.shape[-1])), reshape(ids, (*rows, 1)), 1)
    losses = neg(mul(where(counted, reshape(chosen, rows), tensor(0.0)), weights))
    if reduction is Reduction.NONE:
        return reshape(losses, targets.shape)
    total = sum_of(losses)
    if reduction is Reduction.SUM:
        return total
    together = sum_of(weights)
    none = equal(together, tensor(0.0))
    return where(none, tensor(0.0), div(total, where(none, tensor(1.0), together)))


def kl_div_loss(
    log_probs: Tensor,
    targets: Tensor | ArrayLike,
    *,
    log_target: bool = False,
    reduction: Reduction | str = "batchmean",
) -> Tensor:
    """targets * (log(targets) - log_probs), element by element: what the distribution exp(log_probs) lacks of targets.

    Args:
        log_probs: f32 [batch, ...].
        targets: f32 of the same shape, probabilities, of which those of 0 count for nothing; or their logarithms.
        log_target: whether targets are logarithms.
        reduction: "batchmean", the sum over the size of the first axis, which is the mean divergence of its
            distributions; "mean" over all elements; "sum"; or "none".

    Raises:
        ShapeError: shapes differ, or there is no such reduction.

    Source: Kullback and Leibler 1951, On Information and Sufficiency.
    """
    targets = as_tensor(targets)
    _require_same("kl_div_loss", log_probs, targets)
    if log_target:
        losses = mul(exp(targets), sub(targets, log_probs))
    else:
        losses = sub(xlogy(targets, targets), mul(targets, log_probs))
    if reduction == "batchmean":
        return scale(sum_of(losses), factor=1 / max(1, log_probs.shape[0] if log_probs.shape else 1))
    return _reduce("kl_div_loss", losses, reduction)


def cosine_similarity(a: Tensor, b: Tensor, *, axis: int = -1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between a and b along an axis: a . b / (max(|a|, eps) max(|b|, eps)).

    Args:
        a, b: f32, broadcast.
        axis: the one of the vectors' elements, which the result does not have.
        eps: what short vectors are divided by.

    Raises:
        ShapeError: shapes do not fit, or there is no such axis.
    """
    return div(sum_of(mul(a, b), axis), mul(_length(a, axis, eps), _length(b, axis, eps)))


def cosine_embedding_loss(
    a: Tensor, b: Tensor, same: Tensor | ArrayLike, *, margin: float = 0.0, reduction: Reduction | str = "mean"
) -> Tensor:
    """1 - cosine of rows that should be alike, and what the cosine of others is above the margin.

    Args:
        a, b: f32 [..., K].
        same: [...], 1 where rows should be alike, -1 where not; f32 or i32.
        margin: -1 to 1.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes do not fit, or there is no such reduction.
    """
    _require_same("cosine_embedding_loss", a, b)
    cosine, same = cosine_similarity(a, b), as_tensor(same)
    if same.shape != cosine.shape:
        raise ShapeError(f"cosine_embedding_loss(a={a.spec}, same={same.spec}): same must be of shape {cosine.shape}")
    alike = less(tensor(0.0) if same.dtype.is_float else tensor(0), same)
    losses = where(alike, scale(cosine, factor=-1.0, bias=1.0), relu(scale(cosine, factor=1.0, bias=-margin)))
    return _reduce("cosine_embedding_loss", losses, reduction)


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    margin: float = 1.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """How much nearer than the negative, by less than the margin, the positive is to the anchor:
    max(0, |anchor - positive| - |anchor - negative| + margin), with Euclidean distances of rows.

    Args:
        anchor, positive, negative: f32 [..., K].
        eps: added to each difference, so that distances have gradients.
        swap: whether the positive's distance to the negative counts where it is the smaller one.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes differ, or there is no such reduction.

    Source: Balntas et al. 2016, Learning local feature descriptors with triplets.
    """
    _require_same("triplet_margin_loss", anchor, positive, negative)
    near, far = _distance(anchor, positive, eps), _distance(anchor, negative, eps)
    if swap:
        far = minimum(far, _distance(positive, negative, eps))
    return _reduce("triplet_margin_loss", relu(scale(sub(near, far), factor=1.0, bias=margin)), reduction)


def contrastive_loss(
    a: Tensor, b: Tensor, *, temperature: float | Tensor = 0.07, symmetric: bool = True, eps: float = 1e-8
) -> Tensor:
    """The cross entropy of picking for each row of `a` its own row of `b` among all, by the cosine of their angle over
    the temperature; the mean over rows, and over both directions if symmetric.  A scalar.

    Args:
        a, b: f32 [rows, K].
        temperature: a number above 0, or a scalar tensor, which may be a parameter.
        symmetric: whether rows of `b` pick theirs of `a` too.
        eps: what short vectors are divided by.

    Raises:
        ShapeError: shapes differ or are not [rows, K], or the temperature is not above 0.

    Sources: van den Oord et al. 2018, Representation Learning with Contrastive Predictive Coding; Radford et al. 2021,
    Learning Transferable Visual Models From Natural Language Supervision.
    """
    _require_same("contrastive_loss", a, b)
    if a.ndim != 2:
        raise ShapeError(f"contrastive_loss(a={a.spec}): a and b must be [rows, K]")
    if not isinstance(temperature, Tensor):
        _require_positive("contrastive_loss", temperature=temperature)
    left, right = (div(x, _length(x, -1, eps, keepdims=True)) for x in (a, b))
    logits = div(mul_mat(right, left), as_tensor(temperature))
    own = tensor(np.arange(a.shape[0], dtype=np.int32))
    loss = cross_entropy_loss(logits, own)
    return scale(add(loss, cross_entropy_loss(transpose(logits), own)), factor=0.5) if symmetric else loss


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | ArrayLike,
    reference_rejected: Tensor | ArrayLike,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """Direct preference optimization: -logsigmoid(beta * (chosen - reference_chosen - rejected + reference_rejected)).

    Args:
        chosen, rejected: f32 [...], the logarithm of the probability that the model gives to each whole answer: the sum
            over its tokens, minus a cross entropy with reduction "none".
        reference_chosen, reference_rejected: of the same shape, those of the model that training started from.
        beta: how dear it is to leave the reference; above 0.
        label_smoothing: the part of preferences that are thought to be the other way round, 0 to 0.5.
        reduction: "mean", "sum" or "none".

    Raises:
        ShapeError: shapes differ, or beta, label_smoothing or reduction is out of range.

    Source: Rafailov et al. 2023, Direct Preference Optimization: Your Language Model is Secretly a Reward Model;
    Mitchell 2023 for label_smoothing.
    """
    reference_chosen, reference_rejected = as_tensor(reference_chosen), as_tensor(reference_rejected)
    _require_same("dpo_loss", chosen, rejected, reference_chosen, reference_rejected)
    _require_positive("dpo_loss", beta=beta)
    if not 0 <= label_smoothing <= 0.5:
        raise ShapeError(f"dpo_loss(): label_smoothing must be from 0 to 0.5, not {label_smoothing!r}")
    margin = scale(sub(sub(chosen, rejected), sub(reference_chosen, reference_rejected)), factor=beta)
    losses = neg(logsigmoid(margin))
    if label_smoothing:
        other = neg(logsigmoid(neg(margin)))
        losses = add(scale(losses, factor=1 - label_smoothing), scale(other, factor=label_smoothing))
    return _reduce("dpo_loss", losses, reduction)


# -- helpers ------------------------------------------------------------------------------------------------


def _reduce(who: str, losses: Tensor, reduction: Reduction | str) -> Tensor:
    reduction = reduced(who, reduction)
    if reduction is Reduction.NONE:
        return losses
    total = sum_of(losses)
    return total if reduction is Reduction.SUM else scale(total, factor=1 / max(1, prod(losses.shape)))


def _difference(who: str, x: Tensor, y: Tensor | ArrayLike) -> Tensor:
    y = as_tensor(y)
    _require_same(who, x, y)
    return sub(x, y)


def _require_same(who: str, *xs: Tensor) -> None:
    if any(x.shape != xs[0].shape for x in xs):
        raise ShapeError(f"{who}(): shapes {_listed(x.shape for x in xs)} differ; gg.broadcast_to makes them equal")


def _listed(shapes) -> str:
    return " and ".join(str(shape) for shape in shapes)


def _require_positive(who: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ShapeError(f"{who}(): {name} must be above 0, not {number!r}")


def _length(x: Tensor, axis: int | Sequence[int], eps: float, *, keepdims: bool = False) -> Tensor:
    """At least eps."""
    return sqrt(maximum(sum_of(sqr(x), axis, keepdims=keepdims), tensor(eps * eps)))


def _distance(a: Tensor, b: Tensor, eps: float) -> Tensor:
    return sqrt(sum_of(sqr(scale(sub(a, b), factor=1.0, bias=eps)), -1))
