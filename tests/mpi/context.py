"""Attention over ranks under MPI, gathered and in a ring: printed with how far values and gradients are off one's."""

import sys
from pathlib import Path

import numpy as np

import ggrad as gg

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_context_parallel import joined, of_one, on_ranks

comm = gg.distributed.init()
for options in ({}, {"layout": "zigzag", "window": (5, 0)}, {"layout": "zigzag", "ring": True}):
    ranks = comm.exchange(on_ranks(comm, **options))
    off = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(joined(ranks), of_one(**options), strict=True))
    assert off < 3e-6, (options, off)
if comm.rank == 0:
    print("attention of", comm.size)
