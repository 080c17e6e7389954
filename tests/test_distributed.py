"""Ops over a group of ranks, with ranks that are threads of this process: values, gradients, what is refused."""

import threading

import numpy as np
import pytest

import ggrad as gg
from ggrad.distributed import simulate

B = 3  # rows, an odd number


def data(rank, *shape, seed=0):
    return np.random.default_rng([seed, rank]).normal(size=shape)


PROGRAMS = {
    "all_reduce": lambda x, c: gg.all_reduce(x, c),
    "replicated": lambda x, c: gg.replicated(x, c),
    "all_gather, first axis": lambda x, c: gg.all_gather(x, axis=0, comm=c),
    "all_gather, last axis": lambda x, c: gg.all_gather(x, axis=1, comm=c),
    "reduce_scatter": lambda x, c: gg.reduce_scatter(x, axis=1, comm=c),
    "all_to_all": lambda x, c: gg.all_to_all(x, split=1, join=0, comm=c),
    "all_to_all, one axis": lambda x, c: gg.all_to_all(x, split=1, join=1, comm=c),
    "shift": lambda x, c: gg.shift(x, by=1, comm=c),
    "shift back by two": lambda x, c: gg.shift(x, by=-2, comm=c),
    "broadcast": lambda x, c: gg.broadcast(x, root=c.size - 1, comm=c),
    "reduce_to": lambda x, c: gg.reduce_to(x, root=1, comm=c),
    "of a part of the ranks": lambda x, c: gg.all_reduce(x, c.split(c.rank % 2)),
}

VALUES = {
    "all_reduce": lambda xs, r: sum(xs),
    "replicated": lambda xs, r: xs[r],
    "all_gather, first axis": lambda xs, r: np.concatenate(xs, 0),
    "all_gather, last axis": lambda xs, r: np.concatenate(xs, 1),
    "reduce_scatter": lambda xs, r: np.split(sum(xs), len(xs), 1)[r],
    "all_to_all": lambda xs, r: np.concatenate([np.split(x, len(xs), 1)[r] for x in xs], 0),
    "all_to_all, one axis": lambda xs, r: np.concatenate([np.split(x, len(xs), 1)[r] for x in xs], 1),
    "shift": lambda xs, r: xs[(r - 1) % len(xs)],
    "shift back by two": lambda xs, r: xs[(r + 2) % len(xs)],
    "broadcast": lambda xs, r: xs[-1],
    "reduce_to": lambda xs, r: sum(xs) if r == 1 else 0 * xs[0],
    "of a part of the ranks": lambda xs, r: sum(xs[r % 2 :: 2]),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16, gg.I32])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_give_what_they_say(name, size, dtype, backend):
    def program(comm):
        # small whole numbers, so that sums are exact in all dtypes
        x = gg.tensor(np.round(3 * data(comm.rank, B, 2 * size)).astype(int), dtype=dtype)
        y = PROGRAMS[name](x, comm)
        assert y.dtype is dtype
        gg.Graph().build_forward_expand(y).compute(backend=backend)
        return y.numpy().astype(float)

    xs = [np.round(3 * data(r, B, 2 * size)) for r in range(size)]
    for r, y in enumerate(simulate(size, program)):
        assert np.array_equal(y, VALUES[name](xs, r)), r


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_sum_of_all_losses(name, size):
    """First and second ones: by differences of the job's loss, the sum of the ranks', in a random direction."""

    def program(comm, step=0.0, order=1):
        whose = 0 if name == "replicated" else comm.rank  # all ranks have the same, and change it alike
        w = data(whose, B, 2 * size, seed=1)
        start = data(whose, B, 2 * size) + step * w
        x = gg.tensor(shape=start.shape, param=True)
        y = PROGRAMS[name](x, comm)
        loss = gg.sum(gg.sqr(y) * gg.tensor(data(comm.rank, *y.shape, seed=2)))
        graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
        if order == 2:
            loss = gg.sum(gg.sqr(graph.grad(x)) * gg.tensor(data(comm.rank, *x.shape, seed=3)))
            graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
        values = {leaf: (start if leaf is x else leaf.memory()) for leaf in graph.leaves}
        from ggrad.run.reference import evaluate

        made = evaluate(graph, values)
        gradient = made[graph.grad(x)] if graph.grad(x) is not None else np.zeros(x.shape)
        return made[loss], np.sum(gradient * w)

    for order in (1, 2):
        step = 1e-3
        here, above, below = (
            [sum(parts) for parts in zip(*simulate(size, lambda c, s=s, o=order: program(c, s, o)), strict=True)]
            for s in (0.0, step, -step)
        )
        slope = (above[0] - below[0]) / (2 * step)  # exact: the loss is a polynomial of second degree
        counted = size if name == "replicated" else 1  # the sum over ranks has it so often
        assert here[1] / counted == pytest.approx(slope, rel=1e-8), order


