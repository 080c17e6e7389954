"""One thread at a time uses a graph; and who is inside of its run cannot use it, since that run would wait for ever."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from .errors import GraphError

T = TypeVar("T")


class Turn:
    """Of one graph."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: int | None = None  # the thread whose turn it is
        _all.add(self)

    def take(self, call: str, work: Callable[[], T]) -> T:
        """Do `work` when no other thread uses the graph.

        Raises:
            GraphError: this thread, or one that waits for it, is in the middle of using the graph.
        """
        me = threading.get_ident()
        if self.holder == me or self in _inside.turns:
            raise GraphError(
                f"{call}: called from inside of a run of the same graph, by a callback or a signal handler; "
                "that run would wait for this one, and this one for that. Another graph may be run there"
            )
        with self.lock:  # the lock itself, in C: no signal can come between taking it and what releases it
            try:
                self.holder = me
                return work()
            finally:
                self.holder = None


class _Inside(threading.local):
    def __init__(self) -> None:
        self.turns: list[Turn] = []


_inside = _Inside()
_all: weakref.WeakSet[Turn] = weakref.WeakSet()


class inside:
    """While a function of the user's is called from a run."""

    def __init__(self, turn: Turn | None) -> None:
        self.turn = turn

    def __enter__(self) -> None:
        if self.turn is not None:
            _inside.turns.append(self.turn)

    def __exit__(self, *_: object) -> None:
        if self.turn is not None:
            _inside.turns.pop()


def _unlock_in_child() -> None:
    """A lock that another thread held when the process forked would stay locked for ever in the child."""
    for turn in list(_all):
        turn.lock, turn.holder = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)
