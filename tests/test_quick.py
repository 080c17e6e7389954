"""`pytest -m quick`: one case of every op, its kernels beside the reference and its rule beside the quotient.

Of the engine it has tests of other files: differentiation, plans, waves, runs.  The rest of this file, which is not of
that selection, breaks every op on purpose and sees that it is noticed.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GgradError, GradientMismatch
from ggrad.core.op import part, registry
from ggrad.jit.callback import Callback
from ggrad.testing import compare_with_reference
from ggrad.testing.cases import CASES, RTOL
from ggrad.testing.check import gradients_of, node_of, results_of
from ggrad.testing.maker import Maker

NAMES = sorted(set(registry) - {part.name})
WITH_RULE = [op for op in NAMES if registry[op]._grad is not None]


def first_case(op: str) -> tuple[gg.Tensor, ...]:
    return results_of(next(iter(CASES[op].values())))


def check_kernels(op: str) -> None:
    """Of the op and of its gradient, on the instruction set in use."""
    results = first_case(op)
    found = gradients_of(results, Maker(seed=1)).values() if op in WITH_RULE else ()
    compare_with_reference(gg.Graph().build_forward_expand(*results, *found), threads=(2,), rtol=RTOL.get(op))


def check_rule(op: str) -> None:
    results = first_case(op)
    if any(t.param for t in gg.Graph().build_forward_expand(*results).leaves):
        gg.testing.check_gradients(lambda: results)


@pytest.mark.quick
@pytest.mark.native
@pytest.mark.parametrize("op", NAMES)
def test_kernels(op):
    check_kernels(op)


@pytest.mark.quick
@pytest.mark.parametrize("op", WITH_RULE)
def test_rules(op):
    check_rule(op)


# -- what is broken is noticed --------------------------------------------------------------------------------


def off_by_a_little(array: np.ndarray) -> np.ndarray:
    """The same but for its largest element: off by a hundredth, an integer by one."""
    array = np.array(array)
    array = array.astype(np.int64) if array.dtype == bool else array
    if array.size:
        at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(array))), array.shape)
        array[at] += 1 if array.dtype.kind in "iu" else 1e-2 * max(1e-3, abs(array[at]))
    return array


@pytest.mark.native
@pytest.mark.parametrize("op", NAMES)
def test_a_broken_kernel_is_noticed(op, monkeypatch):
    """A kernel that differs from the reference in one element is a reference that differs from the kernel in it.

    A kernel in plain Python may call the function that is the reference: there it is the kernel that is broken.
    """
    if node_of(first_case(op)).is_view:
        return  # it has no kernel
    kernel = registry[op].in_python
    owner, name = (kernel, "compute") if isinstance(kernel, Callback) else (registry[op], "_reference")
    right = getattr(owner, name)

    def wrong(*args, **attrs):
        result = right(*args, **attrs)
        if isinstance(result, tuple | list):
            return (off_by_a_little(result[0]), *result[1:])
        return off_by_a_little(result)

    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, GgradError)):
        check_kernels(op)


@pytest.mark.parametrize("op", WITH_RULE)
def test_a_broken_rule_is_noticed(op, monkeypatch):
    right, broken = registry[op]._grad, []

    @functools.wraps(right)
    def wrong(*args, **wanted):
        found = right(*args, **wanted)
        broken.extend(d for d in found if d is not None)
        return [None if d is None else gg.scale(d, factor=1.1, bias=0.1) for d in found]

    monkeypatch.setattr(registry[op], "_grad", wrong)
    try:
        check_rule(op)
    except GradientMismatch:
        return
    assert not broken, "a wrong gradient has not been noticed"


def test_the_engine_is_of_the_selection():
    """Differentiation, plans, waves and runs each have tests that `-m quick` runs."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "quick", "-p", "no:cacheprovider"]
    files = [f"tests/test_{name}.py" for name in ("autodiff", "plan", "waves", "graph", "architecture")]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, *files], capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONSAFEPATH": "1"}
    )
    for file in files:
        assert f"{file}::" in done.stdout, file
