"""Sparse latent attention, forward and backward, beside two ways to write it in torch.

    python tests/bench/bench_mla.py [--seconds 3] [--threads 2] [--only speed,window,choice,growth] [--tokens 2048 8192]
                                     [--save FILE]

One sequence, 16 heads, rows of 128; a window of 128 tokens, and with a choice 64 rows of those that stand for 4 tokens
each.  Dense: scaled_dot_product_attention over all rows with a boolean mask of the same visible pairs.  Gathered: the
rows each token sees, side by side, 512 tokens at a time, and two batched products.  All three give the same gradients,
which is checked first.  FLOP/s count visible pairs alone, 4 D a pair forward and 10 D backward; a product of
2048 x 2048 x 2048 of NumPy's takes turns, and says what the machine can do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# isort: off
import harness  # before NumPy: it mends the environment
import numpy as np

import ggrad as gg
# isort: on

HEADS, D, WINDOW, RATIO, PICKS = 16, 128, 128, 4, 64
SGEMM = 2048
TOKENS_AT_A_TIME = 512


@dataclass
class Case:
    """Inputs; `seen` says for each token which rows of ori_kv and cmp_kv together it sees, -1 where there are fewer."""

    tokens: int
    choice: bool
    inputs: dict[str, np.ndarray] = field(init=False)
    dout: np.ndarray = field(init=False)
    seen: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        S, rng = self.tokens, np.random.default_rng(0)
        self.dout = rng.standard_normal((1, S, HEADS, D), dtype=np.float32)
        self.inputs = {
            name: rng.standard_normal((1, S, n, D), dtype=np.float32) for name, n in (("q", HEADS), ("ori_kv", 1))
        }
        window = np.arange(S)[:, None] - np.arange(WINDOW)
        self.seen = np.maximum(window, -1)
        if self.choice:
            self.inputs["cmp_kv"] = rng.standard_normal((1, S // RATIO, 1, D), dtype=np.float32)
            picks = np.full((S, PICKS), -1, np.int32)
            for i in range(S):
                rows = (i + 1) // RATIO
                few = min(rows, PICKS)
                picks[i, :few] = rng.choice(rows, few, replace=False)
            self.inputs["cmp_sparse_indices"] = picks[None, :, None]
            self.seen = np.concatenate([self.seen, np.where(picks < 0, -1, picks + S)], axis=1)

    @property
    def pairs(self) -> int:
        return int((self.seen >= 0).sum()) * HEADS

    def options(self) -> dict:
        window = {"ori_mask_mode": 4, "ori_win_left": WINDOW - 1, "ori_win_right": 0}
        if not self.choice:
            return window
        return window | {"cmp_ratio": RATIO, "cmp_mask_mode": 3, "cmp_residual_kv": np.zeros(1, np.int32)}


def ours(case: Case, threads: int) -> tuple[Callable, Callable, Callable]:
    """Forward, backward, both; `both` returns dq."""
    leaves = {name: gg.tensor(x) for name, x in case.inputs.items()}
    out, lse = gg.sparse_flash_mla(**leaves, **case.options(), return_softmax_lse=True)
    forward = gg.Graph().build_forward_expand(out, lse).compute(threads=threads)
    known = gg.tensor(out.numpy()), gg.tensor(lse.numpy())
    rest = {name: t for name, t in leaves.items() if name != "q"}

    def gradients(out, lse):
        return gg.sparse_flash_mla_grad(leaves["q"], gg.tensor(case.dout), out, lse, **rest, **case.options()).dq

    backward = gg.Graph().build_forward_expand(gradients(*known))
    dq = gradients(out, lse)
    both = gg.Graph().build_forward_expand(dq)

    def run_both() -> np.ndarray:
        both.compute(threads=threads)
        return dq.numpy()[0]

    return lambda: forward.compute(threads=threads), lambda: backward.compute(threads=threads), run_both


def torch_inputs(case: Case):
    import torch

    q = torch.from_numpy(case.inputs["q"][0]).requires_grad_()
    rows = [
        torch.from_numpy(case.inputs[name][0, :, 0]).requires_grad_()
        for name in ("ori_kv", "cmp_kv")
        if name in case.inputs
    ]
    return torch, q, rows, torch.from_numpy(case.dout[0])


def dense(case: Case) -> Callable:
    torch, q, rows, dout = torch_inputs(case)
    mask = torch.zeros(case.tokens, sum(len(r) for r in rows) + 1, dtype=torch.bool)
    mask.scatter_(1, torch.from_numpy(np.where(case.seen < 0, mask.shape[1] - 1, case.seen)).long(), True)
    mask = mask[:, :-1].contiguous()

    def run() -> np.ndarray:
        x = torch.cat(rows)[None].expand(HEADS, -1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], x[None], x[None], mask)
        q.grad = None
        attended.backward(dout.transpose(0, 1)[None])
        return q.grad.numpy()

    return run


def gathered(case: Case) -> Callable:
    torch, q, rows, dout = torch_inputs(case)
    seen = torch.from_numpy(case.seen).long()

    def run() -> np.ndarray:
        q.grad = None
        for t in range(0, case.tokens, TOKENS_AT_A_TIME):
            here = slice(t, t + TOKENS_AT_A_TIME)
            x = torch.cat(rows)[seen[here].clamp(min=0)]  # [tokens, rows, D]
            scores = q[here] @ x.transpose(1, 2) * D**-0.5
            share = scores.masked_fill(seen[here, None] < 0, -torch.inf).softmax(-1)
            (share @ x).backward(dout[here])
        return q.grad.numpy()

    return run


def sgemm() -> Callable:
    a = np.random.default_rng(0).standard_normal((SGEMM, SGEMM), dtype=np.float32)
    return lambda: a @ a


def kind(choice: bool) -> str:
    return "a window and a choice" if choice else "a window"


def speed(tokens: int, choice: bool, threads: int, seconds: float) -> None:
    """GFLOP/s of each direction, as a part of what a large product reaches."""
    case = Case(tokens, choice)
    forward, backward, _ = ours(case, threads)
    contestants = {"forward": forward, "backward": backward, "sgemm": sgemm()}
    work = {"forward": 4.0 * D * case.pairs, "backward": 10.0 * D * case.pairs, "sgemm": 2.0 * SGEMM**3}
    times = harness.interleave(contestants, seconds=seconds)
    title = f"{tokens} tokens, {kind(choice)}"
    medians = harness.table(title, times)
    rate = {name: work[name] / t / 1e9 for name, t in medians.items()}
    shares = harness.recorded[f"{title}, share of a large product"] = {}
    for name in ("forward", "backward"):
        shares[name] = rate[name] / rate["sgemm"]
        print(f"  {name}: {rate[name]:.1f} GFLOP/s, {shares[name]:.2f} of sgemm's {rate['sgemm']:.1f}")


def beside(tokens: int, choice: bool, threads: int, seconds: float) -> None:
    import torch

    torch.set_num_threads(threads)
    case = Case(tokens, choice)
    contestants = {"ggrad": ours(case, threads)[2], "torch, gathered": gathered(case), "torch, dense": dense(case)}
    gradients = {name: call().copy() for name, call in contestants.items()}
    for name, dq in gradients.items():
        np.testing.assert_allclose(dq, gradients["ggrad"], atol=1e-4, err_msg=f"the gradients of {name} are others")
    times = harness.interleave(contestants, seconds=seconds)
    harness.table(f"{tokens} tokens, {kind(choice)}, forward and backward", times)


def growth(seconds: float) -> None:
    """Time a token, forward and backward, as sequences grow: processor time of one thread."""
    sizes = (2048, 4096, 8192, 16384)
    contestants = {f"{S} tokens": ours(Case(S, True), 1)[2] for S in sizes}
    times = harness.interleave(contestants, seconds=seconds, clock=time.process_time)
    medians = harness.table("a window and a choice, forward and backward, 1 thread", times)
    first = medians[f"{sizes[0]} tokens"] / sizes[0]
    for S in sizes:
        a_token = medians[f"{S} tokens"] / S
        print(f"  {S:>6} tokens: {a_token * 1e6:.1f} us a token, {a_token / first:.2f} of that of {sizes[0]}")


def main() -> None:
    parser = harness.parser(__doc__, seconds=3, only="speed,window,choice,growth")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    args = parser.parse_args()
    wanted = args.only.split(",")
    print(f"{gg.show_config()}\nthis run: {args.threads} threads")
    if "speed" in wanted:
        speed(args.tokens[0], False, args.threads, args.seconds)
        speed(args.tokens[0], True, args.threads, args.seconds)
    for tokens in args.tokens:
        for name, choice in (("window", False), ("choice", True)):
            if name in wanted:
                beside(tokens, choice, args.threads, args.seconds)
    if "growth" in wanted:
        growth(args.seconds)
    harness.save(args.save)


if __name__ == "__main__":
    main()
