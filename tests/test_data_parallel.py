"""Several ranks train together: the same as one on all their data, the same bits and decisions on each."""

import json

import numpy as np
import pytest

import ggrad as gg
from ggrad.distributed import Comm, simulate

VOCAB, WIDTH, CONTEXT = 11, 7, 6


class Batches:
    """Batches of so many rows, some targets left out; the last row of all is left out altogether."""

    def __init__(self, rows=7, end=10**9, ignore=True):
        self.rows, self.end, self.position, self.ignore = rows, end, 0, ignore

    def __next__(self):
        if self.position >= self.end:
            raise StopIteration
        rng = np.random.default_rng(self.position)
        self.position += 1
        x, y = rng.integers(0, VOCAB, (2, self.rows, CONTEXT)).astype(np.int32)
        if self.ignore:
            y[rng.random(y.shape) < np.linspace(0, 0.8, self.rows)[:, None]] = -100
            y[-1] = -100
        return x, y

    def seek(self, position):
        self.position = position


def build(comm=None, *, rows=7, data=None, kind="AdamW", seed=0, tmp=None, factor=1.0, **options):
    comm = comm or Comm()
    begin, end = gg.data.Share.rows(rows, comm)
    rng = np.random.default_rng(seed)
    embed = gg.tensor(rng.normal(size=(VOCAB, WIDTH)), name="embed", param=True)
    head = gg.tensor(rng.normal(size=(VOCAB, WIDTH)), name="head", param=True)
    bias = gg.tensor(np.zeros(VOCAB), name="bias", param=True)
    x, y = (gg.tensor(shape=(end - begin, CONTEXT), dtype=gg.I32) for _ in range(2))
    hidden = gg.tanh(gg.get_rows(embed, x.reshape(-1)))
    loss = gg.cross_entropy_loss(gg.mul_mat(head, hidden) + bias, y.reshape(-1)) * gg.tensor(factor)
    optimizer = gg.AdamW([embed, head, bias], lr=0.01) if kind == "AdamW" else gg.SGD([embed, head, bias], lr=0.3)
    options = {"progress": False, "clip": 0.7, "threads": 1, **options}
    if tmp is not None:
        options |= {"checkpoint": tmp / "run.safetensors", "log": tmp / "log.csv"}
    return gg.Trainer(loss, (x, y), gg.data.Share(data or Batches(rows), comm), optimizer, comm=comm, **options)


def params(trainer):
    return {p.name: p.numpy().copy() for p in trainer.graph.params}


def train(comm=None, steps=6, **options):
    trainer = build(comm, **options)
    trainer.run(steps)
    return params(trainer), trainer


def bits(values):
    return b"".join(v.tobytes() for v in values.values())


