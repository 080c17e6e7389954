"""Functions on memory of others, forward and backward apart: as one graph that holds both, whoever calls and when."""

import threading
import time

import numpy as np
import pytest

import ggrad as gg
from ggrad.call.compiled import Compiled
from ggrad.call.vjp import _addresses, _empty, _like
from ggrad.core.errors import GradientError, GraphError, IndexRangeError, ShapeError
from ggrad.core.native import ffi, lib
from ggrad.core.op import part, registry
from ggrad.diff.autodiff import gradients_by
from ggrad.testing.cases import CASES
from ggrad.testing.check import results_of

pytestmark = pytest.mark.skipif(not gg.native.built(), reason="needs the C module")

rng = np.random.default_rng(5)


def attention(q, k, v):
    return gg.flash_attn_ext(q, k, v, causal=True)


def qkv(B=1, H=2, N=9, D=8):
    return [rng.standard_normal((B, H, N, D)).astype(np.float32) for _ in range(3)]


def whole_graph(function, arrays, douts):
    """Results and gradients of one graph that holds both passes."""
    leaves = [gg.tensor(a, param=np.asarray(a).dtype.kind == "f") for a in arrays]
    made = function(*leaves)
    results = made if isinstance(made, tuple) else (made,)
    loss = None
    for y, d in zip(results, douts, strict=True):
        term = gg.sum(gg.mul(y, gg.tensor(d)))
        loss = term if loss is None else loss + term
    graph = gg.Graph().build_forward_expand(*results).build_backward_expand(loss).compute()
    gradients = [graph.grad(x) for x in leaves]
    return [y.numpy().copy() for y in results], [None if g is None else g.numpy().copy() for g in gradients]


def test_a_function_and_its_gradients_are_those_of_one_graph():
    arrays = qkv()
    d = rng.standard_normal((1, 9, 2, 8)).astype(np.float32)
    out, pull_back = gg.vjp(attention)(*arrays)
    (expected,), gradients = whole_graph(attention, arrays, [d])
    np.testing.assert_array_equal(out, expected)
    for made, wanted in zip(pull_back(d), gradients, strict=True):
        np.testing.assert_array_equal(made, wanted)


def test_any_number_of_calls_come_before_their_gradients():
    f = gg.vjp(lambda x, w: gg.sigmoid(gg.mul_mat(w, x)))
    w = rng.standard_normal((3, 4)).astype(np.float32)
    xs = [rng.standard_normal((5, 4)).astype(np.float32) for _ in range(4)]
    calls = [f(x, w) for x in xs]
    for x, (y, pull_back) in reversed(list(zip(xs, calls, strict=True))):
        np.testing.assert_allclose(y, 1 / (1 + np.exp(-x @ w.T)), rtol=1e-5)
        d = np.ones_like(y)
        first, second = pull_back(d), pull_back(d)
        np.testing.assert_allclose(first[0], (y * (1 - y)) @ w, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 3, 2)])
