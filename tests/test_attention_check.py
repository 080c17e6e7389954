"""compare_attention passes what is right, and objects to every mistake that attention kernels are known for."""

import pickle

import numpy as np
import pytest

import ggrad as gg
from ggrad.testing import AttentionCase, attention_cases, attention_reference, compare_attention, dropout_factors

INF = np.inf


def repeat_block(x, group):
    return np.repeat(x, group, axis=1)


def sum_block(x, group):
    B, H, M, D = x.shape
    return x.reshape(B, H // group, group, M, D).sum(2)


def repeat_interleaved(x, group):
    return np.tile(x, (1, group, 1, 1))


def sum_interleaved(x, group):
    B, H, M, D = x.shape
    return x.reshape(B, group, H // group, M, D).sum(1)


@np.errstate(all="ignore")
def attention(
    q, k, v, d=None, *, wrong="", mask=None, sinks=None, d_lse=None, scale=None, causal=None, window=(-1, -1), prefix=0,
    cu_seqlens_q=None, cu_seqlens_k=None, logit_softcap=0, max_bias=0, dropout_p=0, seed=0,
):  # fmt: skip
    """All heads at once in float32: an implementation like others would write it, with a choice of one mistake."""
    B, H, N, DK = q.shape
    _, HK, M, DV = v.shape
    group = H // HK
    repeat, collect = (repeat_interleaved, sum_interleaved) if wrong == "head map" else (repeat_block, sum_block)
    if wrong == "kv head of the first query head":
        collect = lambda x, group: x[:, ::group]  # noqa: E731
    K, V = repeat(k, group), repeat(v, group)
    if scale is None or wrong == "scale is ignored":
        scale = (DV if wrong == "scale of dv" else DK) ** -0.5

    # Positions within sequences, and which sequence everyone is of.
    i, j, n, m = np.arange(N)[:, None], np.arange(M)[None], N, M
    number_q = number_k = np.zeros((), int)
    if cu_seqlens_q is not None:
        if wrong == "one length for queries and keys":
            cu_seqlens_k = np.minimum(cu_seqlens_q, M)
        number_q = np.searchsorted(cu_seqlens_q, i, side="right") - 1
        number_k = np.searchsorted(cu_seqlens_k, j, side="right") - 1
        if wrong != "positions of the pack":
            i, j = i - cu_seqlens_q[number_q], j - cu_seqlens_k[number_k]
            n, m = np.diff(cu_seqlens_q)[number_q], np.diff(cu_seqlens_k)[number_q]
    at = i + (0 if causal == "top-left" else m - n)
    if wrong == "top-left for bottom-right" and causal in ("bottom-right", True):
        at = i
    if wrong == "bottom-right for top-left" and causal == "top-left":
        at = i + m - n
    if wrong == "causal is strict" and causal:
        at = at - 1
    left, right = window
    if wrong == "window shorter by one" and left > 0:
        left -= 1
    if wrong == "right of the window is ignored":
        right = -1
    visible = np.ones((N, M), bool) & ((j >= at - left) | (left < 0)) & ((j <= at + right) | (right < 0))
    if wrong != "prefix is forgotten":
        visible |= j < prefix
    if causal and wrong != "causality is ignored":
        visible &= j <= at
    if wrong == "prefix beats causality":
        visible |= j < prefix
    if wrong != "sequences see each other":
        visible &= number_q == number_k
    visible = np.broadcast_to(visible, (B, H, N, M)).copy()

    S = np.float32(scale) * (q.astype(np.float32) @ K.astype(np.float32).swapaxes(2, 3))
    slope = np.float32(1)
    if logit_softcap:
        T = np.tanh(S / np.float32(logit_softcap))
        S, slope = np.float32(logit_softcap) * T, 1 - T * T
        if wrong == "derivative of the softcap":
            slope = np.float32(1)
    full = np.zeros((), np.float32)
    if mask is not None:
        bias = np.where(mask, np.float32(0), -np.float32(INF)) if mask.dtype == bool else mask.astype(np.float32)
        if wrong == "boolean mask inverted" and mask.dtype == bool:
            bias = np.where(mask, -np.float32(INF), np.float32(0))
        if wrong == "mask twice":
            bias = 2 * bias
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        if wrong == "mask in blocks":
            full = bias.repeat(B // len(bias), 0).repeat(H // bias.shape[1], 1)[:, :, :N]
        else:
            full = np.tile(bias, (B // len(bias), H // bias.shape[1], 1, 1))[:, :, :N]
        if wrong == "mask of the first head":
            full = np.broadcast_to(full[:, :1], full.shape)
        visible &= full != -INF
        if wrong == "large negatives are hidden":
            visible &= full > -1e30
        if max_bias:
            x = 2 ** int(np.log2(H))
            slopes = [
                2 ** (-max_bias / x * (h + 1)) if h < x else 2 ** (-max_bias / 2 / x * (2 * (h - x) + 1))
                for h in range(H)
            ]
            if wrong == "ALiBi of a power of two":
                slopes = [2 ** (-max_bias / H * (h + 1)) for h in range(H)]
            full = np.array(slopes, np.float32)[:, None, None] * full
        if wrong == "softcap after the mask" and logit_softcap:
            S = np.float32(logit_softcap) * np.tanh((S + full) / np.float32(logit_softcap))
            full = np.zeros((), np.float32)
    S = np.where(visible, S + full, -np.float32(INF))
    top = S.max(-1, keepdims=True)
    sink = np.full((1, H, 1, 1), -INF, np.float32)
    if sinks is not None and wrong != "sinks are ignored":
        sink = sinks.reshape(1, H, 1, 1)
        top = np.maximum(top, sink)
    safe = top if wrong == "empty rows" else np.where(top == -INF, 0, top)
    if wrong == "largest is not subtracted":
        safe = np.zeros_like(top)
    E = np.exp(S - safe)
    total = E.sum(-1, keepdims=True)
    without_sink = total
    total = total + np.exp(sink - safe)
    P = E / (total if wrong == "empty rows" else np.where(total == 0, 1, total))
    lse = (safe + np.log(without_sink if wrong == "lse without the sink" else total))[..., 0]
    if wrong == "lse to base 2":
        lse = lse / np.float32(np.log(2))
    if wrong == "lse of rows that see nothing":
        lse = np.where(lse == -INF, np.float32(0), lse)

    F = np.ones((), np.float32)
    if dropout_p:
        F = np.ones((B, H, N, M), np.float32)
        whole = cu_seqlens_q is None
        for sequence in range(B if whole else len(cu_seqlens_q) - 1):
            queries = slice(N) if whole else slice(*cu_seqlens_q[sequence : sequence + 2])
            keys = slice(M) if whole else slice(*cu_seqlens_k[sequence : sequence + 2])
            for h in range(H):
                block = F[sequence if whole else 0, h, queries, keys]
                block[...] = dropout_factors(*block.shape, dropout_p, seed, head=h, sequence=sequence)
        if wrong == "dropout is not rescaled":
            F = np.minimum(F, 1)
        if wrong == "same dropout in every head":
            F = np.broadcast_to(F[:, :1], F.shape)

    def clean(x, other):  # zero times hidden NaN
        return x if wrong == "hidden NaN leaks" else np.where(visible.any(other)[..., None], x, 0)

    K, V = clean(K.astype(np.float32), 2), clean(V.astype(np.float32), 2)
    Q = q.astype(np.float32)
    out = (P * F) @ V
    result = {"out": out.swapaxes(1, 2), "lse": lse}
    if wrong == "out of heads first":
        result["out"] = out
    if d is None and d_lse is None:
        return result
    D = d.astype(np.float32).swapaxes(1, 2)
    if wrong == "no dropout in the backward pass":
        F = np.ones((), np.float32)
    DP = F * (D @ V.swapaxes(2, 3))
    delta = (D * out).sum(-1, keepdims=True)
    if wrong == "delta is forgotten":
        delta = 0 * delta
    if d_lse is not None and wrong != "gradient through lse is ignored":
        delta = (
            delta + d_lse[..., None] if wrong == "gradient through lse has the wrong sign" else delta - d_lse[..., None]
        )
    G = np.where(visible, P * (DP - delta), 0)
    DS = G * slope
    dk = DS.swapaxes(2, 3) @ Q
    result["dq"] = np.float32(scale) * (DS @ K)
    result["dk"] = collect(dk if wrong == "dk without scale" else np.float32(scale) * dk, group)
    result["dv"] = collect((P if wrong == "dv without dropout" else P * F).swapaxes(2, 3) @ D, group)
    if wrong == "dq of k + q":
        result["dq"] = np.float32(scale) * (DS @ V) if DK == DV else result["dq"]
    if wrong == "dv divided by the group":
        result["dv"] /= group
    if sinks is not None:
        weight = np.where(sink == -INF, 0, np.exp(sink - np.where(top == -INF, 0, lse[..., None])))
        result["dsinks"] = -(weight * delta).sum((0, 2, 3))
    if mask is not None and mask.dtype != bool:
        if wrong == "mask's gradient scaled":
            G = G * np.float32(scale)
        Bm, Hm = bias.shape[:2]
        G = G.reshape(B // Bm, Bm, H // Hm, Hm, N, M).sum((0, 2))
        rows = np.zeros((Bm, Hm, bias.shape[2] - N, M), np.float32)
        result["dmask"] = np.concatenate([G, rows], 2).reshape(mask.shape)
    return result


MISTAKES = [
    "head map", "kv head of the first query head", "scale is ignored", "scale of dv", "one length for queries and keys",
    "positions of the pack", "top-left for bottom-right", "bottom-right for top-left", "causal is strict",
    "window shorter by one", "right of the window is ignored", "prefix is forgotten", "causality is ignored",
    "prefix beats causality", "sequences see each other", "derivative of the softcap", "boolean mask inverted",
    "mask twice", "mask in blocks", "mask of the first head", "large negatives are hidden", "ALiBi of a power of two",
    "softcap after the mask", "sinks are ignored", "empty rows", "largest is not subtracted", "lse without the sink",
    "lse to base 2", "lse of rows that see nothing", "dropout is not rescaled", "same dropout in every head",
    "hidden NaN leaks", "out of heads first", "no dropout in the backward pass", "delta is forgotten",
    "gradient through lse is ignored", "gradient through lse has the wrong sign", "dk without scale",
    "dv without dropout", "dq of k + q", "dv divided by the group", "mask's gradient scaled",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _each_answer_once(monkeypatch):
    """The same questions are asked again and again."""

    def remembered(rounded=None, **arguments):
        key = pickle.dumps(arguments)
        if key not in ANSWERS:
            ANSWERS[key] = attention_reference(**arguments, **({"rounded": rounded} if rounded else {}))
        return ANSWERS[key]

    monkeypatch.setattr(gg.attention_check, "attention_reference", remembered)


ANSWERS: dict = {}


def with_mistake(wrong):
    return lambda q, k, v, d, **options: attention(q, k, v, d, wrong=wrong, **options)


def test_a_right_implementation_passes_every_case():
    result = compare_attention(attention)
    assert result.passed, result
    assert not result.left_out and len(result.rows) == len(attention_cases())
    compared = {name for row in result.rows for name in row.errors}
    assert compared == {"out", "lse", "dq", "dk", "dv", "dmask", "dsinks"}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_is_caught(wrong):
    assert not all(compare_attention(with_mistake(wrong), [case]).passed for case in attention_cases())


def test_the_worst_case_comes_first():
    result = compare_attention(with_mistake("causal is strict"))
    excess = [row.excess for row in result.rows]
    assert excess == sorted(excess, reverse=True) and result.worst is result.rows[0]
    failed = [line.partition(" ")[2] for line in str(result).splitlines() if line.startswith("FAILED")]
    assert len(failed) == len(result.failed) > 0 and failed[0].startswith(result.worst.case.name)
    assert all("causal" in row.case.options for row in result.failed)


def test_what_goes_wrong_in_one_case_is_a_row():
    def capricious(q, k, v, d, **options):
        answer = attention(q, k, v, d, **options)
        if options.get("causal") == "top-left":
            raise RuntimeError("no kernel for this")
        if "window" in options:
            answer["dq"][0, 1, 0, 0] = np.nan
        if "mask" in options:
            answer["dk"] = answer["dk"][:, :1] if "dk" in answer else None
        if "scale" in options:
            q[...] = 0
        if "cu_seqlens_q" in options:
            answer["o"] = answer.pop("out")
        return answer

    result = compare_attention(capricious)
    problems = {row.case.name: row.problem for row in result.failed}
    assert problems["top-left"] == "RuntimeError: no kernel for this"
    assert problems["window"] == "dq: NaN in 1 of 640 elements, first at [0, 1, 0, 0]"
    assert problems["mask of each head"] == "dk: shape [2, 1, 9, 8], not [2, 2, 9, 8]"
    assert problems["scale"] == "ValueError: it wrote into its argument q"
    assert problems["packed"].startswith("ValueError: results o are none of out, lse")
    assert "64 x 64" not in problems and "dropout" not in problems
    for problem in problems.values():
        assert problem in str(result)


def test_results_may_be_an_array_a_tuple_or_a_dict():
    one = [AttentionCase(name="mine", H=4, HK=2, N=9, options={"scale": 0.3})]

    def names(fn):
        result = compare_attention(fn, one)
        assert result.passed, result
        return set(result.worst.errors)

    def answer(*args, **options):
        return attention_reference(*args, **options, dtype=np.float32)

    assert names(lambda *a, **o: answer(*a, **o).out) == {"out"}
    assert names(lambda *a, **o: (answer(*a, **o).out, None, answer(*a, **o).dq)) == {"out", "dq"}
    assert names(lambda *a, **o: answer(*a, **o).present()) == names(answer) == {"out", "lse", "dq", "dk", "dv"}
    assert not compare_attention(lambda *a, **o: {}, one).passed
    assert not compare_attention(lambda *a, **o: "nonsense", one).passed


def test_cases_that_need_what_is_left_out_are_left_out():
    without = {"mask", "sinks", "d_lse", "dropout_p", "cu_seqlens_q", "prefix", "HK", "M", "DV"}
    result = compare_attention(attention, without=without)
    assert len(result.rows) + len(result.left_out) == len(attention_cases())
    assert all(row.case.features.isdisjoint(without) for row in result.rows)
    assert all(case.features & without for case in result.left_out)
    assert f"{len(result.left_out)} left out" in str(result)
    with pytest.raises(ValueError, match=r"without=\['droput'\] must be of HK, M, DV|DV, HK, M"):
        compare_attention(attention, without="droput")
    with pytest.raises(ValueError, match="no case"):
        compare_attention(attention, [])


def test_in_half_precision_a_kernel_may_be_as_coarse_as_the_format():
    def half(q, k, v, d, **options):
        results = attention(q, k, v, d, **options)
        return {name: x if name == "lse" else x.astype(np.float16) for name, x in results.items()}

    result = compare_attention(half, dtype=np.float16)
    assert result.passed, result
    assert result.worst.excess > 0.2
    coarse = compare_attention(half, [row.case for row in result.rows if row.case.name == "64 x 64"])
    assert not coarse.passed
