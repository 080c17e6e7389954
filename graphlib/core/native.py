"""The C module: where it was built, its handles; where not, what that means."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .errors import GgradError, NativeModuleWarning

try:
    from .._native import ffi, lib
except ImportError:
    ffi = lib = None


def built() -> bool:
    """Whether the C module is there."""
    return lib is not None


def define_for_c(name: str, function: Callable, **options: Any) -> None:
    """Give C a function of Python's that it calls by this name; nothing where there is no C module."""
    if built():
        ffi.def_extern(name=name, **options)(function)


@cache
def default_backend() -> str:
    """ "native", or "reference" with one warning where the C module was not built."""
    if built():
        return "native"
    warnings.warn(
        "ggrad was installed without its C kernels (no compiler was found); graphs run through the "
        "NumPy references: right, and slow. Install a C compiler and install ggrad again",
        NativeModuleWarning,
        stacklevel=4,
    )
    return "reference"


def default_threads() -> int:
    """GGRAD_NUM_THREADS, or this process's share of the cores that it may use now: all, unless others have some."""
    setting = os.environ.get("GGRAD_NUM_THREADS")
    if setting is None:
        return max(1, _within_quota(_allowed_cores()) // _sharing)
    if not setting.isdecimal() or int(setting) < 1:
        raise GgradError(f"GGRAD_NUM_THREADS must be a positive number, not {setting!r}")
    return int(setting)


def _allowed_cores() -> int:
    """Asked for each run: a program may bind itself to other cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _within_quota(cores: int) -> int:
    """The cores that the limits of the process's control groups leave of so many."""
    return lib.gg_threads_for(cores, b"") if built() else cores


def check_environment() -> None:
    """Raise GgradError if GGRAD_ISA is set to what is no instruction set."""
    asked = os.environ.get("GGRAD_ISA")
    if asked is None or not built():
        return
    known = [name.decode() for name in instruction_sets()]
    if asked not in known:
        raise GgradError(f"GGRAD_ISA must be one of {', '.join(known)}, not {asked!r}")


def share_cores(processes: int) -> None:
    """Let so many processes, this one among them, have equal parts of the cores that each of them may use."""
    global _sharing
    _sharing = processes


_sharing = 1


def struct_dtype(name: str) -> np.dtype:
    """NumPy's record for a struct of the C interface, addresses as u8; an empty one where C was not built."""
    return _dtype(ffi.typeof(name)) if built() else np.dtype([])


def _dtype(ctype) -> np.dtype:
    if ctype.kind == "struct":
        fields = [(name, field.offset, _dtype(field.type)) for name, field in ctype.fields]
        names, offsets, formats = zip(*fields, strict=True)
        size = ffi.sizeof(ctype)
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
    if ctype.kind == "array":
        return np.dtype((_dtype(ctype.item), ctype.length))
    if ctype.kind in ("pointer", "function"):
        return np.dtype(f"u{ffi.sizeof('void *')}")
    if ctype.kind == "enum":
        return np.dtype(f"i{ffi.sizeof(ctype)}")
    return np.dtype({"float": "f4", "double": "f8"}.get(ctype.cname) or ctype.cname.removesuffix("_t"))


def instruction_sets() -> list[bytes]:
    """All that there are kernels for, weakest first; this CPU may lack some."""
    names: list[bytes] = []
    while (name := lib.gg_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name))
    return names


def show_config() -> str:
    """What this installation runs on, as readable text."""
    if not built():
        return "backend: reference (the C module was not built)"
    return "\n".join([
        "backend: native",
        f"instruction set: {ffi.string(lib.gg_isa()).decode()}",
        f"threads: {default_threads()}",
    ])  # fmt: skip
