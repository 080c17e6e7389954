"""Reverse-mode differentiation: from a graph, the graph of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.builtin import builtin
from ..core.errors import GradientError
from ..core.op import part
from ..core.program import Program
from ..core.tensor import Tensor, tensor
from .recompute import Segments

Made = Tensor | tuple[Tensor | None, ...]  # what a function makes of tensors


def build_backward_expand(
    program: Program,
    loss: Tensor | None,
    *,
    params: Sequence[Tensor] | None,
    seed: Tensor | None,
    accumulate: bool,
    gradient_checkpoints: Sequence[Tensor],
) -> None:
    """See `Graph.build_backward_expand`."""
    if program.loss is not None:
        raise GradientError("build_backward_expand was called before on this graph; a graph has one loss")
    loss = _marked_loss(program) if loss is None else loss
    if loss.size != 1 or not loss.dtype.is_float:
        raise GradientError(f"the loss must be a scalar of a float dtype, not {loss.label()}; gg.sum makes one")
    if seed is not None and seed.size != 1:
        raise GradientError(f"the seed must be a scalar, not {seed.label()}")
    if params is not None:
        _check_differentiable("build_backward_expand(params=...)", params)
    program.expand([loss])
    program.roots.append(loss)

    params = program.params if params is None else list(dict.fromkeys(params))
    if not params:
        raise GradientError("no parameter in the graph: make one with gg.tensor(..., param=True) or gg.set_param")
    needed = depend_on(program.nodes, params)
    start = (tensor(1.0, name="dloss", frozen=True) if seed is None else seed).reshape(loss.shape)
    segments = Segments(program.nodes, gradient_checkpoints)
    gradients = _differentiate(program.nodes, {loss: start} if loss in needed else {}, needed, segments)

    grads: dict[Tensor, Tensor] = {}
    for p in params:
        gradient = gradients.get(p)
        if gradient is not None:
            if accumulate:
                total = tensor(shape=p.shape, name=f"grad of {p.name}" if p.name else "", role="accumulator")
                total.memory()
                gradient = builtin.accumulate(total, gradient)
            grads[p] = gradient
    program.expand(grads.values())
    program.loss, program.grads = loss, grads


def grad(
    y: Tensor, x: Tensor | Sequence[Tensor], *, seed: Tensor | None = None, allow_unused: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """The gradient of `y` by `x`, as nodes: part of a loss they make second derivatives, and so on.

        u_x = gg.grad(gg.sum(u), x)
        loss = gg.mean(gg.sqr(gg.grad(gg.sum(u_x), x) - f))

    Args:
        y: a scalar of a float dtype; with `seed` a result of any shape.
        x: what to differentiate by, leaf or result, of a float dtype; or several of these.
        seed: f32 of y's shape: what the gradient of each element of `y` is weighed with before they are summed.
        allow_unused: zeros are the gradient by what `y` does not depend on, which else is an error.

    Returns:
        f32 of the shape of `x`; a tuple if `x` is a sequence.

    Raises:
        GradientError: `y` is no scalar, or does not depend on `x`; or an op on the way has no gradient.
    """
    several = not isinstance(x, Tensor)
    xs: list[Tensor] = [*x] if several else [x]  # type: ignore[list-item]
    _check_differentiable("grad()", xs)
    if not isinstance(y, Tensor) or not y.dtype.is_float or (seed is None and y.size != 1):
        given = y.label() if isinstance(y, Tensor) else repr(y)
        raise GradientError(
            f"grad(): y must be a scalar of a float dtype, not {given}; gg.sum makes one, or give a seed"
        )
    if seed is not None and seed.shape != y.shape:
        raise GradientError(f"grad(): the seed must have y's shape {y.shape}, not {seed.shape}")
    nodes = _between(xs, [y])
    start = tensor(1.0, name="dy").reshape(y.shape) if seed is None else seed
    found = _differentiate(nodes, {y: start} if y in nodes else {}, {*nodes}, Segments(nodes, ()))
    unused = [t for t in xs if t not in found]
    if unused and not allow_unused:
        raise GradientError(
            f"grad(): {y.label()} does not depend on {', '.join(t.label() for t in unused)} by way of ops on floats; "
            "allow_unused=True makes the gradient zeros"
        )
    gradients = tuple(found[t] if t in found else builtin.broadcast_to(tensor(0.0), shape=t.shape) for t in xs)
    return gradients if several else gradients[0]


def _check_differentiable(where: str, xs: Sequence[Tensor]) -> None:
    for t in xs:
        if not isinstance(t, Tensor) or not t.dtype.is_float or t.dtype.quantized or t.is_packed:
            given = t.label() if isinstance(t, Tensor) else repr(t)
            raise GradientError(f"{where}: there is no gradient by {given}; it must be a tensor of a float dtype")


def _marked_loss(program: Program) -> Tensor:
    marked = [t for t in program.nodes if t.role == "loss"]
    if len(marked) == 1:
        return marked[0]
    if marked:
        raise GradientError(f"{len(marked)} tensors of the graph are marked with set_loss; pass the one to use")
    if not program.roots:
        raise GradientError("the graph is empty: build_forward_expand(loss) comes first")
    ones = list(dict.fromkeys(t for t in program.roots if t.size == 1 and t.dtype.is_float))
    scalars = [t for t in ones if not t.shape] or ones
    if len(scalars) > 1:
        roots = ", ".join(t.label() for t in scalars)
        raise GradientError(
            f"the graph has {len(scalars)} scalar roots, and one of them is the loss: {roots}; "
            "build_backward_expand(loss), or gg.set_loss(loss), says which"
        )
    return scalars[0] if scalars else program.roots[-1]


def depend_on(nodes: list[Tensor], params: list[Tensor]) -> set[Tensor]:
    """Float tensors that depend on a parameter.  Integers have no gradient, so dependence ends there."""
    found = set(params)
    for t in nodes:
        if t.dtype.is_float and any(s in found for s in t.src):
            found.add(t)
    return found


def through(made_of: Callable[..., Made]) -> Callable[..., list[Tensor | None]]:
    """A gradient rule by way of other ops, for an op that they could make too: at their cost, so where few ask for it.

    Args:
        made_of: of the op's inputs and attributes the same results, made of ops with gradients.
    """

    def rule(t: Tensor, *douts: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
        return pull_back(made_of, t.src, douts, needs, **t.attrs)

    return rule


def through_gradients_of(made_of: Callable[..., Tensor]) -> Callable[..., list[Tensor | None]]:
    """The rule of an op (dout, *inputs) that gives the gradients of `made_of` by its inputs: differentiates twice."""

    def gradients(dout: Tensor, *inputs: Tensor | None, **attrs: Any) -> tuple[Tensor | None, ...]:
        found = pull_back(made_of, inputs, [dout], [s is not None for s in inputs], **attrs)
        return tuple(g for g, s in zip(found, inputs, strict=True) if s is not None)

    return through(gradients)


def pull_back(
    made_of: Callable[..., Made],
    inputs: Sequence[Tensor | None],
    douts: Sequence[Tensor | None],
    needs: Sequence[bool],
    **attrs: Any,
) -> list[Tensor | None]:
    """From the gradients of what is made of some inputs those of the inputs that are needed, None of the others."""
    # Views of the inputs: nothing beyond them is differentiated, and one that is given twice has two gradients.
    views = {
        i: builtin.broadcast_to(s, shape=s.shape)
        for i, (s, needed) in enumerate(zip(inputs, needs, strict=True))
        if s is not None and needed
    }
    made = made_of(*(views.get(i, s) for i, s in enumerate(inputs)), **attrs)
    results = made if isinstance(made, tuple) else (made,)
    starts = {y: dy for y, dy in zip(results, douts, strict=True) if y is not None and dy is not None}
    nodes = _between([*views.values()], [*starts])
    gradients = _differentiate(nodes, starts, {*nodes}, Segments(nodes, ()))
    return [gradients.get(views[i]) if i in views else None for i in range(len(inputs))]


def _between(first: Sequence[Tensor], last: Sequence[Tensor]) -> list[Tensor]:
    """Float tensors on the way from `first` to `last`, these included, sources before what is made of them."""
    begin, seen, stack = min(t.serial for t in first), {*last}, [*last]
    while stack:
        for s in stack.pop().src:
            if s is not None and s.serial >= begin and s not in seen:
                seen.add(s)
                stack.append(s)
    ordered = sorted(seen, key=lambda t: t.serial)
    depending = depend_on(ordered, [*first])
    return [t for t in ordered if t in depending]


def _differentiate(
    nodes: list[Tensor], starts: dict[Tensor, Tensor], needed: set[Tensor], segments: Segments
) -> dict[Tensor, Tensor]:
    """From gradients of some results those of every needed tensor that they depend on."""
    # One slot for each result of a node: a packed result collects the gradients of its parts one by
    # one, so the gradient of a blob is never itself a blob.
    douts: dict[Tensor, list[Tensor | None]] = {}

    def add(t: Tensor, index: int, gradient: Tensor) -> None:
        slots = douts.setdefault(t, [None] * len(t.outputs))
        slots[index] = _sum(slots[index], gradient)

    for t, start in starts.items():
        add(t, 0, start)
    for t in reversed(nodes):
        slots = douts.get(t)
        if slots is None or t not in needed:
            continue
        if t.op is part:
            if t.src[0] in needed:
                add(t.src[0], t.attrs["index"], slots[0])  # type: ignore[arg-type]
            continue
        wanted = [s in needed for s in t.src]
        if not any(wanted):
            continue
        for i, gradient in enumerate(_gradients(t, segments.value_of(t), slots, wanted, needed)):
            s = t.src[i]
            if gradient is None or not wanted[i]:
                continue
            if gradient.shape != s.shape:  # type: ignore[union-attr]
                raise GradientError(f"{t.op.name}: the rule gave a gradient {gradient.spec} for {s.label()}")  # type: ignore[union-attr]
            add(s, 0, gradient)  # type: ignore[arg-type]
    return {t: slots[0] for t, slots in douts.items() if slots[0] is not None}


def _sum(total: Tensor | None, gradient: Tensor) -> Tensor:
    """One more contribution to a gradient, added as the op that gave it says."""
    if total is None:
        return gradient
    for t, rest in ((gradient, total), (total, gradient)):
        if t.op is not None and (added := t.op.add_to(t, rest)) is not None:
            return added
    return builtin.add(total, gradient)


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
    while (below := next((s for s in t.src if s in needed), None)) is not None:
        t = below
    return t
