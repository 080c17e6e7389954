"""No op is less exact than its declared bound, on any instruction set, and the docs say what the bounds are."""

from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import registry
from ggrad.testing import accuracy, check
from ggrad.testing.accuracy import Probe, measure, relative_errors

PROBES = accuracy.probes()
ELEMENTWISE = "abs ceil clamp cos elu exp expm1 floor gelu gelu_erf gelu_quick hardsigmoid hardswish leaky_relu log neg"
ELEMENTWISE += " relu round scale sgn sigmoid silu sin softplus sqr sqrt step tanh trunc xielu"


@pytest.mark.native
@pytest.mark.parametrize("name", sorted({probe.op.partition(",")[0] for probe in PROBES}))
def test_no_op_is_worse_than_its_bound(name):
    for row in accuracy.table([name]):
        assert row.passed, row.cells()


def test_every_function_of_one_element_and_every_gated_unit_is_measured():
    measured = {probe.op for probe in PROBES}
    assert set(ELEMENTWISE.split()) <= measured
    units = {name.removesuffix("_back") for name in gg.ops.glu.__all__}
    # functions that are made of other ops have the accuracy of these
    functions = {name for name in gg.ops.unary.__all__ if not name.endswith("_back") and name in registry}
    assert units | functions <= measured


def test_a_bound_that_is_wide_has_a_reason():
    assert all(probe.reason for probe in PROBES if max(probe.forward, probe.back) > accuracy.ROUNDINGS)


def test_points_reach_from_denormals_to_the_largest_on_both_sides():
    x = accuracy.points()
    assert x.min() < -1e38 and x.max() > 1e38 and 0 in x
    assert (np.abs(x[x != 0]) < 1e-40).sum() >= 20 and ((x > 0.999) & (x < 1)).any()


def test_errors_are_relative_also_in_tails():
    got = np.array([1.5e-30, 0, np.inf, np.nan, 1.0, 1.4e-45, np.inf], np.float32)
    exact = np.array([1e-30, 1e-20, 1e39, np.nan, np.inf, 2.1e-45, 3e38])
    errors = relative_errors(got, exact)
    np.testing.assert_allclose(errors[:2], [0.5, 1], rtol=1e-6)
    assert errors[2] == errors[3] == 0 and errors[4] == np.inf and errors[5] < 1e-7 and errors[6] == np.inf


@pytest.mark.native
def test_a_slope_from_a_rounded_result_is_found():
    """1 - tanh(x)^2, with a tanh that was rounded to 1."""

    def one_minus_square(x):
        return gg.scale(gg.sqr(gg.tanh(x)), factor=-1, bias=1)

    row = measure(Probe("a bad slope", one_minus_square, [np.linspace(-12, 12, 101).astype(np.float32)]))
    assert row.forward.error > 0.01 and not row.passed


@pytest.mark.native
def test_the_program_prints_the_table_and_fails_beyond_a_bound(capsys, monkeypatch, tmp_path):
    assert check.main(["accuracy", "-o", "tanh", "-o", "elu"]) == 0
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["| elu", "| tanh"]
    path = tmp_path / "accuracy.md"
    assert check.main(["accuracy", "-o", "tanh", "--write", str(path)]) == 0 and "| tanh |" in path.read_text()
    tight = [Probe("tanh", gg.tanh, [accuracy.points()], forward=0.0)]
    monkeypatch.setattr(accuracy, "probes", lambda: tight)
    assert check.main(["accuracy"]) == 1 and "FAILED tanh" in capsys.readouterr().out
    assert check.main(["accuracy", "-o", "mul_mat"]) == 2


def test_the_docs_list_every_op_with_its_bounds():
    kept = (Path(__file__).parents[1] / "docs" / "accuracy.md").read_text()
    assert kept.startswith(accuracy.HEADER)
    listed = [line.strip("| ").split(" | ") for line in kept.splitlines() if line.startswith("| ")][2:]
    bounds = [(cells[0], cells[2], cells[4]) for cells in listed]
    assert bounds == [(p.op, f"{p.forward:.0e}", f"{p.back:.0e}") for p in PROBES], (
        "python -m ggrad.check accuracy --write docs/accuracy.md"
    )
