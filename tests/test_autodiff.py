"""What belongs to differentiation itself and to no op: fan-out, parts, dead ends, seeds, accumulation, refusals."""

import numpy as np
import pytest
from python_kernels import temporary_ops

import ggrad as gg
from ggrad.core.errors import GradientError, GraphError
from ggrad.core.op import registry

pytestmark = pytest.mark.quick

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def _own_ops():
    with temporary_ops():
        yield


def differentiated(loss, **options):
    return gg.Graph().build_forward_expand(loss).build_backward_expand(**options)


def gradients(loss, *leaves, backend="reference", **options):
    graph = differentiated(loss, **options).compute(backend=backend)
    return [None if (g := graph.grad(leaf)) is None else g.numpy().copy() for leaf in leaves]


def halves():
    """An op with two results: the first and the second half of the last axis."""

    @gg.op(layout="any")
    def halves(x):
        """The halves of the last axis."""
        half = gg.Spec((*x.shape[:-1], x.shape[-1] // 2))
        return gg.Pack(left=half, right=half)

    @halves.grad
    def _(t, dleft, dright):
        seen.append((dleft is not None, dright is not None))
        zero = gg.tensor(np.zeros(t.parts[0].shape))
        n = t.parts[0].shape[-1]
        whole = dict(shape=t.src[0].shape, steps=(1,))
        left = gg.slice_back(dleft if dleft is not None else zero, starts=(0,), **whole)
        right = gg.slice_back(dright if dright is not None else zero, starts=(n,), **whole)
        return (gg.add(left, right),)

    halves.reference(lambda x: tuple(np.split(x, 2, axis=-1)))
    seen: list = []
    return halves, seen


# -- many uses ----------------------------------------------------------------------------------------------


def test_gradients_of_all_uses_add_up(backend):
    x = gg.tensor([1.0, -2.0, 0.5], param=True)
    (dx,) = gradients(gg.sum(x * x + 5.0 * x), x, backend=backend)
    np.testing.assert_allclose(dx, [7.0, 1.0, 6.0], rtol=1e-6)  # 2x + 5


@pytest.mark.parametrize("uses", [2, 3, 10])
def test_a_parameter_used_many_times_collects_every_gradient(backend, uses):
    x = gg.tensor([1.0, 2.0], param=True)
    loss = gg.sum(x)
    for _ in range(uses - 1):
        loss = loss + gg.sum(x)
    (dx,) = gradients(loss, x, backend=backend)
    np.testing.assert_array_equal(dx, [uses, uses])


def test_a_result_used_twice_is_differentiated_once(backend):
    x = gg.tensor([3.0], param=True)
    y = gg.neg(x)
    graph = differentiated(gg.sum(y * y)).compute(backend=backend)
    np.testing.assert_allclose(graph.grad(x).numpy(), [6.0])
    assert [t.op.name for t in graph.nodes].count("neg") == 2  # forward, and one in the gradient


def test_the_same_tensor_as_both_operands(backend):
    x = gg.tensor([1.0, 2.0, 3.0], param=True)
    np.testing.assert_array_equal(gradients(gg.sum(x - x), x, backend=backend)[0], [0, 0, 0])
    np.testing.assert_array_equal(gradients(gg.sum(x + x), x, backend=backend)[0], [2, 2, 2])


def test_slices_of_one_tensor_gather_their_gradients_in_place(backend):
    x = gg.tensor(np.arange(6.0).reshape(2, 3), param=True)
    loss = gg.sum(x[0] * 2.0) + gg.sum(x[1, ::-1] * gg.tensor([1.0, 2.0, 3.0])) + gg.sum(x[:, 1:2] * 10.0) + gg.sum(x)
    (dx,) = gradients(loss, x, backend=backend)
    np.testing.assert_array_equal(dx, [[3, 13, 3], [4, 13, 2]])


def test_slices_make_no_zeros_for_each_slice():
    x = gg.tensor(np.arange(70.0).reshape(7, 10), param=True)
    loss = gg.sum(x[0])
    for i in range(1, 6):
        loss = loss + gg.sum(x[i] * float(i))
    ops = [t.op.name for t in differentiated(loss).nodes]
    assert ops.count("slice_back") <= 1
    assert ops.count("slice_add") == 5


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_gradients_of_slices_that_make_up_a_tensor_are_put_side_by_side(backend, order):
    x, ends = gg.tensor(np.zeros((2, 6, 3)), param=True), [0, 1, 3, 6]
    w = np.arange(36.0).reshape(2, 6, 3) - 9
    windows = [slice(ends[i], ends[i + 1]) for i in order]
    first, *rest = (gg.sum(x[:, part] * gg.tensor(w[:, part].copy())) for part in windows)
    graph = differentiated(sum(rest, start=first)).compute(backend=backend)
    ops = [t.op.name for t in graph.nodes]
    assert "concat" in ops and not {"slice_back", "slice_add"} & set(ops)
    np.testing.assert_array_equal(graph.grad(x).numpy(), w)


@pytest.mark.parametrize("windows", [[(0, 2), (3, 6)], [(0, 3), (2, 6)], [(0, 3), (0, 3), (3, 6)], [(0, 6)] * 2])
def test_slices_with_gaps_or_overlaps_are_summed(backend, windows):
    x, expected = gg.tensor(np.zeros(6), param=True), np.zeros(6)
    for a, b in windows:
        expected[a:b] += 1
    first, *rest = (gg.sum(x[a:b]) for a, b in windows)
    (dx,) = gradients(sum(rest, start=first), x, backend=backend)
    np.testing.assert_array_equal(dx, expected)


def test_overlapping_slices_add_where_they_overlap(backend):
    x = gg.tensor(np.zeros(5), param=True)
    (dx,) = gradients(gg.sum(x[0:3]) + gg.sum(x[2:5]) + gg.sum(x[::2]), x, backend=backend)
    np.testing.assert_array_equal(dx, [2, 1, 3, 1, 2])


def test_views_of_views_pass_gradients_back_to_where_they_look(backend):
    x = gg.tensor(np.arange(12.0).reshape(3, 4), param=True)
    w = np.arange(1.0, 5.0)
    (dx,) = gradients(gg.sum(x.T[1:3, ::-2].reshape(4) * gg.tensor(w)), x, backend=backend)
    expected = np.zeros((3, 4))
    expected.T[1:3, ::-2] = w.reshape(2, 2)
    np.testing.assert_array_equal(dx, expected)


@pytest.mark.parametrize("arrive", ["transposed", "reversed", "strided", "broadcast"])
def test_gradients_may_arrive_in_any_layout(backend, arrive):
    x = gg.tensor(np.arange(12.0).reshape(3, 4) + 1, param=True)
    y = x * x
    w = np.arange(12.0).reshape(3, 4)
    if arrive == "transposed":
        loss = gg.sum(y.T * gg.tensor(w.T))
    elif arrive == "reversed":  # the gradient of slice_back is a window
        loss = gg.sum(gg.slice_back(y, shape=(3, 4), starts=(2, 3), steps=(-1, -1)) * gg.tensor(w[::-1, ::-1]))
    elif arrive == "strided":
        wide = np.zeros((6, 12))
        wide[::2, ::3] = w
        loss = gg.sum(gg.slice_back(y, shape=(6, 12), starts=(0, 0), steps=(2, 3)) * gg.tensor(wide))
    else:
        w = np.ones((3, 4))
        loss = gg.sum(y)
    (dx,) = gradients(loss, x, backend=backend)
    np.testing.assert_allclose(dx, 2 * x.numpy() * w, rtol=1e-6)


# -- parts of packed results ----------------------------------------------------------------------------------


def test_gradients_are_gathered_for_each_part():
    op, seen = halves()
    x = gg.tensor([1.0, 2.0, 3.0, 4.0], param=True)
    left, right = op(x)
    (dx,) = gradients(gg.sum(left * 2.0) + gg.sum(right * 3.0) + gg.sum(right), x)
    np.testing.assert_array_equal(dx, [2, 2, 4, 4])
    assert seen == [(True, True)]


def test_a_part_that_nobody_uses_has_no_gradient():
    op, seen = halves()
    x = gg.tensor([1.0, 2.0, 3.0, 4.0], param=True)
    _, right = op(x)
    (dx,) = gradients(gg.sum(right), x)
    np.testing.assert_array_equal(dx, [0, 0, 1, 1])
    assert seen == [(False, True)]


def test_a_part_used_only_beside_the_loss_has_no_gradient():
    op, seen = halves()
    x = gg.tensor([1.0, 2.0, 3.0, 4.0], param=True)
    left, right = op(x)
    graph = gg.Graph().build_forward_expand(gg.neg(left), gg.sum(right))
    graph.build_backward_expand().compute(backend="reference")
    np.testing.assert_array_equal(graph.grad(x).numpy(), [0, 0, 1, 1])
    assert seen == [(False, True)]


# -- dead ends ------------------------------------------------------------------------------------------------


def test_what_the_loss_does_not_depend_on_has_no_gradient(backend):
    x, y = gg.tensor([1.0], param=True), gg.tensor([2.0], param=True)
    beside, loss = gg.neg(y), gg.sum(x)
    graph = gg.Graph().build_forward_expand(beside, loss).build_backward_expand().compute(backend=backend)
    assert graph.grad(y) is None
    np.testing.assert_array_equal(graph.grad(x).numpy(), [1])


def test_constants_get_no_gradient_and_cost_none():
    x, c = gg.tensor([1.0, 2.0], param=True), gg.tensor([3.0, 4.0])
    graph = differentiated(gg.sum(x * c))
    assert graph.grad(c) is None
    assert [t.op.name for t in graph.nodes].count("mul") == 2  # forward, and dx


def test_a_constant_branch_is_not_differentiated():
    """Whether its ops have rules does not matter."""

    @gg.op(layout="any")
    def no_rule(x):
        """x"""
        return x.spec

    no_rule.reference(lambda x: x)
    x, c = gg.tensor([1.0, 2.0], param=True), gg.tensor([3.0, 4.0])
    (dx,) = gradients(gg.sum(x * no_rule(gg.neg(c))), x)
    np.testing.assert_array_equal(dx, [-3, -4])


def test_dependence_ends_at_integers():
    x = gg.tensor([1.5, 2.5], param=True)
    whole = gg.cast(x, dtype=gg.I32)
    (dx,) = gradients(gg.sum(x * 3.0) + gg.sum(gg.cast(whole, dtype=gg.F32)), x)
    np.testing.assert_array_equal(dx, [3, 3])


def test_integer_inputs_get_no_gradient():
    x, ids = gg.tensor(np.eye(3), param=True), gg.tensor([2, 0, 2])
    graph = differentiated(gg.sum(gg.get_rows(x, ids))).compute(backend="reference")
    assert graph.grad(ids) is None
    np.testing.assert_array_equal(graph.grad(x).numpy(), [[1, 1, 1], [0, 0, 0], [2, 2, 2]])


def test_a_loss_that_depends_on_no_parameter_has_no_gradients(backend):
    x = gg.tensor([1.0], param=True)
    graph = gg.Graph().build_forward_expand(gg.neg(x)).build_backward_expand(gg.sum(gg.tensor([1.0]) * 2.0))
    graph.compute(backend=backend)
    assert graph.grad(x) is None


def test_the_parameter_may_itself_be_the_loss(backend):
    x = gg.tensor(3.0, param=True)
    graph = gg.Graph().build_backward_expand(x).compute(backend=backend)
    assert graph.grad(x).numpy() == 1


def test_half_precision_parameters_have_f32_gradients(backend):
    for dtype in (gg.F16, gg.BF16):
        x = gg.tensor([1.0, 2.0, -3.0], dtype=dtype, param=True)
        graph = differentiated(gg.sum(x * x)).compute(backend=backend)
        assert graph.grad(x).dtype is gg.F32
        np.testing.assert_array_equal(graph.grad(x).numpy(), [2, 4, -6])


# -- the loss, its seed, and accumulation ----------------------------------------------------------------------


def test_a_marked_loss_goes_before_other_scalar_roots():
    x = gg.tensor([2.0], param=True)
    loss = gg.set_loss(gg.sum(x * 5.0))
    graph = gg.Graph().build_forward_expand(loss, gg.sum(x * 7.0)).build_backward_expand()
    assert graph.loss is loss
    np.testing.assert_array_equal(graph.compute(backend="reference").grad(x).numpy(), [5])


def test_a_given_loss_goes_before_a_marked_one():
    x = gg.tensor([2.0], param=True)
    marked, given = gg.set_loss(gg.sum(x * 5.0)), gg.sum(x * 7.0)
    graph = gg.Graph().build_forward_expand(marked).build_backward_expand(given)
    np.testing.assert_array_equal(graph.compute(backend="reference").grad(x).numpy(), [7])


def test_two_marked_losses_are_refused():
    x = gg.tensor([2.0], param=True)
    graph = gg.Graph().build_forward_expand(gg.set_loss(gg.sum(x)), gg.set_loss(gg.sum(x * 2.0)))
    with pytest.raises(GradientError, match="2 tensors of the graph are marked with set_loss"):
        graph.build_backward_expand()


def test_no_loss_is_refused():
    with pytest.raises(GradientError, match="the graph is empty"):
        gg.Graph().build_backward_expand()


@pytest.mark.parametrize("make", [lambda x: x * 2.0, lambda x: gg.cast(gg.sum(x), dtype=gg.I32)])
def test_a_loss_that_is_no_float_scalar_is_refused(make):
    with pytest.raises(GradientError, match=r"the loss must be a scalar of a float dtype"):
        differentiated(make(gg.tensor([1.0, 2.0], param=True)))


def test_a_graph_has_one_loss():
    x = gg.tensor([2.0], param=True)
    graph = differentiated(gg.sum(x))
    with pytest.raises(GradientError, match="was called before"):
        graph.build_backward_expand()


def test_no_parameter_is_refused():
    with pytest.raises(GradientError, match=r"no parameter in the graph.*param=True"):
        differentiated(gg.sum(gg.tensor([1.0])))


def test_a_loss_of_one_element_needs_no_reshape(backend):
    x = gg.tensor([[3.0]], param=True)
    np.testing.assert_array_equal(gradients(x * x, x, backend=backend)[0], [[6]])


def test_the_seed_multiplies_every_gradient(backend):
    x, seed = gg.tensor([1.0, 2.0], param=True), gg.tensor(0.5)
    graph = differentiated(gg.sum(x * 4.0), seed=seed).compute(backend=backend)
    np.testing.assert_array_equal(graph.grad(x).numpy(), [2, 2])
    seed.set(3.0)
    np.testing.assert_array_equal(graph.compute(backend=backend).grad(x).numpy(), [12, 12])


def test_the_seed_must_be_a_scalar():
    with pytest.raises(GradientError, match="the seed must be a scalar"):
        differentiated(gg.sum(gg.tensor([1.0], param=True)), seed=gg.tensor([1.0, 2.0]))


def test_gradients_are_new_with_every_run(backend):
    x = gg.tensor([1.0, 2.0], param=True)
    graph = differentiated(gg.sum(x * x))
    first = graph.compute(backend=backend).grad(x).numpy().copy()
    np.testing.assert_array_equal(graph.compute(backend=backend).grad(x).numpy(), first)


def test_gradients_accumulate_over_runs_until_reset(backend):
    x, y = gg.tensor([1.0, 2.0], param=True), gg.tensor([1.0, 1.0])
    graph = differentiated(gg.sum(x * y), accumulate=True)
    for n in (1, 2, 3):
        graph.compute(backend=backend)
        np.testing.assert_array_equal(graph.grad(x).numpy(), [n, n])
    y.set(np.array([10.0, 20.0]))
    np.testing.assert_array_equal(graph.compute(backend=backend).grad(x).numpy(), [13, 23])
    graph.reset()
    np.testing.assert_array_equal(graph.compute(backend=backend).grad(x).numpy(), [10, 20])


def test_accumulators_of_two_graphs_are_their_own():
    x = gg.tensor([1.0, 2.0], param=True)
    one, two = (differentiated(gg.sum(x * f), accumulate=True) for f in (2.0, 3.0))
    for graph in (one, two, one):
        graph.compute(backend="reference")
    np.testing.assert_array_equal(one.grad(x).numpy(), [4, 4])
    np.testing.assert_array_equal(two.grad(x).numpy(), [3, 3])


# -- refusals and rules that are asked for less ----------------------------------------------------------------


def test_an_op_without_a_rule_is_refused_with_its_name_and_the_parameter():
    @gg.op(layout="any")
    def no_rule(x, y):
        """x"""
        return x.spec

    w = gg.tensor(np.ones((2, 3)), name="embedding", param=True)
    loss = gg.sum(no_rule(gg.neg(w), gg.tensor(1.0)))
    with pytest.raises(GradientError) as caught:
        differentiated(loss)
    for word in ("no_rule(x=f32[2,3], y=f32[])", "embedding: f32[2,3]", "has no gradient rule"):
        assert word in str(caught.value)


def test_a_graph_is_as_it_was_after_a_refusal():
    @gg.op(layout="any")
    def no_rule(x):
        """x"""
        return x.spec

    no_rule.reference(lambda x: x)
    x = gg.tensor([2.0], param=True)
    good, bad = gg.sum(x), gg.sum(no_rule(x))
    graph = gg.Graph().build_forward_expand(good)
    with pytest.raises(GradientError):
        graph.build_backward_expand(bad)
    graph.build_backward_expand(good).compute(backend="reference")
    np.testing.assert_array_equal(graph.grad(x).numpy(), [1])


def test_a_gradient_of_the_wrong_shape_is_refused():
    op = registry["neg"]
    rule = op._grad
    try:
        op.grad(lambda t, dout: (gg.sum(dout),))
        with pytest.raises(GradientError, match=r"neg: the rule gave a gradient f32\[\] for leaf: f32\[3\]"):
            differentiated(gg.sum(gg.neg(gg.tensor(np.ones(3), param=True))))
    finally:
        op.grad(rule)


def test_the_wrong_number_of_gradients_is_refused():
    op = registry["neg"]
    rule = op._grad
    try:
        op.grad(lambda t, dout: (dout, dout))
        with pytest.raises(GradientError, match="the rule gave 2 gradients for 1 inputs"):
            differentiated(gg.sum(gg.neg(gg.tensor(np.ones(3), param=True))))
    finally:
        op.grad(rule)


def test_a_rule_is_told_what_is_needed():
    asked = []

    @gg.op(layout="any")
    def first(a, b, c=None):
        """a"""
        return a.spec

    first.reference(lambda a, b, c: a)

    @first.grad
    def _(t, dout, *, needs):
        asked.append(needs)
        return dout, None, None

    x = gg.tensor([1.0], param=True)
    gradients(gg.sum(first(x, gg.tensor([1.0]))), x)
    gradients(gg.sum(first(x, gg.neg(x), gg.tensor([2.0]))), x)
    assert asked == [[True, False, False], [True, True, False]]


def test_a_gradient_that_is_not_needed_is_dropped():
    x, c = gg.tensor([1.0], param=True), gg.tensor([2.0])
    graph = differentiated(gg.sum(c - x))
    assert graph.grad(c) is None
    assert len(graph.grads) == 1


def test_a_leaf_is_no_loss():
    w = gg.tensor(1.0, param=True)
    with pytest.raises(GraphError, match="a loss is a result"):
        gg.set_loss(w)
    assert w.param


# -- gradients of gradients ---------------------------------------------------------------------------------


def gradients_of_loss(loss, *params):
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    return tuple(graph.grad(p) for p in params)


def test_gradients_of_a_gradient_are_derivatives():
    """Of a small network, its own gradient among the results: what a penalty on gradients needs."""
    rng = np.random.default_rng(0)

    def network(w1, w2, gain, x):
        hidden = gg.rms_norm(gg.swiglu(gg.mul_mat(w1, x)), gain)
        loss = gg.cross_entropy_loss(gg.mul_mat(w2, gg.gelu(hidden)), gg.tensor([0, 2, 1]))
        return gradients_of_loss(loss, w1, w2, gain)

    shapes = ((8, 5), (3, 4), (4,), (3, 5))
    gg.testing.check_gradients(network, *(rng.standard_normal(shape) for shape in shapes))


def test_a_third_derivative_is_one():
    """Rules by way of other ops are made of ops that have such rules."""

    def second(x):
        (first,) = gradients_of_loss(gg.sum(gg.silu(x)), x)
        return gradients_of_loss(gg.sum(gg.sqr(first)), x)

    gg.testing.check_gradients(second, np.linspace(-2, 2, 7))


def test_an_input_given_twice_has_both_gradients_by_way_of_other_ops():
    """norm_back(x, x) has x as the gradient that comes in, and as what was normalised."""
    gg.testing.check_gradients(lambda x: gg.norm_back(x, x), np.random.default_rng(0).standard_normal((2, 5)))


def test_a_rule_by_way_of_other_ops_differentiates_only_what_is_needed():
    dout, x = gg.tensor(np.ones((2, 4))), gg.tensor(np.ones((2, 4)))
    weight = gg.tensor(np.ones(4), name="weight", param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.norm_back(dout, x, weight)[0]))
    assert graph.grad(x) is None and graph.grad(weight).shape == (4,)
    whole = gg.Graph().build_backward_expand(gg.sum(gg.norm_back(dout, gg.set_param(x), weight)[0]))
    assert len(graph.nodes) < len(whole.nodes)


def test_of_several_scalar_roots_none_is_taken_for_the_loss():
    w = gg.tensor(np.ones(3), name="w", param=True)
    loss, other = gg.sum(gg.sqr(w)), gg.sum(w)
    graph = gg.Graph().build_forward_expand(loss, other)
    with pytest.raises(gg.errors.GradientError, match=r"2 scalar roots.*set_loss"):
        graph.build_backward_expand()
    graph.build_backward_expand(loss)
    assert graph.loss is loss


def test_the_only_scalar_among_the_roots_is_the_loss_wherever_it_stands():
    w = gg.tensor(np.ones(3), param=True)
    loss, logits = gg.sum(gg.sqr(w)), gg.neg(w)
    graph = gg.Graph().build_forward_expand(loss, logits).build_backward_expand()
    assert graph.loss is loss
