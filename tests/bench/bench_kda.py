"""Kimi Delta Attention, forward and with its gradients, beside flash-linear-attention's CPU code and our own attention.

    python tests/bench/bench_kda.py [--seconds 3] [--threads 2] [--only short,long,wide,batch,flat]
                                     [--save FILE]

Needs torch, einops and fla-core for the peer, whose chunked form in plain torch is the only one of it that runs on a
CPU.  It takes up to minutes a call, so it has a turn of its own, at least one call, and takes part where its
length allows.  Everything else is interleaved in one process; medians; f32.  FLOP/s count the products of the chunked
form with C = 64, triangles as half of their squares, and nothing that is computed again; a 2048 x 2048 x 2048 product
of NumPy's takes turns with the others, and says what the machine can do.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# isort: off
import harness  # before NumPy: it mends the environment
import numpy as np

import ggrad as gg
# isort: on

SGEMM = 2048
C = 64  # tokens of a chunk


@dataclass(frozen=True)
class Case:
    B: int
    T: int
    H: int
    K: int
    V: int

    @property
    def tokens(self) -> int:
        return self.B * self.T * self.H

    def flops(self) -> tuple[float, float]:
        """Forward; backward."""
        pairs, values, state = C * self.K, C * self.V, 2 * self.K * self.V
        forward = 2 * pairs + C * C / 3 + 3 * state + 2 * values
        backward = 6 * state + 4 * values + 4 * pairs
        return self.tokens * forward, self.tokens * backward

    def arrays(self) -> list[np.ndarray]:
        """q, k, v, g, beta, do: as a layer would give them."""
        rng = np.random.default_rng(0)
        shape = (self.B, self.T, self.H)
        q, k = (rng.standard_normal((*shape, self.K)) for _ in range(2))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        g, beta = -rng.uniform(0, 0.1, (*shape, self.K)), rng.uniform(0, 1, shape)
        v, do = (rng.standard_normal((*shape, self.V)) for _ in range(2))
        return [x.astype(np.float32) for x in (q, k, v, g, beta, do)]

    def __str__(self) -> str:
        return f"B {self.B}, T {self.T}, {self.H} heads, K {self.K}, V {self.V}"


CASES = {
    "short": Case(1, 2048, 4, 64, 64),
    "long": Case(1, 8192, 4, 64, 64),
    "wide": Case(1, 8192, 4, 128, 128),
    "batch": Case(4, 1024, 8, 64, 64),
}
FLAT = [1024, 4096, 16384, 65536]


def graph_of(result: gg.Tensor, do: np.ndarray, *, gradients: bool) -> gg.Graph:
    graph = gg.Graph().build_forward_expand(result)
    return graph.build_backward_expand(gg.sum(result * gg.tensor(do))) if gradients else graph


def ours(c: Case, *, gradients: bool, keep: bool = False) -> gg.Graph:
    *inputs, do = c.arrays()
    leaves = [gg.tensor(x, param=gradients) for x in inputs]
    return graph_of(gg.kda(*leaves, disable_recompute=keep), do, gradients=gradients)


def attention(c: Case, *, gradients: bool) -> gg.Graph:
    q, k, v, *_, do = c.arrays()
    leaves = [gg.tensor(np.swapaxes(x, 1, 2).copy(), param=gradients) for x in (q, k, v)]
    return graph_of(gg.flash_attn_ext(*leaves, causal=True), do, gradients=gradients)


def peer(c: Case, threads: int) -> Callable[[bool], list[np.ndarray]] | None:
    """flash-linear-attention's chunked form in torch: o, and the gradients of q, k, v, g and beta."""
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        print("  fla-core: not here")
        return None
    try:  # the file alone: the package asks for a GPU's compiler
        path = Path(found.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
        spec = importlib.util.spec_from_file_location("fla_kda_naive", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        import torch
    except ImportError as error:
        print(f"  fla-core: not here ({error})")
        return None
    torch.set_num_threads(threads)
    *inputs, do = (torch.from_numpy(x) for x in c.arrays())

    def call(gradients: bool) -> list[np.ndarray]:
        leaves = [x.clone().requires_grad_(gradients) for x in inputs]
        with torch.set_grad_enabled(gradients):
            o, _ = module.naive_chunk_kda(*leaves)
        more = torch.autograd.grad(o, leaves, do) if gradients else ()
        return [x.detach().numpy() for x in (o, *more)]

    return call


def check(graph: gg.Graph, theirs: list[np.ndarray]) -> None:
    got = [graph.roots[0], *(graph.grad(p) for p in graph.params)]
    for t, wanted in zip(got, theirs, strict=True):
        error = np.linalg.norm(t.numpy() - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, f"ggrad and fla-core are {error:.1e} apart"


def timed_peer(c: Case, threads: int, both: gg.Graph, seconds: float) -> list[float]:
    """Seconds of its calls with gradients; its results must be ours."""
    call = peer(c, threads)
    times: list[float] = []
    while call is not None and (not times or sum(times) < seconds):
        start = time.perf_counter()
        results = call(True)
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            check(both, results)
    return times


def bench(name: str, c: Case, threads: int, seconds: float, *, beside_peer: bool) -> None:
    square = np.ones((SGEMM, SGEMM), np.float32)
    forward, backward = c.flops()
    medians = {}
    for what, work in (("forward", forward), ("forward and backward", forward + backward)):
        gradients = what != "forward"
        graphs = {"kda": ours(c, gradients=gradients)}
        if gradients:
            graphs["kda, nothing twice"] = ours(c, gradients=True, keep=True)
        graphs["causal attention"] = attention(c, gradients=gradients)
        calls: dict[str, Callable[[], object]] = {
            title: lambda graph=graph: graph.compute(threads=threads) for title, graph in graphs.items()
        }
        times = harness.interleave({**calls, "sgemm": lambda: square @ square}, seconds=seconds)
        sgemm = 2.0 * SGEMM**3 / statistics.median(times.pop("sgemm"))
        slow = timed_peer(c, threads, graphs["kda"], seconds) if gradients and beside_peer else []
        print(f"\n{name}: {c}")
        medians = harness.table(f"{name}, {what}", times | ({"fla-core, torch": slow} if slow else {}), work=work)
        shares = {title: work / s / sgemm for title, s in medians.items() if title.startswith("kda")}
        harness.recorded[f"{name}, {what}, share of a large product"] = shares
        print(f"  a product of NumPy: {sgemm / 1e9:.1f} GFLOP/s; share of that:", end=" ")
        print(", ".join(f"{title} {share:.2f}" for title, share in shares.items()))


def flat(threads: int, seconds: float) -> None:
    """Time for a token by the length of the sequence."""
    graphs = {T: ours(Case(1, T, 4, 64, 64), gradients=True) for T in FLAT}
    calls: dict[str, Callable[[], object]] = {
        f"T {T}": lambda graph=graph: graph.compute(threads=threads) for T, graph in graphs.items()
    }
    times = harness.interleave(calls, seconds=seconds)
    each = {name: [s / int(name[2:]) for s in t] for name, t in times.items()}
    harness.table("forward and backward of a token, 4 heads, K 64, V 64", each, unit=1e-6, symbol="us")


def main() -> None:
    parser = harness.parser(__doc__, seconds=3, only=",".join((*CASES, "flat")))
    parser.add_argument("--peer", default="short,wide", help="cases in which fla-core takes part; it is slow")
    args = parser.parse_args()
    only = args.only.split(",")
    if not {*only} <= {*CASES, "flat"}:
        parser.error(f"--only {args.only}: choose from {', '.join((*CASES, 'flat'))}")
    print(gg.show_config())
    for name, c in CASES.items():
        if name in only:
            bench(name, c, args.threads, args.seconds, beside_peer=name in args.peer.split(","))
    if "flat" in only:
        flat(args.threads, args.seconds)
    harness.save(args.save)


if __name__ == "__main__":
    main()
