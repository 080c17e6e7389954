"""Attention with its gradients under jax.jit: ggrad.jax's beside jax.nn.dot_product_attention.

    python tests/bench/bench_jax_bridge.py [--seconds 2] [--queries 64,256,1024,2048]

Needs the `jax` extra.  One process, interleaved calls, medians; f32, 4 heads of 64, causal.
"""

import argparse
import statistics

# isort: off
import harness  # before NumPy: it mends the environment
import jax

import ggrad.jax as gj
# isort: on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--queries", default="64,256,1024,2048")
    args = parser.parse_args()
    print(f"{'forward and backward, ms':<28}{'ggrad':>8}{'JAX':>8}{'times':>8}")
    for n in map(int, args.queries.split(",")):
        q, k, v, w = (jax.random.normal(key, (1, n, 4, 64)) for key in jax.random.split(jax.random.PRNGKey(0), 4))
        calls = {}
        for name, attention in (("ggrad", gj.attention), ("JAX", jax.nn.dot_product_attention)):
            gradients = jax.jit(jax.grad(lambda *x, f=attention, w=w: (f(*x, is_causal=True) * w).sum(), (0, 1, 2)))
            calls[name] = lambda g=gradients, x=(q, k, v): jax.block_until_ready(g(*x))
        times = harness.interleave(calls, seconds=args.seconds)
        mine, theirs = (statistics.median(times[name]) * 1e3 for name in ("ggrad", "JAX"))
        print(f"N = {n:<24}{mine:8.2f}{theirs:8.2f}{theirs / mine:8.2f}", flush=True)


if __name__ == "__main__":
    main()
