"""What an import costs and brings along, the standard library's module of the folder's name, and life without C."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code: str, *, cwd=None, safe_path: bool = True) -> str:
    """The output of a Python process; without `safe_path` its working directory comes first on sys.path."""
    flags = ["-P"] if safe_path else []
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=cwd, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_brings_only_what_every_program_needs():
    """numba alone would take more than half a second; it comes with the first graph that needs it."""
    loaded = run("import sys, ggrad; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    for heavy in (
        "numba",
        "llvmlite",
        "tqdm",
        "matplotlib",
        "scipy",
        "sklearn",
        "torch",
        "safetensors",
        "ml_dtypes",
        "hypothesis",
        "gguf",
    ):
        assert heavy not in loaded


def test_importing_brings_few_modules_that_numpy_has_not_brought():
    """What an import costs, in what does not depend on the machine: about 30 of the standard library's."""
    code = """
        import sys
        import numpy
        before = set(sys.modules)
        import ggrad
        print(*sorted(name for name in set(sys.modules) - before if not name.startswith("ggrad")))
    """
    brought = run(code).split()
    assert len(brought) < 60, brought


def test_importing_makes_no_threads_and_no_graphs():
    code = "import threading, ggrad; print(threading.active_count(), len(ggrad.core.turns._all))"
    assert run(code).split() == ["1", "0"]


# -- the folder is called graphlib, as a module of the standard library is ------------------------------------

SORT = "import graphlib; print(*graphlib.TopologicalSorter({'b': 'a'}).static_order(), graphlib.__name__)"


@pytest.mark.parametrize("safe_path", [True, False])
@pytest.mark.parametrize("order", ["", "import ggrad; ", "from graphlib import CycleError; import ggrad; "])
def test_the_standard_librarys_graphlib_is_found_from_the_root_of_the_repository(order, safe_path):
    assert run(order + SORT, cwd=ROOT, safe_path=safe_path) == "a b graphlib\n"


@pytest.mark.parametrize("order", ["", "import ggrad; "])
def test_the_standard_librarys_graphlib_is_found_elsewhere(order, tmp_path):
    assert run(order + SORT, cwd=tmp_path, safe_path=False) == "a b graphlib\n"


@pytest.mark.parametrize("order", ["", "import graphlib; "])
def test_ggrad_is_found_from_the_root_and_elsewhere(order, tmp_path):
    code = order + "import ggrad; print(ggrad.__name__, ggrad.mul.name)"
    assert run(code, cwd=ROOT, safe_path=False) == run(code, cwd=tmp_path) == "ggrad mul\n"


# -- without the C module -------------------------------------------------------------------------------------

WITHOUT_C = """
    import sys
    sys.modules["ggrad._native"] = None  # as if it had not been built
    import warnings
    warnings.simplefilter("always")
    import numpy as np
    import ggrad as gg
"""


def test_without_the_native_module_everything_runs_with_one_warning():
    output = run(
        WITHOUT_C
        + """
    x = gg.tensor([[1.0, 2.0], [3.0, 4.0]], param=True)
    for n in (1, 2, 3):
        loss = gg.sum(gg.mul_mat(x, x) * float(n))
        graph = gg.Graph().build_forward_expand(loss).build_backward_expand().compute()
        graph.compute(threads=2)
    print(loss.item(), graph.grad(x).numpy().tolist())
    print(gg.show_config())
    """
    )
    assert output.count("NativeModuleWarning") == 1
    assert "156.0 [[24.0, 36.0], [24.0, 36.0]]" in output
    assert "backend: reference" in output


def test_the_warning_says_what_to_do_and_points_at_the_users_line():
    output = run(WITHOUT_C + "    gg.Graph().build_forward_expand(gg.neg(gg.tensor([1.0]))).compute()  # the line\n")
    assert "Install a C compiler" in output
    assert "<string>:" in output, output


def test_without_the_native_module_importing_alone_does_not_warn():
    assert "Warning" not in run(WITHOUT_C)


def test_without_the_native_module_a_plan_can_be_made():
    """Its kernels' work memory is unknown, but the results' bytes are not."""
    output = run(
        WITHOUT_C + "    print(gg.Graph().build_forward_expand(gg.neg(gg.tensor(np.ones(100)))).plan().arena)\n"
    )
    assert output.split()[-1] == "448"


def test_without_the_native_module_asking_for_it_is_refused():
    code = """
    try:
        gg.Graph().build_forward_expand(gg.neg(gg.tensor([1.0]))).compute(backend="native")
    except gg.errors.KernelError as error:
        print("refused:", error)
    """
    assert "refused: " in run(WITHOUT_C + code)
