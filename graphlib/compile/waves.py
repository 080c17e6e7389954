"""Which kernels run side by side.  Pure: nothing is run here.

A kernel runs in stages, and threads meet before each.  A wave is what runs between two such meetings: stages of several
nodes, of which none reads or writes what another one writes.  The gradients of a product by its two
operands are such a pair, and the optimizer's steps of all parameters are one wave.

Nodes keep the order in which they were made, but for a few places: a node joins one of the last waves after
those it depends on, so that values live hardly longer than they did.

A node that treats every element alone may follow another one: what it makes of a block of the leader's result is made
as soon as the block is there, while it is in the cache.  So bias, activation, residual and the sum of two gradients
are no passes of their own over memory; nor are elementwise nodes that read the same.  Bits do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.dtype import I32
from ..core.tensor import Tensor

NEAR = 3  # waves back from the newest that a node may join
NO_STAGE, FIRST_STAGE, LAST_STAGE = range(3)  # gg_leads
SMALL = 4000  # elements, or thousands of operations: less work than it takes to hand it to another thread


@dataclass
class Waves:
    """When each node runs.

    Attributes:
        begin: the wave of each node's first stage, if it has one.
        end: of its last.
        count: how many waves there are.
        leader: of each node that follows another one: the node whose tasks do its work.
    """

    begin: dict[Tensor, int] = field(default_factory=dict)
    end: dict[Tensor, int] = field(default_factory=dict)
    count: int = 0
    leader: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def followers(self) -> dict[Tensor, list[Tensor]]:
        """Of each leader, in their order."""
        found: dict[Tensor, list[Tensor]] = {}
        for t, leader in self.leader.items():
            found.setdefault(leader, []).append(t)
        return found


def one_by_one(nodes: Sequence[Tensor]) -> Waves:
    """Every node a wave of its own."""
    at = {t: i for i, t in enumerate(nodes)}
    return Waves(at, dict(at), len(at))


def side_by_side(
    nodes: Sequence[Tensor],
    tasks: Callable[[Tensor], Sequence[int]],
    leads: Callable[[Tensor], int] = lambda t: NO_STAGE,
    follows: Callable[[Tensor], bool] = lambda t: False,
) -> Waves:
    """Waves of the nodes that run kernels, given in the order in which they were made.

    Args:
        tasks: for each stage of a node into how many tasks it is cut; stages without any do not count.
        leads: in which stage a node's kernel tells followers of each block of its first result.
        follows: whether it can compute any block alone, and reads the same elements of sources of that size.
    """
    waves = Waves()
    written: dict[Tensor, int] = {}  # the wave in which an owner of memory got what it now holds
    read: dict[Tensor, int] = {}  # the last in which it is read
    beside: dict[Tensor, Tensor] = {}  # for an owner of memory an elementwise leader that reads it, or a follower does
    faults = called = -1  # the last wave that may end the run; that calls Python
    shared: list[bool] = []  # whether a wave is worth other threads' while; small nodes alone are not

    for t in nodes:
        sources = [s.storage[0] for s in t.src if s is not None]
        least = max((1 + written.get(o, -1) for s in t.src if s is not None for o in s.waits_for), default=0)
        for leaf in t.updates:
            # a run that ends early has not begun to change what the failing node might have stopped
            least = max(least, 1 + read.get(leaf, -1), 1 + written.get(leaf, -1), 1 + faults)
        if calls_python(t):
            least = max(least, 1 + called)  # in the user's order
        leader = _leader(t, waves, written, beside, least, leads) if follows(t) else None
        if leader is not None:
            waves.leader[t] = leader
            begin = end = _when(leader, waves, leads)
        else:
            first = max([least, *(1 + written.get(s, -1) for s in sources)])
            stages = [n for n in tasks(t) if n > 0] or [0]
            small = sum(stages) <= len(stages) and _is_small(t)
            begin = max(first, waves.count - NEAR)
            while begin < waves.count and not shared[begin]:
                begin += 1
            end = begin + len(stages) - 1
            shared += [False] * (end + 1 - waves.count)
            if not small:
                shared[begin : end + 1] = [True] * len(stages)
        waves.begin[t], waves.end[t] = begin, end
        waves.count = max(waves.count, end + 1)
        for s in sources:
            read[s] = max(read.get(s, -1), end)
        for owner in t.updates or (t,):
            written[owner] = end
        if follows(t) and follows(first_of_chain := waves.leader.get(t, t)):
            beside |= {s.storage[0]: first_of_chain for s in t.src if s is not None and _as_many(s, t)}
        if _may_fault(t):
            faults = max(faults, end)
        if calls_python(t):
            called = end
    return waves


def _leader(
    t: Tensor,
    waves: Waves,
    written: dict[Tensor, int],
    beside: dict[Tensor, Tensor],
    least: int,
    leads: Callable[[Tensor], int],
) -> Tensor | None:
    """A node whose tasks can do the work of `t`: it or a follower of its makes or reads a source of that size, and the
    other sources are there before."""
    for owner in [s.storage[0] for s in t.src if s is not None]:
        for leader in (waves.leader.get(owner, owner), beside.get(owner)):
            if leader not in waves.begin or not leads(leader) or not _as_many(leader.outputs[0], t):
                continue
            begin = _when(leader, waves, leads)
            if begin >= max(least, waves.count - NEAR) and all(
                (_of_chain(o, leader, waves) and _same_elements(o, t))
                or (written.get(o.storage[0], -1) < begin and _in_rows(o))
                for o in t.src
                if o is not None
            ):
                return leader
    return None


def _when(leader: Tensor, waves: Waves, leads: Callable[[Tensor], int]) -> int:
    """The wave in which it calls its followers."""
    return waves.begin[leader] if leads(leader) == FIRST_STAGE else waves.end[leader]


def _of_chain(s: Tensor, leader: Tensor, waves: Waves) -> bool:
    """Whether it holds what the leader or one of its followers makes."""
    maker = s.storage[0]
    return maker is leader or waves.leader.get(maker) is leader


def _as_many(s: Tensor, t: Tensor) -> bool:
    return s.size == t.size and s.dtype is t.dtype


def _same_elements(s: Tensor, t: Tensor) -> bool:
    """Whether `s` is the first result of a node as it lies in memory, with one element for each of `t`."""
    maker, offset = s.storage
    return offset == 0 and s.is_contiguous and _as_many(s, t) and _as_many(maker.outputs[0], t)


def _in_rows(s: Tensor) -> bool:
    """Whether a walk in the order of the follower's elements goes through memory without jumps."""
    return s.has_whole_rows or s.shape[-1] == 1


def calls_python(t: Tensor) -> bool:
    """Whether the node's kernel is a function of the user's."""
    kernel = t.op.in_python  # type: ignore[union-attr]
    return kernel is not None and kernel.language == "Python"


def _may_fault(t: Tensor) -> bool:
    """Whether the node may end the run: it reads indices, or calls Python."""
    return calls_python(t) or any(s is not None and s.dtype is I32 for s in t.src)


def _is_small(t: Tensor) -> bool:
    """Whether the node is done sooner than another thread hears of it."""
    sizes = (s.size for s in (*t.src, *(t.updates or t.outputs)) if s is not None)
    return max(sizes, default=0) + t.op.count_flops(t) / 1000 <= SMALL  # type: ignore[union-attr]
