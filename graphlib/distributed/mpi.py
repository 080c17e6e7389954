"""Ranks that are processes, under MPI; and what happens when one of them goes wrong.

A rank that fails says so and ends the job.  One that was killed is noticed by the launcher, and by the ranks on its
machine.  A rank that has ended although others wait for it is noticed by those that wait; one that is still there, and
does something else, when they have waited for too long.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core import native
from ..core.errors import DistributedError
from ..core.extras import need
from .comm import Comm

TIMEOUT = "GGRAD_DISTRIBUTED_TIMEOUT"  # seconds
LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
PATIENT = 0.2  # seconds of waiting after which one asks whether the others are still there
FORWARDED = 0.2  # seconds in which mpirun passes a last message on: what it has not read when told to abort is lost
_world: Comm | None = None


def init(*, timeout: float | None = None) -> Comm:
    """The group of all ranks of this job.  Every call gives the same.

    Without MPI, and outside of a launcher such as mpirun, that is one rank.  Under one, each rank takes its share of
    the cores of its machine as its number of threads, unless GGRAD_NUM_THREADS is set.  From then on an exception
    that nobody catches on one rank ends all of them.

    Args:
        timeout: for so many seconds a rank waits for others before it ends the job with a message; default is the
            environment's GGRAD_DISTRIBUTED_TIMEOUT, or 600.  Only the first call sets it.

    Raises:
        DistributedError: the MPI library cannot be called from several threads; or the ranks have different
            versions of ggrad.
        MissingExtraError: a launcher has started several ranks, and mpi4py is not installed.
    """
    global _world
    if _world is None:
        _world = _begin(_seconds(timeout))
    return _world


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        setting = os.environ.get(TIMEOUT, "600")
        try:
            timeout = float(setting)
        except ValueError:
            timeout = -1
    if not timeout > 0:
        raise DistributedError(f"ranks wait for each other for a positive number of seconds: see {TIMEOUT}")
    return timeout


def _begin(timeout: float) -> Comm:
    if not any(name in os.environ for name in LAUNCHED):
        return Comm()
    MPI = need("mpi4py.MPI", "a job of several ranks", "mpi")
    world = MPI.COMM_WORLD
    if world.size == 1:
        return Comm()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise DistributedError("this MPI library can be called from one thread only, and ggrad's runs have several")
    watch = _Watch(MPI, world.Dup(), timeout)
    native.share_cores(_sharing(MPI, world))
    comm = MPIComm(world, range(world.size), watch)
    watch.begin()
    from .. import __version__

    versions = comm.exchange((__version__, native.built()))
    if len(set(versions)) > 1:
        shown = "; ".join(f"rank {r}: {v}{'' if built else ', no kernels'}" for r, (v, built) in enumerate(versions))
        raise DistributedError(f"the ranks have different versions of ggrad: {shown}")
    return comm


def _sharing(MPI, world) -> int:
    """How many ranks may use the same cores as this one."""
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset([-1])
    sharing = here.allgather(cores).count(cores)
    here.Free()
    return sharing


class MPIComm(Comm):
    """A group of MPI processes."""

    def __init__(self, mpi, ranks, watch: _Watch) -> None:
        super().__init__(mpi.rank, ranks)
        self._mpi, self._watch = mpi, watch

    def exchange(self, value: Any) -> list:
        with self.waiting("an exchange of values"):
            return self._mpi.allgather(value)

    def split(self, color: int) -> Comm:
        with self.waiting("a split of the group"):
            mpi = self._mpi.Split(color, self.rank)
            return MPIComm(mpi, mpi.allgather(self.ranks[self.rank]), self._watch)

    def waiting(self, what: object):
        return self._watch.waiting(what)

    def stop(self, message: str) -> None:
        self._watch.stop(message)

    def all_gather(self, a: np.ndarray) -> np.ndarray:
        made = np.empty((self.size, *a.shape), a.dtype)
        with self.waiting("all_gather"):
            self._mpi.Allgather(_bytes(a), _bytes(made))
        return made

    def reduce_scatter(self, a: np.ndarray) -> np.ndarray:
        made = np.empty(a.shape[1:], a.dtype)
        with self.waiting("reduce_scatter"):
            self._mpi.Reduce_scatter_block(np.ascontiguousarray(a), made)
        return made

    def all_to_all(self, a: np.ndarray) -> np.ndarray:
        made = np.empty(a.shape, a.dtype)
        with self.waiting("all_to_all"):
            self._mpi.Alltoall(_bytes(a), _bytes(made))
        return made

    def shift(self, a: np.ndarray, by: int) -> np.ndarray:
        made = np.empty(a.shape, a.dtype)
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        with self.waiting("shift"):
            self._mpi.Sendrecv(_bytes(a), to, recvbuf=_bytes(made), source=source)
        return made

    def broadcast(self, a: np.ndarray, root: int = 0) -> np.ndarray:
        made = np.array(a, order="C")
        with self.waiting("broadcast"):
            self._mpi.Bcast(_bytes(made), root)
        return made

    def _all_reduce(self, a: np.ndarray) -> np.ndarray:
        made = np.empty(a.shape, a.dtype)
        with self.waiting("all_reduce"):
            self._mpi.Allreduce(np.ascontiguousarray(a), made)
        return made


def _bytes(a: np.ndarray) -> np.ndarray:
    """A contiguous array as bytes: MPI knows no halves, and what is only moved need not be understood."""
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


class _Watch:
    """A thread that looks after a rank which waits for others."""

    def __init__(self, MPI, mpi, timeout: float) -> None:
        self._MPI, self._mpi, self._timeout = MPI, mpi, timeout
        self._waits: list[tuple[object, float]] = []  # for what, since when; the innermost last
        self._ended = False
        self._may_ask = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._notes: list = []

    @property
    def name(self) -> str:
        return f"rank {self._mpi.rank} of {self._mpi.size}"

    def begin(self) -> None:
        processes = self._mpi.allgather((os.uname().nodename if hasattr(os, "uname") else "", os.getpid()))
        node = processes[self._mpi.rank][0]
        beside = {pid: r for r, (n, pid) in enumerate(processes) if n == node and pid != os.getpid()}
        atexit.register(self._say_end)
        threading.Thread(target=self._look, args=(beside,), name="ggrad: watch over ranks", daemon=True).start()
        self._hook_before = sys.excepthook
        sys.excepthook = self._failed

    @contextmanager
    def waiting(self, what: object):
        self._waits.append((what, time.monotonic()))
        try:
            yield
        finally:
            self._waits.pop()

    def stop(self, message: str) -> None:
        """Say it and end all ranks."""
        sys.stdout.flush()
        sys.stderr.write(f"ggrad: {self.name}: {message}\n")
        sys.stderr.flush()
        time.sleep(FORWARDED)
        self._MPI.COMM_WORLD.Abort(1)
        os._exit(1)

    def _failed(self, kind, error, trace) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self.stop(f"{kind.__name__}: {error}; this ends all ranks\n{text.rstrip()}")

    def _say_end(self) -> None:
        """At the end of the program: tell the others, who may still wait for this rank."""
        self._ended = True
        if not self._may_ask or self._MPI.Is_finalized():
            return
        others = [r for r in range(self._mpi.size) if r != self._mpi.rank]
        self._notes = [self._mpi.isend(None, r) for r in others]
        came: set[int] = set()
        while len(came) < len(others):  # all of them end, or some wait for this one and end the job
            status = self._MPI.Status()
            if self._mpi.Iprobe(status=status):
                came.add(status.source)
                self._mpi.recv(source=status.source)
            else:
                time.sleep(0.005)
        for note in self._notes:
            note.wait()

    def _look(self, beside: dict[int, int]) -> None:
        watched, poll = _open_processes(beside)
        while not self._ended:
            for descriptor, _ in poll(0.1):
                if not self._ended:
                    rank = watched.pop(descriptor)
                    self.stop(f"rank {rank} has died: its process was killed, or ended without a word")
            waits = self._waits[-1:]
            if not waits:
                continue
            what, since = waits[0]
            seconds = time.monotonic() - since
            if seconds > self._timeout:
                self.stop(f"has waited for {seconds:.0f} s in {_shown(what)}: another rank does not come there")
            if seconds > PATIENT and self._may_ask:
                status = self._MPI.Status()
                if self._mpi.Iprobe(status=status):
                    self.stop(f"waits in {_shown(what)}, and rank {status.source} has ended without it")


def _shown(what: object) -> str:
    op = getattr(what, "op", None)
    return f"the node {what!r}" if op is not None else str(what)


def _wait_for_none(seconds: float) -> list:
    time.sleep(seconds)
    return []


def _open_processes(beside: dict[int, int]):
    """File descriptors of other processes, readable when those end, and what waits for one; none where there is no such
    thing."""
    watched: dict[int, int] = {}
    if not hasattr(os, "pidfd_open"):
        return watched, _wait_for_none
    poll = select.poll()
    for pid, rank in beside.items():
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it cannot be seen from here, in a container of its own say
            continue
        watched[descriptor] = rank
        poll.register(descriptor, select.POLLIN)

    def wait(seconds: float) -> list:
        found = poll.poll(int(seconds * 1000))
        for descriptor, _ in found:
            poll.unregister(descriptor)
        return [f for f in found if f[0] in watched]

    return watched, wait
