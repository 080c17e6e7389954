"""Attention for random shapes and options: the answer of double precision, and the same bits however it is run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggrad as gg
from ggrad.testing import attention_reference, compare_attention, visible_pairs

pytestmark = pytest.mark.native
TOLERANCE = 2e-6  # relative norm of the error of f32 results
ROUNDING = 2.0**-24  # of f32, relative
DROPOUT = ("dropout_p", "seed")  # its words tell sequences and heads apart
EDGES = [
    1,
    2,
    5,
    7,
    15,
    16,
    17,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    95,
    96,
    97,
    127,
    129,
    193,
    257,
    530,
]  # round sizes of tiles


def attend(q, k, v, d=None, *, mask=None, sinks=None, d_lse=None, threads=2, **options):
    """All results by name, of a graph whose memory held NaN; where `d` or `d_lse` is given with all gradients."""
    leaves = {"q": gg.tensor(q, param=True), "k": gg.tensor(k, param=True), "v": gg.tensor(v, param=True)}
    if mask is not None:
        leaves["mask"] = mask if mask.dtype == bool else gg.tensor(mask, param="max_bias" not in options)
    if sinks is not None:
        leaves["sinks"] = gg.tensor(sinks, param=True)
    out, lse = gg.flash_attn_ext(**leaves, return_lse=True, **options)
    graph = gg.Graph().build_forward_expand(gg.set_output(out), gg.set_output(lse))
    terms = [gg.sum(x * gg.tensor(dx)) for x, dx in ((out, d), (lse, d_lse)) if dx is not None]
    if terms:
        graph.build_backward_expand(terms[0] if len(terms) == 1 else terms[0] + terms[1])
    graph.prepared("native").poison(threads)
    graph.compute(threads=threads)
    results = {"out": out, "lse": lse}
    for name, leaf in leaves.items():
        if terms and isinstance(leaf, gg.Tensor):
            results[f"d{name}"] = graph.grad(leaf)
    return {name: t.numpy().copy() for name, t in results.items() if t is not None}


def require_same_bits(a, b, what):
    for name in a.keys() & b.keys():
        assert a[name].tobytes() == b[name].tobytes(), f"{name}: other bits {what}"


class Problem:
    """Arrays (q, k, v and d) and options, which print as what they were drawn from."""

    def __init__(self, arrays, options, seed):
        self.arrays, self.options, self.seed = arrays, options, seed

    def __repr__(self):
        def shown(x):
            return f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) and x.dtype != np.int32 else x

        return f"Problem({ {name: shown(x) for name, x in (self.arrays | self.options).items()} }, seed {self.seed})"

    def without(self, *names):
        return Problem(self.arrays, {name: x for name, x in self.options.items() if name not in names}, self.seed)


@st.composite
def sequences(draw):
    """Options that say which keys a query sees by its place."""
    options = {}
    causal = draw(st.sampled_from([None, "top-left", "bottom-right", True]))
    if causal:
        options["causal"] = causal
    if draw(st.booleans()):
        bound = st.integers(-1, 40)
        options["window"] = (draw(bound), draw(bound))
        if draw(st.booleans()):
            options["prefix"] = draw(st.integers(0, 20))
    return options


@st.composite
def problems(draw, packed=None, masked=True, batch=None):
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    packed = draw(st.booleans()) if packed is None else packed
    N, M = draw(st.sampled_from(EDGES)), draw(st.sampled_from(EDGES))
    few = N * M > 20000
    B = 1 if packed else batch or draw(st.integers(1, 2 if few else 3))
    HK, group = draw(st.integers(1, 1 if few else 3)), draw(st.sampled_from([1, 2] if few else [1, 2, 3, 4]))
    H = HK * group
    size = st.sampled_from([1, 3, 4, 8, 15, 16, 17, 32, 40, 64])
    DK, DV = draw(size), draw(size)
    spread = draw(st.sampled_from([0.1, 1.0, 3.0]))

    def normal(*shape):
        return (spread * rng.standard_normal(shape)).astype(np.float32)

    options = draw(sequences())
    if packed:
        n = draw(st.integers(1, 5))
        for name, length in (("cu_seqlens_q", N), ("cu_seqlens_k", M)):
            cuts = sorted(draw(st.lists(st.integers(0, length), min_size=n, max_size=n)))
            options[name] = np.array([0, *cuts], np.int32)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.05, 0.3, 1.0]))
    if draw(st.booleans()):
        options["logit_softcap"] = draw(st.sampled_from([0.7, 5.0, 50.0]))
    if draw(st.booleans()):
        options["sinks"] = normal(H)
    if draw(st.booleans()):
        options |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9])), "seed": draw(st.integers(0, 2**31 - 1))}
    if draw(st.booleans()):
        options["d_lse"] = normal(B, H, N)
    if masked and draw(st.booleans()):
        Bm = draw(st.sampled_from([b for b in range(1, B + 1) if B % b == 0]))
        Hm = draw(st.sampled_from([h for h in range(1, H + 1) if H % h == 0]))
        shape = draw(st.sampled_from([(N, M), (N + 3, M), (Hm, N, M), (Bm, Hm, N, M)]))
        kept = rng.random(shape) < draw(st.sampled_from([0.1, 0.7, 1.0]))
        kind = draw(st.sampled_from([bool, np.float32, np.float16]))
        options["mask"] = kept if kind is bool else np.where(kept, normal(*shape), -np.inf).astype(kind)
    arrays = {"q": normal(B, H, N, DK), "k": normal(B, HK, M, DK), "v": normal(B, HK, M, DV)}
    return Problem(arrays | {"d": rng.standard_normal((B, N, H, DV), dtype=np.float32)}, options, seed)


def tolerances(p):
    """What results may be off: a share of their norm, and of those that cancel the roundings of their terms.

    A weight p is the exponential of a score, and off by a rounding of the score's terms.  ds = p (dp - D) is the
    difference of two numbers of about the size T = |d| |v| / sqrt(DV) + |d_lse|, which are equal in a row that sees
    one key, or in effect one: f32 is off by some roundings of T there (they are sums of up to 64 products), however
    small ds is.  dv sums p d over the queries, whose signs differ.
    """
    q, k, v, d = (p.arrays[name].astype(np.float64) for name in "qkvd")
    (_, H, _, DK), HK, DV = q.shape, k.shape[1], v.shape[3]
    options = p.without("d_lse", *DROPOUT).options
    scale = options.get("scale", DK**-0.5)
    score = scale * np.linalg.norm(q, axis=3).max() * np.linalg.norm(k, axis=3).max()
    for name in ("mask", "sinks"):
        added = options.get(name, np.zeros(1))
        score += np.abs(added[np.isfinite(added)]).max(initial=0)

    largest_v = np.linalg.norm(v, axis=3).max(axis=2).repeat(H // HK, axis=1)  # [B, H]
    kept = 1 - p.options.get("dropout_p", 0)
    T = np.linalg.norm(d, axis=3) * largest_v[:, None] * DV**-0.5 / kept
    if "d_lse" in p.options:
        T += np.abs(p.options["d_lse"]).swapaxes(1, 2)  # [B, N, H]
    summed = attention_reference(q, k, np.abs(k), T[..., None] * np.abs(q).swapaxes(1, 2), **options)
    dv = attention_reference(q, k, v, np.abs(d) / kept, **options).dv
    terms = {"dv": dv, "dq": scale * T[..., None] * summed.out, "dk": scale * summed.dv, "dmask": T, "dsinks": T}
    return max(TOLERANCE, score * ROUNDING), {
        name: (4 + score) * ROUNDING * np.linalg.norm(x) for name, x in terms.items()
    }


def require_close(got, p):
    exact = attention_reference(**p.arrays, **p.options).present()
    share, roundings = tolerances(p)
    assert got.keys() == exact.keys()
    for name, expected in exact.items():
        assert got[name].shape == expected.shape
        seen = np.isfinite(expected)
        assert (np.isfinite(got[name]) == seen).all() and not np.isnan(got[name]).any(), name
        error, size = np.linalg.norm(got[name][seen] - expected[seen]), np.linalg.norm(expected[seen])
        assert error <= max(share * size, roundings.get(name, 0.0)), f"{name}: {error / (size or 1):.1e}"


@settings(max_examples=120)
@given(problems())
def test_results_and_gradients_are_those_of_double_precision_on_any_number_of_threads(p):
    first = attend(**p.arrays, **p.options, threads=1)
    require_close(first, p)
    for threads in (2, 3, 7):
        require_same_bits(first, attend(**p.arrays, **p.options, threads=threads), f"with {threads} threads")


def test_every_case_for_authors_of_kernels_passes():
    result = compare_attention(attend)
    assert result.passed, result
    assert not result.left_out
    compared = {name for row in result.rows for name in row.errors}
    assert compared == {"out", "lse", "dq", "dk", "dv", "dmask", "dsinks"}


def rows(p, b, queries, keys):
    """One sequence of a problem, by itself."""
    arrays = {
        "q": p.arrays["q"][b : b + 1, :, queries],
        "k": p.arrays["k"][b : b + 1, :, keys],
        "v": p.arrays["v"][b : b + 1, :, keys],
        "d": p.arrays["d"][b : b + 1, queries],
    }
    options = {name: x for name, x in p.options.items() if not name.startswith("cu_seqlens")}
    if "d_lse" in options:
        options["d_lse"] = options["d_lse"][b : b + 1, :, queries]
    return attend(**arrays, **options, threads=1)


def part(results, b, queries, keys):
    """The same sequence's share of results.  The gradient of sinks is a sum over all."""
    queries_of = {"out": (b, queries), "lse": (b, slice(None), queries), "dq": (b, slice(None), queries)}
    places = queries_of | {"dk": (b, slice(None), keys), "dv": (b, slice(None), keys)}
    return {name: results[name][place] for name, place in places.items()}


