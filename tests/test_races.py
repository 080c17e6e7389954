"""Tasks of one wave touch no byte that another one writes: of every op's cases, and of random graphs."""

import numpy as np
import pytest
from graphs import graphs
from hypothesis import given, settings

import ggrad as gg
from ggrad.compile import plan as planner
from ggrad.compile import waves as waves_of
from ggrad.core.op import registry
from ggrad.testing.cases import CASES
from ggrad.testing.check import gradients_of, results_of
from ggrad.testing.maker import Maker
from ggrad.testing.races import RaceError, check_races

pytestmark = pytest.mark.native

EVERY_OP = [op for op, cases in CASES.items() if cases and registry[op].in_python is None]


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    """Nodes of a few elements share waves too, as large ones do."""
    monkeypatch.setattr(waves_of, "SMALL", -1)


@pytest.mark.parametrize("op", EVERY_OP)
def test_no_case_has_a_race(op):
    """The first case and the last one of each op, all results and gradients in one graph."""
    builds = [*CASES[op].values()]
    for build in {builds[0]: None, builds[-1]: None}:
        maker = Maker()
        results = results_of(build, maker)
        made = list(gradients_of(results, maker).values()) if registry[op]._grad is not None else []
        check_races(gg.Graph().build_forward_expand(*results, *made))


@settings(max_examples=30)
@given(graph=graphs(backward=True))
def test_random_graphs_have_none(graph):
    if all(leaf.holds_value for leaf in graph.leaves):
        check_races(graph)


def large():
    """Kernels of many tasks in several stages, a leader of followers among them."""
    rng = np.random.default_rng(0)
    x = gg.tensor(rng.normal(size=(96, 512)), param=True)
    w = gg.tensor(rng.normal(size=512))
    y = gg.rms_norm(gg.silu(x), w)
    loss = gg.sum(gg.sqr(y + gg.cumsum(y)) * 0.5) + gg.sum(gg.soft_max(y) * y)
    return gg.Graph().build_forward_expand(loss).build_backward_expand()


def test_kernels_of_many_tasks_have_none():
    assert check_races(large()) > 1000


def frozen_norm(op):
    """A norm's gradient by x is read, by a follower, before the one by the weight is there, which nobody reads."""
    rng = np.random.default_rng(0)
    x = gg.tensor(rng.normal(size=(64, 256)), param=True)
    h = gg.tanh(gg.mul_mat(gg.tensor(rng.normal(size=(64, 256)) / 16), x))
    weight, bias = gg.tensor(np.ones(64)), gg.tensor(np.zeros(64))
    y = op(h, weight, bias) if op is gg.norm else op(h, weight)
    return gg.Graph().build_forward_expand(loss := gg.sum(gg.sin(y))).build_backward_expand(loss)


@pytest.mark.parametrize("op", [gg.norm, gg.rms_norm])
def test_a_result_whose_last_stage_comes_after_its_readers_meets_nobody(op):
    check_races(frozen_norm(op))


def test_a_result_given_away_before_its_last_stage_is_found():
    """As the planner would if only readers kept it."""
    x = gg.tensor(np.random.default_rng(0).normal(size=(64, 256)))
    dx, dweight, dbias = gg.norm_back(x, x, gg.tensor(np.ones(256)))
    follower = gg.tanh(dx)
    graph = gg.Graph().build_forward_expand(follower, gg.cumsum(follower), dweight, dbias)
    check_races(graph)
    session = graph.prepared("native")
    packed = dx.base
    later = next(t for t in session.nodes if t.op is gg.cumsum)
    assert session.waves.end[packed] == session.waves.begin[later]
    session.plan.offsets[later] = session.plan.offsets[packed] + packed.nbytes - later.nbytes
    session.values = None  # so that the next run places results anew
    with pytest.raises(RaceError):
        check_races(graph)


def test_results_that_lie_on_one_another_are_found(monkeypatch):
    """Two results of one wave in one place."""
    x = gg.tensor(np.random.default_rng(0).normal(size=(64, 64)))
    a, b = gg.cumsum(x), gg.soft_max(x)
    graph = gg.Graph().build_forward_expand(a, b)
    assert check_races(graph)

    def on_top(buffers):
        return max((setattr(buffer, "offset", 0) or buffer.nbytes for buffer in buffers), default=0)

    monkeypatch.setattr(planner, "place", on_top)
    graph.forget()
    with pytest.raises(RaceError, match=r"other bits|same bytes"):
        check_races(graph)


def test_a_node_in_the_wave_of_what_it_reads_is_found(monkeypatch):
    x = gg.tensor(np.random.default_rng(0).normal(size=(64, 64)))
    a = gg.cumsum(x)
    b = gg.soft_max(a)
    graph = gg.Graph().build_forward_expand(a, b)
    check_races(graph)
    at_once = waves_of.Waves({a: 0, b: 0}, {a: 0, b: 0}, 1)
    monkeypatch.setattr("ggrad.run.session.side_by_side", lambda *args, **options: at_once)
    graph.forget()
    with pytest.raises(RaceError, match=r"other bits|reads what another"):
        check_races(graph)
