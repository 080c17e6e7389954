"""Attention, forward and with its gradients, beside torch's and JAX's.

    python tests/bench/bench_attention.py [--seconds 3] [--threads 2] [--only full,causal,...] [--cpu] [--save FILE]

Needs the `bench` extra for the peers.  One process, interleaved calls, medians; everything in f32.  GFLOP/s count the
pairs of query and key that are seen: two products forward, five more backward.  A 2048 x 2048 x 2048 product of
NumPy's takes turns with the others, and says what the machine can do.  Then one thread beside several, and last the
memory that a long sequence takes.
Where other programs run, --cpu tells more: processor time, everybody on one thread.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

if "--cpu" in sys.argv:  # libraries ask once, when they are loaded
    os.environ |= {
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }

# isort: off
import harness  # before NumPy: it mends the environment
import numpy as np

import ggrad as gg
# isort: on

FORWARD, BACKWARD = 2, 5  # products
SGEMM = 2048


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    HK: int
    N: int
    D: int
    causal: bool = True
    window: int | None = None  # keys before the query's own, and that

    @property
    def pairs(self) -> int:
        """Of query and key that are seen, in all heads."""
        per_query = np.arange(1, self.N + 1) if self.causal else np.full(self.N, self.N)
        return self.B * self.H * int(np.minimum(per_query, (self.window or self.N) + 1).sum())

    def flops(self, products: int) -> float:
        return 2.0 * self.D * self.pairs * products

    def arrays(self) -> list[np.ndarray]:
        """q, k, v: [B, heads, N, D], and the gradient of the result, like q."""
        rng = np.random.default_rng(0)
        return [
            rng.standard_normal((self.B, heads, self.N, self.D), dtype=np.float32)
            for heads in (self.H, self.HK, self.HK, self.H)
        ]

    def __str__(self) -> str:
        what = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return f"B {self.B}, {self.H} heads, {self.HK} kv heads, N {self.N}, d {self.D}, {what}"


CASES = {
    "full": Case(1, 8, 8, 1024, 64, causal=False),
    "causal": Case(1, 8, 8, 1024, 64),
    "grouped": Case(1, 8, 2, 1024, 64),
    "batch": Case(4, 6, 6, 256, 64),
    "long": Case(1, 4, 4, 4096, 64),
    "wide": Case(1, 4, 4, 2048, 128),
    "window": Case(1, 8, 8, 4096, 64, window=256),
    "single": Case(1, 1, 1, 2048, 64),
    "short": Case(8, 4, 4, 64, 64),
    "thin": Case(8, 4, 4, 64, 16),
}


@dataclass(frozen=True)
class Contestant:
    forward: Callable[[], list]
    both: Callable[[], list]  # out, dq, dk, dv
    array: Callable[[Any, int], np.ndarray]  # number i of these results as [B, heads, N, D]


def ours(c: Case, threads: int) -> Contestant:
    q, k, v, d = c.arrays()
    options: dict = {"causal": c.causal} | ({"window": (c.window, 0)} if c.window else {})

    def call(*results: gg.Tensor) -> Callable[[], list]:
        graph = gg.Graph().build_forward_expand(*map(gg.set_output, results))

        def run() -> list:
            graph.compute(threads=threads)
            return list(results)

        return run

    out, lse = gg.flash_attn_ext(q, k, v, return_lse=True, **options)
    back = gg.flash_attn_back(q, k, v, None, np.swapaxes(d, 1, 2), out=out, lse=lse, **options)
    return Contestant(
        forward=call(gg.flash_attn_ext(q, k, v, **options)),
        both=call(out, *back.parts),
        array=lambda t, i: np.swapaxes(t.numpy(), 1, 2) if i == 0 else t.numpy(),
    )


def torchs(c: Case, threads: int) -> Contestant:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    *inputs, d = (torch.from_numpy(x) for x in c.arrays())
    trained = [x.clone().requires_grad_() for x in inputs]
    rule: dict = {"is_causal": c.causal}
    if c.window:
        i, j = torch.arange(c.N)[:, None], torch.arange(c.N)
        rule = {"attn_mask": (j <= i) & (j >= i - c.window)}

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, enable_gqa=c.HK != c.H, **rule)

    def forward() -> list:
        with torch.no_grad():
            return [attend(*inputs)]

    def both() -> list:
        out = attend(*trained)
        return [out, *torch.autograd.grad(out, trained, d)]

    return Contestant(forward, both, array=lambda x, i: x.detach().numpy())


def jaxs(c: Case) -> Contestant:
    import jax

    def attend(q, k, v):
        window = (c.window, 0) if c.window else None
        return jax.nn.dot_product_attention(q, k, v, is_causal=c.causal, local_window_size=window)

    def gradients(q, k, v, d):
        out, pull = jax.vjp(attend, q, k, v)
        return [out, *pull(d)]

    forward, both = jax.jit(attend), jax.jit(gradients)
    arrays = [jax.numpy.asarray(np.swapaxes(x, 1, 2)) for x in c.arrays()]  # [B, N, heads, D]
    return Contestant(
        forward=lambda: [forward(*arrays[:3]).block_until_ready()],
        both=lambda: [x.block_until_ready() for x in both(*arrays)],
        array=lambda x, i: np.swapaxes(np.asarray(x), 1, 2),
    )


def contestants(c: Case, threads: int) -> dict[str, Contestant]:
    """Those that are installed; they must agree."""
    made = {"ggrad": ours(c, threads)}
    for peer, make in (("torch", lambda: torchs(c, threads)), ("JAX", lambda: jaxs(c))):
        try:
            made[peer] = make()
        except ImportError as error:
            print(f"  {peer}: not here ({error})")
    results = {peer: [m.array(x, i) for i, x in enumerate(m.both())] for peer, m in made.items()}
    for peer, arrays in results.items():
        for a, b in zip(results["ggrad"], arrays, strict=True):
            error = np.linalg.norm(a - b) / np.linalg.norm(a)
            assert error < 1e-5, f"{c}: ggrad and {peer} are {error:.1e} apart"
    return made


def bench(name: str, c: Case, threads: int, seconds: float, clock: Callable[[], float]) -> None:
    made = contestants(c, threads)
    square = np.ones((SGEMM, SGEMM), np.float32)
    calls: dict[str, Callable[[], object]] = {"sgemm": lambda: square @ square}
    for peer, m in made.items():
        calls |= {f"{peer}, forward": m.forward, f"{peer}, both": m.both}
    times = harness.interleave(calls, seconds=seconds, clock=clock)

    def of(what: str) -> dict[str, list[float]]:
        return {peer: times[f"{peer}, {what}"] for peer in made}

    print(f"\n{name}: {c}")
    forward = harness.table(f"{name}, forward", of("forward"), work=c.flops(FORWARD))
    both = harness.table(f"{name}, forward and backward", of("both"), work=c.flops(FORWARD + BACKWARD))
    sgemm = 2.0 * SGEMM**3 / statistics.median(times["sgemm"])
    print(f"  share of a large product's {sgemm / 1e9:.1f} GFLOP/s, forward and backward:")
    shares = harness.recorded[f"{name}, share of a large product"] = {}
    for peer in made:  # the backward is what both take more than the forward
        first = shares[f"{peer}, forward"] = c.flops(FORWARD) / forward[peer] / sgemm
        second = shares[f"{peer}, backward"] = c.flops(BACKWARD) / (both[peer] - forward[peer]) / sgemm
        print(f"  {peer:<22}{first:>10.2f}{second:>10.2f}")


def scaling(threads: int, seconds: float) -> None:
    """A causal case on one thread and on several, forward and backward."""
    c = CASES["causal"]
    calls = {f"{n} thread{'s' * (n > 1)}": ours(c, n).both for n in (threads, 1)}
    harness.table("causal, forward and backward, by threads", harness.interleave(calls, seconds=seconds))


def memory() -> None:
    c = Case(1, 4, 4, 16384, 64)
    q, k, v = (gg.tensor(shape=(c.B, c.H, c.N, c.D), name=name, param=True) for name in "qkv")
    out = gg.flash_attn_ext(q, k, v, causal=True)
    loss = gg.sum(out * gg.tensor(shape=out.shape, name="d"))
    plan = gg.Graph().build_forward_expand(loss).build_backward_expand().plan()
    inputs = q.nbytes + k.nbytes + v.nbytes + out.nbytes  # d is as large as out
    more = plan.total(threads=2) - inputs
    print(f"\nmemory, forward and backward: {c}\n{plan}")
    print(
        f"q, k, v and d: {inputs / 2**20:.0f} MiB; all that a run on two threads adds, its results included: "
        f"{more / 2**20:.0f} MiB, {more / inputs:.2f} times as much; a score for each pair: {c.H * c.N**2 >> 18} MiB"
    )


def main() -> None:
    parts = (*CASES, "threads", "memory")
    parser = harness.parser(__doc__, seconds=3, only=",".join(parts))
    parser.add_argument("--cpu", action="store_true", help="processor time, on one thread")
    args = parser.parse_args()
    only = args.only.split(",")
    threads, clock = (1, time.process_time) if args.cpu else (args.threads, time.perf_counter)
    if not {*only} <= {*parts}:
        parser.error(f"--only {args.only}: choose from {', '.join(parts)}")
    print(gg.show_config())
    print("processor time, one thread" if args.cpu else f"{threads} threads")
    for name, c in CASES.items():
        if name in only:
            bench(name, c, threads, args.seconds, clock)
    if "threads" in only and not args.cpu:
        scaling(threads, args.seconds)
    if "memory" in only:
        memory()
    harness.save(args.save)


if __name__ == "__main__":
    main()
