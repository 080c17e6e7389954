"""Training runs: batches, steps, progress, a log, checkpoints.  By hand it is a few lines more; see `ggrad.optim`."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.errors import CheckpointError, DistributedError, GradientError, GraphError, NotComputedError, TrainingError
from ..core.extras import need
from ..core.tensor import Tensor, tensor
from ..files import checkpoint
from ..files.atomic import read_whole, write_whole
from ..graph import Graph
from .data import Data
from .optim import Optimizer

Counts = Callable[[tuple[np.ndarray, ...]], int]
Weighs = Callable[[tuple[np.ndarray, ...]], float]


class Ranks(Protocol):
    """What a trainer asks of a group of ranks: see `ggrad.distributed.Comm`."""

    rank: int
    size: int

    def exchange(self, value: Any) -> list: ...
    def broadcast(self, a: np.ndarray, root: int = 0) -> np.ndarray: ...


@dataclass
class Row:
    """One step in the log."""

    step: int = 0
    loss: float = float("nan")
    lr: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0  # counted since the run began
    seconds: float = 0.0  # since the run began, interruptions left out
    validation: float | None = None  # what `evaluate` gave after this step


class Trainer:
    """Minimizes a loss.

    A step takes `accumulate` batches.  Its gradient is that of the mean loss over all their counted tokens, however
    many each has.  Which are counted, the loss says: cross entropy leaves out targets that are its `ignore_index`;
    batches of a loss that leaves out nothing weigh the same.  With one batch a step, everything up to the updated
    parameters is one graph and one call.

    However a run ends (see `run`), a checkpoint of the last complete step is written where one was asked for.

    Args:
        loss: a scalar, the mean over the counted tokens of a batch.
        inputs: the leaves that a batch fills, in the batch's order.
        data: gives batches; see `ggrad.data.Data`.
        optimizer: not yet built into a graph.
        accumulate: batches in a step.
        clip: the largest norm of the gradient; None for no limit.
        count: how many tokens of a batch are counted in its loss, where the loss cannot say: one that multiplies by a
            mask of its own, or several with targets of their own.
        threads: see `Graph.compute`.
        log: a CSV file with a row for each step.  Resuming continues it.
        checkpoint: a file that is written every `checkpoint_every` steps (0: only at the end of `run`, and when
            it is interrupted).
        evaluate: called every `evaluate_every` steps and after the last; the number it gives is logged.
        patience: so many steps in a row without finite gradients end the run.  They change nothing.
        progress: whether to show a bar.
        rng: a generator whose state belongs into checkpoints.
        extra: what else does; anything that JSON can hold.
        gradient_checkpoints: see `Graph.build_backward_expand`.
        comm: a group of ranks that train together, see `ggrad.distributed`: each on its own data, with the gradient
            of the mean loss over the counted tokens of all.  All begin with the parameters of rank 0, and call `run`,
            `save` and `resume` at the same time; rank 0 alone writes files and shows progress.  `evaluate` is
            called on all ranks, and what rank 0 gets is logged.
        shard_optimizer: keep on each rank only its part of the optimizer's state.  Checkpoints have all of it.
        deterministic: have the bits of a step not depend on which rank has which batch.

    Attributes:
        last: the log's last row.
        ended: why the last run has ended: "steps", "time", "data", "SIGINT", "SIGTERM", or what was raised.
        graph: of the loss and its gradients, and of the step too with one batch a step.
    """

    def __init__(
        self,
        loss: Tensor,
        inputs: Sequence[Tensor],
        data: Data,
        optimizer: Optimizer,
        *,
        accumulate: int = 1,
        clip: float | None = 1.0,
        count: Counts | None = None,
        threads: int | None = None,
        log: str | os.PathLike | None = None,
        checkpoint: str | os.PathLike | None = None,
        checkpoint_every: int = 0,
        evaluate: Callable[[], float] | None = None,
        evaluate_every: int = 0,
        patience: int = 5,
        progress: bool = True,
        rng: np.random.Generator | None = None,
        extra: dict[str, Any] | None = None,
        gradient_checkpoints: Sequence[Tensor] = (),
        comm: Ranks | None = None,
        shard_optimizer: bool = False,
        deterministic: bool = False,
    ) -> None:
        if accumulate < 1:
            raise GraphError(f"Trainer(): accumulate must be at least 1, not {accumulate}")
        if patience < 1:
            raise GraphError(f"Trainer(): patience must be at least 1, not {patience}")
        for every, what, given in (
            ("checkpoint_every", checkpoint_every, checkpoint),
            ("evaluate_every", evaluate_every, evaluate),
        ):
            if what < 0 or what and given is None:
                raise GraphError(f"Trainer(): {every}={what} needs {every.removesuffix('_every')}, and is at least 0")
        self.loss, self.inputs, self.data, self.optimizer = loss, tuple(inputs), data, optimizer
        self.accumulate, self.threads, self.patience, self.progress = accumulate, threads, patience, progress
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        self.checkpoint_every = checkpoint_every
        self.evaluate, self.evaluate_every = evaluate, evaluate_every
        self.rng, self.extra = rng, extra or {}
        self.last = Row()
        self.ended = ""
        self._check_savable()
        self._position = deepcopy(getattr(data, "position", None))  # after the last complete step
        forward = Graph().build_forward_expand(loss)
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._first = self._comm is None or self._comm.rank == 0  # who writes files
        ranks = self._comm.size if self._comm is not None else 1
        self._weigh, self._count = _counting(forward, self.inputs, count, accumulate * ranks)
        self._torn = False  # whether parameters may be those of half a step
        self._saving = False  # whether what was raised is a save's own fault
        self._skipped = 0  # steps without finite gradients, in a row
        self._saved_step: int | None = None
        self._log = _Log(Path(log)) if log is not None and self._first else None

        self._share = tensor(1.0, name="share of the step's tokens")
        self.graph = Graph().build_forward_expand(loss)
        several = accumulate > 1 or self._comm is not None
        self.graph.build_backward_expand(
            loss,
            seed=self._share if several else None,
            accumulate=several,
            keep=False,
            gradient_checkpoints=gradient_checkpoints,
        )
        # collectives of the loss itself are run by all ranks, also by those whose tokens are not counted
        self._always = any(t.op is not None and t.op.before_first_run is not None for t in self.graph.nodes)
        self._update = optimizer.build(
            self.graph, clip=clip, comm=self._comm, ordered=deterministic, shard=shard_optimizer
        )
        if self._comm is not None:
            for p in self.graph.params:
                p.memory()[...] = self._comm.broadcast(p.memory())
        self._check_names()
        if lost := [p.label() for g in optimizer.groups for p in g.params if self.graph.grad(p) is None]:
            raise GradientError(f"Trainer(): the loss does not depend on these parameters: {', '.join(lost)}")

    @property
    def step(self) -> int:
        """How many steps are done, those before a resume included."""
        return self.last.step

    def run(self, steps: int, *, seconds: float | None = None) -> str:
        """Train until so many steps are done, those before a resume included, or so many seconds are over.

        Ctrl-C, and SIGTERM where the program has no handler for it, end the run after the step under way; a second one
        at once.  Where data, `evaluate`, a function in the graph or the disk raise something, it comes out after the
        checkpoint is written.  Steps that were not complete are not in it.

        Returns:
            Why it ended, as `ended` has it: "steps", "time", or "data" if there is no more.

        Raises:
            TrainingError: too many steps in a row had no finite gradients.
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM.
        """
        self._check_savable()  # what was set since the trainer was made
        if self._log is not None:
            self._log.begin(self.step)
        bar = self._bar(steps)
        self._saving = False
        with _interrupts() as interrupted, bar:
            try:
                self.ended = self._steps(steps, seconds, interrupted, bar)
            except BaseException as error:
                self.ended = f"{type(error).__name__}: {error}"
                self._save_after(error)
                raise
            if self.ended != "steps":
                bar.write(f"step {self.step}: the run ends: {self.ended}")
        if self.ended == "SIGTERM":
            raise SystemExit(128 + signal.SIGTERM)
        if self.ended == "SIGINT":
            raise KeyboardInterrupt
        return self.ended

    def _steps(self, steps: int, seconds: float | None, interrupted: list[int], bar) -> str:
        began, before, tokens_before = time.perf_counter(), self.last.seconds, self.last.tokens
        if self.step >= steps:
            return "steps"
        while True:
            row = self._one_step(bar)
            why = ""
            if row is None:
                why, row = "data", self.last
            elif self.step >= steps:
                why = "steps"
            elif seconds is not None and time.perf_counter() - began > seconds:
                why = "time"
            if interrupted:
                why = signal.Signals(interrupted[0]).name
            why = self._agreed(why)
            signalled = why.startswith("SIG")
            due = bool(why) and self.step > 0 or _due(self.step, self.evaluate_every)
            try:
                if self.evaluate is not None and not signalled and due and row.validation is None:
                    row.validation = self._exchanged(float(self.evaluate()))[0]
            finally:  # what is done is in the log, whatever evaluate does
                if why != "data":
                    row.seconds = before + time.perf_counter() - began
                    if self._log is not None:
                        self._log.append(row)
            if why != "data":
                speed = (row.tokens - tokens_before) / max(1e-9, row.seconds - before)
                bar.set_postfix_str(f"loss {row.loss:.3f}, {_thousands(speed)} tokens/s", refresh=False)
                bar.update()
            if interrupted and self._comm is None:  # while it was evaluated; several ranks hear it after a step
                why = signal.Signals(interrupted[0]).name
            if self.checkpoint is not None and (why or _due(self.step, self.checkpoint_every)):
                self._saving = True
                self.save()
                self._saving = False
            if why:
                return why

    def _save_after(self, error: BaseException) -> None:
        """Write the checkpoint that an error would have prevented; what prevents that is a note on the error."""
        if self.checkpoint is None or self._torn or self._saving or self._saved_step == self.step:
            return
        if self._comm is not None:  # the other ranks are elsewhere
            return
        if isinstance(error, TrainingError):  # its steps have changed nothing
            return
        try:
            self.save()
        except Exception as also:
            error.add_note(f"nor could the checkpoint of step {self.step} be written: {also}")

    def save(self, path: str | os.PathLike | None = None) -> None:
        """Write a checkpoint; default is to the trainer's own file."""
        target = self._path(path)
        state = {**self.extra, "trainer": asdict(self.last)}
        mine = self._position, None if self.rng is None else checkpoint.rng_as_json(self.rng)
        told = self._exchanged(mine)
        if any(other != mine for other in told):
            state["ranks"] = [list(rank) for rank in told]
        failed = None
        try:
            checkpoint.save(
                target, self.graph.params, optimizer=self.optimizer, step=self.step,
                data=self._position, rng=self.rng, extra=state, write=self._first,
            )  # fmt: skip
        except Exception as error:
            failed = error
        if failed is not None:
            self._exchanged(str(failed))
            raise failed
        if any(others := self._exchanged("")):
            raise CheckpointError(f"another rank could not save: {next(filter(None, others))}")
        self._saved_step = self.step

    def resume(self, path: str | os.PathLike | None = None) -> None:
        """Go to where a checkpoint was written; what follows has the bits it would have had then.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
        """
        rows: list[Row] = []
        states: list[str | None] = []  # of this rank's own random numbers

        def accept(info: checkpoint.Info) -> None:
            try:
                row = Row(**info.extra["trainer"])
            except (KeyError, TypeError):
                row = None
            if row is None or type(row.step) is not int or type(row.tokens) is not int or row.step != info.step:
                raise CheckpointError(f"{self._path(path)} was not written by a Trainer")
            ranks = info.extra.get("ranks")
            if ranks is not None and (self._comm is None or len(ranks) != self._comm.size):
                raise CheckpointError(
                    f"{self._path(path)} is of {len(ranks)} ranks, each at another place of its data, and here "
                    f"{'is one' if self._comm is None else f'are {self._comm.size}'}"
                )
            rows.append(row)
            self.data.seek(info.data if ranks is None else ranks[self._comm.rank][0])  # type: ignore[union-attr]
            states.append(None if ranks is None else ranks[self._comm.rank][1])  # type: ignore[union-attr]

        checkpoint.load(
            self._path(path), self.graph.params, optimizer=self.optimizer, rng=self.rng, accept=accept,
        )  # fmt: skip
        if self.rng is not None and states[0] is not None:
            self.rng.bit_generator.state = json.loads(states[0])
        self.last = rows[0]
        self._position = deepcopy(self.data.position)  # it may change in place
        self._torn = False
        self._saved_step, self._skipped = self.step, 0

    def _check_savable(self) -> None:
        """Refuse now what would end the first save, after the training."""
        for name in {"trainer", "ranks"} & set(self.extra):
            raise CheckpointError(f"Trainer(): {name!r} in extra is the trainer's own")
        checkpoint.as_json(self.extra, "extra")
        if self.rng is not None:
            checkpoint.rng_as_json(self.rng)
        if self.checkpoint is not None:
            checkpoint.as_json(getattr(self.data, "position", None), "data.position")
            folder = self.checkpoint.resolve().parent
            if not folder.is_dir():
                raise FileNotFoundError(f"Trainer(): there is no folder {folder} for the checkpoint")

    def _check_names(self) -> None:
        if self.checkpoint is not None:
            checkpoint.check_savable(self.graph.params, self.optimizer)

    def memory(self) -> str:
        """The plan of the graph, and of the step's where it has one of its own, for people."""
        graphs = [self.graph] if self._update is self.graph else [self.graph, self._update]
        return "\n\n".join(str(g.plan()) for g in graphs)

    # -- a step ---------------------------------------------------------------------------------

    def _one_step(self, bar) -> Row | None:
        """None if there are no more data."""
        lr = self.optimizer.lr
        batches: list[tuple[np.ndarray, ...]] = []
        while len(batches) < self.accumulate:
            try:
                batches.append(next(self.data))
            except StopIteration:
                break
        if not all(self._exchanged(bool(batches))):
            return None
        if wrong := [len(batch) for batch in batches if len(batch) != len(self.inputs)]:
            raise TrainingError(f"step {self.step + 1}: a batch of {wrong[0]} arrays for {len(self.inputs)} inputs")
        weights = [self._weigh(batch) for batch in batches]
        if self._comm is not None:
            self.optimizer.agree(self._comm)
        here = sum(map(self._count, batches)), sum(weights)
        tokens, total = map(sum, zip(*self._exchanged(here), strict=True))
        if not total:
            raise TrainingError(f"step {self.step + 1}: no token of its batches is counted")
        loss = 0.0
        self._torn = True  # until the step is complete, or was none
        updating = False
        try:
            for batch, n in zip(batches, weights, strict=True):
                if n or self._always:
                    for leaf, array in zip(self.inputs, batch, strict=True):
                        leaf.set(array)
                    self._share.set(n / total)
                    updating = self._update is self.graph
                    self.graph.compute(threads=self.threads)
                    loss += n / total * self.loss.item() if n else 0.0
            if self._update is not self.graph:
                updating = True
                self._update.compute(threads=self.threads)
        except BaseException:
            # A run that has begun to update comes to its end, before what a signal's handler raised comes out.
            self._torn = updating and self._norm_is_known()
            raise
        finally:
            if self._update is not self.graph:
                self.graph.reset()
        if self._comm is not None:
            losses, norms = zip(*self._exchanged((loss, self.optimizer.norm)), strict=True)
            loss = math.fsum(losses)  # whoever has which
            if len(set(map(repr, norms))) > 1:
                raise DistributedError(f"step {self.step + 1}: the ranks have different gradients, of norms {norms}")
        taken = self.optimizer.step()
        self.last = Row(self.step + 1, loss, lr, self.optimizer.norm, self.last.tokens + tokens)
        self._position = deepcopy(self.data.position)  # it may change in place
        self._torn = False
        self._note(taken, bar)
        return self.last

    def _exchanged(self, value: Any) -> list:
        """What all ranks have given."""
        return [value] if self._comm is None else self._comm.exchange(value)

    def _agreed(self, why: str) -> str:
        """Why all ranks end now, since one of them must; a signal first."""
        told = sorted(filter(None, self._exchanged(why)), key=lambda w: not w.startswith("SIG"))
        return told[0] if told else ""

    def _norm_is_known(self) -> bool:
        try:
            return self.optimizer.norm is not None
        except NotComputedError:
            return False

    def _note(self, taken: bool, bar) -> None:
        """Count steps that were none, say so, and give up after too many."""
        if taken:
            self._skipped = 0
            return
        self._skipped += 1
        what = f"step {self.step}: loss {self.last.loss:g}, norm of the gradients {self.last.grad_norm:g}"
        if self._skipped < self.patience:
            bar.write(f"{what}; nothing was changed")
            return
        kept = f"; the last checkpoint is of step {self._saved_step}" if self._saved_step is not None else ""
        raise TrainingError(f"{what}; the gradients of {self._skipped} steps in a row were not finite{kept}")

    def _path(self, path) -> Path:
        if path is None and self.checkpoint is None:
            raise GraphError("no checkpoint file was given to the trainer, nor to this call")
        return Path(path) if path is not None else self.checkpoint  # type: ignore[return-value]

    def _bar(self, steps: int):
        if not self._first:
            return _Silent()
        if not self.progress:
            return _NoBar()
        often = 0.2 if sys.stderr.isatty() else 10.0
        return need("tqdm", "the progress bar (progress=False leaves it out)").tqdm(
            total=steps, initial=self.step, unit="step", dynamic_ncols=True, mininterval=often
        )


