"""Python's numbers beside tensors, tensors as NumPy arrays, and marking an output by its attribute."""

import operator

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import NotComputedError, ShapeError

X = np.array([1.0, 2.0, -4.0], np.float32)


def run(t, backend):
    gg.Graph().build_forward_expand(t).compute(backend=backend)
    return t.numpy()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("number", [2, 2.5, True, np.float64(0.5), np.int64(3), np.bool_(True)])
@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_numbers_stand_on_either_side_of_every_operator(operation, number, backend):
    value = float(number)
    np.testing.assert_allclose(run(operation(gg.tensor(X), number), backend), operation(X, value), rtol=1e-6)
    if not isinstance(number, np.generic):  # those compute first, and hand over to the tensor all the same
        np.testing.assert_allclose(run(operation(number, gg.tensor(X)), backend), operation(value, X), rtol=1e-6)


@pytest.mark.parametrize("function", [gg.add, gg.sub, gg.mul, gg.div])
def test_numbers_are_operands_of_ops(function):
    a = gg.tensor(X)
    plain = {gg.add: np.add, gg.sub: np.subtract, gg.mul: np.multiply, gg.div: np.divide}[function]
    for number in (1, 2.5, True):
        np.testing.assert_allclose(run(function(a, number), "reference"), plain(X, float(number)), rtol=1e-6)
        np.testing.assert_allclose(run(function(number, a), "reference"), plain(float(number), X), rtol=1e-6)


def test_a_number_takes_the_dtype_of_the_tensor_beside_it():
    @gg.op
    def second(a: gg.Any4, b: gg.Any4):
        """b"""
        return b.spec

    halves, ints, floats = gg.tensor(X, dtype=gg.F16), gg.tensor([1, 2]), gg.tensor(X)
    for a, number, dtype in [
        (halves, 2, gg.F16), (halves, 2.5, gg.F16), (halves, True, gg.F16), (ints, 2, gg.I32), (ints, True, gg.I32),
        (ints, 2.5, gg.F32), (floats, 2, gg.F32), (floats, 2.5, gg.F32),
    ]:  # fmt: skip
        assert second(a, number).src[1].dtype is dtype
    # where a half is cast to f32 on the way, a number is f32 at once, and loses nothing
    assert gg.add(halves, 0.1).src[1].dtype is gg.F32
    assert gg.add(0.1, halves).src[0].numpy() == np.float32(0.1)


def test_arrays_and_lists_keep_their_own_dtypes():
    with pytest.raises(ShapeError):
        gg.add(gg.tensor(X), np.array([1, 2, 3]))  # i32, as an array of integers is


def test_the_gradient_passes_a_number():
    x = gg.tensor(X, param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(1 / x + x / 4))
    graph.compute(backend="reference")
    np.testing.assert_allclose(graph.grad(x).numpy(), -1 / X**2 + 0.25, rtol=1e-6)


def test_a_tensor_is_an_array_of_its_values():
    x = gg.tensor(X)
    y = x + x
    gg.Graph().build_forward_expand(y).compute()
    before = gg.tensor(0.0).serial
    for t, value in ((x, X), (y, 2 * X)):
        made = np.asarray(t)
        assert made.dtype == np.float32 and np.shares_memory(made, t.numpy())
        np.testing.assert_array_equal(made, value)
        assert np.asarray(t, np.float64).dtype == np.float64
        copied = np.array(t)
        assert not np.shares_memory(copied, t.numpy())
    np.testing.assert_array_equal(np.stack([x, y]), [X, 2 * X])
    assert gg.tensor(0.0).serial == before + 1, "a node was made"


def test_a_tensor_without_a_value_is_no_array():
    y = gg.exp(gg.tensor(X))
    with pytest.raises(NotComputedError, match="cannot be read: no run has kept it"):
        np.asarray(y)
    with pytest.raises(NotComputedError, match="holds no value"):
        np.asarray(gg.tensor(shape=3))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_marking_an_output_takes_effect_after_a_run_too(backend):
    x = gg.tensor(X)
    hidden = gg.exp(x)
    graph = gg.Graph().build_forward_expand(gg.sum(gg.neg(hidden)))
    graph.compute(backend=backend)
    hidden.output = True
    graph.compute(backend=backend)
    np.testing.assert_allclose(hidden.numpy(), np.exp(X), rtol=1e-6)
    hidden.output = False
    assert hidden not in graph.kept
    gg.set_output(hidden)
    assert hidden.output and hidden in graph.kept
