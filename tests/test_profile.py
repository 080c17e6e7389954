"""Profiles: every piece of work is there once, where and when it ran, and profiling changes nothing."""

import json

import numpy as np
import pytest
from python_kernels import temporary_ops

import ggrad as gg
from ggrad.core.native import ffi
from ggrad.core.op import all_of
from ggrad.run.profile import GG_SPAN

pytestmark = pytest.mark.native


def model():
    rng = np.random.default_rng(0)
    w = gg.tensor(rng.normal(size=(96, 80)), name="w", param=True)
    x = gg.tensor(rng.normal(size=(200, 80)), name="x")
    loss = gg.sum(gg.silu(gg.mul_mat(w, x)))
    return gg.Graph().build_forward_expand(loss).build_backward_expand(), w


def test_spans_have_the_layout_of_the_c_struct():
    struct = ffi.typeof("gg_span")
    fields = [(name, at.offset, ffi.sizeof(at.type)) for name, at in struct.fields]
    assert fields == [(name, GG_SPAN.fields[name][1], GG_SPAN.fields[name][0].itemsize) for name in GG_SPAN.names]
    assert ffi.sizeof(struct) == GG_SPAN.itemsize


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_of_every_node_is_noted_once(threads):
    graph, _ = model()
    graph.compute(threads=threads, profile=True)
    profile, session = graph.profile, graph.prepared("native")
    expected = np.zeros(len(profile.nodes), int)
    for step in session.steps_in_c[0 : len(session.steps)]:
        expected[step.call.index] += step.tasks
    noted = np.zeros(len(profile.nodes), int)
    np.add.at(noted, profile.spans["index"], profile.spans["tasks"])
    assert noted.tolist() == expected.tolist()
    following = {t for chain in profile.followers.values() for t in chain}
    assert [t for t, n in zip(profile.nodes, noted, strict=True) if not n] == [
        t for t in profile.nodes if t in following
    ]


def test_pieces_lie_within_the_run_and_never_two_at_once_on_a_thread():
    graph, _ = model()
    graph.compute(threads=3, profile=True)
    profile = graph.profile
    assert set(profile.spans["thread"].tolist()) <= {0, 1, 2}
    assert profile.spans["begin"].min() >= 0 and profile.spans["end"].max() <= profile.seconds * 1e9
    for thread in range(3):
        mine = profile.spans[profile.spans["thread"] == thread]
        assert (mine["begin"][1:] >= mine["end"][:-1]).all()
    assert 0 < profile.busy <= 3 * profile.seconds


def test_profiling_changes_no_bit_and_is_off_again_after():
    graph, w = model()
    plain = graph.compute(threads=2).grad(w).numpy().tobytes()
    assert graph.profile is None
    assert graph.compute(threads=2, profile=True).grad(w).numpy().tobytes() == plain
    first = graph.profile
    graph.compute(threads=2)
    assert graph.profile is first


def test_operations_and_bytes_are_counted():
    graph, _ = model()
    graph.compute(profile=True)
    rows = {row.name: row for row in graph.profile.by_op()}
    product = 2 * 200 * 96 * 80
    assert (rows["mul_mat"].nodes, rows["mul_mat"].flops) == (1, product)  # the gradient of w
    assert (rows["mul_mat+silu"].nodes, rows["mul_mat+silu"].flops) == (2, product)
    assert rows["mul_mat+silu"].nbytes - rows["mul_mat"].nbytes == 2 * 200 * 96 * 4  # what silu reads and writes
    assert sum(row.seconds for row in rows.values()) == pytest.approx(graph.profile.busy)


def test_the_table_names_what_costs_most_first():
    graph, _ = model()
    graph.compute(profile=True)
    lines = str(graph.profile).splitlines()
    seconds = [row.seconds for row in graph.profile.by_op()]
    assert seconds == sorted(seconds, reverse=True)
    assert [line.split()[0] for line in lines[1:-1]] == [row.name for row in graph.profile.by_op()]
    by_node = graph.profile.table(graph.profile.by_node())
    assert "f32[200,96]" in by_node


def test_a_trace_is_json_with_a_bar_for_every_piece(tmp_path):
    graph, _ = model()
    graph.compute(threads=2, profile=True)
    path = tmp_path / "run.json"
    path.write_text("an older one")
    graph.profile.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(graph.profile.spans)
    assert {name for e in bars for name in e["name"].split("+")} == {t.op.name for t in graph.profile.nodes}
    assert all(e["dur"] >= 0 and e["args"]["node"] for e in bars)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_kernels_in_python_are_profiled_too():
    with temporary_ops():

        @gg.op(layout="any")
        def doubled_for_profile(x):
            """2 x"""
            return x.spec

        @doubled_for_profile.kernel
        def _(out, x):
            for i in range(out.size):
                out[i] = 2 * x[i]

        y = doubled_for_profile(gg.tensor(np.arange(6.0).reshape(2, 3)))
        graph = gg.Graph().build_forward_expand(y).compute(profile=True)
        assert y.numpy().tolist() == [[0, 2, 4], [6, 8, 10]]
        assert [row.name for row in graph.profile.by_op()] == ["doubled_for_profile"]


