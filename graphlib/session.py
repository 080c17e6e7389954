"""Sessions: a planned graph with memory and a table of calls, run by C in one call.

The tables are built once: a gg_tensor for every source and destination, a gg_call for every node
that runs a kernel, a gg_step for every stage.  They are NumPy arrays of C structs; a test compares
the layouts.
"""

from __future__ import annotations

import time

import numpy as np

from .errors import IndexRangeError, KernelError, NotComputedError
from .graph import Graph
from .native import ffi, lib
from .op import Op
from .plan import plan
from .profile import Profile, Trace
from .tensor import MAX_DIMS, MEM_ALIGN, Tensor, aligned_zeros, look, round_up

GG_TENSOR = np.dtype([("data", "u8"), ("dtype", "i4"), ("rank", "i4"), ("ne", "i8", 4), ("nb", "i8", 4)], align=True)
GG_CALL = np.dtype(
    [("kernel", "u8"), ("n_src", "i4"), ("n_dst", "i4"), ("src", "u8"), ("dst", "u8"), ("attrs", "u8"), ("work", "u8"),
     ("fault", "u8"), ("index", "i8")],
    align=True,
)  # fmt: skip
PAGE = 4096  # bytes
ABSENT, UNPLACED = 0, 1  # data pointers: of an input left out; of one that has no address yet