OPTIONS = {
    "plain": {},
    "in order": {"deterministic": True},
    "sharded": {"shard_optimizer": True},
    "sharded, in order": {"shard_optimizer": True, "deterministic": True},
    "two batches a step": {"accumulate": 2},
    "two batches a step, sharded": {"accumulate": 2, "shard_optimizer": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_one_process_on_the_joined_batch(size, name):
    """With plain descent, whose steps are as far apart as the gradients are."""
    want, alone = train(kind="SGD", accumulate=OPTIONS[name].get("accumulate", 1))
    ranks = simulate(size, lambda c: train(c, kind="SGD", **OPTIONS[name]))
    assert len({bits(p) for p, _ in ranks}) == 1
    for name, value in want.items():
        assert np.abs(ranks[0][0][name] - value).max() < 1e-6 * np.abs(value).max() + 1e-7, name
    for _, trainer in ranks:
        assert trainer.last.loss == pytest.approx(alone.last.loss, rel=1e-6)
        assert trainer.last.tokens == alone.last.tokens
        assert trainer.last.grad_norm == pytest.approx(alone.last.grad_norm, rel=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_without_any_counted_token_changes_nothing(size):
    want, alone = train(kind="SGD", rows=size)  # the last row has none
    ranks = simulate(size, lambda c: train(c, kind="SGD", rows=size))
    for p, trainer in ranks:
        assert trainer.last.loss == pytest.approx(alone.last.loss, rel=1e-6)
        for name, value in want.items():
            assert np.allclose(p[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_moments_are_parts_of_the_whole_ones_and_step_alike(size):
    (want, _), *_ = simulate(size, train)
    ranks = simulate(size, lambda c: train(c, shard_optimizer=True))
    for p, trainer in ranks:
        for name in want:
            assert np.allclose(p[name], want[name], rtol=2e-5, atol=1e-6)
        held = sum(m.size for m in trainer.optimizer.moments.values())
        assert held <= 2 * -(-sum(v.size for v in want.values()) // size)


def test_bits_in_order_do_not_depend_on_who_has_which_rows():
    class Turned(gg.data.Share):
        """Shares of another rank."""

        def __next__(self):
            batch = next(self.data)
            rows = len(batch[0]) // self.comm.size
            at = (self.comm.rank + self.turn) % self.comm.size * rows
            return tuple(a[at : at + rows] for a in batch)

    def program(comm, turn, deterministic):
        trainer = build(comm, rows=6, deterministic=deterministic)
        trainer.data = Turned(Batches(6), comm)
        trainer.data.turn = turn
        trainer.run(5)
        return bits(params(trainer))

    found = [simulate(3, lambda c, t=t: program(c, t, True)) for t in range(3)]
    assert len({b for ranks in found for b in ranks}) == 1


def test_all_begin_with_the_parameters_of_the_first():
    ranks = simulate(2, lambda c: params(build(c, seed=c.rank)))
    assert bits(ranks[0]) == bits(ranks[1]) == bits(params(build(seed=0)))


def test_the_end_of_one_ranks_data_ends_all_after_the_same_step():
    def program(comm):
        trainer = build(comm, data=Batches(end=3 + comm.rank))
        return trainer.run(10), trainer.step

    assert simulate(3, program) == [("data", 3)] * 3


def test_time_that_is_over_on_one_rank_is_over_on_all():
    def program(comm):
        trainer = build(comm)
        return trainer.run(10**6, seconds=0.05 if comm.rank == 1 else 10**6), trainer.step

    ended = simulate(3, program)
    assert {why for why, _ in ended} == {"time"} and len({step for _, step in ended}) == 1


def test_steps_without_finite_gradients_are_none_on_all_and_too_many_end_all():
    def program(comm):
        trainer = build(comm, rows=4, patience=3, factor=np.inf if comm.rank == 1 else 1.0)
        before = bits(params(trainer))
        with pytest.raises(gg.errors.TrainingError, match="3 steps in a row were not finite"):
            trainer.run(10)
        return trainer.step, bits(params(trainer)) == before

    assert simulate(2, program) == [(3, True)] * 2


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_resumes_to_the_same_bits_on_as_many_ranks_and_goes_on_on_others(shard, tmp_path):
    tmp_path.joinpath("whole").mkdir()
    whole = simulate(3, lambda c: bits(train(c, 6, shard_optimizer=shard, tmp=tmp_path / "whole")[0]))

    simulate(3, lambda c: train(c, 3, shard_optimizer=shard, tmp=tmp_path)[0])

    def resumed(comm=None, **options):
        trainer = build(comm, tmp=tmp_path, **options)
        trainer.checkpoint = None
        trainer._log = None
        trainer.resume(tmp_path / "run.safetensors")
        trainer.run(6)
        return params(trainer)

    assert [bits(p) for p in simulate(3, lambda c: resumed(c, shard_optimizer=shard))] == whole
    want = resumed()
    for size in (2, 4):
        for p in simulate(size, lambda c: resumed(c, shard_optimizer=not shard)):
            for name, value in want.items():
                assert np.allclose(p[name], value, rtol=1e-4, atol=1e-5)
    rows = tmp_path.joinpath("log.csv").read_text().splitlines()
    assert len(rows) == 4  # one writer


def test_ranks_with_data_of_their_own_resume_on_as_many_only(tmp_path):
    def program(comm, resume):
        trainer = build(comm, tmp=tmp_path, rng=np.random.default_rng(comm.rank))
        if resume:
            trainer.resume()
            return trainer.data.position, trainer.rng.random()
        trainer.data.seek(10 * comm.rank)
        trainer.run(2)
        return trainer.data.position, trainer.rng.random()

    first = simulate(2, lambda c: program(c, False))
    assert [position for position, _ in first] == [2, 12]
    assert simulate(2, lambda c: program(c, True)) == first
    with pytest.raises(gg.errors.CheckpointError, match="is of 2 ranks"):
        simulate(3, lambda c: program(c, True))
    assert json.dumps(gg.checkpoint.peek(tmp_path / "run.safetensors").extra["ranks"][1][0]) == "12"


def test_a_disk_that_fails_the_writer_fails_all(tmp_path):
    def program(comm):
        trainer = build(comm, tmp=tmp_path)
        trainer.checkpoint = tmp_path / "no folder" / "run.safetensors"
        with pytest.raises((OSError, gg.errors.CheckpointError)):
            trainer.run(1)
        return True

    assert simulate(2, program) == [True, True]


def test_what_evaluate_gives_on_the_first_rank_is_logged():
    def program(comm):
        trainer = build(comm, evaluate=lambda: float(comm.rank + 5), evaluate_every=1)
        trainer.run(1)
        return trainer.last.validation

    assert simulate(2, program) == [5.0, 5.0]


def test_a_schedule_that_each_rank_sees_otherwise_is_that_of_the_first():
    def program(comm, rank=None):
        trainer = build(comm, kind="SGD")
        rank = comm.rank if rank is None else rank
        trainer.optimizer._lr = lambda step: 0.1 * (rank + 1)
        trainer.optimizer.steps = 0
        trainer.run(3)
        return bits(params(trainer))

    ranks = simulate(2, program)
    assert ranks[0] == ranks[1] == simulate(2, lambda c: program(c, 0))[0]


def test_fewer_rows_than_ranks_are_refused():
    with pytest.raises(gg.errors.ShapeError, match="1 rows for 2 ranks"):
        simulate(2, lambda c: build(c, rows=1))
