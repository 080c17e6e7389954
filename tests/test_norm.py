"""What the normalising ops promise beyond their cases."""

import numpy as np
import pytest

import ggrad as gg


def computed(t):
    gg.Graph().build_forward_expand(t).compute()
    return t.numpy()


@pytest.mark.native
@pytest.mark.parametrize("offset", [0.0, 100.0, -1000.0, 30000.0])
def test_an_offset_common_to_a_row_costs_no_digits(offset):
    """The error stays at a few roundings of a result of size 1; what f32 took from x itself is not the kernel's."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((7, 257)) + offset).astype(np.float32).astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(computed(gg.norm(x)), expected, rtol=0, atol=1.2e-6)


@pytest.mark.native
@pytest.mark.parametrize("normalise", [gg.norm, gg.rms_norm])
def test_a_constant_row_stays_finite_without_eps_in_the_way(normalise):
    for value in (0.0, 0.1, 1e-20, 1e20):
        assert np.isfinite(computed(normalise(np.full((2, 7), value)))).all()


def test_a_parameters_gradient_does_not_keep_the_activations_gradient_alive():
    """dweight is made beside dx, which is as large as x: kept gradients must not hold on to it."""
    x, weights = gg.tensor(np.ones((64, 256))), [gg.tensor(np.ones(256), param=True) for _ in range(8)]
    y = x
    for weight in weights:
        y = gg.rms_norm(y, weight)
    graph = gg.Graph().build_backward_expand(gg.sum(y))
    owners = {graph.grad(weight).storage[0] for weight in weights}
    assert all(owner.nbytes == 4 * 256 for owner in owners)


@pytest.mark.native
@pytest.mark.parametrize("normalise", [gg.norm, gg.rms_norm])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
def test_rows_of_nothing_have_followers_too(normalise, shape):
    """Elementwise nodes that read the result are made block by block of it."""
    x = gg.tensor(np.ones(shape))
    y = gg.silu(normalise(x) * gg.tensor(np.ones(shape)))
    for threads in (1, 2):
        gg.Graph().build_forward_expand(y).compute(threads=threads)
        assert y.numpy().shape == shape


@pytest.mark.native
@pytest.mark.parametrize("op", [gg.norm, gg.rms_norm])
def test_the_gradient_by_a_constant_weight_is_not_computed(op):
    """Nor has it memory; the gradient by x is the same bits."""
    rng = np.random.default_rng(0)
    values, weights, back = rng.standard_normal((300, 67)), rng.standard_normal(67), rng.standard_normal((300, 67))
    found = {}
    for trained in (True, False):
        x, weight = gg.tensor(values, param=True), gg.tensor(weights, param=trained)
        graph = gg.Graph().build_backward_expand(gg.sum(op(x, weight) * gg.tensor(back)))
        node = next(t for t in graph.nodes if t.op.name == f"{op.name}_back")
        assert node.is_packed == trained
        assert (graph.grad(weight) is not None) == trained
        found[trained] = graph.compute(threads=2).grad(x).numpy().copy()
    np.testing.assert_array_equal(found[True], found[False])


def test_the_gradient_by_a_bias_alone_takes_no_other():
    x, weight = gg.tensor(np.ones((3, 4))), gg.tensor(np.ones(4))
    bias, back = gg.tensor(np.zeros(4), param=True), np.arange(12.0).reshape(3, 4)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.norm(x, weight, bias) * gg.tensor(back)))
    assert [t.attrs["wanted"] for t in graph.nodes if t.op is gg.norm_back] == [(False, False, True)]
    np.testing.assert_array_equal(graph.compute().grad(bias).numpy(), back.sum(0))
