"""Graphs as text and as Graphviz dot."""

from __future__ import annotations

from .core.op import part
from .core.program import Program, names_of
from .core.scope import FORWARD


def text(graph: Program) -> str:
    """One line a tensor: leaves first, then nodes in the order in which they run.

    w: f32[4,3] param
    %2 = mul_mat(w, x): f32[8,4]
    """
    named = names_of([*graph.leaves, *graph.nodes])
    gradient_of = {g: p for p, g in graph.grads.items()}
    lines = [f"{named[t]}: {t.spec} {t.role}" for t in graph.leaves]
    for t in graph.nodes:
        arguments = [named[s] if s is not None else "None" for s in t.src]
        arguments += [f"{key}={value}" for key, value in t.attrs.items()]
        line = f"{named[t]} = {t.op.name}({', '.join(arguments)}): {t.spec}"  # type: ignore[union-attr]
        if t is graph.loss:
            line += "  # the loss"
        if t in gradient_of:
            line += f"  # gradient of {named[gradient_of[t]]}"
        lines.append(line)
    return "\n".join(lines)


def dot(graph: Program) -> str:
    """See `Graph.dot`."""
    named = names_of([*graph.leaves, *graph.nodes])
    ids = {t: f"n{i}" for i, t in enumerate(named)}
    clusters: dict[str, list[str]] = {}  # lines of each scope's nodes
    lines = ["digraph ggrad {", "  rankdir=TB; node [fontname=monospace, fontsize=10];"]
    for t, name in named.items():
        name = _quoted(name)
        label = f"{name}\\n{t.spec}" if t.is_leaf else f"{t.op.name}\\n{name}: {t.spec}"  # type: ignore[union-attr]
        if t.is_leaf:
            style = "shape=box, style=filled, fillcolor=" + ("lightblue" if t.param else "white")
        elif t is graph.loss:
            style = "shape=doubleoctagon"
        elif t.phase != FORWARD:
            style = "shape=ellipse, style=filled, fillcolor=mistyrose"
        else:
            style = "shape=ellipse" + (", style=dashed" if t.op is part or t.is_view else "")
        clusters.setdefault("" if t.is_leaf else t.scope, []).append(f'  {ids[t]} [label="{label}", {style}];')
    for i, (scope, nodes) in enumerate(clusters.items()):
        lines += [f'  subgraph cluster{i} {{ label="{_quoted(scope)}";', *nodes, "  }"] if scope else nodes
    for t in graph.nodes:
        lines.extend(f"  {ids[s]} -> {ids[t]};" for s in t.src if s is not None)
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    """As it stands between the quotes of Graphviz's language."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
