"""What attention promises: the results and gradients of double precision, exact zeros, nothing hidden leaks, the same
bits whatever surrounds a sequence."""

from itertools import combinations, pairwise

import numpy as np
import pytest

import ggrad as gg
from ggrad.testing import attention_reference, visible_pairs

pytestmark = pytest.mark.native
rng = np.random.default_rng(0)
INF, NAN = np.inf, np.nan


def normal(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


def results(q, k, v, d=None, *, mask=None, d_lse=None, threads=2, **options):
    """Name -> array, as `attention_reference` names them, from memory full of NaN."""
    out, lse = gg.flash_attn_ext(q, k, v, mask, return_lse=True, **options)
    made = {"out": out, "lse": lse}
    if d is not None:
        asked = {
            "sinks_gradient": options.get("sinks") is not None,
            "mask_gradient": mask is not None and mask.dtype != bool,
        }
        packed = gg.flash_attn_back(q, k, v, mask, d, d_lse=d_lse, out=out, lse=lse, **options, **asked)
        names = ["dq", "dk", "dv"] + ["dsinks"] * asked["sinks_gradient"] + ["dmask"] * asked["mask_gradient"]
        made |= dict(zip(names, packed.parts, strict=True))
    graph = gg.Graph().build_forward_expand(*map(gg.set_output, made.values()))
    graph.prepared("native").poison(threads)
    graph.compute(threads=threads)
    return {name: t.numpy() for name, t in made.items()}


def require_right(q, k, v, d, *, tolerance=2e-6, threads=2, **options):
    """All results within 2e-6, the bound of f32 attention, of double precision, relative in the L2 norm."""
    expected = attention_reference(q, k, v, d, **options).present()
    if options.get("mask") is not None and options["mask"].dtype == bool:
        expected.pop("dmask", None)
    got = results(q, k, v, d, threads=threads, **options)
    assert got.keys() == expected.keys()
    for name, exact in expected.items():
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(got[name][~finite], exact[~finite].astype(np.float32), err_msg=name)
        off, size = np.linalg.norm(got[name][finite] - exact[finite]), np.linalg.norm(exact[finite])
        # where rows see one or two keys gradients are small differences of terms of size 1
        assert off <= tolerance * size or np.abs(got[name] - exact)[finite].max(initial=0) < 1e-6, (name, off / size)


def arrays(B=2, H=4, HK=2, N=19, M=23, DK=9, DV=7):
    return normal(B, H, N, DK), normal(B, HK, M, DK), normal(B, HK, M, DV), normal(B, N, H, DV)


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def hole(*shape):
    """A mask of random values, -inf in some places."""
    return np.where(rng.random(shape) < 0.3, -INF, normal(*shape)).astype(np.float32)


OPTIONS = {
    "top-left": {"causal": "top-left"},
    "bottom-right": {"causal": True},
    "window": {"window": (5, 2)},
    "prefix": {"window": (3, -1), "prefix": 2},
    "mask": {"mask": hole(1, 2, 19, 23)},
    "f16 mask": {"mask": hole(21, 23).astype(np.float16)},
    "boolean mask": {"mask": rng.random((19, 23)) < 0.7},
    "sinks": {"sinks": np.array([0.5, -INF, 2, -1], np.float32)},
    "softcap": {"logit_softcap": 1.5},
    "dropout": {"dropout_p": 0.25, "seed": 3},
    "lse": {"d_lse": normal(2, 4, 19)},
    "scale": {"scale": 0.7},
    "packed": {"cu_seqlens_q": np.array([0, 7, 7, 16]), "cu_seqlens_k": np.array([0, 5, 9, 21])},
}


@pytest.mark.parametrize("names", [*((name,) for name in OPTIONS), *combinations(OPTIONS, 2)], ids="+".join)
def test_every_option_alone_and_in_pairs(names):
    options = {}
    for name in names:
        options |= OPTIONS[name]
    if "packed" in names and "d_lse" in options:
        options["d_lse"] = options["d_lse"][:1]
    require_right(*arrays(B=1 if "packed" in names else 2), **options)


STRUCTURES = [
    {"causal": "top-left"},
    {"causal": "bottom-right"},
    {"window": (4, 3)},
    {"window": (-1, 0)},
    {"window": (0, -1), "prefix": 3},
    {"causal": "top-left", "window": (2, 5), "prefix": 1},
    {"causal": True, "window": (6, -1), "prefix": 90},
]


@pytest.mark.parametrize("rules", STRUCTURES, ids=str)
@pytest.mark.parametrize("N, M", [(19, 23), (33, 7), (100, 150)])
def test_structure_means_the_same_as_an_explicit_mask(rules, N, M):
    q, k, v, d = arrays(N=N, M=M)
    bare, masked = results(q, k, v, d, **rules), results(q, k, v, d, mask=visible_pairs(N, M, **rules))
    for name in bare:
        np.testing.assert_allclose(bare[name], masked[name], rtol=1e-5, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("causal", [None, "top-left", "bottom-right"])
def test_windows_as_long_as_the_sequence(off, causal):
    for N, M in ((17, 17), (9, 20), (20, 9)):
        for window in ((M + off, -1), (-1, N + off), (N + off, M + off)):
            require_right(*arrays(B=1, N=N, M=M), causal=causal, window=window)


SIZES = (1, 2, 5, 17, 63, 64, 65, 95, 96, 97)


@pytest.mark.parametrize("N, M", list(zip(SIZES, SIZES[3:] + SIZES[:3], strict=True)))
@pytest.mark.parametrize("causal", [None, "top-left", "bottom-right"])
def test_sizes_round_the_edges_of_tiles(N, M, causal):
    require_right(*arrays(B=1, H=3, HK=1, N=N, M=M, DK=N % 31 + 2, DV=M % 23 + 1), causal=causal)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_grouped_heads_read_blocks(ratio):
    require_right(*arrays(B=3, H=2 * ratio, HK=2, N=13, M=20, DK=5, DV=11), causal=True)


@pytest.mark.parametrize("DK, DV", [(1, 3), (3, 1), (192, 128), (257, 40), (40, 300), (576, 512)])
def test_any_size_of_heads(DK, DV):
    require_right(*arrays(B=1, H=2, HK=1, N=20, M=35, DK=DK, DV=DV), causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 0), "prefix": 30}], ids=str)