@settings(max_examples=30)
@given(problems(packed=True, masked=False))
def test_a_sequence_gives_the_same_bits_packed_and_alone(p):
    p = p.without(*DROPOUT)
    together = attend(**p.arrays, **p.options)
    cu_q, cu_k = p.options["cu_seqlens_q"], p.options["cu_seqlens_k"]
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        at = 0, slice(int(q0), int(q1)), slice(int(k0), int(k1))
        require_same_bits(part(together, *at), rows(p, *at), "alone")


@settings(max_examples=30)
@given(problems(packed=False, masked=False, batch=3))
def test_a_sequence_gives_the_same_bits_in_a_batch_packed_and_alone(p):
    everything = slice(None)
    B, _, N, _ = p.arrays["q"].shape
    M = p.arrays["k"].shape[2]
    batch = attend(**p.arrays, **p.options)

    def end_to_end(x, axis):
        return np.concatenate(np.split(x, B), axis=axis)

    arrays = {name: end_to_end(x, 1 if name == "d" else 2) for name, x in p.arrays.items()}
    options = p.options | {"cu_seqlens_q": N * np.arange(B + 1), "cu_seqlens_k": M * np.arange(B + 1)}
    if "d_lse" in options:
        options["d_lse"] = end_to_end(options["d_lse"], 2)
    packed = attend(**arrays, **options)  # with dropout too, whose words count queries and keys within sequences
    for b in range(B):
        of_pack = part(packed, 0, slice(b * N, (b + 1) * N), slice(b * M, (b + 1) * M))
        require_same_bits(part(batch, b, everything, everything), of_pack, "packed")
    p = p.without(*DROPOUT)
    batch = attend(**p.arrays, **p.options)
    require_same_bits(part(batch, 1, everything, everything), rows(p, 1, everything, everything), "alone")


