"""Every collective over MPI against the same among threads: values and gradients, dtypes, parts of the ranks."""

import numpy as np

import ggrad as gg
from ggrad.distributed import simulate

SIZE = gg.distributed.init().size


def program(comm):
    made = []
    half = comm.split(comm.rank % 2)
    for dtype in (gg.F32, gg.F16, gg.BF16, gg.I32):
        x0 = np.round(3 * np.random.default_rng(comm.rank).normal(size=(3, 4 * SIZE))).astype(int)
        x = gg.tensor(x0, dtype=dtype, param=dtype is not gg.I32)
        ys = [
            gg.all_reduce(x, comm),
            gg.all_gather(x, axis=1, comm=comm),
            gg.reduce_scatter(x, axis=1, comm=comm),
            gg.all_to_all(x, split=1, join=0, comm=comm),
            gg.shift(x, by=1, comm=comm),
            gg.shift(x, by=-3, comm=comm),
            gg.broadcast(x, root=SIZE - 1, comm=comm),
            gg.reduce_to(x, root=0, comm=comm),
            gg.replicated(x, comm),
            gg.all_reduce(x, half),
        ]
        graph = gg.Graph().build_forward_expand(*ys)
        if x.param:
            loss = sum(gg.sum(gg.sqr(y)) for y in ys)
            graph.build_forward_expand(loss).build_backward_expand(loss)
        for _ in range(2):
            graph.compute()
        made += [y.numpy().copy() for y in ys] + ([graph.grad(x).numpy().copy()] if x.param else [])
    return made


comm = gg.distributed.init()
ours = program(comm)
threads = simulate(SIZE, program)[comm.rank]
assert len(ours) == len(threads)
for i, (a, b) in enumerate(zip(ours, threads, strict=True)):
    assert a.dtype == b.dtype and np.array_equal(a, b), i  # whole numbers: sums are exact in any order
assert comm.exchange(comm.rank) == list(range(SIZE))
if comm.rank == 0:
    print(f"{len(ours)} values on {SIZE} ranks")
