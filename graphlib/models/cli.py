"""The command `ggrad`: tune a language model of a GGUF file, write with it, measure it, merge it, look at it."""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
from collections import Counter
from pathlib import Path

from ..core.dtype import BF16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from ..core.errors import GgradError, ShapeError
from . import data
from .data import Dataset
from .generate import Sampling
from .model import Model, load
from .tuning import Tuning, evaluate

WRITTEN = {str(d): d for d in (F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0)}
MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except (GgradError, OSError) as error:
        print(f"ggrad {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


# -- commands -----------------------------------------------------------------------------------------------


def _finetune(args: argparse.Namespace) -> int:
    model = load(args.model)
    model.add_lora(
        args.rank, alpha=args.alpha, targets=args.targets, rslora=args.rslora, dropout=args.dropout, seed=args.seed
    )
    context = args.context or min(512, model.config.context)
    examples = _examples(args, model, context)
    print(_told(examples))
    if args.dry_run:
        _show(model, examples, args.dry_run)
        return 0
    training, held_out = examples, Dataset([])
    if args.validation and len(examples.examples) > 1:
        training, held_out = examples.split(args.validation, args.seed)
    packed = data.Packed(training.examples, context=context, seed=args.seed, alone=model.architecture.recurrent)
    rows = len(packed.rows(0))
    accumulate = min(args.rows, rows)
    steps = args.steps or max(1, math.ceil(rows * args.epochs / accumulate))
    tuning = _fitting(args, model, training, held_out, context=context, steps=steps, rows=accumulate)
    assert model.lora is not None
    sizes = sum(t.size for t in model.lora.matrices.values())
    print(
        f"{len(training.examples)} examples in {rows} rows of {context} tokens, {len(held_out.examples)} held out; "
        f"{sizes:,} parameters in {len(model.lora.names)} adapters; {steps} steps of {accumulate} rows"
    )
    before = evaluate(model, held_out.examples, context, threads=args.threads) if held_out.examples else None
    if args.resume:
        tuning.resume()
        print(f"resumed after step {tuning.trainer.step}")
    if args.sample:
        _sample(args, model, "before")
    try:
        why = tuning.run()
    except KeyboardInterrupt:
        print(
            f"\ninterrupted after step {tuning.trainer.step}; the same command with --resume goes on", file=sys.stderr
        )
        return 130
    last = tuning.trainer.last
    print(f"ended: {why}. {last.step} steps, {last.tokens:,} counted tokens, {last.seconds:.0f} s")
    if before is not None and tuning.best is not None:
        print(f"loss of the held-out examples: {before:.4f} before, {tuning.best:.4f} after")
    idle = [n for n in model.lora.names if not model.lora.matrices[n + ".lora_b"].numpy().any()]
    if idle:
        print(f"{len(idle)} adapters have not changed, the first is that of {idle[0]}")
    if args.sample:
        model.load_adapter(args.out)
        _sample(args, model, "after")
    print(
        f"adapter: {args.out}; log: {tuning.log}; checkpoint: {tuning.state_file}\n"
        f'  ggrad generate {args.model} --lora {args.out} -p "..."\n'
        f"  ggrad merge {args.model} --lora {args.out} --out tuned.gguf"
    )
    return 0


def _generate(args: argparse.Namespace) -> int:
    model = _with_adapter(args)
    sampling = _sampling(args)
    if not args.chat:
        if args.prompt is None:
            raise ShapeError("give a prompt with -p, or --chat")
        print(args.prompt, end="", flush=True)
        _print(model.generate(args.prompt, tokens=args.tokens, sampling=sampling, stop=args.stop, threads=args.threads))
        return 0
    messages = [{"role": "system", "content": args.system}] if args.system else []
    prompts = iter([args.prompt]) if args.prompt is not None else _typed()
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        answer = _print(
            model.generate(messages, tokens=args.tokens, sampling=sampling, stop=args.stop, threads=args.threads)
        )
        messages.append({"role": "assistant", "content": answer})
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    model = _with_adapter(args)
    context = args.context or min(512, model.config.context)
    examples = _examples(args, model, context)
    print(_told(examples))
    loss = evaluate(model, examples.examples, context, threads=args.threads)
    print(f"loss {loss:.4f} nats per token, perplexity {math.exp(min(700, loss)):.2f}")
    return 0


def _merge(args: argparse.Namespace) -> int:
    model = _with_adapter(args)
    counts = model.merge(args.out, dtype=WRITTEN[args.dtype] if args.dtype else None)
    told = ", ".join(f"{n} as {kind}" for kind, n in counts.items())
    print(f"{args.out}: {told}; {os.path.getsize(args.out) / MIB:.1f} MiB")
    return 0


def _info(args: argparse.Namespace) -> int:
    model = load(args.model)
    c = model.config
    types: Counter[str] = Counter()
    for info in model.file.tensors.values():
        types[info.type] += info.nbytes
    elements = sum(w.size for w in model.weights.values())
    print(f"{args.model}: {model.file.metadata.get('general.name', 'no name')}")
    print(f"architecture {c.arch}: {c.layers} blocks, width {c.width}, {max(c.heads)} heads, {max(c.kv_heads)} of keys")
    print(f"vocabulary {c.vocabulary}, trained for {c.context} tokens, {elements:,} weights")
    print("types: " + ", ".join(f"{kind} {n / MIB:.1f} MiB" for kind, n in types.most_common()))
    print(f"chat template: {'yes' if model.file.metadata.get('tokenizer.chat_template') else 'no'}")
    if model.weights.expanded:
        print(f"{len(model.weights.expanded)} tensors are held as f32, since products do not read their type")
    model.add_lora(args.rank)
    for checkpoints in (False, True):
        parts = _parts(model, args.context or min(512, c.context), checkpoints)
        print(
            f"tuning with rank {args.rank}{', with checkpoints' if checkpoints else ''}: "
            f"{sum(parts.values()) / MIB:.0f} MiB ({_listed(parts)})"
        )
    return 0


# -- memory -------------------------------------------------------------------------------------------------


def _parts(model: Model, context: int, checkpoints: bool) -> dict[str, int]:
    """Bytes of a run's parts, by the plan of its graph; nothing is allocated for it."""
    from ..graph import Graph
    from .tuning import Loss

    loss = Loss(model, context, 1 if model.architecture.recurrent else max(1, context // 4))
    graph = Graph().build_forward_expand(loss.value)
    graph.build_backward_expand(loss.value, keep=False, gradient_checkpoints=loss.blocks if checkpoints else ())
    assert model.lora is not None
    adapters = sum(t.nbytes for t in model.lora.matrices.values())
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "this process so far": resident,
        "weights": sum(w.nbytes for w in model.weights.values()),
        "adapters, their gradients and moments": 4 * adapters,
        "activations": graph.plan().arena,
    }


def _fitting(
    args, model: Model, training: Dataset, held_out: Dataset, *, context: int, steps: int, rows: int
) -> Tuning:
    """The run, with gradient checkpoints if they are asked for, or needed to fit into the memory that is given.

    Raises:
        ShapeError: it does not fit; says the bytes of each part.
    """
    checkpoints = args.checkpoints
    if args.memory:
        plain = _parts(model, context, checkpoints)
        if sum(plain.values()) > args.memory and not checkpoints:
            checkpoints = True
            plain = _parts(model, context, True)
        if sum(plain.values()) > args.memory:
            raise ShapeError(
                f"the run needs {sum(plain.values()) / MIB:.0f} MiB, and --memory allows {args.memory / MIB:.0f}: "
                f"{_listed(plain)}. A smaller --context or --rank needs less"
            )
        print(
            f"memory: {sum(plain.values()) / MIB:.0f} MiB ({_listed(plain)})"
            f"{', with gradient checkpoints' if checkpoints else ''}"
        )
    every = args.evaluate_every if args.evaluate_every is not None else max(1, steps // 10)
    return Tuning(
        model, training.examples, held_out.examples, context=context, steps=steps, rows=rows, lr=args.lr, out=args.out,
        weight_decay=args.weight_decay, evaluate_every=every, patience=args.patience, gradient_checkpoints=checkpoints,
        threads=args.threads, progress=not args.quiet, seed=args.seed, note=_noted,
    )  # fmt: skip


def _noted(loss: float, better: bool) -> None:
    print(f"held out: {loss:.4f}{', the best so far' if better else ''}", file=sys.stderr)


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n / MIB:.0f} MiB" for name, n in parts.items())


# -- data and text ------------------------------------------------------------------------------------------


def _examples(args: argparse.Namespace, model: Model, context: int) -> Dataset:
    if args.text:
        text = Path(args.text).read_bytes()
        try:
            return data.of_text(text.decode(), model.tokenizer, context)
        except UnicodeDecodeError as error:
            raise ShapeError(f"{args.text} is no UTF-8: byte {error.start}") from None
    return data.of_jsonl(args.data, model.tokenizer, context, answers_only=args.train_on == "answers")


def _told(d: Dataset) -> str:
    tokens = sum(len(e.tokens) for e in d.examples)
    told = f"{len(d.examples)} examples, {tokens:,} tokens, of which {d.counted:,} are counted in the loss"
    if d.cut:
        told += f"; {d.cut} were longer than the context and are cut"
    return told + (f"; {d.dropped} have nothing that is counted and are left out" if d.dropped else "")


def _show(model: Model, d: Dataset, many: int) -> None:
    """Examples token by token: counted ones green (or in brackets where there are no colours)."""
    colours = sys.stdout.isatty()
    for e in d.examples[:many]:
        text = ""
        for token, counted in zip(e.tokens.tolist(), e.counted.tolist(), strict=True):
            piece = model.tokenizer.decode([token])
            text += (f"\033[32m{piece}\033[0m" if colours else f"[{piece}]") if counted else piece
        print("-" * 40)
        print(text)


def _sample(args: argparse.Namespace, model: Model, when: str) -> None:
    print(f"a sample {when}: ", end="")
    prompt = args.sample if args.text else [{"role": "user", "content": args.sample}]
    _print(model.generate(prompt, tokens=64, sampling=Sampling(temperature=0.0), threads=args.threads))


def _print(pieces) -> str:
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def _typed():
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line.strip():
            yield line


def _with_adapter(args: argparse.Namespace) -> Model:
    model = load(args.model)
    if args.lora:
        model.load_adapter(args.lora)
    return model


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
        repeat_penalty=args.repeat_penalty, seed=args.seed,
    )  # fmt: skip


# -- arguments ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ggrad", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, about: str) -> argparse.ArgumentParser:
        p = commands.add_parser(
            name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        p.set_defaults(run=run)
        p.add_argument("model", help="a GGUF file, or the first of a split one")
        p.add_argument("--threads", type=_positive, help="by default the cores of this machine")
        return p

    def examples(p: argparse.ArgumentParser) -> None:
        source = p.add_mutually_exclusive_group(required=True)
        source.add_argument("--data", help="examples, one JSON object in each line")
        source.add_argument("--text", help="a text file")
        p.add_argument("--train-on", choices=["answers", "all"], default="answers", help="tokens that count")
        p.add_argument("--context", type=_positive, help="tokens of a row; by default 512")

    p = command("finetune", _finetune, "tune a model to examples: an adapter is written")
    examples(p)
    p.add_argument("--out", default="adapter.gguf", help="the adapter: a .gguf file, or else a folder for peft")
    p.add_argument("--epochs", type=float, default=3.0, help="times that each example is seen")
    p.add_argument("--steps", type=_positive, help="instead of --epochs")
    p.add_argument("--rows", type=_positive, default=1, help="rows of examples in a step")
    p.add_argument("--lr", type=float, default=5e-4, help="highest learning rate")
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--rank", type=_positive, default=16)
    p.add_argument("--alpha", type=float, help="by default twice the rank")
    p.add_argument("--rslora", action="store_true", help="scale by alpha / sqrt(rank)")
    p.add_argument("--dropout", type=float, default=0.0, help="of what adapters read")
    p.add_argument(
        "--targets", nargs="+", help="last parts of matrices' names, as attn_q; by default all of the blocks"
    )
    p.add_argument("--validation", type=float, default=0.1, help="part of the examples that is held out; 0 for none")
    p.add_argument("--evaluate-every", type=int, help="steps; by default a tenth of all")
    p.add_argument("--patience", type=int, default=0, help="looks without a better loss that end the run; 0: no limit")
    p.add_argument("--checkpoints", action="store_true", help="gradient checkpoints: less memory, more time")
    p.add_argument("--memory", type=_bytes, help="the most, as 4G: a run that needs more is changed, or refused")
    p.add_argument("--resume", action="store_true", help="go on where the run ended")
    p.add_argument("--sample", metavar="PROMPT", help="answer it before and after")
    p.add_argument(
        "--dry-run", type=int, nargs="?", const=3, default=0, metavar="N", help="show N examples, no training"
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.add_argument("--seed", type=int, default=0)

    p = command("generate", _generate, "write text that follows a prompt, or answer in a conversation")
    p.add_argument("--lora", help="an adapter")
    p.add_argument("-p", "--prompt")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's message; without one, ask for them")
    p.add_argument("--system", help="the system's message of a conversation")
    p.add_argument("-n", "--tokens", type=_positive, default=256, help="the most")
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    p.add_argument("--top-k", type=int, default=40)
    p.add_argument("--top-p", type=float, default=0.95)
    p.add_argument("--min-p", type=float, default=0.05)
    p.add_argument("--repeat-penalty", type=float, default=1.0)
    p.add_argument("--stop", nargs="+", default=[], help="words before which the text ends")
    p.add_argument("--seed", type=int, default=0)

    p = command("evaluate", _evaluate, "the loss and the perplexity of examples")
    p.add_argument("--lora", help="an adapter")
    examples(p)

    p = command("merge", _merge, "write a model with an adapter added to its matrices")
    p.add_argument("--lora", required=True, help="the adapter")
    p.add_argument("--out", required=True)
    p.add_argument(
        "--dtype", choices=WRITTEN, help="of the changed matrices; by default as they were, but at least q8_0"
    )

    p = command("info", _info, "what a file holds, and the memory that tuning it would take")
    p.add_argument("--rank", type=_positive, default=16)
    p.add_argument("--context", type=_positive)
    return parser


def _positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return n


def _bytes(text: str) -> int:
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    unit = units.get(text[-1:].lower())
    return int(float(text[:-1] if unit else text) * (unit or 1))


if __name__ == "__main__":
    raise SystemExit(main())
