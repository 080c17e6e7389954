"""Graphs: tensors in an order in which they can be computed, their gradients, and the run of it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import show
from .compile.plan import Plan
from .core import native
from .core.errors import GradientError, GraphError
from .core.program import Program
from .core.tensor import Tensor, output_marks
from .diff.autodiff import build_backward_expand
from .run.backend import BACKENDS, Backend, Prepared, backend_of
from .run.profile import Profile


class Graph(Program):
    """A program of ops.  Nodes run in the order in which they were made.

    Attributes:
        nodes: every result, views included, sources before what is made of them.
        leaves: parameters, constants and inputs.
        loss: what `build_backward_expand` started from, or None.
        profile: where the time of the last run with `compute(profile=True)` went, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.profile: Profile | None = None
        self._ready: dict[Backend, Prepared] = {}  # by backend, for the version and marks below
        self._ready_for = (self.version, output_marks())
        self._begun = -1  # the version for whose nodes everything was done that must come before a first run

    # -- building -------------------------------------------------------------------------------

    def build_forward_expand(self, *roots: Tensor) -> Graph:
        """Add each root, of any shape and dtype, and all it is computed from; the roots' values stay readable after a
        run.  Returns the graph.

        Raises:
            GraphError: a new node reads a leaf that an earlier node of this graph updates.
        """
        self.expand(roots)
        self.roots.extend(roots)
        return self

    def build_backward_expand(
        self,
        loss: Tensor | None = None,
        *,
        params: Sequence[Tensor] | None = None,
        seed: Tensor | None = None,
        accumulate: bool = False,
        keep: bool = True,
        gradient_checkpoints: Sequence[Tensor] = (),
    ) -> Graph:
        """Add the nodes for the gradient of the loss by every parameter that it depends on.  Returns the graph.

        Args:
            loss: a scalar; default is the one marked with `set_loss`, else the only scalar among the roots.
            params: what to differentiate by instead of all parameters: some of these, which leaves the cost of
                the others out; constants; or results, whose gradients can then be read.
            seed: a scalar that every gradient is multiplied with; default 1.
            accumulate: add the gradients of every run to those before, until `reset`.
            keep: keep the gradients readable after a run.  Without it their bytes are reused as soon as
                nodes that were made from them have run.
            gradient_checkpoints: forward results, such as the outputs of a model's blocks, between which nothing is
                kept for the backward pass: what it needs is computed again, to the same bits.  Less
                memory for at most one more forward pass of time (Chen et al. 2016, arXiv:1604.06174).

        Raises:
            GradientError: no scalar loss, or several that could be it; no parameter; or an op on the way has no
                gradient: the message names the op and the parameter.
        """
        build_backward_expand(
            self, loss, params=params, seed=seed, accumulate=accumulate, gradient_checkpoints=gradient_checkpoints
        )
        self.keep_grads = keep
        return self

    def grad(self, t: Tensor) -> Tensor | None:
        """The gradient of the loss by a parameter, f32 of its shape; None if the loss does not depend on it.

        Raises:
            GradientError: it is a result, and `build_backward_expand(params=[...])` did not name it.
        """
        if not t.is_leaf and self.loss is not None and t not in self.grads:
            raise GradientError(
                f"no gradient by the result {t.label()} was built, or the loss does not depend on it; "
                "build_backward_expand(params=[*graph.params, t]) makes it, and gg.grad(loss, t) a node of any graph"
            )
        return self.grads.get(t)

    # -- running --------------------------------------------------------------------------------

    def plan(self, *, reuse: bool = True) -> Plan:
        """Where every result will lie, and how many bytes it all takes; nothing is allocated."""
        # without the C module, nothing is known about the work memory of kernels
        backend = BACKENDS["native" if native.built() else "reference"]
        return self.turn.take("plan()", lambda: self.prepared(backend, reuse=reuse).plan)

    def prepared(self, backend: str | Backend | None = None, *, reuse: bool = True) -> Prepared:
        """The graph as it stands, made ready to run by a backend: kept until it changes, or other values are kept.

        For tools that look into plans and sessions; `compute` and `plan` ask for it themselves.

        Raises:
            GraphError: there is no such backend.
            KernelError: it cannot run here, or has no way to compute an op.
        """
        backend = backend_of(backend)
        now = self.version, output_marks()
        if now != self._ready_for:
            kept = self.kept
            same = self.version == self._ready_for[0]
            self._ready = {b: p for b, p in self._ready.items() if same and p.kept == kept}
            self._ready_for = now
        ready = self._ready.get(backend)
        if ready is None or ready.reuse != reuse:
            ready = self._ready[backend] = backend.prepare(self, reuse=reuse)
        return ready

    def forget(self) -> None:
        """Drop what was prepared: the next run prepares anew."""
        self._ready = {}

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
            backend: "native" (the kernels), "reference" (NumPy, double precision), or a backend of one's own, see
                `ggrad.run.backend`; default is native where the C module was built.
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
        chosen = backend_of(backend)
        if threads is not None and threads < 1:
            raise GraphError(f"compute(): threads must be 1 or more, not {threads}")
        if profile and check_finite:
            raise GraphError("compute(profile=True, check_finite=True): ask for one of them")
        most = threads or native.default_threads()
        self.turn.take("compute()", lambda: self._compute(chosen, most, reuse, profile, check_finite))
        return self

    def _compute(self, backend: Backend, threads: int, reuse: bool, profile: bool, check_finite: bool) -> None:
        for leaf in self.leaves:
            if not leaf.holds_value:
                raise GraphError(f"the leaf {leaf.label()} holds no value: set it with .set(array)")
        if self._begun != self.version:
            self._before_first_run()
        ready = self.prepared(backend, reuse=reuse and not check_finite)
        if check_finite:
            ready.run_checked(threads)
        elif profile:
            self.profile = ready.profile(threads)
        else:
            ready.run(threads)

    def _before_first_run(self) -> None:
        asking: dict[Callable[[list[Tensor]], None], list[Tensor]] = {}
        for t in self.nodes:
            if (ask := t.op.before_first_run) is not None:  # type: ignore[union-attr]
                asking.setdefault(ask, []).append(t)
        for ask, nodes in asking.items():
            ask(nodes)
        self._begun = self.version

    def reset(self) -> Graph:
        """Zero the accumulated gradients and the optimizer moments of this graph.  Returns it."""

        def zero() -> None:
            for leaf in self.leaves:
                if leaf.role in ("accumulator", "moment"):
                    leaf.memory()[...] = 0

        self.turn.take("reset()", zero)
        return self

    # -- showing --------------------------------------------------------------------------------

    def __str__(self) -> str:
        return show.text(self)

    def dot(self) -> str:
        """The graph in Graphviz's language: leaves as boxes, gradient nodes shaded."""
        return show.dot(self)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes, {len(self.leaves)} leaves>"
