"""Frozen constants: products keep them packed, once for all runs and graphs, to the same bits."""

import gc

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.native import ffi, lib

RNG = np.random.default_rng(0)
LAYOUTS = {
    "plain": lambda w: w,
    "transposed": gg.transpose,
    "window": lambda w: w[..., 3:-2, 5:-4],
    "strided": lambda w: w[..., ::2],
}


def product(w: gg.Tensor, rows: int, layout=LAYOUTS["plain"], batches: int = 1) -> gg.Graph:
    a = layout(w)
    b = gg.tensor(RNG.normal(size=(*(n * batches for n in a.shape[:-2]), rows, a.shape[-1])), name="b")
    return gg.Graph().build_forward_expand(gg.mul_mat(a, b))


def values(graph: gg.Graph, threads: int) -> np.ndarray:
    (result,) = graph.compute(threads=threads).kept
    return result.numpy().copy()


@pytest.mark.native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16], ids=str)
@pytest.mark.parametrize("shape", [(70, 45), (3, 2, 41, 130), (33, 1000)], ids=str)
def test_a_frozen_operand_changes_no_bit(shape, dtype, layout, isa):
    w = RNG.normal(size=shape)
    for rows, batches in ((9, 1), (12, 2), (65, 1)):
        frozen, free = gg.tensor(w, dtype=dtype, frozen=True), gg.tensor(w, dtype=dtype)
        kept, plain = product(frozen, rows, LAYOUTS[layout], batches), product(free, rows, LAYOUTS[layout], batches)
        next(t for t in plain.leaves if t.name == "b").set(next(t for t in kept.leaves if t.name == "b").numpy())
        assert kept.plan().prepared > 0 and plain.plan().prepared == 0
        for threads in (1, 2, 3):
            assert values(kept, threads).tobytes() == values(plain, threads).tobytes()


@pytest.mark.native
@pytest.mark.parametrize("rows", [4, 5, 8])
def test_few_rows_agree_with_the_reference_too(rows):
    """These take another path than where nothing is kept."""
    gg.testing.compare_with_reference(product(gg.tensor(RNG.normal(size=(70, 300)), frozen=True), rows))


@pytest.mark.native
def test_a_gradient_through_frozen_weights_and_its_followers():
    w, x = gg.tensor(RNG.normal(size=(40, 30)), frozen=True), gg.tensor(RNG.normal(size=(20, 30)), param=True)
    loss = gg.sum(gg.sqr(gg.gelu(gg.mul_mat(w, x)) + 1.0))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
    assert graph.plan().prepared >= 2 * 40 * 30 * 4  # as it is, and transposed
    gg.testing.compare_with_reference(graph)


@pytest.mark.native
def test_graphs_share_what_they_keep_and_the_last_one_takes_it_along():
    w = gg.tensor(RNG.normal(size=(64, 64)), frozen=True)
    first, second, other = product(w, 16), product(w, 32), product(w, 16, gg.transpose)
    for graph in (first, second, other):
        values(graph, 1)
    assert len(w.prepared) == 2
    del first, second, graph
    gc.collect()
    assert len(w.prepared) == 1


@pytest.mark.native
def test_each_instruction_set_has_a_form_of_its_own():
    w = gg.tensor(RNG.normal(size=(64, 64)), frozen=True)
    first = product(w, 16)
    values(first, 1)
    before = ffi.string(lib.gg_isa())
    assert lib.gg_isa_select(b"base") == 0
    try:
        gg.testing.compare_with_reference(product(w, 16))
    finally:
        assert lib.gg_isa_select(before) == 0


@pytest.mark.native
def test_one_form_is_counted_once():
    w = gg.tensor(RNG.normal(size=(64, 64)), frozen=True)
    x = gg.tensor(RNG.normal(size=(16, 64)))
    graph = gg.Graph().build_forward_expand(gg.mul_mat(w, gg.mul_mat(w, x)))
    assert graph.plan().prepared == w.nbytes
    assert "prepared constants" in str(graph.plan())


@pytest.mark.native
@pytest.mark.parametrize("rows", [1, 3, 513])
def test_nothing_is_kept_where_it_would_not_pay(rows):
    assert product(gg.tensor(RNG.normal(size=(64, 64)), frozen=True), rows).plan().prepared == 0


@pytest.mark.native
def test_quantized_blocks_are_never_expanded():
    w = gg.tensor(RNG.normal(size=(64, 64)), dtype=gg.Q8_0, frozen=True)
    assert product(w, 16).plan().prepared == 0


def test_its_value_is_the_last():
    w = gg.tensor(np.ones((2, 3)), name="w", frozen=True)
    with pytest.raises(gg.errors.GraphError, match=r"w: f32\[2,3\] is frozen"):
        w.set(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="read-only"):
        w.numpy()[0, 0] = 2
    assert (w.numpy() == 1).all()


def test_a_checkpoint_does_not_change_it(tmp_path):
    w = gg.tensor(np.ones(3), name="w", frozen=True)
    gg.checkpoint.save(tmp_path / "file", [w])
    with pytest.raises(gg.errors.CheckpointError, match=r"frozen leaves never change: w: f32\[3\]"):
        gg.checkpoint.load(tmp_path / "file", [w])


def test_it_is_no_parameter():
    with pytest.raises(gg.errors.GraphError, match="frozen, and training would change it"):
        gg.tensor(np.ones((2, 3)), param=True, frozen=True)
    with pytest.raises(gg.errors.GraphError, match="frozen"):
        gg.set_param(gg.tensor(1.0, frozen=True))


def test_it_has_a_value():
    with pytest.raises(gg.errors.ShapeError, match="needs its value now"):
        gg.tensor(shape=(2, 3), frozen=True)


def test_a_constant_can_be_frozen_later():
    w = gg.tensor(RNG.normal(size=(64, 64)))
    assert product(w, 16).plan().prepared == 0
    assert gg.set_frozen(gg.set_frozen(w)) is w
    assert lib is None or product(w, 16).plan().prepared == w.nbytes
    x = gg.tensor(1.0, param=True)
    for t in (x, x + 1.0):
        with pytest.raises(gg.errors.GraphError, match="only constants"):
            gg.set_frozen(t)
    with pytest.raises(gg.errors.GraphError, match="no value yet"):
        gg.set_frozen(gg.tensor(shape=(2,)))
