"""One script on many machines: ranks, each a process that runs its own graphs, joined by MPI.

    comm = gg.distributed.init()                    # all ranks of the job; one without MPI
    y = gg.all_reduce(x, comm)                      # a node: the sum over all ranks
    trainer = gg.Trainer(loss, inputs, data, optimizer, comm=comm)

    mpirun -n 4 python script.py

See docs/distributed.md.
"""

from .comm import Comm, simulate
from .context import attention, kda, positions
from .mpi import init
from .split import ColumnLinear, Embedding, RowLinear, cross_entropy, part_of

__all__ = [
    "ColumnLinear", "Comm", "Embedding", "RowLinear", "attention", "cross_entropy", "init", "kda", "part_of",
    "positions", "simulate",
]  # fmt: skip
