"""Sequences cut over ranks: attention and KDA, values and gradients as of one process."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.distributed import Comm, attention, kda, positions, simulate

GOLDEN = Path(os.environ.get("GGRAD_GOLDEN", Path(__file__).parent / "golden")) / "kda"
B, H, HK, N, DK, DV = 2, 4, 2, 24, 8, 6


def inputs(B, N=N):
    rng = np.random.default_rng(0)
    shapes = (B, H, N, DK), (B, HK, N, DK), (B, HK, N, DV), (B, N, H, DV)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def on_ranks(comm, *, batch=B, cu=None, sinks=None, **options):
    """This rank's tokens: which they are, out, dq, dk, dv and the gradient of the sinks."""
    Q, K, V, D = inputs(batch)
    at = positions(N, comm, options.get("layout", "rows"))
    q, k, v = (gg.tensor(x[:, :, at], param=True) for x in (Q, K, V))
    if cu is not None:
        options["cu_seqlens"] = gg.tensor(np.array(cu, np.int32))
    s = gg.tensor(np.array(sinks, np.float32), param=True) if sinks is not None else None
    out = attention(q, k, v, comm, sinks=None if s is None else gg.replicated(s, comm), **options)
    loss = gg.sum(out * gg.tensor(D[:, at]))
    g = gg.Graph().build_forward_expand(out).build_backward_expand(loss).compute(threads=1)
    grads = [g.grad(x).numpy().copy() for x in ((q, k, v) if s is None else (q, k, v, s))]
    return at, [out.numpy().copy(), *grads]


def joined(ranks):
    """The whole arrays."""
    parts = [made for _, made in ranks]
    order = np.argsort(np.concatenate([at for at, _ in ranks]))
    whole = [np.concatenate([p[i] for p in parts], 1 if i == 0 else 2) for i in range(4)]
    whole = [np.take(x, order, 1 if i == 0 else 2) for i, x in enumerate(whole)]
    return whole + [parts[0][i] for i in range(4, len(parts[0]))]


