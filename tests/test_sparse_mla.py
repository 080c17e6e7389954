"""Sparse latent attention: against numbers of another implementation, against ordinary ops, and what it promises.

The files in golden/mla hold inputs, options, results and gradients in double precision.  GGRAD_GOLDEN=<folder> runs
over another set.  A file that is missing fails, and so does one that nothing here knows.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, IndexRangeError
from ggrad.core.op import registry
from ggrad.mimic import npu

GOLDEN = Path(os.environ.get("GGRAD_GOLDEN", Path(__file__).parent / "golden")) / "mla"
BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]
ATTRS = ("softmax_scale", "cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left", "ori_win_right")
ATTRS += ("layout_q", "layout_kv")
DIFFERENTIABLE = {"q": "dq", "ori_kv": "d_ori_kv", "cmp_kv": "d_cmp_kv", "sinks": "d_sinks"}
INPUTS = registry["sparse_flash_mla"].inputs
FILES = [
    "01_swa_bsnd_sink",
    "02_swa_bsnd_nosink_s1ltS2",
    "03_swa_tnd_sink",
    "04_swa_tnd_nosink_emptyrows",
    "05_swa_bsnd_emptyrows_bigsink",
    "06_swa_bsnd_mode3",
    "07_swa_tnd_mode0",
    "08_swa_bsnd_band_unbounded_left",
    "09_cfa_bsnd_r128",
    "10_cfa_tnd_r128",
    "11_cfa_bsnd_r4_nosink",
    "12_cfa_tnd_r8_cmpmode0",
    "13_scfa_bsnd_sink",
    "14_scfa_tnd_varlen_residual",
    "15_scfa_bsnd_nosink",
    "16_scfa_tnd_emptyrows",
    "17_scfa_bsnd_seqused",
    "18_scfa_tnd_cmpmode0_topklen",
    "19_cfa_tnd_seqused_nosink",
    "20_orisparse_scfa_tnd",
]


def run(inputs, dout, *, backend=None, threads=None, **options):
    """attn_out, softmax_lse, and all that `sparse_flash_mla_grad` gives, through the gradient rule."""
    leaves = {name: gg.tensor(x, name=name, param=name in DIFFERENTIABLE) for name, x in inputs.items()}
    out, lse = gg.sparse_flash_mla(**leaves, **options, return_softmax_lse=True)
    graph = gg.Graph().build_forward_expand(out, lse).build_backward_expand(gg.sum(out * gg.tensor(dout)))
    node = next(t for t in graph.nodes if t.op.name == "sparse_flash_mla_grad")
    made = node.op.node(*node.src, **node.attrs | {"wanted": ()})
    names = (*DIFFERENTIABLE.values(), "ori_softmax_l1norm", "cmp_softmax_l1norm")
    values = {name: t for name, t in zip(names, made, strict=True) if t is not None}
    graph.build_forward_expand(*values.values()).compute(backend=backend, threads=threads)
    for name, d in DIFFERENTIABLE.items():
        if name in leaves:
            np.testing.assert_array_equal(graph.grad(leaves[name]).numpy(), values[d].numpy())
    return {name: t.numpy().copy() for name, t in ({"attn_out": out, "softmax_lse": lse} | values).items()}


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


# -- numbers of another implementation ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILES)
def test_results_and_gradients_are_those_of_the_file(name, backend):
    """Within 5e-6 in f32: its own f32 runs were up to 5e-7 off.  In double precision within 1e-13."""
    path = GOLDEN / f"golden_mla_{name}.npz"
    assert path.exists(), f"{path} is missing"
    file = np.load(path)
    config = json.loads(str(file["config"]))
    inputs = {name: file[name] for name in INPUTS if name in file}
    made = run(inputs, file["dout"], backend=backend, **{name: config[name] for name in ATTRS})
    assert made.keys() == set(file.files) - {*inputs, "dout", "config", "visible_count"}
    for what, value in made.items():
        expected = file[what]
        assert value.shape == expected.shape
        off = np.abs(value - expected).max(initial=0) / max(1, np.abs(expected).max(initial=0))
        assert off <= (5e-6 if backend == "native" else 1e-13), what


def test_every_file_is_known():
    assert {path.stem.removeprefix("golden_mla_") for path in GOLDEN.glob("*.npz")} == set(FILES)


# -- ordinary ops -------------------------------------------------------------------------------------------


def dense(q, kv, sinks, weight, scale):
    """Of one sequence, with all scores in memory: weight[i, j] says how often token i sees row j of all of kv."""
    S, N1, D = q.shape[1:]
    rows = kv.reshape(-1, D)
    scores = gg.mul_mat(rows, q.reshape(S * N1, D)) * scale
    column = gg.repeat(sinks.reshape(1, N1), shape=(S, N1)).reshape(S * N1, 1)
    with np.errstate(divide="ignore"):
        mask = np.pad(np.log(weight), ((0, 0), (0, 1))).repeat(N1, axis=0)
    share = gg.soft_max(gg.concat(scores, column, axis=1), gg.tensor(mask))
    return gg.mul_mat(rows.T, share[:, :-1]).reshape(1, S, N1, D)


def seen_by(S1, S2, S3, ratio, left, picks=None):
    """What each token of one sequence sees: of S2 rows those in its window, of S3 all or those picked."""
    p = np.arange(S1)[:, None] + S2 - S1
    window = (np.arange(S2) <= p) & (np.arange(S2) >= p - left)
    groups = np.broadcast_to((np.arange(S3) + 1) * ratio <= p + 1, (S1, S3)).astype(float)
    if picks is not None:
        counts = np.zeros((S1, S3))
        for i, row in enumerate(picks[0, :, 0]):
            end = np.flatnonzero(row < 0)
            for j in row[: end[0]] if len(end) else row:
                counts[i, j] += 1
        groups = groups * counts
    return np.concatenate([window, groups], axis=1).astype(float)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["window", "all compressed rows", "a choice"])
@pytest.mark.parametrize("S1, S2, ratio", [(29, 29, 4), (7, 23, 3), (12, 5, 2), (9, 9, 1)])
def test_ordinary_ops_give_the_same_values_and_gradients(S1, S2, ratio, mode, backend):
    rng = np.random.default_rng(S1)
    N1, D, S3, left = 5, 12, S2 // ratio, 4
    arrays = [normal(rng, 1, S1, N1, D), normal(rng, 1, S2, 1, D), normal(rng, 1, S3, 1, D), normal(rng, N1)]
    picks = rng.integers(-1, S3, (1, S1, 1, 6)).astype(np.int32)
    picks = np.where(rng.random(picks.shape) < 0.5, np.abs(picks), picks) if mode == "a choice" else None
    weight = seen_by(S1, S2, S3, ratio, left, picks)
    if mode == "window":
        weight[:, S2:] = 0
    dout = gg.tensor(normal(rng, *arrays[0].shape))

    def gradients(build):
        leaves = [gg.tensor(x, param=True) for x in arrays]
        out = build(*leaves)
        graph = gg.Graph().build_forward_expand(out).build_backward_expand(gg.sum(out * dout))
        graph.compute(backend=backend)
        return [out.numpy(), *(None if (g := graph.grad(t)) is None else g.numpy() for t in leaves)]

    def sparse(q, ori, cmp, sinks):
        options = {"ori_mask_mode": 4, "ori_win_left": left, "ori_win_right": 0, "softmax_scale": 0.4}
        if mode != "window":
            residual = {"cmp_residual_kv": np.array([S2 % ratio])} if ratio > 1 else {}
            options |= {"cmp_kv": cmp, "cmp_ratio": ratio, "cmp_mask_mode": 3, **residual}
        return gg.sparse_flash_mla(q, ori_kv=ori, sinks=sinks, cmp_sparse_indices=picks, **options)

    exact = 1e-7 if mode == "a choice" else 1e-12  # the logarithms of counts are rounded to f32
    tolerance = exact if backend == "reference" else 1e-5
    expected = gradients(lambda q, ori, cmp, sinks: dense(q, gg.concat(ori, cmp, axis=1), sinks, weight, 0.4))
    for value, wanted in zip(gradients(sparse), expected, strict=True):
        if value is None:
            assert not wanted.any()
        else:
            np.testing.assert_allclose(value, wanted, rtol=0, atol=tolerance)


# -- promises -----------------------------------------------------------------------------------------------


@pytest.mark.native
def test_with_one_visible_row_and_no_sink_dq_is_exactly_zero_and_the_row_gets_dout():
    rng = np.random.default_rng(0)
    q, kv, dout = normal(rng, 1, 50, 3, 40), normal(rng, 1, 50, 1, 40), normal(rng, 1, 50, 3, 40)
    made = run({"q": q, "ori_kv": kv}, dout, ori_mask_mode=4, ori_win_left=0, ori_win_right=0)
    assert (made["attn_out"] == kv).all()
    assert not made["dq"].any()
    np.testing.assert_allclose(made["d_ori_kv"], dout.sum(2, keepdims=True), atol=1e-5)


@pytest.mark.native
@pytest.mark.parametrize("picked", [False, True])
def test_what_is_not_in_use_changes_no_bit(picked):
    rng = np.random.default_rng(1)
    q, ori, cmp = normal(rng, 2, 40, 3, 16), normal(rng, 2, 60, 1, 16), normal(rng, 2, 30, 1, 16)
    inputs = {"q": q, "ori_kv": ori, "cmp_kv": cmp, "sinks": normal(rng, 3)}
    inputs |= {
        "seqused_q": np.array([33, 12]),
        "seqused_ori_kv": np.array([41, 55]),
        "seqused_cmp_kv": np.array([20, 27]),
    }
    inputs["cmp_residual_kv"] = np.array([1, 1])
    if picked:
        inputs["cmp_sparse_indices"] = rng.integers(-1, 30, (2, 40, 1, 7))
        inputs["cmp_topk_length"] = rng.integers(0, 9, (2, 40, 1))
    dout = normal(rng, *q.shape)
    options = {"cmp_ratio": 2, "cmp_mask_mode": 3, "ori_mask_mode": 4, "ori_win_left": 9, "ori_win_right": 1}
    clean = run(inputs, dout, **options)
    for b in range(2):
        q[b, inputs["seqused_q"][b] :] = dout[b, inputs["seqused_q"][b] :] = np.nan
        ori[b, inputs["seqused_ori_kv"][b] :], cmp[b, inputs["seqused_cmp_kv"][b] :] = np.inf, np.nan
    dirty = run(inputs, dout, **options)
    for name in clean:
        assert clean[name].tobytes() == dirty[name].tobytes(), name
    for name in ("attn_out", "dq"):
        assert not dirty[name][0, 33:].any() and not dirty[name][1, 12:].any()
    assert not dirty["d_ori_kv"][0, 41:].any() and not dirty["d_cmp_kv"][1, 27:].any()


@pytest.mark.native
def test_order_and_holes_behind_the_end_of_a_list_do_not_matter_and_duplicates_do():
    rng = np.random.default_rng(2)
    q, cmp, dout = normal(rng, 1, 4, 2, 8), normal(rng, 1, 6, 1, 8), normal(rng, 1, 4, 2, 8)

    def attend(*entries):
        inputs = {"q": q, "cmp_kv": cmp, "cmp_sparse_indices": np.tile(np.array(entries), (1, 4, 1, 1))}
        inputs["cmp_topk_length"] = np.full((1, 4, 1), 99)
        return run(inputs, dout)

    plain = attend(1, 4, 5, -1)
    for same in (attend(5, 1, 4, -1), attend(1, 4, 5, -1, 2), attend(1, 4, 99, 5)):
        for name in ("attn_out", "dq", "d_cmp_kv"):
            np.testing.assert_allclose(same[name], plain[name], atol=1e-5)
    twice = attend(1, 4, 5, 4)
    np.testing.assert_allclose(
        twice["softmax_lse"], np.log(np.exp(q[:, None] @ cmp[:, None, [1, 4, 4, 5], 0].swapaxes(2, 3) / 8**0.5).sum(-1))
        .reshape(1, 1, 4, 2), atol=1e-5,
    )  # fmt: skip
    share = twice["cmp_softmax_l1norm"]
    np.testing.assert_allclose(share[..., 1], share[..., 3])
    np.testing.assert_allclose(share.sum(-1), 1, atol=1e-6)


@pytest.mark.native
def test_memory_grows_with_what_is_given_not_with_pairs():
    def total(S):
        q, ori, cmp = (
            gg.tensor(shape=shape, param=True) for shape in ((1, S, 16, 128), (1, S, 1, 128), (1, S // 4, 1, 128))
        )
        picks = gg.tensor(shape=(1, S, 1, 64), dtype=gg.I32)
        out = gg.sparse_flash_mla(
            q, ori_kv=ori, cmp_kv=cmp, cmp_sparse_indices=picks, cmp_ratio=4, cmp_mask_mode=3, ori_mask_mode=4,
            ori_win_left=127, ori_win_right=0,
        )  # fmt: skip
        graph = gg.Graph().build_forward_expand(out).build_backward_expand(gg.sum(out))
        given = sum(t.nbytes for t in (q, ori, cmp, picks))
        gradients = sum(graph.grad(t).nbytes for t in (q, ori, cmp))
        assert graph.plan().total(threads=2) < 3 * (given + gradients)
        return graph.plan().total(threads=2)

    assert total(16384) < 8.2 * total(2048)


def test_pages_have_no_gradient_and_the_message_says_what_to_do():
    q, kv = gg.tensor(np.ones((1, 2, 1, 4)), param=True), np.ones((3, 2, 1, 4))
    out = gg.sparse_flash_mla(
        q, ori_kv=kv, layout_kv="PA_BBND", ori_block_table=np.array([[0, 1]]), seqused_ori_kv=np.array([3])
    )
    with pytest.raises(GradientError, match="no gradient in the layout 'PA_BBND': lay the rows"):
        gg.Graph().build_backward_expand(gg.sum(out))


def test_metadata_is_accepted_and_is_none():
    assert npu.sparse_flash_mla_metadata(16, 1, 128, batch_size=2, cmp_ratio=4, layout_q="TND") is None
    assert npu.sparse_flash_mla_grad_metadata(16, 1, 128, cu_seqlens_q=np.array([0, 3]), has_cmp_kv=False) is None
    out, lse = npu.sparse_flash_mla(ones := np.ones((1, 2, 1, 4)), ori_kv=ones, metadata=None, return_softmax_lse=True)
    assert out.src[0].op is gg.sparse_flash_mla
    made = npu.sparse_flash_mla_grad(ones, ones, out, lse, ori_kv=ones, metadata=None)
    assert made.dq.src[0].op is gg.sparse_flash_mla_grad


# -- lengths that a run cannot trust ------------------------------------------------------------------------


def sequences(**lengths):
    given = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_ori_kv": [0, 3, 7], "cu_seqlens_cmp_kv": [0, 1, 3]} | lengths
    given = {name: np.array(value) for name, value in given.items()}
    q, kv, cmp = np.ones((5, 2, 4)), np.ones((7, 1, 4)), np.ones((3, 1, 4))
    options = {"cmp_ratio": 2, "cmp_mask_mode": 3, "layout_q": "TND", "layout_kv": "TND"}
    return gg.sparse_flash_mla(q, ori_kv=kv, cmp_kv=cmp, **given, **options)


def paged(**lengths):
    given = {"ori_block_table": [[0, 1], [2, 9]], "seqused_ori_kv": [3, 2]} | lengths
    given = {name: np.array(value) for name, value in given.items()}
    return gg.sparse_flash_mla(np.ones((2, 3, 1, 4)), ori_kv=np.ones((4, 2, 1, 4)), layout_kv="PA_BBND", **given)


WRONG = [
    (lambda: sequences(cu_seqlens_q=[1, 2, 5]), "cu_seqlens_q holds 1, and must be from 0 to 0"),
    (lambda: sequences(cu_seqlens_q=[0, 4, 3]), "cu_seqlens_q holds 3, and must be from 4 to 5"),
    (lambda: sequences(cu_seqlens_q=[0, 2, 6]), "cu_seqlens_q holds 6, and must be from 2 to 5"),
    (lambda: sequences(cu_seqlens_ori_kv=[0, -1, 7]), "cu_seqlens_ori_kv holds -1, and must be from 0 to 7"),
    (lambda: sequences(cu_seqlens_cmp_kv=[0, 2**31 - 1, 3]), "cu_seqlens_cmp_kv holds 2147483647, .* from 0 to 3"),
    (lambda: sequences(seqused_q=[2, 4]), "seqused_q holds 4, and must be from 0 to 3"),
    (lambda: sequences(seqused_ori_kv=[-1, 4]), "seqused_ori_kv holds -1, and must be from 0 to 3"),
    (lambda: sequences(seqused_cmp_kv=[2, 0]), "seqused_cmp_kv holds 2, and must be from 0 to 1"),
    (lambda: sequences(cmp_residual_kv=[0, 2]), "cmp_residual_kv holds 2, and must be from 0 to 1"),
    (lambda: sequences(cmp_residual_kv=[-1, 0]), "cmp_residual_kv holds -1, and must be from 0 to 1"),
    (lambda: paged(ori_block_table=[[0, 4], [2, 9]]), "ori_block_table holds 4, and must be from 0 to 3"),
    (lambda: paged(ori_block_table=[[0, 1], [-1, 9]]), "ori_block_table holds -1, and must be from 0 to 3"),
    (lambda: paged(seqused_ori_kv=[3, 5]), "seqused_ori_kv holds 5, and must be from 0 to 4"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("build, message", WRONG)
def test_lengths_out_of_range_stop_the_run_before_anything_is_written(build, message, backend):
    out = build()
    with pytest.raises(IndexRangeError, match=rf"^sparse_flash_mla\(q=f32.*\): {message}"):
        gg.Graph().build_forward_expand(out).compute(backend=backend)


@pytest.mark.native
@pytest.mark.parametrize("build, message", WRONG[:10])
def test_the_gradient_checks_lengths_itself(build, message):
    node = build().src[0]
    given = {name: t for name, t in zip(node.op.inputs, node.src, strict=True) if t is not None}
    q = given.pop("q")
    given.setdefault("cmp_residual_kv", np.array([0, 0]))
    out, lse = np.ones(q.shape), np.ones((1, 5, 2))
    made = gg.sparse_flash_mla_grad(q, out, out, lse, **given, **vars(node.attrs["rules"]))
    with pytest.raises(IndexRangeError, match=rf"^sparse_flash_mla_grad\(q=f32.*\): {message}"):
        gg.Graph().build_forward_expand(made.dq).compute(threads=2)


# -- compress_kv --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [(), (6,)])
def test_compress_kv_is_a_weighted_mean_of_each_group(columns, backend):
    rng = np.random.default_rng(3)
    kv, weights = normal(rng, 2, 11, 1, 6), normal(rng, 3, *columns)
    cmp = gg.compress_kv(gg.tensor(kv), weights, cmp_ratio=3)
    gg.Graph().build_forward_expand(cmp).compute(backend=backend)
    share = np.exp(weights) / np.exp(weights).sum(0)
    expected = (kv[:, :9, 0].reshape(2, 3, 3, 6) * (share if columns else share[:, None])).sum(2)
    np.testing.assert_allclose(cmp.numpy()[:, :, 0], expected, atol=1e-6)


@pytest.mark.parametrize("columns", [(), (2,)])
def test_compress_kv_has_gradients(columns):
    rng = np.random.default_rng(4)
    gg.testing.check_gradients(
        lambda kv, weights: gg.compress_kv(kv, weights, cmp_ratio=4), normal(rng, 10, 1, 2), normal(rng, 4, *columns)
    )


@pytest.mark.native
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_know_how_many_equal_scores_of_1e8_there_are(sinks):
    """lse, 1e8 + log(4), is 1e8 in f32: of it alone every weight would be 1."""
    q = gg.tensor(np.full((1, 1, 1, 4), 5000.0), param=True)
    kv = np.full((1, 4, 1, 4), 5000.0)
    kv[..., 1:] = np.arange(12).reshape(1, 4, 1, 3) % 2  # scores are equal: q sees 5000 in column 0 alone
    q.set(np.array([20000.0, 0, 0, 0]).reshape(1, 1, 1, 4))
    rows, logit = gg.tensor(kv, param=True), gg.tensor([1e8], param=True) if sinks else None
    out = gg.sparse_flash_mla(q, ori_kv=rows, sinks=logit, softmax_scale=1.0)
    weight = gg.tensor(np.array([0.0, 1, 2, 3]).reshape(1, 1, 1, 4))
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(out, weight)))
    graph.compute()
    n = 5 if sinks else 4
    dp = kv[0, :, 0] @ np.array([0.0, 1, 2, 3])
    ds = (dp - dp.sum() / n) / n
    expected = np.array([20000.0, 0, 0, 0]) * ds[:, None] + np.array([0.0, 1, 2, 3]) / n
    np.testing.assert_allclose(graph.grad(rows).numpy()[0, :, 0], expected, rtol=1e-5, atol=1e-3)
    if sinks:
        np.testing.assert_allclose(graph.grad(logit).numpy(), [-dp.sum() / n / n], rtol=1e-5)
