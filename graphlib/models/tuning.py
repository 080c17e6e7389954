"""Tuning: the loss of packed rows, its graph, and a run over them that keeps the best adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..core.dtype import I32
from ..core.errors import ShapeError, TrainingError
from ..core.tensor import Tensor, tensor
from ..files import checkpoint
from ..graph import Graph
from ..train import schedule
from ..train.optim import AdamW
from ..train.trainer import Trainer
from .data import IGNORED, Example, Packed

if TYPE_CHECKING:
    from .model import Model

CHUNK = 64  # tokens whose logits exist at a time


class Loss:
    """The mean loss of the counted tokens of a row, and the leaves that a batch fills.

    Logits are made a chunk of tokens at a time, and each chunk's gradient by the states as soon as they are there: so
    no more than one chunk of [vocabulary] exists, in the forward pass as well as in the backward one.

    Attributes:
        value: a scalar.
        inputs: tokens, targets, positions, cu_seqlens, 1 / counted tokens, and with `dropout` the seed of it.
        blocks: outputs of the model's blocks.
    """

    def __init__(self, model: Model, context: int, most: int, *, dropout: bool = False, chunk: int = CHUNK) -> None:
        tokens = tensor(shape=(1, context), dtype=I32, name="tokens")
        targets = tensor(shape=(1, context), dtype=I32, name="targets")
        positions = tensor(shape=(context,), dtype=I32, name="positions")
        cu = tensor(shape=(most + 1,), dtype=I32, name="cu_seqlens")
        share = tensor(shape=(), name="1 / counted tokens")
        seed = tensor(shape=(), dtype=I32, name="seed of dropout") if dropout else None
        self.inputs = (tokens, targets, positions, cu, share, *([seed] if seed is not None else []))
        states, b = model.states(tokens, positions, cu_seqlens=cu, seed=seed, context=context)
        self.blocks = b.blocks
        rows, wanted = states.reshape(context, states.shape[-1]), targets.reshape(context)
        self.value = ops.sum(_chunked(model, rows, wanted, share, chunk))

    def filled(self, batch: Sequence[np.ndarray], seed: int = 0) -> tuple[np.ndarray, ...]:
        """A batch of `Packed` with what the loss needs besides."""
        n = int((batch[1] != IGNORED).sum())
        more = [np.array(seed, np.int32)] if len(self.inputs) > 5 else []
        return (*batch, np.array(1 / max(1, n), np.float32), *more)


def _chunked(model: Model, rows: Tensor, wanted: Tensor, share: Tensor, chunk: int) -> Tensor:
    """The mean loss, whose gradient by the rows is made together with it."""
    losses, gradients = [], []
    for begin in range(0, rows.shape[0], chunk):
        part = slice(begin, min(begin + chunk, rows.shape[0]))
        loss, gradient = model.loss_and_gradient(ops.stop_gradient(rows[part]), wanted[part], share)
        losses.append(loss)
        gradients.append(gradient)
    whole = losses[0]
    for loss in losses[1:]:
        whole = whole + loss
    gradient = gradients[0] if len(gradients) == 1 else ops.concat(*gradients, axis=0)
    # rows - rows is 0, and its gradient is what was made above
    return whole * share + ops.sum(ops.stop_gradient(gradient) * (rows - ops.stop_gradient(rows)))


class _Filled:
    """Packed rows with the other inputs of a loss; dropout's seed follows from the row's place in the run."""

    def __init__(self, packed: Packed, loss: Loss) -> None:
        self.packed, self.loss = packed, loss
        self.position = packed.position

    def __next__(self) -> tuple[np.ndarray, ...]:
        batch = next(self.packed)
        turn, row = self.position = self.packed.position
        return self.loss.filled(batch, (self.packed.seed + 7919 * turn + row) % 2**31)

    def seek(self, position) -> None:
        self.packed.seek(position)
        self.position = self.packed.position


def evaluate(model: Model, examples: Sequence[Example], context: int, *, threads: int | None = None) -> float:
    """The mean loss, in nats, of all counted tokens."""
    return Evaluation(model, examples, context, threads=threads)()


class Evaluation:
    """`evaluate`, with a graph that is made once."""

    def __init__(self, model: Model, examples: Sequence[Example], context: int, *, threads: int | None = None) -> None:
        self.packed = Packed(examples, context=context, shuffle=False, alone=model.architecture.recurrent)
        self.loss = Loss(model, context, self.packed.most)
        self.graph = Graph().build_forward_expand(self.loss.value)
        self.threads = threads

    def __call__(self) -> float:
        total, tokens = 0.0, 0
        for row in self.packed.rows(0):
            batch = self.packed.batch(row)
            n = int((batch[1] != IGNORED).sum())
            if not n:
                continue
            for leaf, value in zip(self.loss.inputs, self.loss.filled(batch), strict=True):
                leaf.set(value)
            self.graph.compute(threads=self.threads)
            total += n * self.loss.value.item()
            tokens += n
        return total / max(1, tokens)


class Tuning:
    """A run that tunes a model's adapters.

    Args:
        model: with adapters.
        examples: to train on.
        held_out: examples that are not trained on; their loss is the validation's.
        context: tokens of a row.
        steps: in all.
        rows: rows in a step.
        lr: the highest learning rate; it grows over the first tenth of the steps, at most 20, and falls along a cosine.
        out: where the adapter goes; beside it lie the log (.csv) and the checkpoint (.safetensors) of the run.
        evaluate_every: steps between two looks at the held-out examples; 0 for only the last.
        patience: so many of those in a row without a better loss end the run; 0 for no limit.
        gradient_checkpoints: less memory, more time: see `Graph.build_backward_expand`.
        progress: whether to show a bar.
        note: called with each validation loss and whether it is the best so far.
    """

    def __init__(
        self,
        model: Model,
        examples: Sequence[Example],
        held_out: Sequence[Example] = (),
        *,
        context: int,
        steps: int,
        out: str | os.PathLike[str],
        rows: int = 1,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        evaluate_every: int = 0,
        patience: int = 0,
        gradient_checkpoints: bool = False,
        checkpoint_every: int = 50,
        threads: int | None = None,
        progress: bool = True,
        seed: int = 0,
        note: Callable[[float, bool], None] | None = None,
    ) -> None:
        if model.lora is None:
            raise ShapeError("Tuning(): the model has no adapters; model.add_lora() adds them")
        if steps < 1 or rows < 1 or context < 2:
            raise ShapeError(f"Tuning(): steps={steps} and rows={rows} must be at least 1, and context={context} 2")
        self.model, self.steps, self.out, self.note = model, steps, Path(out), note
        self.patience = patience
        self.state: dict[str, float] = {"best": -1.0, "worse": 0}  # -1: nothing was held out yet
        packed = Packed(examples, context=context, seed=seed, alone=model.architecture.recurrent)
        self.loss = Loss(model, context, packed.most, dropout=model.lora.dropout > 0)
        self._evaluation = Evaluation(model, held_out, context, threads=threads) if held_out else None
        self.trainer = Trainer(
            self.loss.value,
            self.loss.inputs,
            _Filled(packed, self.loss),
            AdamW(
                list(model.lora.matrices.values()),
                lr=schedule.cosine(lr, steps, warmup=min(20, steps // 10)),
                weight_decay=weight_decay,
            ),
            accumulate=rows,
            count=lambda batch: int((batch[1] != IGNORED).sum()),
            threads=threads,
            log=self.log,
            checkpoint=self.state_file,
            checkpoint_every=checkpoint_every,
            evaluate=self._evaluate if self._evaluation else None,
            evaluate_every=evaluate_every if self._evaluation else 0,
            progress=progress,
            extra=self.state,
            gradient_checkpoints=self.loss.blocks if gradient_checkpoints else (),
        )

    @property
    def log(self) -> Path:
        return self.out.with_suffix(".csv")

    @property
    def state_file(self) -> Path:
        return self.out.with_suffix(".safetensors")

    @property
    def best(self) -> float | None:
        """The least validation loss so far."""
        return self.state["best"] if self.state["best"] >= 0 else None

    def run(self) -> str:
        """Train, and say why the run ended: see `Trainer.run`; or "patience".

        The adapter with the least validation loss is in `out` as soon as it is known; without held-out examples it is
        the last one.  However the run ends, a checkpoint of the last complete step is there to `resume` from.
        """
        try:
            return self.trainer.run(self.steps)
        except _Enough:
            return "patience"
        finally:
            if self.best is None and self.trainer.step:
                self.model.save_adapter(self.out)

    def resume(self) -> None:
        """Go on where the run's checkpoint was written, to the same bits."""
        self.trainer.resume()
        kept = checkpoint.peek(self.state_file).extra
        self.state.update({key: kept[key] for key in self.state if key in kept})

    def _evaluate(self) -> float:
        assert self._evaluation is not None
        value = self._evaluation()
        better = self.best is None or value < self.best
        if better:
            self.model.save_adapter(self.out)
            self.state.update(best=value, worse=0)
        else:
            self.state["worse"] += 1
        if self.note is not None:
            self.note(value, better)
        if self.patience and self.state["worse"] >= self.patience:
            raise _Enough(f"{self.patience} looks at the held-out examples in a row were no better")
        return value


class _Enough(TrainingError):
    """The held-out loss has not become better for too long."""