@settings(max_examples=30)
@given(problems(packed=False))
def test_what_nobody_sees_changes_no_bit(p):
    _, _, N, _ = p.arrays["q"].shape
    M = p.arrays["k"].shape[2]
    rules = {name: p.options[name] for name in ("causal", "window", "prefix") if name in p.options}
    seen = visible_pairs(N, M, **rules)
    mask = p.options.get("mask")
    if mask is not None:
        kept = mask if mask.dtype == bool else mask != -np.inf
        seen = seen & kept.reshape(-1, *kept.shape[-2:])[:, :N].any(axis=0)
    clean = attend(**p.arrays, **p.options)
    dirty = {name: x.copy() for name, x in p.arrays.items()}
    keys, queries = ~seen.any(axis=0), ~seen.any(axis=1)
    dirty["k"][:, :, keys], dirty["v"][:, :, keys] = np.nan, np.inf
    dirty["q"][:, :, queries], dirty["d"][:, queries] = -np.inf, np.nan
    require_same_bits(clean, attend(**dirty, **p.options), "with garbage where nobody looks")


@settings(max_examples=20)
@given(problems(packed=False, masked=False, batch=2))
def test_a_kv_head_gives_the_same_bits_alone_and_among_others(p):
    p = p.without(*DROPOUT)
    together = attend(**p.arrays, **p.options, threads=3)
    HK = p.arrays["k"].shape[1]
    group = p.arrays["q"].shape[1] // HK
    kv, heads = slice(HK - 1, HK), slice((HK - 1) * group, HK * group)
    axes = {"q": heads, "k": kv, "v": kv}
    arrays = {name: p.arrays[name][:, at] for name, at in axes.items()} | {"d": p.arrays["d"][:, :, heads]}
    options = p.options | {name: x[heads] for name, x in p.options.items() if name == "sinks"}
    if "d_lse" in options:
        options["d_lse"] = options["d_lse"][:, heads]
    alone = attend(**arrays, **options, threads=1)
    share = {"out": together["out"][:, :, heads], "lse": together["lse"][:, heads], "dq": together["dq"][:, heads]}
    require_same_bits(share | {"dk": together["dk"][:, kv], "dv": together["dv"][:, kv]}, alone, "alone")


def test_a_long_causal_sequence_takes_memory_in_proportion_to_its_length():
    def planned(N):
        q, k, v = (gg.tensor(shape=(1, 4, N, 64), param=True) for _ in range(3))
        out = gg.flash_attn_ext(q, k, v, causal=True)
        loss = gg.sum(out * gg.tensor(shape=out.shape))
        plan = gg.Graph().build_forward_expand(loss).build_backward_expand().plan()
        return plan.total(threads=2), 4 * q.nbytes  # q, k, v, and the gradient of out

    total, inputs = planned(16384)
    # Four inputs, out and its product with d, three gradients, and what the kernels keep of each row and tile.
    assert total < 4 * inputs + inputs // 2
    assert planned(32768)[0] < 2.1 * total
