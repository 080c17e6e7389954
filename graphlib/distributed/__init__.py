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

__all__ = ["Comm", "attention", "init", "kda", "positions", "simulate"]
