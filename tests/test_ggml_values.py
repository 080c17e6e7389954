"""Ops under ggml's names give ggml's values, where ggml and common sense might differ."""

import numpy as np
import pytest

import ggrad as gg

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_means_of_pool_1d_are_of_what_lies_inside(backend):
    x = gg.tensor(np.ones(5), param=True)
    out = gg.pool_1d(x, "avg", 2, 1, 1)
    graph = gg.Graph().build_backward_expand(gg.sum(out))
    graph.build_forward_expand(out).compute(backend=backend)
    np.testing.assert_array_equal(out.numpy(), np.ones(6))
    np.testing.assert_array_equal(graph.grad(x).numpy(), [1.5, 1, 1, 1, 1.5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_means_of_pool_2d_count_the_padding(backend):
    x = gg.tensor(np.ones((2, 2)))
    options = dict(mode="avg", kernel=(2, 2), stride=(1, 1), padding=(1, 1))
    counted, inside = gg.pool_2d(x, **options), gg.pool_2d(x, **options, count_padding=False)
    gg.Graph().build_forward_expand(counted, inside).compute(backend=backend)
    np.testing.assert_array_equal(counted.numpy(), [[0.25, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 0.25]])
    np.testing.assert_array_equal(inside.numpy(), np.ones((3, 3)))
