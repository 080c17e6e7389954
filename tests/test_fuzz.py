"""A fixed share of the random programs, and that the checks find what is broken."""

import io

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import part, registry
from ggrad.testing import fuzz, growing
from ggrad.testing.programs import Call, GraphOf, Leaf, Program, pruned, shrink
from ggrad.testing.races import RaceError

pytestmark = pytest.mark.native

BLOCKS = 16
PROGRAMS = 640  # more than four of each op


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_are_right(block):
    size = PROGRAMS // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        program = growing.random_program(seed)
        fault = fuzz.fault_of(program, repeats=2)
        assert fault is None, f"seed {seed}: {fuzz.explain(program, fault)}"


def test_programs_come_to_every_op_and_to_everything_a_graph_can_have():
    programs = [growing.random_program(seed) for seed in range(PROGRAMS)]
    calls = {step.op for p in programs for step in p.steps if isinstance(step, Call)}
    assert {*registry} - calls - {part.name} == set()
    leaves = [step for p in programs for step in p.steps if isinstance(step, Leaf)]
    assert any(leaf.frozen for leaf in leaves) and {"param", "constant", "moment", "accumulator"} <= {
        leaf.role for leaf in leaves
    }
    assert {gg.F32, gg.F16, gg.BF16, gg.I32, gg.Q8_0, gg.Q4_0} <= {leaf.dtype for leaf in leaves}
    graphs = [g for p in programs for g in p.graphs]
    for wanted in ("loss", "outputs", "checkpoints", "accumulate", "seed", "optimizer", "clip"):
        assert sum(bool(getattr(g, wanted)) for g in graphs) > 20, wanted
    assert sum(not g.keep for g in graphs) > 20
    assert sum(len(p.graphs) > 1 for p in programs) > 20
    assert sum(len(g.loss) > 1 for g in graphs) > 20


def test_a_seed_always_grows_the_same_program():
    for seed in (3, 77, 150):
        assert growing.random_program(seed).text() == growing.random_program(seed).text()


def test_a_program_prints_as_python_that_runs(capsys):
    for seed in range(12):
        text = growing.random_program(seed).text()
        if "<" in text:
            continue  # a function in Python, which has no source here
        exec(compile(text, f"seed {seed}", "exec"), {})
    assert "native" in capsys.readouterr().out


def small():
    """exp(silu(x) * w) * 2, and something beside it."""
    steps = (
        Leaf((5, 7), role="param", seed=1),
        Leaf((5, 7), seed=2),
        Call("silu", ((0, 0),), {}),
        Call("mul", ((2, 0), (1, 0)), {}),
        Call("exp", ((3, 0),), {}),
        Call("scale", ((4, 0),), {"factor": 2.0, "bias": 0.0}),
        Call("neg", ((1, 0),), {}),
    )
    return Program(steps, (GraphOf(((5, 0), (6, 0)), loss=((5, 0),)),))


def test_a_small_program_is_right():
    assert fuzz.fault_of(small()) is None


@pytest.fixture
def wrong(monkeypatch):
    def change(op, what, function):
        monkeypatch.setattr(registry[op], what, function)

    return change


def test_a_kernel_that_differs_from_its_reference_is_found_and_shrunk(wrong):
    """Here it is the reference that is wrong; nobody can tell."""
    right = registry["exp"]._reference
    wrong("exp", "_reference", lambda x: right(x) * (1 + 1e-4))
    fault = fuzz.fault_of(small())
    assert fault.startswith("values: exp(")
    text = fuzz.explain(small(), fault)
    assert 'registry["exp"]' in text and "silu" not in text and "neg" not in text and "scale" not in text
    assert "(1, 1)" in text  # the smallest shape


def test_a_wrong_gradient_rule_is_found_and_shrunk(wrong):
    right = registry["silu"]._grad
    wrong("silu", "_grad", lambda t, dout: (gg.scale(*right(t, dout), factor=1.001),))
    fault = fuzz.fault_of(small())
    assert fault.startswith("gradients: ")
    text = fuzz.explain(small(), fault)
    assert 'registry["silu"]' in text and '"exp"' not in text and '"mul"' not in text