def test_chunks_of_many_keys(options):
    require_right(*arrays(B=1, H=2, HK=1, N=700, M=1100, DK=8, DV=4), **options)


@pytest.mark.parametrize("N", [1, 7, 16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0), "prefix": 9}], ids=str)
def test_few_queries_of_many_keys(N, options):
    require_right(*arrays(B=2, H=4, HK=1, N=N, M=1700, DK=8, DV=5), sinks=normal(4), mask=hole(N, 1700), **options)


@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("masks", [0, 1, 80])
def test_one_query_of_heads_that_share_keys(group, masks):
    """Such heads are computed side by side."""
    q, k, v, d = arrays(B=2, H=2 * group, HK=2, N=1, M=77, DK=24, DV=70)
    mask = normal(1, min(masks, 2 * group), 1, 77) if masks else None
    if masks:
        mask[..., 5], k[:, :, 5], v[:, :, 5] = -INF, NAN, INF
    require_right(q, k, v, d, mask=mask, sinks=normal(2 * group))


def test_one_query_gives_the_same_bits_beside_other_heads_and_alone():
    q, k, v, _ = arrays(B=1, H=10, HK=2, N=1, M=600, DK=24, DV=40)
    together = results(q, k, v)
    for h in range(10):
        hk = slice(h // 5, h // 5 + 1)
        alone = results(q[:, h : h + 1], k[:, hk], v[:, hk])
        assert (alone["out"] == together["out"][:, :, h : h + 1]).all()
        assert (alone["lse"] == together["lse"][:, h : h + 1]).all()
    packed = results(q, k, v, cu_seqlens_q=np.int32([0, 1]), cu_seqlens_k=np.int32([0, 600]))
    same_bits(packed, together)


def attend(q, k, v, mask=None, d=None, *, threads=2, **options):
    """out, and where d is given dq, dk, dv."""
    made = results(q, k, v, d, mask=mask, threads=threads, **options)
    return [made[name] for name in ("out", "dq", "dk", "dv") if name in made]


@pytest.mark.parametrize("HK, N", [(3, 20), (1, 20), (3, 700)])  # 700: chunks of keys
def test_gradients_of_parts_of_one_product_are_put_together_without_a_copy_between(HK, N):
    H, D = 3, 8
    ends = np.cumsum([0, H * D, HK * D, HK * D]).tolist()
    qkv, d = normal(2, N, ends[-1]), normal(2, N, H, D)
    whole = gg.tensor(qkv, param=True)
    q, k, v = (whole[..., a:b].reshape(2, N, -1, D).permute(0, 2, 1, 3) for a, b in pairwise(ends))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.flash_attn_ext(q, k, v, causal=True) * gg.tensor(d)))
    graph.build_backward_expand()
    assert not {"cont", "slice_back", "slice_add", "add"} & {t.op.name for t in graph.nodes}
    graph.compute(threads=2)
    parts = (qkv[..., a:b].reshape(2, N, -1, D).swapaxes(1, 2) for a, b in pairwise(ends))
    exact = attention_reference(*parts, d, causal=True).present()
    exact = np.concatenate([exact[x].swapaxes(1, 2).reshape(2, N, -1) for x in ("dq", "dk", "dv")], -1)
    got = graph.grad(whole).numpy()
    assert np.linalg.norm(got - exact) < 2e-6 * np.linalg.norm(exact)


