"""Products of matrices beyond the op's own cases: NumPy's `@`, outer products, and how gradients are put together."""

import numpy as np
import pytest

import ggrad as gg

RNG = np.random.default_rng(0)


def value(t):
    gg.Graph().build_forward_expand(t).compute(backend="reference")
    return t.numpy()


def names(graph):
    return [t.op.name for t in graph.nodes]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (6, 3, 4)),
        ((1, 6, 2, 3), (5, 1, 3, 4)),
        ((3,), (5, 3, 4)),
        ((6, 5, 2, 3), (3,)),
        ((0, 2, 3), (3, 4)),
        ((2, 3), (0, 3, 4)),
        ((5, 1, 2, 0), (6, 0, 4)),
    ],
)
def test_matmul_is_numpys(left, right):
    a, b = RNG.standard_normal(left).astype(np.float32), RNG.standard_normal(right).astype(np.float32)
    product, expected = value(gg.tensor(a) @ gg.tensor(b)), a.astype(np.float64) @ b
    assert product.shape == expected.shape
    np.testing.assert_allclose(product, expected, rtol=1e-12)
    if a.size and b.size:
        gg.testing.check_gradients(gg.matmul, a, b)


def test_arrays_may_stand_on_either_side():
    a, b = RNG.standard_normal((2, 3)), RNG.standard_normal((3, 4))
    assert (a @ gg.tensor(b)).shape == (gg.tensor(a) @ b).shape == (2, 4)


def test_out_prod_sums_outer_products_with_batches_in_groups():
    a, b = gg.tensor(RNG.standard_normal((2, 7, 5))), gg.tensor(RNG.standard_normal((4, 7, 3)))
    expected = np.einsum("gkm,gkn->gnm", np.repeat(a.numpy().astype(np.float64), 2, 0), b.numpy())
    np.testing.assert_allclose(value(gg.out_prod(a, b)), expected, rtol=1e-12)
    gg.testing.check_gradients(gg.out_prod, a.numpy(), b.numpy())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gg.matmul(np.ones((2, 3)), np.ones((2, 3))), "rows of a have 3 elements, columns of b 2"),
        (lambda: gg.matmul(np.ones((2, 3)), 2.0), r"matmul\(a=f32\[2,3\], b=f32\[\]\): b is a scalar"),
        (lambda: gg.matmul(np.ones((2, 3), int), np.ones((3, 2))), "a is i32"),
        (lambda: gg.matmul(np.ones((2, 2, 3)), np.ones((4, 3, 2))), r"batch sizes \(2,\) and \(4,\) do not fit"),
        (lambda: gg.out_prod(np.ones((2, 3)), np.ones((3, 2))), "columns of a have 2 elements, columns of b 3"),
        (lambda: gg.out_prod(np.ones(3), np.ones(3)), "two axes or more"),
    ],
)
def test_shapes_that_do_not_fit_are_named(build, message):
    with pytest.raises(gg.errors.ShapeError, match=message):
        build()


def test_a_weights_gradient_is_one_product_over_all_tokens():
    w, x = gg.tensor(np.ones((5, 7)), param=True), gg.tensor(np.ones((2, 3, 4, 7)))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.mul_mat(w, x))).build_backward_expand()
    gradient = graph.grad(w)
    assert gradient.op.name == "mul_mat" and gradient.shape == w.shape
    assert names(graph).count("mul_mat") == 2 and "repeat_back" not in names(graph)


def test_grouped_heads_are_summed_inside_the_product():
    k, q = gg.tensor(np.ones((2, 2, 9, 8)), param=True), gg.tensor(np.ones((2, 6, 5, 8)))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.mul_mat(k, q))).build_backward_expand()
    assert names(graph).count("mul_mat") == 2 and "repeat_back" not in names(graph)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [gg.F32, gg.BF16, gg.Q8_0])
def test_columns_that_many_tasks_need_are_packed_beforehand_for_all(dtype, transposed):
    rows, columns, depth = 601, 163, 800
    a, b = RNG.standard_normal((columns, depth)).astype(np.float32), RNG.standard_normal((rows, depth))
    weight = gg.tensor(gg.quantize(a, dtype) if dtype is gg.Q8_0 else a, dtype=dtype)
    x = gg.transpose(gg.tensor(np.ascontiguousarray(b.T))) if transposed else gg.tensor(b)
    bias = gg.tensor(RNG.standard_normal(columns))
    product = gg.mul_mat(weight, x)
    y = gg.relu(product + bias)
    graph = gg.Graph().build_forward_expand(y)
    graph.compute(threads=1)
    alone = y.numpy().copy()
    graph.compute(threads=3)
    np.testing.assert_array_equal(y.numpy(), alone)
    exact = np.maximum(x.numpy().astype(np.float64) @ weight.numpy().T.astype(np.float64) + bias.numpy(), 0)
    np.testing.assert_allclose(alone, exact, atol=1e-3)  # sums of 800 products of about 1
    # of a quantized matrix no form in f32 is ever there as a whole
    assert (product in gg.session.Session(graph).plan.work) == (dtype is not gg.Q8_0)


def test_a_sum_of_nothing_is_zero_in_every_row():
    y = gg.mul_mat(gg.tensor(np.ones((40, 0))), gg.tensor(np.ones((2000, 0))))
    gg.Graph().build_forward_expand(y).compute()
    np.testing.assert_array_equal(y.numpy(), np.zeros((2000, 40)))
