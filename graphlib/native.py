"""The C module: where it was built, its handles; where not, what that means."""

from __future__ import annotations

import os
import warnings
from functools import cache

from .errors import GgradError, NativeModuleWarning

try:
    from ._native import ffi, lib
except ImportError:
    ffi = lib = None


@cache
def default_backend() -> str:
    """ "native", or "reference" with one warning where the C module was not built."""
    if lib is not None:
        return "native"
    warnings.warn(
        "ggrad was installed without its C kernels (no compiler was found); graphs run through the "
        "NumPy references: right, and slow. Install a C compiler and install ggrad again",
        NativeModuleWarning,
        stacklevel=3,
    )
    return "reference"


def default_threads() -> int:
    """GGRAD_NUM_THREADS, or this process's share of the cores that it may use: all of them, unless it was told."""
    setting = os.environ.get("GGRAD_NUM_THREADS")
    if setting is None:
        return _share or cores()
    if not setting.isdecimal() or int(setting) < 1:
        raise GgradError(f"GGRAD_NUM_THREADS must be a positive number, not {setting!r}")
    return int(setting)


@cache
def cores() -> int:
    """How many this process may use."""
    return lib.gg_default_threads() if lib is not None else os.cpu_count() or 1


def set_default_threads(share: int | None) -> None:
    """Leave cores to other processes on this machine; None: to nobody."""
    global _share
    _share = share


_share: int | None = None


def show_config() -> str:
    """What this installation runs on, as readable text."""
    if lib is None:
        return "backend: reference (the C module was not built)"
    return "\n".join([
        "backend: native",
        f"instruction set: {ffi.string(lib.gg_isa()).decode()}",
        f"threads: {default_threads()}",
    ])  # fmt: skip