# -- exact ones ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 2.0}, {"window": (0, 0)}, {"scale": 1e15}], ids=str)
def test_with_one_visible_key_dq_and_dk_are_exactly_zero_and_dv_is_d(options):
    q, k, v, d = normal(2, 3, 1, 40), normal(2, 3, 1, 40), normal(2, 3, 1, 70), normal(2, 1, 3, 70)
    out, dq, dk, dv = attend(q, k, v, d=d, **options)
    assert (out.swapaxes(1, 2) == v).all()
    assert not dq.any() and not dk.any()
    assert (dv == d.swapaxes(1, 2)).all()


def test_one_visible_key_of_many_is_as_one_key():
    q, k, v, d = arrays(H=2, N=50, M=50, DK=24, DV=33)
    for options in (
        {"window": (0, 0)},
        {"mask": np.eye(50, dtype=bool)},
        {"window": (0, 0), "dropout_p": 0.3, "seed": 1},
    ):
        got = results(q, k, v, d, **options)
        assert not got["dq"].any() and not got["dk"].any()


def test_of_a_constant_input_all_weights_are_equal_and_nothing_pulls():
    """However large the scores: lse alone could not tell 40 keys of 1e30 from one."""
    for size in (1.0, 3e4, 1e15):
        q, k, v, d = arrays(N=33, M=40)
        q[:], k[:], v[:] = size, size, 1.0
        got = results(q, k, v, d, scale=1.0)
        assert (got["out"] == 1).all()
        assert not got["dq"].any() and not got["dk"].any()
        np.testing.assert_allclose(got["dv"], np.broadcast_to(got["dv"][:, :, :1], got["dv"].shape), rtol=1e-6)
        v[:] = normal(*v.shape)
        got = results(q, k, v, d, scale=1.0)
        # sums of dS k: each dS is a 40th of a difference of terms of about 3, rounded
        assert np.abs(got["dq"]).max() < 1e-6 * size
        np.testing.assert_allclose(got["out"].swapaxes(1, 2)[:, ::2], np.broadcast_to(
            v.astype(np.float64).mean(2, keepdims=True), (2, 2, 33, 7)), atol=1e-6)  # fmt: skip


