"""Random numbers of a graph: a seed that goes on from run to run, and a key for each op that draws from it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .dtype import I32
from .tensor import Tensor

STEP = 0x9E3779B9  # from one run's seed to the next: odd, so that all 2**32 are met, and far apart


class Rng(Tensor):
    """A seed for `dropout` and attention that is another one in each run: a leaf, an i32 scalar.

        rng = gg.Rng(seed=0)
        x = gg.dropout(x, rng, p=0.1)

    Each op of a graph that is given it has a key of its own, so no two draw the same numbers.  `compute` takes the next
    seed as a run begins; `compute(update=False)` and `evaluate` stay with the last one.  Its state is its value: a
    checkpoint that is given it among the parameters saves it, and `Trainer` does so by itself.

    Attributes:
        held: while it is true, runs draw the same numbers as the last one.

    Raises:
        ValueError: the seed is negative.
    """

    __slots__ = ("held",)

    def __init__(self, seed: int = 0, *, name: str = "rng") -> None:
        super().__init__((), I32, (), name=name, role="rng")
        self.held = False
        self._go_to(int(np.random.SeedSequence(seed).generate_state(1)[0]))

    def advance(self, by: int = 1) -> None:
        """Take the next seed, or the one so many runs on."""
        if not self.held:
            self._go_to(self.memory().item() + STEP * by)

    def _go_to(self, state: int) -> None:
        self.memory()[...] = np.array(state % 2**32, np.uint32).view(np.int32)


UNKEYED = -1  # the key of an op that draws, until a graph numbers it


def give_keys(nodes: Iterable[Tensor], used: set[int]) -> None:
    """Number the nodes that draw random numbers and have no key: 0, 1, 2, ..., but for those in use.

    Args:
        nodes: in an order that is the same whenever a model is built again.
        used: keys of other nodes; those of these come to it.
    """
    drawing = [(t, draws) for t in nodes if t.op is not None and (draws := t.op.draws) is not None]
    used.update(key for t, draws in drawing if (key := draws.key(t.attrs)) != UNKEYED)
    key = 0
    for t, draws in drawing:
        if draws.key(t.attrs) == UNKEYED:
            while key in used:
                key += 1
            t.attrs = draws.with_key(t.attrs, key)
            used.add(key)
