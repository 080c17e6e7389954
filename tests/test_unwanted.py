"""Gradients that nobody wants are not computed: of every case, with each choice of parameters."""

from itertools import chain

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, ShapeError
from ggrad.core.op import all_of, node_of, registry
from ggrad.testing.cases import CASES, COMPOSED
from ggrad.testing.check import results_of
from ggrad.testing.maker import Maker

EVERY = [pytest.param(cases, id=op) for op, cases in chain(CASES.items(), COMPOSED.items())]
FORWARD_AGAIN = {"cross_entropy_class"}  # computed once more, to the same bits, for its sums; its loss is one number
CHOOSING = [name for name, op in registry.items() if op.chooses]


class Choosing(Maker):
    """Of the float inputs of a case some are parameters; None: all that may be."""

    def __init__(self, chosen=None):
        super().__init__()
        self.chosen, self.offered = chosen, []

    def _leaf(self, values, dtype, param, role="constant"):
        at = len(self.leaves)
        self.offered += [at] * param
        return super()._leaf(values, dtype, param and (self.chosen is None or at in self.chosen), role)


def differentiated(build, chosen=None, used=None):
    """The maker, its parameters' gradients, and the nodes made for them; the loss is of all results, or one of them."""
    maker = Choosing(chosen)
    results = [t for t in results_of(build, maker) if t.dtype.is_float and not t.dtype.quantized and not t.is_leaf]
    graph = gg.Graph()
    if results and any(leaf.param for leaf in maker.leaves):
        rng = np.random.default_rng(3)
        terms = [gg.sum(gg.cast(t, gg.F32) * gg.tensor(rng.normal(size=t.shape))) for t in results]
        loss = sum(terms[1:], start=terms[0]) if used is None else terms[used % len(terms)]
        graph.build_forward_expand(loss)
    else:
        return maker, {}, [], graph
    before = set(graph.nodes)
    try:
        graph.build_backward_expand(loss)
    except GradientError:  # what has none is refused, whatever is wanted
        return maker, {}, [], graph
    grads = {i: g for i, t in enumerate(maker.leaves) if t.param and (g := graph.grad(t)) is not None}
    return maker, grads, [t for t in graph.nodes if t not in before], graph


def choices(build):
    """Each parameter alone, and all but it; and each result alone."""
    offered = differentiated(build)[0].offered
    for used in (None, *range(min(2, len(results_of(build))))):
        yield None, used
        for i in offered:
            yield {i}, used
            yield {*offered} - {i}, used


@pytest.mark.parametrize("cases", EVERY)
def test_no_node_of_the_gradients_computes_a_part_that_nobody_reads(cases):
    for name, build in cases.items():
        for chosen, used in choices(build):
            _, grads, nodes, graph = differentiated(build, chosen, used)
            read = {s for t in graph.nodes for s in t.src} | set(grads.values())
            for t in nodes:
                if t.op.name in FORWARD_AGAIN:
                    continue
                idle = [f for f, p in zip(t._pack.fields, t.parts, strict=True) if p not in read] if t.is_packed else []
                assert not idle, f"{name}, parameters {chosen}, result {used}: {t.op.name} makes {idle}"


@pytest.mark.native
@pytest.mark.parametrize("cases", EVERY)
def test_what_is_wanted_beside_it_does_not_change_a_gradients_bits(cases):
    """Of one case with kernels that choose, and of the first of all others."""
    some = [b for b in cases.values() if any(t.op.chooses for t in differentiated(b)[2])] or [*cases.values()][:1]
    for build in some:
        maker, _, _, graph = differentiated(build)
        if sum(t.size for t in graph.nodes) > 1e6:
            continue
        expected = values(build, None)
        for i in maker.offered:
            for chosen in ({i}, {*maker.offered} - {i}):
                for leaf, got in values(build, chosen).items():
                    assert same_bits(got, expected[leaf]), f"input {leaf}, where {chosen} are parameters"


def values(build, chosen):
    _, grads, _, graph = differentiated(build, chosen)
    if not grads:
        return {}
    graph.compute(threads=2)
    return {i: g.numpy().copy() for i, g in grads.items()}


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.native
@pytest.mark.parametrize("op", CHOOSING)
def test_any_choice_of_results_has_the_bits_that_all_have(op):
    for build in CASES[op].values():
        node = node_of(results_of(build))
        there = node.attrs["wanted"]
        whole = computed(node, there)
        for i in np.flatnonzero(there):
            alone = tuple(bool(j == i) for j in range(len(there)))
            rest = tuple(bool(w and j != i) for j, w in enumerate(there))
            for wanted in (alone, rest):
                if any(wanted):
                    for got, right in zip(computed(node, wanted), whole, strict=True):
                        assert got is None or same_bits(got, right), f"result {i} of {there}: {wanted}"


def computed(node, wanted):
    made = node.op.node(*node.src, **node.attrs | {"wanted": wanted})
    gg.Graph().build_forward_expand(*all_of(made)).compute(threads=3)
    return [t if t is None else t.numpy().copy() for t in made]


def test_a_constant_weight_has_no_gradient_in_the_graph():
    """Of LoRA's frozen norms: one result where there were two, and no copy of it."""
    x, weight = gg.tensor(np.ones((4, 8)), param=True), gg.tensor(np.ones(8))
    graph = gg.Graph().build_backward_expand(gg.sum(gg.sqr(gg.rms_norm(x, weight))))
    (back,) = [t for t in graph.nodes if t.op.name == "rms_norm_back"]
    assert back.attrs["wanted"] == (True, False) and not back.is_packed and back.shape == x.shape


@pytest.mark.parametrize(
    "wanted, message",
    [
        ((True,), r"^norm_back\(dout=.*\): wanted=\(True,\) must have a bool for each of dx, dweight, dbias"),
        ((False, False, False), r"wanted names no result"),
        ((True, True, False), r"dweight is wanted of an input that was left out"),
    ],
)
def test_a_choice_that_is_none_is_refused(wanted, message):
    x = gg.tensor(np.ones((2, 3)))
    with pytest.raises(ShapeError, match=message):
        gg.norm_back(x, x, wanted=wanted)


def test_a_choice_is_made_of_bools():
    x = gg.tensor(np.ones((2, 3)))
    with pytest.raises(ShapeError, match=r"^norm_back\(\): wanted must be a bool for each result, not \[1, 0\]"):
        gg.norm_back(x, x, wanted=[1, 0])