def test_a_row_that_sees_no_key_gives_nothing_to_anybody():
    """Also not NaN to a projection that all rows share."""
    x, w = gg.tensor(normal(1, 5, 8)), gg.tensor(normal(3 * 2 * 4, 8), param=True)
    mask = np.zeros((5, 5), np.float32)
    mask[2] = -INF
    qkv = gg.mul_mat(w, x)
    q, k, v = (qkv[..., 8 * i : 8 * i + 8].reshape(1, 5, 2, 4).permute(0, 2, 1, 3) for i in range(3))
    out, lse = gg.flash_attn_ext(q, k, v, mask, return_lse=True)
    gg.set_output(out), gg.set_output(lse)
    graph = gg.Graph().build_forward_expand(gg.sum(gg.sqr(out))).build_backward_expand()
    graph.build_forward_expand(lse)
    graph.compute()
    assert not out.numpy()[:, 2].any() and (lse.numpy()[..., 2] == -INF).all()
    gradient = graph.grad(w).numpy().copy()
    graph.compute(backend="reference")
    exact = graph.grad(w).numpy()
    assert np.linalg.norm(gradient - exact) < 5e-6 * np.linalg.norm(exact)  # three products follow one another


def test_a_row_of_large_finite_negatives_is_not_empty():
    q, k, v, d = arrays(N=5, M=7)
    got = results(q, k, v, d, mask=np.full((5, 7), -3.4e38, np.float32))
    assert np.isfinite(got["lse"]).all() and np.abs(got["out"]).min(axis=-1).all()


def test_a_live_nan_comes_out_as_nan():
    q, k, v, d = arrays(B=1, H=1, HK=1, N=6, M=6)
    v[0, 0, 3, 2] = NAN
    got = results(q, k, v, d, causal=True)
    assert np.isnan(got["out"][0, 3:, 0, 2]).all() and np.isfinite(got["out"][0, :3]).all()
    assert np.isnan(got["dq"][0, 0, 3:]).all() and np.isfinite(got["dq"][0, 0, :3]).all()


def test_a_sink_of_minus_infinity_has_no_gradient_and_changes_no_bit():
    q, k, v, d = arrays()
    got = results(q, k, v, d, sinks=np.full(4, -INF, np.float32))
    assert not got.pop("dsinks").any()
    same_bits(got, results(q, k, v, d))


def test_dropout_of_nothing_changes_no_bit():
    q, k, v, d = arrays()
    same_bits(results(q, k, v, d, dropout_p=0.0, seed=7), results(q, k, v, d))


def test_a_seed_that_is_a_leaf_may_change_from_run_to_run():
    q, k, v, _ = arrays()
    seed = gg.tensor(1)
    out = gg.flash_attn_ext(q, k, v, dropout_p=0.5, seed=seed)
    graph = gg.Graph().build_forward_expand(out)
    runs = []
    for value in (1, 2, 1):
        seed.set(value)
        graph.compute()
        runs.append(out.numpy().copy())
    assert (runs[0] == runs[2]).all() and (runs[0] != runs[1]).any()


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 2.0}, {"causal": "bottom-right"}])
def test_garbage_in_masked_keys_changes_no_bit(options):
    q, k, v, d = normal(1, 4, 50, 24), normal(1, 2, 70, 24), normal(1, 2, 70, 33), normal(1, 50, 4, 33)
    hidden = rng.random(70) < 0.3
    mask = np.where(rng.random((50, 70)) < 0.2, -np.inf, 0).astype(np.float32)
    mask[:, hidden] = -np.inf
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, hidden, ::3], dirty_v[:, :, hidden, 1::2] = np.nan, -np.inf
    clean = attend(q, k, v, mask, d, **options)
    dirty = attend(q, dirty_k, dirty_v, mask, d, **options)
    for a, b in zip(clean, dirty, strict=True):
        assert a.tobytes() == b.tobytes()


