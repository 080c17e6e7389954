"""What holds for every op, on every case: kernels do what references say, rules are derivatives."""

from functools import cache

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.native import ffi, struct_dtype
from ggrad.core.op import all_of, part, registry
from ggrad.testing import compare_with_reference
from ggrad.testing.cases import CASES, NO_EMPTY, NO_GRADIENT, NO_TASKS, RTOL
from ggrad.testing.check import gradients_of, node_of, results_of
from ggrad.testing.maker import LAYOUTS, Maker

THREADS = (1, 2, 3, 7)
EVERY_CASE = [
    pytest.param(op, build, id=f"{op}: {name}") for op, cases in CASES.items() for name, build in cases.items()
]
NAMES = sorted(set(registry) - {part.name})


def compare(op: str, *roots: gg.Tensor, threads=THREADS) -> None:
    compare_with_reference(gg.Graph().build_forward_expand(*roots), threads=threads, rtol=RTOL.get(op))


def gradients(results: tuple[gg.Tensor, ...], maker: Maker, used=None) -> list[gg.Tensor]:
    return list(gradients_of(results, maker, used).values())


def has_rule(op: str) -> bool:
    return registry[op]._grad is not None


@cache
def first_node(op: str) -> gg.Tensor:
    return node_of(results_of(next(iter(CASES[op].values()))))


# -- the cases themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", NAMES)
def test_every_op_has_cases_one_of_them_empty(op):
    assert op in CASES, f"{op} has no case in tests/cases"
    nodes = [node_of(results_of(build)) for build in CASES[op].values()]
    assert all(t.op.name == op for t in nodes), "a case whose result another op made"
    assert (op in NO_EMPTY) != any(s is not None and s.size == 0 for t in nodes for s in t.src), "empty input"


def test_cases_are_of_ops_that_exist():
    assert {*CASES, *NO_GRADIENT, *NO_EMPTY, *NO_TASKS, *RTOL} <= set(registry)


ASSIGNING = {"assign", "assign_rows"}  # their result has the gradient of what was written


@pytest.mark.parametrize("op", NAMES)
def test_every_op_has_a_gradient_rule_or_says_that_it_has_none(op):
    t = first_node(op)
    if t.updates and op not in ASSIGNING:
        assert not has_rule(op)
        return
    needs_none = not any(o.dtype.is_float for o in t.outputs)
    assert has_rule(op) != (needs_none or op in NO_GRADIENT)


@pytest.mark.parametrize("op", NAMES)
def test_every_op_has_a_reference_and_a_docstring(op):
    assert registry[op]._reference is not None
    assert registry[op].__doc__


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.parametrize("op", [op for op in NAMES if op not in NO_TASKS])
def test_some_case_is_cut_into_several_tasks(op):
    """Else nothing is known about threads."""
    for build in CASES[op].values():
        results = results_of(build)
        if node_of(results).is_view:
            return
        session = gg.Graph().build_forward_expand(*results).compute().prepared("native")
        steps = session.steps_in_c[0 : len(session.steps)]
        if any(s.tasks > 1 and ffi.string(s.call.kernel.name).decode() == op for s in steps):
            return
    raise AssertionError(f"every case of {op} is a single task: add a larger one")


@pytest.mark.native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op, build", EVERY_CASE)
def test_kernel_agrees_with_reference(op, build, layout):
    """For inputs in every layout, with the same bits for any number of threads, from memory full of NaN."""
    compare(op, *results_of(build, Maker(layout)))


@pytest.mark.native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op, build", [case for case in EVERY_CASE if has_rule(case.values[0])])
def test_gradient_kernels_agree_with_references(op, build, layout):
    """For incoming gradients in every layout, with plain inputs and with inputs in that layout too."""
    for inputs in dict.fromkeys(("plain", layout)):
        compare(op, *gradients(results_of(build, Maker(inputs)), Maker(layout, seed=1)))


@pytest.mark.native
@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16])
@pytest.mark.parametrize("op, build", [pytest.param(op, next(iter(CASES[op].values())), id=op) for op in CASES])
def test_every_float_input_may_be_a_half(op, build, dtype):
    """Kernels that do not read it get a copy in f32; gradients are f32 all the same."""
    t = node_of(results_of(build))
    if t.updates:
        return  # what is written to has the dtype that it has
    rng = np.random.default_rng(3)
    halves = [
        s
        if s is None or s.dtype is gg.I32 or s.dtype.quantized
        else gg.tensor(rng.uniform(0.5, 1, s.shape), dtype=dtype, param=True)
        for s in t.src
    ]
    results = all_of(t.op.node(*halves, **t.attrs))
    compare(op, *results, threads=(1, 2))
    if has_rule(op):
        found = gradients(results, Maker(seed=1))
        assert all(g.dtype is gg.F32 for g in found)
        compare(op, *found, threads=(1, 2))


@pytest.mark.native
@pytest.mark.parametrize("op, build", EVERY_CASE)
def test_every_instruction_set_agrees_with_reference(op, build, isa):
    results = results_of(build)
    compare(op, *results, *(gradients(results, Maker(seed=1)) if has_rule(op) else ()), threads=(1, 3))


