"""Prints how many threads a run has by default: before the ranks know of each other, and then of each."""

import ggrad as gg
from ggrad.core.native import default_threads

alone = default_threads()
comm = gg.distributed.init()
shares = comm.exchange(default_threads())
if comm.rank == 0:
    print(alone, *shares)
