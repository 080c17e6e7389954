"""Products of matrices beside NumPy and torch, and the training step of a small network beside torch and JAX.

    python tests/bench/bench_products.py [--seconds 3] [--threads 2] [--only products,thin,frozen,mlp] [--save FILE]

Needs the `bench` extra for the peers.  One process, interleaved calls, medians.  The three layouts of a product are
those of a linear layer: its result, the gradient of its input, the gradient of its weight.  Frozen weights are packed
once; what that is worth for few rows is a part of its own, and so are products of few rows (thin), which run only
if they are asked for.
"""

import math
from collections.abc import Callable, Iterable

# isort: off
import harness  # before NumPy: it mends the environment
import mlp
import numpy as np

import ggrad as gg
# isort: on

SIZES = [  # batches, rows of the result, its columns, the sum's length
    (1, 2048, 2048, 2048),
    (1, 1024, 1024, 1024),
    (1, 512, 500, 784),
    (1, 2048, 688, 256),
    (32, 256, 256, 64),
]
FROZEN = [(1, rows, 1024, 1024) for rows in (4, 16, 32, 64, 256)]
THIN = [(1, m, n, k) for n, k in ((256, 256), (1024, 1024), (1024, 4096), (4096, 1024)) for m in (1, 4, 8, 16, 32)]
LAYOUTS = {"A B^T": (False, True), "A B": (False, False), "A^T B": (True, False)}  # whether transposed


def product(
    size: tuple[int, int, int, int], layout: str, threads: int, frozen: bool = False
) -> dict[str, Callable[[], object]]:
    """The same product in each engine, of operands that lie in memory as the layout says."""
    batches, m, n, k = size
    first, second = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    a = rng.standard_normal((batches, k, m) if first else (batches, m, k), dtype=np.float32)
    b = rng.standard_normal((batches, n, k) if second else (batches, k, n), dtype=np.float32)
    left, right = (np.swapaxes(a, 1, 2) if first else a), (np.swapaxes(b, 1, 2) if second else b)

    x, y = gg.tensor(a), gg.tensor(b, frozen=frozen)
    result = gg.mul_mat(y if second else gg.transpose(y), gg.transpose(x) if first else x)
    graph = gg.Graph().build_forward_expand(result)
    out = np.empty((batches, m, n), np.float32)
    calls: dict[str, Callable[[], object]] = {
        "ggrad": lambda: graph.compute(threads=threads),
        "NumPy": lambda: np.matmul(left, right, out=out),
    }
    calls["ggrad"](), calls["NumPy"]()
    assert np.allclose(result.numpy(), out, atol=1e-3), "the engines disagree"
    try:
        import torch
    except ImportError as error:
        print(f"  torch: not here ({error})")
        return calls
    torch.set_num_threads(threads)
    s, t, into = torch.from_numpy(left), torch.from_numpy(right), torch.empty(batches, m, n)
    calls["torch"] = lambda: torch.matmul(s, t, out=into)
    return calls


def products(sizes: list[tuple[int, int, int, int]], layouts: Iterable[str], threads: int, seconds: float) -> None:
    for size in sizes:
        batches, m, n, k = size
        for layout in layouts:
            times = harness.interleave(product(size, layout, threads), seconds=seconds)
            harness.table(f"{layout}: {batches} x ({m}, {k}, {n})", times, work=2.0 * batches * m * n * k)


def frozen_weights(threads: int, seconds: float) -> None:
    for size in FROZEN:
        batches, m, n, k = size
        free = product(size, "A B^T", threads)
        contestants = {"ggrad, frozen": product(size, "A B^T", threads, frozen=True)["ggrad"], **free}
        times = harness.interleave(contestants, seconds=seconds)
        harness.table(f"weights times {m} rows: {batches} x ({m}, {k}, {n})", times, work=2.0 * batches * m * n * k)


def network(threads: int, seconds: float) -> None:
    contestants = {"ggrad": mlp.ggrad_step(threads)}
    for peer, make in (("torch eager", lambda: mlp.torch_step(threads)), ("JAX jit", mlp.jax_step)):
        try:
            contestants[peer] = make()
        except ImportError as error:
            print(f"  {peer}: not here ({error})")
    losses = {peer: [step() for _ in range(20)][-1] for peer, step in contestants.items()}
    print("\nMLP: loss after 20 steps: " + ", ".join(f"{peer} {loss:.6f}" for peer, loss in losses.items()))
    assert all(math.isclose(loss, losses["ggrad"], rel_tol=1e-3) for loss in losses.values()), "the engines disagree"
    sizes = "-".join(map(str, mlp.SIZES))
    times = harness.interleave(contestants, seconds=seconds)
    harness.table(f"MLP {sizes}, batch {mlp.BATCH}, training step", times, work=mlp.FLOPS)


def main() -> None:
    args = harness.parser(__doc__, seconds=3, only="products,frozen,mlp").parse_args()
    only = args.only.split(",")
    print(f"{gg.show_config()}\nthis run: {args.threads} threads")
    if "products" in only:
        products(SIZES, LAYOUTS, args.threads, args.seconds)
    if "thin" in only:
        products(THIN, ["A B^T"], args.threads, args.seconds)
    if "frozen" in only:
        frozen_weights(args.threads, args.seconds)
    if "mlp" in only:
        network(args.threads, args.seconds)
    harness.save(args.save)


if __name__ == "__main__":
    main()
