"""Gradient checkpointing: parts of the forward pass once more, just before their gradients.

Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016).  The checkpoints cut the
forward nodes into segments.  Only checkpoints, and what a segment reads of earlier ones, are kept to the backward
pass; when it comes to a segment, new nodes compute the rest of it again, from the same inputs by the same kernels,
hence to the same bits.  The last segment ends where the backward pass begins, so it is not computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import GradientError
from ..core.op import part
from ..core.tensor import Tensor


class Segments:
    """The forward nodes cut at checkpoints, for a walk from the last node to the first."""

    def __init__(self, nodes: list[Tensor], checkpoints: Sequence[Tensor]) -> None:
        position = {t: i for i, t in enumerate(nodes)}
        for t in checkpoints:
            if t not in position:
                raise GradientError(f"{t.label()} cannot be a checkpoint: the loss is not computed by way of it")
        cuts = sorted({position[t] + 1 for t in checkpoints})
        self._nodes = nodes
        self._ranges = list(zip([0, *cuts[:-1]], cuts, strict=True)) if cuts else []
        self._position = position
        self._again: dict[Tensor, Tensor] = {}

    def value_of(self, t: Tensor) -> Tensor:
        """The node that holds the value of `t` in the backward pass; asked for in reverse order."""
        while self._ranges and self._position[t] < self._ranges[-1][1]:
            first, end = self._ranges.pop()
            self._again = again(self._nodes[first:end])
        return self._again.get(t, t)


def again(nodes: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The same nodes once more, reading one another; what they read from outside stays as it is.

    A node that updates a leaf is not repeated: its result stays.
    """
    copies: dict[Tensor, Tensor] = {}
    for t in nodes:
        if t.updates:
            continue
        if t.op is part:
            if t.src[0] in copies:
                copies[t] = copies[t.src[0]].parts[t.attrs["index"]]
            continue
        made = t.op.apply([s if s is None else copies.get(s, s) for s in t.src], dict(t.attrs))  # type: ignore[union-attr]
        copies[t] = made[0].base if t.parts else made
    return copies
