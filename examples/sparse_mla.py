"""Sparse latent attention that remembers: a token seen long before, recalled through compressed rows.

    python sparse_mla.py --length 128 --choice 2

Each sequence is noise, but for one item somewhere in its first part; its last token asks which item that was.
One layer of attention with a short window cannot know.  With compressed rows, each the learnt mean of a few tokens,
it can; and it still can when it looks at no more than a few of them, which a lightning indexer chooses.  The indexer
learns from the attention itself: its scores of the rows are to be as the attention that these rows get.  So that it
hears of every row, its choice is all of them at first, and is narrowed when half of the training is done.
"""

import argparse
import sys

import numpy as np

import ggrad as gg

ITEMS, NOISE, QUESTION = 16, 15, 1  # tokens of each kind, in this order
HEADS, SIZE = 4, 32
INDEXER_HEADS, INDEXER_SIZE = 2, 16
WINDOW_ONLY, ALL_ROWS, CHOICE = "the window alone", "all compressed rows", "a choice of them"


class Model:
    """Embedding, one layer of sparse latent attention for the last token, and the logits of the items."""

    def __init__(self, mode: str, args: argparse.Namespace) -> None:
        rng = np.random.default_rng(1)

        def weight(name: str, *shape: int) -> gg.Tensor:
            return gg.tensor(rng.standard_normal(shape) * shape[-1] ** -0.5, name=name, param=True)

        self.tokens = gg.tensor(shape=(args.batch, args.length), dtype=gg.I32, name="tokens")
        self.items = gg.tensor(shape=(args.batch,), dtype=gg.I32, name="items")
        x = gg.get_rows(weight("embedding", ITEMS + NOISE + QUESTION, SIZE), self.tokens)
        last = x[:, -1:]
        kv = gg.mul_mat(weight("kv", SIZE, SIZE), x).reshape(args.batch, args.length, 1, SIZE)
        q = gg.mul_mat(weight("q", HEADS * SIZE, SIZE), last).reshape(args.batch, 1, HEADS, SIZE)
        seen = {
            "ori_kv": kv,
            "sinks": gg.tensor(np.zeros(HEADS), name="sinks", param=True),
            "ori_mask_mode": 4,
            "ori_win_left": args.window - 1,
            "ori_win_right": 0,
        }
        self.picks = self.choice = None
        if mode != WINDOW_ONLY:
            share = gg.tensor(np.zeros(args.ratio), name="share", param=True)
            seen["cmp_kv"] = gg.compress_kv(kv, share, cmp_ratio=args.ratio)
            seen |= {"cmp_ratio": args.ratio, "cmp_mask_mode": 3}
            if args.ratio > 1:
                seen["cmp_residual_kv"] = gg.tensor(np.full(args.batch, args.length % args.ratio))
        if mode == CHOICE:
            scores = self.indexer(weight, gg.stop_gradient(last), gg.stop_gradient(seen["cmp_kv"]))
            self.picks = gg.set_output(gg.top_k(scores, k=scores.shape[-1]))  # all rows, the best first, ...
            self.choice = gg.tensor(shape=(args.batch, 1, 1), dtype=gg.I32, name="choice")  # ... of which so many count
            seen |= {"cmp_sparse_indices": self.picks, "cmp_topk_length": self.choice}

        out, lse = gg.sparse_flash_mla(q, **seen, return_softmax_lse=True)
        self.logits = gg.mul_mat(weight("items", ITEMS, HEADS * SIZE), out.reshape(args.batch, HEADS * SIZE))
        loss = gg.cross_entropy_loss(self.logits, self.items)
        if mode == CHOICE:
            loss = loss + self.indexer_loss(scores, q, out, lse, seen)
        self.forward = gg.Graph().build_forward_expand(self.logits)
        self.graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
        self.optimizer = gg.AdamW(self.graph.params, lr=args.rate)
        self.optimizer.build(self.graph)

    @staticmethod
    def indexer(weight, last: gg.Tensor, cmp: gg.Tensor) -> gg.Tensor:
        """A score for each compressed row, [batch, 1, 1, rows]."""
        batch, rows = cmp.shape[:2]
        q = gg.mul_mat(weight("indexer q", INDEXER_HEADS * INDEXER_SIZE, SIZE), last)
        k = gg.mul_mat(weight("indexer k", INDEXER_SIZE, SIZE), cmp.reshape(batch, rows, SIZE))
        heads = gg.mul_mat(weight("indexer heads", INDEXER_HEADS, SIZE), last)
        return gg.lightning_indexer(
            q.reshape(batch, 1, INDEXER_HEADS, INDEXER_SIZE),
            k.reshape(batch, rows, 1, INDEXER_SIZE),
            heads.reshape(batch, 1, 1, INDEXER_HEADS),
        )

    def indexer_loss(self, scores, q, out, lse, seen) -> gg.Tensor:
        """Cross entropy of the attention that the rows get, and the softmax of their scores."""
        attention = {name: gg.stop_gradient(t) if isinstance(t, gg.Tensor) else t for name, t in seen.items()}
        given = gg.sparse_flash_mla_grad(*map(gg.stop_gradient, (q, out, out, lse)), **attention)
        batch, _, _, rows = scores.shape
        chosen = gg.get_rows(scores.reshape(batch, rows, 1), self.picks.reshape(batch, -1)).reshape(batch, -1)
        return gg.cross_entropy_loss(chosen, gg.stop_gradient(given.cmp_softmax_l1norm).reshape(batch, -1))


