"""Where a node was made: the scope that the user has named, and the part of a training step that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from .errors import GraphError

T = TypeVar("T")

FORWARD, BACKWARD, STEP = PHASES = ("forward", "backward", "step")

here: ContextVar[tuple[str, str]] = ContextVar("here", default=("", FORWARD))  # of what is made now: scope and phase


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name the nodes that are made meanwhile, and those of their gradients, as parts of something.

        with gg.scope("block0"):
            with gg.scope("attention"):
                x = x + attention(x)  # block0/attention/...

    The names are seen in `print(graph)`, in profiles, plans, pictures and messages.

    Args:
        name: not empty.

    Raises:
        GraphError: the name is no string, or empty.
    """
    if not isinstance(name, str) or not name:
        raise GraphError(f"scope(): a name is a string that is not empty, not {name!r}")
    outer, phase = here.get()
    with made_in(f"{outer}/{name}" if outer else name, phase):
        yield


def in_phase(phase: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What `work` gives, whose nodes belong to this part of a training step; those made after it do not, even where an
    interrupt ends it."""

    def begun() -> T:
        here.set((here.get()[0], phase))
        return work(*args, **kwargs)

    return copy_context().run(begun)


@contextmanager
def made_in(scope: str, phase: str) -> Iterator[None]:
    """What is made meanwhile belongs there."""
    token = here.set((scope, phase))
    try:
        yield
    finally:
        here.reset(token)
