"""The interpreter's collector of garbage that lies in rings, while many objects are made of which none does."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collections meanwhile: each would look at all nodes there are, and find nothing to free.

    Tensors, graphs and sessions are in no rings, so memory comes back without it.  Where it was off it stays off.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
