"""Learning rates: functions from the number of steps taken so far to the rate of the next one."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(lr: float, *, warmup: int = 0) -> Schedule:
    """`lr`, after `warmup` steps in which it grows from lr / warmup."""
    return lambda step: _warmed(lr, step, warmup)


def linear(lr: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """From `lr` after the warm-up straight down to `end` at `steps`, and `end` from there on."""
    return lambda step: _warmed(end + (lr - end) * (1 - _progress(step, steps, warmup)), step, warmup)


def cosine(lr: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """From `lr` after the warm-up along half a cosine to `end` at `steps`, and `end` from there on.

    Source: Loshchilov and Hutter 2016, arXiv:1608.03983.
    """
    return lambda step: _warmed(
        end + (lr - end) * 0.5 * (1 + math.cos(math.pi * _progress(step, steps, warmup))), step, warmup
    )


def _warmed(lr: float, step: int, warmup: int) -> float:
    return lr * (step + 1) / warmup if step < warmup else lr


def _progress(step: int, steps: int, warmup: int) -> float:
    """How much of the way from the end of the warm-up to `steps` lies behind: 0 to 1."""
    return min(1.0, max(0, step - warmup) / max(1, steps - warmup))
