"""Connectionist temporal classification: the loss of a sequence of labels that is shorter than that of predictions."""

import numpy as np

from ..core.dtype import F32
from ..core.errors import IndexRangeError
from ..core.op import Int, ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .elementwise import div, scale
from .layout import cast
from .loss import Reduction, as_tensor, reduced
from .reduce import sum as sum_of
from .select import equal, maximum, where

__all__ = ["ctc", "ctc_back", "ctc_loss"]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    reduction: Reduction | str = "mean",
) -> Tensor:
    """-log of the probability of the targets: of all paths, one class at each time, that are the targets once classes
    repeated at successive times are one and blanks are left out.

    Args:
        log_probs: f32 [batch, time, classes], as `log_softmax` gives them.
        targets: i32 [batch, labels], no blanks among them; what is beyond a target's length is not looked at.
        input_lengths, target_lengths: i32 [batch].
        blank: the class that is no label.
        zero_infinity: whether the loss of targets that do not fit into their time is 0.  Else it is infinite; its
            gradient is 0 in any case.
        reduction: "mean" over the batch of losses over their target's length, "sum", or "none": [batch].

    Raises:
        ShapeError: shapes do not fit, or blank or reduction is out of range.
        IndexRangeError: in the run, a length or a label out of range.

    Source: Graves et al. 2006, Connectionist Temporal Classification.
    """
    reduction = reduced("ctc_loss", reduction)
    targets, input_lengths, target_lengths = (as_tensor(x) for x in (targets, input_lengths, target_lengths))
    losses = ctc(log_probs, targets, input_lengths, target_lengths, blank=blank)
    if zero_infinity:
        losses = where(equal(losses, np.inf), 0.0, losses)
    if reduction is Reduction.NONE:
        return losses
    if reduction is Reduction.SUM:
        return sum_of(losses)
    lengths = maximum(cast(target_lengths, dtype=F32), tensor(1.0))
    return scale(sum_of(div(losses, lengths)), factor=1 / max(1, losses.size))


@op
def ctc(log_probs, targets: Int, input_lengths: Int, target_lengths: Int, *, blank: int = 0):
    """The losses of `ctc_loss`, one for each of the batch: f32 [batch].

    Source: Graves et al. 2006, Connectionist Temporal Classification.
    """
    _check(log_probs, targets, input_lengths, target_lengths, blank)
    return Spec(input_lengths.shape)


@ctc.grad
def _(t, dlosses):
    return ctc_back(dlosses, *t.src, **t.attrs), None, None, None


@op
def ctc_back(dlosses, log_probs, targets: Int, input_lengths: Int, target_lengths: Int, *, blank: int = 0):
    """The gradient of `ctc` by log_probs: minus how probable it is, of all paths of the targets, to have each class at
    each time, times dlosses [batch].  0 where the loss is infinite, and beyond the end of each input.

    Source: Graves et al. 2006, Connectionist Temporal Classification.
    """
    _check(log_probs, targets, input_lengths, target_lengths, blank)
    ensure(dlosses.shape == input_lengths.shape, f"dlosses must be {input_lengths.shape}")
    return log_probs.spec


@ctc.reference
def _(log_probs, targets, input_lengths, target_lengths, *, blank):
    found = []
    for b in _sequences(log_probs, targets, input_lengths, target_lengths, blank):
        alpha, _ = _paths(*b)
        found.append(-np.logaddexp.reduce(alpha[-1][-2:]) if len(alpha) else (0.0 if len(b[1]) == 1 else np.inf))
    return np.array(found)


@ctc_back.reference
def _(dlosses, log_probs, targets, input_lengths, target_lengths, *, blank):
    out = np.zeros(log_probs.shape)
    for b, (seen, states) in enumerate(_sequences(log_probs, targets, input_lengths, target_lengths, blank)):
        alpha, beta = _paths(seen, states)
        if not len(alpha) or np.isinf(loss := np.logaddexp.reduce(alpha[-1][-2:])):
            continue
        for t in range(len(alpha)):
            np.subtract.at(out[b, t], states, dlosses[b] * np.exp(alpha[t] + beta[t] - loss))
    return out


def _check(log_probs, targets, input_lengths, target_lengths, blank: int) -> None:
    ensure(log_probs.ndim == 3, "log_probs must be [batch, time, classes]")
    batch, _, classes = log_probs.shape
    ensure(targets.ndim == 2 and targets.shape[0] == batch, f"targets must be [{batch}, labels]")
    ensure(
        input_lengths.shape == target_lengths.shape == (batch,), f"input_lengths and target_lengths must be ({batch},)"
    )
    ensure(0 <= blank < max(1, classes), f"blank={blank} must be from 0 to {classes - 1}")


def _sequences(log_probs, targets, input_lengths, target_lengths, blank):
    """Of each of the batch its log_probs, and the states that its paths go through: labels between blanks."""
    for name, lengths, most in (
        ("input_lengths", input_lengths, log_probs.shape[1]), ("target_lengths", target_lengths, targets.shape[1]),
    ):  # fmt: skip
        if (wrong := lengths[(lengths < 0) | (lengths > most)]).size:
            raise IndexRangeError(f"{name} holds {wrong[0]}, and must be from 0 to {most}")
    for seen, labels, time, n in zip(log_probs, targets, input_lengths, target_lengths, strict=True):
        if (wrong := labels[:n][(labels[:n] < 0) | (labels[:n] >= log_probs.shape[2])]).size:
            raise IndexRangeError(f"targets holds {wrong[0]}, and must be from 0 to {log_probs.shape[2] - 1}")
        states = np.full(2 * n + 1, blank)
        states[1::2] = labels[:n]
        yield seen[:time], states


def _paths(seen, states):
    """For each time and state the log of how probable all beginnings of paths are that are there then, and all ends
    that go on from there."""
    skips = np.zeros(len(states), bool)  # from two states before
    skips[3::2] = states[3::2] != states[1:-2:2]
    time, n = len(seen), len(states)
    alpha, beta = np.full((time, n), -np.inf), np.full((time, n), -np.inf)
    for t in range(time):
        for s in range(n):
            before = [0.0 if s < 2 else -np.inf] if t == 0 else alpha[t - 1, max(0, s - 1 - skips[s]) : s + 1]
            alpha[t, s] = np.logaddexp.reduce(before) + seen[t, states[s]]
    for t in reversed(range(time)):
        for s in range(n):
            if t == time - 1:
                beta[t, s] = 0.0 if s >= n - 2 else -np.inf
                continue
            end = s + 2 + bool(s + 2 < n and skips[s + 2])
            beta[t, s] = np.logaddexp.reduce(beta[t + 1, s:end] + seen[t + 1, states[s:end]])
    return alpha, beta