def test_gradients_do_not_flow_through_stop_gradient():
    steps = (
        Leaf((5,), role="param", seed=1),
        Call("stop_gradient", ((0, 0),), {}),
        Call("mul", ((0, 0), (1, 0)), {}),
    )
    assert fuzz.fault_of(Program(steps, (GraphOf(((2, 0),), loss=((2, 0),)),))) is None


def test_bits_that_depend_on_the_number_of_threads_are_found(monkeypatch):
    compute = gg.Graph.compute

    def other(graph, **options):
        compute(graph, **options)
        if options.get("threads") == 3:
            session = graph.prepared("native")
            session.values.arena.view(np.uint8)[session.plan.offsets[graph.roots[0]]] ^= 1
        return graph

    monkeypatch.setattr(gg.Graph, "compute", other)
    assert fuzz.fault_of(small()).startswith("bits: scale(")


def test_a_plan_that_breaks_a_rule_is_found(monkeypatch):
    from ggrad.run import session

    plan = session.plan

    def wrong(*arguments, **options):
        made = plan(*arguments, **options)
        made.offsets.update(dict.fromkeys(made.offsets, 0))
        return made

    monkeypatch.setattr(session, "plan", wrong)
    assert fuzz.fault_of(small()).startswith("rules: ")


def test_a_race_is_found(monkeypatch):
    def found(graph):
        raise RaceError("two tasks meet")

    monkeypatch.setattr(fuzz, "check_races", found)
    assert fuzz.fault_of(small()) == "races: two tasks meet"


def test_errors_of_a_run_are_found_and_errors_of_building_are_the_callers():
    rows = (Leaf((3, 2)), Leaf((4,), gg.I32, low=7, high=9), Call("get_rows", ((0, 0), (1, 0)), {}))
    assert fuzz.fault_of(Program(rows, (GraphOf(((2, 0),)),))).startswith("IndexRangeError: ")
    bad = (Leaf((3, 2)), Leaf((4,)), Call("mul_mat", ((0, 0), (1, 0)), {}))
    with pytest.raises(gg.errors.GgradError):
        fuzz.fault_of(Program(bad, (GraphOf(((2, 0),)),)))


def test_shrinking_ends_at_what_is_needed():
    def fails(program):
        return any(isinstance(s, Call) and s.op == "mul" for s in pruned(program).steps)

    made = shrink(small(), fails)
    assert [step.op for step in made.steps if isinstance(step, Call)] == ["mul"]
    assert all(step.shape == (1, 1) for step in made.steps if isinstance(step, Leaf))
    assert made.graphs[0].loss == ()


def test_the_program_says_its_seed_and_what_it_did():
    out = io.StringIO()
    assert fuzz.run(5, None, 3, out) == 0
    assert out.getvalue().startswith("seed 5\n") and "3 programs" in out.getvalue() and "--seed 8" in out.getvalue()


def test_an_interrupt_ends_it_with_what_it_did(monkeypatch):
    tried = []

    def program(seed):
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(seed)
        return small()

    monkeypatch.setattr(fuzz, "random_program", program)
    out = io.StringIO()
    assert fuzz.run(5, 60, None, out) == 0
    assert "interrupted" in out.getvalue() and "2 programs" in out.getvalue() and "--seed 7" in out.getvalue()


def test_it_prints_each_find(wrong):
    wrong("exp", "_reference", lambda x: np.exp(x) * 1.01)
    out = io.StringIO()
    names = sorted(name for name in registry if name in gg_cases())
    seeds = range(names.index("exp"), 5 * len(names), len(names))  # of programs with exp, of some numbers or none
    found = next(seed for seed in seeds if fuzz.run(seed, None, 1, out) == 1)
    assert f"FAULT of seed {found}: values: exp(" in out.getvalue() and "import ggrad as gg" in out.getvalue()


def gg_cases():
    from ggrad.testing.cases import CASES

    return CASES
