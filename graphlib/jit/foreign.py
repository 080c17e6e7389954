"""Kernels in C from elsewhere: functions of the kernels' signature, made by another package or a compiler just now."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.builtin import provides
from ..core.errors import KernelError
from ..core.native import ffi, lib
from ..core.tensor import Tensor

if TYPE_CHECKING:
    from ..core.op import Op

SIGNATURE = "void (const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch)"


@provides
def foreign_kernel(op: Op, run: Any, **options: Any) -> ForeignKernel:
    """What `Op.kernel_in_c` declares."""
    return ForeignKernel(op, run, **options)


class ForeignKernel:
    """The kernel of an op, given as a function in C; see `Op.kernel_in_c`, which makes it."""

    language = "C"

    def __init__(
        self,
        op: Op,
        run: Any,
        *,
        tasks: Callable[[Tensor, int], int] | None = None,
        stages: int = 1,
        work: Callable[[Tensor], int] | None = None,
        scratch: Callable[[Tensor], int] | None = None,
    ) -> None:
        if stages < 1:
            raise KernelError(f"{op.name}: a kernel has at least 1 stage, not {stages}")
        self.op, self.run = op, run  # whatever it is, it is held as long as the op
        self._address = address_of(op.name, run)
        self._tasks, self._stages, self._work, self._scratch = tasks, stages, work, scratch
        self._fitted: dict[tuple, tuple] = {}

    def address_for(self, t: Tensor) -> int:
        """The address of a gg_kernel for this node.

        Raises:
            KernelError: a number of tasks or bytes is no whole number of at least 0.
        """
        tasks = tuple(
            self._count("tasks", 1 if self._tasks is None else self._tasks(t, s)) for s in range(self._stages)
        )
        work, scratch = (self._count("bytes", size(t) if size else 0) for size in (self._work, self._scratch))
        key = tasks, work, scratch
        if key not in self._fitted:
            name, counts = ffi.new("char[]", self.op.name.encode()), ffi.new("int64_t[]", tasks)
            struct = ffi.new("gg_fitted_kernel *", {"grain": 1, "work": work, "scratch": scratch, "tasks": counts})
            struct.kernel = {
                "name": name, "stages": self._stages,
                "run": ffi.cast("void (*)(const gg_call *, int, int64_t, int64_t, void *)", self._address),
                "tasks": ffi.addressof(lib, "gg_fitted_tasks"),
                "work": ffi.addressof(lib, "gg_fitted_work"),
                "scratch": ffi.addressof(lib, "gg_fitted_scratch"),
            }  # fmt: skip
            self._fitted[key] = struct, name, counts  # for as long as the op: graphs hold the bare address
        return int(ffi.cast("uintptr_t", self._fitted[key][0]))

    def _count(self, what: str, n: Any) -> int:
        if not isinstance(n, int) or n < 0:
            raise KernelError(f"{self.op.name}: a kernel's number of {what} is a whole number of at least 0, not {n!r}")
        return n


def address_of(name: str, run: Any) -> int:
    """Of a C function: a pointer of cffi's, a function of ctypes', one with `address` as numba's cfunc, or a number.

    Raises:
        KernelError: it is none of these, or NULL.
    """
    address: Any = None
    if isinstance(run, ffi.CData):
        address = int(ffi.cast("uintptr_t", run))
    elif hasattr(run, "argtypes"):  # of ctypes
        address = ctypes.cast(run, ctypes.c_void_p).value
    else:
        address = getattr(run, "address", run)
    if isinstance(address, bool) or not isinstance(address, int) or not address:
        raise KernelError(
            f"{name}: a kernel in C is a function pointer of cffi's or ctypes', or an address, not {run!r}; "
            f"its signature is {SIGNATURE}"
        )
    return address


def c_declarations() -> str:
    """What a kernel in C includes: the declarations of `gg_call`, `gg_tensor` and what else it sees, as text.

    Raises:
        KernelError: ggrad was installed without its C kernels.
    """
    if lib is None:
        raise KernelError("ggrad was installed without its C kernels, and so without their declarations")
    return ffi.string(lib.gg_declarations).decode()
