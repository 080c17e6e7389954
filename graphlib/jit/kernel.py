"""Kernels written in Python: compiled by numba to the signature of the C kernels, and run by the same threads.

    @op
    def scaled(x, *, factor: float):
        return x.spec

    @scaled.kernel
    def _(out, x, *, factor):
        for i in range(out.size):
            out[i] = factor * x[i]

The body's positional parameters are the outputs, then the inputs, as NumPy arrays of f32 or i32: halves are
cast to f32 when the node is made.  What it sees of each array is a block: the trailing `dims` axes, by default 1, a
row.  The axes before those, of the first output, say how many blocks there are; the body runs
once for each, on any thread and in any order.  Another array is lined up with them from the right: one with fewer
along an axis is shared by equal groups of blocks (by all, if it has 1 or no such axis).  An input that was left out
is an empty array.

Keyword-only parameters are attributes, by name, and what else the body asks for:

    stage          which of the `stages` this is; each begins when the one before is complete
    task, tasks    with the option `tasks`: which task of how many
    work, scratch  with the options of these names: memory of floats that all blocks share, or that is the
                   thread's own; neither is zeroed

A body may not write what another block of the same stage reads or writes, and may neither raise nor allocate: what
may is refused when it is compiled.  An index out of range is not noticed, as in C: try the body on NumPy
arrays first.  It may call plain Python functions, which are compiled with it.  Write 0.5 and 2.0, which become
f32; an int times a float is double precision, as `x ** 2` may raise (x * x does not).

numba compiles when a graph with the op is first planned; the machine code is kept in a folder
($GGRAD_CACHE, else ggrad in the user's cache folder), and loading it from there does not need numba.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from ..core.builtin import provides
from ..core.dtype import F32, I32
from ..core.errors import KernelError
from ..core.native import ffi, lib
from ..core.tensor import MAX_DIMS, Tensor
from .source import Array

if TYPE_CHECKING:
    from ..core.op import Op

TASK_ELEMENTS = 8192  # about what one task of cheap elementwise work should hold
RESERVED = ("stage", "task", "tasks", "work", "scratch")


@provides
def python_kernel(op: Op, body: Callable[..., None], **options: Any) -> Kernel:
    """What `Op.kernel` declares."""
    return Kernel(op, body, **options)


class Kernel:
    """The kernel of an op, given as a Python function; see the module.  Made by `Op.kernel`.

    Args:
        op: whose kernel it is.
        body: the function.
        dims: trailing axes in a block, 1 to 4; of single parameters as {"name": dims}, then 1 of the others.
        stages: how often the body runs for each block.
        cost: cheap operations for each element, so that tasks come out neither tiny nor huge.
        tasks: tasks(t, stage) of a node `t` says how many tasks there are, where blocks do not cut the work well. The
            body then runs once for each, and every array has no more than its `dims` axes.
        work: work(t) says how many floats of `work` the node needs.
        scratch: scratch(t) says how many floats of `scratch` each thread needs.
        fastmath: what LLVM may do with floats beyond IEEE; "reassoc" lets a sum vectorise.
    """

    language = "numba"

    def __init__(
        self,
        op: Op,
        body: Callable[..., None],
        *,
        dims: int | Mapping[str, int] = 1,
        stages: int = 1,
        cost: int = 1,
        tasks: Callable[[Tensor, int], int] | None = None,
        work: Callable[[Tensor], int] | None = None,
        scratch: Callable[[Tensor], int] | None = None,
        fastmath: bool | set[str] = frozenset({"contract"}),  # type: ignore[assignment]
    ) -> None:
        parameters = inspect.signature(body).parameters.values()
        self.op, self.body = op, body
        self.stages, self.cost, self.tasks, self.work, self.scratch = stages, cost, tasks, work, scratch
        self.fastmath = fastmath if isinstance(fastmath, bool) else frozenset(fastmath)
        self.arrays = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.n_dst = len(self.arrays) - len(op.inputs)
        by_name = dims if isinstance(dims, Mapping) else dict.fromkeys(self.arrays, dims)
        self.dims = {name: by_name.get(name, 1) for name in self.arrays}
        self._check_declaration(by_name)
        self._fitted: dict[tuple, tuple] = {}  # what is compiled and laid out, by all that it depends on

    def address_for(self, t: Tensor) -> int:
        """The address of a gg_kernel for this node, compiled now if it never was.

        Raises:
            KernelError: a dtype that bodies cannot have, blocks that do not fit, or a body that may raise or allocate.
        """
        from .objects import machine_code  # late: only who declares kernels needs what it brings along

        arrays = self._arrays_of(t)
        tasks, grain = self._tasks_of(t)
        work, scratch = (4 * size(t) if size else 0 for size in (self.work, self.scratch))
        key = arrays, tasks, grain, work, scratch
        if key not in self._fitted:
            run = ffi.cast("void (*)(const gg_call *, int, int64_t, int64_t, void *)", machine_code(self, arrays))
            name, counts = ffi.new("char[]", self.op.name.encode()), ffi.new("int64_t[]", tasks)
            struct = ffi.new("gg_fitted_kernel *", {"grain": grain, "work": work, "scratch": scratch, "tasks": counts})
            struct.kernel = {
                "name": name, "stages": self.stages, "run": run,
                "tasks": ffi.addressof(lib, "gg_fitted_tasks"),
                "work": ffi.addressof(lib, "gg_fitted_work"),
                "scratch": ffi.addressof(lib, "gg_fitted_scratch"),
            }  # fmt: skip
            self._fitted[key] = struct, name, counts  # for as long as the op: graphs hold the bare address
        return int(ffi.cast("uintptr_t", self._fitted[key][0]))

    # -- helpers --------------------------------------------------------------------------------

    def _check_declaration(self, by_name: Mapping[str, int]) -> None:
        op = self.op
        if op.variadic:
            raise KernelError(f"{op.name}: an op of any number of inputs needs a kernel in C")
        if self.n_dst < 1:
            inputs = ", ".join(op.inputs)
            raise KernelError(f"{op.name}: the kernel takes its outputs, then {inputs}; not ({', '.join(self.arrays)})")
        if self.arrays[self.n_dst :] != op.inputs:
            named = self.arrays[self.n_dst :]
            raise KernelError(f"{op.name}: the kernel's inputs are called {named}, the op's {op.inputs}")
        for name, dims in by_name.items():
            if name not in self.arrays or dims not in range(1, MAX_DIMS + 1):
                rule = f"it must be 1 to {MAX_DIMS}, of one of {self.arrays}"
                raise KernelError(f"{op.name}: dims of {name} is {dims}; {rule}")
        known = {*RESERVED, *(op.record.names or ())}
        for name in self.keywords:
            if name in RESERVED and name in op.attrs:
                raise KernelError(f"{op.name}: a kernel in Python cannot have an attribute called {name}")
            if name not in known:
                why = f"is a {op.attr_types[name]}, which kernels cannot see" if name in op.attrs else "is no attribute"
                raise KernelError(f"{op.name}: {name} {why}; a kernel may ask for {', '.join(sorted(known))}")
        given = {"task": self.tasks, "tasks": self.tasks, "work": self.work, "scratch": self.scratch}
        for name in self.keywords:
            if name in given and given[name] is None:
                option = "tasks" if name == "task" else name
                raise KernelError(f"{op.name}: the kernel asks for {name}: give @{op.name}.kernel the option {option}")

    def _tensors(self, t: Tensor) -> list[Tensor | None]:
        """What the positional parameters stand for."""
        outputs = list(t.updates or t.outputs)
        if len(outputs) != self.n_dst:
            raise KernelError(f"{self.op.name}: the kernel has {self.n_dst} outputs, the op {len(outputs)}")
        return [*outputs, *t.src]

    def _arrays_of(self, t: Tensor) -> tuple[Array, ...]:
        arrays = []
        for i, (name, s) in enumerate(zip(self.arrays, self._tensors(t), strict=True)):
            dtype = F32 if s is None else s.dtype
            if dtype not in (F32, I32):
                raise KernelError(
                    f"{self.op.name}: {name} is {dtype}, and kernels in Python take and give f32 and i32; "
                    "gg.cast makes other dtypes of them"
                )
            output = i < self.n_dst
            rows = self.op.layout == "any" and (s is None or s.has_whole_rows)
            arrays.append(Array(
                side="DST" if output else "SRC",
                index=i if output else i - self.n_dst,
                dims=self.dims[name],
                dtype="FLOAT32" if dtype is F32 else "INT32",
                layout="CONTIGUOUS" if output else "ROWS" if rows else self.op.layout.upper(),
            ))  # fmt: skip
        return tuple(arrays)

    def _leading(self, name: str, s: Tensor) -> tuple[int, ...]:
        """The sizes of the axes that are not in a block."""
        return ((1,) * MAX_DIMS + s.shape)[len(s.shape) : MAX_DIMS + len(s.shape) - self.dims[name]]

    def _tasks_of(self, t: Tensor) -> tuple[tuple[int, ...], int]:
        """The tasks of each stage, and the blocks in each."""
        tensors = dict(zip(self.arrays, self._tensors(t), strict=True))
        blocks = (1,) if self.tasks else self._leading(self.arrays[0], tensors[self.arrays[0]])  # type: ignore[arg-type]
        for i, (name, s) in enumerate(tensors.items()):
            if s is None:
                continue
            ours = self._leading(name, s)
            n = max(len(ours), len(blocks))
            for size, whole in zip((1,) * (n - len(ours)) + ours, (1,) * (n - len(blocks)) + blocks, strict=True):
                if size == whole or (i >= self.n_dst and size and whole % size == 0):
                    continue
                rule = "an output has a block for each" if i < self.n_dst else "an input is shared by equal groups"
                raise KernelError(
                    f"{self.op.name}: {name}={s.spec} has {ours} blocks of {self.dims[name]} axes, "
                    f"where there are {blocks} to run: {rule}"
                )
        if self.tasks:
            return tuple(int(self.tasks(t, stage)) for stage in range(self.stages)), 1
        n = prod(blocks)
        elements = max(s.size for s in tensors.values() if s is not None) * self.cost
        grain = max(1, TASK_ELEMENTS * n // max(1, elements))
        return (-(-n // grain),) * self.stages, grain
