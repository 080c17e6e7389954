"""What plans and waves promise holds of every session: of each op's cases and of random graphs; the checker objects."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from graphs import graphs
from hypothesis import given

import ggrad as gg
from ggrad.compile import waves as waves_of
from ggrad.compile.plan import plan, running
from ggrad.core.op import registry
from ggrad.testing.cases import CASES
from ggrad.testing.check import gradients_of, results_of
from ggrad.testing.invariants import InvariantError, check_graph, check_plan, check_waves
from ggrad.testing.maker import Maker

pytestmark = pytest.mark.native

EVERY_CASE = [
    pytest.param(op, build, id=f"{op}: {name}") for op, cases in CASES.items() for name, build in cases.items()
]


class Constants(Maker):
    """Of the float inputs of a case only the first is a parameter."""

    def _leaf(self, values, dtype, param, role="constant"):
        return super()._leaf(values, dtype, param and not any(leaf.param for leaf in self.leaves), role)


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Nodes of a few elements share waves too, as large ones do."""
    monkeypatch.setattr(waves_of, "SMALL", -1)


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("op, build", EVERY_CASE)
def test_every_case_keeps_the_rules(op, build):
    """Forward; with all gradients; and with those of the first input alone, after which other nodes want memory."""
    check_graph(gg.Graph().build_forward_expand(*results_of(build)))
    for maker in (Maker(), Constants()):
        results = results_of(build, maker)
        if registry[op]._grad is None:
            continue
        made = list(gradients_of(results, maker).values())
        followed = [gg.silu(g) * 0.5 for g in made if g.dtype.is_float and g.ndim]
        later = [gg.cumsum(g) for g in followed]  # as large, in the wave that comes next, and not in place
        check_graph(gg.Graph().build_forward_expand(*(later or results)))


@given(graph=graphs())
def test_random_graphs_keep_the_rules(graph):
    with pytest.MonkeyPatch.context() as patch:
        for small in (waves_of.SMALL, -1):
            patch.setattr(waves_of, "SMALL", small)
            for reuse in (True, False):
                graph.forget()
                check_graph(graph, reuse=reuse)


@given(graph=graphs(backward=True))
def test_so_they_do_with_accumulated_gradients_and_optimizers(graph):
    if not graph.params:
        return
    more = gg.Graph().build_forward_expand(graph.loss).build_backward_expand(graph.loss, accumulate=True)
    gg.AdamW([p for p in more.params if more.grad(p) is not None], lr=1e-3).build(more)
    check_graph(more)


# -- the checker objects ------------------------------------------------------------------------------------------


def first_stage_leader():
    """A norm's gradient by its input is followed; that by its weight, which nobody reads, is made a stage later."""
    x = gg.tensor(np.ones((40, 64)), param=True)
    w = gg.tensor(np.ones(64))
    y = gg.mul_mat(gg.tensor(np.ones((64, 64))), x)
    loss = gg.sum(gg.sqr(y + gg.rms_norm(gg.silu(y), w)))
    return gg.Graph().build_forward_expand(loss).build_backward_expand()


def made(graph):
    session = graph.prepared("native")
    return SimpleNamespace(
        nodes=session.nodes,
        waves=session.waves,
        plan=session.plan,
        work=session.work_bytes,
        kept=graph.kept,
        first=lambda t: session.leads(t) == waves_of.FIRST_STAGE,
    )


def test_a_result_that_is_given_away_before_its_writers_last_stage_is_found():
    x = gg.tensor(np.ones((40, 64)))
    a = gg.rms_norm(x)
    b = gg.silu(a)
    c = gg.neg(gg.tensor(np.ones((40, 64))))
    graph = gg.Graph().build_forward_expand(b, c)
    nodes = running(graph)
    waves = waves_of.Waves({a: 0, b: 1, c: 2}, {a: 2, b: 1, c: 2}, 3)  # b reads what an early stage of a made
    layout = plan(graph, graph.kept, waves=waves)
    check_plan(nodes, waves, layout, graph.kept, lambda t: 0)
    given_away = replace(layout, offsets={**layout.offsets, c: layout.offsets[a]})
    with pytest.raises(InvariantError, match="lies on the result of"):
        check_plan(nodes, waves, given_away, graph.kept, lambda t: 0)


def test_any_two_results_put_in_one_place_are_found():
    """Of every pair that is needed at once, unless an op declares that it may take over the other."""
    m = made(first_stage_leader())
    check_plan(m.nodes, m.waves, m.plan, m.kept, m.work)
    caught = 0
    for t in m.nodes:
        if t not in m.plan.offsets or t.op.inplace or t in m.waves.leader:
            continue
        for owner in {s.storage[0] for s in t.src if s is not None} & m.plan.offsets.keys():
            if m.plan.offsets[owner] + t.nbytes > m.plan.arena:
                continue
            bad = replace(m.plan, offsets={**m.plan.offsets, t: m.plan.offsets[owner]})
            with pytest.raises(InvariantError):
                check_plan(m.nodes, m.waves, bad, m.kept, m.work)
            caught += 1
    assert caught >= 3


def test_nodes_moved_to_an_earlier_wave_are_found():
    m = made(first_stage_leader())
    check_waves(m.nodes, m.waves, m.first)
    caught = 0
    for t in m.nodes:
        if m.waves.begin[t] == 0 or all(s is None or s.storage[0].is_leaf for s in t.src):
            continue
        earlier = waves_of.Waves(
            {**m.waves.begin, t: m.waves.begin[t] - 1}, {**m.waves.end, t: m.waves.end[t] - 1}, m.waves.count,
            dict(m.waves.leader),
        )  # fmt: skip
        makers = [s.storage[0] for s in t.src if s is not None and not s.storage[0].is_leaf]
        if t in m.waves.leader or any(m.waves.end[s] == m.waves.begin[t] - 1 for s in makers):
            with pytest.raises(InvariantError):
                check_waves(m.nodes, earlier, m.first)
            caught += 1
    assert caught >= 5


def test_updates_that_come_too_early_are_found():
    total = gg.tensor(np.ones((100, 100)))
    read = gg.neg(total)
    rows = gg.get_rows(gg.tensor(np.ones((9, 9))), gg.tensor(np.zeros(3, np.int32)))
    update = gg.ops.accumulate(total, gg.tensor(np.ones((100, 100))))
    nodes = running(gg.Graph().build_forward_expand(read, rows, update))
    good = waves_of.Waves({read: 0, rows: 0, update: 1}, {read: 0, rows: 0, update: 1}, 2)
    check_waves(nodes, good)
    for late in (read, rows):
        bad = waves_of.Waves({**good.begin, late: 1}, {**good.end, late: 1}, 2)
        with pytest.raises(InvariantError, match="updates"):
            check_waves(nodes, bad)
