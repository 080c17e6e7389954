"""A function of the user's as a node: what it is given, and what becomes of what it does wrong."""

import gc
import signal
import subprocess
import threading
import weakref

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, ShapeError

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def run(*tensors, **options):
    return gg.Graph().build_forward_expand(*tensors).compute(**options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 4])
def test_what_the_function_raises_comes_out_and_later_runs_are_well(backend, threads):
    wrong = [True]

    def function(x):
        if wrong[0]:
            raise KeyError("mine")
        return x

    later = gg.tensor(np.zeros((3, 4)), role="accumulator")
    out = gg.map_custom1(gg.tensor(X), function)
    graph = gg.Graph().build_forward_expand(gg.accumulate(later, out))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            graph.compute(backend=backend, threads=threads)
        assert not later.numpy().any(), "a later node has run"
    wrong[0] = False
    graph.compute(backend=backend, threads=threads)
    np.testing.assert_array_equal(later.numpy(), X)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function, dtype, message",
    [
        (lambda x: x[0], gg.F32, r"the function gave float\d\d\[4\], and must give numbers \[3, 4\]"),
        (lambda x: x, gg.I32, r"the function gave float\d\d\[3, 4\], and must give integers \[3, 4\]"),
        (lambda x: None, gg.F32, r"the function gave object\[\], and must give numbers"),
        (lambda x: x + 1j, gg.F32, r"the function gave complex"),
    ],
)
def test_a_result_that_does_not_fit_is_named(backend, function, dtype, message):
    out = gg.custom(gg.tensor(X), function=function, shape=(3, 4), dtype=dtype)
    with pytest.raises(ShapeError, match=f"^custom: {message}"):
        run(out, backend=backend)


@pytest.mark.native
def test_integers_beyond_i32_are_refused():
    out = gg.custom(gg.tensor(X), function=lambda x: np.full((3, 4), 2**40), shape=(3, 4), dtype=gg.I32)
    with pytest.raises(ShapeError, match=r"^custom: 1099511627776 is outside of i32"):
        run(out)


@pytest.mark.native
def test_inputs_cannot_be_written_to():
    def function(x):
        x[0] = 7
        return x

    with pytest.raises(ValueError, match="read-only"):
        run(gg.map_custom1(gg.tensor(X), function))


@pytest.mark.native
def test_inputs_come_as_f32_or_i32_whatever_their_layout():
    seen = []

    def function(*inputs):
        seen.extend((x.dtype.name, x.tolist()) for x in inputs)
        return inputs[0]

    values = [gg.tensor(X).T, gg.tensor(X, dtype=gg.F16), gg.tensor(X, dtype=gg.BF16), gg.tensor(X.astype(int))]
    run(gg.custom(*values, function=function, shape=(4, 3)))
    assert [name for name, _ in seen] == ["float32", "float32", "float32", "int32"]
    assert [value for _, value in seen] == [X.T.tolist(), *[X.tolist()] * 3]


def test_a_function_without_a_gradient_is_refused_where_one_is_needed():
    x = gg.tensor(X, param=True, name="x")
    with pytest.raises(
        GradientError, match=r"^map_custom1\(a=x: f32\[3,4\]\), .* x.*: the function has no gradient: give"
    ):
        gg.Graph().build_backward_expand(gg.sum(gg.map_custom1(x, np.sin)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "grad, message",
    [
        (lambda dout, a, b: dout, "grad gave 1 gradients for 2 inputs"),
        (lambda dout, a, b: (dout, dout[0]), r"grad gave float\d\d\[4\], and must give numbers \[3, 4\]"),
    ],
)
def test_a_gradient_that_does_not_fit_is_named(backend, grad, message):
    a, b = gg.tensor(X, param=True), gg.tensor(X, param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.map_custom2(a, b, np.add, grad)))
    with pytest.raises(ShapeError, match=f"^custom: {message}"):
        graph.compute(backend=backend)


def test_a_wrong_gradient_is_found_by_checking():
    x = np.linspace(-1, 1, 5)
    gg.testing.check_gradients(lambda t: gg.map_custom1(t, np.sin, lambda dout, x: dout * np.cos(x)), x)
    with pytest.raises(gg.errors.GradientMismatch):
        gg.testing.check_gradients(lambda t: gg.map_custom1(t, np.sin, lambda dout, x: dout * np.sin(x)), x)


@pytest.mark.native
def test_a_compiled_function_of_numbas_is_one_too():
    from numba import njit

    @njit
    def running_maximum(x):
        out = x.copy()
        for i in range(1, x.size):
            out[i] = max(out[i], out[i - 1])
        return out

    out = gg.map_custom1(gg.tensor([1.0, 3.0, 2.0, 5.0, 4.0]), running_maximum)
    run(out)
    np.testing.assert_array_equal(out.numpy(), [1, 3, 3, 5, 5])


@pytest.mark.native
def test_the_function_may_run_a_graph_of_its_own():
    x = gg.tensor(X)
    inner = gg.neg(x)
    graph = gg.Graph().build_forward_expand(inner)
    out = gg.map_custom1(x, lambda a: graph.compute(threads=2) and inner.numpy() + a)
    run(out, threads=2)
    np.testing.assert_array_equal(out.numpy(), np.zeros((3, 4)))


@pytest.mark.native
def test_several_python_threads_may_run_such_graphs():
    def work(k):
        out = gg.map_custom1(gg.tensor(X), lambda a: a * k)
        for _ in range(20):
            run(out, threads=2)
        results[k] = out.numpy().copy()

    results = {}
    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(results) == list(range(4))
    for k, value in results.items():
        np.testing.assert_array_equal(value, X * k)


@pytest.mark.native
def test_a_graph_that_is_gone_keeps_nothing_alive():
    class Function:
        def __call__(self, x):
            return x

    function = Function()
    gone = weakref.ref(function)
    run(gg.map_custom1(gg.tensor(X), function))
    del function
    gc.collect()
    assert gone() is None


@pytest.mark.native
def test_it_trains():
    """A least-squares fit through a function of NumPy's."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(50, 3)), np.array([[1.0, -2.0, 0.5]])
    weight = gg.tensor(np.zeros((1, 3)), param=True)
    made = gg.map_custom2(gg.tensor(x), weight, lambda a, b: a * b, lambda dout, a, b: (None, (dout * a).sum(0)[None]))
    loss = gg.sum(gg.sqr(gg.sub(gg.sum_rows(made), gg.tensor(x @ w.T))))
    graph = gg.Graph().build_backward_expand(loss)
    for _ in range(100):
        graph.compute()
        weight.set(weight.numpy() - 0.005 * graph.grad(weight).numpy())
    np.testing.assert_allclose(weight.numpy(), w, atol=1e-3)


@pytest.mark.native
def test_programs_that_functions_start_hear_signals_on_every_thread():
    found = {}

    def function(x):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        with subprocess.Popen(["sleep", "60"]) as child:
            child.send_signal(signal.SIGTERM)
            try:
                ended = child.wait(20)
            finally:
                child.kill()
        found[threading.get_ident()] = ended, blocked
        return x

    a = gg.tensor(np.ones((300, 300)))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    graph = gg.Graph().build_forward_expand(
        *(gg.custom(gg.mul_mat(a, a), function=function, shape=(300, 300)) for _ in range(6))
    )
    for _ in range(100):  # until a worker has taken one
        graph.compute(threads=3)
        if set(found) - {threading.get_ident()}:
            break
    assert set(found) - {threading.get_ident()}
    assert set(map(repr, found.values())) == {repr((-signal.SIGTERM, before))}
