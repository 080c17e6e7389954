"""Signals while C runs: Python's handlers are called between pieces of work, and what they raise stops the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.native import define_for_c, ffi, lib

_runs: list[list[BaseException]] = []  # of the main thread, a handler's own runs last: what handlers raised in each


def _stops() -> int:
    """Called by C on the main thread.  As a function begins, Python calls the handlers of signals that are pending: so
    this one need do nothing, and what they raise seems to come from it."""
    return bool(_runs[-1])


def _note(kind: type, error: BaseException, traceback: object) -> int:
    _runs[-1].append(error)
    return True


define_for_c("gg_python_stops", _stops, error=1, onerror=_note)


@contextmanager
def signals_heard() -> Iterator:
    """Gives what gg_run asks whether to stop: NULL on other threads than the main one, on which no handler runs.

    What a handler raised comes out at the end, whether the run was stopped by it or was too far for that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield ffi.NULL
        return
    raised: list[BaseException] = []
    _runs.append(raised)
    try:
        yield lib.gg_python_stops
    finally:
        _runs.pop()
    if raised:
        raise raised[0]
