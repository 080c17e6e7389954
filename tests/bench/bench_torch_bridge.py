"""A whole training step of a small GPT in torch, with torch's own attention, loss and AdamW and with ggrad.torch's.

    python tests/bench/bench_torch_bridge.py [--seconds 4] [--threads 2] [--tokens 64,512,2048] [--cpu]

Needs the `torch` extra.  One process, interleaved steps, medians; f32.  First the overhead of one call on four tokens.
Where other programs run, --cpu tells more: processor time, on one thread.
"""

import argparse
import os
import statistics
import time

# isort: off
import harness  # before NumPy: it mends the environment
import torch

import ggrad.torch as gt
# isort: on

F = torch.nn.functional
D, HEADS, LAYERS, CLASSES = 256, 4, 4, 512


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside a residual."""

    def __init__(self, attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, D)
        self.up, self.down = torch.nn.Linear(D, 4 * D), torch.nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.out(self.attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def step_of(ours: bool, tokens: int):
    """A call that makes one step."""
    torch.manual_seed(0)
    attention = gt.attention if ours else F.scaled_dot_product_attention
    embedding, head = torch.nn.Embedding(CLASSES, D), torch.nn.Linear(D, CLASSES, bias=False)
    blocks = torch.nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
    params = [*embedding.parameters(), *head.parameters(), *blocks.parameters()]
    optimizer = (gt.AdamW if ours else torch.optim.AdamW)(params, lr=1e-4)
    ids = torch.randint(CLASSES, (1, tokens + 1))

    def step() -> float:
        optimizer.zero_grad()
        hidden, targets = blocks(embedding(ids[:, :-1])).flatten(0, 1), ids[0, 1:]
        loss = gt.linear_cross_entropy(hidden, head.weight, targets) if ours else F.cross_entropy(head(hidden), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def microseconds(call, n: int = 2000) -> float:
    """The median of single calls."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def overhead() -> None:
    """Of one call, beside torch's operator."""
    plain = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    taped = [x.clone().requires_grad_() for x in plain]
    rows = []
    for name, xs in (("forward, no gradients", plain), ("forward", taped)):
        theirs = microseconds(lambda xs=xs: F.scaled_dot_product_attention(*xs, is_causal=True))
        mine = microseconds(lambda xs=xs: gt.attention(*xs, is_causal=True))
        rows.append(f"{name:<24}{mine:8.1f}{theirs:8.1f}{mine - theirs:8.1f}")
    print(f"{'one call, us':<24}{'ggrad':>8}{'torch':>8}{'above':>8}", *rows, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", default="64,512,2048")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    threads = 1 if args.cpu else args.threads
    os.environ["GGRAD_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    clock = time.process_time if args.cpu else time.perf_counter
    overhead()
    print(f"{'step, ms':<24}{'ggrad':>8}{'torch':>8}{'times':>8}")
    for tokens in map(int, args.tokens.split(",")):
        steps = {name: step_of(name == "ggrad", tokens) for name in ("ggrad", "torch")}
        first = {name: step() for name, step in steps.items()}
        assert abs(first["ggrad"] - first["torch"]) < 1e-3, first
        times = harness.interleave(steps, seconds=args.seconds, clock=clock)
        mine, theirs = (statistics.median(times[name]) * 1e3 for name in ("ggrad", "torch"))
        print(f"T = {tokens:<20}{mine:8.1f}{theirs:8.1f}{theirs / mine:8.2f}", flush=True)


if __name__ == "__main__":
    main()
