"""What ends a preparation or a run half way: an interrupt, no memory, a fault.  The next run is right; nothing lies."""

import dis
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import cache

import numpy as np
import pytest

import ggrad as gg
from ggrad.core import arena as arenas
from ggrad.core.op import registry
from ggrad.run import session as sessions
from ggrad.testing.cases import CASES
from ggrad.testing.check import gradients_of, results_of
from ggrad.testing.maker import Maker

pytestmark = pytest.mark.native


ENGINE = os.path.dirname(gg.__file__) + os.sep


class Stop(Exception):
    pass


# -- preparations -------------------------------------------------------------------------------------------------


def model():
    """Nodes of every kind that a preparation treats apart: frozen weights, packs, gaps, updates, followers."""
    rng = np.random.default_rng(0)
    w = gg.tensor(rng.normal(size=(64, 48)), frozen=True)
    v = gg.tensor(rng.normal(size=(5, 64)), param=True)
    x = gg.tensor(rng.normal(size=(4, 48)))
    y = gg.rms_norm(gg.silu(gg.mul_mat(w, x)), gg.tensor(rng.normal(size=64), param=True))
    loss = gg.cross_entropy_loss(gg.mul_mat(v, y), gg.tensor(np.arange(4)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(accumulate=True)
    return graph, loss


@cache
def leaves_with(code, at: int) -> bool:
    """Whether a `with` block is done at this place, and what it calls then is about to be called: a line again, but
    no signal is looked for between the two."""
    ops = [op for op in dis.get_instructions(code) if op.offset >= at and op.opname != "CACHE"]
    ops = ops[ops[0].opname == "SWAP" :]
    return all(op.opname == "LOAD_CONST" and op.argval is None for op in ops[:3]) and "CALL" in ops[3].opname


def interrupted_at(line: int, work) -> bool:
    """Do `work`, in which Stop is raised when so many lines of the engine have run; whether they did."""
    lines = 0
    hit = False

    def trace(frame, event, arg):
        nonlocal lines, hit
        file = frame.f_code.co_filename
        if not file.startswith(ENGINE) or file.endswith("turns.py"):  # its lines are not where signals are met
            return None
        if event == "line" and not hit:
            lines += 1
            if lines >= line and not leaves_with(frame.f_code, frame.f_lasti):
                hit = True
                raise Stop
        return trace

    sys.settrace(trace)
    try:
        work()
    except Stop:
        pass
    finally:
        sys.settrace(None)
    return hit


def test_an_interrupt_at_any_line_of_the_first_run_leaves_a_graph_that_runs_right():
    graph, loss = model()
    graph.compute(threads=2)
    wanted, gradients = loss.item(), [graph.grad(p).numpy().copy() for p in graph.params]
    line, step, hit = 1, 7, True  # every line would take a minute
    while hit:
        graph, loss = model()
        hit = interrupted_at(line, lambda graph=graph: graph.compute(threads=2))
        graph.reset().compute(threads=2)
        assert loss.item() == wanted, line
        for p, g in zip(graph.params, gradients, strict=True):
            np.testing.assert_array_equal(graph.grad(p).numpy(), g)
        line += step
    assert line > 100 * step


def test_an_interrupt_at_any_line_of_building_leaves_a_graph_that_builds():
    line, step, hit = 1, 5, True
    while hit:
        w = gg.tensor(np.linspace(-1, 1, 12).reshape(3, 4), param=True)
        loss = gg.sum(gg.sqr(gg.tanh(w)))
        graph = gg.Graph()

        def build(graph=graph, loss=loss):
            graph.build_forward_expand(loss).build_backward_expand(loss)

        hit = interrupted_at(line, build)
        if not hit:
            graph = gg.Graph()
        if graph.loss is None:  # else the interrupt came when all was done
            build(graph, loss)
        graph.compute()
        assert len(graph.nodes) == len(set(graph.nodes)) and len(graph.leaves) == len(set(graph.leaves))
        value = np.tanh(w.numpy())
        np.testing.assert_allclose(graph.grad(w).numpy(), 2 * value * (1 - value**2), rtol=1e-5)
        line += step
    assert line > 20 * step


def test_no_memory_for_any_allocation_of_the_first_run_leaves_a_graph_that_runs_right(monkeypatch):
    graph, loss = model()
    graph.compute(threads=1)
    wanted, allocate, which = loss.item(), sessions.aligned_zeros, 0
    while True:
        graph, loss = model()
        made = []

        def failing(nbytes, made=made, which=which):
            made.append(nbytes)
            if len(made) == which + 1:
                raise MemoryError
            return allocate(nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(sessions, "aligned_zeros", failing)
            patch.setattr(arenas, "aligned_zeros", failing)
            try:
                graph.compute(threads=1)
            except MemoryError:
                with pytest.raises(gg.errors.NotComputedError):
                    loss.numpy()
        graph.reset().compute(threads=1)
        assert loss.item() == wanted
        if len(made) <= which:
            break
        which += 1
    assert which >= 2


def test_a_frozen_weight_that_two_threads_prepare_at_once_is_right_in_both(monkeypatch):
    """Another graph sees a form of it only when it is whole."""
    rng = np.random.default_rng(0)
    allocate, met = sessions.aligned_zeros, threading.Barrier(2)

    def slow(nbytes):
        made = allocate(nbytes)
        time.sleep(0.02)  # between its place and its content
        return made

    monkeypatch.setattr(sessions, "aligned_zeros", slow)
    for _ in range(3):
        w = gg.tensor(rng.normal(size=(256, 512)), frozen=True)
        x = gg.tensor(rng.normal(size=(16, 512)))
        graphs = [gg.Graph().build_forward_expand(gg.mul_mat(w, x)) for _ in range(2)]

        def first_run(graph):
            met.wait()
            graph.compute(threads=1)

        threads = [threading.Thread(target=first_run, args=(graph,)) for graph in graphs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for graph in graphs:
            np.testing.assert_allclose(graph.nodes[-1].numpy(), x.numpy() @ w.numpy().T, rtol=1e-4, atol=1e-3)
        assert len(w.prepared) == 1


# -- runs that end early ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_after_a_run_that_failed_no_value_can_be_read(backend):
    ids = gg.tensor(np.array([0, 1], np.int32))
    early = gg.set_output(gg.neg(gg.tensor(np.ones(8))))
    late = gg.sum(gg.get_rows(gg.tensor(np.ones((4, 8))), ids)) + gg.sum(early)
    graph = gg.Graph().build_forward_expand(late).compute(backend=backend)
    assert late.item() == 8
    ids.set([0, 9])
    with pytest.raises(gg.errors.IndexRangeError):
        graph.compute(backend=backend)
    for t in (early, late):
        with pytest.raises(gg.errors.NotComputedError, match="did not come to its end"):
            t.numpy()
    ids.set([0, 3])
    graph.compute(backend=backend)
    assert late.item() == 8 and early.numpy()[0] == -1


LONG = """
import os, signal, sys, threading, time
import numpy as np
import ggrad as gg

threads, update = int(sys.argv[1]), sys.argv[2] == "update"
x = gg.tensor(np.ones((600, 600)) / 600)
y = x
w = gg.tensor(np.ones((600, 600)), param=True)
for _ in range(20_000):  # of a minute or so
    y = gg.mul_mat(x, y)
graph = gg.Graph().build_forward_expand(gg.sum(y * w))
if update:
    graph.build_backward_expand()
    optimizer = gg.SGD([w], lr=1.0)
    optimizer.build(graph)
graph.plan()
before = w.numpy().copy()
sent = []

def interrupt():
    time.sleep(0.5)
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    graph.compute(threads=threads)
    print("not interrupted")
except KeyboardInterrupt:
    print(f"after {time.perf_counter() - sent[0]:.3f}")
assert (w.numpy() == before).all()
try:
    y.numpy()
    print("read")
except gg.errors.NotComputedError:
    pass
small = gg.tensor(np.ones(3)) * 2.0
gg.Graph().build_forward_expand(small).compute(threads=threads)
print(small.numpy())
"""


@pytest.mark.parametrize("update", ["", "update"])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_ends_a_long_run_and_leaves_everything_usable(threads, update):
    """When, is the machine's business: but the run would last for a minute."""
    command = [sys.executable, "-P", "-c", LONG, str(threads), update]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    after, small = done.stdout.split("\n", 1)
    assert after.startswith("after"), done.stdout
    assert small.strip() == "[2. 2. 2.]"


def answered_by(handler, work):
    """Do `work`, and have a signal arrive meanwhile."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def waiting(until) -> gg.Graph:
    """A graph in the middle of which a function in Python waits until something is so."""

    def wait(a):
        for _ in range(3000):
            if until():
                break
            time.sleep(0.01)
        return a

    return gg.Graph().build_forward_expand(gg.neg(gg.map_custom1(gg.neg(gg.tensor(np.ones(4))), wait)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_handler_that_uses_the_graph_which_runs_gets_an_error(threads):
    errors = []
    graph = waiting(lambda: len(errors) == 3)

    def handler(*_):
        for use in (graph.compute, graph.plan, graph.reset):
            try:
                use()
            except gg.errors.GraphError as error:
                errors.append(str(error))

    answered_by(handler, lambda: graph.compute(threads=threads))
    assert len(errors) == 3 and all("from inside of a run" in e for e in errors)
    assert graph.nodes[-1].numpy()[0] == 1.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_callback_that_uses_its_graph_gets_an_error_and_may_use_another(threads):
    other = gg.neg(gg.tensor(np.ones(40_000)))
    another = gg.Graph().build_forward_expand(other)
    caught = []

    def function(a):
        another.compute(threads=threads)
        try:
            graph.compute()
        except gg.errors.GraphError as error:
            caught.append(error)
        return a + other.numpy()[0]

    y = gg.map_custom1(gg.sqr(gg.tensor(np.ones(40_000))), function)
    graph = gg.Graph().build_forward_expand(gg.neg(y))
    graph.compute(threads=threads)
    assert len(caught) == 1 and graph.nodes[-1].numpy()[0] == 0.0


def test_a_handler_that_raises_when_leaves_are_being_updated_lets_the_run_come_to_its_end():
    total = gg.tensor(np.ones((1, 4)), role="moment")
    update = gg.ops.accumulate(total, gg.tensor(np.ones((1, 4))))  # made first, so that it runs first
    x = y = gg.tensor(np.eye(600))
    for _ in range(300):
        y = gg.mul_mat(x, y)
    graph = gg.Graph().build_forward_expand(update, y)
    graph.plan()

    def handler(*_):
        raise Stop

    with pytest.raises(Stop):
        answered_by(handler, graph.compute)
    assert total.numpy()[0, 0] == 2 and y.numpy()[5, 5] == 1


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in CASES if op in registry])
def test_a_graph_that_is_dropped_leaves_nothing_for_the_cyclic_collector(op):
    build = next(iter(CASES[op].values()))
    gc.collect()
    gc.disable()
    try:
        maker = Maker()
        results = results_of(build, maker)
        roots = [*results]
        if registry[op]._grad is not None:
            roots += gradients_of(results, maker).values()
        graph = gg.Graph().build_forward_expand(*roots).compute()
        alive = [weakref.ref(t) for t in (*graph.nodes, *graph.leaves)]
        del maker, results, roots, graph
        assert not [t().label() for t in alive if t() is not None]
    finally:
        gc.enable()


def test_a_parameter_does_not_keep_its_last_graph_alive():
    w = gg.tensor(np.ones(100), param=True)
    loss = gg.sum(gg.sqr(w))
    graph = gg.Graph().build_forward_expand(loss, w).build_backward_expand(loss)
    optimizer = gg.AdamW([w], lr=1e-3)
    optimizer.build(graph)
    graph.compute()
    optimizer.step()
    alive = [weakref.ref(t) for t in (graph, *graph.nodes)]
    gc.disable()
    try:
        del graph, loss, optimizer
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_parts_that_were_dropped_are_made_again_as_they_were():
    packed = gg.cross_entropy_loss(gg.tensor(np.ones((4, 8))), gg.tensor(np.zeros(4, np.int32)))
    while not packed.is_packed:
        packed = packed.src[0]
    first = [(p.serial, p.shape, p.offset) for p in packed.parts]
    assert [(p.serial, p.shape, p.offset) for p in packed.parts] == first
    kept = packed.parts
    assert all(a is b for a, b in zip(kept, packed.parts, strict=True))
