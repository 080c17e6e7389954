"""Do tasks of one wave really not meet?  A run of one task at a time that sees which bytes each of them touches.

Threads are not needed for it, nor luck: of every wave each task is run alone, before all others and after all others,
on the same memory.  What it writes must be nobody else's, and what comes of it the same both times: so it read nothing
that others of the wave write.  A wave is run in its order, in reverse and from the middle outwards, to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..core.native import ffi
from ..core.tensor import Tensor
from ..graph import Graph
from ..run.session import Session
from .compare import session_of

Task = tuple[int, int]  # the step, and which of its tasks


class RaceError(AssertionError):
    """Two tasks that may run at the same time touch the same bytes; the message names their nodes."""


def check_races(graph: Graph) -> int:
    """Run the graph wave by wave, and every wave in many ways.  Leaves that it updates are updated once.

    Returns:
        How many pairs of tasks of one wave were kept apart.

    Raises:
        RaceError: a task writes what another one of its wave writes, or reads what another one writes.
    """
    return _Run(session_of(graph)).check()


class _Run:
    def __init__(self, session: Session) -> None:
        session.prepare(1)
        session.poison(1)
        self.session, self.steps = session, session.steps_in_c
        updated = {id(leaf): leaf for t in session.nodes for leaf in t.updates}.values()
        self.memory = [session.values.arena]  # type: ignore[union-attr]
        self.memory += [leaf.memory().reshape(-1).view(np.uint8) for leaf in updated]
        self.scratch = ffi.cast("char *", session.scratch.ctypes.data)

    def check(self) -> int:
        pairs = 0
        for wave in self.waves():
            before = self.look()
            self.run(wave)
            after = self.look()
            if len(wave) > 1:
                pairs += len(wave) * (len(wave) - 1) // 2
                self.check_wave(wave, before, after)
                self.put(after)
        return pairs

    def waves(self) -> Iterator[list[Task]]:
        i, n = 0, len(self.session.steps)
        while i < n:
            together = self.steps[i].together
            yield [(k, task) for k in range(i, i + together) for task in range(self.steps[k].tasks)]
            i += together

    def check_wave(self, wave: Sequence[Task], before: np.ndarray, after: np.ndarray) -> None:
        half = len(wave) // 2
        for order in (wave[::-1], [*wave[half:], *wave[:half][::-1]]):
            self.put(before)
            self.run(order)
            if (self.look() != after).any():
                raise RaceError(f"in another order the wave of {self.names(wave)} gives other bits")
        writer = np.full(before.size, -1)
        for i, task in enumerate(wave):
            self.put(before)
            self.run([task])
            alone = self.look()
            mine = np.flatnonzero(alone != before)
            taken = writer[mine]
            if (taken >= 0).any():
                other = wave[taken[taken >= 0][0]]
                raise RaceError(f"{self.names([other, task])}: both write the same bytes")
            writer[mine] = i
            others_first = after.copy()
            others_first[mine] = before[mine]
            self.put(others_first)
            self.run([task])
            if (self.look()[mine] != alone[mine]).any():
                raise RaceError(f"{self.names([task])} reads what another task of its wave writes")

    def run(self, tasks: Sequence[Task]) -> None:
        for step, task in tasks:
            self.session.scratch[...] = 0xFF
            call = self.steps[step].call
            call.kernel.run(call, self.steps[step].stage, task, task + 1, self.scratch)

    def look(self) -> np.ndarray:
        return np.concatenate(self.memory)

    def put(self, state: np.ndarray) -> None:
        at = 0
        for part in self.memory:
            part[...] = state[at : at + part.size]
            at += part.size

    def names(self, tasks: Sequence[Task]) -> str:
        nodes: dict[Tensor, None] = {}
        for step, _ in tasks:
            nodes[self.session.nodes[self.steps[step].call.index]] = None
        return " and ".join(t.label() for t in nodes)
