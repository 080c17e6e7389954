"""What one writes with arrays elsewhere, written with tensors: equal to NumPy's, or refused with a clear word."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.errors import NotComputedError, ShapeError

X = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3, 4)).astype(np.float32)
Y = np.random.default_rng(1).uniform(0.5, 2.0, (3, 4)).astype(np.float32)
I = np.array([[7, -7, 3], [0, 5, -2]], np.int32)

EXPRESSIONS = {
    "a power": lambda x, y: x**3,
    "a negative power": lambda x, y: x**-1.5,
    "2 and 0.5": lambda x, y: x**2 + x**0.5,
    "a tensor's power": lambda x, y: x**y,
    "of a number": lambda x, y: 2.0**x,
    "arithmetic with numbers": lambda x, y: (1 - x / 2) * 3 + 1 / x - y,
    "sum": lambda x, y: x.sum() + x.sum(1, keepdims=True),
    "mean": lambda x, y: x.mean((0, 2)),
    "max": lambda x, y: x.max(-1) - x.min(0).max(-1),
    "prod": lambda x, y: x.prod(1),
    "flatten": lambda x, y: x.reshape(-1) * 2,
    "transpose": lambda x, y: x.transpose(2, 0, 1) + 0,
    "permuted": lambda x, y: x.transpose((1, 0, 2)) * 1,
    "chained": lambda x, y: (x - x.mean(-1, keepdims=True)) / (x.max(-1, keepdims=True) + 1e-3),
}
COMPARISONS = {
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= 1.0,
    "<": lambda x, y: x > 1.0,
    "<=": lambda x, y: x <= y,
    "i32": lambda x, y: x[0] > y,
}


def value(t):
    gg.Graph().build_forward_expand(t).compute()
    return t.numpy()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_is_numpys(name):
    f = EXPRESSIONS[name]
    np.testing.assert_allclose(value(f(gg.tensor(X), gg.tensor(Y))), f(X, Y), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_is_numpys(name):
    f = COMPARISONS[name]
    got = f(gg.tensor(X), gg.tensor(Y))
    assert got.dtype is gg.I32
    np.testing.assert_array_equal(value(got), f(X, Y))


@pytest.mark.parametrize(
    "f",
    [
        lambda i: i * 2,
        lambda i: 3 + i,
        lambda i: i - 1,
        lambda i: 10 - i,
        lambda i: -i,
        lambda i: i // 2,
        lambda i: i % 3,
    ],
)
def test_integers_stay_integers(f):
    got = f(gg.tensor(I))
    assert got.dtype is gg.I32
    np.testing.assert_array_equal(value(got), f(I))


def test_methods_that_numpy_calls_otherwise():
    torch = pytest.importorskip("torch")
    x, theirs = gg.tensor(X), torch.tensor(X)
    pairs = {
        "softmax": (x.softmax(1), theirs.softmax(1)),
        "log_softmax": (x.log_softmax(-1), theirs.log_softmax(-1)),
        "std": (x.std(0), theirs.std(0)),
        "var": (x.var((0, 1)), theirs.var((0, 1))),
        "argmax": (x.argmax(1), theirs.argmax(1)),
        "argmin": (x.argmin(1, keepdims=True), theirs.argmin(1, keepdim=True)),
        "flatten": (x.flatten(1), theirs.flatten(1)),
        "flatten all": (x.flatten(), theirs.flatten()),
        "unsqueeze": (x.unsqueeze(1), theirs.unsqueeze(1)),
        "unsqueeze, last": (x.unsqueeze(-1), theirs.unsqueeze(-1)),
        "squeeze": (x[:1].unsqueeze(2).squeeze(), theirs[:1].unsqueeze(2).squeeze()),
        "squeeze, named": (x[:1].squeeze(0), theirs[:1].squeeze(0)),
        "exp": (x.exp().log().sqrt().tanh().relu().sigmoid(), theirs.exp().log().sqrt().tanh().relu().sigmoid()),
        "transpose": (x.transpose(0, 1), theirs.transpose(0, 1)),
    }
    for name, (ours, expected) in pairs.items():
        np.testing.assert_allclose(value(ours), expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    for sizes in (2, 3, [1, 3], [4, 0]):
        pieces = x.split(sizes, axis=2)
        for ours, expected in zip(pieces, theirs.split(sizes, 2), strict=True):
            np.testing.assert_array_equal(value(ours + 0), expected.numpy())


def test_gradients_go_through_habits():
    torch = pytest.importorskip("torch")
    x, theirs = gg.tensor(X, param=True), torch.tensor(X, requires_grad=True)
    a, b = x.split(2, axis=-1)
    loss = ((a**3).mean() + b.flatten(1).softmax().max(-1).sum()) / 2
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    graph.compute()
    c, d = theirs.split(2, -1)
    expected = ((c**3).mean() + d.flatten(1).softmax(-1).max(-1).values.sum()) / 2
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(graph.grad(x).numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_a_scalar_is_a_number_after_a_run():
    loss = gg.tensor(X).sum()
    with pytest.raises(NotComputedError):
        float(loss)
    gg.Graph().build_forward_expand(loss).compute()
    assert float(loss) == loss.item() and int(gg.tensor(3)) == 3
    with pytest.raises(TypeError, match=r"leaf: f32\[2,3,4\] is no number: it has 24 elements"):
        float(gg.tensor(X))


def test_a_tensor_is_no_attribute():
    with pytest.raises(ShapeError, match="factor must be float"):
        gg.scale(gg.tensor(X), factor=gg.tensor(2.0))


@pytest.mark.parametrize(
    "given, meant",
    [
        ("f16", gg.F16),
        (np.float16, gg.F16),
        (np.dtype("f4"), gg.F32),
        ("bfloat16", gg.BF16),
        (np.int32, gg.I32),
        (gg.F16, gg.F16),
    ],
)
def test_dtypes_by_name(given, meant):
    assert gg.tensor([1, 2], dtype=given).dtype is meant
    assert gg.tensor(shape=(3,), dtype=given).dtype is meant
    assert gg.tensor(X).astype(given).dtype is meant
    assert gg.cast(gg.tensor(X), dtype=given).dtype is meant


@pytest.mark.parametrize("given", ["f64", np.float64, "half", 3, bool])
def test_no_such_dtype(given):
    with pytest.raises(ShapeError, match="dtype must be "):
        gg.tensor([1, 2], dtype=given)
    with pytest.raises(ShapeError, match="dtype must be "):
        gg.tensor(X).astype(given)


def test_put_together():
    a, b = gg.tensor(X), gg.tensor(X * 2)
    np.testing.assert_array_equal(value(gg.concat([a, b], axis=0)), np.concatenate([X, X * 2]))
    np.testing.assert_array_equal(value(gg.concat((a, b))), np.concatenate([X, X * 2], -1))
    np.testing.assert_array_equal(value(gg.stack([a, b])), np.stack([X, X * 2]))
    for f, numpys in ((gg.zeros, np.zeros), (gg.ones, np.ones)):
        np.testing.assert_array_equal(value(f((2, 3)) + 0.0), numpys((2, 3)))
    np.testing.assert_array_equal(
        value(gg.full((2, 3), 7.0) + gg.zeros_like(gg.tensor(np.ones((2, 3))))), np.full((2, 3), 7)
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: x.squeeze(0), "squeeze.*0 must be axes of size 1"),
        (lambda x: x.unsqueeze(5), "unsqueeze.*5 must be from -4 to 3"),
        (lambda x: x.split([1, 2], 2), r"pieces of \[1, 2\] do not make up 4 along axis 2"),
        (lambda x: x.split(0), "pieces of 0 elements"),
        (lambda x: x.split(1, 7), "there is no axis 7"),
        (lambda x: x.flatten(2, 1), "no axes from 2 to 1"),
        (lambda x: x.transpose(0), r"transpose.*two axes, or all 3, not \(0,\)"),
        (lambda x: x.reshape(1, 1, 2, 3, 4), "the most is 4"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ShapeError, match=message):
        make(gg.tensor(X))
