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
    """GGRAD_NUM_THREADS, or the number of cores this process may use."""
    setting = os.environ.get("GGRAD_NUM_THREADS")
    if setting is None:
        return _cores()
    if not setting.isdecimal() or int(setting) < 1:
        raise GgradError(f"GGRAD_NUM_THREADS must be a positive number, not {setting!r}")
    return int(setting)


@cache
def _cores() -> int:
    return lib.gg_default_threads()


def instruction_sets() -> list[bytes]:
    """All that there are kernels for, weakest first; this CPU may lack some."""
    names: list[bytes] = []
    while (name := lib.gg_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name))
    return names


def show_config() -> str:
    """What this installation runs on, as readable text."""
    if lib is None:
        return "backend: reference (the C module was not built)"
    return "\n".join([
        "backend: native",
        f"instruction set: {ffi.string(lib.gg_isa()).decode()}",
        f"threads: {default_threads()}",
    ])  # fmt: skip
