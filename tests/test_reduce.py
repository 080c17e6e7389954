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
