"""Kernels that are plain Python: a node's function is called with NumPy arrays, under the GIL, as one task."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from ..core.native import define_for_c, ffi, lib
from ..core.tensor import Tensor, converted
from ..core.turns import Turn, inside

Compute = Callable[[Tensor, "list[np.ndarray | None]"], "tuple[np.ndarray, ...]"]

_nodes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by the number in their kernel's struct
turns: WeakValueDictionary[int, Turn] = WeakValueDictionary()  # of graphs that may call Python, by their fault record
_raised: dict[int, BaseException] = {}  # by the address of the fault record that tells of it


class Callback:
    """The kernel of an op with layout="contiguous" that computes in Python.

    Args:
        name: the op's.
        compute: compute(t, arrays) gives the results of the node `t` from its inputs, None for one left out.  The
            inputs are read-only arrays of their storage types.  What it raises ends the run and comes out of it.
    """

    language = "Python"

    def __init__(self, name: str, compute: Compute) -> None:
        self.name, self.compute = name, compute
        self._structs: WeakKeyDictionary[Tensor, tuple] = WeakKeyDictionary()

    def address_for(self, t: Tensor) -> int:
        """The address of a gg_kernel for this node, which lives as long."""
        if t not in self._structs:
            name, tasks = ffi.new("char[]", self.name.encode()), ffi.new("int64_t[]", [1])
            struct = ffi.new("gg_fitted_kernel *", {"grain": t.serial, "tasks": tasks})
            struct.kernel = {
                "name": name, "stages": 1, "run": lib.gg_python_run, "tasks": ffi.addressof(lib, "gg_fitted_tasks"),
            }  # fmt: skip
            self._structs[t] = struct, name, tasks
            _nodes[t.serial] = t
        return int(ffi.cast("uintptr_t", self._structs[t][0]))


def take_raised(fault) -> BaseException:
    """What the function raised that this fault record tells of."""
    return _raised.pop(int(ffi.cast("uintptr_t", fault)))


def _run(call, stage, begin, end, scratch) -> None:
    t = _nodes[ffi.cast("gg_fitted_kernel *", call.kernel).grain]
    lib.gg_signals_of_host(1)  # workers block signals, and the programs that a function starts would inherit that
    try:
        turn = turns.get(int(ffi.cast("uintptr_t", call.fault)))
        with inside(turn), np.errstate(all="ignore"):  # as in a run of the references
            made = t.op.in_python.compute(t, [_value(s, call.src[i]) for i, s in enumerate(t.src)])  # type: ignore[union-attr]
        for i, (result, value) in enumerate(zip(t.updates or t.outputs, made, strict=True)):
            _memory(result, call.dst[i])[...] = converted(value, result.dtype, t.op.name)  # type: ignore[union-attr]
    except BaseException as error:
        _raised[int(ffi.cast("uintptr_t", call.fault))] = error
        call.fault.node, call.fault.code = call.index, lib.GG_PYTHON
    finally:
        lib.gg_signals_of_host(0)


define_for_c("gg_python_run", _run)


def _memory(t: Tensor, at) -> np.ndarray:
    """The array of a contiguous gg_tensor."""
    if not t.size:
        return np.empty(t.shape, t.dtype.storage)
    return np.frombuffer(ffi.buffer(at.data, t.nbytes), t.dtype.storage).reshape(t.shape)


def _value(t: Tensor | None, at) -> np.ndarray | None:
    if t is None:
        return None
    array = _memory(t, at)
    array.flags.writeable = False
    return array
