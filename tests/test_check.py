"""`python -m ggrad.check` finds what is wrong with an op, and says so with its exit status."""

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from python_kernels import temporary_ops

import ggrad as gg
from ggrad import ops
from ggrad.core.errors import GgradError
from ggrad.core.op import registry
from ggrad.testing import check
from ggrad.testing.cases import CASES, COMPOSED
from ggrad.testing.check import Case, Composed

OPS = """
    import numpy as np
    import ggrad as gg

    @gg.op(layout="any")
    def checked_cube(x):
        '''x ** 3'''
        return x.spec

    @checked_cube.grad
    def _(t, dout):
        return (gg.mul(dout, gg.scale(gg.sqr(t.src[0]), factor={slope})),)

    @checked_cube.reference
    def _(x):
        return x * x * x

    @checked_cube.kernel
    def _(out, x):
        for i in range(out.size):
            out[i] = x[i] * x[i] * {last}

    CASES = {{"checked_cube": {{"a matrix": lambda m: checked_cube(m(3, 5))}}}}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module with an op, and forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(source, **values):
        name = f"ops_to_check_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source).format(**values))
        return name

    with temporary_ops():
        yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.native
@pytest.mark.parametrize(
    "slope, last, test, grad",
    [("3.0", "x[i]", 0, 0), ("3.0", "x[0]", 1, 0), ("2.9", "x[i]", 0, 1)],
    ids=["right", "wrong kernel", "wrong rule"],
)
def test_wrong_kernels_and_wrong_rules_are_told_apart(module, capsys, slope, last, test, grad):
    name = module(OPS, slope=slope, last=last)
    for question, status in (("test", test), ("grad", grad)):
        assert check.main([question, "-m", name, "-o", "checked_cube"]) == status
        out = capsys.readouterr().out
        assert f"{1 - status} passed, {status} failed in" in out
        assert ("FAILED checked_cube: a matrix" in out) == bool(status)
        sys.modules.pop(name)


@pytest.mark.native
def test_the_librarys_own_ops_pass(capsys):
    assert check.main(["test", "-o", "rms_norm", "-o", "permute"]) == 0
    assert check.main(["grad", "-o", "rms_norm", "-o", "argmax"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("0 failed" in line for line in lines)
    assert int(lines[1].split()[0]) > 0


PUBLIC = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name)) or name in registry]


def test_every_public_op_has_cases():
    missing = [name for name in PUBLIC if name not in CASES and name not in COMPOSED]
    assert not missing, f"no case in graphlib/testing/cases of {missing}"
    assert {*COMPOSED} <= {*PUBLIC} - {*registry}


@pytest.mark.native
def test_functions_made_of_ops_are_asked_by_name(capsys):
    names = [argument for name in ("pool_1d", "matmul", "arange") for argument in ("-o", name)]
    assert check.main(["test", *names]) == check.main(["grad", *names]) == 0
    tested, differentiated = capsys.readouterr().out.splitlines()
    assert tested.startswith("7 passed, 0 failed") and differentiated.startswith("5 passed, 0 failed")
    assert check.main(["perf", "-o", "matmul", "--seconds", "0.01", "--threads", "1"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("GFLOP/s")


EVERY_COMPOSED = [
    pytest.param(Case(Composed(name), case, build), id=f"{name}: {case}")
    for name, cases in COMPOSED.items()
    for case, build in cases.items()
]


@pytest.mark.native
@pytest.mark.parametrize("case", EVERY_COMPOSED)
def test_functions_made_of_ops_agree_with_their_references(case):
    check.test(case, None)


@pytest.mark.parametrize("case", EVERY_COMPOSED)
def test_gradients_of_functions_made_of_ops_are_the_derivatives(case):
    check.grad(case)


@pytest.mark.native
def test_speed_is_told_in_operations_or_bytes(capsys):
    assert check.main(["perf", "-o", "mul_mat", "-o", "abs", "--seconds", "0.01", "--threads", "1"]) == 0
    absolute, product = capsys.readouterr().out.splitlines()[1:]
    assert absolute.startswith("abs: ") and absolute.endswith("GB/s")
    assert product.startswith("mul_mat: at size") and product.endswith("GFLOP/s")


def test_the_table_says_what_an_op_takes_and_differentiates(capsys, tmp_path):
    assert check.main(["support"]) == 0
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in capsys.readouterr().out.splitlines()}
    assert rows["mul_mat"] == "| mul_mat | a: f32 f16 bf16 quantized, b: f32 f16 bf16 | a, b | C | partial |"
    assert rows["argmax"] == "| argmax | x: f32 | - | C | zero |"
    assert "| view |" in rows["permute"] and "made of other ops" in rows["matmul"]
    path = tmp_path / "ops.md"
    assert check.main(["support", "--write", str(path)]) == 0
    assert rows["mul_mat"] in path.read_text().splitlines()


def test_the_table_in_the_docs_is_what_the_program_writes(tmp_path):
    path = tmp_path / "ops.md"
    assert check.main(["support", "--write", str(path)]) == 0
    kept = Path(__file__).parents[1] / "docs" / "ops.md"
    assert kept.read_text() == path.read_text(), "python -m ggrad.check support --write docs/ops.md"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["grad", "-o", "no_such_op"], "there is no case of an op 'no_such_op'"),
        (["grad", "-m", "no_such_module"], "no_such_module"),
        (["grad", "-m", "textwrap"], "textwrap has no CASES"),
    ],
)
def test_a_wrong_question_is_answered_so(capsys, arguments, message):
    assert check.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_cases_of_ops_that_do_not_exist_are_refused(module):
    import importlib

    name = module("CASES = {{'no_such_op': {{}}}}")
    with pytest.raises(GgradError, match="no op of that name"):
        check.Suite().add(importlib.import_module(name))


def test_without_tqdm_the_cases_are_counted(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    items = check.Suite([check.Case(gg.ops.sqr, str(i), lambda m: gg.sqr(m(2))) for i in range(3)]).cases
    assert list(check._progress(items, "grad")) == items


def test_it_runs_as_a_program():
    program = [sys.executable, "-P", "-m", "ggrad.check", "grad", "-o", "sqr"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split(" in ")[0].endswith("passed, 0 failed")


def test_gradients_are_given_by_input():
    maker = check.Maker()
    results = check.results_of(lambda m: gg.mul(m(3), m(3, param=False)), maker)
    found = check.gradients_of(results, check.Maker(seed=1))
    assert list(found) == [0]
    assert np.isfinite(gg.Graph().build_forward_expand(found[0]).compute() and found[0].numpy()).all()
