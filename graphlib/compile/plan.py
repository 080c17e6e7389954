"""Static memory planning: which bytes of one arena each result occupies.  Pure: nothing is allocated here.

What a plan promises, and `ggrad.testing.invariants` checks of any session:

- A result's bytes are its own from its node's first wave to the last wave of whoever writes or reads it, the node's own
  last stage included; to the end of the run if it is kept.  A node's work memory is, while the node runs.
- But a result may lie exactly on an input that its op declares safe, if that is complete, nobody else reads it from
  then on, it is not kept, and no other input looks at the same bytes in another order.
- The bytes between the parts of a packed result are zero from its first wave on, and belong to it.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ..core.program import Program
from ..core.tensor import ALIGN, Tensor, round_up
from .waves import Waves, one_by_one

MANY_BUFFERS = 1500


@dataclass
class Buffer:
    """Bytes that are needed from one wave to another, both included."""

    nbytes: int
    first: int
    last: int
    offset: int = 0  # in the arena


@dataclass(frozen=True)
class Plan:
    """The memory of a graph.  `print(plan)` shows the accounts; all sizes in bytes."""

    offsets: dict[Tensor, int] = field(repr=False)  # in the arena, of each result that owns memory
    work: dict[Tensor, int] = field(repr=False)  # in the arena, of each node's work memory
    buffers: list[Buffer] = field(repr=False)
    parameters: int
    optimizer: int  # moments
    gradients: int  # in the arena and in accumulators
    inputs: int  # constants and inputs
    activations: int  # the rest of the arena
    arena: int  # all results, at their peak
    scratch: int  # private memory of one thread
    prepared: int  # other forms of frozen constants, which kernels read instead
    unshared: int  # what the arena would take if no two results shared bytes

    def total(self, threads: int) -> int:
        """Everything that a run with so many threads touches."""
        leaves = self.parameters + self.optimizer + self.inputs + self.prepared + self.accumulators
        return leaves + self.arena + threads * self.scratch

    @property
    def accumulators(self) -> int:
        return self.gradients + self.activations - self.arena

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters),
            ("optimizer state", self.optimizer),
            ("inputs and constants", self.inputs),
            *([("prepared constants", self.prepared)] if self.prepared else []),
            ("gradients", self.gradients),
            ("activations", self.activations),
            ("scratch of a thread", self.scratch),
            ("total, with one thread", self.total(1)),
        ]
        lines = [f"{name:<24}{readable(n):>12}" for name, n in rows]
        lines.append(
            f"{'(arena at its peak':<24}{readable(self.arena):>12}; without sharing {readable(self.unshared)})"
        )
        return "\n".join(lines)


def readable(nbytes: int) -> str:
    """A size for people: 1536 -> '1.5 KiB'."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def plan(
    program: Program,
    keep: set[Tensor],
    *,
    waves: Waves | None = None,
    work_bytes: Callable[[Tensor], int] = lambda t: 0,
    scratch: int = 0,
    prepared: int = 0,
    reuse: bool = True,
) -> Plan:
    """Give every result of the graph its place.

    Args:
        keep: results whose bytes stay theirs to the end of the run.
        waves: when the nodes run; None: one after another.
        work_bytes: memory that a node's kernel needs while it runs.
        scratch: private memory of a thread, for the accounts only.
        prepared: bytes of other forms of frozen constants, for the accounts only.
        reuse: False gives every result bytes of its own.
    """
    nodes = running(program)
    waves = one_by_one(nodes) if waves is None else waves
    readers = readers_of(nodes)
    kept = {t.storage[0] for t in keep}
    home: dict[Tensor, Buffer] = {}
    work: dict[Tensor, Buffer] = {}
    for t in nodes:
        begin, end = waves.begin[t], waves.end[t]
        if (nbytes := work_bytes(t)) > 0:
            work[t] = Buffer(nbytes, begin, end)
        if t.base is not None:
            continue
        # a node's last stage may come after its readers: those of a part that an earlier stage made
        last = waves.count if t in kept else max([end, *(waves.end[r] for r in readers.get(t, ()))])
        dying = _takes_over(t, waves, readers, kept) if reuse else None
        if dying is not None and dying in home:
            home[t] = home[dying]
            home[t].last = max(home[t].last, last)
        else:
            home[t] = Buffer(t.nbytes, begin, last)

    buffers = list({id(b): b for b in (*home.values(), *work.values())}.values())
    arena = place(buffers) if reuse else _place_apart(buffers)
    return _account(program, home, work, buffers, arena, scratch, prepared)


def running(program: Program) -> list[Tensor]:
    """The nodes that run kernels: all but views."""
    return [t for t in program.nodes if not t.is_view]


def readers_of(nodes: Iterable[Tensor]) -> dict[Tensor, list[Tensor]]:
    """For each owner of memory the nodes that read it, themselves or through a view."""
    readers: dict[Tensor, list[Tensor]] = {}
    for t in nodes:
        for s in t.src:
            if s is not None:
                readers.setdefault(s.storage[0], []).append(t)
    return readers


def place(buffers: list[Buffer]) -> int:
    """Set every buffer's offset, so that no two overlap in time and space; returns the bytes needed.

    Large ones first, each at the lowest offset that is free for its whole life: close to the best, and
    quadratic in the number of buffers.  Graphs with very many are placed in the order of time instead.
    """
    return _place_by_size(buffers) if len(buffers) <= MANY_BUFFERS else _place_by_time(buffers)