def sequences(rng: np.random.Generator, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, the item in each sequence, and where it stands: before the last token's window and its neighbours'."""
    tokens = ITEMS + rng.integers(NOISE, size=(args.batch, args.length))
    items = rng.integers(ITEMS, size=args.batch)
    places = rng.integers(args.length - args.window - args.ratio, size=args.batch)
    tokens[np.arange(args.batch), places] = items
    tokens[:, -1] = ITEMS + NOISE
    return tokens, items, places


def accuracy(mode: str, args: argparse.Namespace) -> float:
    """How many items a model recalls after training, from sequences that it has not seen."""
    model, rng = Model(mode, args), np.random.default_rng(0)
    recalled, found, batches = 0, 0, 8
    for step in range(args.steps + batches):
        tokens, items, places = sequences(rng, args)
        model.tokens.set(tokens), model.items.set(items)
        if mode == CHOICE:
            narrow = step >= args.steps // 2
            model.choice.set(np.full(model.choice.shape, args.choice if narrow else args.length // args.ratio))
        if step < args.steps:
            model.graph.compute()
            continue
        model.forward.compute()
        recalled += (model.logits.numpy().argmax(-1) == items).sum()
        if mode == CHOICE:
            found += (model.picks.numpy()[:, 0, 0, : args.choice] == places[:, None] // args.ratio).any(-1).sum()
    share = recalled / (batches * args.batch)
    chosen = f"; its row is among the {args.choice} chosen in {found / (batches * args.batch):.0%}" if found else ""
    print(f"{mode:<20} {share:>5.0%} recalled{chosen}")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--length", type=int, default=96, help="tokens of a sequence")
    parser.add_argument("--window", type=int, default=8, help="tokens that the last one sees one by one")
    parser.add_argument("--ratio", type=int, default=4, help="tokens for each compressed row")
    parser.add_argument("--choice", type=int, default=4, help="compressed rows that the indexer may choose")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--rate", type=float, default=0.01, help="of learning")
    args = parser.parse_args()

    print(f"One item of {ITEMS} among {args.length} tokens; chance is {1 / ITEMS:.0%}.")
    reached = {mode: accuracy(mode, args) for mode in (WINDOW_ONLY, ALL_ROWS, CHOICE)}
    solved = reached[ALL_ROWS] > 0.9 and reached[CHOICE] > 0.9 and reached[WINDOW_ONLY] < 0.3
    print("Solved with compressed rows, and not without." if solved else "Not as it should be.")
    return 0 if solved else 1


if __name__ == "__main__":
    sys.exit(main())
