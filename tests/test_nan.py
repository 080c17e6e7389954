"""A NaN that goes in comes out: nowhere does it become a number in silence.  docs/nan.md says what each op makes of it.

What an element of a result depends on is found by trying: other values are put into an input, and what changes depends
on it.  With NaN in all of the input all of that must be NaN, forward and in gradients, in references and in kernels.
"""

from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import registry
from ggrad.run.reference import evaluate, leaf_value
from ggrad.testing import compare_with_reference
from ggrad.testing.cases import CASES, COMPOSED
from ggrad.testing.check import gradients_of, node_of, results_of
from ggrad.testing.maker import Maker

NAN, INF = np.nan, np.inf
EVERY = {**CASES, **COMPOSED}

# Of (op, case, which input) a NaN may choose among numbers, and does so: of a maximum it is the place that matters,
# where its gradient goes, or what is looked up; and of a mask, beyond that it hides, the gradient knows nothing.
CHOICES = {
    "pool_2d": lambda case, i: case.startswith(("max", "at a maximum")),
    "pool_2d_back": lambda case, i: case.startswith("max"),
    "lightning_indexer_back": lambda case, i: "mask" in case and i == 3,
}
KEPT = {"kda": 3}  # results from there on are what its backward reads; they are laid out by chunks


def graphs(op: str, build):
    """The case's inputs, and graphs of its results and of what its gradient rule gives."""
    maker = Maker()
    results = results_of(build, maker)
    node = node_of(results)
    if node.updates:
        return
    yield maker.leaves, results[: KEPT.get(op)]
    if op in registry and registry[op]._grad is not None:
        found = tuple(gradients_of(results, Maker(seed=1)).values())
        if found:
            yield maker.leaves, found


def float_leaves(graph, leaves):
    return [t for t in leaves if t in graph.leaves and t.dtype.is_float and not t.dtype.quantized and t.size]


@np.errstate(all="ignore")
def swallowed(graph, results, leaf, rng):
    """The results that depend on a leaf, and are numbers where it is NaN."""
    values = {t: leaf_value(t) for t in graph.leaves}
    finite = values[leaf][np.isfinite(values[leaf])]
    before = evaluate(graph, values)
    depends = {t: np.zeros(t.shape, bool) for t in results if t.dtype.is_float}
    for _ in range(2):
        other = rng.uniform(finite.min(initial=0), finite.max(initial=1), leaf.shape)
        after = evaluate(graph, values | {leaf: other})
        for t, so_far in depends.items():
            so_far |= (after[t] != before[t]) & ~(np.isnan(after[t]) & np.isnan(before[t]))
    of_nan = evaluate(graph, values | {leaf: np.full(leaf.shape, NAN)})
    return [t for t, where in depends.items() if (where & ~np.isnan(of_nan[t])).any()]


@pytest.mark.parametrize("op", sorted(EVERY))
def test_no_reference_makes_a_number_of_nan(op):
    rng = np.random.default_rng(0)
    for name, build in EVERY[op].items():
        for leaves, results in graphs(op, build):
            graph = gg.Graph().build_forward_expand(*results)
            for leaf in float_leaves(graph, leaves):
                if not CHOICES.get(op, lambda case, i: False)(name, leaves.index(leaf)):
                    lost = swallowed(graph, results, leaf, rng)
                    assert not lost, f"{op}, {name}: {lost[0].label()} of NaN in input {leaves.index(leaf)}"


@pytest.mark.native
@pytest.mark.parametrize("op", sorted(CASES))
def test_kernels_of_every_instruction_set_have_nan_where_references_have_it(op, isa):
    for build in list(CASES[op].values())[:2]:
        for leaves, results in graphs(op, build):
            graph = gg.Graph().build_forward_expand(*results)
            for leaf in float_leaves(graph, leaves):
                memory = leaf.memory().copy()
                leaf.set(np.full(leaf.shape, NAN))
                compare_with_reference(graph, threads=(2,), rtol=1e-3)  # of what is finite others ask more
                leaf.memory()[...] = memory


# -- what the page says ---------------------------------------------------------------------------------------

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]
X = [-1.0, NAN, 2.0, NAN, 0.5, -INF, INF, 1.5, 0.0]
KINKED = {
    "relu": {},
    "leaky_relu": {"negative_slope": 0.25},
    "clamp": {"min": -0.5, "max": 1.0},
    "hardsigmoid": {},
    "hardswish": {},
    "elu": {},
    "abs": {},
    "xielu": {"alpha_n": 0.8, "alpha_p": 0.3},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KINKED)
def test_functions_with_kinks_have_nan_as_value_and_as_slope_at_nan(name, backend):
    x = gg.tensor(X, param=True)
    y = getattr(gg, name)(x, **KINKED[name])
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(y, gg.tensor(np.ones(len(X))))))
    graph.build_forward_expand(y).compute(backend=backend)
    nan = np.isnan(X)
    assert np.isnan(y.numpy()[nan]).all() and np.isnan(graph.grad(x).numpy()[nan]).all()
    assert not np.isnan(graph.grad(x).numpy()[[0, 2, 4]]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sgn", "step", "floor", "ceil", "round", "trunc"])
def test_steps_of_nan_are_nan(name, backend):
    y = getattr(gg, name)(gg.tensor(X))
    gg.Graph().build_forward_expand(y).compute(backend=backend)
    np.testing.assert_array_equal(np.isnan(y.numpy()), np.isnan(X))


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_an_order_nan_is_last_and_the_largest_is_the_first_nan(backend):
    x = gg.tensor([X])
    up, down, some, best = gg.argsort(x), gg.argsort(x, order="desc"), gg.top_k(x, k=8), gg.argmax(x)
    gg.Graph().build_forward_expand(up, down, some, best).compute(backend=backend)
    assert up.numpy().tolist() == [[5, 0, 8, 4, 7, 2, 6, 1, 3]]
    assert down.numpy().tolist() == [[6, 2, 7, 4, 8, 0, 5, 1, 3]]
    assert some.numpy().tolist() == [[6, 2, 7, 4, 8, 0, 5, 1]]
    assert best.numpy().tolist() == [1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["max", "avg"])
def test_a_window_with_nan_is_nan_and_its_maximum_sends_the_gradient_there(mode, backend):
    x = gg.tensor([[1.0, NAN, NAN, 4.0, 5.0, 3.0]], param=True)
    y = gg.pool_1d(x, mode, 3, 3)
    graph = gg.Graph().build_backward_expand(gg.sum(y))
    graph.build_forward_expand(y).compute(backend=backend)
    np.testing.assert_array_equal(y.numpy(), [[NAN, 5.0 if mode == "max" else 4.0]])
    if mode == "max":
        np.testing.assert_array_equal(graph.grad(x).numpy(), [[0, 1, 0, 0, 1, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_masked_out_is_not_looked_at(backend):
    x = gg.tensor([[1.0, NAN, 1.0]])
    y = gg.soft_max(x, gg.tensor([[0.0, -INF, 0.0]]))
    gg.Graph().build_forward_expand(y).compute(backend=backend)
    np.testing.assert_array_equal(y.numpy(), [[0.5, 0.0, 0.5]])


def test_the_page_names_all_that_is_tested_here():
    page = (Path(__file__).parents[1] / "docs" / "nan.md").read_text()
    for name in (*KINKED, "sgn", "step", "floor", "argsort", "top_k", "argmax", "pool_2d", "pool_1d", "soft_max"):
        assert f"`{name}`" in page, name
