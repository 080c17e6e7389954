"""Kernels in C from elsewhere: by ctypes, cffi and address, in stages, with memory; and what is refused."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.errors import KernelError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
EXAMPLE = Path(__file__).parent.parent / "examples" / "c_kernel.py"

SOURCE = """
void scaled(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    const struct { float factor; int64_t times; } *a = call->attrs;
    const float *x = call->src[0].data;
    float *y = call->dst[0].data, *work = call->work, *own = scratch;
    for (int64_t i = begin; i < end; i++) {
        own[0] = x[i];
        if (stage == 0) work[i] = own[0] * a->factor;
        else y[i] = work[i] + a->times;
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "k.c").write_text(gg.c_declarations() + SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "k.so", folder / "k.c"], check=True)
    return folder / "k.so"


def declared():
    @gg.op(layout="contiguous")
    def scaled(x, *, factor: float, times: int):
        return x.spec

    scaled.reference(lambda x, *, factor, times: x * factor + times)
    return scaled


def functions(library):
    by_ctypes = ctypes.CDLL(str(library)).scaled
    ffi = pytest.importorskip("cffi").FFI()
    ffi.cdef("void scaled(const void *, int, int64_t, int64_t, void *);")
    opened = ffi.dlopen(str(library))
    by_cffi = ffi.addressof(opened, "scaled")
    return by_ctypes, by_cffi, ctypes.cast(by_ctypes, ctypes.c_void_p).value


@pytest.mark.parametrize("which", range(3), ids=["ctypes", "cffi", "address"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_function_is_a_kernel(library, which, threads):
    scaled = declared()
    memory = {"work": lambda t: 4 * t.size, "scratch": lambda t: 4}
    scaled.kernel_in_c(functions(library)[which], tasks=lambda t, stage: t.size, stages=2, **memory)
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    for values in (x, x[:2]):  # other shapes have other counts of tasks
        y = scaled(gg.tensor(values), factor=2.0, times=3)
        gg.Graph().build_forward_expand(y).compute(threads=threads)
        np.testing.assert_allclose(y.numpy(), values * 2 + 3, rtol=1e-6)
    gg.testing.check_kernel(lambda t: scaled(t, factor=0.5, times=1), x)


@pytest.mark.parametrize("run", [None, 0, 3.5, "run", len, True])
def test_what_is_no_function_in_c_is_refused(run):
    with pytest.raises(KernelError, match=r"scaled: a kernel in C is a function pointer .*gg_call \*call, int stage"):
        declared().kernel_in_c(run)


def test_counts_must_be_whole_numbers(library):
    for options in ({"tasks": lambda t, stage: -1}, {"tasks": lambda t, stage: 1.5}, {"work": lambda t: -4}):
        scaled = declared()
        scaled.kernel_in_c(functions(library)[0], **options)
        graph = gg.Graph().build_forward_expand(scaled(gg.tensor([1.0]), factor=1.0, times=0))
        with pytest.raises(KernelError, match=r"scaled: a kernel's number of .* is a whole number of at least 0"):
            graph.compute()
    with pytest.raises(KernelError, match="at least 1 stage, not 0"):
        declared().kernel_in_c(functions(library)[0], stages=0)


def test_the_declarations_are_those_of_the_library():
    header = (EXAMPLE.parent.parent / "csrc" / "abi" / "ggrad.h").read_text()
    assert gg.c_declarations() == header.replace("#pragma once\n", "")


def test_the_example_trains_through_its_kernel():
    done = subprocess.run([sys.executable, "-P", str(EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "after 20 steps" in done.stdout
