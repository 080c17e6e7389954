"""What each thread is worth: the same work on 1, 2, 4, ... threads, ggrad beside torch.

    python tests/bench/bench_scaling.py [--seconds 2] [--threads 16] [--profile] [--save FILE]
                                         [--only tiny,small,attention,kda4,kda32,products,thin]

Needs torch for the peer.  One process, interleaved calls, medians; a row for each number of threads, up to --threads,
with the speed as a multiple of one thread's.  --profile says of each step how busy its threads were, and which ops
took the time on one thread and on all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

# isort: off
import harness  # before NumPy: it mends the environment
import bench_attention
import bench_kda
import gpt
import numpy as np

import ggrad as gg
# isort: on

Call = Callable[[int], object]  # with so many threads

ATTENTION = bench_attention.Case(1, 16, 16, 2048, 64)


def training_step(c: gpt.Config) -> dict[str, Call]:
    ours = gpt.ggrad_step(c, 1)

    def step(threads: int) -> None:
        ours.graph.compute(threads=threads)
        ours.optimizer.step()

    step.graph = ours.graph
    return {"ggrad": step, **beside_torch(lambda: gpt.torch_step(c, 1))}


def beside_torch(make: Callable[[], Callable[[], object]]) -> dict[str, Call]:
    try:
        import torch

        call = make()
    except ImportError as error:
        print(f"  torch: not here ({error})")
        return {}

    def on(threads: int) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        call()

    return {"torch": on}


def computing(graph: gg.Graph) -> Call:
    def on(threads: int) -> None:
        graph.compute(threads=threads)

    on.graph = graph
    return on


def attention() -> dict[str, Call]:
    """Forward and backward, causal."""
    q, k, v, do = ATTENTION.arrays()
    leaves = [gg.tensor(x, param=True) for x in (q, k, v)]
    out = gg.flash_attn_ext(*leaves, causal="top-left")
    graph = (
        gg.Graph()
        .build_forward_expand(out)
        .build_backward_expand(gg.sum(out * gg.tensor(np.swapaxes(do, 1, 2).copy())))
    )

    def peer():
        import torch

        leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, v)]
        dout = torch.from_numpy(do)

        def call():
            y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            torch.autograd.grad(y, leaves, dout)

        return call

    return {"ggrad": computing(graph), **beside_torch(peer)}


def kda(heads: int) -> dict[str, Call]:
    return {"ggrad": computing(bench_kda.ours(bench_kda.Case(1, 8192, heads, 64, 64), gradients=True))}


def product(m: int, n: int, k: int) -> dict[str, Call]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((n, k), dtype=np.float32)
    graph = gg.Graph().build_forward_expand(gg.mul_mat(gg.tensor(b), gg.tensor(a)))

    def peer():
        import torch

        s, t, into = torch.from_numpy(a), torch.from_numpy(b).T, torch.empty(m, n)
        return lambda: torch.matmul(s, t, out=into)

    return {"ggrad": computing(graph), **beside_torch(peer)}


WORK: dict[str, Callable[[], dict[str, Call]]] = {
    "tiny": lambda: training_step(gpt.TINY),
    "small": lambda: training_step(gpt.SMALL),
    "attention": attention,
    "kda4": lambda: kda(4),
    "kda32": lambda: kda(32),
    "products": lambda: product(2048, 2048, 2048),
    "thin": lambda: product(64, 1024, 1024),
}


def measure(name: str, most: int, seconds: float, profiled: bool) -> None:
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= most]
    calls = WORK[name]()
    contestants = {f"{who}, {n}": lambda call=call, n=n: call(n) for who, call in calls.items() for n in counts}
    times = harness.interleave(contestants, seconds=seconds)
    medians = harness.recorded[f"threads: {name}"] = {who: statistics.median(t) for who, t in times.items()}
    print(f"\n{name}\n  {'threads':<9}" + "".join(f"{who + ', ms':>12}{'x':>8}" for who in calls))
    for n in counts:
        row = ((medians[f"{who}, {n}"], medians[f"{who}, 1"]) for who in calls)
        print(f"  {n:<9}" + "".join(f"{t * 1e3:>12.3f}{one / t:>8.2f}" for t, one in row))
    if profiled:
        for n in (1, most):
            graph = calls["ggrad"].graph
            graph.compute(threads=n)
            print(graph.compute(threads=n, profile=True).profile)


def main() -> None:
    parser = harness.parser(__doc__, seconds=2, only=",".join(WORK))
    parser.add_argument("--profile", action="store_true", help="print where the time goes on one thread and on all")
    args = parser.parse_args()
    print(gg.show_config())
    for name in args.only.split(","):
        measure(name, args.threads, args.seconds, args.profile)
    harness.save(args.save)


if __name__ == "__main__":
    main()
