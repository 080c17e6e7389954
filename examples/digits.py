"""Learns to read handwritten digits, scikit-learn's 1,797 pictures of 8 x 8 pixels, in seconds.

python digits.py --hidden 64 --steps 600
"""

import argparse

import numpy as np

import ggrad as gg
from ggrad.core.extras import need


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden layer")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, help="default: the cores of this machine")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    pictures, labels = need("sklearn.datasets", "this example").load_digits(return_X_y=True)
    pictures = pictures / 8 - 1
    rng = np.random.default_rng(args.seed)
    order = rng.permutation(len(labels))
    test, training = order[:360], order[360:]

    def matrix(name: str, rows: int, columns: int) -> gg.Tensor:
        return gg.tensor(rng.standard_normal((rows, columns)) * (2 / columns) ** 0.5, name=name, param=True)

    w1, b1 = matrix("w1", args.hidden, 64), gg.tensor(np.zeros(args.hidden), name="b1", param=True)
    w2, b2 = matrix("w2", 10, args.hidden), gg.tensor(np.zeros(10), name="b2", param=True)

    def logits(x: gg.Tensor) -> gg.Tensor:
        return gg.mul_mat(w2, gg.relu(gg.mul_mat(w1, x) + b1)) + b2

    # Training and testing are two graphs that share the parameters.
    x = gg.tensor(shape=(args.batch, 64), name="pictures")
    y = gg.tensor(shape=(args.batch,), dtype=gg.I32, name="labels")
    loss = gg.cross_entropy_loss(logits(x), y)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    optimizer = gg.optim.AdamW(graph.params, lr=gg.schedule.cosine(args.lr, args.steps, warmup=20))
    optimizer.build(graph, clip=1.0)

    answers = gg.argmax(logits(gg.tensor(pictures[test], name="test pictures")))
    testing = gg.Graph().build_forward_expand(answers)

    def report(step: int) -> None:
        testing.compute(threads=args.threads)
        accuracy = np.mean(answers.numpy() == labels[test])
        print(f"step {step:4}: accuracy on {len(test)} pictures not trained on: {accuracy:.1%}")

    for step in range(args.steps):
        if step % max(1, args.steps // 5) == 0:
            report(step)
        chosen = rng.choice(training, args.batch, replace=False)
        x.set(pictures[chosen])
        y.set(labels[chosen])
        graph.compute(threads=args.threads)
    report(args.steps)


if __name__ == "__main__":
    main()