def test_a_fault_in_a_profiled_run_is_reported_as_ever():
    table = gg.tensor(np.zeros((3, 2)), param=True)
    ids = gg.tensor(np.array([1, 7], np.int32))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.get_rows(table, ids)))
    with pytest.raises(gg.errors.IndexRangeError, match="ids holds 7"):
        graph.compute(profile=True)
    assert graph.profile is None


def test_the_reference_backend_has_no_profile():
    graph, _ = model()
    with pytest.raises(gg.errors.GraphError, match="native"):
        graph.compute(backend="reference", profile=True)


def leaf(*shape, dtype=gg.F32):
    return gg.tensor(shape=shape, dtype=dtype)


SCAN = [leaf(2, 5, 3, 4)] * 3 + [leaf(2, 5, 3, 6), leaf(2, 3, 6, 4)]
KDA = [leaf(2, 9, 3, 8)] * 2 + [leaf(2, 9, 3, 4), leaf(2, 9, 3, 8), leaf(2, 9, 3)]
LATENT = dict(q=leaf(2, 10, 3, 8), ori_kv=leaf(2, 10, 1, 8))
PICKS = leaf(2, 10, 1, 5, dtype=gg.I32)
BAND = dict(ori_mask_mode=4, ori_win_left=3, ori_win_right=0)
COUNTED = {  # what a profile divides by the time
    "delta_scan": (lambda: gg.delta_scan(*SCAN), 5 * 30 * 4 * 6),
    "delta_scan_back": (lambda: gg.delta_scan_back(*SCAN, SCAN[3], None, SCAN[0], SCAN[0]), 19 * 30 * 4 * 6),
    "selective_scan": (
        lambda: gg.selective_scan(leaf(2, 3, 6, 4), SCAN[3], leaf(2, 5, 3), leaf(3, 1), *[leaf(2, 5, 1, 4)] * 2),
        6 * 30 * 4 * 6,
    ),
    "conv_2d_dw": (lambda: gg.conv_2d_dw(leaf(4, 1, 3, 2), leaf(2, 4, 8, 7)), 2 * 2 * 4 * (6 * 6) * (3 * 2)),
    "lightning_indexer": (
        lambda: gg.lightning_indexer(leaf(2, 5, 3, 4), leaf(2, 7, 1, 4), leaf(2, 1, 5, 3)), 2 * 5 * 7 * 3 * (2 * 4 + 2),
    ),
    "kda": (lambda: gg.kda(*KDA, chunk_size=32), 54 * (2 * 32 * 8 + 32 * 32 // 3 + 6 * 8 * 4 + 2 * 32 * 4)),
    "kda_recurrent": (lambda: gg.kda_recurrent(*KDA), 54 * 7 * 8 * 4),
    "solve_tri": (lambda: gg.solve_tri(leaf(2, 5, 5), leaf(2, 5, 3)), 2 * 3 * 25),
    "sparse_flash_mla, a window": (lambda: gg.sparse_flash_mla(**LATENT, **BAND), 4 * 8 * (2 * 10 * 3) * 4),
    "sparse_flash_mla, causal": (
        lambda: gg.sparse_flash_mla(**LATENT, ori_mask_mode=3), 4 * 8 * (2 * 3) * (10 * 11 // 2),
    ),
    "sparse_flash_mla, a choice": (
        lambda: gg.sparse_flash_mla(**LATENT, **BAND, ori_sparse_indices=PICKS), 4 * 8 * (2 * 10 * 3) * 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_operations_are_those_that_the_mathematics_asks_for(name):
    build, wanted = COUNTED[name]
    t = all_of(build())[0]
    while t.op is None or t.op.count_flops(t) == 0:  # views of the node that counts
        t = t.src[0]
    assert t.op.count_flops(t) == wanted


def test_gradients_count_more_than_what_they_are_of():
    """Of every op with a count whose gradient is one node."""
    for build, _ in COUNTED.values():
        out = all_of(build())[0]
        leaves = [p for p in gg.Graph().build_forward_expand(out).leaves if p.dtype is gg.F32]
        for p in leaves:
            gg.set_param(p)
        graph = gg.Graph().build_forward_expand(out)
        forward = [t.op.count_flops(t) for t in graph.nodes if t.op is not None]
        graph.build_backward_expand(gg.sum(out))
        both = [t.op.count_flops(t) for t in graph.nodes if t.op is not None]
        assert sum(both) >= 2 * sum(forward) > 0
