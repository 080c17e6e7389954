"""A job in which rank 1 goes wrong in the way that is named."""

import os
import signal
import sys
import time

import numpy as np

import ggrad as gg

what = sys.argv[1]
comm = gg.distributed.init()
odd = comm.rank == 1
x = gg.tensor(np.ones((2, 3)), param=True)


def run_for_ever():
    y = gg.all_reduce(x, comm)
    graph = gg.Graph().build_forward_expand(y)
    step = 0
    while True:
        graph.compute()
        step += 1
        if odd and step == 20:
            yield


forever = run_for_ever()
if what == "graphs":
    y = gg.shift(gg.all_reduce(x[:1] if odd else x, comm), comm=comm)
    gg.Graph().build_forward_expand(y).compute()
elif what == "no graph":  # one rank does not use what it was sent
    y = gg.all_reduce(x, comm)
    gg.Graph().build_forward_expand(x * 2.0 if odd else y).compute()
elif what == "elsewhere":
    if odd:
        time.sleep(60)
    gg.Graph().build_forward_expand(gg.all_reduce(x, comm)).compute()
elif what == "index":
    y = gg.all_reduce(gg.get_rows(x, gg.tensor(np.array([9 if odd else 1]))), comm)
    gg.Graph().build_forward_expand(y).compute()
else:
    next(forever)
    if what == "exception":
        raise ValueError("a bug of this rank")
    if what == "exit":
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, what))
    time.sleep(60)
print("went on", comm.rank)
