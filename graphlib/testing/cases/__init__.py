"""Graphs to try every op on, by family: what the tests and `python -m ggrad.check` ask their questions about.

A test fails when a public op has no case here.

A family's module holds CASES: {op name: {case name: build}}.  `build(m)` makes its inputs with the maker `m` and
returns the op's result, or the tuple of its parts:

    CASES = {"mul": {"a row": lambda m: gg.mul(m(3, 5), m(5))}}

The maker decides about values and layout, so that one case is tried plain, transposed, reversed, strided
and broadcast.  See `ggrad.testing.Maker`.  Among the cases of an op one has an empty input.

More names are understood:

    COMPOSED = {"dup": {...}}                    cases as above, of public functions that are made of ops
    NO_GRADIENT = {"clip_factor"}                ops with float results that have no gradient rule of their own
    RTOL = {"exp": 1e-5}                         what a kernel may be off, of the largest magnitude; with a reason
    NO_EMPTY = {"clip_factor"}                   ops that no empty input can be given to
    NO_TASKS = {"clip_factor"}                   ops that are one task at any size; others have a larger case
    PERF = {"mul": lambda m: gg.mul(m(1 << 22), m(1 << 22))}   graphs of a size that speed is measured on
"""

import importlib
import pkgutil
from collections.abc import Callable

CASES: dict[str, dict] = {}
COMPOSED: dict[str, dict] = {}
NO_GRADIENT: set[str] = set()
NO_EMPTY: set[str] = set()
NO_TASKS: set[str] = set()
RTOL: dict[str, float] = {}
PERF: dict[str, Callable] = {}

for _module in pkgutil.iter_modules(__path__):
    _family = importlib.import_module(f"{__name__}.{_module.name}")
    for _op, _cases in getattr(_family, "CASES", {}).items():
        CASES.setdefault(_op, {}).update(_cases)
    COMPOSED |= getattr(_family, "COMPOSED", {})
    NO_GRADIENT |= set(getattr(_family, "NO_GRADIENT", ()))
    NO_EMPTY |= set(getattr(_family, "NO_EMPTY", ()))
    NO_TASKS |= set(getattr(_family, "NO_TASKS", ()))
    RTOL |= getattr(_family, "RTOL", {})
    PERF |= getattr(_family, "PERF", {})
