"""Graphs as users meet them: printing, order rules, sharing, running again, reading, size."""

import re
import sys

import numpy as np
import pytest
from graphs import graphs, halves_for_tests
from hypothesis import given, settings
from python_kernels import temporary_ops

import ggrad as gg
from ggrad.compile import plan as planner
from ggrad.core.errors import GradientError, GraphError, KernelError, NotComputedError
from ggrad.core.op import part
from ggrad.core.program import names_of

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


# -- how they look --------------------------------------------------------------------------------------------

LEAF = re.compile(r"(?P<name>\S+): (?P<spec>\w+\[[\d,]*\]) (?P<role>\w+)")
NODE = re.compile(r"(?P<name>\S+) = (?P<op>\w+)\((?P<arguments>.*)\): (?P<spec>\w+\[[\d,]*\])(?P<notes>(  # .+)*)")


def split_arguments(text: str) -> list[str]:
    """At commas that stand in no brackets."""
    found, depth, start = [], 0, 0
    for at, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, *([text[start:].strip()] if text[start:].strip() else [])]


def parsed(text: str) -> list[tuple]:
    """(name, op, sources, attributes, spec) of every line."""
    lines = []
    for line in text.splitlines():
        if node := NODE.fullmatch(line):
            arguments = split_arguments(node["arguments"])
            attrs = dict(a.split("=", 1) for a in arguments if re.match(r"[a-z_]\w*=", a))
            sources = [a for a in arguments if not re.match(r"[a-z_]\w*=", a)]
            lines.append((node["name"], node["op"], sources, attrs, node["spec"]))
        else:
            leaf = LEAF.fullmatch(line)
            assert leaf, line
            lines.append((leaf["name"], None, [], {}, leaf["spec"]))
    return lines


@given(graphs())
def test_printed_graphs_can_be_read_back(graph):
    """Every tensor once, under a name of its own, after its sources; op, arguments and spec as they are."""
    lines = parsed(str(graph))
    tensors = [*graph.leaves, *graph.nodes]
    assert len({name for name, *_ in lines}) == len(lines) == len(tensors)
    position = {name: i for i, (name, *_) in enumerate(lines)}
    for i, (t, (_, op, sources, attrs, spec)) in enumerate(zip(tensors, lines, strict=True)):
        assert spec == str(t.spec)
        assert op == (t.op.name if t.op else None)
        assert [tensors[position[s]] for s in sources] == list(t.src)
        assert all(position[s] < i for s in sources)
        assert set(attrs) == set(t.attrs)


@given(graphs())
def test_names_are_unique(graph):
    named = names_of([*graph.leaves, *graph.nodes])
    assert len(set(named.values())) == len(named) == len(graph.leaves) + len(graph.nodes)


def test_equal_and_tricky_names_are_told_apart():
    x, y, z, anonymous = (gg.tensor(1.0, name=name) for name in ("x", "x", "x.2", ""))
    numbered = gg.tensor(1.0, name="%3")
    graph = gg.Graph().build_forward_expand(x + y + z + anonymous + numbered)
    assert len(set(names_of([*graph.leaves, *graph.nodes]).values())) == 9


def test_the_loss_and_gradients_are_pointed_out():
    x = gg.tensor([1.0], name="x", param=True)
    graph = gg.Graph().build_forward_expand(gg.sum(x * 2.0)).build_backward_expand()
    assert re.search(r"= sum\(.*# the loss$", str(graph), re.MULTILINE)
    assert re.search(r"# gradient of x$", str(graph), re.MULTILINE)
    assert repr(graph) == f"<Graph of {len(graph.nodes)} nodes, {len(graph.leaves)} leaves>"


def test_an_attribute_is_printed_to_the_last_digit():
    """The printed graph must not say 0.333333 where the graph computes with 1/3."""
    graph = gg.Graph().build_forward_expand(gg.scale(gg.tensor(1.0), factor=1 / 3))
    assert float(re.search(r"factor=([\d.e-]+)", str(graph))[1]) == 1 / 3