def test_inputs_and_gradients_may_lie_in_any_order(order):
    arrays = qkv()
    turned = [np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order)) for a in arrays]
    (out, pull_back), (same, pull_same) = gg.vjp(attention)(*arrays), gg.vjp(attention)(*turned)
    np.testing.assert_array_equal(out, same)
    d = np.asfortranarray(rng.standard_normal(out.shape).astype(np.float32))
    for a, b in zip(pull_back(d), pull_same(d.astype(np.float64)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_need_only_be_aligned_to_elements_and_gaps_are_closed():
    x = np.arange(101, dtype=np.float32)
    double = gg.vjp(lambda x: x * 2.0)
    np.testing.assert_array_equal(double(x[1:])[0], 2 * x[1:])
    np.testing.assert_array_equal(double(x[::2])[0], 2 * x[::2])
    odd = np.ndarray(101, "f4", b"\0" + x.tobytes(), 1)
    np.testing.assert_array_equal(double(odd)[0], 2 * x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: (x, x),
        lambda x: x.reshape(6),
        lambda x: x[1:],
        lambda x: (lambda y: (y, y, y.T, y[0]))(x * 2.0),
        lambda x: gg.broadcast_to(x[0], (4, 3)),
        lambda x: gg.cast(x, gg.BF16),
    ],
    ids=["itself", "twice", "reshaped", "sliced", "views of one", "broadcast", "bf16"],
)
def test_results_that_are_no_memory_of_their_own(function):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    made, pull_back = gg.vjp(function)(x)
    several = made if isinstance(made, tuple) else (made,)
    douts = [np.ones(y.shape, np.float32) for y in several]
    wanted, (gradient,) = whole_graph(function, [x], douts)
    for a, b in zip(several, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(pull_back(*douts), gradient)


def test_halves_and_integers():
    ids, table = np.array([2, 0], np.int32), rng.standard_normal((3, 4)).astype(np.float16)
    y, pull_back = gg.vjp(lambda t, i: gg.get_rows(t, i))(table, ids)
    d_table, d_ids = pull_back(np.ones_like(y))
    assert d_ids is None and d_table.sum(1).tolist() == [4, 0, 4]


def test_what_the_results_do_not_depend_on_has_zeros():
    _, pull_back = gg.vjp(lambda x, y: x * 2.0)(np.ones(3, np.float32), np.ones(2, np.float32))
    dx, dy = pull_back(np.ones(3))
    assert dx.tolist() == [2, 2, 2] and dy.tolist() == [0, 0]


def test_arrays_without_elements():
    y, pull_back = gg.vjp(lambda x: x * 2.0)(np.ones((0, 3), np.float32))
    assert y.shape == (0, 3) and pull_back(y).shape == (0, 3)


def test_results_are_the_same_from_several_threads():
    f, inputs = gg.vjp(attention), [qkv(H=4, N=65) for _ in range(8)]
    d = rng.standard_normal((1, 65, 4, 8)).astype(np.float32)
    expected = [(y, p(d)) for y, p in (f(*x) for x in inputs)]
    failures = []

    def work(i):
        for _ in range(20):
            y, pull_back = f(*inputs[i])
            ok = np.array_equal(y, expected[i][0])
            ok &= all(np.array_equal(a, b) for a, b in zip(pull_back(d), expected[i][1], strict=True))
            if not ok:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_python_runs_while_c_does():
    n = 900
    f, a = gg.vjp(lambda x: gg.mul_mat(x, gg.mul_mat(x, x))), rng.standard_normal((n, n)).astype(np.float32)
    f(a)
    done, turns = threading.Event(), 0
    worker = threading.Thread(target=lambda: ([f(a) for _ in range(3)], done.set()))
    worker.start()
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    worker.join()
    assert turns > 3, "the GIL was held"


def test_a_function_of_the_users_may_call_it_again():
    inner = gg.vjp(lambda x: x * 3.0)
    outer = gg.vjp(lambda x: gg.custom(x, function=lambda a: inner(a)[0], shape=(2,), grad=lambda d, a: 3 * d))
    outer_y, _ = outer(np.ones(2, np.float32))
    assert outer_y.tolist() == [3, 3]
    calls = []

    def again(a):
        calls.append(a)
        return again_f(a)[0] if len(calls) < 3 else a

    again_f = gg.vjp(lambda x: gg.custom(x, function=again, shape=(2,), grad=lambda d, a: d) + 1.0)
    assert again_f(np.zeros(2, np.float32))[0].tolist() == [3, 3]


def test_bad_input_is_refused():
    f = gg.vjp(lambda t, i: gg.get_rows(t, i))
    table = np.ones((3, 2), np.float32)
    with pytest.raises(IndexRangeError, match="holds 7"):
        f(table, np.array([7], np.int32))
    y, pull_back = f(table, np.array([1], np.int32))
    with pytest.raises(ShapeError, match="2 gradients were given for 1"):
        pull_back(y, y)
    with pytest.raises(ShapeError, match=r"gradient 0 has shape \(2,\)"):
        pull_back(np.ones(2))
    with pytest.raises(ShapeError, match="ids is f32"):
        f(table, np.ones(1))
    with pytest.raises(GraphError, match="must give a tensor"):
        gg.vjp(lambda x: 3)(table)
    with pytest.raises(ShapeError, match="no dtype for NumPy's"):
        f("text", np.array([1]))


def test_an_op_without_a_gradient_says_so_when_it_is_pulled_back():
    @gg.op
    def no_rule(x):
        """x"""
        return x.spec

    with pytest.raises(GradientError, match="no_rule has no gradient rule"):
        gg.vjp(no_rule)(np.ones(2))[1](np.ones(2))


WITH_RULE = sorted(name for name, op in registry.items() if op.has_gradient and name != part.name)


@pytest.mark.parametrize("name", WITH_RULE)
def test_every_op_reads_what_its_forward_left(name):
    """Its first case, with the parameters as inputs: gradients of a graph, and of two programs, to the bit."""
    results = [y for y in results_of(next(iter(CASES[name].values()))) if y.dtype.is_float]
    graph = gg.Graph().build_forward_expand(*results)
    params = graph.params
    if any(t.updates for t in graph.nodes) or not params:
        pytest.skip("updates leaves, or has no parameters")
    compiled = Compiled(params, params, results, [True] * len(params))
    arrays = [p.memory() for p in params]
    douts = [rng.standard_normal(y.shape).astype(np.float32) for y in results]
    made = _run(compiled, arrays, douts)
    # of results that are halves gradients come as halves too
    starts = {y: gg.cast(gg.tensor(d, dtype=y.dtype), gg.F32) for y, d in zip(results, douts, strict=True)}
    wanted = gradients_by(params, starts)
    gg.Graph().build_forward_expand(*[g for g in wanted if g is not None]).compute()
    for g, w, p in zip(made, wanted, params, strict=True):
        assert (g is None) == (w is None), p
        if g is not None and p.dtype is gg.F32:
            np.testing.assert_array_equal(g, w.numpy())


def _run(compiled, inputs, douts):
    results = [_empty(layout) for layout in compiled.results]
    residuals = [_empty(layout) for layout in compiled.residuals]
    compiled.forward(_addresses([*inputs, *results, *residuals]))
    given = [_like(d, layout, "d") for d, layout in zip(douts, compiled.results, strict=True)]
    made = [None if layout is None else _empty(layout) for layout in compiled.gradients]
    saved = [x for x, saved in zip((*inputs, *results), compiled.saves, strict=True) if saved]
    compiled.backward(_addresses([*saved, *residuals, *given, *(g for g in made if g is not None)]))
    return made


def test_a_call_of_c_releases_the_gil():
    """cffi's functions do; and the one that runs is one of these."""
    assert ffi.typeof(lib.gg_run_bound).kind == "function"
