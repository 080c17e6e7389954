"""Sums along any axes, and group norms: what is said with other ops."""

from itertools import combinations

import numpy as np
import pytest

import ggrad as gg

X = np.random.default_rng(0).normal(size=(2, 3, 4, 5))


@pytest.mark.parametrize("axis", [axes for n in range(5) for axes in combinations(range(-4, 0), n)])
def test_sums_along_any_axes_are_numpys(axis):
    for keepdims in (False, True):
        sums = gg.sum(gg.tensor(X), axis=axis, keepdims=keepdims)
        gg.Graph().build_forward_expand(sums).compute()
        np.testing.assert_allclose(sums.numpy(), X.sum(axis=axis, keepdims=keepdims), atol=1e-5)
        gg.testing.check_gradients(lambda x, keep=keepdims: gg.sum(x, axis=axis, keepdims=keep), X)


def test_sums_of_nothing_are_zero():
    sums = gg.sum(gg.tensor(np.ones((3, 0))), axis=1)
    gg.Graph().build_forward_expand(sums).compute()
    np.testing.assert_array_equal(sums.numpy(), np.zeros(3))


@pytest.mark.parametrize("channels, n_groups", [(6, 3), (6, 1), (6, 6), (5, 2), (7, 3), (5, 4), (3, 9)])
def test_group_norm_normalises_groups_of_channels_and_the_rest(channels, n_groups):
    x = np.random.default_rng(1).normal(size=(2, channels, 3, 4)) + 2
    each = -(-channels // n_groups)
    expected = np.concatenate([
        (part - part.mean((1, 2, 3), keepdims=True)) / np.sqrt(part.var((1, 2, 3), keepdims=True) + 1e-3)
        for part in (x[:, at : at + each] for at in range(0, channels, each))
    ], axis=1)  # fmt: skip
    normed = gg.group_norm(gg.tensor(x), n_groups, eps=1e-3)
    gg.Graph().build_forward_expand(normed).compute()
    np.testing.assert_allclose(normed.numpy(), expected, atol=2e-6)
    gg.testing.check_gradients(lambda t: gg.group_norm(t, n_groups, eps=1e-3), x)


def test_group_norm_of_no_elements_is_empty():
    assert gg.group_norm(gg.tensor(shape=(2, 0, 3, 4)), 3).shape == (2, 0, 3, 4)


RULES = {
    "sum": (gg.sum, np.sum),
    "mean": (gg.mean, np.mean),
    "max": (gg.max, np.max),
    "min": (gg.min, np.min),
    "amax": (gg.amax, np.max),
    "amin": (gg.amin, np.min),
    "prod": (gg.prod, np.prod),
    "var": (gg.var, lambda x, **rest: np.var(x, ddof=1, **rest)),
    "std": (gg.std, lambda x, **rest: np.std(x, ddof=1, **rest)),
    "logsumexp": (gg.logsumexp, lambda x, **rest: np.log(np.sum(np.exp(x), **rest))),
}
AXES = [None, *(axes for n in range(1, 5) for axes in combinations(range(-4, 0), n)), 0, 3]


@pytest.mark.parametrize("name", RULES)
def test_all_reductions_have_one_rule(name):
    """axis=None is of all, a scalar; keepdims keeps what is gone as an axis of size 1."""
    ours, numpys = RULES[name]
    made = [ours(gg.tensor(X), axis, keepdims=k) for axis in AXES for k in (False, True)]
    gg.Graph().build_forward_expand(*made).compute()
    cases = [(axis, k) for axis in AXES for k in (False, True)]
    for got, (axis, k) in zip(made, cases, strict=True):
        expected = numpys(X, axis=axis, keepdims=k)
        assert got.shape == expected.shape, (axis, k)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=f"{axis}, {k}")
    for axis in (4, -5, (0, 0)):
        with pytest.raises(gg.errors.ShapeError, match=r"\(x=f32\[2,3,4,5\]\): .* must be axes of x"):
            ours(gg.tensor(X), axis)
    assert ours(gg.tensor(X)).shape == ()


@pytest.mark.parametrize("axis", range(-4, 4))
@pytest.mark.parametrize("keepdims", [False, True])
def test_the_place_of_an_extreme_is_found_along_any_axis(axis, keepdims):
    largest, smallest = (f(gg.tensor(X), axis, keepdims=keepdims) for f in (gg.argmax, gg.argmin))
    gg.Graph().build_forward_expand(largest, smallest).compute()
    np.testing.assert_array_equal(largest.numpy(), np.argmax(X, axis, keepdims=keepdims))
    np.testing.assert_array_equal(smallest.numpy(), np.argmin(X, axis, keepdims=keepdims))


def test_gradients_of_a_product_with_zeros_are_torchs():
    torch = pytest.importorskip("torch")
    values = np.array([[2, 0, 3, 5, 7], [0, 1, 0, 2, 4], [1, 2, 3, 4, 5]], np.float32)
    x, theirs = gg.tensor(values, param=True), torch.tensor(values, requires_grad=True)
    graph = gg.Graph().build_forward_expand(gg.sum(gg.prod(x, 1))).build_backward_expand()
    graph.compute()
    theirs.prod(1).sum().backward()
    np.testing.assert_allclose(graph.grad(x).numpy(), theirs.grad.numpy(), rtol=1e-6)


def test_ggmls_forms_are_per_row():
    rows, sums = gg.mean_rows(gg.tensor(X)), gg.sum_rows(gg.tensor(X))
    gg.Graph().build_forward_expand(rows, sums).compute()
    np.testing.assert_allclose(rows.numpy(), X.mean(-1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(sums.numpy(), X.sum(-1, keepdims=True), atol=1e-5)