def test_a_program_with_several_collectives_runs_them_in_order():
    """On kernels too, with one graph a rank: a product cut over ranks, its value and gradients as of one rank."""
    X, W = data(0, 5, 12), data(1, 7, 12)

    def program(comm):
        n = 12 // comm.size
        cut = slice(comm.rank * n, (comm.rank + 1) * n)
        x, w = gg.tensor(X[:, cut], param=True), gg.tensor(W[:, cut], param=True)
        y = gg.all_reduce(gg.mul_mat(w, x), comm)
        loss = gg.sum(gg.sqr(y)) / float(comm.size)
        g = gg.Graph().build_forward_expand(loss).build_backward_expand(loss).compute()
        return g.grad(x).numpy(), g.grad(w).numpy()

    want = program(gg.distributed.Comm())
    for size in (2, 3, 4):
        parts = simulate(size, program)
        for i in (0, 1):
            assert np.allclose(np.concatenate([p[i] for p in parts], 1), want[i], rtol=1e-5, atol=1e-4)


def test_graphs_that_differ_are_an_error_on_every_rank_that_names_the_first_difference():
    told = []

    def program(comm):
        x = gg.tensor(np.ones(4))
        y = gg.all_reduce(x, comm)
        y = gg.shift(y[:3] if comm.rank == 1 else y, comm=comm)
        try:
            gg.Graph().build_forward_expand(y).compute()
        except gg.errors.DistributedError as error:
            told.append(str(error))

    simulate(3, program)
    assert len(told) == 3
    for message in told:
        assert "collective 1" in message and "rank 1: shift(f32[3]" in message and "rank 2: shift(f32[4]" in message


def test_attributes_and_missing_nodes_are_differences_too():
    def program(comm, make):
        y = make(gg.tensor(np.ones((2, 6))), comm)
        gg.Graph().build_forward_expand(y).compute()

    for make in (
        lambda x, c: gg.shift(x, by=1 + c.rank, comm=c),
        lambda x, c: gg.all_reduce(gg.all_reduce(x, c), c) if c.rank else gg.all_reduce(x, c),
        lambda x, c: gg.all_reduce(gg.cast(x, gg.F16) if c.rank else x, c),
    ):
        with pytest.raises(gg.errors.DistributedError, match="graphs of the ranks differ"):
            simulate(2, lambda c, make=make: program(c, make))


def test_what_is_refused():
    x, one = gg.tensor(np.ones((2, 3))), gg.distributed.Comm()
    for call in (
        lambda: gg.all_reduce(x, comm=2),
        lambda: gg.all_gather(x, axis=2, comm=one),
        lambda: gg.broadcast(x, root=1, comm=one),
    ):
        with pytest.raises(gg.errors.ShapeError):
            call()

    def cut(comm):
        gg.reduce_scatter(gg.tensor(np.ones((2, 3))), axis=1, comm=comm)

    with pytest.raises(gg.errors.ShapeError, match="3 places, not a multiple of 2"):
        simulate(2, cut)


def test_integers_beyond_i32_are_not_wrapped():
    def program(comm):
        gg.Graph().build_forward_expand(gg.all_reduce(gg.tensor(np.array([2**30] * 2)), comm)).compute()

    with pytest.raises(gg.errors.ShapeError, match="outside of i32"):
        simulate(2, program)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_order_do_not_depend_on_who_brings_what(size):
    terms = [np.float32(10) ** np.random.default_rng(r).integers(-6, 6, 11) for r in range(size)]
    terms = [t * np.float32(1.1) * (-1) ** r for r, t in enumerate(terms)]
    found = [
        simulate(size, lambda c, at=at: c.all_reduce(terms[(c.rank + at) % size], ordered=True)) for at in range(size)
    ]
    assert len({made.tobytes() for ranks in found for made in ranks}) == 1
    assert np.allclose(found[0][0], np.sum(np.array(terms, float), 0), rtol=1e-6)


def test_a_rank_that_fails_ends_all():
    def program(comm):
        if comm.rank == 1:
            raise ValueError("here")
        comm.exchange(0)

    before = threading.active_count()
    with pytest.raises(ValueError, match="here"):
        simulate(3, program)
    assert threading.active_count() == before


def test_alone_nothing_is_sent():
    comm = gg.distributed.init()
    assert (comm.rank, comm.size, comm.ranks) == (0, 1, (0,)) and gg.distributed.init() is comm
    x = gg.tensor(data(0, 2, 3), param=True)
    y = gg.all_to_all(gg.all_gather(gg.all_reduce(x, comm), axis=0, comm=comm), split=0, join=1, comm=comm)
    loss = gg.sum(gg.sqr(gg.shift(y, comm=comm)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss).compute()
    assert np.allclose(graph.grad(x).numpy(), 2 * x.numpy())
