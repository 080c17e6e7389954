"""What a graph is to the parts that plan, differentiate and run it: nodes, leaves, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import GraphError
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
        version: another number whenever nodes were added.
        turn: one thread at a time uses the program.
    """

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.roots: list[Tensor] = []
        self.loss: Tensor | None = None
        self.grads: Mapping[Tensor, Tensor] = {}
        self.keep_grads = True
        self.version = 0
        self.turn = Turn()
        self._seen: set[Tensor] = set()
        self._updated: set[Tensor] = set()  # leaves that a node has written

    @property
    def params(self) -> list[Tensor]:
        """The parameters among the leaves."""
        return [t for t in self.leaves if t.param]

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

    def expand(self, roots: Iterable[Tensor]) -> None:
        """Add tensors and all they are computed from that is not there yet, in the order they were made.

        Raises:
            GraphError: a new node reads a leaf that an earlier node updates; nothing was added.
        """
        found: set[Tensor] = set()
        stack = list(roots)
        while stack:
            t = stack.pop()
            if t not in self._seen and t not in found:
                found.add(t)
                stack.extend(s for s in t.src if s is not None)
                stack.extend(t.parts)
        new = sorted(found, key=lambda t: t.serial)
        updated = set(self._updated)
        for t in new:
            for s in t.src:
                if s is not None and _read_from(s) in updated:
                    raise GraphError(
                        f"{t.label()} reads {s.label()}, which an earlier node of this graph updates; "
                        "read the update's result instead, or use a graph of its own"
                    )
            updated.update(t.updates)
        # nothing has changed up to here, so that a refused root leaves all as it was; an interrupted one too
        n_leaves, nodes = len(self.leaves), list(self.nodes)
        try:
            self.version += 1
            self.leaves.extend(t for t in new if t.is_leaf)
            self.nodes[:] = self._ordered([t for t in new if not t.is_leaf])
            self._seen |= found
            self._updated = updated
        except BaseException:
            del self.leaves[n_leaves:]
            self.nodes[:] = nodes
            self._seen -= found
            raise

    def _ordered(self, new: list[Tensor]) -> list[Tensor]:
        """The nodes with new ones among them, in the order in which they were made; but from the first update of a
        leaf on they stay as they were added, since others have read what was there before."""
        if any(t.updates for t in self.nodes):
            return self.nodes + new
        first = next((i for i, t in enumerate(new) if t.updates), len(new))
        return sorted(self.nodes + new[:first], key=lambda t: t.serial) + new[first:]


def _read_from(t: Tensor) -> Tensor:
    """The tensor whose memory is read where `t` is: through views, up to a leaf or the node that wrote it."""
    while t.base is not None and not t.updates:
        t = t.base
    return t
