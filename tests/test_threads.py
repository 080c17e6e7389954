"""Several Python threads, forks, the interpreter's lock, and the caller's floating-point mode."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from python_kernels import PythonKernel, temporary_ops

import ggrad as gg
from ggrad.core.native import ffi, lib

pytestmark = pytest.mark.native


def model(seed=0, size=64, layers=6):
    """Some work with gradients, and the value that it must give."""
    rng = np.random.default_rng(seed)
    w = gg.tensor(rng.normal(size=(size, size)) / size, name="w", param=True)
    x = gg.tensor(rng.normal(size=(size, size)))
    h = x
    for _ in range(layers):
        h = gg.mul(gg.add(h, x), w)
    graph = gg.Graph().build_forward_expand(gg.sum(h * h)).build_backward_expand()
    return graph, w


def bits(graph, w, threads):
    graph.compute(threads=threads)
    return graph.grad(w).numpy().tobytes(), graph.loss.numpy().tobytes()


def in_threads(*functions):
    """Runs them at once; what any of them raises is raised here."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_two_threads_run_two_graphs():
    graphs = [model(seed) for seed in range(2)]
    expected = [bits(graph, w, 2) for graph, w in graphs]

    def run(i):
        for _ in range(30):
            assert bits(*graphs[i], threads=2) == expected[i]

    in_threads(lambda: run(0), lambda: run(1))


def test_four_threads_with_various_numbers_of_workers():
    graphs = [model(seed) for seed in range(4)]
    expected = [bits(graph, w, 1) for graph, w in graphs]

    def run(i):
        for n in (1, 2, 3, 7, 2, 5):
            assert bits(*graphs[i], threads=n) == expected[i]

    in_threads(*(lambda i=i: run(i) for i in range(4)))


def test_two_threads_run_the_same_graph():
    """One after the other: a graph has one set of results."""
    graph, w = model()
    expected = bits(graph, w, 1)

    def run():
        for _ in range(30):
            graph.compute(threads=2)
        assert graph.grad(w).numpy().tobytes() == expected[0]

    in_threads(run, run)


def test_runs_of_the_same_graph_do_not_overlap():
    inside, most = [], []

    def slow(dst, src, begin, end):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        dst[...] = src[0]

    with temporary_ops():

        @gg.op(layout="contiguous")
        def slow_copy(x):
            """x"""
            return x.spec

        slow_copy.in_python = PythonKernel(slow)
        graph = gg.Graph().build_forward_expand(slow_copy(gg.tensor(np.ones(3))))
        in_threads(*[lambda: graph.compute(threads=1)] * 4)
    assert most == [1, 1, 1, 1]


def test_graphs_are_built_in_several_threads():
    expected = bits(*model(3, size=16), threads=1)

    def run():
        for _ in range(10):
            assert bits(*model(3, size=16), threads=2) == expected

    in_threads(run, run, run)


def test_one_python_thread_advances_while_another_computes():
    """The interpreter's lock is released for the whole run: at last the other one is seen in the middle of it."""
    graph, _ = model(size=1024, layers=30)
    graph.compute(threads=1)
    ticks, done = [], threading.Event()

    def count():
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        for _ in range(200):  # a busy machine may let the other one wait for many of them
            began = time.monotonic()
            graph.compute(threads=1)
            took = time.monotonic() - began
            if any(began + 0.2 * took < t < began + 0.8 * took for t in ticks):
                break
        else:
            pytest.fail("the other thread never advanced in the middle of 200 runs")
    finally:
        done.set()
        counter.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes():
    """Threads that waited for work in the parent do not exist in the child."""
    graph, w = model()
    expected = bits(graph, w, 3)
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = all(bits(graph, w, n) == expected for n in (1, 2, 3, 7)) and bits(*model(), 2) == expected
        finally:
            os._exit(0 if ok else 1)
    assert wait_for(child) == 0
    assert bits(graph, w, 3) == expected  # and the parent goes on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_during_a_run_computes():
    """The graph that another thread of the parent was running is free in the child."""
    graph, _w = model(size=512, layers=20)
    small, v = model(1)
    expected = bits(small, v, 2)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            graph.compute(threads=2)

    runner = threading.Thread(target=busy)
    runner.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                ok = False
                try:
                    ok = bits(small, v, 2) == expected and graph.compute(threads=2) is graph
                finally:
                    os._exit(0 if ok else 1)
            assert wait_for(child) == 0
            time.sleep(0.01)
    finally:
        stop.set()
        runner.join()


def wait_for(child: int) -> int:
    """The exit status; a child that hangs is ended, and fails."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def test_a_process_ends_while_threads_wait_for_work():
    code = (
        "import numpy as np, ggrad as gg\n"
        "x = gg.tensor(np.ones((100, 100)))\n"
        "gg.Graph().build_forward_expand(gg.add(x, x)).compute(threads=4)\n"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


DENORMAL = np.float32(1e-40)


def test_the_callers_floating_point_mode_is_as_it_was():
    """Denormals are numbers for the caller, whatever the kernels' threads do with them."""
    graph, _w = model()
    for threads in (1, 3):
        graph.compute(threads=threads)
        x = np.array([DENORMAL])
        assert (x * np.float32(1.0))[0] == DENORMAL
        assert (x + np.float32(0.0))[0] == DENORMAL


def test_rounding_mode_flags_and_traps_are_as_they_were():
    """The control word itself, seen through glibc's fegetround and through MXCSR's effect on arithmetic."""
    one, three = np.float32(1), np.float32(3)
    graph, _ = model()
    before = (one / three).tobytes(), (-one / three).tobytes()
    graph.compute(threads=2)
    assert ((one / three).tobytes(), (-one / three).tobytes()) == before
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        np.float32(1e38) * np.array([1e38], np.float32)


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads):
    graph, _ = model()
    with pytest.raises(gg.errors.GraphError, match=f"threads must be 1 or more, not {threads}"):
        graph.compute(threads=threads)


@pytest.mark.parametrize("numbers", [(1, 2, 3, 7), (7, 3, 2, 1), (2, 1, 2, 64)])
def test_every_thread_has_scratch_memory_of_its_own_in_a_run_with_more_threads_than_before(numbers):
    graph = gg.Graph().build_forward_expand(gg.rope(gg.tensor(np.ones((3, 2, 8))), gg.tensor([0, 1, 2])))
    session = graph.prepared("native")
    assert session._scratch_stride > 0
    for n in numbers:
        graph.compute(threads=n)
        assert session.scratch.ctypes.data % 4096 == 0
        assert session.scratch.nbytes >= n * session._scratch_stride


def test_more_threads_than_cores_are_fine():
    graph, w = model()
    assert bits(graph, w, 64) == bits(graph, w, 1)


def test_the_number_of_threads_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("GGRAD_NUM_THREADS", "3")
    assert gg.native.default_threads() == 3
    for wrong in ("0", "-1", "two", ""):
        monkeypatch.setenv("GGRAD_NUM_THREADS", wrong)
        with pytest.raises(gg.errors.GgradError, match="must be a positive number"):
            gg.native.default_threads()
    monkeypatch.delenv("GGRAD_NUM_THREADS")
    assert gg.native.default_threads() >= 1


def test_the_configuration_can_be_shown():
    assert ffi.string(lib.gg_isa()).decode() in gg.show_config()
