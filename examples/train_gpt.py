"""Trains a small GPT on bytes: of the source text of Python's standard library, or of a file of yours.

    python train_gpt.py                    # two minutes on two cores
    python train_gpt.py --text novel.txt --steps 3000 --out novel
    python train_gpt.py --resume
    mpirun -n 4 python train_gpt.py        # on four processes, of one machine or several: `pip install ggrad[mpi]`

The model reads bytes and predicts the next one.  It is a stack of blocks with RMS norms, rotary positions, attention
with grouped heads, and gated MLPs.  Beside its loss stand those of tables that count pairs and triples of bytes.
Everything from the embedding to the updated parameters is one graph, run by one call a step.
"""

import argparse
import hashlib
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ggrad as gg
from ggrad.files.atomic import write_whole

BYTES = 256
GENERATED = {"pydoc_data", "encodings"}  # folders of texts and tables that no person wrote
TESTS = {"test", "tests", "idle_test"}
INSTALLED = {"site-packages", "dist-packages"}
CHECKPOINT, LOG, PICTURE, SAMPLE = "model.safetensors", "log.csv", "loss.png", "sample.txt"
KEPT = (
    "text", "layers", "width", "heads", "kv_heads", "hidden", "context",
    "steps", "batch", "accumulate", "lr", "seed",
)  # fmt: skip # arguments that a resumed run takes over


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int


class GPT:
    """The parameters, and the graphs made of them."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.params: dict[str, gg.Tensor] = {}
        self._rng = np.random.default_rng(seed)
        c = config
        self._matrix("embedding", BYTES, c.width, scale=1.0)
        for i in range(c.layers):
            self._ones(f"{i}.attention.norm", c.width)
            self._attention_parameters(i)
            self._ones(f"{i}.mlp.norm", c.width)
            self._matrix(f"{i}.mlp.gate", c.hidden, c.width)
            self._matrix(f"{i}.mlp.up", c.hidden, c.width)
            self._matrix(f"{i}.mlp.out", c.width, c.hidden)
        self._ones("norm", c.width)
        self._matrix("head", BYTES, c.width)

    def logits(self, tokens: gg.Tensor) -> gg.Tensor:
        """[batch, tokens, 256] from i32 [batch, tokens]."""
        p, c = self.params, self.config
        positions = gg.tensor(np.arange(tokens.shape[1]), name="positions")
        x = gg.get_rows(p["embedding"], tokens)  # [batch, tokens, width]
        for i in range(c.layers):
            x = x + self._attention(i, gg.rms_norm(x, p[f"{i}.attention.norm"]), positions)
            x = x + self._mlp(i, gg.rms_norm(x, p[f"{i}.mlp.norm"]))
        return self._product("head", gg.rms_norm(x, p["norm"]))

    def loss(self, tokens: gg.Tensor, targets: gg.Tensor) -> gg.Tensor:
        """Mean over all tokens of -log(probability of the byte that follows), in nats."""
        return gg.cross_entropy_loss(self.logits(tokens), targets)

    def _attention_parameters(self, i: int) -> None:
        c, d = self.config, self.config.width // self.config.heads
        self._matrix(f"{i}.attention.q", c.heads * d, c.width)
        self._matrix(f"{i}.attention.k", c.kv_heads * d, c.width)
        self._matrix(f"{i}.attention.v", c.kv_heads * d, c.width)
        self._matrix(f"{i}.attention.out", c.width, c.heads * d)

    def _attention(self, i: int, x: gg.Tensor, positions: gg.Tensor) -> gg.Tensor:
        c = self.config
        batch, length, width = x.shape

        def heads(name: str, n: int) -> gg.Tensor:  # [batch, tokens, heads, d]
            return self._product(f"{i}.attention.{name}", x).reshape(batch, length, n, width // c.heads)

        q = gg.rope(heads("q", c.heads), positions)
        k = gg.rope(heads("k", c.kv_heads), positions)
        v = heads("v", c.kv_heads)
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))  # [batch, heads, tokens, d]
        out = gg.flash_attn_ext(q, k, v, causal=True)  # [batch, tokens, heads, d]
        return self._product(f"{i}.attention.out", out.reshape(batch, length, width))

    def _mlp(self, i: int, x: gg.Tensor) -> gg.Tensor:
        gate, up = self._product(f"{i}.mlp.gate", x), self._product(f"{i}.mlp.up", x)
        return self._product(f"{i}.mlp.out", gg.swiglu(gate, up))

    def _product(self, name: str, x: gg.Tensor) -> gg.Tensor:
        return gg.mul_mat(self.params[name], x)

    def _matrix(self, name: str, rows: int, columns: int, scale: float | None = None) -> None:
        """Normal values, by default of a size that a product with them keeps the size of what they multiply."""
        values = self._rng.standard_normal((rows, columns)) * (columns**-0.5 if scale is None else scale)
        self.params[name] = gg.tensor(values, name=name, param=True)

    def _ones(self, name: str, size: int) -> None:
        self.params[name] = gg.tensor(np.ones(size), name=name, param=True)


class Validation:
    """The loss on held-out text: the mean over windows spread evenly over it."""

    def __init__(
        self,
        model: GPT,
        text: np.ndarray,
        *,
        tokens: int,
        threads: int | None,
        comm: gg.distributed.Comm | None = None,
    ) -> None:
        context, self.threads, self.comm = model.config.context, threads, comm or gg.distributed.Comm()
        count = max(1, min(tokens, len(text) - 1) // context)
        starts = np.linspace(0, len(text) - context - 1, count).astype(np.int64)
        self.windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
        self.batch = min(16, count)
        self.inputs = gg.tensor(shape=(self.batch, context), dtype=gg.I32, name="tokens")
        self.targets = gg.tensor(shape=(self.batch, context), dtype=gg.I32, name="targets")
        self.loss = model.loss(self.inputs, self.targets)
        self.graph = gg.Graph().build_forward_expand(self.loss)

    def __call__(self) -> float:
        losses = []
        batches = range(0, len(self.windows) - self.batch + 1, self.batch)
        for at in batches[self.comm.rank :: self.comm.size]:  # the ranks share the work
            windows = self.windows[at : at + self.batch]
            self.inputs.set(windows[:, :-1])
            self.targets.set(windows[:, 1:])
            self.graph.compute(threads=self.threads)
            losses.append(self.loss.item())
        return float(np.mean([loss for theirs in self.comm.exchange(losses) for loss in theirs]))


def generate(model: GPT, prompt: str, length: int, *, temperature: float, seed: int, threads: int | None) -> str:
    """`length` bytes that the model thinks may follow the prompt."""
    context = model.config.context
    tokens = gg.tensor(shape=(1, context), dtype=gg.I32, name="tokens")
    logits = model.logits(tokens)
    graph = gg.Graph().build_forward_expand(logits)
    rng = np.random.default_rng(seed)
    text = list(prompt.encode())
    window = np.zeros((1, context), np.int32)
    for _ in range(length):
        seen = text[-context:]
        window[0, : len(seen)] = seen  # what stands behind them is in the future, where nothing looks
        tokens.set(window)
        graph.compute(threads=threads)
        next_logits = logits.numpy()[0, len(seen) - 1].astype(np.float64) / max(temperature, 1e-6)
        odds = np.exp(next_logits - next_logits.max())
        text.append(int(rng.choice(BYTES, p=odds / odds.sum())))
    return bytes(text).decode(errors="replace")


def read_text(file: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes held out."""
    if file is not None:
        text = np.frombuffer(Path(file).read_bytes(), np.uint8)
        cut = len(text) * 19 // 20
        return text[:cut], text[cut:]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not (GENERATED | TESTS | INSTALLED) & set(relative.parts):
            held_out = hashlib.sha256(relative.as_posix().encode()).digest()[0] < BYTES // 20
            parts[held_out].append(path.read_bytes())
    training, held_out_text = (np.frombuffer(b"".join(files), np.uint8) for files in parts)
    return training, held_out_text


