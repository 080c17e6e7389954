"""What a graph is to the parts that plan, differentiate and run it: nodes, leaves, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .arena import Arena
from .errors import GraphError
from .rng import Rng, give_keys
from .tensor import Tensor
from .turns import Turn


class Program:
    """Tensors in an order in which they can be computed.

    Attributes:
        nodes: every result, views included, sources before what is made of them.
        leaves: parameters, constants and inputs.
        roots: the results that were asked for.
        loss: what the gradients are of, or None.
        grads: the gradient by each parameter that has one.
        keep_grads: whether the gradients stay readable after a run.
        given: results of another program, which this one reads and does not compute.
        version: another number whenever nodes were added.
        before_run: called before each run that writes leaves.
        arena: the memory of its runs, which programs may share that run one at a time.
    """

    def __init__(self, arena: Arena | None = None, given: Iterable[Tensor] = ()) -> None:
        self.given = frozenset(given)
        self.nodes: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.roots: list[Tensor] = []
        self.loss: Tensor | None = None
        self.grads: Mapping[Tensor, Tensor] = {}
        self.keep_grads = True
        self.version = 0
        self.before_run: list[Callable[[], None]] = []
        self.arena = arena or Arena()
        self._seen: set[Tensor] = set()
        self._keys: set[int] = set()  # of nodes that draw random numbers
        self._writers: dict[Tensor, Tensor] = {}  # of leaves that a node writes: that node

    @property
    def turn(self) -> Turn:
        """One thread at a time uses the program, and those that share its arena."""
        return self.arena.turn

    def __contains__(self, t: Tensor) -> bool:
        """Whether it is a node or a leaf of the program."""
        return t in self._seen

    @property
    def params(self) -> list[Tensor]:
        """The parameters among the leaves."""
        return [t for t in self.leaves if t.param]

    @property
    def rngs(self) -> list[Rng]:
        """The generators of random numbers among the leaves."""
        return [t for t in self.leaves if isinstance(t, Rng)]

    @property
    def kept(self) -> set[Tensor]:
        """Results whose values stay readable after a run."""
        kept = {t for t in self.nodes if t.output}
        kept.update(self.roots)
        if self.loss is not None:
            kept.add(self.loss)
        if self.keep_grads:
            kept.update(self.grads.values())
        return kept

    def without_writes(self, results: Iterable[Tensor]) -> Program:
        """What these results need, as a program in this one's arena.

        Raises:
            GraphError: one of them depends on a leaf that has been written.
        """
        part = Program(self.arena)
        part.expand(results)
        part.roots = list(results)
        for t in part.nodes:
            if t.updates:
                raise GraphError(
                    f"{t.label()} writes {t.updates[0].label()}, and a result that was asked for depends on it: "
                    "without writing it cannot be computed"
                )
        return part

    def expand(self, roots: Iterable[Tensor], *, before_writes: bool = False) -> None:
        """Add tensors and all they are computed from that is not there yet, in the order they were made.

        Args:
            before_writes: what is new reads leaves as they were before any node wrote them, as gradients do: such
                nodes, and what depends on them, then come after the new ones.

        Raises:
            GraphError: a new node reads a leaf that an earlier node writes; nothing was added.
        """
        new = self._not_there(roots)
        writers = dict(self._writers)
        written: dict[Tensor, Tensor] = {}  # a leaf that a new node reads, and that node
        for t in new:
            for s in t.src:
                if s is not None and (leaf := _read_from(s)) in writers:
                    if not before_writes:
                        raise _read_after_write(t, leaf, writers[leaf])
                    written.setdefault(leaf, t)
            writers.update((leaf, t) for leaf in t.updates)
        give_keys(new, self._keys)
        late = self._delayed(written, new) if written else set()
        nodes = [t for t in self.nodes if t not in late]
        # nothing has changed up to here, so that a refused root leaves all as it was; an interrupted one too
        before, n_leaves = self.nodes, len(self.leaves)
        try:
            self.version += 1
            self.leaves.extend(t for t in new if t.is_leaf)
            fresh = [t for t in new if not t.is_leaf]
            if late:
                self.nodes = [*nodes, *fresh, *(t for t in before if t in late)]
            else:
                self.nodes = self._in_order(fresh)
            self._seen.update(new)
            self._writers = writers
        except BaseException:
            self.nodes = before
            del self.leaves[n_leaves:]
            self._seen.difference_update(new)
            raise

    def _in_order(self, fresh: list[Tensor]) -> list[Tensor]:
        """The nodes with fresh ones among them, in the order in which they were made; but from the first that writes a
        leaf on they stay as they were added, since others have read what was there before."""
        if self._writers:
            return [*self.nodes, *fresh]
        first = next((i for i, t in enumerate(fresh) if t.updates), len(fresh))
        return [*sorted([*self.nodes, *fresh[:first]], key=lambda t: t.serial), *fresh[first:]]

    def _not_there(self, roots: Iterable[Tensor]) -> list[Tensor]:
        """What the roots are computed from, these included, and no node or leaf yet: in the order they were made."""
        found: set[Tensor] = set()
        stack = list(roots)
        while stack:
            t = stack.pop()
            if t not in self._seen and t not in found and t not in self.given:
                found.add(t)
                stack.extend(s for s in t.src if s is not None)
                stack.extend(t.parts)
        return sorted(found, key=lambda t: t.serial)

    def _delayed(self, written: dict[Tensor, Tensor], new: list[Tensor]) -> set[Tensor]:
        """The nodes that must come after new ones which read the leaves in `written`: what writes them, what depends
        on that, and what writes a leaf that these use.

        Raises:
            GraphError: a new node depends on one of these.
        """
        late: set[Tensor] = set()
        used = set(written)
        for t in self.nodes:
            if any(s in late for s in t.src) or any(leaf in used for leaf in t.updates):
                late.add(t)
                used.update(t.updates, (_read_from(s) for s in t.src if s is not None))
        for t in new:
            if any(s in late for s in t.src):
                leaf, reader = next(iter(written.items()))
                raise _read_after_write(reader, leaf, self._writers[leaf])
        return late


def names_of(tensors: Iterable[Tensor]) -> dict[Tensor, str]:
    """A name for every tensor, each used once: the user's own, or a number in this order; a result's with its scope."""
    taken: set[str] = set()
    named: dict[Tensor, str] = {}
    for i, t in enumerate(tensors):
        own = t.name or f"%{i}"
        name = base = own if t.is_leaf or not t.scope else f"{t.scope}/{own}"
        count = 1
        while name in taken:
            count += 1
            name = f"{base}.{count}"
        taken.add(name)
        named[t] = name
    return named


def _read_after_write(t: Tensor, leaf: Tensor, writer: Tensor) -> GraphError:
    return GraphError(
        f"{t.label()} reads {leaf.label()}, which an earlier node of this graph, {writer.label()}, writes: before or "
        "after? For the new value read the write's result, for the old one make the write last; or use another graph"
    )


def _read_from(t: Tensor) -> Tensor:
    """The tensor whose memory is read where `t` is: through views, up to a leaf or the node that wrote it."""
    while t.base is not None and not t.updates:
        t = t.base
    return t