@given(graphs())
def test_dot_is_well_formed(graph):
    text = graph.dot()
    body = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    assert body.count("{") == body.count("}") == 1 and body.count("[") == body.count("]")
    assert text.startswith("digraph") and text.rstrip().endswith("}")
    nodes = re.findall(r"^  (n\d+) \[label=", text, re.MULTILINE)
    assert len(nodes) == len(set(nodes)) == len(graph.leaves) + len(graph.nodes)
    edges = re.findall(r"^  (n\d+) -> (n\d+);", text, re.MULTILINE)
    assert len(edges) == sum(s is not None for t in graph.nodes for s in t.src)
    assert {n for edge in edges for n in edge} <= set(nodes)


def test_dot_bears_any_name():
    x = gg.tensor([1.0], name='a "quoted\\" name\nwith a line', param=True)
    text = gg.Graph().build_forward_expand(gg.neg(x)).dot()
    assert all(line.startswith(("digraph", "  ", "}")) for line in text.splitlines())
    assert re.sub(r'"(\\.|[^"\\\n])*"', "", text).count('"') == 0


# -- order and sharing ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_nodes_stand_in_an_order_in_which_they_can_run():
    x = gg.tensor([1.0])
    a = gg.neg(x)
    b = gg.neg(a)
    graph = gg.Graph().build_forward_expand(b).build_forward_expand(gg.neg(a), a)
    assert all(graph.nodes.index(s) < i for i, t in enumerate(graph.nodes) for s in t.src if s.op)
    assert len(set(graph.nodes)) == len(graph.nodes) == 3


def test_adding_a_root_twice_changes_nothing():
    y = gg.neg(gg.tensor([1.0]))
    graph = gg.Graph().build_forward_expand(y, y).build_forward_expand(y)
    assert graph.nodes == [y]


@pytest.mark.quick
def test_reading_a_leaf_after_its_update_is_refused():
    total, x = gg.tensor([1.0], name="total", role="accumulator"), gg.tensor([2.0])
    graph = gg.Graph().build_forward_expand(gg.accumulate(total, x))
    late = gg.neg(total)
    with pytest.raises(GraphError, match=r"neg: f32\[1\] reads total: f32\[1\], which an earlier node .* writes"):
        graph.build_forward_expand(late)
    with pytest.raises(GraphError, match="writes"):  # also through a view
        gg.Graph().build_forward_expand(gg.accumulate(total, x), gg.neg(total[0:1]))


def test_the_result_of_an_update_may_be_read(backend):
    total, x = gg.tensor([1.0], role="accumulator"), gg.tensor([2.0])
    early = gg.neg(total)
    after = gg.scale(gg.accumulate(total, x), factor=10.0)
    graph = gg.Graph().build_forward_expand(early, after).compute(backend=backend)
    assert (early.item(), after.item(), total.item()) == (-1, 30, 3)
    assert graph.compute(backend=backend) and (early.item(), after.item(), total.item()) == (-3, 50, 5)


def test_a_graph_is_unchanged_by_a_refused_root():
    total, x = gg.tensor([1.0], role="accumulator"), gg.tensor([2.0])
    graph = gg.Graph().build_forward_expand(gg.accumulate(total, x))
    before = list(graph.nodes)
    with pytest.raises(GraphError):
        graph.build_forward_expand(gg.neg(total))
    assert graph.nodes == before
    np.testing.assert_array_equal(graph.compute(backend="reference").nodes[0].numpy(), [3])


@pytest.mark.quick
def test_graphs_share_leaves(backend):
    w = gg.tensor([2.0], param=True)
    train, evaluate = gg.sum(w * w), w * 10.0
    one = gg.Graph().build_forward_expand(train).build_backward_expand()
    two = gg.Graph().build_forward_expand(evaluate)
    one.compute(backend=backend)
    w.set(np.array([5.0]))
    two.compute(backend=backend)
    assert (train.item(), one.grad(w).item(), evaluate.item()) == (4, 4, 50)


