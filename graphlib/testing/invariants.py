"""What must hold of the waves and of the plan of a session, whatever the graph: checked from the outside.

Nothing is run.  A checker knows when each node runs (waves) and which bytes it has (plan), works out anew who reads and
writes what, and names the first rule that is broken.  It shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..compile.plan import Plan
from ..compile.waves import FIRST_STAGE, Waves, calls_python
from ..core.dtype import I32
from ..core.tensor import Tensor
from ..graph import Graph
from .compare import session_of


class InvariantError(AssertionError):
    """A plan or an order of waves with which a run could be wrong; the message names the nodes and the rule."""


def check_graph(graph: Graph, *, reuse: bool = True) -> None:
    """Check the waves and the plan with which the native backend would run this graph.

    Raises:
        InvariantError: a rule is broken.
    """
    session = session_of(graph, reuse=reuse)
    check_waves(session.nodes, session.waves, lambda t: session.leads(t) == FIRST_STAGE)
    check_plan(session.nodes, session.waves, session.plan, graph.kept, session.work_bytes)


def check_waves(nodes: Sequence[Tensor], waves: Waves, leads_first=lambda t: False) -> None:
    """Check when nodes run.

    1. A node begins after what it reads is complete; a follower may instead read what its leader, or another follower
       of it before this one, makes of the same elements.
    2. A leaf is updated after every earlier node that reads it, or updates it, is done.
    3. It is updated after every earlier node that may end the run.
    4. Functions in Python are called one after another, in the order of the graph.
    5. A follower runs in one wave, the one in which its leader tells of its blocks, and does not follow itself further.

    Args:
        nodes: those that run, in the order of the graph.
        leads_first: whether a leader calls its followers in its first stage, and not in its last.
    """
    done: dict[Tensor, Tensor] = {}  # an owner of memory: the last node that wrote it
    readers: dict[Tensor, list[Tensor]] = {}
    faulting: Tensor | None = None
    python: Tensor | None = None
    for t in nodes:
        begin, end = waves.begin[t], waves.end[t]
        _must(0 <= begin <= end < waves.count, t, "its waves are no waves of the run")
        leader = waves.leader.get(t)
        if leader is not None:
            _must(leader not in waves.leader, t, f"its leader {leader.label()} follows another node")
            when = waves.begin[leader] if leads_first(leader) else waves.end[leader]
            _must(begin == end == when, t, f"it follows {leader.label()} in another wave than that in which it leads")
        for s in _sources(t):
            writer = done.get(s)
            if writer is None:
                continue
            within = leader is not None and (writer is leader or waves.leader.get(writer) is leader)
            _must(
                within or waves.end[writer] < begin, t, f"it reads {s.label()} before {writer.label()} has written it"
            )
        for leaf in t.updates:
            for r in readers.get(leaf, ()):
                _must(waves.end[r] < begin, t, f"it updates {leaf.label()}, which {r.label()} still reads")
            writer = done.get(leaf)
            _must(writer is None or waves.end[writer] < begin, t, f"two nodes update {leaf.label()} at once")
            if faulting is not None:
                known = waves.end[faulting] < begin
                _must(known, t, f"it updates {leaf.label()} before it is known that {faulting.label()} can be done")
        if calls_python(t):
            _must(python is None or waves.end[python] < begin, t, "two functions in Python run at once")
            python = t
        if calls_python(t) or any(s is not None and s.dtype is I32 for s in t.src):
            faulting = t if faulting is None or waves.end[t] > waves.end[faulting] else faulting
        for s in _sources(t):
            readers.setdefault(s, []).append(t)
        for owner in t.updates or (t,):
            done[owner] = t


@dataclass(frozen=True)
class _Life:
    """Bytes [at, end) of the arena that somebody needs from one wave to another, both included."""

    at: int
    end: int
    first: int
    last: int
    node: Tensor
    what: str


def check_plan(nodes: Sequence[Tensor], waves: Waves, plan: Plan, kept: Iterable[Tensor], work_bytes) -> None:
    """Check where results lie.

    1. Every result that owns memory has bytes in the arena, aligned; so has the work memory of each node.
    2. Two values that share a byte are never needed at once, where a value is needed from the first wave of its node to
       the last in which the node writes it or another one reads it, and to the end of the run if it is kept.
    3. Except that a result may lie exactly on an input, as its op declares, that is complete, not kept, read by
       nobody else from then on, and seen through no second view in another order.
    """
    owners = {t.storage[0] for t in kept}
    readers: dict[Tensor, list[Tensor]] = {}
    for t in nodes:
        for s in set(_sources(t)):
            readers.setdefault(s, []).append(t)
    lives: list[_Life] = []
    for t in nodes:
        begin, end = waves.begin[t], waves.end[t]
        nbytes = work_bytes(t)
        if nbytes:
            _must(t in plan.work, t, "its work memory has no place")
            lives.append(_Life(plan.work[t], plan.work[t] + nbytes, begin, end, t, "work memory"))
        if t.base is not None:
            continue
        _must(t in plan.offsets, t, "its result has no place")
        reads = [waves.end[r] for r in readers.get(t, ())]
        last = waves.count if t in owners else max([end, *reads])
        at = plan.offsets[t]
        lives.append(_Life(at, at + t.nbytes, begin, last, t, "result"))
    lives = [life for life in lives if life.end > life.at]
    for life in lives:
        _must(life.at % 64 == 0 and life.at >= 0 and life.end <= plan.arena, life.node, f"its {life.what} lies outside")

    active: list[_Life] = []
    for life in sorted(lives, key=lambda life: (life.first, life.node.serial)):
        active = [other for other in active if other.last >= life.first]
        for other in list(active):
            if life.at < other.end and other.at < life.end:
                if not _takes_over(life, other, waves, readers, owners):
                    raise InvariantError(
                        f"{life.node.label()}: its {life.what}, from wave {life.first} on, lies on the {other.what} of "
                        f"{other.node.label()}, needed to wave {other.last}"
                    )
                active.remove(other)  # from here on the bytes are the new value's
        active.append(life)


def _takes_over(new: _Life, old: _Life, waves: Waves, readers: dict[Tensor, list[Tensor]], kept: set[Tensor]) -> bool:
    """Whether `new` may lie on `old`, which is needed when it begins: by rule 3, or because it took over what did."""
    t, s = new.node, old.node
    if new.what != "result" or old.what != "result" or (new.at, new.end) != (old.at, old.end) or s in kept:
        return False
    if t.is_packed or s.is_packed:
        return False
    at = [i for i, x in enumerate(t.src) if x is not None and x.storage[0] is s]
    if not at or any(
        i not in t.op.inplace  # type: ignore[union-attr]
        or t.src[i].storage[1]  # type: ignore[union-attr]
        or t.src[i].shape != t.shape  # type: ignore[union-attr]
        or not t.src[i].is_contiguous  # type: ignore[union-attr]
        for i in at
    ):
        return False
    begin = waves.begin[t]
    complete = waves.end[s] < begin or (t in waves.leader and waves.end[s] == begin)
    return complete and all(r is t or waves.end[r] < begin for r in readers[s])


def _sources(t: Tensor) -> list[Tensor]:
    """The owners of the memory that a node reads."""
    return [s.storage[0] for s in t.src if s is not None]


def _must(holds: bool, t: Tensor, what: str) -> None:
    if not holds:
        raise InvariantError(f"{t.label()}: {what}")