def table_losses(training: np.ndarray, text: np.ndarray) -> tuple[float, float]:
    """Nats per byte on `text` of the frequencies of pairs and of triples of bytes in the training text."""
    x, y = training.astype(np.int32), text.astype(np.int32)
    pairs = np.bincount(x[:-1] * BYTES + x[1:], minlength=BYTES**2).reshape(BYTES, BYTES) + 1
    bigram = (pairs / pairs.sum(axis=1, keepdims=True))[y[:-1], y[1:]]
    triples = np.bincount((x[:-2] * BYTES + x[1:-1]) * BYTES + x[2:], minlength=BYTES**3).reshape(-1, BYTES)
    context = y[:-2] * BYTES + y[1:-1]
    trust = 4.0  # triples as if each pair of bytes had been seen so often, followed as the table of pairs says
    trigram = (triples[context, y[2:]] + trust * bigram[1:]) / (triples.sum(axis=1)[context] + trust)
    return float(-np.log(bigram).mean()), float(-np.log(trigram).mean())


def arguments(description: str, out: str) -> argparse.Namespace:
    """Of the command line; when resuming, those of the run that is resumed unless they are given anew."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", help="a file to read instead of the standard library; its end is held out")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of all that is written")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in that folder")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2, help="heads of keys and values, shared by groups of heads")
    model.add_argument("--hidden", type=int, default=384, help="width of the MLPs")
    model.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=1500)
    training.add_argument("--batch", type=int, default=8, help="windows of text in a batch")
    training.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    training.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--seconds", type=float, default=75, help="end after this time, with fewer steps if need be")
    training.add_argument("--threads", type=int, help="by default the cores of this machine")
    training.add_argument("--checkpoint-every", type=int, default=200, help="steps")
    training.add_argument("--evaluate-every", type=int, default=200, help="steps")
    sample = parser.add_argument_group("sample")
    sample.add_argument("--prompt", default="def ")
    sample.add_argument("--sample", type=int, default=400, help="bytes to generate")
    sample.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    if args.resume:
        parser.set_defaults(**gg.checkpoint.peek(args.out / CHECKPOINT).extra["arguments"])
        args = parser.parse_args()
    return args


def main(Model=GPT, generate=generate, description=__doc__, out="gpt-run") -> None:
    args = arguments(description.partition("\n\n")[0], out)
    comm = gg.distributed.init()  # one rank, unless mpirun has started several
    say = print if comm.rank == 0 else lambda *_: None
    args.out.mkdir(parents=True, exist_ok=True)
    training, held_out = read_text(args.text)
    say(f"text: {len(training):,} bytes to train on, {len(held_out):,} held out")
    config = Config(**{name: getattr(args, name) for name in Config.__dataclass_fields__})
    model = Model(config, args.seed)
    say(f"model: {config}, {sum(p.size for p in model.params.values()):,} parameters")

    validation = Validation(model, held_out, tokens=40_000, threads=args.threads, comm=comm)
    warmup = min(50, args.steps // 10 + 1)
    start, first = time.perf_counter(), 0  # of this run: its time, its first step

    def learning_rate(step: int) -> float:
        """After a warm-up half a cosine over all steps, or over the time there is for them if that is shorter.

        Time begins to count when a tenth of it is over: where there is enough, it changes nothing.
        """
        passed = max(0.0, ((time.perf_counter() - start) / args.seconds - 0.1) / 0.9)
        hurried = first + round(passed * (args.steps - first))
        return gg.schedule.cosine(args.lr, args.steps)(max(step, hurried)) * min(1, (step + 1) / warmup)

    matrices = [p for p in model.params.values() if p.ndim == 2]
    vectors = [p for p in model.params.values() if p.ndim == 1]
    optimizer = gg.optim.AdamW(
        [gg.optim.Group(matrices, weight_decay=0.1), gg.optim.Group(vectors, weight_decay=0.0)],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    begin, end = gg.data.Share.rows(args.batch, comm)
    tokens = gg.tensor(shape=(end - begin, config.context), dtype=gg.I32, name="tokens")
    targets = gg.tensor(shape=tokens.shape, dtype=gg.I32, name="targets")
    trainer = gg.Trainer(
        model.loss(tokens, targets),
        (tokens, targets),
        gg.data.Share(gg.data.Windows(training, batch=args.batch, context=config.context, seed=args.seed), comm),
        optimizer,
        accumulate=args.accumulate,
        threads=args.threads,
        log=args.out / LOG,
        checkpoint=args.out / CHECKPOINT,
        checkpoint_every=args.checkpoint_every,
        evaluate=validation,
        evaluate_every=args.evaluate_every,
        comm=comm,
        extra={"arguments": {name: getattr(args, name) for name in KEPT}},
    )
    say(f"\nmemory of a step:\n{trainer.memory()}\n")
    if args.resume:
        trainer.resume()
        first = trainer.step
        say(f"going on after step {first}")
    try:
        trainer.run(args.steps, seconds=args.seconds)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after step {trainer.step}; --resume goes on from there") from None

    final = Validation(model, held_out, tokens=len(held_out), threads=args.threads, comm=comm)()
    if comm.rank != 0:
        return
    gg.trainer.plot(args.out / LOG, args.out / PICTURE, unit="nats per byte")
    bigram, trigram = table_losses(training, held_out)
    if trainer.step < args.steps:
        print(f"time is up after {trainer.step} of {args.steps} steps; --seconds gives more")
    print(f"\nloss on held-out text after {trainer.step} steps and {trainer.last.seconds:.0f} s, in nats per byte")
    for name, loss in (("table of pairs", bigram), ("table of triples", trigram), ("this model", final)):
        print(f"  {name:<18}{loss:.3f}")

    text = generate(model, args.prompt, args.sample, temperature=args.temperature, seed=args.seed, threads=args.threads)
    write_whole(args.out / SAMPLE, text.encode())
    print(f"\na sample, at temperature {args.temperature:g}:\n\n{text}\n")
    print(f"in {args.out}: {CHECKPOINT}, {LOG}, {PICTURE}, {SAMPLE}")


if __name__ == "__main__":
    main()
