"""Ops of one's own beside the library's: names may be the same, and neither takes the other's place."""

import inspect
import types
from dataclasses import dataclass

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.builtin import builtin, provides
from ggrad.core.errors import KernelError
from ggrad.core.op import Op, Record, own, registry

X = np.array([1.0, 2.0], np.float32)


def run(*results, backend="native"):
    gg.Graph().build_forward_expand(*results).compute(backend=backend)
    return [t.numpy() for t in results]


def my_add():
    @gg.op
    def add(a, b):
        """99, whatever they are."""
        return a.spec

    add.reference(lambda a, b: np.full_like(a, 99.0))

    @add.kernel
    def _(out, a, b):
        for i in range(out.size):
            out[i] = 99.0

    return add


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_ones_own_add_is_not_what_sums_gradients(backend):
    add = my_add()
    assert registry["add"] is gg.add is builtin.add and own["add"] is add
    x = gg.tensor(X, param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(x * x))
    graph.compute(backend=backend)
    np.testing.assert_array_equal(graph.grad(x).numpy(), 2 * X)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_both_ops_of_a_name_are_nodes_of_one_graph(backend):
    add, x = my_add(), gg.tensor(X)
    mine, ours, sugar = run(add(x, x), gg.add(x, x), x + x, backend=backend)
    np.testing.assert_array_equal(mine, [99, 99])
    np.testing.assert_array_equal(ours, 2 * X)
    np.testing.assert_array_equal(sugar, 2 * X)


@pytest.mark.native
def test_ones_own_op_never_gets_the_librarys_kernel_of_its_name():
    @gg.op
    def scale(x):
        """10 x"""
        return x.spec

    scale.reference(lambda x: 10 * x)
    t = scale(gg.tensor(X))
    np.testing.assert_array_equal(run(t, backend="reference")[0], 10 * X)
    with pytest.raises(KernelError, match=r"^scale has no kernel: declare one with @scale\.kernel"):
        gg.Graph().build_forward_expand(t).compute()

    @scale.kernel
    def _(out, x):
        for i in range(out.size):
            out[i] = 10 * x[i]

    np.testing.assert_array_equal(run(t)[0], 10 * X)


def test_ones_own_cast_and_cont_are_not_what_the_engine_inserts():
    @gg.op(name="cast")
    def wrong_cast(x, *, dtype: gg.DType):
        """Nothing of use."""
        raise AssertionError

    @gg.op(name="cont")
    def wrong_cont(x):
        """Nothing of use."""
        raise AssertionError

    halves = gg.tensor(X, dtype=gg.F16)
    np.testing.assert_array_equal(run(gg.exp(halves))[0], run(gg.exp(gg.tensor(X)))[0])
    square = gg.tensor(np.arange(4.0).reshape(2, 2))
    np.testing.assert_array_equal(run(gg.soft_max(square.T))[0], run(gg.soft_max(gg.cont(square.T)))[0])


def test_declaring_ones_own_op_again_replaces_it():
    first, second = my_add(), my_add()
    assert own["add"] is second is not first


def test_the_library_has_one_op_of_a_name():
    body = types.FunctionType(my_add.__code__, {}, "neg")
    body.__module__ = "ggrad.ops.elementwise"
    with pytest.raises(TypeError, match=r"^the library has an op neg already, in ggrad\.ops\.elementwise"):
        Op(body)
    assert registry["neg"] is gg.neg


def test_what_the_engine_uses_is_provided_once():
    with pytest.raises(TypeError, match="add is not asked for, or was provided before"):
        provides(my_add())
    assert builtin.add is gg.add


def test_how_contributions_are_summed_is_the_ops_affair():
    """An op of one's own can say it as slices do: here a gradient that is the same for all elements."""
    calls = []

    @gg.op
    def first_of(x):
        """x[0]"""
        return gg.Spec(())

    @gg.op
    def first_of_back(dout, x):
        """Zeros, with dout in front."""
        return x.spec

    first_of.grad(lambda t, dout: (first_of_back(dout, t.src[0]),))
    first_of.reference(lambda x: x[0])
    first_of_back.reference(lambda dout, x: np.concatenate([dout[None], 0 * x[1:]]))

    @first_of_back.summed
    def _(t, total):
        calls.append(t)
        return gg.add(total, t)

    x = gg.tensor(X, param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(x * x) + first_of(x))
    graph.compute(backend="reference")
    np.testing.assert_array_equal(graph.grad(x).numpy(), [3, 4])
    assert len(calls) == 1


@dataclass(frozen=True)
class Line(Record):
    slope: float
    steps: int
    turn: bool


@gg.op
def on_a_line(x, *, line: Line):
    return x.spec


@on_a_line.call
def _(x: gg.Tensor, slope: float = 2.0, *, steps: int = 3) -> gg.Tensor:
    """slope * x, as programs ask for it."""
    return on_a_line.node(x, line=Line(slope, steps, False))


def test_a_record_of_attributes_is_one_struct():
    packed = on_a_line.pack_attrs({"line": Line(0.5, 7, True)})
    assert packed.dtype.names == ("line",) and packed["line"].dtype.isalignedstruct
    assert packed["line"].tolist() == (0.5, 7, 1)
    t = on_a_line.node(gg.tensor([1.0]), line=Line("0.5", 7.0, 1))
    assert t.attrs["line"] == Line(0.5, 7, True) and type(t.attrs["line"].turn) is bool
    with pytest.raises(gg.errors.ShapeError, match=r"^on_a_line\(\): steps must be int, not 7.5"):
        on_a_line.node(gg.tensor([1.0]), line=Line(0.5, 7.5, True))
    with pytest.raises(gg.errors.ShapeError, match=r"^on_a_line\(\): line must be Line, not 3"):
        on_a_line.node(gg.tensor([1.0]), line=3)


def test_an_op_is_called_as_its_declaration_says():
    t = on_a_line(gg.tensor([1.0]), 4.0)
    assert t.op is on_a_line and t.attrs["line"] == Line(4.0, 3, False)
    assert [*inspect.signature(on_a_line).parameters] == ["x", "slope", "steps"]
    assert on_a_line.__doc__ == "slope * x, as programs ask for it."
    with pytest.raises(TypeError, match=r"^on_a_line\(\) got an unexpected keyword argument 'line'"):
        on_a_line(gg.tensor([1.0]), line=3)
