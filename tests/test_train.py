"""Training runs: the numbers of a float64 run, the same bits after a resume, files that survive."""

import csv
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import (
    CheckpointError,
    GradientError,
    GraphError,
    IndexRangeError,
    MissingExtraError,
    ShapeError,
    TrainingError,
)
from ggrad.run.reference import evaluate, leaf_value
from ggrad.train.trainer import Row, _Log

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt = example("train_gpt")
TEXT = np.frombuffer((EXAMPLES / "train_gpt.py").read_bytes(), np.uint8)
CONFIG = train_gpt.Config(layers=2, width=24, heads=4, kv_heads=2, hidden=40, context=13)
IGNORE = -100


def gpt(seed=0, batch=3, context=CONFIG.context):
    """A model whose loss has a gradient by every parameter, and the leaves of its loss."""
    model = train_gpt.GPT(CONFIG, seed)
    rng = np.random.default_rng(seed)
    for name, p in model.params.items():
        if name.endswith(("out", "head")):
            p.set(0.1 * rng.standard_normal(p.shape))
    leaves = [gg.tensor(shape=(batch, context), dtype=gg.I32, name=name) for name in ("tokens", "targets")]
    return model, leaves, model.loss(*leaves)


def new_trainer(folder: Path | None = None, *, data=None, seed=0, lr=0.01, **options) -> gg.Trainer:
    model, leaves, loss = gpt(seed)
    data = data or gg.data.Windows(TEXT, batch=3, context=CONFIG.context, seed=1)
    optimizer = gg.optim.AdamW(model.params.values(), lr=gg.schedule.cosine(lr, steps=8, warmup=2))
    if folder is not None:
        options = {"log": folder / "log.csv", "checkpoint": folder / "run.safetensors", **options}
    return gg.Trainer(loss, leaves, data, optimizer, progress=False, **options)


def rows_of(log: Path) -> list[dict[str, str]]:
    with open(log) as file:
        return list(csv.DictReader(file))


def state(trainer: gg.Trainer) -> dict[str, bytes]:
    tensors = {p.name: p for p in trainer.graph.params} | trainer.optimizer.moments
    return {name: t.memory().tobytes() for name, t in tensors.items()} | {"steps": trainer.optimizer.steps}


# -- numbers ------------------------------------------------------------------------------------------------


def test_ten_steps_follow_a_run_in_double_precision():
    model, leaves, loss = gpt()
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
    optimizer = gg.optim.AdamW(model.params.values(), lr=gg.schedule.cosine(3e-3, steps=10, warmup=3))
    optimizer.build(graph, clip=0.5)
    batches = gg.data.Windows(TEXT, batch=3, context=CONFIG.context)
    carried = {}  # parameters and moments in float64, from step to step
    for step in range(10):
        for leaf, array in zip(leaves, next(batches), strict=True):
            leaf.set(array)
        for prepare in graph.before_run:
            prepare()
        values = {leaf: carried.get(leaf, leaf_value(leaf)) for leaf in graph.leaves}
        exact = evaluate(graph, values)
        carried = {leaf: exact[leaf] for leaf in graph.leaves if leaf.role in ("param", "moment")}
        graph.compute()
        assert optimizer.step()
        assert loss.item() == pytest.approx(float(exact[loss]), rel=1e-5), f"step {step}"
        for p in model.params.values():
            got, expected = graph.grad(p).numpy(), exact[graph.grad(p)]
            # f32 against float64 of parameters that have drifted apart a little
            np.testing.assert_allclose(
                got, expected, atol=1e-3 * np.abs(expected).max(), err_msg=f"{p.name}, step {step}"
            )
    for p in model.params.values():
        np.testing.assert_allclose(p.numpy(), carried[p], atol=1e-3, err_msg=p.name)