def of_one(*, batch=B, cu=None, sinks=None, causal=True, **options):
    for name in ("layout", "ring"):
        options.pop(name, None)
    Q, K, V, D = inputs(batch)
    q, k, v = (gg.tensor(x, param=True) for x in (Q, K, V))
    s = gg.tensor(np.array(sinks, np.float32), param=True) if sinks is not None else None
    if cu is not None:
        options |= {name: gg.tensor(np.array(cu, np.int32)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    out = gg.flash_attn_ext(q, k, v, causal=causal or None, sinks=s, **options)
    g = gg.Graph().build_forward_expand(out).build_backward_expand(gg.sum(out * gg.tensor(D))).compute(threads=1)
    return [out.numpy(), *(g.grad(x).numpy() for x in ((q, k, v) if s is None else (q, k, v, s)))]


SINKS = [0.3, -1.0, 2.0, 0.0]
CASES = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": (5, 0)},
    "window, open to the left": {"window": (-1, 0)},
    "window on both sides": {"window": (4, 3), "causal": False},
    "window to the right": {"window": (2, -1), "causal": False},
    "window, first keys always": {"window": (3, 0), "prefix": 2},
    "softcap and scale": {"logit_softcap": 2.0, "scale": 0.6},
    "sinks": {"sinks": SINKS},
    "packed": {"batch": 1, "cu": [0, 5, 5, 17, 24]},
    "packed, with a window": {"batch": 1, "cu": [0, 1, 13, 24], "window": (3, 0)},
    "packed, all keys": {"batch": 1, "cu": [0, 9, 11, 23], "causal": False},
    "ring": {"ring": True},
    "ring, all keys": {"ring": True, "causal": False},
    "ring, softcap and sinks": {"ring": True, "logit_softcap": 2.0, "sinks": SINKS},
}


@pytest.mark.parametrize("layout", ["rows", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_attention_over_ranks_is_that_of_one(name, size, layout):
    options = {**CASES[name], "layout": layout}
    want = of_one(**options)
    got = joined(simulate(size, lambda c: on_ranks(c, **options)))
    assert len(got) == len(want)
    for what, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), got, want, strict=False):
        assert np.abs(a - b).max() < 2e-6 * np.abs(b).max() + 1e-6, what  # other blocks of keys, summed in f32


def test_packed_sequences_may_change_from_run_to_run():
    def program(comm):
        Q, K, V, _ = inputs(1)
        at = positions(N, comm)
        cu = gg.tensor(shape=(4,), dtype=gg.I32)
        out = attention(*(gg.tensor(x[:, :, at]) for x in (Q, K, V)), comm, cu_seqlens=cu)
        graph = gg.Graph().build_forward_expand(out)
        made = []
        for lengths in ([0, 5, 9, 24], [0, 20, 21, 24]):
            cu.set(np.array(lengths, np.int32))
            made.append(graph.compute(threads=1) and out.numpy().copy())
        return made

    ranks = simulate(3, program)
    for i, lengths in enumerate(([0, 5, 9, 24], [0, 20, 21, 24])):
        assert np.allclose(np.concatenate([r[i] for r in ranks], 1), of_one(batch=1, cu=lengths)[0], atol=1e-5)


def test_which_tokens_a_rank_has():
    class Two(Comm):
        def __init__(self, rank):
            super().__init__(rank, (0, 1))

    assert positions(8, Two(0)).tolist() == [0, 1, 2, 3] and positions(8, Two(1)).tolist() == [4, 5, 6, 7]
    assert positions(8, Two(0), "zigzag").tolist() == [0, 1, 6, 7]
    assert positions(8, Two(1), "zigzag").tolist() == [2, 3, 4, 5]
    with pytest.raises(gg.errors.ShapeError, match="6 tokens cannot be cut into 4 equal chunks"):
        positions(6, Two(0), "zigzag")


def test_what_is_refused():
    x = gg.tensor(np.zeros((1, 1, 3, 2)))
    for options, message in (
        ({"layout": "columns"}, "layout must be"),
        ({"layout": "zigzag"}, "cannot be halved"),
        ({"ring": True, "window": (1, 0)}, "gather the keys"),
        ({"cu_seqlens": gg.tensor(np.array([0, 3])), "window": (1, 1), "causal": False}, "are causal"),
    ):
        with pytest.raises(gg.errors.ShapeError, match=message):
            attention(x, x, x, Comm(), **options)
    with pytest.raises(gg.errors.ShapeError, match="must rise from 0 to 3"):
        y = gg.tensor(np.zeros((1, 3, 1, 2)))
        kda(y, y, y, y, gg.tensor(np.zeros((1, 3, 1))), Comm(), cu_seqlens=np.array([0, 2]))


@pytest.mark.parametrize("case", sorted(path.stem for path in GOLDEN.glob("cp_kda_*.npz")))
def test_kda_over_ranks_has_the_values_of_the_golden_files(case):
    """Of flash-linear-attention's own context parallelism, in double precision: outputs, gradients, states."""
    file = np.load(GOLDEN / f"{case}.npz")
    ranks = json.loads(str(file["config"]))["world_size"]
    cu = file["cu_seqlens"]

    def program(comm):
        T = file["q"].shape[1] // comm.size
        mine = slice(comm.rank * T, (comm.rank + 1) * T)
        leaves = [gg.tensor(file[n][:, mine], name=n, param=True) for n in ("q", "k", "v", "g", "beta")]
        o = kda(*leaves, comm, cu_seqlens=cu)
        loss = gg.sum(o * gg.tensor(file["do"][:, mine]))
        graph = gg.Graph().build_forward_expand(o).build_backward_expand(loss).compute(threads=1)
        return {"o": o.numpy().copy()} | {"d" + x.name: graph.grad(x).numpy().copy() for x in leaves}

    made = simulate(ranks, program)
    for name in made[0]:
        want = file[name]
        got = np.concatenate([m[name] for m in made], 1)
        assert np.abs(got - want).max() < 2e-5 * np.abs(want).max(), name


@pytest.mark.parametrize("cu", [None, [0, 40, 48, 60]])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_kda_over_ranks_is_that_of_one(size, cu):
    T, K, V, batch = 60, 5, 4, 1 if cu else 2
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(batch, T, 2, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, do = (rng.normal(size=(batch, T, 2, V)) for _ in range(2))
    g, beta = rng.uniform(-0.5, 0, (batch, T, 2, K)), rng.uniform(0, 1, (batch, T, 2))

    def program(comm):
        n = T // comm.size
        mine = slice(comm.rank * n, (comm.rank + 1) * n)
        leaves = [gg.tensor(x[:, mine], param=True) for x in (q, k, v, g, beta)]
        o = kda(*leaves, comm, cu_seqlens=cu) if comm.size > 1 else gg.kda(*leaves, cu_seqlens=cu)
        o = o[0] if isinstance(o, tuple) else o
        loss = gg.sum(o * gg.tensor(do[:, mine]))
        graph = gg.Graph().build_forward_expand(o).build_backward_expand(loss).compute(threads=1)
        return [o.numpy().copy(), *(graph.grad(x).numpy().copy() for x in leaves)]

    want, made = program(Comm()), simulate(size, program)
    for i, whole in enumerate(want):
        got = np.concatenate([m[i] for m in made], 1)
        assert np.abs(got - whole).max() < 2e-5 * np.abs(whole).max(), i
