"""Programs: graphs as data, so that a random one can be built anew, printed as Python, and made smaller.

A program is a list of steps, leaves and calls of ops, and the graphs that are made of their results.  A value is named
by the step that made it and the number of its part.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ..core.dtype import F32, I32, DType
from ..core.errors import GgradError
from ..core.op import Record, all_of, registry
from ..core.tensor import Tensor, set_output, tensor
from ..graph import Graph
from ..train.optim import SGD, AdamW

Address: TypeAlias = tuple[int, int]
SEED = "seed of the gradients"  # the name of its leaf


@dataclass(frozen=True)
class Leaf:
    """A leaf and its values: those given, or as many as its shape has, drawn evenly from [low, high)."""

    shape: tuple[int, ...]
    dtype: DType = F32
    role: str = "constant"
    frozen: bool = False
    seed: int = 0
    low: float = -1.0
    high: float = 1.0
    values: np.ndarray | None = field(default=None, compare=False)

    def array(self) -> np.ndarray:
        if self.values is not None:
            return self.values
        rng = np.random.default_rng(self.seed)
        if self.dtype is I32:
            return rng.integers(int(self.low), int(self.high), self.shape)
        return rng.uniform(self.low, self.high, self.shape)

    def make(self) -> Tensor:
        options: dict[str, Any] = {"param": True} if self.role == "param" else {"role": self.role}
        return tensor(self.array(), dtype=self.dtype, frozen=self.frozen, **options)

    def text(self) -> str:
        if self.values is not None:
            kind = self.values.dtype.name if self.values.dtype.kind in "iu" else "float64"
            value = f"np.array({_listed(self.values)}, {kind!r}).reshape({self.values.shape})"
        elif self.dtype is I32:
            value = f"np.random.default_rng({self.seed}).integers({int(self.low)}, {int(self.high)}, {self.shape})"
        else:
            value = f"np.random.default_rng({self.seed}).uniform({self.low!r}, {self.high!r}, {self.shape})"
        role = ", param=True" if self.role == "param" else f", role={self.role!r}" if self.role != "constant" else ""
        return f"gg.tensor({value}, dtype=gg.{self.dtype.name.upper()}{role}{', frozen=True' if self.frozen else ''})"


@dataclass(frozen=True)
class Call:
    """An op on values that were made before; None where an input is left out."""

    op: str
    src: tuple[Address | None, ...]
    attrs: dict[str, Any]


@dataclass(frozen=True)
class GraphOf:
    """One graph of a program.

    Attributes:
        roots: what it is built forward from.
        loss: float values; their sum, each element times a weight, is differentiated.  Empty: no gradients.
        outputs: values that are marked with `set_output`.
        accumulate, keep, checkpoints: as `build_backward_expand` takes them.
        seed: of the gradients; None for the default.
        optimizer: "AdamW", "SGD" or None.
        clip: the largest norm of the gradients.
    """

    roots: tuple[Address, ...]
    loss: tuple[Address, ...] = ()
    outputs: tuple[Address, ...] = ()
    accumulate: bool = False
    keep: bool = True
    checkpoints: tuple[Address, ...] = ()
    seed: float | None = None
    optimizer: str | None = None
    clip: float | None = None

    def addresses(self) -> set[Address]:
        return {*self.roots, *self.loss, *self.outputs, *self.checkpoints}


@dataclass(frozen=True)
class Program:
    """See the module."""

    steps: tuple[Leaf | Call, ...]
    graphs: tuple[GraphOf, ...]

    def values(self) -> list[tuple[Tensor, ...]]:
        """New tensors, of each step."""
        made: list[tuple[Tensor, ...]] = []
        for step in self.steps:
            if isinstance(step, Leaf):
                made.append((step.make(),))
            else:
                src = [None if a is None else made[a[0]][a[1]] for a in step.src]
                made.append(all_of(registry[step.op].node(*src, **step.attrs)))
        return made

    def build(self) -> list[Graph]:
        """The graphs, of new tensors; where an optimizer's step is a graph of its own, that follows."""
        made = self.values()

        def at(addresses: tuple[Address, ...]) -> list[Tensor]:
            return [made[i][j] for i, j in addresses]

        graphs: list[Graph] = []
        for spec in self.graphs:
            graph = Graph().build_forward_expand(*at(spec.roots))
            for t in at(spec.outputs):
                if not t.is_leaf:
                    set_output(t)
            graphs.append(graph)
            if not spec.loss:
                continue
            graph.build_backward_expand(
                weighted_sum(at(spec.loss)),
                seed=None if spec.seed is None else tensor(spec.seed, name=SEED),
                accumulate=spec.accumulate,
                keep=spec.keep,
                gradient_checkpoints=[t for t in at(spec.checkpoints) if not t.is_leaf],
            )
            stepped = [p for p in graph.params if graph.grad(p) is not None]
            if spec.optimizer is not None and stepped and all(p.dtype is F32 for p in stepped):
                kind = {"AdamW": AdamW, "SGD": SGD}[spec.optimizer]
                update = kind(stepped, lr=1e-2, weight_decay=0.1).build(graph, clip=spec.clip)
                if update is not graph:
                    graphs.append(update)
        return graphs

    # -- as Python ------------------------------------------------------------------------------

    def text(self) -> str:
        """The program as a script that prints what every graph keeps, natively and by the references."""
        choosing = {i for i, s in enumerate(self.steps) if not isinstance(s, Leaf) and registry[s.op].chooses}
        several = choosing | {i for i, n in self._parts().items() if n > 1}
        lines = ["import numpy as np", "", "import ggrad as gg", "from ggrad.core.op import all_of, registry", ""]

        def name(a: Address | None) -> str:
            return "None" if a is None else f"v{a[0]}[{a[1]}]" if a[0] in several else f"v{a[0]}"

        def listed(addresses: tuple[Address, ...]) -> str:
            return ", ".join(name(a) for a in addresses)

        for i, step in enumerate(self.steps):
            if isinstance(step, Leaf):
                lines.append(f"v{i} = {step.text()}")
            else:
                attrs = "".join(f", {key}={_attr_text(value)}" for key, value in step.attrs.items())
                call = f'registry["{step.op}"].node({", ".join(map(name, step.src))}{attrs})'
                lines.append(f"v{i} = all_of({call})" if i in choosing else f"v{i} = {call}")
        for i, spec in enumerate(self.graphs):
            lines += ["", f"g{i} = gg.Graph().build_forward_expand({listed(spec.roots)})"]
            if spec.outputs:
                lines += [f"for t in ({listed(spec.outputs)},):", "    gg.set_output(t)"]
            if spec.loss:
                terms = [
                    f"gg.sum(gg.mul({name(a)}, gg.tensor(np.random.default_rng({k}).uniform(-1, 1, {name(a)}.shape))))"
                    for k, a in enumerate(spec.loss)
                ]
                lines.append(f"loss = {' + '.join(terms)}")
                options = f"keep={spec.keep}, accumulate={spec.accumulate}"
                options += "" if spec.seed is None else f", seed=gg.tensor({spec.seed!r})"
                options += f", gradient_checkpoints=[{listed(spec.checkpoints)}]" if spec.checkpoints else ""
                lines.append(f"g{i}.build_backward_expand(loss, {options})")
                if spec.optimizer is not None:
                    lines.append(f"stepped = [p for p in g{i}.params if g{i}.grad(p) is not None]")
                    made = f"gg.{spec.optimizer}(stepped, lr=1e-2, weight_decay=0.1).build(g{i}, clip={spec.clip})"
                    lines.append(f"u{i} = {made}")
            lines.append(f'for backend in ("reference", "native"):\n    g{i}.compute(backend=backend)')
            lines.append(
                f"    for t in sorted(g{i}.kept, key=lambda t: t.serial):\n        print(backend, t, t.numpy())"
            )
        return "\n".join(lines) + "\n"

    def _parts(self) -> dict[int, int]:
        return {i: len(results) for i, results in enumerate(self.values())}