def test_garbage_in_a_row_that_sees_no_key_reaches_nothing():
    q, k, v, d = normal(1, 2, 9, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), normal(1, 9, 2, 8)
    clean = attend(q, k, v, d=d, causal="bottom-right")  # the first four of the nine queries see nothing
    q[:, :, :4], d[:, :4] = np.nan, np.inf
    for a, b in zip(clean, attend(q, k, v, d=d, causal="bottom-right"), strict=True):
        assert a.tobytes() == b.tobytes()
    assert not clean[0][:, :4].any() and not clean[1][:, :, :4].any()


# -- the same bits ------------------------------------------------------------------------------------------

EVERYTHING = {"logit_softcap": 3.0, "window": (80, 2), "prefix": 3, "causal": None}


@pytest.mark.parametrize("options", [{"causal": True}, EVERYTHING], ids=["causal", "everything"])
@pytest.mark.parametrize("N, M", [(64, 64), (1100, 1100), (3, 1700)])
def test_a_kv_head_gives_the_same_bits_alone_and_among_others(N, M, options):
    q, k, v, d = arrays(B=5, H=8, HK=4, N=N, M=M, DK=6, DV=5)
    together = results(q, k, v, d, threads=3, **options)
    alone = results(q[3:4, 2:4], k[3:4, 1:2], v[3:4, 1:2], d[3:4, :, 2:4], threads=1, **options)
    heads = {"out": (slice(3, 4), slice(None), slice(2, 4)), "dk": np.s_[3:4, 1:2], "dv": np.s_[3:4, 1:2]}
    for name, x in alone.items():
        assert (together[name][heads.get(name, np.s_[3:4, 2:4])] == x).all(), name


@pytest.mark.parametrize("options", [{"causal": True}, EVERYTHING], ids=["causal", "everything"])
def test_a_sequence_gives_the_same_bits_alone_in_a_batch_and_packed(options):
    lengths = [(70, 600), (1, 1100), (0, 4), (33, 0), (600, 700)]
    at = np.concatenate([[(0, 0)], np.cumsum(lengths, axis=0)]).astype(np.int32)
    N, M = at[-1] + 5  # rows to spare
    q, k, v, d = arrays(B=1, H=2, HK=1, N=N, M=M, DK=6, DV=5)
    ends = {"cu_seqlens_q": at[:, 0], "cu_seqlens_k": at[:, 1]}
    packed = [results(q, k, v, d, threads=threads, **ends, **options) for threads in (1, 2, 3, 7)]
    for other in packed[1:]:
        same_bits(packed[0], other)
    for (q0, k0), (q1, k1) in pairwise(at):
        queries, keys = slice(q0, q1), slice(k0, k1)
        one = q[:, :, queries], k[:, :, keys], v[:, :, keys], d[:, queries]
        places = {"out": np.s_[:, queries], "lse": np.s_[:, :, queries], "dq": np.s_[:, :, queries]}
        twice = results(*(np.concatenate([x, x]) for x in one), **options)
        for name, x in results(*one, **options).items():
            assert (packed[0][name][places.get(name, np.s_[:, :, keys])] == x).all(), name
            assert (twice[name][1:] == x).all(), name


@pytest.mark.parametrize("options", [{"causal": "top-left"}, {"dropout_p": 0.3, "seed": 2}, EVERYTHING], ids=str)
def test_any_number_of_threads_gives_the_same_bits(options):
    q, k, v, d = arrays(B=1, H=4, HK=2, N=150, M=900, DK=16, DV=16)
    mask, sinks = hole(1, 2, 150, 900), normal(4)
    first = results(q, k, v, d, mask=mask, sinks=sinks, threads=1, **options)
    for threads in (2, 3, 7):
        same_bits(first, results(q, k, v, d, mask=mask, sinks=sinks, threads=threads, **options))


