"""Nodes that run side by side never touch what another one writes, and run no earlier than what they depend on."""

import numpy as np
import pytest
from graphs import graphs
from hypothesis import given
from hypothesis import strategies as st

import ggrad as gg
from ggrad.compile import waves as waves_of
from ggrad.compile.plan import plan, running
from ggrad.compile.waves import calls_python, one_by_one, side_by_side
from ggrad.core.op import registry


def touched(t):
    """The owners of memory that a node reads, and those it writes."""
    return {s.storage[0] for s in t.src if s is not None}, set(t.updates or (t,))


def stages_for(draw):
    """Tasks of each stage by node: as if kernels had chosen them."""
    counts = {}
    return lambda t: counts.setdefault(t, draw(st.lists(st.sampled_from([0, 1, 5, 5]), min_size=1, max_size=3)))


@st.composite
def ordered(draw):
    """A graph, its nodes and their waves.  Some graphs accumulate gradients, so that leaves are updated."""
    graph = draw(graphs(backward=draw(st.booleans())))
    if graph.loss is None and draw(st.booleans()):
        loss = gg.sum(gg.mul(graph.leaves[0], graph.leaves[0]))
        graph.build_forward_expand(loss)
        if graph.params:
            graph.build_backward_expand(loss, accumulate=True)
    nodes = running(graph)
    return graph, nodes, side_by_side(nodes, stages_for(draw))


@given(ordered())
def test_a_node_begins_when_what_it_depends_on_is_complete(made):
    _, nodes, waves = made
    for i, t in enumerate(nodes):
        assert 0 <= waves.begin[t] <= waves.end[t] < waves.count
        reads, writes = touched(t)
        for u in nodes[:i]:
            theirs, written = touched(u)
            if reads & written or writes & (theirs | written):
                assert waves.end[u] < waves.begin[t], f"{t!r} runs beside {u!r}, before it in the graph"


@given(ordered())
def test_no_wave_writes_what_another_of_its_nodes_touches(made):
    graph, nodes, waves = made
    work = {t: 100 for t in nodes if len(t.src) > 1}
    layout = plan(graph, graph.kept, waves=waves, work_bytes=lambda t: work.get(t, 0))

    def span(owner):
        at = layout.offsets[owner]
        return at, at + owner.nbytes

    def ranges(owners):
        return [span(o) for o in owners if not o.is_leaf and o.nbytes]

    for w in range(waves.count):
        here = [t for t in nodes if waves.begin[t] <= w <= waves.end[t]]
        for t in here:
            written = ranges(touched(t)[1])
            if t in work:
                written.append((layout.work[t], layout.work[t] + work[t]))
            for u in here:
                if u is t:
                    continue
                reads, writes = touched(u)
                for a, b in ranges(reads | writes):
                    assert not any(a < d and c < b for c, d in written), f"{t!r} writes where {u!r} looks"


@given(ordered())
def test_values_last_to_the_end_of_the_last_wave_that_reads_them(made):
    graph, nodes, waves = made
    layout = plan(graph, graph.kept, waves=waves)
    arena = np.zeros(layout.arena, np.int64)
    number = {t: i for i, t in enumerate(nodes, start=1)}

    def bytes_of(owner):
        return slice(layout.offsets[owner], layout.offsets[owner] + owner.nbytes)

    for w in range(waves.count):
        for t in nodes:
            if waves.begin[t] <= w <= waves.end[t]:
                for owner in touched(t)[0]:
                    if not owner.is_leaf and w == waves.begin[t]:
                        assert (arena[bytes_of(owner)] == number[owner]).all()
        for t in nodes:
            if waves.begin[t] == w and not t.updates:
                arena[bytes_of(t)] = number[t]
    for owner in {t.storage[0] for t in graph.kept}:
        assert owner.is_leaf or (arena[bytes_of(owner)] == number[owner]).all()