@pytest.mark.native
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op, build", EVERY_CASE)
def test_nan_and_infinities_come_out_where_the_reference_has_them(op, build, value):
    maker = Maker()
    results = results_of(build, maker)
    rng = np.random.default_rng(2)
    for leaf in maker.leaves:
        if leaf.dtype is gg.F32 and leaf.size:
            leaf.numpy().reshape(-1)[rng.integers(leaf.size)] = value
    compare(op, *results, *(gradients(results, Maker(seed=1)) if has_rule(op) else ()), threads=(1, 3))


@pytest.mark.native
@pytest.mark.parametrize("op, name", [(op, registry[op].inputs[i]) for op in NAMES for i in registry[op].inplace])
def test_destination_may_lie_on_an_input_that_is_declared_so(op, name):
    """The planner puts it there, in at least one case; and the kernel is right then."""
    i = registry[op].inputs.index(name)
    tried = 0
    for build in CASES[op].values():
        t = node_of(results_of(build))
        if t.src[i] is None or t.src[i].shape != t.shape or t.src[i].nbytes != t.nbytes or not t.size:
            continue
        dying = gg.cont(t.src[i])
        same = [j in t.op.inplace and s is not None and s.spec == dying.spec for j, s in enumerate(t.src)]
        for others_too in dict.fromkeys((False, sum(same) > 1)):  # also op(x, x)
            src = [dying if j == i or (others_too and same[j]) else s for j, s in enumerate(t.src)]
            result = t.op.node(*src, **t.attrs)
            graph = gg.Graph().build_forward_expand(result)
            offsets = graph.plan().offsets
            assert offsets[result] == offsets[dying], "the planner did not reuse the input"
            compare_with_reference(graph, threads=THREADS, rtol=RTOL.get(op))
            tried += 1
    assert tried, "no case has an input of the result's shape"


@pytest.mark.native
@pytest.mark.parametrize("op", NAMES)
def test_attributes_have_a_c_struct_of_the_same_layout(op):
    record = registry[op].record
    if first_node(op).is_view or registry[op].in_python is not None or not record.names:
        return
    struct = ffi.typeof(f"gg_{op}_attrs")
    c = list(c_fields(struct))
    assert c == list(record_fields(record))
    assert ffi.sizeof(struct) == record.itemsize


def c_fields(struct, at: int = 0):
    """Name, offset and dtype of every field, those of structs inside in their place."""
    for name, field in struct.fields:
        if field.type.kind == "struct":
            yield from c_fields(field.type, at + field.offset)
        else:
            yield name, at + field.offset, c_dtype(field.type)


def record_fields(record: np.dtype, at: int = 0):
    """The same of NumPy's record."""
    for name in record.names:
        dtype, offset = record.fields[name]
        if dtype.names:
            yield from record_fields(dtype, at + offset)
        else:
            yield name, at + offset, dtype


def c_dtype(ctype) -> np.dtype:
    """NumPy's dtype for the type of a field of an attribute struct."""
    if ctype.kind == "array":
        return np.dtype((c_dtype(ctype.item), ctype.length))
    return np.dtype({"float": "f4", "int32_t": "i4", "int64_t": "i8"}[ctype.cname])


@pytest.mark.native
def test_no_attribute_struct_is_without_its_op():
    typedefs, structs, _ = ffi.list_types()
    named = {name for name in (*typedefs, *structs) if name.endswith("_attrs")}
    assert named <= {f"gg_{op}_attrs" for op in NAMES}


@pytest.mark.native
@pytest.mark.parametrize("name", ["gg_tensor", "gg_call", "gg_step", "gg_span", "gg_fitted_kernel"])
def test_records_have_the_layout_of_the_c_structs(name):
    record, struct = struct_dtype(name), ffi.typeof(name)
    assert [(field, at.offset, ffi.sizeof(at.type)) for field, at in struct.fields] == [
        (field, record.fields[field][1], record.fields[field][0].itemsize) for field in record.names
    ]
    assert ffi.sizeof(struct) == record.itemsize


# -- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, build", [case for case in EVERY_CASE if has_rule(case.values[0])])
def test_gradient_rule_is_the_derivative(op, build):
    """In double precision, through the references: along random directions, as the difference quotient says."""
    results = results_of(build)
    if any(t.param for t in gg.Graph().build_forward_expand(*results).leaves):
        gg.testing.check_gradients(lambda: results)


@pytest.mark.parametrize("op", sorted(NO_GRADIENT))
def test_an_op_without_a_rule_is_refused_when_the_gradient_is_built(op):
    results = [t for t in results_of(next(iter(CASES[op].values()))) if t.dtype.is_float]
    graph = gg.Graph().build_forward_expand(*results)
    if not graph.params:
        gg.set_param(next(leaf for leaf in graph.leaves if leaf.dtype.is_float))
    with pytest.raises(gg.errors.GradientError, match=f"{op}.*on the way .* to parameter .*no gradient rule"):
        graph.build_backward_expand(gg.sum(results[0]))


@pytest.mark.native
@pytest.mark.parametrize("op, build", [case for case in EVERY_CASE if has_rule(case.values[0])])
def test_a_part_that_nobody_uses_costs_no_gradient(op, build):
    """Of several results each is used alone, so the rule is given None for the others."""
    results = results_of(build)
    node = node_of(results)
    if len(node.outputs) > 1:
        for i, t in enumerate(node.outputs):
            if t.dtype.is_float:
                compare(op, *gradients(results, Maker(seed=1), used={i}), threads=(1, 3))
