"""What is asked for beyond sense is refused or cut: threads, sizes, settings, arrays as indices."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import ggrad as gg
from ggrad.core import native
from ggrad.core.errors import GraphError, ShapeError


@pytest.mark.native
def test_no_number_of_threads_takes_more_memory_than_a_run_can_use():
    y = gg.rms_norm(gg.tensor(np.ones((64, 64))))
    graph = gg.Graph().build_forward_expand(gg.flash_attn_ext(*[y.reshape(1, 1, 64, 64)] * 3))
    graph.compute(threads=100_000)
    session = graph.prepared("native")
    assert 0 < session.scratch.size <= native.lib.GG_MAX_THREADS * session._scratch_stride


@pytest.mark.native
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_the_cores_that_a_process_is_bound_to_are_counted_for_each_run(monkeypatch):
    monkeypatch.delenv("GGRAD_NUM_THREADS", raising=False)
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert native.default_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert 1 <= native.default_threads() <= len(cores)


@pytest.mark.native
def test_an_unknown_instruction_set_is_an_error_that_names_the_known_ones():
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import ggrad"],
        env={**os.environ, "GGRAD_ISA": "avx2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "GGRAD_ISA must be one of base, v3, v4, not 'avx2'" in done.stderr


X = gg.tensor(np.arange(24.0).reshape(4, 6), name="x")


@pytest.mark.parametrize("sizes", [(2.7, 3), 2.7, "ab", True, (True, 2), (None, 3), (2.0, 3), [[1, 2]]])
def test_sizes_are_integers(sizes):
    makers = [
        lambda: gg.tensor(shape=sizes),
        lambda: gg.reshape(X, sizes),
        lambda: gg.broadcast_to(X, shape=sizes),
        lambda: gg.repeat(X, shape=sizes),
        lambda: gg.Spec(sizes) and gg.slice_back(X, shape=sizes, starts=(0, 0), steps=(1, 1)),
    ]
    for make in makers:
        with pytest.raises((ShapeError, TypeError), match=r"integers|must be"):
            make()


def test_any_integers_will_do_for_sizes():
    assert gg.tensor(shape=np.array([2, 3])).shape == (2, 3)
    assert gg.tensor(shape=np.int64(3)).shape == (3,)
    assert gg.reshape(X, np.int32(8), 3).shape == (8, 3)


@pytest.mark.parametrize(
    "index", [[0, -1], np.array([[1, 2], [3, 0]]), np.array([True, False, True, True]), [], np.array([2], np.uint8)]
)
@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 2, 3)])
def test_an_array_gathers_along_the_first_axis_as_numpys_do(index, shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x = gg.tensor(values, param=True)
    y = x[index]
    graph = gg.Graph().build_forward_expand(y).build_backward_expand(gg.sum(y * y)).compute()
    wanted = values[np.array(index, np.int64) if isinstance(index, list) else index]
    np.testing.assert_array_equal(y.numpy(), wanted)
    gradient = np.zeros(shape)
    np.add.at(gradient, np.array(index, np.int64) if isinstance(index, list) else index, 2 * wanted)
    np.testing.assert_allclose(graph.grad(x).numpy(), gradient)


def test_a_tensor_of_integers_gathers_too():
    y = X[gg.tensor([3, 1])]
    gg.Graph().build_forward_expand(y).compute()
    np.testing.assert_array_equal(y.numpy(), X.numpy()[[3, 1]])


@pytest.mark.parametrize(
    "index, words",
    [
        ([7], "index 7 is out of range for size 4"),
        (np.array([-5, 9]), "index -5 is out of range"),
        ([1.5], "integers or bools, not float64"),
        (np.ones((4, 6), bool), r"a mask that chooses has shape \(4,\)"),
        ((slice(None), [1]), "an array may stand alone"),
        (gg.tensor(np.ones(4)), "multiply by a mask"),
    ],
)
def test_other_arrays_are_refused_with_what_to_do(index, words):
    with pytest.raises(ShapeError, match=words):
        X[index]


@pytest.mark.parametrize("threads", [0, -1, 2.5, "2"])
def test_threads_are_a_whole_number(threads):
    with pytest.raises(GraphError, match=rf"^compute\(\): threads must be 1 or more, not {threads!r}"):
        gg.Graph().build_forward_expand(gg.neg(gg.tensor([1.0]))).compute(threads=threads)


def test_sizes_whose_bytes_64_bits_cannot_count_are_refused():
    for make in (
        lambda: gg.tensor(shape=(1 << 40, 1 << 40)),
        lambda: gg.tensor(shape=(1 << 62, 1 << 62, 0)),
        lambda: gg.broadcast_to(gg.tensor(np.ones((1, 1))), shape=(1 << 40, 1 << 40)),
    ):
        with pytest.raises(ShapeError, match="more than 64 bits can count"):
            make()


def test_a_node_that_a_call_made_can_be_pickled():
    picked = gg.softmax(gg.tensor(np.ones((2, 3)), name="x"), axis=0)
    assert str(pickle.loads(pickle.dumps(picked.call))) == "softmax(x=x: f32[2,3], axis=0)"