def plot(log: str | os.PathLike, picture: str | os.PathLike, *, unit: str = "loss") -> None:
    """Draw the log of a run: training loss, smoothed too, and validation.

    Args:
        log: the CSV file.
        picture: a .png or .svg file to write.
        unit: what the loss is measured in.
    """
    figure = need("matplotlib.figure", "plot()").Figure(figsize=(8, 5), layout="constrained")
    rows = _Log(Path(log)).rows()
    if not rows:
        raise TrainingError(f"{log} holds no step of a run yet")
    steps, losses = np.array([r.step for r in rows]), np.array([r.loss for r in rows])
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training")
    width = max(1, len(rows) // 50)
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(steps[width - 1 :], smooth, color="tab:blue", label=f"training, mean of {width} steps")
    checked = [r for r in rows if r.validation is not None]
    if checked:
        axes.plot(
            [r.step for r in checked], [r.validation for r in checked], "o-", color="tab:orange", label="validation"
        )
    axes.set(xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(picture).suffix.lstrip(".") or "png")
    write_whole(picture, drawn.getvalue())


# -- parts --------------------------------------------------------------------------------------------------


class _Log:
    """The CSV file of a run.  Rows are written whole and at once, so at worst the last one is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns = [f.name for f in fields(Row)]

    def begin(self, step: int) -> None:
        """Keep the rows up to that step, if any, and drop the rest: the run is about to make them again."""
        kept = [r for r in self.rows() if r.step <= step] if step and self.path.exists() else []
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(self._columns)
        writer.writerows(self._cells(r) for r in kept)
        write_whole(self.path, text.getvalue().encode())

    def append(self, row: Row) -> None:
        line = io.StringIO(newline="")
        csv.writer(line).writerow(self._cells(row))
        with open(self.path, "ab", buffering=0) as file:
            before, content = file.seek(0, os.SEEK_END), line.getvalue().encode()
            try:
                written = file.write(content)
                if written != len(content):
                    raise OSError(
                        errno.ENOSPC, f"only {written} of {len(content)} bytes of a row were written", self.path
                    )
            except BaseException:  # half a row would spoil the next one
                file.truncate(before)
                raise

    def rows(self) -> list[Row]:
        """All complete rows."""
        try:
            text = read_whole(self.path).decode()
            lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
        except (ValueError, csv.Error) as error:
            raise TrainingError(f"{self.path} is no log of a run: {error}") from None
        if not lines or lines[0] != self._columns:
            raise TrainingError(f"{self.path} is no log of a run: its first line is not {','.join(self._columns)}")
        return [self._row(number, cells) for number, cells in enumerate(lines[1:], 2)]

    def _row(self, number: int, cells: list[str]) -> Row:
        try:
            step, loss, lr, norm, tokens, seconds, checked = cells
            return Row(
                int(step), float(loss), float(lr), float(norm), int(tokens), float(seconds),
                float(checked) if checked else None,
            )  # fmt: skip
        except ValueError as error:
            raise TrainingError(f"{self.path}, line {number} is no step of a run: {error}") from None

    def _cells(self, row: Row) -> list:
        return ["" if v is None else v for v in asdict(row).values()]


class _NoBar:
    """Stands where a progress bar could."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def update(self) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool) -> None: ...

    def write(self, text: str) -> None:
        print(text, file=sys.stderr)


class _Silent(_NoBar):
    """On ranks other than the first."""

    def write(self, text: str) -> None: ...


@contextmanager
def _interrupts():
    """Gives a list that is empty until Ctrl-C or SIGTERM, then has the signal; a second one interrupts at once.

    A program's own handler of SIGTERM stays.  Threads other than the main one get no signals: there nothing changes.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number, frame):
        if seen:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        seen.append(number)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, note)}
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _counting(
    forward: Graph, inputs: tuple[Tensor, ...], count: Counts | None, accumulate: int
) -> tuple[Weighs, Counts]:
    """How much a batch weighs in its step, and how many of its tokens are counted."""
    if count is not None:
        return count, count
    said = {t: rows for t in forward.nodes if (rows := t.op.rows_counted(t)) is not None}  # type: ignore[union-attr]
    ways = {(values, repr(t.attrs)): (number, weight) for t, (values, number, weight) in said.items()}
    if len(ways) > 1 and accumulate > 1 and any(weight for _, weight in ways.values()):
        raise GraphError(
            f"Trainer(): the loss has {len(ways)} parts that count targets of their own, and weigh accumulated "
            "batches differently; count=... says how"
        )
    if len(ways) != 1:
        return lambda batch: 1, lambda batch: batch[-1].size
    [((values, _), (number, weight))] = ways.items()
    value_of = _value_of(values, inputs)
    weighed = (lambda batch: weight(value_of(batch))) if weight is not None else lambda batch: 1
    return weighed, lambda batch: number(value_of(batch))


def _value_of(values: Tensor, inputs: tuple[Tensor, ...]) -> Callable[[tuple[np.ndarray, ...]], np.ndarray]:
    """What a tensor is for a batch: an input, a constant, or what is computed of them."""
    if values in inputs:
        return lambda batch: np.asarray(batch[inputs.index(values)])
    if values.is_leaf:
        return lambda batch: values.numpy()
    graph = Graph().build_forward_expand(values)

    def computed(batch: tuple[np.ndarray, ...]) -> np.ndarray:
        for leaf, array in zip(inputs, batch, strict=True):
            leaf.set(array)
        graph.compute()
        return values.numpy()

    return computed


def _thousands(n: float) -> str:
    return f"{n / 1000:.1f}k" if n >= 1000 else f"{n:.0f}"