def _place_apart(buffers: list[Buffer]) -> int:
    """One after another."""
    end = 0
    for b in buffers:
        b.offset = end
        end += round_up(b.nbytes, ALIGN)
    return end


def _place_by_size(buffers: list[Buffer]) -> int:
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first and last wave, by offset
    most = 0
    for b in sorted(buffers, key=lambda b: (-b.nbytes, b.first)):
        size, first, last = round_up(b.nbytes, ALIGN), b.first, b.last
        offset = 0
        for begin, end, other_first, other_last in placed:
            if other_first <= last and first <= other_last:
                if offset + size <= begin:
                    break
                if end > offset:
                    offset = end
        b.offset = offset
        most = max(most, offset + size)
        insort(placed, (offset, offset + size, first, last))
    return most


def _place_by_time(buffers: list[Buffer]) -> int:
    """As an allocator would, step by step: the smallest free block that is large enough, else at the end."""
    free = _FreeBlocks()
    dying: list[tuple[int, int, int]] = []  # a heap: (last step, offset, size)
    end = 0
    for b in sorted(buffers, key=lambda b: (b.first, -b.nbytes)):
        while dying and dying[0][0] < b.first:
            _, given_back, nbytes = heappop(dying)
            free.give(given_back, nbytes)
        size = round_up(b.nbytes, ALIGN)
        if not size:
            b.offset = 0
            continue
        taken = free.take(size)
        offset = free.take_last(end) if taken is None else taken  # a free block at the end grows
        if taken is None:
            end = offset + size
        b.offset = offset
        heappush(dying, (b.last, offset, size))
    return end


class _FreeBlocks:
    """Free bytes in as few blocks as they make: no two are side by side.  As fast with many as with few."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, offset), sorted
        self._size_at: dict[int, int] = {}
        self._offset_of_end: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The beginning of the smallest block that is large enough, whose rest stays free; None: there is none."""
        at = bisect(self._by_size, (size,))
        if at == len(self._by_size):
            return None
        room, offset = self._by_size[at]
        self._remove(offset, room)
        if room > size:
            self._insert(offset + size, room - size)
        return offset

    def take_last(self, end: int) -> int:
        """All of the block that ends at `end`, if there is one; its beginning, or `end`."""
        offset = self._offset_of_end.get(end, end)
        if offset < end:
            self._remove(offset, end - offset)
        return offset

    def give(self, offset: int, size: int) -> None:
        end = offset + size
        if (behind := self._size_at.get(end)) is not None:
            self._remove(end, behind)
            size += behind
        if (before := self._offset_of_end.get(offset)) is not None:
            self._remove(before, offset - before)
            size += offset - before
            offset = before
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._offset_of_end[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect(self._by_size, (size, offset)) - 1]
        del self._size_at[offset], self._offset_of_end[offset + size]


def _takes_over(t: Tensor, waves: Waves, readers: dict[Tensor, list[Tensor]], kept: set[Tensor]) -> Tensor | None:
    """The owner of an input whose bytes the result may take: declared safe, same layout, and needed by nobody else
    when this node begins."""
    for i in t.op.inplace:  # type: ignore[union-attr]
        s = t.src[i] if i < len(t.src) else None
        if s is None or s.nbytes != t.nbytes or s.shape != t.shape or not s.is_contiguous:
            continue
        owner, offset = s.storage
        if owner not in waves.end or offset or owner.nbytes != t.nbytes or t.is_packed or owner.is_packed:
            continue
        if owner in kept or any(r is not t and waves.end[r] >= waves.begin[t] for r in readers[owner]):
            continue
        if waves.end[owner] > waves.begin[t] - (t not in waves.leader):
            continue  # it is not complete: a follower takes over block by block, of what its leader's last stage makes
        # another input that looks at the same bytes, in another order or read at another time, would be
        # overwritten while it is read
        others = [(j, o) for j, o in enumerate(t.src) if o is not None and j != i and o.storage[0] is owner]
        if all(
            j in t.op.inplace and o.storage[1] == 0 and o.shape == s.shape and o.strides == s.strides  # type: ignore[union-attr]
            for j, o in others
        ):
            return owner
    return None


def _account(program: Program, home, work, buffers: list[Buffer], arena: int, scratch: int, prepared: int) -> Plan:
    def leaves(*roles: str) -> int:
        return sum(round_up(t.nbytes, ALIGN) for t in program.leaves if t.role in roles)

    grads = {id(home[o]): home[o] for g in program.grads.values() if (o := g.storage[0]) in home}
    gradients = _peak(grads.values())
    return Plan(
        offsets={t: b.offset for t, b in home.items()},
        work={t: b.offset for t, b in work.items()},
        buffers=buffers,
        parameters=leaves("param"),
        optimizer=leaves("moment"),
        gradients=gradients + leaves("accumulator"),
        inputs=leaves("constant", "counter", "rng"),
        activations=arena - gradients,
        arena=arena,
        scratch=scratch,
        prepared=prepared,
        unshared=sum(round_up(t.nbytes, ALIGN) for t in home) + sum(round_up(b.nbytes, ALIGN) for b in work.values()),
    )


def _peak(buffers: Iterable[Buffer]) -> int:
    """The most bytes of these that are alive at once."""
    changes = [(step, n) for b in buffers for step, n in ((b.first, b.nbytes), (b.last + 1, -b.nbytes))]
    alive = most = 0
    for _, n in sorted(changes):
        alive += round_up(n, ALIGN) if n > 0 else -round_up(-n, ALIGN)
        most = max(most, alive)
    return most