def gradients_of_a_product():
    a, b = gg.tensor(shape=(100, 100), param=True), gg.tensor(shape=(100, 100), param=True)
    graph = gg.Graph().build_forward_expand(gg.sum(gg.mul_mat(a, b))).build_backward_expand()
    return [t for t in running(graph) if t.op.name == "mul_mat"][1:]


def many_tasks(t):
    return [8]


@pytest.mark.quick
def test_both_gradients_of_a_product_run_side_by_side():
    graph = gg.Graph()
    da, db = gradients_of_a_product()
    graph.build_forward_expand(da, db)
    waves = side_by_side(running(graph), many_tasks)
    assert waves.begin[da] == waves.begin[db]


@pytest.mark.quick
def test_all_steps_of_an_optimizer_run_side_by_side():
    params = [gg.tensor(shape=(300, 10 + i), param=True) for i in range(5)]
    loss = gg.sum(gg.mul(params[0], params[0]))
    for p in params[1:]:
        loss = loss + gg.sum(gg.mul(p, p))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(keep=False)
    gg.AdamW(params, lr=1e-3).build(graph)
    waves = side_by_side(running(graph), many_tasks)
    steps = [t for t in running(graph) if t.op.name == "opt_step_adamw"]
    assert len({waves.begin[t] for t in steps}) == 1 and len(steps) == 5


@pytest.mark.quick
def test_a_chain_of_small_nodes_has_a_wave_for_each():
    x = gg.tensor(shape=8)
    chain = [x]
    for _ in range(20):
        chain.append(gg.neg(chain[-1]))
    nodes = running(gg.Graph().build_forward_expand(chain[-1]))
    assert side_by_side(nodes, lambda t: [1]) == one_by_one(nodes)


@pytest.mark.quick
def test_small_nodes_alone_are_no_wave_to_meet_for():
    """Another thread would take longer to hear of them than they take."""
    small = [gg.neg(gg.tensor(shape=8)) for _ in range(4)]
    nodes = running(gg.Graph().build_forward_expand(*small))
    assert len(set(side_by_side(nodes, lambda t: [1]).begin.values())) == 4
    large = gg.neg(gg.tensor(shape=100_000))
    small = [gg.neg(gg.tensor(shape=8)) for _ in range(4)]
    nodes = running(gg.Graph().build_forward_expand(large, *small))
    assert len(set(side_by_side(nodes, lambda t: [8 if t is large else 1]).begin.values())) < 5


@pytest.mark.quick
def test_nodes_far_apart_in_the_graph_do_not_meet():
    """Else values would be made long before they are used, and their memory taken."""
    x = gg.tensor(shape=(100, 100))
    chain = x
    for _ in range(20):
        chain = gg.neg(chain)
    late = gg.neg(x)
    nodes = running(gg.Graph().build_forward_expand(chain, late))
    assert side_by_side(nodes, many_tasks).begin[late] > 10


def updates_beside(t):
    """The wave in which `t` ends, and that in which a leaf is updated that the node comes before."""
    update = registry["accumulate"](*(s for s in t.src if s.param), gg.tensor(shape=(100, 100)))
    nodes = running(gg.Graph().build_forward_expand(t, update))
    waves = side_by_side(nodes, many_tasks)
    return waves.end[t], waves.begin[update]


@pytest.mark.quick
def test_a_leaf_is_updated_after_it_was_read():
    read, updated = updates_beside(gg.neg(gg.tensor(shape=(100, 100), param=True)))
    assert read < updated


@pytest.mark.quick
def test_leaves_are_updated_only_after_what_may_fail():
    """An index out of range ends the run: what the graph does to leaves after that node has then not begun."""
    rows = gg.get_rows(gg.tensor(shape=(100, 100)), gg.tensor(np.zeros(50, np.int32)))
    update = registry["accumulate"](gg.tensor(shape=(100, 100)), gg.tensor(shape=(100, 100)))
    nodes = running(gg.Graph().build_forward_expand(rows, update))
    waves = side_by_side(nodes, many_tasks)
    assert waves.end[rows] < waves.begin[update]


