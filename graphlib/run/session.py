"""Sessions: a planned graph with memory and a table of calls, run by C in one call.

The tables are built once: a gg_tensor for every source and destination, a gg_call for every node
that runs a kernel, a gg_step for every stage, in the order of the waves.  They are NumPy arrays of C structs; a
test compares the layouts.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np

from ..compile.plan import plan, running
from ..compile.waves import NO_STAGE, Waves, calls_python, side_by_side
from ..core.arena import PAGE, Arena
from ..core.calls import application
from ..core.errors import GraphError, IndexRangeError, KernelError, NotComputedError, not_whole
from ..core.native import ffi, lib, struct_dtype
from ..core.op import Op
from ..core.program import Program
from ..core.tensor import MAX_DIMS, MEM_ALIGN, Tensor, aligned_zeros, bindings, look, round_up, stored
from .finite import check_finite
from .profile import Profile, Trace
from .signals import signals_heard

GG_TENSOR, GG_CALL, GG_STEP, GG_SPOT = map(struct_dtype, ("gg_tensor", "gg_call", "gg_step", "gg_spot"))
_one_prepares = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_prepares._at_fork_reinit)  # type: ignore[attr-defined]
ABSENT, UNPLACED = 0, 1  # data pointers: of an input left out; of one that has no address yet


class Values:
    """What a session's last run has made, as tensors see it: their bytes in its arena.

    Tensors hold it, and it holds no tensor: so a graph that nobody names any more is gone at once, with its memory.
    """

    def __init__(self, arena: np.ndarray, places: dict[int, int], bound: dict[int, np.ndarray]) -> None:
        self.arena, self._places = arena, places  # of each owner that is kept, by its number: its first byte
        self._bound = bound  # what holds a cell that is not in the arena, by its number
        self.whole = False  # whether a run has come to its end since the last one began
        self._lent: list[weakref.ref[np.ndarray]] = []

    @property
    def is_lent(self) -> bool:
        """Whether somebody still holds what was lent, so that no run may write to it."""
        self._lent = [ref for ref in self._lent if ref() is not None]
        return bool(self._lent)

    def read(self, t: Tensor) -> np.ndarray:
        memory, offset = self._where(t)
        return look(memory, t, offset, writable=False)

    def lend(self, t: Tensor) -> np.ndarray:
        memory, offset = self._where(t)
        array = stored(memory, t, offset, writable=True)
        if memory is self.arena:
            self._lent.append(weakref.ref(array))
        return array

    def _where(self, t: Tensor) -> tuple[np.ndarray, int]:
        """The memory in which it lies, and its first byte there."""
        if not self.whole:
            raise not_whole(t)
        cell, offset = t.cell
        if cell.serial in self._bound:
            return self._bound[cell.serial], offset
        owner, offset = t.storage
        if owner.serial not in self._places:
            raise NotComputedError(
                f"{t.label()} cannot be read: its bytes were given to another value. "
                "gg.set_output(t) before graph.compute() keeps them"
            )
        return self.arena, self._places[owner.serial] + offset


class Session:
    """The program as it stands, planned and ready to run; memory comes with the first run.

    Args:
        borrowed: cells whose memory comes with each `call`, and in which place of its addresses.
        arena: default is the program's.
    """

    def __init__(
        self,
        program: Program,
        *,
        reuse: bool = True,
        borrowed: Mapping[Tensor, int] = MappingProxyType({}),
        arena: Arena | None = None,
    ) -> None:
        self.kept, self.reuse = program.kept, reuse
        self._borrowed = borrowed
        self._leaves = [leaf for leaf in program.leaves if leaf not in borrowed]
        self._arena = arena or program.arena
        self._owners = {owner for t in self.kept if not (owner := t.storage[0]).is_leaf}
        self.nodes = running(program)
        self.values: Values | None = None
        self._addressed = 0, 0  # the generation of the arena, and the bindings, whose addresses are in the tables
        self._ready_for = 0, 0  # threads and bindings
        self._describe()

        calls, at = ffi.cast("gg_call *", self._calls.ctypes.data), range(len(self.nodes))
        self._preparing = {i: n for i in at if (n := _bytes_to_prepare(self.nodes[i], calls + i))}
        self._calls["prepared"][list(self._preparing)] = UNPLACED  # the kernel may be cut otherwise
        work = {t: n for i, t in zip(at, self.nodes, strict=True) if (n := lib.gg_call_work(calls + i))}
        self.work_bytes = lambda t: work.get(t, 0)
        self._scratch_bytes = max((lib.gg_call_scratch(calls + i) for i in at), default=0)
        self._scratch_stride = round_up(self._scratch_bytes, PAGE)  # threads never share a cache line
        self.waves = waves = self._order()
        self.plan = plan(
            program,
            self.kept,
            waves=waves,
            work_bytes=self.work_bytes,
            scratch=self._scratch_stride,
            prepared=sum({_form_of(self.nodes[i]): n for i, n in self._preparing.items()}.values()),
            reuse=reuse,
        )

    def run(self, threads: int) -> None:
        """Run every node; see `Graph.compute`."""
        threads = min(threads, lib.GG_MAX_THREADS)
        self.prepare(threads)
        self._run(self.steps_in_c, threads)

    def call(self, addresses: Sequence[int], threads: int) -> None:
        """Run every node, with what is borrowed at these addresses; its results are nowhere else.  See `Bound`."""
        threads = min(threads, lib.GG_MAX_THREADS)
        bound = self.ready_for_calls(threads)
        with signals_heard() as stops:
            lib.gg_run_bound(bound, addresses, threads, stops)
        if self._fault.code:
            self._raise()

    def ready_for_calls(self, threads: int):
        """What C needs to know for calls on so many threads that Python has no part in."""
        if self._ready_for != (threads, bindings()):
            self.prepare(threads)
            self._for_calls.scratch = ffi.cast("char *", self.scratch.ctypes.data)
            self._ready_for = threads, bindings()
        return self._for_calls

    @cached_property
    def _for_calls(self):
        """A gg_bound."""
        spots = [
            (row, self._borrowed[cell], offset)
            for row, t in enumerate(self._places)
            if t is not None
            for cell, offset in [t.cell]
            if cell in self._borrowed
        ]
        self._spots = np.array(spots, GG_SPOT)  # C reads it there
        return ffi.new(
            "gg_bound *",
            {
                "steps": self.steps_in_c,
                "n_steps": len(self.steps),
                "tensors": ffi.cast("gg_tensor *", self._tensors.ctypes.data),
                "spots": ffi.cast("gg_spot *", self._spots.ctypes.data),
                "n_spots": len(spots),
                "scratch_stride": self._scratch_stride,
                "steady": self._steady,
                "fault": self._fault,
            },
        )

    def profile(self, threads: int) -> Profile:
        """Run every node, and tell how long each took on which thread."""
        threads = min(threads, lib.GG_MAX_THREADS)
        self.prepare(threads)
        trace = Trace(self.steps_in_c, len(self.steps), threads)
        begin = time.monotonic_ns()
        self._run(trace.steps, threads)
        return Profile(self.nodes, self.waves.followers, trace.spans(), threads, begin, time.monotonic_ns())

    def run_checked(self, threads: int) -> None:
        """Run every node, and look at every result: before leaves are updated, then after.

        For sessions without reuse, in which each result has bytes of its own.

        Raises:
            NotFiniteError: no leaf has been updated, if it is a result of before.
        """
        threads = min(threads, lib.GG_MAX_THREADS)
        self.prepare(threads)
        values: Values = self.values  # type: ignore[assignment]

        def value_of(t: Tensor) -> np.ndarray:
            owner, offset = t.storage
            if owner.is_leaf:
                return look(owner.memory(), t, offset, writable=False)
            start = self.plan.offsets[owner]
            return look(values.arena[start : start + owner.nbytes], t, offset, writable=False)

        first = int(np.searchsorted(self._step_waves, self._first_update))
        for begin, end, updated in ((0, first, False), (first, len(self.steps), True)):
            self._run(self.steps_in_c + begin, threads, end - begin)
            values.whole = False
            here = [t for t in self.nodes if (self.waves.end[t] >= self._first_update) == updated]
            check_finite(here, value_of)
        values.whole = True

    def _run(self, steps, threads: int, n: int | None = None) -> None:
        self._fault.code = 0
        scratch = ffi.cast("char *", self.scratch.ctypes.data)
        values: Values = self.values  # type: ignore[assignment]
        values.whole = False
        self._arena.show(values)
        n = len(self.steps) if n is None else n
        with signals_heard() as stops:
            lib.gg_run(steps, n, threads, scratch, self._scratch_stride, self._fault, stops, self._steady)
            if self._fault.code == lib.GG_STOPPED:
                self._reset_accumulators()
            elif self._fault.code == lib.GG_OK:
                values.whole = True
                for owner in self._owners:
                    owner.values = values
        if self._fault.code:
            self._raise()

    def _reset_accumulators(self) -> None:
        """Sums of gradients to which some nodes of a run have added, and others have not."""
        for leaf in self._leaves:
            if leaf.role == "accumulator":
                leaf.memory()[...] = 0

    def poison(self, threads: int) -> None:
        """Fill all memory that the next run uses with NaN, so that reading what nobody wrote shows: for tests."""
        self.prepare(threads)
        self.values.arena[...] = self.scratch[...] = 0xFF  # type: ignore[union-attr]

    def poison_between_results(self) -> bool:
        """Whether the bytes that belong to no value and to no thread are still as `poison` left them."""
        assert self.values is not None
        arena = self.values.arena
        between = np.ones(arena.size, bool)
        for b in self.plan.buffers:
            between[b.offset : b.offset + b.nbytes] = False
        beyond = self.scratch.reshape(-1, max(1, self._scratch_stride))[:, self._scratch_bytes :]
        return bool((arena[between] == 0xFF).all() and (beyond == 0xFF).all())

    # -- tables ---------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Everything of the tables but the addresses."""
        rows: list[tuple] = []
        row_of: dict[Tensor | None, tuple] = {}
        kernels: dict[Op, int] = {}  # of those in C
        calls: list[tuple] = []
        self._attrs: list[np.ndarray] = []
        self._places: list[Tensor | None] = []
        for i, t in enumerate(self.nodes):
            op: Op = t.op  # type: ignore[assignment]
            dst = t.updates or t.outputs
            at = len(rows)
            for s in (*t.src, *dst):
                if (row := row_of.get(s)) is None:
                    row = row_of[s] = _row(s)
                rows.append(row)
                self._places.append(s)
            if op.record.names:
                record = op.pack_attrs(t.attrs)
                self._attrs.append(record)
                attrs = record.ctypes.data
            else:
                attrs = 0
            if op.in_python is not None or (kernel := kernels.get(op)) is None:
                kernel = kernel_of(t)
                kernels[op] = kernel
            calls.append((kernel, len(t.src), len(dst), at, at + len(t.src), attrs, 0, 0, i, 0, 0, 0))
        self._gaps: list[tuple[Tensor, int]] = []  # between the parts of packed results: where they begin
        for i, t in enumerate(self.nodes):
            at = len(rows)
            for p in t.parts:
                if gap := round_up(p.nbytes, MEM_ALIGN) - p.nbytes:
                    rows.append((UNPLACED, 0, 1, (1, 1, 1, gap), (gap, gap, gap, 1)))
                    self._gaps.append((t, p.offset + p.nbytes))
            if len(rows) > at:
                calls.append((_in_c("zero_bytes"), 0, len(rows) - at, at, at, 0, 0, 0, i, 0, 0, 0))
        self._tensors = np.array(rows, GG_TENSOR)
        self._calls = np.array(calls, GG_CALL)
        base, size = self._tensors.ctypes.data, GG_TENSOR.itemsize
        for pointer in ("src", "dst"):
            self._calls[pointer] = self._calls[pointer] * size + base
        self._fault = ffi.new("gg_fault *")
        self._calls["fault"] = int(ffi.cast("uintptr_t", self._fault))
        if any(map(calls_python, self.nodes)):
            from ..jit.callback import turns

            turns[int(ffi.cast("uintptr_t", self._fault))] = self._arena.turn

    def prepare(self, threads: int) -> None:
        memory = self._arena.results(self.plan.arena)
        if self.values is None or self._addressed != (self._arena.generation, bindings()):
            self._address(memory)
        self.scratch = self._arena.scratch(threads * self._scratch_stride)

    def _order(self) -> Waves:
        """The steps: every stage of every call, wave by wave."""
        n, calls = len(self._calls), ffi.cast("gg_call *", self._calls.ctypes.data)
        steps = np.zeros(lib.gg_compile(calls, n, ffi.NULL), GG_STEP)  # one after another
        lib.gg_compile(calls, n, ffi.cast("gg_step *", steps.ctypes.data))
        call = (steps["call"] - self._calls.ctypes.data) // GG_CALL.itemsize
        tasks: dict[Tensor, list[int]] = {t: [] for t in self.nodes}
        for i, count in zip(call.tolist(), steps["tasks"].tolist(), strict=True):
            if i < len(self.nodes):
                tasks[self.nodes[i]].append(count)
        number = {t: i for i, t in enumerate(self.nodes)}
        kernels = {kernel: _leads_and_follows(kernel) for kernel in set(self._calls["kernel"].tolist())}
        of_node = dict(zip(self.nodes, map(kernels.__getitem__, self._calls["kernel"].tolist()), strict=False))
        # of the first of an op's results, if that is wanted
        self.leads = lambda t: NO_STAGE if _first_is_unwanted(t) else of_node[t][0]
        waves = side_by_side(self.nodes, tasks.__getitem__, leads=self.leads, follows=lambda t: of_node[t][1])
        self._bind_followers(waves, number)

        # the bytes between the parts of a packed result read as zero: those calls run beside the node's first stage
        begin = np.array([waves.begin[t] for t in self.nodes], np.int64)[self._calls["index"][call]]
        nth = np.arange(len(call)) - np.searchsorted(call, call)  # of its call's steps
        wave = begin + nth
        own = np.ones(len(self._calls), bool)  # calls whose tasks are their own
        own[[number[t] for t in waves.leader]] = False
        order = np.argsort(wave, kind="stable")
        order = order[own[call[order]]]
        self.steps = steps[order]
        self.steps_in_c = ffi.cast("gg_step *", self.steps.ctypes.data)
        heads, sizes = np.unique(wave[order], return_index=True, return_counts=True)[1:]
        self.steps["together"] = 0
        self.steps["together"][heads] = sizes
        self._step_waves = wave[order]
        self._first_update = min((waves.begin[t] for t in self.nodes if t.updates), default=waves.count)
        # from the first change of a leaf on a run is not stopped; sums of gradients can be begun anew
        updating = [waves.begin[t] for t in self.nodes if any(leaf.role != "accumulator" for leaf in t.updates)]
        self._steady = int(np.searchsorted(wave[order], min(updating, default=waves.count)))
        return waves

    def _bind_followers(self, waves: Waves, number: dict[Tensor, int]) -> None:
        """The calls that others make, one leader's after the other's."""
        followers = waves.followers
        self._followers = self._calls[[number[t] for chain in followers.values() for t in chain]]
        at = self._followers.ctypes.data
        for leader, chain in followers.items():
            self._calls["followers"][number[leader]] = at
            self._calls["n_followers"][number[leader]] = len(chain)
            at += len(chain) * GG_CALL.itemsize

    def _address(self, memory: np.ndarray) -> None:
        """Every address in the tables, of results in this memory or where they are bound.  Whatever ends this half way,
        the next run begins it anew: only its last lines say that there is memory."""
        now, self._addressed = (self._arena.generation, bindings()), (0, 0)
        for leaf in {leaf for t in self.nodes for leaf in t.updates}:
            if leaf not in self._borrowed and not leaf.memory().flags.writeable:
                raise GraphError(f"{leaf.label()} is bound to a read-only array, and the graph updates it")
        base = memory.ctypes.data
        bound = self._bound_cells()
        bases = {t: base + offset for t, offset in self.plan.offsets.items()}
        for leaf in self._leaves:
            bases[leaf] = leaf.memory().ctypes.data

        def address(t: Tensor | None) -> int:
            if t is None:
                return ABSENT
            if bound or self._borrowed:
                cell, offset = t.cell
                if cell in self._borrowed:
                    return UNPLACED
                if cell in bound:
                    return bound[cell].ctypes.data + offset
            owner, offset = t.storage
            return bases[owner] + offset

        between = [bases[t] + offset for t, offset in self._gaps]
        self._tensors["data"] = [*map(address, self._places), *between]
        work = [base + self.plan.work[t] if t in self.plan.work else 0 for t in self.nodes]
        self._calls["work"][: len(work)] = work
        self._keep_alive = [leaf.memory() for leaf in self._leaves]
        self._prepare_constants()
        places = {owner.serial: self.plan.offsets[owner] for owner in self._owners}
        self.values = Values(memory[: self.plan.arena], places, {cell.serial: array for cell, array in bound.items()})
        self._addressed = now

    def _bound_cells(self) -> dict[Tensor, np.ndarray]:
        """The results that are bound, and to what."""
        bound = {cell: cell.bound for t in self._places if t is not None and (cell := t.cell[0]).bound is not None}
        for t in self._places if bound else ():
            if t is not None and t.is_packed and any(p in bound for p in t.parts):
                raise GraphError(f"{t.label()} is read as a whole, so that none of its parts can be bound")
        return bound

    def _prepare_constants(self) -> None:
        """What kernels make of inputs that never change: here, or by another session for the same kernel before."""
        calls = ffi.cast("gg_call *", self._calls.ctypes.data)
        for i, nbytes in self._preparing.items():
            kernel, owner, *layout = _form_of(self.nodes[i])
            made, key = owner.prepared, (kernel, *layout)
            with _one_prepares:  # two graphs may want the same form at once; it is seen when it is whole
                if (form := made.get(key)) is None:
                    form = aligned_zeros(nbytes)
                    calls[i].kernel.prepare(calls + i, ffi.cast("void *", form.ctypes.data))
                    made[key] = form
            self._calls["prepared"][i] = form.ctypes.data
            self._keep_alive.append(form)

    # -- errors ---------------------------------------------------------------------------------

    def _raise(self) -> None:
        fault = self._fault
        t = self.nodes[fault.node]
        if fault.code == lib.GG_PYTHON:
            from ..jit.callback import take_raised

            raise take_raised(fault)
        if fault.code == lib.GG_STOPPED:
            raise GraphError("the run was stopped")  # what stopped it has been raised before
        name = t.op.inputs[min(fault.input, len(t.op.inputs) - 1)]
        if fault.code == lib.GG_SHARED:
            found = f"{name} holds {fault.value} for two sequences, and each needs its own"
        else:
            found = f"{name} holds {fault.value}, and must be from {fault.least} to {fault.limit - 1}"
        raise IndexRangeError(f"{application(t)}: {found}. What is made of it was not computed")