def weighted_sum(values: list[Tensor]) -> Tensor:
    """The loss of some values: with random weights, so that every element counts differently."""
    total: Tensor | None = None
    for k, t in enumerate(values):
        weights = tensor(np.random.default_rng(k).uniform(-1, 1, t.shape))
        term = registry["sum"](registry["mul"](t, weights))
        total = term if total is None else registry["add"](total, term)
    assert total is not None
    return total


def _listed(values: np.ndarray) -> str:
    return repr(values.reshape(-1).tolist()).replace("nan", "np.nan").replace("inf", "np.inf")


def _attr_text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.name)
    if isinstance(value, DType):
        return f"gg.{value.name.upper()}"
    if isinstance(value, Record):
        fields = ", ".join(f"{name}={_attr_text(each)}" for name, each in vars(value).items())
        return f"gg.ops.{type(value).__module__.rpartition('.')[2]}.{type(value).__name__}({fields})"
    return repr(value)


# -- made smaller -------------------------------------------------------------------------------------------------


def pruned(program: Program) -> Program:
    """Without the steps that no graph needs."""
    needed = {i for g in program.graphs for i, _ in g.addresses()}
    for i in reversed(range(len(program.steps))):
        step = program.steps[i]
        if i in needed and isinstance(step, Call):
            needed |= {a[0] for a in step.src if a is not None}
    number = {old: new for new, old in enumerate(sorted(needed))}

    def moved(addresses: tuple[Address, ...]) -> tuple[Address, ...]:
        return tuple((number[i], j) for i, j in addresses)

    steps = tuple(
        replace(step, src=tuple(None if a is None else (number[a[0]], a[1]) for a in step.src))
        if isinstance(step, Call)
        else step
        for i, step in enumerate(program.steps)
        if i in number
    )
    graphs = tuple(
        replace(
            g,
            roots=moved(g.roots),
            loss=moved(g.loss),
            outputs=moved(g.outputs),
            checkpoints=moved(g.checkpoints),
        )
        for g in program.graphs
    )
    return Program(steps, graphs)


