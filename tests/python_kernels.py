"""Kernels in plain Python, through cffi callbacks: slow, but free to be wrong in every way a test needs."""

import contextlib

import numpy as np

from ggrad.core.native import ffi, lib
from ggrad.core.op import Op, own


class PythonKernel:
    """What `Op.in_python` wants: something with the address of a gg_kernel.

    Args:
        run: run(dst, src, begin, end) on flat arrays of contiguous f32, a list of them if there are several
            destinations.
        tasks: of its single stage.
    """

    language = "Python"

    def __init__(self, run, tasks: int = 1, scratch: int = 0) -> None:
        def flat(t):
            count = int(np.prod(list(t.ne)))
            return np.frombuffer(ffi.buffer(t.data, 4 * count), np.float32) if count else np.zeros(0, np.float32)

        @ffi.callback("void(*)(const gg_call *, int, int64_t, int64_t, void *)")
        def call(c, stage, begin, end, private):
            dst = [flat(c.dst[i]) for i in range(c.n_dst)]
            run(dst if len(dst) > 1 else dst[0], [flat(c.src[i]) for i in range(c.n_src)], begin, end)

        tasks_of = ffi.callback("int64_t(*)(const gg_call *, int)", lambda c, stage: tasks)
        self._alive = call, tasks_of
        self._struct = ffi.new("gg_kernel *", {"name": ffi.NULL, "stages": 1, "tasks": tasks_of, "run": call})

    def address_for(self, t) -> int:
        return int(ffi.cast("uintptr_t", self._struct))


@contextlib.contextmanager
def temporary_ops():
    """Forgets the ops declared inside."""
    before = dict(own)
    try:
        yield
    finally:
        own.clear()
        own.update(before)


__all__ = ["Op", "PythonKernel", "lib", "temporary_ops"]
