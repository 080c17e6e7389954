"""Random numbers of a graph: a seed that goes on from run to run, and a key for each op that draws from it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .dtype import I32
from .tensor import Tensor

STEP = 0x9E3779B9  # from one run's seed to the next: odd, so that all 2**32 are met, and far apart


class Rng(Tensor):
    """A seed for `dropout` and attention that is another one in each run: a leaf, an i32 scalar.

        rng = gg.Rng(seed=0)
        x = gg.dropout(x, rng, p=0.1)

    Each op that is given it has a key of its own, so no two draw the same numbers.  `compute` takes the next seed
    as a run begins; `compute(update=False)` and `evaluate` stay with the last one.  Its state is its value: a
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


class _Keys:
    """How many keys were drawn of each seed."""

    def __init__(self) -> None:
        self.of_tensors: WeakKeyDictionary[Tensor, int] = WeakKeyDictionary()
        self.of_numbers: dict[int, int] = {}

    def next(self, seed: Tensor | int) -> int:
        drawn: MutableMapping[Any, int] = self.of_tensors if isinstance(seed, Tensor) else self.of_numbers
        if not isinstance(seed, Hashable):
            return 0  # the op refuses what is no seed
        key = drawn.get(seed, 0)
        drawn[seed] = key + 1
        return key


_keys: ContextVar[_Keys] = ContextVar("keys", default=_Keys())  # noqa: B039  # one for all who build no function


def next_key(seed: Tensor | int) -> int:
    """Another number for each op that draws from this seed: 0, 1, 2, ... in the order in which they are made."""
    return _keys.get().next(seed)


@contextmanager
def keys_from_zero() -> Iterator[None]:
    """Keys begin anew, for a graph that is built again and must draw what it drew."""
    token = _keys.set(_Keys())
    try:
        yield
    finally:
        _keys.reset(token)
