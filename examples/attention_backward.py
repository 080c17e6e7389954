"""The gradients of grouped-query attention, each checked three ways: double precision, other ops, differences.

    python attention_backward.py                                # 16 query heads over 16, 8, 4 and 2 kv heads
    python attention_backward.py --mask top-left --sinks --softcap 20
    python attention_backward.py --mask bottom-right window:16,0 prefix:4 --sweep seqlen
    python attention_backward.py --seqlen 1024 --hdim 64 --mask bottom-right --benchmark

For every configuration flash_attn_ext and its gradient run on 1, 2, 3 and 7 threads, which must give the same bits.
They are compared with the answer in double precision; with a graph of other ops that repeats the kv heads, keeps the
matrix of weights and lets the gradient of `repeat` sum over each group; and with difference quotients along a
random direction, in double precision.  The exit status is 0 only if everything agrees.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import ggrad as gg

THREADS = (1, 2, 3, 7)
TOLERANCE = 2e-6  # relative norm of an f32 result's error
SWEEPS = {
    "hdim": (1, 16, 64, 80, 128, 256),
    "seqlen": (1, 16, 63, 64, 65, 128, 257),
    "nhead": (1, 2, 4, 8, 16, 32),
}


@dataclass(frozen=True)
class Configuration:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    d: int
    dv: int
    bias: bool
    sinks: bool
    options: dict  # of flash_attn_ext, and by the same names of attention_reference
    seed: int

    def __str__(self) -> str:
        ratio = self.heads // self.kv_heads
        kind = "multi-head" if ratio == 1 else "multi-query" if self.kv_heads == 1 else "grouped"
        return (
            f"{ratio}:1 {kind}, {self.heads} query heads, {self.kv_heads} kv heads, "
            f"{self.queries} queries, {self.keys} keys, d {self.d}" + f", dv {self.dv}" * (self.dv != self.d)
        )

    def inputs(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The arguments that have gradients, and the gradient of the result."""
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        B, H, N, M = self.batch, self.heads, self.queries, self.keys
        arrays = {
            "q": normal(B, H, N, self.d),
            "k": normal(B, self.kv_heads, M, self.d),
            "v": normal(B, self.kv_heads, M, self.dv),
        }
        d = normal(B, N, H, self.dv)
        if self.bias:
            arrays["mask"] = normal(H, N, M)
        if self.sinks:
            arrays["sinks"] = normal(H)
        return arrays, d

    def visible(self) -> np.ndarray:
        rules = {name: self.options[name] for name in ("causal", "window", "prefix") if name in self.options}
        return gg.testing.visible_pairs(self.queries, self.keys, **rules)


Results = dict[str, np.ndarray]  # out, lse, dq, dk, dv, dmask, dsinks


class Trained:
    """A graph of attention with the gradients of sum(out * d) by all arguments."""

    def __init__(self, attend: Callable[..., tuple[gg.Tensor, ...]], arrays: Results, d: np.ndarray) -> None:
        self.leaves = {name: gg.tensor(x, name=name, param=True) for name, x in arrays.items()}
        made = attend(**self.leaves)
        self.results = dict(zip(("out", "lse"), made, strict=False))
        loss = gg.sum(made[0] * gg.tensor(d))
        self.graph = gg.Graph().build_forward_expand(*map(gg.set_output, made), loss).build_backward_expand(loss)

    def run(self, threads: int | None = None) -> Results:
        self.graph.compute(threads=threads)
        gradients = {f"d{name}": self.graph.grad(leaf) for name, leaf in self.leaves.items()}
        return {name: t.numpy().copy() for name, t in (self.results | gradients).items() if t is not None}


def flash(c: Configuration) -> Callable[..., tuple[gg.Tensor, ...]]:
    def attend(q: gg.Tensor, k: gg.Tensor, v: gg.Tensor, mask=None, sinks=None) -> tuple[gg.Tensor, ...]:
        return gg.flash_attn_ext(q, k, v, mask, sinks=sinks, return_lse=True, **c.options)

    return attend