@pytest.mark.quick
@pytest.mark.native
def test_functions_in_python_are_called_in_the_order_of_the_graph():
    called = []

    def noted(name):
        return lambda x: (called.append(name), x)[1]

    x = gg.tensor(np.ones(10_000))
    results = [gg.map_custom1(x, noted(i)) for i in range(6)]
    graph = gg.Graph().build_forward_expand(*results)
    assert any(calls_python(t) for t in graph.nodes)
    for threads in (1, 3):
        called.clear()
        graph.compute(threads=threads)
        assert called == list(range(6))


@pytest.mark.native
@given(graph=graphs())
def test_results_are_those_of_the_nodes_one_by_one(graph):
    kept = {}
    for threads in (1, 2, 5):
        graph.compute(threads=threads)
        for t in graph.kept:
            value = np.array(t.numpy())
            assert kept.setdefault(t, value).tobytes() == value.tobytes()
    graph.compute(backend="reference")
    for t, value in kept.items():
        np.testing.assert_allclose(value, t.numpy(), rtol=1e-4, atol=1e-4)  # up to 25 nodes of f32, of sums of 24


# -- followers ----------------------------------------------------------------------------------------------


def chains(*roots, **backward):
    """The names of the ops of each leader and its followers."""
    graph = gg.Graph().build_forward_expand(*roots)
    if backward:
        graph.build_backward_expand(roots[-1], **backward)
    found = graph.prepared("native").waves.followers
    return graph, ["+".join(t.op.name for t in (leader, *chain)) for leader, chain in found.items()]


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def layers(x):
    """A product with bias, activation and residual; a norm that is scaled; and what follows it."""
    w, b = gg.tensor(rows(64, 48, seed=1), param=True), gg.tensor(rows(64, seed=2), param=True)
    hidden = gg.gelu(gg.mul_mat(w, x) + b)
    back = gg.tensor(rows(48, 64, seed=3), param=True)
    return gg.rms_norm(x + gg.mul_mat(back, hidden)) * 0.5


@pytest.mark.native
def test_bias_activation_residual_and_scale_are_no_passes_of_their_own():
    _, found = chains(layers(gg.tensor(rows(3, 70, 48))))
    assert found == ["mul_mat+add+gelu", "mul_mat+add", "rms_norm+scale"]


@pytest.mark.quick
@pytest.mark.native
def test_elementwise_nodes_that_read_the_same_read_it_once():
    x, w = gg.tensor(rows(300, 40)), gg.tensor(rows(40))
    assert chains(gg.tanh(x * w) * x + x * 0.5)[1] == ["mul+tanh+mul+scale+add"]
    assert chains(gg.tanh(x), gg.sqr(gg.tensor(rows(300, 40))))[1] == []
    assert chains(gg.neg(w), w + x)[1] == []  # of other sizes


@pytest.mark.quick
@pytest.mark.native
def test_a_gradient_is_accumulated_as_it_is_made():
    w = gg.tensor(rows(64, 48), param=True)
    loss = gg.sum(gg.sqr(gg.mul_mat(w, gg.tensor(rows(70, 48)))))
    _, found = chains(loss, accumulate=True)
    assert "mul_mat+accumulate" in found


@pytest.mark.native
def test_the_gradient_of_a_residual_is_added_as_that_of_the_norm_is_made():
    x = gg.mul_mat(gg.tensor(rows(48, 48), param=True), gg.tensor(rows(70, 48)))
    loss = gg.sum(gg.sqr(x + gg.rms_norm(x, gg.tensor(rows(48), param=True))))
    _, found = chains(loss, accumulate=False)
    assert "rms_norm_back+add" in found


