"""Attention that trains: flash_attn_ext, its packed gradient, and a check against difference quotients.

    python attention.py --queries 5 --keys 9

Four query heads share two heads of keys and values.  The gradient of all three inputs is one node,
flash_attn_back, whose result is one buffer: dq, dk and dv, one after another.
"""

import argparse

import numpy as np

import ggrad as gg


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=6)
    parser.add_argument("--keys", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=7, help="of a head")
    parser.add_argument("--checks", type=int, default=5, help="elements of each gradient to check")
    args = parser.parse_args()

    rng = np.random.default_rng(0)

    def parameter(name: str, heads: int, length: int) -> gg.Tensor:
        return gg.tensor(rng.standard_normal((2, heads, length, args.size)), name=name, param=True)

    q = parameter("q", args.heads, args.queries)
    k = parameter("k", args.kv_heads, args.keys)
    v = parameter("v", args.kv_heads, args.keys)
    out = gg.flash_attn_ext(q, k, v, causal=True)  # [batch, queries, heads, size]
    weights = gg.tensor(rng.standard_normal(out.shape), name="weights")
    loss = gg.sum(out * weights)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    print(graph, end="\n\n")

    # One buffer for three gradients; each part begins at a multiple of 16 bytes.
    packed = next(t for t in graph.nodes if t.op.name == "flash_attn_back")
    gg.set_output(packed)
    graph.compute()
    print(f"flash_attn_back: {packed.spec}, {packed.nbytes} bytes")
    flat = packed.numpy()
    for name, part, offset in zip(("dq", "dk", "dv"), packed.parts, packed.offsets, strict=True):
        begin = offset // 4
        window = flat[begin : begin + part.size].reshape(part.shape)
        assert np.array_equal(window, part.numpy())
        print(f"  {name} {part.spec}: a view, {offset} bytes into it")

    # Difference quotients of the loss, in double precision.
    def loss_with(leaf: gg.Tensor, index: tuple[int, ...], value: float) -> float:
        kept = leaf.numpy()[index]
        leaf.numpy()[index] = value
        graph.compute(backend="reference")
        leaf.numpy()[index] = kept
        return loss.item()

    gradients = {leaf: graph.grad(leaf).numpy().copy() for leaf in (q, k, v)}
    worst = 0.0
    for leaf, gradient in gradients.items():
        for _ in range(args.checks):
            index = tuple(int(rng.integers(n)) for n in leaf.shape)
            low, high = (np.float32(leaf.numpy()[index] + step) for step in (-0.01, 0.01))
            quotient = (loss_with(leaf, index, high) - loss_with(leaf, index, low)) / (float(high) - float(low))
            difference = abs(quotient - gradient[index])
            worst = max(worst, difference)
            print(f"d loss / d {leaf.name}{list(index)}: {gradient[index]:+.6f}, by differences {quotient:+.6f}")
    assert worst < 1e-3, worst  # what is left is the quotient's own error, of the order of the step squared
    print(f"largest difference: {worst:.1e}")


if __name__ == "__main__":
    main()
