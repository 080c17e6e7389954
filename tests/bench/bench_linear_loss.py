"""Cross entropy of a last layer's logits: fused with the product that makes them, apart, and in torch.

    python -P tests/bench/bench_linear_loss.py [--classes 49152] [--rows 1024] [--width 576] [--frozen]

Prints seconds and the most memory of a step's loss and gradients, each contestant in a process of its own; torch with
as many threads.
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

import ggrad as gg

CONTESTANTS = ("fused", "apart", "torch")


def data(a):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((a.rows, a.width), dtype="f")
    w = rng.standard_normal((a.classes, a.width), dtype="f")
    return x, w, rng.integers(0, a.classes, a.rows).astype("i4")


def ours(a, fused):
    x, w, y = data(a)
    x, w = gg.tensor(x, param=True), gg.tensor(w, param=not a.frozen, frozen=a.frozen)
    loss = gg.linear_cross_entropy(x, w, y) if fused else gg.cross_entropy_loss(gg.mul_mat(w, x), y)
    graph = gg.Graph().build_backward_expand(loss)
    return lambda: (graph.compute(threads=a.threads), loss.item())[1]


def torchs(a):
    import torch

    torch.set_num_threads(a.threads)
    x, w, y = data(a)
    x, w, y = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=not a.frozen), torch.tensor(y).long()

    def step():
        x.grad = w.grad = None
        loss = torch.nn.functional.cross_entropy(x @ w.T, y)
        loss.backward()
        return loss.item()

    return step


def measure(a):
    data(a)  # and imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = torchs(a) if a.only == "torch" else ours(a, a.only == "fused")
    seconds = []
    for _ in range(a.times):
        begin = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - begin)
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{a.only:>6}: {min(seconds):7.3f} s, {mib:7.0f} MiB more than before, loss {loss:.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("classes", 49152), ("rows", 1024), ("width", 576), ("threads", 2), ("times", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--frozen", action="store_true", help="the weight is no parameter")
    parser.add_argument("--only", choices=CONTESTANTS)
    a = parser.parse_args()
    if a.only:
        measure(a)
        return
    print(f"{a.rows} rows of {a.width}, {a.classes} classes, {a.threads} threads{', frozen weight' * a.frozen}")
    for name in CONTESTANTS:
        subprocess.run([sys.executable, "-P", __file__, *sys.argv[1:], "--only", name], check=True)


if __name__ == "__main__":
    main()