def shrink(program: Program, fails: Callable[[Program], bool], attempts: int = 400) -> Program:
    """A small program that still fails: smaller ones are tried, the largest steps first, until none of them does.

    Args:
        fails: whether a program shows the fault; one that cannot be built does not.
        attempts: the most programs that are tried.
    """
    left, smaller = attempts, True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if left == 0:
                return program
            left -= 1
            try:
                candidate = pruned(candidate)
                found = fails(candidate)
            except (GgradError, ValueError, IndexError, TypeError):
                found = False
            if found:
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    graphs = program.graphs
    for i in range(len(graphs)) if len(graphs) > 1 else ():
        yield replace(program, graphs=graphs[:i] + graphs[i + 1 :])
    for i, g in enumerate(graphs):
        for simpler in _simpler_graphs(g):
            yield replace(program, graphs=(*graphs[:i], simpler, *graphs[i + 1 :]))
    values = program.values()
    used = {a for g in graphs for a in g.addresses()}
    for step in program.steps:
        if isinstance(step, Call):
            used |= {a for a in step.src if a is not None}
    for i in reversed(range(len(program.steps))):
        step = program.steps[i]
        if isinstance(step, Call):
            yield from _replacements(program, values, i, used)
    for i, step in enumerate(program.steps):
        if isinstance(step, Leaf):
            for leaf in _simpler_leaves(step):
                yield replace(program, steps=(*program.steps[:i], leaf, *program.steps[i + 1 :]))
    sizes = sorted({n for step in program.steps if isinstance(step, Leaf) for n in step.shape if n > 1}, reverse=True)
    for n in sizes:
        for less in (1, 2, 3, n // 2):
            if less < n:
                yield _resized(program, n, less)


def _simpler_graphs(g: GraphOf) -> Iterator[GraphOf]:
    if g.loss:
        yield replace(g, loss=(), optimizer=None, accumulate=False, checkpoints=(), seed=None)
        if len(g.roots) > 1:
            yield replace(g, roots=g.roots[:1])
    if g.optimizer is not None:
        yield replace(g, optimizer=None, clip=None)
    if g.accumulate:
        yield replace(g, accumulate=False)
    if g.checkpoints:
        yield replace(g, checkpoints=())
    if g.seed is not None:
        yield replace(g, seed=None)
    if not g.keep:
        yield replace(g, keep=True)
    for name in ("roots", "loss", "outputs", "checkpoints"):
        listed = getattr(g, name)
        for k in range(len(listed)) if len(listed) > (name in ("roots", "loss")) else ():
            yield replace(g, **{name: listed[:k] + listed[k + 1 :]})


def _replacements(program: Program, values: list, i: int, used: set[Address]) -> Iterator[Program]:
    """Programs in which one of the results of step i is a leaf, or what the step was made of."""
    for j, t in enumerate(values[i]):
        if (i, j) not in used:
            continue
        step = program.steps[i]
        assert isinstance(step, Call)
        for a in step.src:
            if a is not None and (s := values[a[0]][a[1]]).shape == t.shape and s.dtype is t.dtype:
                yield _renamed(program, (i, j), a)
        if not t.dtype.quantized:
            param = "param" if t.dtype.is_float else "constant"
            leaf = Leaf(t.shape, t.dtype, param, seed=i, low=0.0 if t.dtype is I32 else -1.0)
            steps = (leaf, *(_shifted(s) for s in program.steps))
            graphs = tuple(_map_graph(g, lambda a: (a[0] + 1, a[1])) for g in program.graphs)
            yield _renamed(Program(steps, graphs), (i + 1, j), (0, 0))


def _shifted(step: Leaf | Call) -> Leaf | Call:
    if isinstance(step, Leaf):
        return step
    return replace(step, src=tuple(None if a is None else (a[0] + 1, a[1]) for a in step.src))


def _renamed(program: Program, old: Address, new: Address) -> Program:
    def swap(a: Address) -> Address:
        return new if a == old else a

    steps = tuple(
        replace(s, src=tuple(None if a is None else swap(a) for a in s.src)) if isinstance(s, Call) else s
        for s in program.steps
    )
    return Program(steps, tuple(_map_graph(g, swap) for g in program.graphs))


def _map_graph(g: GraphOf, to: Callable[[Address], Address]) -> GraphOf:
    names = ("roots", "loss", "outputs", "checkpoints")
    moved: dict[str, Any] = {name: tuple(dict.fromkeys(map(to, getattr(g, name)))) for name in names}
    return replace(g, **moved)


def _simpler_leaves(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.values is not None and leaf.dtype.is_float and not leaf.dtype.quantized:
        yield replace(leaf, values=None)
    if leaf.frozen:
        yield replace(leaf, frozen=False)
    if leaf.dtype.is_float and not leaf.dtype.quantized and leaf.dtype is not F32:
        yield replace(leaf, dtype=F32)
    if leaf.role == "param":
        yield replace(leaf, role="constant")


def _resized(program: Program, n: int, less: int) -> Program:
    """Every size n is another one, in leaves and attributes alike."""

    def size(k: Any) -> Any:
        return less if type(k) is int and k == n else k

    steps: list[Leaf | Call] = []
    for step in program.steps:
        if isinstance(step, Call):
            attrs = {
                key: tuple(map(size, value)) if isinstance(value, tuple) else value for key, value in step.attrs.items()
            }
            steps.append(replace(step, attrs=attrs))
        elif step.values is None:
            high = min(step.high, less) if step.dtype is I32 and step.high == n else step.high
            steps.append(replace(step, shape=tuple(map(size, step.shape)), high=high))
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


__all__ = ["Address", "Call", "GraphOf", "Leaf", "Program", "pruned", "shrink", "weighted_sum"]
