"""Reverse-mode differentiation: from a graph, the graph of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import GradientError
from .graph import Graph
from .op import part, registry
from .recompute import Segments
from .tensor import Tensor, tensor


def build_backward_expand(
    graph: Graph, loss: Tensor | None, *, seed: Tensor | None, accumulate: bool, gradient_checkpoints: Sequence[Tensor]
) -> None:
    """See `Graph.build_backward_expand`."""
    if graph.loss is not None:
        raise GradientError("build_backward_expand was called before on this graph; a graph has one loss")
    loss = _marked_loss(graph) if loss is None else loss
    if loss.size != 1 or not loss.dtype.is_float:
        raise GradientError(f"the loss must be a scalar of a float dtype, not {loss.label()}; gg.sum makes one")
    if seed is not None and seed.size != 1:
        raise GradientError(f"the seed must be a scalar, not {seed.label()}")
    graph.build_forward_expand(loss)

    params = graph.params
    if not params:
        raise GradientError("no parameter in the graph: make one with gg.tensor(..., param=True) or gg.set_param")
    needed = depend_on(graph.nodes, params)
    gradients = _differentiate(graph.nodes, loss, seed, needed, Segments(graph.nodes, gradient_checkpoints))

    grads: dict[Tensor, Tensor] = {}
    for p in params:
        gradient = gradients.get(p)
        if gradient is not None:
            if accumulate:
                total = tensor(shape=p.shape, name=f"grad of {p.name}" if p.name else "", role="accumulator")
                total.memory()
                gradient = registry["accumulate"](total, gradient)
            grads[p] = gradient
    graph.loss = loss
    graph._grads = grads
    graph._add(grads.values())


def _marked_loss(graph: Graph) -> Tensor:
    marked = [t for t in graph.nodes if t.role == "loss"]
    if len(marked) == 1:
        return marked[0]
    if marked:
        raise GradientError(f"{len(marked)} tensors of the graph are marked with set_loss; pass the one to use")
    if not graph._roots:
        raise GradientError("the graph is empty: build_forward_expand(loss) comes first")
    return graph._roots[-1]


def depend_on(nodes: list[Tensor], params: list[Tensor]) -> set[Tensor]:
    """Float tensors that depend on a parameter.  Integers have no gradient, so dependence ends there."""
    found = set(params)
    for t in nodes:
        if t.dtype.is_float and any(s in found for s in t.src):
            found.add(t)
    return found


def _differentiate(
    nodes: list[Tensor], loss: Tensor, seed: Tensor | None, needed: set[Tensor], segments: Segments
) -> dict[Tensor, Tensor]:
    """The gradient of the loss by every needed tensor that it depends on."""
    # One slot for each result of a node: a packed result collects the gradients of its parts one by
    # one, so the gradient of a blob is never itself a blob.
    douts: dict[Tensor, list[Tensor | None]] = {}

    def add(t: Tensor, index: int, gradient: Tensor) -> None:
        slots = douts.setdefault(t, [None] * len(t.outputs))
        slots[index] = _sum(slots[index], gradient)

    if loss in needed:
        start = tensor(1.0, name="dloss") if seed is None else seed
        add(loss, 0, start.reshape(loss.shape))
    for t in reversed(nodes):
        slots = douts.get(t)
        if slots is None or t not in needed:
            continue
        if t.op is part:
            add(t.src[0], t.attrs["index"], slots[0])  # type: ignore[arg-type]
            continue
        wanted = [s in needed for s in t.src]
        for i, gradient in enumerate(_gradients(t, segments.value_of(t), slots, wanted, needed)):
            s = t.src[i]
            if gradient is None or not wanted[i]:
                continue
            if gradient.shape != s.shape:  # type: ignore[union-attr]
                raise GradientError(f"{t.op.name}: the rule gave a gradient {gradient.spec} for {s.label()}")  # type: ignore[union-attr]
            add(s, 0, gradient)  # type: ignore[arg-type]
    return {t: slots[0] for t, slots in douts.items() if slots[0] is not None}


def _sum(total: Tensor | None, gradient: Tensor) -> Tensor:
    """One more contribution to a gradient: a window of it is added in place, without its zeros."""
    if total is None:
        return gradient
    window = registry["slice_back"]
    if gradient.op is window:
        return registry["slice_add"](
            total, gradient.src[0], starts=gradient.attrs["starts"], steps=gradient.attrs["steps"]
        )
    if total.op is window:
        return registry["slice_add"](gradient, total.src[0], starts=total.attrs["starts"], steps=total.attrs["steps"])
    return registry["add"](total, gradient)


def _gradients(t: Tensor, value: Tensor, douts: list[Tensor | None], wanted: list[bool], needed: set[Tensor]):
    """Of the inputs of `t`, whose value the node `value` holds."""
    try:
        return value.op.vjp(value, douts, wanted)  # type: ignore[union-attr]
    except GradientError as error:
        p = _parameter_below(t, needed)
        given = ", ".join(str(s.spec) for s in t.src if s is not None)
        node = f"{t.op.name}({given})"  # type: ignore[union-attr]
        raise GradientError(f"{node}, on the way from the loss to parameter {p.label()}: {error}") from None


def _parameter_below(t: Tensor, needed: set[Tensor]) -> Tensor:
    """Some parameter that `t` depends on."""
    while not t.is_leaf:
        t = next(s for s in t.src if s in needed)
    return t
