"""Programs called like functions, on memory that is given with each call."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.arena import Arena
from ..core.native import default_threads
from ..core.program import Program
from ..core.tensor import Tensor
from .session import Session


class Bound:
    """A program whose inputs and results lie where each call says.

    Any number of threads may call it, and what it calls itself: each call has tables and an arena of its own, which
    stay for the next one.

    Args:
        program: it must not change any more.
        cells: leaves, results, parts of packed results, and what the program is given: no views.
    """

    def __init__(self, program: Program, cells: Sequence[Tensor]) -> None:
        self._program, self._cells = program, {cell: slot for slot, cell in enumerate(cells)}
        self._idle: list[Session] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        """Run every node, with the GIL released.

        Args:
            addresses: of contiguous arrays, in the order of the cells, aligned to their elements; of one without
                elements any number but 0.

        Raises:
            IndexRangeError, KernelError, KeyboardInterrupt: as of `Graph.compute`.
        """
        try:
            session = self._idle.pop()
        except IndexError:
            session = self.session()
        try:
            session.call(addresses, default_threads())
        finally:
            self._idle.append(session)

    def session(self) -> Session:
        """The program with tables and an arena of its own, the caller's."""
        return Session(self._program, borrowed=self._cells, arena=Arena())
