"""Leaves and results in memory of others: read and written in place, checked, kept alive."""

import gc
import threading
import weakref

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GraphError, ShapeError

pytestmark = pytest.mark.skipif(not gg.native.built(), reason="needs the C module")


def graph_of(*roots):
    return gg.Graph().build_forward_expand(*roots)


def test_a_leaf_reads_and_a_result_writes_in_place():
    x, a, out = gg.tensor(shape=(2, 3)), np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    y = x * 2.0
    assert gg.bind(x, a) is x
    gg.bind(y, out)
    graph = graph_of(y).compute()
    assert out.tolist() == [[2, 2, 2]] * 2
    a[0, 0] = 5
    graph.compute()
    assert out[0, 0] == 10 and np.shares_memory(y.numpy(), out) and np.shares_memory(x.numpy(), a)


def test_binding_again_takes_effect_at_the_next_run():
    x = gg.tensor([1.0, 2.0])
    y = x * 2.0
    graph = graph_of(y).compute()
    first, second = (np.zeros(2, np.float32) for _ in range(2))
    gg.bind(y, first)
    assert y.numpy().tolist() == [2, 4], "until then it is what it was"
    graph.compute()
    gg.bind(y, second)
    gg.bind(x, np.array([3, 4], np.float32))
    graph.compute()
    assert first.tolist() == [2, 4] and second.tolist() == [6, 8]
    gg.bind(y, None)
    gg.bind(x, None).set([5.0, 5.0])
    graph.compute()
    assert second.tolist() == [6, 8] and y.numpy().tolist() == [10, 10]


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_memory_may_begin_at_any_element(shift):
    memory = np.arange(70, dtype=np.float32)
    x, out = gg.tensor(shape=64), np.zeros(70, np.float32)
    y = gg.exp(x * 0.01)
    gg.bind(x, memory[shift : shift + 64])
    gg.bind(y, out[shift : shift + 64])
    graph_of(y).compute()
    np.testing.assert_allclose(out[shift : shift + 64], np.exp(memory[shift : shift + 64] * 0.01), rtol=1e-6)
    assert not out[:shift].any() and not out[shift + 64 :].any()


def test_a_result_that_others_read_and_take_over_is_bound_too():
    x = gg.tensor(np.arange(8.0))
    y = gg.relu(x * 2.0)
    z = gg.sum(gg.relu(y + 1.0))
    out = np.zeros(8, np.float32)
    gg.bind(y, out)
    graph_of(z).compute()
    assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14] and z.item() == 64


def test_one_part_of_a_packed_result():
    q = gg.tensor(np.random.default_rng(0).standard_normal((1, 2, 5, 4)))
    out, lse = gg.flash_attn_ext(q, q, q, return_lse=True)
    graph = graph_of(out, lse).compute()
    expected, memory = (out.numpy().copy(), lse.numpy().copy()), np.zeros((1, 5, 2, 4), np.float32)
    gg.bind(out, memory)
    graph.compute()
    np.testing.assert_array_equal(memory, expected[0])
    np.testing.assert_array_equal(lse.numpy(), expected[1])


def test_training_moves_the_parameters_of_others():
    w = np.array([1.0, 2.0], np.float32)
    p = gg.bind(gg.tensor(shape=2, param=True), w)
    graph = graph_of(gg.sum(gg.sqr(p))).build_backward_expand()
    optimizer = gg.SGD([p], lr=0.25)
    optimizer.build(graph)
    graph.compute()
    assert w.tolist() == [0.5, 1.0]


def test_what_is_bound_is_kept_alive():
    class Mine(np.ndarray):
        pass

    a = np.ones(4, np.float32).view(Mine)
    alive = weakref.ref(a)
    x = gg.bind(gg.tensor(shape=4), a)
    y = x * 2.0
    graph = graph_of(y).compute()
    del a
    gc.collect()
    assert alive() is not None
    graph.compute()
    gg.bind(x, None)
    graph.compute()
    gc.collect()
    assert alive() is None and y.numpy().tolist() == [2] * 4


def test_what_cannot_be_bound():
    x = gg.tensor(shape=(2, 3))
    y, read_only = x * 2.0, np.ones((2, 3), np.float32)
    read_only.flags.writeable = False
    refused = [
        (x, np.ones((3, 2), np.float32), ShapeError, r"float32 of shape \(3, 2\)"),
        (x, np.ones((2, 3)), ShapeError, "float64"),
        (x, np.ones((2, 3), ">f4"), ShapeError, ">f4"),
        (x, np.ones((3, 2), np.float32).T, ShapeError, "another order"),
        (x, np.ndarray((2, 3), np.float32, bytearray(25), 1), ShapeError, "not aligned"),
        (y, read_only, GraphError, "read-only"),
        (gg.tensor(shape=(2, 3), param=True), read_only, GraphError, "read-only"),
        (y[0], np.ones(3, np.float32), GraphError, "a look at a part"),
        (x.T, np.ones((3, 2), np.float32), GraphError, "a look at"),
        (gg.tensor([1.0], frozen=True), np.ones(1, np.float32), GraphError, "frozen"),
        (gg.tensor(np.ones(32), dtype=gg.Q8_0), np.ones(32, np.float32), GraphError, "quantized"),
        (gg.tensor(shape=2, dtype=gg.BF16), np.ones(2, np.uint16), ShapeError, "uint16"),
    ]
    for t, array, error, message in refused:
        with pytest.raises(error, match=message):
            gg.bind(t, array)
    gg.bind(x, read_only)
    graph_of(y).compute()
    assert y.numpy().sum() == 12


def test_a_graph_that_updates_a_leaf_refuses_read_only_memory():
    total, read_only = gg.tensor(shape=2), np.zeros(2, np.float32)
    read_only.flags.writeable = False
    node = gg.ops.accumulate(total, gg.tensor([1.0, 1.0]))
    gg.bind(total, read_only)
    with pytest.raises(GraphError, match="bound to a read-only array"):
        total.set([1.0, 2.0])
    with pytest.raises(GraphError, match="read-only array, and the graph updates it"):
        graph_of(node).compute()
    assert read_only.tolist() == [0, 0]


def test_tensors_of_torch_are_bound_bf16_too():
    torch = pytest.importorskip("torch")
    for dtype, of in ((torch.float32, gg.F32), (torch.bfloat16, gg.BF16), (torch.int32, gg.I32)):
        given = torch.arange(6).reshape(2, 3).to(dtype)
        x = gg.bind(gg.tensor(shape=(2, 3), dtype=of), given)
        y = gg.cast(x, gg.F32) if of.is_float else gg.get_rows(gg.tensor(np.arange(6.0).reshape(6, 1)), x.reshape(6))
        graph = graph_of(y).compute()
        given += 0 if dtype is torch.int32 else 1
        graph.compute()
        assert y.numpy().sum() == given.sum().item()


def test_graphs_that_are_bound_run_from_several_threads():
    failures = []

    def work(i):
        a, out = np.full(100, i, np.float32), np.zeros(100, np.float32)
        x = gg.bind(gg.tensor(shape=100), a)
        y = gg.bind(x * 2.0, out)
        graph = graph_of(y)
        for n in range(50):
            a[...] = i + n
            gg.bind(x, a)
            graph.compute()
            if not (out == 2 * (i + n)).all():
                failures.append((i, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