@pytest.mark.quick
def test_running_one_graph_does_not_change_another(backend):
    """Nor does it matter that they have nodes in common: each computes its own, the last run is what is read."""
    w = gg.tensor([2.0])
    common = gg.neg(w)
    one = gg.Graph().build_forward_expand(common * 3.0)
    two = gg.Graph().build_forward_expand(common * 5.0)
    a, b = one.nodes[-1], two.nodes[-1]
    one.compute(backend=backend)
    value = a.numpy().copy()
    w.set(np.array([7.0]))
    two.compute(backend=backend)
    np.testing.assert_array_equal(a.numpy(), value)
    assert (a.item(), b.item()) == (-6, -35)


@pytest.mark.quick
def test_a_graph_may_grow_between_runs(backend):
    x = gg.tensor([2.0], param=True)
    y = gg.neg(x)
    graph = gg.Graph().build_forward_expand(y).compute(backend=backend)
    assert y.item() == -2
    z = gg.sum(y * y)
    graph.build_forward_expand(z).compute(backend=backend)
    assert (y.item(), z.item()) == (-2, 4)
    graph.build_backward_expand().compute(backend=backend)
    assert graph.grad(x).item() == 4


# -- running --------------------------------------------------------------------------------------------------


@pytest.mark.native
@settings(max_examples=50)
@given(graphs(backward=True))
def test_running_again_gives_the_same_bits(graph):
    def bits():
        graph.compute(backend="native")
        return [t.numpy().tobytes() for t in sorted(graph.kept, key=lambda t: t.serial)]

    assert bits() == bits()


@pytest.mark.quick
def test_a_leaf_without_a_value_is_refused(backend):
    x = gg.tensor(shape=(2, 3), name="tokens")
    graph = gg.Graph().build_forward_expand(gg.neg(x))
    with pytest.raises(GraphError, match=r"tokens: f32\[2,3\] holds no value: set it with .set\(array\)"):
        graph.compute(backend=backend)
    x.set(np.ones((2, 3)))
    graph.compute(backend=backend)


def test_another_backend_is_refused():
    with pytest.raises(GraphError, match="'native' or 'reference', or a backend itself, not 'cuda'"):
        gg.Graph().build_forward_expand(gg.neg(gg.tensor([1.0]))).compute(backend="cuda")


@pytest.mark.quick
def test_a_graph_of_views_alone_runs(backend):
    x = gg.tensor(np.arange(6.0).reshape(2, 3))
    y = x.T[::-1]
    gg.Graph().build_forward_expand(y).compute(backend=backend)
    np.testing.assert_array_equal(y.numpy(), x.numpy().T[::-1])


@pytest.mark.quick
def test_an_empty_graph_runs(backend):
    gg.Graph().compute(backend=backend)
    gg.Graph().build_forward_expand(gg.tensor([1.0])).compute(backend=backend)


def test_reset_without_accumulators_does_nothing():
    x = gg.tensor([1.0], param=True)
    gg.Graph().build_forward_expand(gg.neg(x)).reset()
    assert x.item() == 1


@pytest.mark.quick
def test_reset_zeroes_moments():
    x, m = gg.tensor([1.0]), gg.tensor([5.0], role="moment")
    gg.Graph().build_forward_expand(x * m).reset()
    assert (x.item(), m.item()) == (1, 0)


# -- reading --------------------------------------------------------------------------------------------------


def chain():
    x = gg.tensor([1.0, 2.0])
    a = gg.neg(x)
    b = gg.scale(a, factor=2.0)
    return a, b, gg.Graph().build_forward_expand(b)


@pytest.mark.quick
def test_a_value_cannot_be_read_before_a_run():
    a, b, _ = chain()
    for t in (a, b):
        with pytest.raises(NotComputedError, match=r"no run has kept it. graph.compute\(\) computes it"):
            t.numpy()


@pytest.mark.quick
def test_reading_a_value_that_was_not_kept_names_the_remedy(backend):
    a, _, graph = chain()
    graph.compute(backend=backend)
    with pytest.raises(NotComputedError, match=r"gg.set_output\(t\)"):
        a.numpy()


@pytest.mark.quick
def test_an_output_set_after_a_run_is_readable_after_the_next(backend):
    a, b, graph = chain()
    graph.compute(backend=backend)
    gg.set_output(a)
    with pytest.raises(NotComputedError):
        a.numpy()
    graph.compute(backend=backend)
    np.testing.assert_array_equal(a.numpy(), [-1, -2])
    np.testing.assert_array_equal(b.numpy(), [-2, -4])