@pytest.mark.quick
@pytest.mark.native
@pytest.mark.parametrize("rows_of_x", [1, 3, 9, 70])
@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.Q4_0])
def test_followers_change_no_bit(rows_of_x, dtype, monkeypatch):
    """Of any way in which a product is made: few rows or many, few columns, quantized or not; nor any gradient."""

    def run():
        a = rows(130, 256)
        a = gg.tensor(a, dtype=dtype)
        x = gg.tensor(rows(2, rows_of_x, 256, seed=5), param=True)
        y = gg.mul_mat(a, x) + gg.tensor(rows(130, seed=6), param=True)
        z = gg.mul_mat(gg.tensor(rows(5, 130), param=True), gg.silu(y) * y)
        loss = gg.sum(gg.sqr(gg.tanh(z) * 3.0 - gg.transpose(gg.tensor(rows(5, rows_of_x)))))
        graph = gg.Graph().build_forward_expand(y, z, loss).build_backward_expand()
        made = graph.prepared("native").waves.leader
        return made, [
            [t.numpy().tobytes() for t in (y, z, loss, *(graph.grad(p) for p in graph.params))]
            for threads in (1, 2, 3)
            if graph.compute(threads=threads)
        ]

    made, together = run()
    assert len(made) >= 6
    monkeypatch.setattr(waves_of, "_leader", lambda *_: None)
    made, apart = run()
    assert not made
    assert all(bits == apart[0] for bits in (*together, *apart))


@pytest.mark.quick
@pytest.mark.native
def test_what_is_read_in_another_place_does_not_follow():
    """Transposed, shifted, or made in the same wave: then a block of the leader's is not enough."""
    y = gg.mul_mat(gg.tensor(rows(60, 20)), gg.tensor(rows(60, 20, seed=1)))
    assert chains(y + gg.transpose(y))[1] == []
    assert chains(y[1:] + 1.0)[1] == []
    assert chains(gg.add(y, y[:1]))[1] == []


@pytest.mark.native
def test_a_node_follows_only_if_all_it_reads_was_there_before_its_leader():
    a, b, c = (gg.tensor(rows(200, 200, seed=i)) for i in range(3))
    one, two = gg.mul_mat(a, b), gg.mul_mat(b, c)
    assert chains(one + two)[1] == []  # they run side by side
    late = gg.mul_mat(one, two)
    assert chains(late + two)[1] == ["mul_mat+add"]


@pytest.mark.native
def test_a_node_made_much_later_does_not_follow():
    """It would be made, and take memory, long before it is used: what checkpoints are there to avoid."""
    x = gg.tensor(rows(40, 40))
    first = y = gg.mul_mat(x, x)
    for _ in range(12):
        y = gg.mul_mat(x, y)
    assert chains(y, gg.neg(first))[1] == []


@pytest.mark.native
def test_only_the_first_of_several_results_is_followed():
    dout, x, w = gg.tensor(rows(1, 64)), gg.tensor(rows(1, 64, seed=1)), gg.tensor(rows(64, seed=2))
    dx, dw = registry["rms_norm_back"](dout, x, w, eps=1e-6)
    _, found = chains(gg.neg(dx), gg.neg(dw))
    assert found == ["rms_norm_back+neg"]


@pytest.mark.quick
@pytest.mark.native
def test_a_leaf_that_another_node_still_reads_is_not_updated_on_the_way():
    x, total = gg.tensor(rows(200, 200)), gg.tensor(rows(200, 200, seed=1))
    reader = gg.mul_mat(total, x)
    update = registry["accumulate"](total, gg.mul_mat(x, x))
    assert chains(reader, update)[1] == []


@pytest.mark.native
@given(graph=graphs(backward=True))
def test_random_chains_change_no_bit(graph):
    kept = list(graph.compute(threads=2).kept)
    together = [np.array(t.numpy()).tobytes() for t in kept]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waves_of, "_leader", lambda *_: None)
        graph.forget()
        graph.compute(threads=2)
        assert together == [np.array(t.numpy()).tobytes() for t in kept]


def test_a_product_whose_columns_are_packed_beforehand_has_its_followers_in_its_last_stage():
    product = gg.mul_mat(gg.tensor(shape=(163, 800)), gg.tensor(shape=(601, 800)))
    y = gg.relu(product)
    waves = gg.Graph().build_forward_expand(y).prepared("native").waves
    assert waves.leader[y] is product
    assert waves.begin[product] + 1 == waves.end[product] == waves.begin[y] == waves.end[y]
