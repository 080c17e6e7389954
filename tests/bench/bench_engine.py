"""The engine's own cost, and training steps beside torch and JAX.

    python tests/bench/bench_engine.py [--seconds 10] [--threads 2] [--only nodes,tiny,small] [--no-compile]

Needs the `bench` extra.  Prints medians of interleaved calls, and ratios to ggrad's.
"""

import argparse
import math

# isort: off
import harness  # before NumPy: it mends the environment
import gpt
import numpy as np

import ggrad as gg
# isort: on


def cost_per_node(threads: int, seconds: float) -> None:
    """1,000 nodes of eight floats, each made of the one before."""
    x = gg.tensor(np.linspace(0.5, 1.5, 8), name="x")
    y = x
    for _ in range(1000):
        y = y + x
    graph = gg.Graph().build_forward_expand(y)
    times = harness.interleave({"1,000 tiny nodes": lambda: graph.compute(threads=threads)}, seconds=min(seconds, 2))
    medians = harness.table(f"cost per node, {threads} threads", times, unit=1e-6, symbol="us")
    print(f"  {medians['1,000 tiny nodes'] * 1e6:.0f} ns a node, the call from Python included")


def training_step(name: str, c: gpt.Config, threads: int, seconds: float, compiled: bool) -> None:
    contestants = {"ggrad": gpt.ggrad_step(c, threads)}
    makers = {"torch eager": lambda: gpt.torch_step(c, threads), "JAX jit": lambda: gpt.jax_step(c)}
    if compiled:
        makers["torch.compile"] = lambda: gpt.torch_step(c, threads, compiled=True)
    for peer, make in makers.items():
        try:
            contestants[peer] = make()
        except ImportError as error:
            print(f"  {peer}: not here ({error})")
    losses = {}
    for peer, step in list(contestants.items()):
        try:
            losses[peer] = [step() for _ in range(20)][-1]
        except Exception as error:  # torch.compile needs a working C++ toolchain
            print(f"  {peer}: does not work here ({type(error).__name__})")
            del contestants[peer]
    print(f"\n{name}: loss after 20 steps: " + ", ".join(f"{peer} {loss:.6f}" for peer, loss in losses.items()))
    assert all(math.isclose(loss, losses["ggrad"], abs_tol=1e-3) for loss in losses.values()), "the engines disagree"
    harness.table(
        f"{name} GPT, training step, {threads} threads", harness.interleave(contestants, seconds=seconds), work=c.flops
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of timing for each contestant")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="nodes,tiny,small")
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="leave torch.compile out")
    args = parser.parse_args()
    only = args.only.split(",")
    print(gg.show_config())
    if "nodes" in only:
        cost_per_node(args.threads, args.seconds)
    if "tiny" in only:
        training_step("tiny", gpt.TINY, args.threads, args.seconds, args.compiled)
    if "small" in only:
        training_step("small", gpt.SMALL, args.threads, args.seconds, args.compiled)


if __name__ == "__main__":
    main()