@pytest.mark.native
def test_an_output_of_another_graph_costs_this_one_no_new_plan():
    _, _, graph = chain()
    other, _, _ = chain()
    session = graph.prepared("native")
    gg.set_output(other)
    assert graph.prepared("native") is session


def test_results_are_read_only_views(backend):
    _, b, graph = chain()
    graph.compute(backend=backend)
    with pytest.raises(ValueError, match="read-only"):
        b.numpy()[0] = 1


@pytest.mark.native
def test_a_result_shows_the_latest_run():
    x = gg.tensor([1.0, 2.0])
    y = gg.neg(x)
    graph = gg.Graph().build_forward_expand(y).compute()
    seen = y.numpy()
    x.set(np.array([3.0, 4.0]))
    graph.compute()
    np.testing.assert_array_equal(seen, [-3, -4])
    np.testing.assert_array_equal(y.numpy(), [-3, -4])


@pytest.mark.quick
def test_a_value_outlives_its_graph(backend):
    x = gg.tensor([1.0, 2.0])
    y = gg.neg(x)
    seen = gg.Graph().build_forward_expand(y).compute(backend=backend) and y.numpy()
    np.testing.assert_array_equal(seen, [-1, -2])
    np.testing.assert_array_equal(y.numpy(), [-1, -2])


def test_leaves_are_writable_views():
    x = gg.tensor([1.0, 2.0])
    x.numpy()[0] = 7
    y = gg.neg(x)
    gg.Graph().build_forward_expand(y).compute(backend="reference")
    np.testing.assert_array_equal(y.numpy(), [-7, -2])


def test_parts_and_views_of_kept_values_are_readable(backend):
    with temporary_ops():
        x = gg.tensor([1.0, 2.0, 3.0, 4.0])
        left, _rest, right = halves_for_tests(x)
        graph = gg.Graph().build_forward_expand(right).compute(backend=backend)
        for t, value in ((right, [3, 4]), (right[::-1], [4, 3])):
            np.testing.assert_array_equal(t.numpy(), value)
        packed = left.src[0]
        assert packed.op is not part and packed in {t.storage[0] for t in graph.nodes}
        assert packed.offsets == (0, 16, 32)


def test_padding_between_parts_is_zero(backend):
    x = gg.tensor([1.0, 2.0, 3.0, 4.0])
    left, _, _ = halves_for_tests(x)
    packed = gg.set_output(left.src[0])
    graph = gg.Graph().build_forward_expand(left)
    if backend == "native":
        graph.prepared("native").poison(1)
    graph.compute(backend=backend)
    np.testing.assert_array_equal(packed.numpy(), [1, 2, 0, 0, 1, 1, 1, 0, 3, 4, 0, 0])


def test_sizes_and_strides_in_ggmls_order_whatever_the_direction():
    t = gg.tensor(np.ones((3, 4)))
    assert t.ne == (4, 3, 1, 1) and t.nb == (4, 16, 48, 48)
    assert t[::-1].nb == (4, -16, 48, 48) and t[:, ::-1].nb == (-4, 16, 48, 48)
    assert gg.tensor(1.0).nb == (4, 4, 4, 4)


# -- size -----------------------------------------------------------------------------------------------------

NODES = 50_000


