"""Functions along axes beside NumPy's and torch's of the same names."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.errors import IndexRangeError, ShapeError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
IDS = RNG.integers(0, 4, (3, 6, 5)).astype(np.int32)
BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


def value(t, backend):
    gg.Graph().build_forward_expand(t).compute(backend=backend)
    return np.array(t.numpy())


NUMPY = {
    "amax": (lambda x: gg.amax(x, (0, 2)), lambda x: np.amax(x, (0, 2))),
    "amin": (lambda x: gg.amin(x, 1, keepdims=True), lambda x: np.amin(x, 1, keepdims=True)),
    "flip": (lambda x: gg.flip(x, (0, 2)), lambda x: np.flip(x, (0, 2))),
    "logsumexp": (lambda x: gg.logsumexp(x, 1), lambda x: np.log(np.exp(x.astype(np.float64)).sum(1))),
    "max": (lambda x: gg.max(x, 1), lambda x: x.max(1)),
    "max, where": (lambda x: gg.argmax(x, 1), lambda x: x.argmax(1)),
    "min, where": (lambda x: gg.argmin(x, 0, keepdims=True), lambda x: x.argmin(0, keepdims=True)),
    "sort": (lambda x: gg.sort(x, 1)[0], lambda x: np.sort(x, 1)),
    "stack": (lambda x: gg.stack([x[0], x[1]], -1), lambda x: np.stack([x[0], x[1]], -1)),
    "std": (lambda x: gg.std(x, (0, 1)), lambda x: x.astype(np.float64).std((0, 1), ddof=1)),
    "take_along_axis": (
        lambda x: gg.take_along_axis(x, gg.tensor(IDS), 1),
        lambda x: np.take_along_axis(x, IDS.astype(np.int64), 1),
    ),
    "var": (lambda x: gg.var(x, -1, correction=0), lambda x: x.astype(np.float64).var(-1)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ours, numpys", NUMPY.values(), ids=NUMPY)
def test_values_are_those_of_numpy(ours, numpys, backend):
    np.testing.assert_allclose(value(ours(gg.tensor(X)), backend), numpys(X), rtol=1e-6, atol=1e-6)


TORCH = {
    "gather": (lambda g, x, i, s: g.gather(x, 1, i)),
    "scatter_add": (lambda g, x, i, s: g.scatter_add(x, 1, i, s)),
    "index_add": (lambda g, x, i, s: g.index_add(x, 1, i[0, :, 0], s)),
    "log_softmax": (lambda g, x, i, s: g.log_softmax(x, 1)),
    "logsumexp": (lambda g, x, i, s: g.logsumexp(x, (0, 2))),
    "sort": (lambda g, x, i, s: g.sort(x, 1, descending=True)[0]),
    "var": (lambda g, x, i, s: g.var(x, 1)),
    "max": (lambda g, x, i, s: g.amax(x, 2)),
}


@pytest.mark.native
@pytest.mark.parametrize("made", TORCH.values(), ids=TORCH)
def test_values_and_gradients_are_those_of_torch(made):
    torch = pytest.importorskip("torch")
    source = RNG.normal(size=IDS.shape).astype(np.float32)
    x, s = gg.tensor(X, param=True), gg.tensor(source, param=True)
    y = made(gg, x, gg.tensor(IDS), s)
    weights = RNG.normal(size=y.shape).astype(np.float32)
    graph = gg.Graph().build_forward_expand(y).build_backward_expand(gg.sum(gg.mul(y, gg.tensor(weights))))
    graph.compute()
    tx, ts = torch.tensor(X, requires_grad=True), torch.tensor(source, requires_grad=True)
    ty = made(torch, tx, torch.tensor(IDS, dtype=torch.int64), ts)
    (ty * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(y.numpy(), ty.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(graph.grad(x).numpy(), tx.grad.numpy(), rtol=1e-5, atol=1e-5)
    if ts.grad is not None:
        np.testing.assert_allclose(graph.grad(s).numpy(), ts.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equals_the_first_has_the_gradient_and_nan_is_the_largest(backend):
    x = gg.tensor([[1.0, 3.0, 3.0], [2.0, np.nan, 5.0]], param=True)
    y = gg.amax(x, 1)
    graph = gg.Graph().build_forward_expand(y).build_backward_expand(gg.sum(y))
    graph.compute(backend=backend)
    np.testing.assert_array_equal(y.numpy(), [3.0, np.nan])
    np.testing.assert_array_equal(graph.grad(x).numpy(), [[0, 1, 0], [0, 1, 0]])


@pytest.mark.parametrize("p", [1, 2, 3, 4, 0.5, -1, -0.5, -2, 1.7])
def test_numbers_as_powers(p):
    x = RNG.uniform(0.5, 2, (5, 7)).astype(np.float32)
    np.testing.assert_allclose(value(gg.pow(gg.tensor(x), p), "reference"), x.astype(np.float64) ** p, rtol=1e-6)
    gg.testing.check_gradients(lambda t: gg.sum(gg.pow(t, p)), x)


def test_one_hot_and_constants():
    assert value(gg.one_hot(gg.tensor([2, 0, 7]), 3), "reference").tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert value(gg.eye(2, 3), "reference").tolist() == [[1, 0, 0], [0, 1, 0]]
    assert value(gg.linspace(0, 1, 3), "reference").tolist() == [0, 0.5, 1]
    assert value(gg.zeros_like(gg.tensor([[3, 4]])), "reference").tolist() == [[0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_out_of_range_stops_the_run(backend):
    t = gg.take_along_axis(gg.tensor([1.0, 2.0]), gg.tensor([2]))
    with pytest.raises(IndexRangeError):
        value(t, backend)


REFUSED = {
    "an axis that is not there": lambda: gg.amax(gg.tensor([1.0]), 1),
    "an axis twice": lambda: gg.var(gg.tensor([[1.0]]), (0, -2)),
    "other axes differ": lambda: gg.take_along_axis(gg.tensor([[1.0]]), gg.tensor([[0], [0]])),
    "source and ids differ": lambda: gg.scatter_add(gg.tensor([[1.0]]), 1, gg.tensor([[0]]), gg.tensor([[1.0, 2.0]])),
    "too few ids": lambda: gg.index_add(gg.tensor([[1.0]]), 0, gg.tensor([0]), gg.tensor([[1.0], [2.0]])),
    "nothing to stack": lambda: gg.stack([]),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call):
    with pytest.raises(ShapeError):
        call()