def kernel_of(t: Tensor) -> int:
    """The address of the gg_kernel that computes this node."""
    op: Op = t.op  # type: ignore[assignment]
    if op.in_python is not None:
        return op.in_python.address_for(t)
    if op.in_c is None or not (address := _in_c(op.in_c)):
        raise KernelError(
            f"{op.name} has no kernel: declare one with @{op.name}.kernel, or compute(backend='reference')"
        )
    return address


def _first_is_unwanted(t: Tensor) -> bool:
    return t.op.chooses and not t.attrs["wanted"][0]  # type: ignore[union-attr]


def _leads_and_follows(kernel: int) -> tuple[int, bool]:
    """In which stage the kernel at an address tells followers of its blocks; whether it can follow itself."""
    found = ffi.cast("gg_kernel *", kernel)
    return found.leads, found.follow != ffi.NULL


def _bytes_to_prepare(t: Tensor, call) -> int:
    """Of what the node's kernel would rather have than its first input, if that never changes."""
    s = t.src[0] if t.src else None
    if s is None or not s.storage[0].frozen or call.kernel.prepared == ffi.NULL:
        return 0
    return call.kernel.prepared(call)


def _form_of(t: Tensor) -> tuple:
    """What the form of a node's first input follows from."""
    s: Tensor = t.src[0]  # type: ignore[assignment]
    return kernel_of(t), *s.storage, s.spec, s.strides


def _in_c(name: str) -> int:
    """The address of a kernel written in C; 0 if there is none."""
    return int(ffi.cast("uintptr_t", lib.gg_kernel_find(name.encode())))


def _row(t: Tensor | None) -> tuple:
    """A gg_tensor without its address."""
    if t is None:
        return (ABSENT, 0, 0, (0,) * MAX_DIMS, (0,) * MAX_DIMS)
    pad = MAX_DIMS - len(t.shape)
    outer = t.strides[0] * t.shape[0] if t.shape else t.dtype.nbytes
    return (UNPLACED, t.dtype.code, len(t.shape), (1,) * pad + t.shape, (outer,) * pad + t.strides)
