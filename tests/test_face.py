"""What users and their tools see: names, signatures, docstrings, types."""

import copy
import importlib.util
import inspect
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import Op, registry
from ggrad.testing import stubs

OPS = [name for name in gg.ops.__all__ if isinstance(getattr(gg.ops, name), Op)]


def test_the_stub_is_made_from_the_declarations():
    assert stubs.path().read_text() == stubs.stub(), "python -m ggrad.testing.stubs --write"


def test_every_op_is_in_the_stub_with_its_arguments_and_docstring():
    text = stubs.stub()
    for name in OPS:
        assert f"\ndef {name}(" in text, name
    assert "def scale(x: Tensor | ArrayLike, factor: float, bias: float = 0.0) -> Tensor:" in text
    assert "def concat(*xs: Tensor | ArrayLike, axis: int = -1) -> Tensor:" in text
    assert "-> Any" not in text
    compile(text, "ops.pyi", "exec")


def test_the_package_says_that_it_is_typed():
    root = Path(gg.__file__).parent
    assert (root / "py.typed").exists() and stubs.path().exists()


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_mypy_knows_the_arguments_of_ops(tmp_path):
    """It does not follow editable installations, so it gets the folders as the package that they are."""
    package = tmp_path / "lib" / "ggrad"
    package.mkdir(parents=True)
    for entry in Path(gg.__file__).parent.iterdir():
        (package / entry.name).symlink_to(entry)
    if not (package / "ops").exists():
        (package / "ops").symlink_to(stubs.path().parent)
    program = tmp_path / "program.py"
    program.write_text(
        "import ggrad as gg\n"
        "x = gg.tensor([1.0])\n"
        "reveal_type(gg.rms_norm(x))\n"
        "gg.rms_norm(x, epsilon=1e-5)\n"
        "gg.scale(x)\n"
        "gg.scale(x, 2.0)\n"
        "gg.no_such_op(x)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(program)],
        capture_output=True, text=True, env={"MYPYPATH": str(tmp_path / "lib"), "PATH": ""}, cwd=tmp_path,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    assert "program.py:3: note: Revealed type is" in lines[0] and "ggrad.core.tensor.Tensor" in lines[0]
    assert "program.py:4: error: Unexpected keyword argument" in lines[1]
    assert any("program.py:5: error: Missing positional argument" in line for line in lines)
    assert not any("program.py:6" in line for line in lines)
    assert any('program.py:7: error: Module has no attribute "no_such_op"' in line for line in lines)


@pytest.mark.parametrize("name", OPS)
def test_ops_are_documented_as_functions_are(name):
    op = getattr(gg.ops, name)
    assert [*inspect.signature(op).parameters] == [*inspect.signature(op.called or op.infer).parameters]
    text = pydoc.plain(pydoc.render_doc(op))
    assert f"{op.name}(" in text and inspect.getdoc(op).splitlines()[0] in text


@pytest.mark.parametrize("op", registry.values(), ids=registry)
def test_ops_are_pickled_and_copied_by_name(op):
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.copy(op) is op and copy.deepcopy(op) is op


@gg.op
def mine(x):
    """x"""
    return x.spec


def test_ones_own_op_is_pickled_by_name_too():
    assert pickle.loads(pickle.dumps(mine)) is mine


def test_an_op_in_a_class_stays_an_op():
    class Layer:
        activation = gg.relu

    assert Layer().activation is gg.relu
    assert Layer().activation(gg.tensor(np.ones(2))).op is gg.relu


def test_dir_holds_what_programs_call():
    names = {name for name in dir(gg) if not name.startswith("_")}
    assert len(names) <= 200, "ops that few programs call are not in ops.COMMON, and the rest has a module of its own"
    assert {"Graph", "tensor", "relu", "flash_attn_ext", "op", "AdamW", "Trainer", "F32", "errors", "testing"} <= names
    assert not {"relu_back", "slice_add", "core", "jit", "former", "keep_paths", "graph"} & names
    modules = {name for name in names if inspect.ismodule(getattr(gg, name))}
    assert modules == {"checkpoint", "data", "distributed", "errors", "nn", "ops", "optim", "schedule", "testing"}
    for name in names:
        getattr(gg, name)
    assert set(gg.ops.__all__) > gg.ops.COMMON and names >= gg.ops.COMMON
    assert gg.win_part is gg.ops.win_part, "what `dir` leaves out is there for who knows its name"


@pytest.mark.parametrize("name", registry)
def test_an_op_is_called_by_its_own_name(name):
    """No function of another name, or of the same, stands before it."""
    op = registry[name]
    assert op.infer.__name__ == name
    assert getattr(gg.ops, name, op) is op


def test_tools_see_the_arguments_that_programs_give():
    assert "output_final_state: bool = False" in stubs.stub().partition("def kda(")[2].partition(")")[0]
    assert inspect.signature(gg.kda).parameters["chunk_size"].default == 64
    assert "form" not in inspect.signature(gg.kda).parameters
    with pytest.raises(TypeError, match=r"^kda\(\) got an unexpected keyword argument 'chunks'"):
        gg.kda(*[gg.tensor(np.ones((1, 2, 1, 4)))] * 5, chunks=3)
