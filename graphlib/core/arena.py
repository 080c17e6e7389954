"""The memory of runs: bytes for all results, and scratch of each thread, which graphs that take turns share."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import numpy as np

from .tensor import aligned_zeros
from .turns import Turn

PAGE = 4096  # bytes
NOTHING = np.empty(0, np.uint8)


class Shown(Protocol):
    """What a run in an arena shows of it.

    Attributes:
        arena: its bytes.
        whole: whether they are those of a run that has come to its end.
    """

    arena: np.ndarray
    whole: bool

    @property
    def is_lent(self) -> bool:
        """Whether somebody still holds what was lent, so that no run may write to it."""


class Arena:
    """Bytes for runs of one or several graphs, one run at a time: as many as the largest of them needs.

    Attributes:
        turn: of the graphs that share it.
        generation: another number when the results lie elsewhere.
    """

    def __init__(self) -> None:
        self.turn = Turn()
        self.generation = 0
        self._results, self._scratch = NOTHING, NOTHING
        self._shown: Shown | None = None
        self._all: WeakSet[Shown] = WeakSet()

    def results(self, nbytes: int) -> np.ndarray:
        """At least so many bytes, where they were before, unless these are too few or were lent."""
        lent = self._shown is not None and self._shown.is_lent
        if lent or self.generation == 0 or self._results.size < nbytes:
            for shown in self._all:  # nothing holds the former bytes but a borrower
                shown.whole, shown.arena = False, NOTHING
            self._shown, self._results = None, NOTHING
            self._results = aligned_zeros(nbytes)
            self.generation += 1
        return self._results

    def scratch(self, nbytes: int) -> np.ndarray:
        """So many bytes, from the beginning of a page on."""
        if self._scratch.size < nbytes:
            self._scratch = NOTHING
            raw = np.zeros(nbytes + PAGE, np.uint8)
            start = -raw.ctypes.data % PAGE
            self._scratch = raw[start : start + nbytes]
        return self._scratch[:nbytes]

    def show(self, values: Shown) -> None:
        """These are the values of the run that begins; those of another one are gone."""
        if self._shown is not None and self._shown is not values:
            self._shown.whole = False
        self._shown = values
        self._all.add(values)
