"""Leaves that a graph writes: who reads the old value, who the new one, and what is refused."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.errors import GraphError

BACKENDS = ["native", "reference"]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_readers_before_see_the_old_value_and_the_result_is_the_new_one(backend):
    state, x = gg.tensor(random(5), name="state"), gg.tensor(random(5, seed=1))
    before = state * 2
    new = gg.assign(state, state + x)
    after = new * 10
    graph = gg.Graph().build_forward_expand(before, after)
    expected = state.numpy().copy()
    for _ in range(3):
        graph.compute(backend=backend)
        np.testing.assert_allclose(before.numpy(), expected * 2, rtol=1e-6)
        expected = expected + x.numpy()
        np.testing.assert_allclose(after.numpy(), expected * 10, rtol=1e-6)
        np.testing.assert_allclose(state.numpy(), expected, rtol=1e-6)


def test_a_write_that_is_no_root_does_not_run():
    state = gg.tensor(random(5))
    before = state.numpy().copy()
    gg.assign(state, state * 2)
    gg.Graph().build_forward_expand(state * 3).compute()
    np.testing.assert_array_equal(state.numpy(), before)


def test_reading_the_leaf_after_the_write_is_refused():
    state = gg.tensor(random(5), name="state")
    new = gg.assign(state, state * 2)
    with pytest.raises(GraphError, match=r"neg: f32\[5\] reads state: f32\[5\], .* assign: f32\[5\], writes"):
        gg.Graph().build_forward_expand(new, gg.neg(state))


def test_two_writes_of_one_leaf_are_refused():
    state = gg.tensor(random(5), name="state")
    first, second = gg.assign(state, state * 2), gg.assign(state, gg.tensor(random(5)))
    with pytest.raises(GraphError, match=r"assign: .* reads state"):
        gg.Graph().build_forward_expand(first, second)


@pytest.mark.parametrize("threads", [1, 4])
def test_what_lies_in_the_leaf_itself_is_read_before_it_is_written(threads):
    big = gg.tensor(random(300, 300))
    expected = big.numpy().T.copy()
    gg.Graph().build_forward_expand(gg.assign(big, big.T)).compute(threads=threads)
    np.testing.assert_array_equal(big.numpy(), expected)
    expected = big.numpy()[::-1].copy()
    flipped = gg.assign_rows(big, big[::-1], np.arange(300, dtype=np.int32))
    gg.Graph().build_forward_expand(flipped).compute(threads=threads)
    np.testing.assert_array_equal(big.numpy(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_read_the_value_before_the_write(backend):
    """Truncated back-propagation: the state that a step leaves is where the next one begins."""
    state, w = gg.tensor(random(4), name="state"), gg.tensor(random(4, seed=1), param=True)
    hidden = gg.tanh(w * state)
    graph = gg.Graph().build_forward_expand(gg.assign(state, hidden)).build_backward_expand(gg.sum(hidden))
    for _ in range(3):
        old = state.numpy().copy()
        graph.compute(backend=backend)
        new = np.tanh(w.numpy() * old)
        np.testing.assert_allclose(graph.grad(w).numpy(), (1 - new**2) * old, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(state.numpy(), new, rtol=1e-5, atol=1e-7)


def test_what_writes_a_leaf_that_a_delayed_node_reads_is_delayed_too():
    a, b = gg.tensor(random(4), name="a"), gg.tensor(random(4, seed=2), name="b")
    w = gg.tensor(random(4, seed=1), param=True)
    hidden = w * a
    new_a = gg.assign(a, hidden)
    shown = new_a + b
    new_b = gg.assign(b, b * 2)
    graph = gg.Graph().build_forward_expand(shown, new_b).build_backward_expand(gg.sum(gg.sqr(hidden)))
    old_a, old_b = a.numpy().copy(), b.numpy().copy()
    graph.compute()
    np.testing.assert_allclose(graph.grad(w).numpy(), 2 * w.numpy() * old_a**2, rtol=1e-5)
    np.testing.assert_allclose(shown.numpy(), w.numpy() * old_a + old_b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(b.numpy(), old_b * 2)


def test_a_gradient_that_needs_the_old_value_and_the_new_one_is_refused():
    state, w = gg.tensor(random(4), name="state"), gg.tensor(random(4, seed=1), param=True)
    hidden = w * state
    loss = gg.sum(gg.sqr(gg.assign(state, hidden)))
    graph = gg.Graph().build_forward_expand(loss)
    with pytest.raises(GraphError, match=r"reads state: f32\[4\]"):
        graph.build_backward_expand()


def test_gradients_go_through_the_result_to_what_was_written():
    torch = pytest.importorskip("torch")
    cache, k = gg.tensor(random(1, 6, 3)), gg.tensor(random(1, 2, 3, seed=1), param=True)
    ids, weights = np.array([4, 1], np.int32), random(1, 6, 3, seed=2)
    theirs = torch.tensor(k.numpy().copy(), requires_grad=True)
    whole = torch.tensor(cache.numpy().copy()).index_copy(1, torch.tensor(ids).long(), theirs)
    (whole**2 * torch.tensor(weights)).sum().backward()
    loss = gg.sum(gg.sqr(gg.assign_rows(cache, k, ids)) * weights)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    graph.compute()
    np.testing.assert_allclose(graph.grad(k).numpy(), theirs.grad.numpy(), rtol=1e-6)

    state, value = gg.tensor(random(5)), gg.tensor(random(5, seed=3), param=True)
    graph = gg.Graph().build_forward_expand(gg.sum(gg.sqr(gg.assign(state, value * 3)))).build_backward_expand()
    graph.compute()
    np.testing.assert_allclose(graph.grad(value).numpy(), 18 * value.numpy(), rtol=1e-6)


def test_an_average_of_weights_follows_them():
    w, ema = gg.tensor(random(5), param=True), gg.tensor(random(5, seed=1))
    graph = gg.Graph().build_forward_expand(gg.assign(ema, ema * 0.9 + w * 0.1))
    graph.build_backward_expand(gg.sum(gg.sqr(w)))
    gg.SGD([w], lr=0.1).build(graph)
    expected = ema.numpy().copy()
    for _ in range(4):
        expected = expected * np.float32(0.9) + w.numpy() * np.float32(0.1)
        graph.compute()
        np.testing.assert_allclose(ema.numpy(), expected, rtol=1e-6)
