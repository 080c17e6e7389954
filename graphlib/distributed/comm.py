"""Groups of ranks, and what they tell each other in NumPy arrays: over MPI, among threads of one process, or alone.

Everything follows from `Comm.exchange`; over MPI the calls that carry arrays are MPI's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np

from ..core.errors import DistributedError

T = TypeVar("T")


class Comm:
    """A group of ranks.  This one is a single rank, which needs no MPI.

    All ranks of a group make the same calls in the same order.  Arrays come back new, whatever their layout was.

    Attributes:
        rank: this process's number in the group, from 0.
        size: ranks in the group.
        ranks: the numbers that they have in the group that all began with.
    """

    def __init__(self, rank: int = 0, ranks: Sequence[int] = (0,)) -> None:
        self.rank, self.ranks, self.size = rank, tuple(ranks), len(ranks)

    def exchange(self, value: Any) -> list:
        """What each rank has given, in the order of ranks: anything that can be pickled, and is not changed after."""
        return [value]

    def split(self, color: int) -> Comm:
        """The group of those ranks of this one that give the same color, in the same order."""
        return Comm(0, self.ranks)

    def waiting(self, what: object):
        """A context in which this rank waits for others: said in messages when they do not come."""
        return nullcontext()

    def stop(self, message: str) -> None:
        """End the job, all ranks of it, with a message."""
        raise SystemExit(message)

    # -- arrays -------------------------------------------------------------------------------------------------

    def all_reduce(self, a: np.ndarray, *, ordered: bool = False) -> np.ndarray:
        """The sum over the ranks, the same bits on each.

        Args:
            ordered: have it depend on the values alone, and not on which rank brings which of them.
        """
        if self.size == 1:
            return np.array(a)
        return self._sum_in_order(a) if ordered else self._all_reduce(a)

    def all_gather(self, a: np.ndarray) -> np.ndarray:
        """Of every rank's array, all of one shape: [size, ...]."""
        return np.stack(self.exchange(np.array(a, order="C")))

    def reduce_scatter(self, a: np.ndarray) -> np.ndarray:
        """Of arrays [size, ...] the sum over the ranks of the row that belongs to this one."""
        return _total([b[self.rank] for b in self.exchange(np.array(a, order="C"))])

    def all_to_all(self, a: np.ndarray) -> np.ndarray:
        """Row i of an array [size, ...] goes to rank i; returns the rows that came, in the order of ranks."""
        return np.stack([b[self.rank] for b in self.exchange(np.array(a, order="C"))])

    def shift(self, a: np.ndarray, by: int) -> np.ndarray:
        """To rank + by, in a ring; returns what came from rank - by."""
        return np.array(self.exchange(np.array(a, order="C"))[(self.rank - by) % self.size])

    def broadcast(self, a: np.ndarray, root: int = 0) -> np.ndarray:
        """What rank `root` has."""
        return np.array(self.exchange(np.array(a, order="C") if self.rank == root else None)[root])

    # -- helpers ------------------------------------------------------------------------------------------------

    def _all_reduce(self, a: np.ndarray) -> np.ndarray:
        return _total(self.exchange(np.array(a, order="C")))

    def _sum_in_order(self, a: np.ndarray) -> np.ndarray:
        """Each rank adds up a part of the elements, in double precision and from the least value to the largest."""
        flat = np.ravel(a)
        rows = np.zeros((self.size, -(-flat.size // self.size)), flat.dtype)
        rows.reshape(-1)[: flat.size] = flat
        terms = np.sort(self.all_to_all(rows), axis=0)
        wide = np.float64 if terms.dtype.kind == "f" else np.int64
        total = _total([t.astype(wide) for t in terms]).astype(a.dtype)
        return self.all_gather(total).reshape(-1)[: flat.size].reshape(a.shape)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"


def _total(terms: list[np.ndarray]) -> np.ndarray:
    """Of two or more, pairs first: a tree that depends on their number alone."""
    while len(terms) > 1:
        paired = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = paired + terms[2 * len(paired) :]
    return np.array(terms[0])


# -- ranks that are threads ---------------------------------------------------------------------------------------


class _Meeting:
    """Where the threads of a group leave values for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class Simulated(Comm):
    """A rank that is a thread; see `simulate`."""

    def __init__(self, meeting: _Meeting, rank: int, ranks: Sequence[int], all_meetings: list[_Meeting]) -> None:
        super().__init__(rank, ranks)
        self._meeting, self._all_meetings = meeting, all_meetings

    def exchange(self, value: Any) -> list:
        self._meeting.values[self.rank] = value
        self._wait()
        found = list(self._meeting.values)
        self._wait()
        return found

    def split(self, color: int) -> Comm:
        colors = self.exchange(color)
        group = [r for r, c in enumerate(colors) if c == color]
        mine = _Meeting(len(group)) if group[0] == self.rank else None
        if mine is not None:
            self._all_meetings.append(mine)
        meeting = self.exchange(mine)[group[0]]
        return Simulated(meeting, group.index(self.rank), [self.ranks[r] for r in group], self._all_meetings)

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise DistributedError(f"rank {self.rank}: another rank has failed") from None


def simulate(size: int, program: Callable[[Comm], T]) -> list[T]:
    """Run a program on so many ranks that are threads of this process: to try it, and for tests.

    Args:
        program: called with the rank's `Comm`.

    Returns:
        What it gave on each rank.

    Raises:
        what the first rank that failed has raised; the others are told.
    """
    meetings = [_Meeting(size)]
    made: list[Any] = [None] * size
    raised: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            made[rank] = program(Simulated(meetings[0], rank, range(size), meetings))
        except BaseException as error:
            raised.append((rank, error))
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if raised:
        raise raised[0][1]
    return made
