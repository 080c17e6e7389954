"""Optimizer steps: what they write, and when they do not."""

import numpy as np
import pytest

import ggrad as gg

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]
HYPER = [0.01, 0.9, 0.999, 1e-8, 0.1, 10.0, 1000.0]


def leaves(n, *shape):
    rng = np.random.default_rng(0)
    return [gg.tensor(rng.uniform(0.5, 1.5, shape)) for _ in range(n)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(backend, bad):
    """Through the norm and the factor made of it: one bad element of one gradient, and nothing is written."""
    x, y, m, v = leaves(4, 3, 5)
    good, broken = leaves(2, 3, 5)
    broken.numpy()[1, 2] = bad
    factor = gg.clip_factor(gg.global_norm(good, broken), max_norm=1.0)
    steps = gg.opt_step_adamw(x, good, m, v, HYPER, factor), gg.opt_step_sgd(y, good, [0.1, 0.0], factor)
    before = [t.numpy().copy() for t in (x, y, m, v)]
    gg.Graph().build_forward_expand(*steps).compute(backend=backend)
    for t, value in zip((x, y, m, v), before, strict=True):
        np.testing.assert_array_equal(t.numpy(), value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_gradient_steps_as_its_copy_does(backend):
    grad = np.random.default_rng(1).standard_normal((5, 3))
    for step in (
        lambda x, g, m, v: gg.opt_step_adamw(x, g, m, v, HYPER),
        lambda x, g, m, v: gg.opt_step_sgd(x, g, [0.1, 0.01]),
    ):
        results = []
        for g in (gg.tensor(grad).T, gg.tensor(grad.T)):
            x, m, v = leaves(3, 3, 5)
            gg.Graph().build_forward_expand(step(x, g, m, v)).compute(backend=backend)
            results.append(x.numpy().copy())
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_clipped_to_the_norm_of_all(backend):
    grads = leaves(3, 4, 4)
    norm = gg.global_norm(*grads)
    factor = gg.clip_factor(norm, max_norm=0.5)
    x = gg.tensor(np.zeros((4, 4)))
    step = gg.opt_step_sgd(x, grads[0], [1.0, 0.0], factor)
    gg.Graph().build_forward_expand(step, norm, factor).compute(backend=backend)
    size = np.sqrt(sum(np.square(g.numpy().astype(float)).sum() for g in grads))
    np.testing.assert_allclose(norm.numpy(), size, rtol=1e-6)
    np.testing.assert_allclose(x.numpy(), -grads[0].numpy() * 0.5 / size, rtol=1e-6)


def test_halves_are_refused_as_parameters():
    grad, m, v = leaves(3, 4)
    for dtype in (gg.F16, gg.BF16):
        x = gg.tensor(np.ones(4), dtype=dtype)
        with pytest.raises(gg.errors.ShapeError, match="keep the parameter in f32"):
            gg.opt_step_adamw(x, grad, m, v, HYPER)
        with pytest.raises(gg.errors.ShapeError, match="keep the parameter in f32"):
            gg.opt_step_sgd(x, grad, [0.1, 0.0])


def test_only_leaves_are_stepped_and_moments_are_their_own():
    x, grad, m, v = leaves(4, 4)
    with pytest.raises(gg.errors.ShapeError, match="must be a leaf"):
        gg.opt_step_adamw(gg.scale(x, factor=1.0), grad, m, v, HYPER)
    with pytest.raises(gg.errors.ShapeError, match="three leaves"):
        gg.opt_step_adamw(x, grad, m, m, HYPER)