class Session:
    """The graph as it stands, planned and ready to run; memory comes with the first run."""

    def __init__(self, graph: Graph, *, reuse: bool = True) -> None:
        self.kept, self.reuse = graph.kept, reuse
        self._graph = graph
        self._owners = {t.storage[0] for t in self.kept}
        self._nodes = [t for t in graph.nodes if not t.is_view]
        self._arena: np.ndarray | None = None
        self._scratch = np.empty(0, np.uint8)
        self._describe()

        calls, at = ffi.cast("gg_call *", self._calls.ctypes.data), range(len(self._nodes))
        work = {t: n for i, t in zip(at, self._nodes, strict=True) if (n := lib.gg_call_work(calls + i))}
        self._scratch_bytes = max((lib.gg_call_scratch(calls + i) for i in at), default=0)
        self._scratch_stride = round_up(self._scratch_bytes, PAGE)  # threads never share a cache line
        self.plan = plan(
            graph, self.kept, work_bytes=lambda t: work.get(t, 0), scratch=self._scratch_stride, reuse=reuse
        )

    def run(self, threads: int) -> None:
        """Run every node; see `Graph.compute`."""
        self._prepare(threads)
        self._run(self._steps, threads)

    def profile(self, threads: int) -> Profile:
        """Run every node, and tell how long each took on which thread."""
        self._prepare(threads)
        trace = Trace(self._steps, self._n_steps, threads)
        begin = time.monotonic_ns()
        self._run(trace.steps, threads)
        return Profile(self._nodes, trace.spans(), threads, begin, time.monotonic_ns())

    def _run(self, steps, threads: int) -> None:
        self._fault.code = 0
        scratch = ffi.cast("char *", self._scratch.ctypes.data)
        lib.gg_run(steps, self._n_steps, threads, scratch, self._scratch_stride, self._fault)
        for owner in self._owners:
            owner._run = self
        if self._fault.code:
            self._raise()

    def poison(self, threads: int) -> None:
        """Fill all memory that the next run uses with NaN, so that reading what nobody wrote shows: for tests."""
        self._prepare(threads)
        self._arena[...] = self._scratch[...] = 0xFF  # type: ignore[index]

    def poison_between_results(self) -> bool:
        """Whether the bytes that belong to no value and to no thread are still as `poison` left them."""
        assert self._arena is not None
        between = np.ones(self._arena.size, bool)
        for b in self.plan.buffers:
            between[b.offset : b.offset + b.nbytes] = False
        beyond = self._scratch.reshape(-1, max(1, self._scratch_stride))[:, self._scratch_bytes :]
        return bool((self._arena[between] == 0xFF).all() and (beyond == 0xFF).all())

    def read(self, t: Tensor) -> np.ndarray:
        owner, offset = t.storage
        if owner not in self._owners:
            raise NotComputedError(
                f"{t.label()} cannot be read: its bytes were given to another value. "
                "gg.set_output(t) before graph.compute() keeps them"
            )
        start = self.plan.offsets[owner]
        return look(self._arena[start : start + owner.nbytes], t, offset, writable=False)  # type: ignore[index]

    # -- tables ---------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Everything of the tables but the addresses."""
        rows: list[tuple] = []
        calls: list[tuple] = []
        self._attrs: list[np.ndarray] = []
        self._places: list[Tensor | None] = []
        for i, t in enumerate(self._nodes):
            op: Op = t.op  # type: ignore[assignment]
            dst = t.updates or t.outputs
            at = len(rows)
            for s in (*t.src, *dst):
                rows.append(_row(s))
                self._places.append(s)
            if op.record.names:
                record = op.pack_attrs(t.attrs)
                self._attrs.append(record)
                attrs = record.ctypes.data
            else:
                attrs = 0
            calls.append((kernel_of(t), len(t.src), len(dst), at, at + len(t.src), attrs, 0, 0, i))
        self._tensors = np.array(rows, GG_TENSOR)
        self._calls = np.array(calls, GG_CALL)
        base, size = self._tensors.ctypes.data, GG_TENSOR.itemsize
        for pointer in ("src", "dst"):
            self._calls[pointer] = self._calls[pointer] * size + base
        self._fault = ffi.new("gg_fault *")
        self._calls["fault"] = int(ffi.cast("uintptr_t", self._fault))

    def _prepare(self, threads: int) -> None:
        if self._arena is None:
            self._allocate()
        if self._scratch.size < threads * self._scratch_stride:
            nbytes = threads * self._scratch_stride
            raw = np.zeros(nbytes + PAGE, np.uint8)
            start = -raw.ctypes.data % PAGE
            self._scratch = raw[start : start + nbytes]

    def _allocate(self) -> None:
        """Memory for all results, and every address in the tables."""
        self._arena = aligned_zeros(self.plan.arena)
        base = self._arena.ctypes.data
        bases = {t: base + offset for t, offset in self.plan.offsets.items()}
        for leaf in self._graph.leaves:
            bases[leaf] = leaf.memory().ctypes.data

        def address(t: Tensor | None) -> int:
            if t is None:
                return ABSENT
            owner, offset = t.storage
            return bases[owner] + offset

        self._tensors["data"] = [address(t) for t in self._places]
        self._calls["work"] = [base + self.plan.work[t] if t in self.plan.work else 0 for t in self._nodes]
        self._keep_alive = [leaf.memory() for leaf in self._graph.leaves]
        self._bind_padding()

        n = len(self._calls)
        calls = ffi.cast("gg_call *", self._calls.ctypes.data)
        self._n_steps = lib.gg_compile(calls, n, ffi.NULL)
        self._steps = ffi.new("gg_step[]", max(1, self._n_steps))
        lib.gg_compile(calls, n, self._steps)

    def _bind_padding(self) -> None:
        """Between the parts of packed results lie up to 15 bytes that read as zero: calls that make them so."""
        gaps: list[tuple] = []
        makers: list[tuple[int, int, int]] = []  # (call, its first gap, number of gaps)
        for i, t in enumerate(self._nodes):
            start = len(gaps)
            for p in t.parts:
                if gap := round_up(p.nbytes, MEM_ALIGN) - p.nbytes:
                    data = self._arena.ctypes.data + self.plan.offsets[t] + p.offset + p.nbytes  # type: ignore[union-attr]
                    gaps.append((data, 0, 1, (1, 1, 1, gap), (gap, gap, gap, 1)))
            if len(gaps) > start:
                makers.append((i, start, len(gaps) - start))
        if not makers:
            return
        self._gaps = np.array(gaps, GG_TENSOR)
        size, base = GG_TENSOR.itemsize, self._gaps.ctypes.data
        kernel = int(ffi.cast("uintptr_t", lib.gg_kernel_find(b"zero_bytes")))
        before = np.array([(kernel, 0, n, 0, base + start * size, 0, 0, 0, i) for i, start, n in makers], GG_CALL)
        before["fault"] = int(ffi.cast("uintptr_t", self._fault))
        self._calls = np.insert(self._calls, [i for i, _, _ in makers], before)

    # -- errors ---------------------------------------------------------------------------------

    def _raise(self) -> None:
        fault = self._fault
        t = self._nodes[fault.node]
        if fault.code == lib.GG_PYTHON:
            from .callback import take_raised

            raise take_raised(fault)
        name = t.op.inputs[min(fault.input, len(t.op.inputs) - 1)]
        given = t.op._given(list(t.src))
        if fault.code == lib.GG_SHARED:
            found = f"{name} holds {fault.value} for two sequences, and each needs its own"
        else:
            found = f"{name} holds {fault.value}, and must be from {fault.least} to {fault.limit - 1}"
        raise IndexRangeError(f"{t.op.name}({given}): {found}. No node after this one has run")


def kernel_of(t: Tensor) -> int:
    """The address of the gg_kernel that computes this node."""
    op: Op = t.op  # type: ignore[assignment]
    if op._kernel is not None:
        return op._kernel.address_for(t)
    found = lib.gg_kernel_find(op.name.encode())
    if found == ffi.NULL:
        raise KernelError(
            f"{op.name} has no kernel: declare one with @{op.name}.kernel, or compute(backend='reference')"
        )
    return int(ffi.cast("uintptr_t", found))


def _row(t: Tensor | None) -> tuple:
    """A gg_tensor without its address."""
    if t is None:
        return (ABSENT, 0, 0, (0,) * MAX_DIMS, (0,) * MAX_DIMS)
    pad = MAX_DIMS - len(t.shape)
    outer = t.strides[0] * t.shape[0] if t.shape else t.dtype.nbytes
    return (UNPLACED, t.dtype.code, len(t.shape), (1,) * pad + t.shape, (outer,) * pad + t.strides)