# -- large ones ---------------------------------------------------------------------------------------------


def test_scores_of_1e30_are_finite():
    q, k, v, d = normal(1, 1, 20, 8) * 1e15, normal(1, 1, 20, 8) * 1e15, normal(1, 1, 20, 8), normal(1, 20, 1, 8)
    out, dq, dk, dv = attend(q, k, v, d=d)
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    best = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3)).argmax(-1)[0, 0]
    np.testing.assert_array_equal(out[0, :, 0], v[0, 0, best])


def test_no_result_holds_a_score_for_every_pair():
    N = 2048
    q, k, v = (gg.tensor(normal(1, 2, N, 16), param=True) for _ in range(3))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.flash_attn_ext(q, k, v, causal=True)))
    graph.build_backward_expand()
    assert graph.plan().total(threads=2) < N * N * 4


def test_forward_and_backward_of_16384_queries_take_less_than_four_times_their_inputs():
    q, k, v = (gg.tensor(shape=(1, 4, 16384, 64), param=True) for _ in range(3))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.flash_attn_ext(q, k, v, causal=True))).build_backward_expand()
    inputs = 3 * q.nbytes
    assert graph.plan().total(threads=2) - inputs < 4 * inputs


def test_tiles_that_nothing_sees_cost_nothing():
    """Keys beyond a window hold NaN, and the run with a hundred times as many keys gives the same bits."""
    q, k, v, d = arrays(B=1, H=1, HK=1, N=64, M=64)
    k_long, v_long = (np.concatenate([np.full((1, 1, 6400, x.shape[3]), NAN, np.float32), x], axis=2) for x in (k, v))
    short = results(q, k, v, d, causal=True, window=(20, 0))
    long = results(q, k_long, v_long, d, causal=True, window=(20, 0))
    np.testing.assert_allclose(long["out"][0, 20:], short["out"][0, 20:], rtol=1e-5, atol=1e-6)
    assert not long["dk"][:, :, :6300].any() and not long["dv"][:, :, :6300].any()


# -- the interface ------------------------------------------------------------------------------------------


def test_flash_attn_back_is_one_tensor_of_three_parts():
    q, k, v, d = normal(1, 2, 3, 5), normal(1, 1, 3, 5), normal(1, 1, 3, 7), normal(1, 3, 2, 7)
    packed = gg.flash_attn_back(q, k, v, None, d)
    assert packed.ndim == 1
    assert [p.shape for p in packed.parts] == [q.shape, k.shape, v.shape]
    assert packed.offsets == (0, 128, 192)


def test_gradients_of_sinks_and_mask_follow_where_asked_for():
    q, k, v, d, sinks, mask = (
        normal(1, 3, 3, 5),
        normal(1, 1, 3, 5),
        normal(1, 1, 3, 7),
        normal(1, 3, 3, 7),
        normal(3),
        hole(3, 3),
    )
    packed = gg.flash_attn_back(q, k, v, mask, d, sinks=sinks, sinks_gradient=True, mask_gradient=True)
    assert [p.shape for p in packed.parts] == [q.shape, k.shape, v.shape, sinks.shape, mask.shape]
    assert all(offset % 16 == 0 for offset in packed.offsets)
    graph = gg.Graph().build_forward_expand(gg.set_output(packed))
    graph.prepared("native").poison(2)
    graph.compute()
    used = np.zeros(packed.shape, bool)
    for part, offset in zip(packed.parts, packed.offsets, strict=True):
        used[offset // 4 : offset // 4 + part.size] = True
    assert not packed.numpy()[~used].any()


def test_gradients_of_a_mask_alone_need_no_others():
    mask = gg.tensor(normal(2, 5, 6), param=True)
    q, k, v, d = arrays(B=3, H=4, HK=2, N=5, M=6)
    loss = gg.sum(gg.flash_attn_ext(q, k, v, mask) * gg.tensor(d))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand().compute()
    (back,) = (t for t in graph.nodes if t.op.name == "flash_attn_back")
    assert back.shape == mask.shape
    expected = attention_reference(q, k, v, d, mask=mask.numpy()).dmask
    np.testing.assert_allclose(graph.grad(mask).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["broadcast", "reversed", "transposed"])
def test_gradients_that_arrive_in_any_layout(layout):
    q, k, v, d = arrays(N=6, M=9)
    if layout == "broadcast":
        d[:] = d[:1, :1, :1]
        incoming = gg.broadcast_to(gg.tensor(d[:1, :1, :1]), shape=d.shape)
    elif layout == "reversed":
        incoming = gg.tensor(np.ascontiguousarray(d[::-1, ::-1, :, ::-1]))[::-1, ::-1, :, ::-1]
    else:
        incoming = gg.tensor(np.ascontiguousarray(d.transpose(3, 2, 1, 0))).permute(3, 2, 1, 0)
    packed = gg.flash_attn_back(q, k, v, None, incoming)
    gg.Graph().build_forward_expand(gg.set_output(packed)).compute()
    exact = attention_reference(q, k, v, d)
    for part, wanted in zip(packed.parts, (exact.dq, exact.dk, exact.dv), strict=True):
        np.testing.assert_allclose(part.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16])
def test_halves_are_read_as_they_are_and_have_gradients_in_f32(dtype):
    q, k, v, d = arrays(N=40, M=300)
    q, k, v, d = (gg.tensor(x, param=True) for x in (q, k, v, d))
    halves = [gg.tensor(x.numpy(), dtype=dtype, param=True) for x in (k, v)]
    same = [gg.tensor(x.numpy().astype(np.float32), param=True) for x in halves]
    gradients = []
    for keys, values in (halves, same):
        graph = gg.Graph().build_forward_expand(gg.sum(gg.flash_attn_ext(q, keys, values, causal=True) * d))
        graph.build_backward_expand().compute()
        assert "cast" not in [t.op.name for t in graph.nodes]
        gradients.append([graph.grad(x).numpy().copy() for x in (q, keys, values)])
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == np.float32 and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [gg.Q8_0, gg.Q5_1])
def test_quantized_keys_and_values_give_what_they_decode_to_and_gradients_to_others(dtype):
    size = dtype.block
    q, k, v, d = arrays(B=1, N=20, M=300, DK=size, DV=size)
    quantized = [gg.tensor(x, dtype=dtype) for x in (k, v)]
    q = gg.tensor(q, param=True)
    made = []
    for keys, values in (quantized, [x.numpy() for x in quantized]):
        out = gg.flash_attn_ext(q, keys, values, causal=True)
        graph = gg.Graph().build_forward_expand(gg.set_output(out))
        graph.build_backward_expand(gg.sum(out * gg.tensor(d))).compute()
        made.append((out.numpy().tobytes(), graph.grad(q).numpy().tobytes()))
    assert made[0] == made[1]
    with pytest.raises(gg.errors.GradientError, match=f"no gradient for k, which is {dtype}: train it as f32"):
        gg.flash_attn_back(q, *quantized, None, d)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "queries, keys, message",
    [
        ([0, 3, 9], [0, 2, 4], "cu_seqlens_q holds 9, and must be from 3 to 6"),
        ([0, 3, 6], [0, 8, 4], "cu_seqlens_k holds 8, and must be from 0 to 7"),
        ([0, 4, 3], [0, 2, 4], "cu_seqlens_q holds 3, and must be from 4 to 6"),
        ([1, 3, 6], [0, 2, 4], "cu_seqlens_q holds 1, and must be from 0 to 0"),
        ([0, 3, 6], [0, -2, 4], "cu_seqlens_k holds -2, and must be from 0 to 7"),
    ],
)
def test_ends_of_sequences_are_checked_before_anything_is_written(backend, queries, keys, message):
    q, k, v, d = arrays(B=1, N=6, M=7)
    ends = {"cu_seqlens_q": np.array(queries, np.int32), "cu_seqlens_k": np.array(keys, np.int32)}
    for made in (
        gg.flash_attn_ext(q, k, v, **ends),
        gg.flash_attn_back(q, k, v, None, d, out=d, lse=np.zeros((1, 4, 6), np.float32), **ends),
    ):
        with pytest.raises(gg.errors.IndexRangeError, match=message):
            gg.Graph().build_forward_expand(made).compute(backend=backend)


def test_out_and_lse_of_the_forward_are_taken_over():
    q, k, v, d = (gg.tensor(normal(1, 3, 3, 3)) for _ in range(4))
    out, lse = gg.flash_attn_ext(q, k, v, return_lse=True)
    packed = gg.flash_attn_back(q, k, v, None, d, out=out, lse=lse)
    made = lse.src[0]
    assert out in packed.src and set(made.parts) - {lse} <= set(packed.src)


def test_out_and_lse_may_come_from_elsewhere():
    q, k, v, d = arrays()
    made = attention_reference(q, k, v, d, causal=True)
    packed = gg.flash_attn_back(q, k, v, None, d, out=made.out, lse=made.lse, causal=True)
    gg.Graph().build_forward_expand(gg.set_output(packed)).compute()
    for part, wanted in zip(packed.parts, (made.dq, made.dk, made.dv), strict=True):
        np.testing.assert_allclose(part.numpy(), wanted, rtol=1e-5, atol=2e-6)


def test_causal_true_means_bottom_right():
    for causal in (True, "bottom-right", gg.Causal.BOTTOM_RIGHT):
        t = gg.flash_attn_ext(*(normal(1, 1, 2, 4) for _ in range(3)), causal=causal)
        assert t.src[0].attrs["rules"].causal is gg.Causal.BOTTOM_RIGHT


def gradient_of(**options):
    q, k, v = (gg.tensor(normal(1, 2, 3, 4), param=True) for _ in range(3))
    mask = options.pop("mask", None)
    loss = gg.sum(gg.flash_attn_ext(q, k, v, mask, **options))
    gg.Graph().build_forward_expand(loss).build_backward_expand()


def test_combinations_without_gradient_are_refused_when_the_graph_is_built():
    with pytest.raises(gg.errors.GradientError, match=r"flash_attn_ext .*max_bias=8.0 \(ALiBi\): leave"):
        gradient_of(mask=np.zeros((3, 3), np.float32), max_bias=8.0)
    with pytest.raises(gg.errors.GradientError, match=r"flash_attn_back .*max_bias=2.0"):
        gg.flash_attn_back(*(normal(1, 1, 2, 2) for _ in range(3)), normal(2, 2), normal(1, 2, 1, 2), max_bias=2.0)


@pytest.mark.parametrize("causal", [None, "top-left", "bottom-right"])
@pytest.mark.parametrize("window", [None, (3, 0), (0, 2), (-1, 4), (5, -1), (40, 40)])
@pytest.mark.parametrize("prefix", [0, 4, 50])
def test_operations_are_those_of_the_pairs_that_are_seen(causal, window, prefix):
    for N, M in ((17, 17), (9, 30), (30, 9), (1, 5)):
        rules = {"causal": causal, "window": window, "prefix": prefix}
        pairs = 2 * 4 * int(visible_pairs(N, M, **rules).sum())
        q, k, v, d = normal(2, 4, N, 8), normal(2, 2, M, 8), normal(2, 2, M, 5), normal(2, N, 4, 5)
        forward = gg.flash_attn_ext(q, k, v, **rules).src[0]
        backward = gg.flash_attn_back(q, k, v, None, d, **rules).parts[0].src[0]
        assert forward.op.count_flops(forward) == 2 * pairs * (8 + 5)
        assert backward.op.count_flops(backward) == 2 * pairs * (3 * 8 + 2 * 5)
