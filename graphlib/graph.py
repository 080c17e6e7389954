"""Graphs: tensors in an order in which they can be computed, their gradients, and the run of it all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .core.errors import GraphError, KernelError
from .core.tensor import Tensor, output_marks
from .core.turns import Turn

if TYPE_CHECKING:
    from .compile.plan import Plan
    from .run.profile import Profile
    from .run.session import Session


class Graph:
    """A program of ops.  Nodes run in the order in which they were made.

    Attributes:
        nodes: every result, views included, sources before what is made of them.
        leaves: parameters, constants and inputs.
        loss: what `build_backward_expand` started from, or None.
        profile: where the time of the last run with `compute(profile=True)` went, or None.
    """

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.loss: Tensor | None = None
        self._roots: list[Tensor] = []
        self._grads: dict[Tensor, Tensor] = {}
        self._keep_grads = True
        self._seen: set[Tensor] = set()
        self._updated: set[Tensor] = set()  # leaves that a node of this graph has written
        self._session: Session | None = None
        self._shown: object = None  # the values of the reference backend's last run
        self._session_marks = -1
        self._begun = False  # whether what must come before a first run was done for the nodes that are there
        self.profile: Profile | None = None
        self._turn = Turn()

    # -- building -------------------------------------------------------------------------------

    def build_forward_expand(self, *roots: Tensor) -> Graph:
        """Add each root and all it is computed from; the roots' values stay readable after a run.  Returns the graph.

        Raises:
            GraphError: a new node reads a leaf that an earlier node of this graph updates.
        """
        self._add(roots)
        self._roots.extend(roots)
        return self

    def build_backward_expand(
        self,
        loss: Tensor | None = None,
        *,
        seed: Tensor | None = None,
        accumulate: bool = False,
        keep: bool = True,
        gradient_checkpoints: Sequence[Tensor] = (),
    ) -> Graph:
        """Add the nodes for the gradient of the loss by every parameter that it depends on.  Returns the graph.

        Args:
            loss: a scalar; default is the one marked with `set_loss`, else the root added last.
            seed: a scalar that every gradient is multiplied with; default 1.
            accumulate: add the gradients of every run to those before, until `reset`.
            keep: keep the gradients readable after a run.  Without it their bytes are reused as soon as
                nodes that were made from them have run.
            gradient_checkpoints: forward results, such as the outputs of a model's blocks, between which nothing is
                kept for the backward pass: what it needs is computed again, to the same bits.  Less
                memory for at most one more forward pass of time.

        Raises:
            GradientError: no scalar loss, no parameter, or an op on the way has no gradient; the message
                names the op and the parameter.
        """
        from .grad.autodiff import build_backward_expand

        build_backward_expand(self, loss, seed=seed, accumulate=accumulate, gradient_checkpoints=gradient_checkpoints)
        self._keep_grads = keep
        return self

    def grad(self, t: Tensor) -> Tensor | None:
        """The gradient of the loss by a parameter; None if the loss does not depend on it."""
        return self._grads.get(t)

    @property
    def params(self) -> list[Tensor]:
        """The parameters among the leaves."""
        return [t for t in self.leaves if t.param]

    # -- running --------------------------------------------------------------------------------

    def plan(self, *, reuse: bool = True) -> Plan:
        """Where every result will lie, and how many bytes it all takes; nothing is allocated."""
        from .compile import plan
        from .core import native

        if native.lib is None:  # nothing is known about the work memory of kernels
            return plan.plan(self, self.kept, reuse=reuse)
        return self._turn.take("plan()", lambda: self._session_for(reuse).plan)

    def compute(
        self,
        *,
        threads: int | None = None,
        backend: str | None = None,
        reuse: bool = True,
        profile: bool = False,
        check_finite: bool = False,
    ) -> Graph:
        """Run every node.  Returns the graph.

        Args:
            threads: at most this many, of which no more than 256 are used; default is the number of cores this process
                may use, or the environment's GGRAD_NUM_THREADS.  Results are the same bits for any number.
            backend: "native" (the kernels) or "reference" (NumPy, double precision); default is native
                where the C module was built.
            reuse: let values share memory when they are not alive at the same time.
            profile: note how long each node takes on which thread, in the graph's attribute `profile`:
                print it, or save it for Perfetto.  The values are the same; off, it costs nothing.
            check_finite: look at every result, all of which then have bytes of their own.

        Raises:
            GraphError: a leaf holds no value; or a profile of the reference backend was asked for.
            GraphError: it is called from inside of a run of this graph, by a callback or a signal handler.
            IndexRangeError: an index was out of range; neither has run what is made of it, nor a later update of
                a leaf.
            KernelError: an op has no kernel.
            NotFiniteError: with `check_finite`: names the first node that gave a NaN or an infinity, and says what its
                inputs hold.  If it comes before any update of a leaf, none has been made.
            KeyboardInterrupt, or what else a signal's handler raises: within about a tenth of a second, on the main
                thread.  Results are then not there, leaves are as they were, sums of gradients that were begun
                are zero; and a run that has begun to update leaves comes to its end first.
        """
        from .core import native

        if backend is None:
            backend = native.default_backend()
        if backend not in ("native", "reference"):
            raise GraphError(f"compute(): backend must be 'native' or 'reference', not {backend!r}")
        if backend == "native" and native.lib is None:
            raise KernelError("compute(backend='native'): ggrad was installed without its C kernels")
        if threads is not None and threads < 1:
            raise GraphError(f"compute(): threads must be 1 or more, not {threads}")
        if profile and check_finite:
            raise GraphError("compute(profile=True, check_finite=True): ask for one of them")
        if profile and backend == "reference":
            raise GraphError("compute(profile=True): only the native backend can be profiled")
        most = threads or native.default_threads()
        self._turn.take("compute()", lambda: self._compute(backend, most, reuse, profile, check_finite))
        return self

    def _compute(self, backend: str, threads: int, reuse: bool, profile: bool, check_finite: bool) -> None:
        for leaf in self.leaves:
            if leaf._data is None:
                raise GraphError(f"the leaf {leaf.label()} holds no value: set it with .set(array)")
        if not self._begun:
            self._before_first_run()
        if backend == "reference":
            from .run import reference

            reference.run(self, finite=check_finite)
            return
        session = self._session_for(reuse and not check_finite)
        if check_finite:
            session.run_checked(threads)
        elif profile:
            self.profile = session.profile(threads)
        else:
            session.run(threads)

    def _before_first_run(self) -> None:
        asking: dict[Callable[[list[Tensor]], None], list[Tensor]] = {}
        for t in self.nodes:
            if (ask := t.op.before_first_run) is not None:  # type: ignore[union-attr]
                asking.setdefault(ask, []).append(t)
        for ask, nodes in asking.items():
            ask(nodes)
        self._begun = True

    def reset(self) -> Graph:
        """Zero the accumulated gradients and the optimizer moments of this graph.  Returns it."""

        def zero() -> None:
            for leaf in self.leaves:
                if leaf.role in ("accumulator", "moment"):
                    leaf.memory()[...] = 0

        self._turn.take("reset()", zero)
        return self

    # -- showing --------------------------------------------------------------------------------

    def __str__(self) -> str:
        from .show import text

        return text(self)

    def dot(self) -> str:
        """The graph in Graphviz's language: leaves as boxes, gradient nodes shaded."""
        from .show import dot

        return dot(self)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes, {len(self.leaves)} leaves>"

    # -- helpers --------------------------------------------------------------------------------

    @property
    def kept(self) -> set[Tensor]:
        """Results whose values stay readable after a run."""
        kept = {t for t in self.nodes if t.output}
        kept.update(self._roots)
        if self.loss is not None:
            kept.add(self.loss)
        if self._keep_grads:
            kept.update(self._grads.values())
        return kept

    def _add(self, roots: Iterable[Tensor]) -> None:
        """Add the roots and all they are computed from that is not there yet, in the order they were made."""
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
        # nothing has changed up to here, so that a refused root leaves the graph as it was; an interrupted one too
        n_leaves, n_nodes = len(self.leaves), len(self.nodes)
        try:
            self._session, self._begun = None, False
            self.leaves.extend(t for t in new if t.is_leaf)
            self.nodes.extend(t for t in new if not t.is_leaf)
            self._seen |= found
            self._updated = updated
        except BaseException:
            del self.leaves[n_leaves:], self.nodes[n_nodes:]
            self._seen -= found
            raise

    def _session_for(self, reuse: bool):
        from .run.session import Session

        marks = output_marks()
        session = self._session
        if session is not None and self._session_marks != marks and session.kept != self.kept:
            session = None
        if session is None or session.reuse != reuse:
            session = Session(self, reuse=reuse)
        self._session, self._session_marks = session, marks
        return session


def _read_from(t: Tensor) -> Tensor:
    """The tensor whose memory is read where `t` is: through views, up to a leaf or the node that wrote it."""
    while t.base is not None and not t.updates:
        t = t.base
    return t
