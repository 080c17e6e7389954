"""Bound graphs as XLA calls them: each is registered in C under a number, which the call carries as an attribute.

What was registered stays for as long as the process, since compiled programs of JAX's name it.  The numbers are drawn
at random: a program that another process compiled finds nothing under its own.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from ..call.compiled import Layout
from ..core.dtype import BF16, F16, F32, I32, DType
from ..core.errors import KernelError, ShapeError
from ..core.native import built, default_threads, ffi, lib
from ..run.bound import Bound

DTYPES = {np.dtype("f4"): F32, np.dtype("f2"): F16, np.dtype(jax.numpy.bfloat16): BF16, np.dtype("i4"): I32}
_OF: dict[DType, np.dtype] = {of: dtype for dtype, of in DTYPES.items()}
_TARGET = "ggrad_call"
_registered: list[Any] = []  # all that C reads, kept alive
_one_registers = threading.Lock()


class Call:
    """A bound graph, which XLA can call: its cells are the arguments, then the results."""

    def __init__(self, name: str, bound: Bound, args: Sequence[Layout], rets: Sequence[Layout]) -> None:
        _register_handler()
        if len(args) + len(rets) > lib.GG_MOST_SLOTS:
            raise KernelError(f"{name}: more than {lib.GG_MOST_SLOTS} arrays go in and out")
        self.id = secrets.randbits(62)
        self._args, self._rets = list(args), list(rets)
        threads = min(default_threads(), lib.GG_MAX_THREADS)
        session = bound.session()
        sizes = ffi.new("int64_t[]", [layout.nbytes for layout in (*args, *rets)])
        text = ffi.new("char[]", name.encode())
        function = ffi.new(
            "gg_xla_function *",
            {
                "id": self.id,
                "name": text,
                "bound": session.ready_for_calls(threads),
                "n_args": len(args),
                "n_rets": len(rets),
                "nbytes": sizes,
                "threads": threads,
            },
        )
        _registered.append((function, text, sizes, session))
        lib.gg_xla_register(function)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results.  Under vmap the graph runs for each batch."""
        given = [x.transpose(layout.order) for x, layout in zip(arrays, self._args, strict=True)]
        like = [
            jax.ShapeDtypeStruct([layout.shape[i] for i in layout.order], _OF[layout.dtype]) for layout in self._rets
        ]
        made = jax.ffi.ffi_call(_TARGET, like, vmap_method="broadcast_all")(*given, id=np.int64(self.id))
        return [y.transpose(np.argsort(layout.order)) for y, layout in zip(made, self._rets, strict=True)]


def layout_of(x: Any, where: str) -> Layout:
    """How XLA lays an array out.

    Raises:
        ShapeError: it is of another dtype.
    """
    dtype = np.dtype(x.dtype)
    if dtype not in DTYPES:
        raise ShapeError(f"{where} is {dtype}, and must be float32, float16, bfloat16 or int32")
    layout = Layout.of(x.shape, DTYPES[dtype])
    assert layout is not None
    return layout


@cache
def _register_handler() -> None:
    if not built():
        raise KernelError("ggrad.jax: ggrad was installed without its C kernels")
    capsule_of = ctypes.pythonapi.PyCapsule_New
    capsule_of.restype, capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    handler = int(ffi.cast("uintptr_t", ffi.addressof(lib, "gg_xla_call")))
    jax.ffi.register_ffi_target(_TARGET, capsule_of(handler, None, None), platform="cpu")
