"""Trains on all ranks, and at its fifth batch rank 1 gets the signal that is named."""

import os
import signal
import sys

import numpy as np

import ggrad as gg

folder, what = sys.argv[1], sys.argv[2]
comm = gg.distributed.init()


class Data:
    position = 0

    def __next__(self):
        self.position += 1
        if self.position == 5 and comm.rank == 1:
            os.kill(os.getpid(), getattr(signal, what))
        return (np.random.default_rng([self.position, comm.rank]).normal(size=(4, 64)),)

    def seek(self, position):
        self.position = position


w = gg.tensor(np.ones((64, 64)), name="w", param=True)
x = gg.tensor(shape=(4, 64))
loss = gg.mean(gg.sqr(gg.mul_mat(w, x)))
trainer = gg.Trainer(
    loss, (x,), Data(), gg.AdamW([w], lr=1e-3), comm=comm, shard_optimizer=True, progress=False,
    checkpoint=folder + "/run.safetensors", checkpoint_every=1,
)  # fmt: skip
try:
    trainer.run(1000)
except (KeyboardInterrupt, SystemExit):
    ended = comm.exchange((trainer.ended, trainer.step))
    if comm.rank == 0:
        print("all ended:", ended)