class Fixed:
    """The same batches, given one by one."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __next__(self):
        self.position += 1
        return self.batches[(self.position - 1) % len(self.batches)]

    def seek(self, position):
        self.position = position


def uneven_batches(n: int, seed=0):
    """Batches of which 1 to all targets are counted."""
    rng = np.random.default_rng(seed)
    shape = (3, CONFIG.context)
    for _ in range(n):
        inputs, targets = rng.integers(0, 256, (2, *shape))
        targets[rng.random(shape) < rng.random()] = IGNORE
        targets[0, 0] = 7
        yield inputs, targets


def test_accumulated_batches_give_the_gradient_of_a_large_one():
    batches = list(uneven_batches(3))
    large = [np.concatenate(arrays) for arrays in zip(*batches, strict=True)]

    def stepped(batch: int, accumulate: int, data) -> tuple[dict, gg.Trainer]:
        model, leaves, loss = gpt(batch=batch)
        before = {name: p.numpy().copy() for name, p in model.params.items()}
        optimizer = gg.optim.SGD(model.params.values(), lr=1.0)
        trainer = gg.Trainer(loss, leaves, Fixed(data), optimizer, accumulate=accumulate, clip=None, progress=False)
        trainer.run(1)
        return {name: before[name] - p.numpy() for name, p in model.params.items()}, trainer

    several, accumulating = stepped(3, 3, batches)
    one, plain = stepped(9, 1, [large])
    assert accumulating.last.loss == pytest.approx(plain.last.loss, rel=1e-6)
    assert accumulating.last.grad_norm == pytest.approx(plain.last.grad_norm, rel=1e-5)
    assert accumulating.last.tokens == plain.last.tokens == np.count_nonzero(large[1] != IGNORE)
    for name, gradient in one.items():
        np.testing.assert_allclose(several[name], gradient, atol=2e-6, err_msg=name)


def test_a_batch_without_counted_tokens_adds_nothing():
    counted, empty = next(uneven_batches(1)), (np.zeros((3, CONFIG.context), int), np.full((3, CONFIG.context), IGNORE))
    runs = [new_trainer(data=Fixed(batches), accumulate=2) for batches in ([counted, empty], [empty, counted])]
    for trainer in runs:
        trainer.run(2)
    assert state(runs[0]) == state(runs[1])
    with pytest.raises(TrainingError, match="step 1: no token"):
        new_trainer(data=Fixed([empty])).run(1)


def test_one_batch_a_step_is_one_graph():
    ops = {t.op.name for t in new_trainer().graph.nodes}
    assert {"flash_attn_ext", "flash_attn_back", "global_norm", "opt_step_adamw"} <= ops


# -- resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path, accumulate):
    whole = new_trainer(
        tmp_path, accumulate=accumulate, log=tmp_path / "whole.csv", checkpoint=tmp_path / "whole.safetensors"
    )
    whole.run(8)
    new_trainer(tmp_path, accumulate=accumulate).run(4)
    second = new_trainer(tmp_path, accumulate=accumulate, seed=5)  # with other parameters, until it resumes
    second.resume()
    assert second.step == 4
    second.run(8)
    assert state(second) == state(whole)
    rows, expected = (
        [list(row.values())[:5] for row in rows_of(tmp_path / f"{name}.csv")] for name in ("log", "whole")
    )
    assert rows == expected and len(rows) == 8


def test_the_log_continues_where_the_checkpoint_was_written(tmp_path):
    first = new_trainer(tmp_path, evaluate=lambda: 0.5, evaluate_every=2)
    first.run(3)
    first.checkpoint = None  # as if it died before it could save
    first.run(5)
    with open(tmp_path / "log.csv", "a") as file:
        file.write("6,0.1")  # died while it wrote
    second = new_trainer(tmp_path)
    second.resume()
    assert second.step == 3
    second.run(5)
    rows = rows_of(tmp_path / "log.csv")
    assert [int(r["step"]) for r in rows] == [1, 2, 3, 4, 5]
    assert [r["validation"] for r in rows] == ["", "0.5", "0.5", "", ""]
    assert [int(r["tokens"]) for r in rows] == [39 * i for i in range(1, 6)]
    seconds = [float(r["seconds"]) for r in rows]
    assert seconds == sorted(seconds)


class Failing:
    """Data that breaks off."""

    def __init__(self, data, at):
        self.data, self.at = data, at

    def __next__(self):
        if self.data.position == self.at - 1:
            raise OSError("the disk is gone")
        return next(self.data)

    @property
    def position(self):
        return self.data.position


class PressingCtrlC(Failing):
    def __next__(self):
        if self.data.position == self.at - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return next(self.data)


def test_ctrl_c_finishes_the_step_and_saves_it(tmp_path):
    first = new_trainer(tmp_path)
    first.data = PressingCtrlC(first.data, at=3)
    with pytest.raises(KeyboardInterrupt):
        first.run(8)
    assert first.step == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    second = new_trainer(tmp_path)
    second.resume()
    assert second.step == 3
    assert state(second) == state(first)


def resumed(folder) -> gg.Trainer:
    trainer = new_trainer(folder, seed=5)
    trainer.resume()
    return trainer


class Few(Failing):
    """Data that end."""

    def __next__(self):
        if self.data.position == self.at:
            raise StopIteration
        return next(self.data)


def test_a_run_ends_with_its_data_and_takes_what_is_left(tmp_path):
    trainer = new_trainer(tmp_path, accumulate=2)
    trainer.data = Few(trainer.data, at=5)
    assert trainer.run(8) == trainer.ended == "data"
    assert trainer.step == 3 and trainer.last.tokens == 5 * 39
    second = resumed(tmp_path)
    assert second.step == 3 and second.data.position == 5
    assert len(rows_of(tmp_path / "log.csv")) == 3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_whatever_is_raised_between_steps_comes_out_after_a_checkpoint(tmp_path, accumulate):
    first = new_trainer(tmp_path, accumulate=accumulate)
    first.data = Failing(first.data, at=3 * accumulate)  # the last batch of the third step
    with pytest.raises(OSError, match="the disk is gone"):
        first.run(8)
    assert first.ended == "OSError: the disk is gone"
    second = resumed(tmp_path)
    assert second.step == 2 and second.data.position == 2 * accumulate  # not what half a step had taken
    assert state(second) == state(first)


def test_a_position_that_changes_in_place_is_saved_as_it_was_after_the_step(tmp_path):
    class Counting:
        def __init__(self):
            self.position = {"at": 0}

        def __next__(self):
            self.position["at"] += 1
            if self.position["at"] == 6:
                raise OSError
            return next(uneven_batches(1))

    trainer = new_trainer(tmp_path, data=Counting(), accumulate=2)
    with pytest.raises(OSError):
        trainer.run(8)
    assert gg.checkpoint.peek(tmp_path / "run.safetensors").data == {"at": 4}


def test_what_evaluate_raises_comes_out_after_a_checkpoint_and_the_log(tmp_path):
    first = new_trainer(tmp_path, evaluate=lambda: 1 / 0, evaluate_every=2)
    with pytest.raises(ZeroDivisionError):
        first.run(8)
    assert resumed(tmp_path).step == 2 and len(rows_of(tmp_path / "log.csv")) == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_batch_ends_the_run_with_a_checkpoint_and_leaves_no_gradients_behind(tmp_path, accumulate):
    good, bad = next(uneven_batches(1)), (np.full((3, CONFIG.context), 10**6), np.zeros((3, CONFIG.context), int))
    batches = [good] * (3 * accumulate)
    batches[2 * accumulate - 1] = bad
    first = new_trainer(tmp_path, data=Fixed(batches), accumulate=accumulate)
    with pytest.raises(IndexRangeError):
        first.run(3)
    second = new_trainer(tmp_path, data=Fixed([good]), accumulate=accumulate, seed=5)
    second.resume()
    assert second.step == 1 and state(second) == state(first)
    first.data = Fixed([good])
    first.run(3)
    second.run(3)
    assert state(second) == state(first)


def test_a_full_disk_says_so_and_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    first = new_trainer(tmp_path, checkpoint_every=2, log=None)
    first.run(2)
    kept = (tmp_path / "run.safetensors").read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        first.run(8)
    assert first.step == 4 and (tmp_path / "run.safetensors").read_bytes() == kept
    first.data = Failing(first.data, at=5)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        first.run(8)
    assert first.step == 4 and caught.value.__notes__ == [
        "nor could the checkpoint of step 4 be written: no space left"
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_second_signal_ends_a_step_and_saves_the_one_before(tmp_path, accumulate):
    calls = 0

    def press_twice(x):
        nonlocal calls
        calls += 1
        if calls == 3 * accumulate:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return x

    def trainer():
        w, x = gg.tensor(np.ones(3), name="w", param=True), gg.tensor(shape=(3,))
        loss = gg.sum(gg.sqr(gg.mul(w, gg.map_custom1(x, press_twice))))
        data = Fixed([(np.ones(3),), (np.arange(3.0),)])
        optimizer = gg.optim.AdamW([w], lr=0.1)
        return gg.Trainer(
            loss, [x], data, optimizer, accumulate=accumulate, checkpoint=tmp_path / "c", threads=1, progress=False
        )

    first = trainer()
    with pytest.raises(KeyboardInterrupt):
        first.run(8)
    second = trainer()
    second.resume()
    assert second.step == 2 and second.data.position == 2 * accumulate
    first.data.seek(second.data.position)
    first.run(5)  # nothing of half a step is left in it
    second.run(5)
    assert state(second) == state(first)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_are_a_step_ahead_are_not_saved_as_the_step_before(tmp_path, accumulate):
    first = new_trainer(tmp_path, accumulate=accumulate)
    first.run(2)
    kept = (tmp_path / "run.safetensors").read_bytes()
    first._saved_step = None
    compute = first._update.compute

    def interrupted(**options):
        compute(**options)
        raise KeyboardInterrupt  # as a handler's would come out of a run that has begun to update

    first._update.compute = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.run(3)
    assert (tmp_path / "run.safetensors").read_bytes() == kept


def test_sigterm_finishes_the_step_saves_it_and_ends_the_program(tmp_path):
    class Terminated(Failing):
        def __next__(self):
            if self.data.position == self.at - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return next(self.data)

    first = new_trainer(tmp_path)
    first.data = Terminated(first.data, at=3)
    with pytest.raises(SystemExit) as caught:
        first.run(8)
    assert caught.value.code == 128 + signal.SIGTERM and first.ended == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert resumed(tmp_path).step == 3


# -- what is counted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["input", "computed", "constant"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 3])
def test_what_is_counted_comes_from_the_loss(ignore_index, through):
    rng = np.random.default_rng(3)
    x0 = rng.normal(size=(2, 6, 4)).astype(np.float32)
    targets = rng.integers(1, 5, size=(2, 6))
    targets[0, :5] = targets[1, 2] = ignore_index
    if through == "constant":
        targets[1] = targets[0]

    def stepped(batches, accumulate):
        n = len(batches[0][0])
        w = gg.tensor(np.ones((5, 4)) / 3, name="w", param=True)
        x = gg.tensor(shape=(n, 4))
        t = gg.tensor(shape=(n,), dtype=gg.I32)
        inputs = [x] if through == "constant" else [x, t]
        classes = {"input": t, "computed": gg.reshape(t, (1, n)), "constant": gg.tensor(batches[0][1])}[through]
        logits = gg.mul_mat(w, x)
        logits = gg.reshape(logits, (1, n, 5)) if through == "computed" else logits
        loss = gg.cross_entropy_loss(logits, classes, ignore_index=ignore_index)
        data = Fixed([batch[: len(inputs)] for batch in batches])
        trainer = gg.Trainer(
            loss, inputs, data, gg.optim.SGD([w], lr=1.0), accumulate=accumulate, clip=None, progress=False
        )
        trainer.run(1)
        return w.numpy(), trainer.last

    several, last = stepped(list(zip(x0, targets, strict=True)), 2)
    whole, expected = stepped([(x0.reshape(12, 4), targets.reshape(12))], 1)
    np.testing.assert_allclose(several, whole, atol=1e-6)
    assert last.tokens == expected.tokens == np.count_nonzero(targets != ignore_index)
    assert last.loss == pytest.approx(expected.loss, rel=1e-5)


def test_batches_of_a_loss_that_leaves_out_nothing_weigh_the_same():
    rng = np.random.default_rng(3)
    x0, y0 = rng.normal(size=(2, 6, 4)), np.full((2, 6, 1), -100.0)
    y0[0] = 1

    def stepped(batches, accumulate):
        n = len(batches[0][0])
        w = gg.tensor(np.ones((1, 4)), name="w", param=True)
        x, y = gg.tensor(shape=(n, 4)), gg.tensor(shape=(n, 1))
        loss = gg.scale(gg.sum(gg.sqr(gg.mul_mat(w, x) - y)), factor=1 / n)
        trainer = gg.Trainer(
            loss, [x, y], Fixed(batches), gg.optim.SGD([w], lr=0.1), accumulate=accumulate, clip=None, progress=False
        )
        trainer.run(1)
        return w.numpy()

    several = stepped(list(zip(x0, y0, strict=True)), 2)
    np.testing.assert_allclose(several, stepped([(x0.reshape(12, 4), y0.reshape(12, 1))], 1), rtol=1e-5)


def test_losses_that_count_differently_need_to_be_told_how():
    def trainer(**options):
        w = gg.tensor(np.ones((5, 4)), name="w", param=True)
        x = gg.tensor(shape=(3, 4))
        a, b = (gg.tensor(shape=(3,), dtype=gg.I32, name=name) for name in "ab")
        logits = gg.mul_mat(w, x)
        loss = gg.cross_entropy_loss(logits, a) + gg.cross_entropy_loss(logits, b)
        return gg.Trainer(loss, [x, a, b], Fixed([]), gg.optim.SGD([w], lr=0.1), progress=False, **options)

    with pytest.raises(GraphError, match=r"2 parts that count targets of their own.*count="):
        trainer(accumulate=2)
    trainer(accumulate=2, count=lambda batch: 3)
    trainer()


def test_what_cannot_be_saved_or_used_is_refused_as_the_trainer_is_made(tmp_path):
    for wrong in (dict(extra={"f": print}), dict(extra={1: 2}), dict(extra={"trainer": 1})):
        with pytest.raises(CheckpointError):
            new_trainer(tmp_path, **wrong)
    data = Fixed([next(uneven_batches(1))])
    data.position = np.ones(3)
    with pytest.raises(CheckpointError, match=r"data\.position is a ndarray"):
        new_trainer(tmp_path, data=data)
    for wrong in (dict(checkpoint_every=2), dict(evaluate_every=2), dict(patience=0), dict(checkpoint_every=-1)):
        with pytest.raises(GraphError):
            new_trainer(**wrong)
    for position in (None, 1.5, -1):
        with pytest.raises(ShapeError):
            gg.data.Windows(TEXT, batch=1, context=5).seek(position)
    with pytest.raises(ShapeError, match="integers, not float64"):
        gg.data.Windows(np.ones(9), batch=1, context=5)
    with pytest.raises(TrainingError, match="a batch of 3 arrays for 2 inputs"):
        new_trainer(data=Fixed([(1, 2, 3)])).run(1)
    numbers = new_trainer(tmp_path, extra={"lr": np.float32(0.5), "n": np.int64(3)})
    numbers.data.position = np.int64(2)
    numbers.run(1)
    info = gg.checkpoint.peek(tmp_path / "run.safetensors")
    assert info.extra["lr"] == 0.5 and info.extra["n"] == 3 and info.data == 3


def test_what_a_checkpoint_needs_is_asked_for_as_the_trainer_is_made(tmp_path):
    def trainer(*names):
        ps = [gg.tensor(np.ones(3), name=name, param=True) for name in names]
        loss = gg.sum(sum(ps[1:], ps[0]))
        optimizer = gg.optim.SGD(ps, lr=0.1)
        return gg.Trainer(loss, [], Fixed([()]), optimizer, checkpoint=tmp_path / "c", progress=False)

    with pytest.raises(CheckpointError, match="needs a name"):
        trainer("a", "")
    with pytest.raises(CheckpointError, match="two tensors"):
        trainer("a", "a")
    with pytest.raises(FileNotFoundError, match="for the checkpoint"):
        new_trainer(tmp_path, checkpoint=tmp_path / "none" / "c")
    made = trainer("a", "b")
    made.extra = {"f": print}
    with pytest.raises(CheckpointError, match=r"extra\['f'\]"):
        made.run(1)


def test_half_a_row_never_stays_in_the_log(tmp_path):
    program = f"""
        import resource, signal
        from ggrad.train.trainer import Row, _Log
        from pathlib import Path
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = _Log(Path({str(tmp_path / "log.csv")!r}))
        log.begin(0)
        size = log.path.stat().st_size
        log.append(Row(1))
        row = log.path.stat().st_size - size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + row + row // 2, resource.RLIM_INFINITY))
        for step in (2, 2):
            try:
                log.append(Row(step))
            except OSError as error:
                print("refused")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        log.append(Row(2))
        print([row.step for row in log.rows()])
    """
    done = subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["refused", "refused", "[1, 2]"], done.stderr


def test_logs_that_are_none_are_refused(tmp_path):
    path = tmp_path / "log.csv"
    trainer = new_trainer(tmp_path)
    trainer.run(2)
    whole = path.read_bytes()
    for damaged in (b"", b"\xff\n", b"a,b\n", whole.replace(b"\n1,", b"\n1.5,"), whole + b"3,4\n", b"\0\n"):
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"log\.csv.* is no "):
            gg.trainer.plot(path, tmp_path / "p.png")
    path.write_bytes(whole[: whole.index(b"\n") + 1])
    with pytest.raises(TrainingError, match="holds no step"):
        gg.trainer.plot(path, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def test_tokens_and_settings_that_would_silently_be_others_are_refused():
    big = gg.data.Windows(np.full(20, 2**31, np.int64), batch=1, context=5)
    with pytest.raises(ShapeError, match="must fit into i32"):
        next(big)
    w = gg.tensor(np.ones(3), name="w", param=True)
    nan = float("nan")
    for wrong in (
        dict(lr=-1.0),
        dict(lr=nan),
        dict(lr=0.1, eps=-1.0),
        dict(lr=0.1, weight_decay=nan),
        dict(lr=lambda s: nan),
    ):
        with pytest.raises(GraphError, match="must be a number of at least 0"):
            gg.AdamW([w], **wrong)
    with pytest.raises(GraphError, match="lr_multiplier"):
        gg.SGD([gg.optim.Group([w], lr_multiplier=-2.0)], lr=0.1)


def test_parameters_that_the_loss_does_not_reach_are_named():
    w, lost = (gg.tensor(np.ones(3), name=name, param=True) for name in ("w", "lost"))
    with pytest.raises(GradientError, match="lost"):
        gg.Trainer(gg.sum(w), [], Fixed([]), gg.optim.SGD([w, lost], lr=0.1), progress=False)


def test_a_random_state_is_saved(tmp_path):
    for kind in (np.random.PCG64, np.random.MT19937):
        rng = np.random.Generator(kind(3))
        rng.random(5)
        trainer = new_trainer(tmp_path, rng=rng)
        trainer.save()
        expected = rng.random(7)
        again = np.random.Generator(kind(0))
        new_trainer(tmp_path, rng=again).resume()
        np.testing.assert_array_equal(again.random(7), expected)
    with pytest.raises(CheckpointError, match="of another generator"):
        new_trainer(tmp_path, rng=np.random.default_rng()).resume()


def test_a_run_ends_when_its_time_is_over(tmp_path):
    trainer = new_trainer(tmp_path, evaluate=lambda: 0.25)
    trainer.run(1000, seconds=0)
    assert trainer.step == 1 and trainer.last.validation == 0.25
    assert gg.checkpoint.peek(tmp_path / "run.safetensors").step == 1


def test_running_no_further_does_nothing(tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.run(2)
    before = state(trainer)
    trainer.run(2)
    assert state(trainer) == before and trainer.step == 2


# -- what goes wrong ----------------------------------------------------------------------------------------


def poison(trainer: gg.Trainer) -> None:
    next(p for p in trainer.graph.params if p.name == "head").numpy()[3, 3] = np.nan


def test_steps_without_finite_gradients_change_nothing_and_end_the_run(tmp_path, capsys):
    trainer = new_trainer(tmp_path, checkpoint_every=1, patience=3)
    trainer.run(2)
    poison(trainer)
    before = state(trainer)
    kept = (tmp_path / "run.safetensors").read_bytes()
    trainer.checkpoint_every = 100
    with pytest.raises(TrainingError, match=r"step 5: loss nan.*3 steps in a row.*last checkpoint is of step 2"):
        trainer.run(8)
    assert state(trainer) == before
    assert (tmp_path / "run.safetensors").read_bytes() == kept
    assert "step 3: loss nan, norm of the gradients nan; nothing was changed" in capsys.readouterr().err


def test_only_steps_in_a_row_end_a_run():
    trainer = new_trainer(patience=3)
    head = next(p for p in trainer.graph.params if p.name == "head")
    for step in range(1, 10):
        good = head.numpy().copy()
        if step % 3:
            poison(trainer)
        trainer.run(step)
        head.set(good if step % 3 else head.numpy())
    assert trainer.optimizer.steps == 3


def test_windows_are_of_the_text_and_follow_from_their_number():
    text = np.arange(1000) % 251
    data = gg.data.Windows(text, batch=4, context=9, seed=2)
    batches = [next(data) for _ in range(5)]
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (4, 9)
        np.testing.assert_array_equal((inputs + 1) % 251, targets)
    assert len({inputs.tobytes() for inputs, _ in batches}) == 5
    data.seek(3)
    for expected in batches[3:]:
        np.testing.assert_array_equal(next(data), expected)
    assert data.position == 5
    assert next(gg.data.Windows(text, batch=4, context=9, seed=3))[0].tobytes() != batches[0][0].tobytes()
    ends = next(gg.data.Windows(text[:11], batch=100, context=9))[0][:, 0]
    assert set(ends) == {0, 1}  # every window that fits, the last one too


def test_a_wrong_batch_is_refused():
    with pytest.raises(ShapeError, match="tokens"):
        new_trainer(data=Fixed([(np.zeros((2, 2), int), np.zeros((2, 2), int))])).run(1)
    with pytest.raises(GraphError, match="accumulate"):
        new_trainer(accumulate=0)
    with pytest.raises(ShapeError, match="hold no window"):
        gg.data.Windows(TEXT[:5], batch=1, context=5)
    with pytest.raises(GraphError, match="no checkpoint file"):
        new_trainer().save()


def test_packages_that_are_missing_are_named(monkeypatch, tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.run(1)
    trainer.progress = True
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ggrad\[examples\]'"):
        trainer.run(2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="needs matplotlib"):
        gg.trainer.plot(tmp_path / "log.csv", tmp_path / "loss.png")


def test_importing_ggrad_imports_little():
    heavy = "{'numba', 'matplotlib', 'tqdm', 'safetensors', 'sklearn', 'torch'}"
    code = f"import sys, ggrad; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_progress_and_picture(tmp_path, capsys):
    trainer = new_trainer(tmp_path, evaluate=lambda: 2.0, evaluate_every=2)
    trainer.progress = True
    trainer.run(4)
    shown = capsys.readouterr().err
    assert "4/4" in shown and "loss" in shown and "tokens/s" in shown
    gg.trainer.plot(tmp_path / "log.csv", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


# -- checkpoints --------------------------------------------------------------------------------------------


def leaves_of_all_dtypes(seed: int) -> list[gg.Tensor]:
    rng = np.random.default_rng(seed)
    floats = [
        gg.tensor(rng.standard_normal((3, 5)), dtype=d, name=d.name, param=True) for d in (gg.F32, gg.F16, gg.BF16)
    ]
    whole = gg.tensor(rng.integers(-9, 9, (4,)), name="i32")
    return [*floats, whole, gg.tensor(rng.random(), name="scalar"), gg.tensor(shape=(0, 3), name="empty")]


def test_every_dtype_comes_back_to_the_bit(tmp_path):
    saved, loaded = leaves_of_all_dtypes(0), leaves_of_all_dtypes(1)
    gg.checkpoint.save(tmp_path / "c", saved, step=7, data=[1, {"a": 2}], extra={"lr": 0.1})
    info = gg.checkpoint.load(tmp_path / "c", loaded)
    assert (info.step, info.data, info.extra) == (7, [1, {"a": 2}], {"lr": 0.1})
    for a, b in zip(saved, loaded, strict=True):
        assert a.memory().tobytes() == b.memory().tobytes(), a.name


def test_files_are_safetensors(tmp_path):
    package = pytest.importorskip("safetensors")
    saved = leaves_of_all_dtypes(0)
    gg.checkpoint.save(tmp_path / "c", saved, step=3)
    with package.safe_open(tmp_path / "c", framework="numpy") as file:
        assert file.metadata()["step"] == "3"
        assert set(file.keys()) == {t.name for t in saved}
        for t in saved:
            if t.dtype is not gg.BF16:
                np.testing.assert_array_equal(file.get_tensor(t.name), t.numpy())


def test_all_that_does_not_fit_is_listed_and_nothing_changes(tmp_path):
    gg.checkpoint.save(tmp_path / "c", leaves_of_all_dtypes(0))
    target = [*leaves_of_all_dtypes(1)[1:], gg.tensor(np.zeros(2), name="bias")]
    target[0] = gg.tensor(np.ones((5, 3)), dtype=gg.F16, name="f16")
    target[1] = gg.tensor(np.ones((3, 5)), dtype=gg.F32, name="bf16")
    before = [t.memory().tobytes() for t in target]
    with pytest.raises(CheckpointError) as caught:
        gg.checkpoint.load(tmp_path / "c", target)
    message = str(caught.value)
    assert "missing: bias" in message
    assert "unexpected: f32" in message
    assert "bf16 (is f32[3,5], in the file bf16[3,5]), f16 (is f16[5,3], in the file f16[3,5])" in message
    assert [t.memory().tobytes() for t in target] == before


def test_the_optimizer_must_fit_too(tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.run(1)
    params = trainer.graph.params
    with pytest.raises(CheckpointError, match=r"unexpected: optimizer/.*/m"):
        other = new_trainer()
        gg.checkpoint.load(tmp_path / "run.safetensors", params, optimizer=built(gg.optim.SGD, other))
    gg.checkpoint.save(tmp_path / "plain", params)
    with pytest.raises(CheckpointError, match="missing: optimizer/"):
        gg.checkpoint.load(tmp_path / "plain", params, optimizer=trainer.optimizer)
    with pytest.raises(CheckpointError, match="comes first"):
        gg.checkpoint.save(tmp_path / "c", params, optimizer=gg.optim.AdamW(params, lr=0.1))
    gg.checkpoint.load(tmp_path / "run.safetensors", params)  # parameters alone, for using the model


def built(kind, trainer: gg.Trainer):
    optimizer = kind(trainer.graph.params, lr=0.1)
    graph = gg.Graph().build_forward_expand(trainer.loss).build_backward_expand(trainer.loss)
    optimizer.build(graph)
    return optimizer


def test_names_are_needed_once_each(tmp_path):
    for names in (["", "b"], ["a", "a"], ["optimizer/x", "b"], ["__metadata__", "b"]):
        with pytest.raises(CheckpointError):
            gg.checkpoint.save(tmp_path / "c", [gg.tensor(1.0, name=name) for name in names])
    with pytest.raises(CheckpointError, match="only leaves"):
        gg.checkpoint.save(tmp_path / "c", [gg.tensor(1.0) * 2])
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "c"
    leaves = leaves_of_all_dtypes(0)
    gg.checkpoint.save(path, leaves)
    whole = path.read_bytes()
    for damaged in (
        b"",
        b"abc",
        whole[:40],
        whole[:-1],
        b"\xff" * 64,
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{}",
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=str(path)):
            gg.checkpoint.load(path, leaves)
    with pytest.raises(FileNotFoundError):
        gg.checkpoint.peek(tmp_path / "nothing")


def test_a_process_that_dies_while_it_saves_leaves_the_old_file(tmp_path):
    path = tmp_path / "c"
    old = leaves_of_all_dtypes(0)
    gg.checkpoint.save(path, old, step=1)
    dying = textwrap.dedent(f"""
        import os, signal
        import numpy as np
        import ggrad as gg
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = die
        gg.checkpoint.save({str(path)!r}, [gg.tensor(np.zeros(1 << 20), name="f32")], step=2)
    """)
    assert subprocess.run([sys.executable, "-P", "-c", dying]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # what it left unfinished lies beside
    loaded = leaves_of_all_dtypes(1)
    assert gg.checkpoint.load(path, loaded).step == 1
    assert loaded[0].memory().tobytes() == old[0].memory().tobytes()
    gg.checkpoint.save(path, old, step=3)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_save_that_fails_leaves_no_trace(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        gg.checkpoint.save(tmp_path / "c", leaves_of_all_dtypes(0))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_whose_row_of_the_log_is_none_is_refused(tmp_path):
    first = new_trainer(tmp_path)
    first.run(2)
    first.last = dataclasses.replace(first.last, tokens=1.5)
    first.save()
    second = new_trainer(tmp_path)
    before = state(second)
    with pytest.raises(CheckpointError, match="was not written by a Trainer"):
        second.resume()
    assert second.step == 0 and state(second) == before


def test_a_log_gives_its_rows_as_they_were(tmp_path):
    """But for one that was not written to its end; and whatever ends its lines."""
    log = _Log(tmp_path / "log.csv")
    log.begin(0)
    rows = [Row(step, loss=step / 7, seconds=step / 3, validation=step + 0.25) for step in (1, 2, 3)]
    for row in rows:
        log.append(row)
    assert log.rows() == rows
    log.path.write_bytes(log.path.read_bytes().replace(b"\r\n", b"\n"))
    assert log.rows() == rows
    log.path.write_bytes(log.path.read_bytes()[:-3])
    assert log.rows() == rows[:-1]
