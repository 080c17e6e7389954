"""The engine's own cost, and training steps beside torch and JAX.

    python tests/bench/bench_engine.py [--seconds 10] [--threads 2] [--no-compile]
                                        [--only nodes,chain,tiny,small,threads,memory] [--save FILE]

Needs the `bench` extra.  Prints medians of interleaved calls, and ratios to ggrad's; what a second thread is worth;
and the most memory that training the small GPT takes, each engine in a process of its own.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# isort: off
import harness  # before NumPy: it mends the environment
import chain
import gpt
import numpy as np

import ggrad as gg
# isort: on


def cost_per_node(threads: int, seconds: float) -> None:
    """1,000 nodes of eight floats, each made of the one before; norms, which follow nothing."""
    y = gg.tensor(np.linspace(0.5, 1.5, 8), name="x")
    for _ in range(1000):
        y = gg.rms_norm(y)
    graph = gg.Graph().build_forward_expand(y)
    calls = {by_threads(n): lambda n=n: graph.compute(threads=n) for n in (1, threads)}
    times = harness.interleave(calls, seconds=min(seconds, 2))
    medians = harness.table("1,000 dependent nodes of eight floats", times, unit=1e-6, symbol="us")
    each = ", ".join(f"{name} {median * 1e6:.0f} ns" for name, median in medians.items())
    print(f"  a node, the call from Python included: {each}")


def by_threads(n: int) -> str:
    return f"{n} thread{'s' * (n > 1)}"


def elementwise(threads: int, seconds: float, compiled: bool) -> None:
    makers = {"torch eager": lambda: chain.torch_step(threads), "JAX jit": chain.jax_step}
    if compiled:
        makers["torch.compile"] = lambda: chain.torch_step(threads, compiled=True)
    beside("elementwise chain, loss and gradients", chain.ggrad_step(threads), makers, seconds)


def training_step(name: str, c: gpt.Config, threads: int, seconds: float, compiled: bool) -> None:
    makers = {"torch eager": lambda: gpt.torch_step(c, threads), "JAX jit": lambda: gpt.jax_step(c)}
    if compiled:
        makers["torch.compile"] = lambda: gpt.torch_step(c, threads, compiled=True)
    beside(f"{name} GPT, training step", gpt.ggrad_step(c, threads), makers, seconds, work=c.flops)


def beside(title: str, ours: Callable, makers: dict[str, Callable], seconds: float, work: float = 0.0) -> None:
    """Our step and those of the peers that are here, once they are seen to compute the same."""
    contestants = {"ggrad": ours}
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
    print(f"\n{title}: loss after 20 steps: " + ", ".join(f"{peer} {loss:.6f}" for peer, loss in losses.items()))
    assert all(math.isclose(loss, losses["ggrad"], abs_tol=1e-3) for loss in losses.values()), "the engines disagree"
    harness.table(title, harness.interleave(contestants, seconds=seconds), work=work)


def scaling(c: gpt.Config, threads: int, seconds: float) -> None:
    """The same training step on one thread and on several."""
    contestants = {by_threads(n): gpt.ggrad_step(c, n) for n in (threads, 1)}
    harness.table(
        "small GPT, training step, by threads", harness.interleave(contestants, seconds=seconds), work=c.flops
    )


STEPS_OF = {
    "ggrad": lambda threads: gpt.ggrad_step(gpt.SMALL, threads),
    "ggrad, checkpoints": lambda threads: gpt.ggrad_step(gpt.SMALL, threads, gradient_checkpoints=True),
    "torch eager": lambda threads: gpt.torch_step(gpt.SMALL, threads),
    "JAX jit": lambda threads: gpt.jax_step(gpt.SMALL),
}


def memory(threads: int) -> None:
    """Peak resident bytes beyond what the process had when its engine was imported."""
    title = "small GPT, peak memory of training"
    print(f"\n{title}")
    sizes = harness.recorded[title] = {}
    for engine in STEPS_OF:
        command = [sys.executable, "-W", "ignore", __file__, "--memory-of", engine, "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"  {engine}: not here ({done.stderr.strip().splitlines()[-1]})")
            continue
        sizes[engine] = float(done.stdout.split()[-1])
        print(f"  {engine:<22}{sizes[engine] / 2**20:>9.1f} MiB{sizes[engine] / sizes['ggrad']:>8.2f}")


def memory_of(engine: str, threads: int) -> None:
    """Print how far the peak of resident memory rises while the engine makes five steps."""
    if engine.startswith("ggrad"):
        gg.Graph().build_forward_expand(gg.tensor(1.0) + 1.0).compute(threads=threads)
    else:
        __import__("torch" if "torch" in engine else "jax")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    step = STEPS_OF[engine](threads)
    for _ in range(5):
        step()
    print(_status("VmHWM") - before)


def _status(name: str) -> int:
    """A size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = harness.parser(__doc__, seconds=10, only="nodes,chain,tiny,small,threads,memory")
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="leave torch.compile out")
    parser.add_argument("--memory-of", choices=STEPS_OF, help="only this engine's memory, of this process")
    args = parser.parse_args()
    if args.memory_of:
        return memory_of(args.memory_of, args.threads)
    only = args.only.split(",")
    print(f"{gg.show_config()}\nthis run: {by_threads(args.threads)}")
    if "nodes" in only:
        cost_per_node(args.threads, args.seconds)
    if "chain" in only:
        elementwise(args.threads, args.seconds, args.compiled)
    if "tiny" in only:
        training_step("tiny", gpt.TINY, args.threads, args.seconds, args.compiled)
    if "small" in only:
        training_step("small", gpt.SMALL, args.threads, args.seconds, args.compiled)
    if "threads" in only:
        scaling(gpt.SMALL, args.threads, args.seconds)
    if "memory" in only:
        memory(args.threads)
    harness.save(args.save)


if __name__ == "__main__":
    main()
