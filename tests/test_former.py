"""The paths that modules had before they lay in sub-packages."""

import subprocess
import sys
import textwrap

import pytest


def test_former_paths_give_the_same_modules_and_leave_functions_in_place():
    code = """
        import ggrad.check, ggrad.cases.blocks, ggrad.optim, ggrad as gg
        from ggrad import plan, session
        from ggrad.op import Op
        from ggrad.tensor import Tensor
        from ggrad.errors import GgradError
        import ggrad.testing.check, ggrad.testing.cases.blocks, ggrad.train.optim, ggrad.run.session
        import ggrad.former as former, importlib
        print(gg.check is gg.testing.check, gg.cases.blocks is gg.testing.cases.blocks, gg.optim is gg.train.optim)
        print(session is gg.run.session, Op is gg.Op, Tensor is gg.Tensor, gg.check.__spec__.name)
        print(callable(gg.op), callable(gg.tensor))
        for name, now in former.NOW.items():
            assert importlib.import_module(f"ggrad.{name}") is importlib.import_module(f"ggrad.{now}"), name
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 6 + ["ggrad.testing.check"] + ["True"] * 2


@pytest.mark.parametrize("path", ["ggrad.check", "ggrad.testing.check"])
def test_the_checks_run_as_a_program_under_both_paths(path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", path, "grad", "-o", "sqr"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout
