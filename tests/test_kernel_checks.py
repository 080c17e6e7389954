"""Comparisons of kernels: KDA, sparse latent attention, any op; refusals, formats, adapters of other libraries."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.testing import (
    AttentionCase,
    KdaCase,
    OpCase,
    SparseMlaCase,
    adapters,
    attention_cases,
    attention_reference,
    compare,
    compare_attention,
    compare_kda,
    compare_sparse_mla,
    kda_cases,
    kda_reference,
    sparse_mla_cases,
    sparse_mla_reference,
)
from ggrad.testing.comparison import as_format

pytestmark = pytest.mark.native


# -- ggrad's own kernels, which the definitions know nothing of ---------------------------------------------------


def gradients(results, incoming, leaves):
    """Values of results, and of the gradients of leaves, for those of the results that come in."""
    terms = [gg.sum(gg.mul(t, gg.tensor(d))) for t, d in zip(results, incoming, strict=True) if d is not None]
    graph = gg.Graph().build_forward_expand(*results)
    if terms:
        loss = sum(terms[1:], terms[0])
        graph.build_forward_expand(loss).build_backward_expand(loss)
    graph.compute()
    return [t.numpy() for t in results], {n: graph.grad(t).numpy() for n, t in leaves.items() if terms}


def test_kda_passes_every_case():
    def layer(q, k, v, g, beta, d, *, dht=None, **options):
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        given |= {n: options.pop(n) for n in ("initial_state", "A_log", "dt_bias") if n in options}
        leaves = {name: gg.tensor(x, param=True) for name, x in given.items()}
        results = gg.kda(**leaves, **options, output_final_state=True)
        (o, state), grads = gradients(results, (d, dht), leaves)
        names = {"initial_state": "dh0"}
        return {"o": o, "final_state": state} | {names.get(n, f"d{n}"): x for n, x in grads.items()}

    result = compare_kda(layer)
    assert result.passed and not result.left_out and not result.refused, result
    compared = {name for row in result.rows for name in row.errors}
    assert compared == {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"}
    assert result.summary == f"{len(kda_cases())} right, 0 wrong, 0 refused"


def test_sparse_latent_attention_passes_every_case():
    def sparse(q, ori_kv, cmp_kv, d, **options):
        given = {"q": q, "ori_kv": ori_kv, "cmp_kv": cmp_kv, "sinks": options.pop("sinks", None)}
        leaves = {name: gg.tensor(x, param=True) for name, x in given.items() if x is not None}
        results = gg.sparse_flash_mla(**leaves, **options, return_softmax_lse=True)
        (out, lse), grads = gradients(results, (d, None), leaves)
        return {"attn_out": out, "softmax_lse": lse} | {"dq" if n == "q" else f"d_{n}": x for n, x in grads.items()}

    result = compare_sparse_mla(sparse)
    assert result.passed and not result.left_out, result
    compared = {name for row in result.rows for name in row.errors}
    assert compared == {"attn_out", "softmax_lse", "dq", "d_ori_kv", "d_cmp_kv", "d_sinks"}


# -- the definitions against difference quotients -----------------------------------------------------------------


def slopes_agree(forward, arrays, found, rng):
    """Whether gradients are those of sum(result * weight), along a random direction of each array."""
    for name, gradient in found.items():
        step = rng.standard_normal(arrays[name].shape)
        ends = [forward({**arrays, name: arrays[name] + e * step}) for e in (1e-6, -1e-6)]
        assert (gradient * step).sum() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("name", ["a layer, packed, states", "a gate with a lower bound", "more heads of values"])
def test_kda_by_definition_has_the_slopes_of_difference_quotients(name):
    case = next(c for c in kda_cases() if c.name == name)
    case = KdaCase(**{**vars(case), "T": 9, "K": 3, "options": dict(case.options)})
    if "cu_seqlens" in case.options:
        case.options["cu_seqlens"] = np.array([0, 1, 9])
    given = case.arguments(1, np.dtype(np.float64))
    made = kda_reference(**given)

    def loss(arrays):
        o, state, *_ = kda_reference(**{**given, **arrays, "d": None, "dht": None})
        return (o * given["d"]).sum() + (state * given.get("dht", 0)).sum()

    names = {"dh0": "initial_state"}
    found = {names.get(n, n[1:]): x for n, x in made.present().items() if n not in ("o", "final_state")}
    arrays = {n: given[n].astype(np.float64) for n in found}
    assert {"q", "k", "v", "g", "beta"} <= found.keys()
    slopes_agree(loss, arrays, found, np.random.default_rng(0))


@pytest.mark.parametrize(
    "name", ["a list of compressed rows and a window", "packed, compressed rows, sinks", "a list with rows twice"]
)
def test_sparse_latent_attention_by_definition_has_the_slopes_of_difference_quotients(name):
    case = next(c for c in sparse_mla_cases() if c.name == name)
    given = case.arguments(1, np.dtype(np.float64))
    made = sparse_mla_reference(**given)
    names = {"dq": "q", "d_ori_kv": "ori_kv", "d_cmp_kv": "cmp_kv", "d_sinks": "sinks"}
    found = {names[n]: x for n, x in made.present().items() if n in names}
    arrays = {n: given[n].astype(np.float64) for n in found}
    slopes_agree(
        lambda x: (sparse_mla_reference(**{**given, **x, "d": None}).attn_out * given["d"]).sum(),
        arrays, found, np.random.default_rng(0),
    )  # fmt: skip


# -- mistakes, refusals, formats ----------------------------------------------------------------------------------

KDA_MISTAKES = {
    "the scale is forgotten": lambda a: {**a, "scale": 1.0},
    "sequences run on": lambda a: {n: x for n, x in a.items() if n != "cu_seqlens"},
    "the bias is forgotten": lambda a: {n: x for n, x in a.items() if n != "dt_bias"},
    "no lower bound": lambda a: {n: x for n, x in a.items() if n != "lower_bound"},
    "beta is used as it is": lambda a: {n: x for n, x in a.items() if n != "use_beta_sigmoid_in_kernel"},
    "eigenvalues stay positive": lambda a: {n: x for n, x in a.items() if n != "allow_neg_eigval"},
    "q and k are not normed": lambda a: {n: x for n, x in a.items() if n != "use_qk_l2norm_in_kernel"},
    "the final state has no gradient": lambda a: {n: x for n, x in a.items() if n != "dht"},
    "decays a hundredth off": lambda a: {**a, "g": a["g"] * 1.01},
}


@pytest.mark.parametrize("mistake", KDA_MISTAKES)
def test_a_mistake_in_kda_is_caught(mistake):
    def wrong(q, k, v, g, beta, d, **options):
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "d": d, **options}
        return kda_reference(**KDA_MISTAKES[mistake](given))

    cases = [c for c in kda_cases() if c.T <= 150 and c.K <= 32 and not (c.state and "cu_seqlens" in c.options)]
    assert compare_kda(wrong, cases, factor=10).failed


SPARSE_MISTAKES = {
    "sinks are forgotten": ("sinks",),
    "lists have no length": ("ori_topk_length",),
    "windows are forgotten": ("ori_mask_mode",),
    "the residual is forgotten": ("cmp_residual_kv",),
    "all is in use": ("seqused_ori_kv",),
    "every compressed row is seen": ("cmp_mask_mode",),
}


@pytest.mark.parametrize("mistake", SPARSE_MISTAKES)
def test_a_mistake_in_sparse_latent_attention_is_caught(mistake):
    def wrong(q, ori_kv, cmp_kv, d, **options):
        kept = {n: x for n, x in options.items() if n not in SPARSE_MISTAKES[mistake]}
        return sparse_mla_reference(q, ori_kv, cmp_kv, d, **kept)

    assert compare_sparse_mla(wrong).failed


def test_what_a_kernel_refuses_is_neither_right_nor_wrong():
    class NoKernel(Exception):
        pass

    def picky(q, k, v, d, **options):
        if "window" in options:
            raise NotImplementedError("no windows")
        if "sinks" in options:
            raise NoKernel("no sinks\n" + "a long story " * 100)
        if "scale" in options:
            raise RuntimeError("a fault\nof two lines, " + "x" * 500)
        return attention_reference(q, k, v, d, dtype=np.float32, **options)

    few = [c for c in attention_cases() if c.name in ("window", "sinks", "scale", "64 x 64", "softcap")]
    result = compare_attention(picky, few, refuses=NoKernel)
    assert {row.case.name for row in result.refused} == {"window", "sinks"}
    assert [row.case.name for row in result.failed] == ["scale"] and not result.passed
    assert result.summary == "2 right, 1 wrong, 2 refused"
    printed = str(result).splitlines()
    assert printed[0].startswith(result.summary) and all(len(line) < 200 for line in printed)
    assert "refused window" in printed and any("NotImplementedError: no windows" in line for line in printed)
    assert "FAILED scale" in printed[2] and printed[3].strip().startswith("RuntimeError: a fault of two lines")
    assert compare_attention(picky, few[:1] + few[2:3], refuses=(NoKernel,)).summary.endswith("refused")
    nothing = compare_attention(picky, [c for c in few if c.name == "window"])
    assert not nothing.passed and not nothing.failed  # nothing was found right


def test_any_op_is_compared_with_its_gradients():
    def rms_norm(d, a, eps):
        s = 1 / np.sqrt((a**2).mean(-1, keepdims=True) + eps)
        y = a * s
        return (y, None if d is None else s * (d - y * (y * d).mean(-1, keepdims=True)))

    cases = [
        OpCase("ragged", {"a": (5, 70)}, {"eps": 1e-5}),
        OpCase("forward", {"a": (1, 3)}, {"eps": 0.1}, backward=False),
    ]
    assert compare(gg.rms_norm, rms_norm, cases).passed
    assert compare(gg.rms_norm, rms_norm, cases, dtype="tf32").passed
    wrong = compare(gg.rms_norm, lambda d, a, eps: rms_norm(d, a, eps * 2), cases)
    assert len(wrong.failed) == 2
    rows = OpCase("rows", {"a": (9, 4), "ids": np.array([3, 3, 8], np.int32)})

    def get_rows(d, a, ids):
        da = np.zeros_like(a)
        np.add.at(da, ids, d)
        return {"out": a[ids], "da": da}

    result = compare(gg.get_rows, get_rows, [rows])
    assert result.passed and set(result.worst.errors) == {"out", "da"}
    with pytest.raises(ValueError, match=r"compare\(\): there is no case"):
        compare(gg.get_rows, get_rows, [rows], without="ids")


def test_formats_round_as_they_say():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-10, -3.1415927, np.inf, np.nan, 3.4e38], np.float32)
    rounded = as_format("tf32").rounded(x)
    np.testing.assert_array_equal(rounded[:3], [1, 1 + 2**-9, 1 + 2**-10])
    assert rounded[3] == np.float32(-3.140625) and np.isinf(rounded[4]) and np.isnan(rounded[5])
    assert as_format("f16").dtype == np.float16 and as_format(np.float64).name == "float64"
    for wrong in ("fp8", np.int32, "int8"):
        with pytest.raises(ValueError, match=r'must be "f32", "tf32", "f16", "bf16" or a floating dtype'):
            as_format(wrong)


# -- other people's kernels ---------------------------------------------------------------------------------------


def few(*names):
    return [case for case in attention_cases() if case.name in names]


def test_torchs_attention_is_right_but_for_what_lies_in_hidden_keys():
    pytest.importorskip("torch")
    cases = few("64 x 64", "grouped heads", "scale", "top-left", "mask with rows to spare", "bottom-right, more keys",
                "NaN in hidden keys", "window", "dropout", "softcap")  # fmt: skip
    result = compare_attention(adapters.torch_sdpa(backend="math"), cases)
    assert [row.case.name for row in result.failed] == ["NaN in hidden keys"], result
    assert {row.case.name for row in result.refused} == {"window", "dropout", "softcap"}
    assert set(result.rows[1].errors) == {"out", "dq", "dk", "dv"}
    with pytest.raises(ValueError, match="backend='fast' must be one of"):
        adapters.torch_sdpa(backend="fast")


def test_torchs_attention_takes_halves():
    pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    result = compare_attention(adapters.torch_sdpa(backend="math"), few("64 x 64", "mask"), dtype="bf16")
    assert result.passed, result


def test_flex_attention_gets_windows_packed_sequences_and_softcap():
    pytest.importorskip("torch")
    cases = few("window and prefix", "packed, bottom-right, window", "softcap, mask, causal", "mask of each head",
                "bottom-right, rows that see nothing", "grouped heads", "sinks")  # fmt: skip
    result = compare_attention(adapters.flex_attention(gradients=False), cases)
    assert result.summary == "6 right, 0 wrong, 1 refused", result
    assert set(result.worst.errors) == {"out", "lse"}
    assert compare_attention(adapters.flex_attention(), few("64 x 64")).refused  # it has no gradient on a CPU


def test_jax_attention_is_right_where_it_knows_the_option():
    pytest.importorskip("jax")
    cases = few("64 x 64", "grouped heads", "top-left, more keys", "window", "mask, boolean", "d of v larger", "sinks",
                "bottom-right, more keys")  # fmt: skip
    result = compare_attention(adapters.jax_dot_product_attention(), cases)
    assert result.summary == "5 right, 0 wrong, 3 refused", result


def test_a_case_of_ones_own_is_asked_too():
    mine = AttentionCase(name="mine", H=2, N=3, options={"scale": 2.0})
    assert compare_attention(lambda *a, **o: attention_reference(*a, **o, dtype=np.float32), [mine]).passed
    one = SparseMlaCase(name="mine", q=(1, 3, 2, 4), ori=5)
    assert compare_sparse_mla(lambda *a, **o: sparse_mla_reference(*a, **o, dtype=np.float32), [one]).passed