def test_a_chain_of_50000_nodes_builds_differentiates_and_runs(backend):
    """No recursion, nothing quadratic."""
    x = gg.tensor([1.0, 2.0], param=True)
    t = x
    for i in range(NODES // 2):
        t = gg.neg(t) if i % 2 else gg.scale(t, factor=1.0)
    graph = gg.Graph().build_forward_expand(gg.sum(t)).build_backward_expand()
    assert len(graph.nodes) >= NODES
    if backend == "native":
        assert graph.plan().arena < 10_000
    graph.compute(backend=backend)
    np.testing.assert_array_equal(graph.grad(x).numpy(), [1, 1] if NODES // 2 // 2 % 2 == 0 else [-1, -1])
    assert str(graph) and graph.dot()


@pytest.mark.native
def test_50000_values_alive_at_once_are_planned():
    """A wide graph: everything is kept to the end."""
    x = gg.tensor(np.ones(3))
    kept = [gg.set_output(gg.scale(x, factor=float(i))) for i in range(NODES)]
    graph = gg.Graph().build_forward_expand(*kept).compute()
    assert kept[-1].numpy()[0] == NODES - 1
    assert graph.plan().arena == NODES * 64


@pytest.mark.native
def test_the_gradients_of_many_uses_add_up():
    x = gg.tensor([1.0, 2.0], param=True)
    total = gg.sum(x)
    for _ in range(NODES // 4):
        total = total + gg.sum(x)
    graph = gg.Graph().build_forward_expand(total).build_backward_expand().compute()
    np.testing.assert_array_equal(graph.grad(x).numpy(), [NODES // 4 + 1] * 2)


def lines_run(work) -> int:
    """How many lines of Python it takes: the same on every machine."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def chain_of(n):
    x = gg.tensor([1.0, 2.0], param=True)
    t = x
    for _ in range(n):
        t = gg.mul(gg.neg(t), x)
    return gg.sum(t)


def sum_of_uses(n):
    x = gg.tensor([1.0, 2.0], param=True)
    total = gg.sum(x)
    for _ in range(n):
        total = total + gg.sum(x)
    return total


@pytest.mark.parametrize("grow", [chain_of, sum_of_uses])
def test_twice_the_nodes_take_twice_the_work(grow, backend, monkeypatch):
    """To build, to differentiate, to plan, to run and to show: nothing is quadratic."""

    def work(n):
        graph = gg.Graph().build_forward_expand(grow(n)).build_backward_expand()
        graph.compute(backend=backend)
        return str(graph), graph.dot()

    monkeypatch.setattr(planner, "MANY_BUFFERS", 0)  # few are placed by comparing them all
    work(2)  # what happens once
    small, large = (lines_run(lambda n=n: work(n)) for n in (200, 400))
    assert large < 2.2 * small


def test_the_graph_stays_usable_after_a_refused_gradient():
    with temporary_ops():

        @gg.op(layout="any")
        def no_rule(x):
            """x"""
            return x.spec

        x = gg.tensor([1.0], param=True)
        graph = gg.Graph().build_forward_expand(gg.sum(no_rule(x)))
        with pytest.raises(GradientError):
            graph.build_backward_expand()
        assert graph.loss is None and graph.grad(x) is None


@pytest.mark.quick
def test_a_backend_of_ones_own_runs_graphs():
    """It brings `refuses` and `prepare`, and what it prepares runs and shows values."""

    class Values:
        def __init__(self, made):
            self.made = made

        def read(self, t):
            return self.made[t.serial]

    class Sevens:
        """All results are 7."""

        def __init__(self, program, reuse):
            self.kept, self.reuse, self.program = program.kept, reuse, program

        def run(self, threads):
            for t in self.kept:
                t.storage[0].values = Values({t.serial: np.full(t.shape, 7.0)})

    class Lucky:
        name = "lucky"
        refused = None
        prepared = 0

        def refuses(self):
            return self.refused

        def prepare(self, program, *, reuse):
            self.prepared += 1
            return Sevens(program, reuse)

    x, lucky = gg.tensor([1.0, 2.0]), Lucky()
    y = gg.exp(x)
    graph = gg.Graph().build_forward_expand(y)
    graph.compute(backend=lucky).compute(backend=lucky)
    np.testing.assert_array_equal(y.numpy(), [7, 7])
    assert lucky.prepared == 1
    z = gg.neg(y)
    graph.build_forward_expand(z).compute(backend=lucky)
    assert lucky.prepared == 2 and z.numpy()[0] == 7
    graph.compute(backend="reference")
    np.testing.assert_allclose(z.numpy(), -np.exp([1.0, 2.0]))
    lucky.refused = "no luck today"
    with pytest.raises(KernelError, match=r"^compute\(backend='lucky'\): no luck today"):
        graph.compute(backend=lucky)
    with pytest.raises(GraphError, match="or a backend itself, not 3"):
        graph.compute(backend=3)