def expanded(c: Configuration) -> Callable[..., tuple[gg.Tensor, ...]]:
    """Attention of other ops: kv heads repeated for every query head, a weight for every pair."""
    B, H, N, M = c.batch, c.heads, c.queries, c.keys

    def repeated(x: gg.Tensor) -> gg.Tensor:  # [B, kv heads, M, d] -> [B, H, M, d]
        row = M * x.shape[-1]
        groups = gg.repeat(x.reshape(B, c.kv_heads, 1, row), shape=(B, c.kv_heads, H // c.kv_heads, row))
        return groups.reshape(B, H, M, x.shape[-1])

    def attend(q: gg.Tensor, k: gg.Tensor, v: gg.Tensor, mask=None, sinks=None) -> tuple[gg.Tensor, ...]:
        scores = gg.mul_mat(repeated(k), q) * c.d**-0.5  # [B, H, N, M]
        cap = c.options.get("logit_softcap")
        if cap:
            scores = gg.tanh(scores * (1 / cap)) * cap
        if mask is not None:
            scores = scores + mask
        hidden = np.where(c.visible(), 0, -np.inf)
        if sinks is not None:  # one more column of scores, which everyone sees and which has no value
            column = gg.repeat(sinks.reshape(1, H, 1, 1), shape=(B, H, N, 1))
            scores = gg.concat(scores, column, axis=-1)
            hidden = np.pad(hidden, ((0, 0), (0, 1)))
        weights = gg.soft_max(scores, gg.tensor(hidden))[..., :M]
        if "dropout_p" in c.options:
            p, seed = c.options["dropout_p"], c.options["seed"]
            kept = [[gg.testing.dropout_factors(N, M, p, seed, head=h, sequence=b) for h in range(H)] for b in range(B)]
            weights = weights * gg.tensor(np.array(kept))
        out = gg.mul_mat(gg.transpose(repeated(v)), weights)  # [B, H, N, dv]
        return (gg.permute(out, axes=(0, 2, 1, 3)),)

    return attend


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the difference, relative to the size of `b`."""
    seen = np.isfinite(b)
    if (np.isfinite(a) != seen).any():
        return np.inf
    return float(np.linalg.norm(a[seen] - b[seen]) / size_of(b[seen]))


def size_of(x: np.ndarray) -> float:
    """The norm; of what is nothing but rounding, as the gradient by the score of a single key, that of many ones."""
    norm, ones = float(np.linalg.norm(x)), max(1, x.size) ** 0.5
    return norm if norm > 1e-6 * ones else ones


def slope_error(c: Configuration, arrays: Results, d: np.ndarray, name: str, gradient: np.ndarray) -> float:
    """What a gradient is off along a random direction, as `distance` measures it."""
    direction = np.random.default_rng(c.seed + 1).standard_normal(gradient.shape)
    step = 1e-4

    def loss(at: float) -> float:
        moved = arrays | {name: arrays[name] + at * direction}
        return float((gg.testing.attention_reference(**moved, **c.options).out * d).sum())

    quotient = (loss(step) - loss(-step)) / (2 * step)
    slope = float((gradient.astype(np.float64) * direction).sum())
    return abs(slope - quotient) / size_of(gradient)


def same_bits(a: Results, b: Results) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def check_bits(c: Configuration, trained: Trained, arrays: Results, d: np.ndarray, thorough: bool) -> list[str]:
    """What gave other bits than a run on one thread."""
    first = trained.run(threads=1)
    others = [f"{n} threads" for n in THREADS[1:] if not same_bits(first, trained.run(threads=n))]
    if thorough:
        rng = np.random.default_rng(c.seed)
        others += [f"run {i}" for i in range(20) if not same_bits(first, trained.run(threads=int(rng.integers(1, 8))))]
        alone = {name: x[:1] if name in "qkv" else x for name, x in arrays.items()}
        of_batch = ("out", "lse", "dq", "dk", "dv")  # the others are sums over batches
        got = Trained(flash(c), alone, d[:1]).run()
        if not same_bits({name: got[name] for name in of_batch}, {name: first[name][:1] for name in of_batch}):
            others.append("the first batch alone")
    return others


def check(c: Configuration, thorough: bool) -> bool:
    """Print what there is to know about a configuration; whether all is well."""
    arrays, d = c.inputs()
    trained = Trained(flash(c), arrays, d)
    got = trained.run()
    exact = gg.testing.attention_reference(**arrays, d=d, **c.options).present()
    repeated = Trained(expanded(c), arrays, d).run()

    print(f"\n{c}")
    print(f"  {'':<8}{'shape':<22}{'mean |x|':>10}{'L2 norm':>12}{'float64':>12}{'expanded':>12}{'differences':>13}")
    passed = True
    for name, x in got.items():
        # Two f32 results may lie twice as far apart; a random direction sees four standard deviations.
        errors = [(distance(x, exact[name]), TOLERANCE)]
        if name in repeated:
            errors.append((distance(x, repeated[name]), 2 * TOLERANCE))
        if name[1:] in arrays:
            errors.append((slope_error(c, arrays, d, name[1:], x), 4 * TOLERANCE))
        fits = all(error <= allowed for error, allowed in errors)
        passed &= fits
        seen = x[np.isfinite(x)]
        numbers = f"{np.abs(seen).mean() if seen.size else 0:>10.3e}{np.linalg.norm(seen):>12.4e}"
        cells = "".join(f"{error:>12.1e}" for error, _ in errors)
        print(f"  {name:<8}{list(x.shape)!s:<22}{numbers}{cells}" + "   WRONG" * (not fits))
    others = check_bits(c, trained, arrays, d, thorough)
    if others:
        print(f"  other bits with {', '.join(others)}")
    passed &= not others
    print("  pass: the same bits on " + ", ".join(map(str, THREADS)) + " threads" if passed else "  FAILED")
    return passed


def benchmark(c: Configuration) -> None:
    """Forward and backward of the op and of the expanded graph, in turns."""
    arrays, d = c.inputs()
    contestants = {"flash": Trained(flash(c), arrays, d), "expanded": Trained(expanded(c), arrays, d)}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    until = time.perf_counter() + 1
    while time.perf_counter() < until or len(times["flash"]) < 5:
        for name, trained in contestants.items():
            start = time.perf_counter()
            trained.graph.compute()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    # For each pair that is seen: q.k twice, dq and dk; out, d.v and dv.
    flops = 2 * int(c.visible().sum()) * c.batch * c.heads * (4 * c.d + 3 * c.dv)
    print(
        f"  forward and backward: {medians['flash'] * 1e3:.2f} ms, {flops / medians['flash'] / 1e9:.1f} GFLOP/s; "
        f"expanded {medians['expanded'] * 1e3:.2f} ms, {medians['expanded'] / medians['flash']:.2f} times as long"
    )


# -- the command line ---------------------------------------------------------------------------------------


def mask_options(words: list[str], keys: int) -> dict:
    """Options of attention from words like bottom-right, window:16,0 and prefix:4; a ValueError names another word."""
    options: dict = {}
    for word in words:
        kind, _, rest = word.partition(":")
        try:
            numbers = tuple(int(n) for n in rest.split(",")) if rest else ()
        except ValueError:
            numbers = (-2,)
        if word in ("top-left", "bottom-right"):
            options["causal"] = word
        elif kind == "window" and len(numbers) == 2 and min(numbers) >= -1:
            options["window"] = numbers
        elif kind == "prefix" and len(numbers) == 1 and numbers[0] >= 0:
            options["prefix"] = numbers[0]
        elif word != "none" or len(words) > 1:
            raise ValueError(
                f"--mask {word}: it must be none, top-left, bottom-right, window:LEFT,RIGHT (numbers of keys, -1 for "
                "no bound) or prefix:N, or several of the last four"
            )
    if "prefix" in options and "window" not in options:
        options |= {"window": (keys // 4, 0), "causal": options.get("causal", "bottom-right")}
    return options


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {least}")
        return int(text)

    return number


def share(text: str) -> float:
    try:
        p = float(text)
    except ValueError:
        p = -1
    if not 0 <= p < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 up to, and not including, 1")
    return p


def not_negative(text: str) -> float:
    try:
        c = float(text)
    except ValueError:
        c = -1
    if not 0 <= c < np.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return c


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = at_least(1)
    parser.add_argument("--batch", type=size, default=2)
    parser.add_argument("--nhead-q", type=size, default=16, help="query heads (default 16)")
    parser.add_argument("--ratios", type=size, nargs="+", help="query heads to a kv head (default 1 2 4 8)")
    parser.add_argument("--seqlen", type=size, default=64, help="queries (default 64)")
    parser.add_argument("--seqlen-k", type=size, help="keys (default: as many as queries)")
    parser.add_argument("--hdim", type=size, default=128, help="of q and k (default 128)")
    parser.add_argument("--hdim-v", type=size, help="of v (default: as of q)")
    parser.add_argument(
        "--mask", nargs="+", default=["none"], metavar="MASK",
        help="none, top-left, bottom-right, window:LEFT,RIGHT, prefix:N, or several of these; prefix:N alone comes "
        "with bottom-right and a window of a quarter of the keys",
    )  # fmt: skip
    parser.add_argument("--bias", action="store_true", help="add a bias to each head's scores, and check its gradient")
    parser.add_argument("--dropout", type=share, default=0.0, metavar="P")
    parser.add_argument(
        "--softcap", type=not_negative, default=0.0, metavar="C", help="scores become C tanh(score / C)"
    )
    parser.add_argument("--sinks", action="store_true", help="one more score for each head, without a value")
    parser.add_argument("--sweep", choices=SWEEPS, help="take one size through many values")
    parser.add_argument("--benchmark", action="store_true", help="also time it, beside the graph of other ops")
    parser.add_argument("--deterministic", action="store_true", help="20 more runs, and a batch alone: the same bits")
    parser.add_argument("--seed", type=at_least(0), default=0)
    args = parser.parse_args()
    if args.ratios is None:
        args.ratios = [ratio for ratio in (1, 2, 4, 8) if args.sweep == "nhead" or args.nhead_q % ratio == 0]
    elif args.sweep != "nhead":
        for ratio in args.ratios:
            if args.nhead_q % ratio:
                parser.error(f"--ratios {ratio}: it does not divide the {args.nhead_q} query heads of --nhead-q")
    try:
        mask_options(args.mask, keys=1)
    except ValueError as error:
        parser.error(str(error))
    return args


def configurations(args: argparse.Namespace) -> Iterator[Configuration]:
    names = {"hdim": "hdim", "seqlen": "seqlen", "nhead": "nhead_q"}
    for value in SWEEPS[args.sweep] if args.sweep else (None,):
        sizes = vars(args) | ({names[args.sweep]: value} if args.sweep else {})
        keys = sizes["seqlen_k"] or sizes["seqlen"]
        options = mask_options(args.mask, keys)
        if args.softcap:
            options["logit_softcap"] = args.softcap
        if args.dropout:
            options |= {"dropout_p": args.dropout, "seed": args.seed, "dropout_key": 0}
        for ratio in args.ratios:
            if sizes["nhead_q"] % ratio == 0:
                yield Configuration(
                    batch=args.batch, heads=sizes["nhead_q"], kv_heads=sizes["nhead_q"] // ratio,
                    queries=sizes["seqlen"], keys=keys, d=sizes["hdim"], dv=sizes["hdim_v"] or sizes["hdim"],
                    bias=args.bias, sinks=args.sinks, options=options, seed=args.seed,
                )  # fmt: skip


def main() -> None:
    args = arguments()
    failed = total = 0
    for c in configurations(args):
        total += 1
        failed += not check(c, args.deterministic)
        if args.benchmark:
            benchmark(c)
    print(f"\n{failed} of {total} configurations FAILED" if failed else f"\nall configurations pass: {total}")
    sys.exit(1 if failed or not total else 0)


if __name__ == "__main__":
    main()
