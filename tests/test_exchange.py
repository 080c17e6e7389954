"""Arrays of other libraries: read without detours, given away without copies, never dangling."""

import array
import gc
import sys

import ml_dtypes
import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import NotComputedError, ShapeError


def leaf_and_result():
    x = gg.tensor(np.arange(6.0).reshape(2, 3))
    y = x * 2.0
    return x, y, gg.Graph().build_forward_expand(y).compute()


# -- given away -----------------------------------------------------------------------------------


def test_a_leaf_is_given_by_dlpack_without_a_copy():
    x, _, _ = leaf_and_result()
    seen = np.from_dlpack(x)
    seen[0, 0] = 7
    assert x.numpy()[0, 0] == 7 and x.__dlpack_device__() == (1, 0)


def test_what_was_given_outlives_the_tensor_and_its_graph():
    x, y, graph = leaf_and_result()
    held = [np.from_dlpack(x), np.from_dlpack(y), np.asarray(y)]
    values = [a.copy() for a in held]
    del x, y, graph
    gc.collect()
    _ = [np.full(6, 9.0, np.float32) for _ in range(100)]
    assert all(np.array_equal(a, b) for a, b in zip(held, values, strict=True))


def test_a_result_that_was_lent_is_not_overwritten_by_the_next_run():
    x, y, graph = leaf_and_result()
    lent = np.from_dlpack(y)
    assert np.shares_memory(lent, y.numpy())
    before = lent.copy()
    x.set(np.ones((2, 3)))
    graph.compute()
    np.testing.assert_array_equal(lent, before)
    np.testing.assert_array_equal(y.numpy(), np.full((2, 3), 2))
    lent[...] = 5  # the borrower's own now
    np.testing.assert_array_equal(y.numpy(), np.full((2, 3), 2))


def test_memory_is_not_renewed_for_what_nobody_holds_any_more():
    _, y, graph = leaf_and_result()
    first = y.numpy()
    np.from_dlpack(y)
    graph.compute()
    assert np.shares_memory(first, y.numpy())


def test_a_run_that_fails_after_lending_shows_no_value_of_before():
    table, ids = gg.tensor(np.ones((3, 2))), gg.tensor([0, 1])
    y = gg.get_rows(table, ids)
    graph = gg.Graph().build_forward_expand(y).compute()
    lent = np.from_dlpack(y)
    ids.set([0, 9])
    with pytest.raises(gg.errors.IndexRangeError):
        graph.compute()
    with pytest.raises(NotComputedError):
        y.numpy()
    assert lent.sum() == 4


def test_a_result_seen_through_numpy_is_read_only():
    _, y, _ = leaf_and_result()
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(y)[0, 0] = 1


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 knows __buffer__")
def test_a_memoryview_is_no_copy():
    x, y, _ = leaf_and_result()
    memoryview(x)[0, 0] = 8.0
    assert x.numpy()[0, 0] == 8 and memoryview(y).readonly


def test_a_frozen_leaf_is_given_as_a_copy():
    x = gg.tensor([1.0, 2.0], frozen=True)
    np.from_dlpack(x)[0] = 9
    assert x.numpy()[0] == 1
    with pytest.raises(BufferError, match="without a copy"):
        x.__dlpack__(copy=False)


def test_copies_and_refusals():
    x, y, _ = leaf_and_result()
    taken = np.from_dlpack(x, copy=True) if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else np.array(x)
    taken[0, 0] = 7
    assert x.numpy()[0, 0] == 0
    with pytest.raises(BufferError, match="on the CPU"):
        x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="quantized"):
        gg.tensor(np.ones(32), dtype=gg.Q8_0).__dlpack__()
    with pytest.raises(NotComputedError):
        (y * 3.0).__dlpack__()
    with pytest.raises(NotComputedError):
        gg.tensor(shape=3).__dlpack__()


def test_the_reference_backend_gives_results_in_their_dtype():
    x = gg.tensor([1.0, 2.0])
    y = x * 2.0
    gg.Graph().build_forward_expand(y).compute(backend="reference")
    assert np.from_dlpack(y).dtype == np.float32


# -- taken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, dtype, expected",
    [
        (np.array([True, False]), "i32", [1, 0]),
        (np.array([1.5, 2.5], ml_dtypes.bfloat16), "bf16", [1.5, 2.5]),
        (array.array("f", [1.5, 2.5]), "f32", [1.5, 2.5]),
        (memoryview(np.array([1, 2], np.int16)), "i32", [1, 2]),
        (np.arange(4)[::2], "i32", [0, 2]),
        (np.array([1, 2], ">f4"), "f32", [1, 2]),
    ],
)
def test_arrays_become_leaves(value, dtype, expected):
    t = gg.tensor(value)
    assert t.dtype.name == dtype
    assert t.numpy().tolist() == expected


