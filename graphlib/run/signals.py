"""Signals while C runs: Python's handlers are called between pieces of work, and what they raise stops the run."""

from __future__ import annotations

import threading
from typing import Any

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


class signals_heard:
    """Gives what gg_run asks whether to stop: NULL on other threads than the main one, on which no handler runs.

    What a handler raised comes out at the end, whether the run was stopped by it or was too far for that.
    """

    def __enter__(self) -> Any:
        self._raised: list[BaseException] | None = None
        if threading.current_thread() is not threading.main_thread():
            return ffi.NULL
        self._raised = []
        _runs.append(self._raised)
        return lib.gg_python_stops

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if self._raised is not None:
            _runs.pop()
            if self._raised and error is None:
                raise self._raised[0]
