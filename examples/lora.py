"""Tunes a model of train_gpt.py to other text, C by default: its matrices stay, quantized, and thin ones are trained.

    python train_gpt.py && python lora.py
    python lora.py --model novel --text letters.txt --dtype q4_0 --rank 16

Beside every product with a matrix W[out, in] of the model stands one with B A, for A[rank, in] and B[out, rank] (LoRA,
https://arxiv.org/abs/2106.09685).  B is zero at first, so the tuned model begins as the quantized one.  W is read
block by block as it is stored, also on the way back, and never expanded; only A and B have gradients and moments.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import numpy as np

import ggrad as gg

sys.path.append(str(Path(__file__).parent))
from train_gpt import CHECKPOINT, GPT, Config, Validation, generate, read_text

ADAPTERS = "adapters.safetensors"


class Tuned(GPT):
    """A trained model as constants, and the thin matrices beside it."""

    def __init__(self, trained: GPT, *, dtype: gg.dtype.DType, rank: int, seed: int) -> None:
        self.config, self.rank = trained.config, rank
        self.params = {
            name: gg.tensor(p.numpy(), dtype=dtype if p.ndim == 2 else None, name=name, frozen=True)
            for name, p in trained.params.items()
        }
        rng = np.random.default_rng(seed)
        self.adapters: dict[str, gg.Tensor] = {}
        for name, p in self.params.items():
            if p.ndim == 2 and name != "embedding":
                rows, columns = p.shape
                A, B = rng.standard_normal((rank, columns)) * columns**-0.5, np.zeros((rows, rank))
                for which, value in (("A", A), ("B", B)):
                    self.adapters[f"{name}.{which}"] = gg.tensor(value, name=f"{name}.{which}", param=True)

    def _product(self, name: str, x: gg.Tensor) -> gg.Tensor:
        thin = gg.mul_mat(self.adapters[f"{name}.B"], gg.mul_mat(self.adapters[f"{name}.A"], x))
        return gg.mul_mat(self.params[name], x) + thin


def load(folder: Path) -> GPT:
    """The model that train_gpt.py left there."""
    path = folder / CHECKPOINT
    if not path.exists():
        raise SystemExit(f"{path} is not there: train_gpt.py --out {folder} makes it")
    arguments = gg.checkpoint.peek(path).extra["arguments"]
    model = GPT(Config(**{name: arguments[name] for name in Config.__dataclass_fields__}), seed=0)
    gg.checkpoint.load(path, model.params.values())
    return model


def headers() -> tuple[np.ndarray, np.ndarray]:
    """Python's own C headers: bytes to train on, and every tenth file held out."""
    files = sorted(Path(sysconfig.get_path("include")).rglob("*.h"))
    if len(files) < 10:
        raise SystemExit("this Python came without its C headers: --text FILE names something else to read")
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 5) == held) for held in (False, True)]
    return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("gpt-run"), help="folder that train_gpt.py wrote")
    parser.add_argument("--text", help="a file to read instead of C headers; its end is held out")
    quantized = {str(d): d for d in (gg.Q4_0, gg.Q4_1, gg.Q5_0, gg.Q5_1, gg.Q8_0)}
    parser.add_argument("--dtype", choices=quantized, default="q8_0", help="of the model's matrices")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=60, help="end after this time, with fewer steps if need be")
    parser.add_argument("--batch", type=int, default=8, help="windows of text in a batch")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="by default the cores of this machine")
    parser.add_argument("--prompt", default="static PyObject *\n")
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate")
    args = parser.parse_args()
    args.dtype = quantized[args.dtype]
    return args


def main() -> None:
    args = arguments()
    trained = load(args.model)
    training, held_out = read_text(args.text) if args.text else headers()
    print(f"text: {len(training):,} bytes to train on, {len(held_out):,} held out")
    model = Tuned(trained, dtype=args.dtype, rank=args.rank, seed=args.seed)
    whole, thin = (sum(p.size for p in params.values()) for params in (trained.params, model.adapters))
    print(f"model: {whole:,} constants, matrices as {args.dtype}; {thin:,} parameters beside them")

    def loss(m: GPT) -> float:
        return Validation(m, held_out, tokens=40_000, threads=args.threads)()

    losses = {"as it was trained": loss(trained), f"as {args.dtype}": loss(model)}
    tokens = gg.tensor(shape=(args.batch, model.config.context), dtype=gg.I32, name="tokens")
    targets = gg.tensor(shape=tokens.shape, dtype=gg.I32, name="targets")
    trainer = gg.Trainer(
        model.loss(tokens, targets),
        (tokens, targets),
        gg.data.Windows(training, batch=args.batch, context=model.config.context, seed=args.seed),
        gg.optim.AdamW(list(model.adapters.values()), lr=gg.schedule.cosine(args.lr, args.steps), weight_decay=0.0),
        threads=args.threads,
        checkpoint=args.model / ADAPTERS,
    )
    print(f"\nmemory of a step:\n{trainer.memory()}\n")
    try:
        trainer.run(args.steps, seconds=args.seconds)
    except KeyboardInterrupt:
        print(f"interrupted after step {trainer.step}")
    losses[f"tuned, {trainer.step} steps"] = loss(model)
    print("\nloss on held-out text, in nats per byte")
    for name, value in losses.items():
        print(f"  {name:<20}{value:.3f}")
    sample = generate(model, args.prompt, args.sample, temperature=0.7, seed=args.seed, threads=args.threads)
    print(f"\na sample:\n\n{sample}\n\nin {args.model}: {ADAPTERS}")


if __name__ == "__main__":
    main()