@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16, gg.I32])
def test_every_dtype_is_set_from_every_other(dtype):
    t = gg.tensor(shape=3, dtype=dtype)
    for kind in ("f4", "f8", "f2", "i4", "i8", "u1", "?", ml_dtypes.bfloat16):
        value = np.array([0, 1, 1]).astype(kind)
        if dtype is gg.I32 and value.dtype.kind not in "iub":
            with pytest.raises(ShapeError, match="takes integers"):
                t.set(value)
        else:
            assert t.set(value).numpy().tolist() == [0, 1, 1]


def test_values_that_are_lost_are_named():
    with pytest.raises(ShapeError, match="4294967296 is outside of i32"):
        gg.tensor(shape=2, dtype=gg.I32).set(np.array([1, 2**32]))
    with pytest.raises(ShapeError, match="takes numbers"):
        gg.tensor(shape=2).set(np.array(["a", "b"]))
    with pytest.raises(ShapeError, match="no array of numbers"):
        gg.tensor([[1.0], [1.0, 2.0]])


def test_setting_takes_memory_for_no_second_copy():
    import tracemalloc

    x, value = gg.tensor(shape=(512, 512)), np.ones((512, 512), np.float32)
    x.set(value)
    tracemalloc.start()
    x.set(value)
    x.set(value.astype(np.float64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * value.nbytes + 2**18  # the float64 array itself, and the buffer of its conversion


# -- torch ----------------------------------------------------------------------------------------


def test_torch_sees_leaves_and_results_without_a_copy():
    torch = pytest.importorskip("torch")
    x, y, graph = leaf_and_result()
    seen, lent = torch.from_dlpack(x), torch.from_dlpack(y)
    seen[0, 1] = 40.0
    assert x.numpy()[0, 1] == 40
    graph.compute()
    assert lent[0, 1] == 2 and y.numpy()[0, 1] == 80
    bf16 = torch.from_dlpack(gg.tensor([1.5, -2.0], dtype=gg.BF16))
    assert bf16.dtype == torch.bfloat16 and bf16.tolist() == [1.5, -2.0]
    assert torch.from_dlpack(gg.tensor([1, 2])).dtype == torch.int32


def test_torch_tensors_become_leaves():
    torch = pytest.importorskip("torch")
    assert gg.tensor(torch.ones(2, 3, requires_grad=True)).shape == (2, 3)
    half = gg.tensor(torch.tensor([1.5, -0.0], dtype=torch.bfloat16))
    assert half.dtype == gg.BF16 and half.memory().tolist() == [0x3FC0, 0x8000]
    assert gg.tensor(torch.tensor([True, False])).numpy().tolist() == [1, 0]
    assert gg.tensor(torch.arange(3)).dtype == gg.I32
    assert gg.tensor(torch.arange(6.0).reshape(2, 3).T).numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
    x = gg.tensor(shape=2)
    assert x.set(torch.tensor([1.5, 2.5], dtype=torch.bfloat16, requires_grad=True)).numpy().tolist() == [1.5, 2.5]
    assert (x + torch.ones(2)).shape == (2,)
    mask = torch.tensor([[True, False], [True, True]])
    q = gg.tensor(np.ones((1, 1, 2, 4)))
    out = gg.flash_attn_ext(q, q, np.arange(8.0).reshape(1, 1, 2, 4), mask)
    gg.Graph().build_forward_expand(out).compute()
    assert out.numpy()[0, 0, 0].tolist() == [0, 1, 2, 3]


def test_torch_tensors_of_other_devices_and_layouts_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ShapeError, match="device meta"):
        gg.tensor(torch.ones(2, device="meta"))
    with pytest.raises(ShapeError, match="cannot be read"):
        gg.tensor(torch.ones(2, 2).to_sparse())
    with pytest.raises(ShapeError, match="complex"):
        gg.tensor(torch.ones(2, dtype=torch.complex64))


# -- JAX ------------------------------------------------------------------------------------------


def test_jax_sees_results_that_never_change():
    jnp = pytest.importorskip("jax.numpy")
    x, y, graph = leaf_and_result()
    lent = jnp.from_dlpack(y)
    x.set(np.zeros((2, 3)))
    graph.compute()
    assert lent.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert jnp.from_dlpack(gg.tensor([1.5], dtype=gg.BF16)).dtype == jnp.bfloat16


def test_jax_arrays_become_leaves():
    jnp = pytest.importorskip("jax.numpy")
    assert gg.tensor(jnp.ones((2, 3))).numpy().sum() == 6
    assert gg.tensor(jnp.ones(2, jnp.bfloat16)).dtype == gg.BF16
    assert gg.tensor(jnp.array([True, False])).numpy().tolist() == [1, 0]
    assert gg.tensor(jnp.arange(3)).numpy().tolist() == [0, 1, 2]
