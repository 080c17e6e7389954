"""A step of decoding with a cache of keys and values: written in place, and copied with `set_rows`, in turns.

python -P tests/bench/cache.py
"""

import statistics
import time

import numpy as np

import ggrad as gg

LAYERS, HEADS, PLACES, WIDTH = 4, 8, 4096, 64
ROUNDS = 30


def decoder(write) -> tuple[gg.Graph, gg.Tensor]:
    at = gg.tensor(np.array([0], np.int32))
    x = gg.tensor(np.random.randn(1, HEADS, 1, WIDTH))
    new = []
    for _ in range(LAYERS):
        keys, values = (gg.tensor(np.zeros((1, HEADS, PLACES, WIDTH))) for _ in range(2))
        k, v = write(keys, x * 0.5, at), write(values, x * 2.0, at)
        x = gg.flash_attn_ext(x, k[:, :, :64], v[:, :, :64]).permute(0, 2, 1, 3)  # as if 64 tokens were there
        new += [k, v]
    return gg.Graph().build_forward_expand(x, *new), at


def main() -> None:
    graphs = {"assign_rows": decoder(gg.assign_rows), "set_rows": decoder(gg.set_rows)}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(ROUNDS):
        for name, (graph, at) in graphs.items():
            at.set([i])
            begin = time.perf_counter()
            graph.compute()
            times[name].append(time.perf_counter() - begin)
    for name, each in times.items():
        print(f"{name:<14}{1000 * statistics.median(each[3:]):8.3f} ms a token, {LAYERS} layers, {PLACES} places")


if __name__ == "__main__":
    main()
