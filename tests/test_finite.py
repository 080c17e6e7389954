"""compute(check_finite=True) names the node that a NaN or an infinity comes from, and what it was made of."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import NotFiniteError

pytestmark = pytest.mark.native


def training_step():
    x = gg.tensor(np.ones((3, 4)), name="x")
    w = gg.tensor(np.ones((2, 4)), name="w", param=True)
    y = gg.log(gg.mul_mat(w, x))
    y.name = "y"
    loss = gg.sum(gg.sqr(y))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    optimizer = gg.SGD([w], lr=0.1)
    optimizer.build(graph)
    return graph, x, w, loss


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_finite_values_are_those_of_any_run(backend):
    graph, _, w, loss = training_step()
    graph.compute(backend=backend, check_finite=True)
    checked, moved = loss.item(), w.numpy().copy()
    other, _, v, plain = training_step()
    other.compute(backend=backend)
    assert plain.item() == checked and (v.numpy() == moved).all() and (moved != 1).all()
    graph.compute(backend=backend)  # and without it again


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "value, words",
    [
        (np.nan, r"mul_mat gave.*the first.*2 NaN of 6.*w: f32\[2,4\]: finite.*x: f32\[3,4\]: 1 NaN of 12"),
        (-4.0, r"log gave y.*the first.*2 NaN of 6.*: finite"),
        (-3.0, r"log gave y.*the first.*2 infinite of 6.*: finite"),
    ],
)
def test_the_first_node_is_named_and_no_leaf_is_updated(backend, value, words):
    graph, x, w, loss = training_step()
    graph.compute(backend=backend)
    before = w.numpy().copy()
    x.numpy()[1, :3], x.numpy()[1, 3] = 1.0, value  # its sum is NaN, negative, or 0
    with pytest.raises(NotFiniteError, match=words):
        graph.compute(backend=backend, check_finite=True)
    assert (w.numpy() == before).all()
    if backend == "native":
        with pytest.raises(gg.errors.NotComputedError):
            loss.numpy()


def test_updates_are_looked_at_too():
    total = gg.tensor(np.full(4, 3e38), name="total")
    graph = gg.Graph().build_forward_expand(gg.ops.accumulate(total, gg.tensor(np.full(4, 3e38))))
    with pytest.raises(NotFiniteError, match=r"accumulate.*4 infinite of 4"):
        graph.compute(check_finite=True)


def test_a_profile_is_another_question():
    with pytest.raises(gg.errors.GraphError, match="one of them"):
        training_step()[0].compute(check_finite=True, profile=True)
