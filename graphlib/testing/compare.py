"""Rules against difference quotients, kernels against references: of ops and models, one's own included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..core import native
from ..core.dtype import BF16, F16
from ..core.errors import GradientError, GradientMismatch, GraphError, KernelError, KernelMismatch
from ..core.op import part
from ..core.tensor import Tensor, tensor
from ..diff.autodiff import depend_on
from ..graph import Graph
from ..run.reference import evaluate, leaf_value
from ..run.session import Session

if TYPE_CHECKING:
    Values = dict[Tensor, np.ndarray]

NOISE = 1e-14  # what double precision may lose in a result, relative to the terms that it is the sum of
KERNEL_RTOL = 1e-5  # about 80 roundings of f32
COARSE_RTOL = {F16: 2e-3, BF16: 1.6e-2}  # two roundings of 11 and of 8 bits


@np.errstate(invalid="ignore", over="ignore")  # NaN is found by comparing, not by warnings
def check_gradients(
    build: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: ArrayLike | Tensor,
    seed: int = 0,
    eps: float = 1e-5,
    rtol: float = 1e-5,
    directions: int = 1,
) -> None:
    """Compare gradient rules with difference quotients, in double precision through the references.

    The loss is the sum of the results' elements, each times a random number.  Its slope along a random
    direction, of each parameter alone and of all together, must be the central difference quotient.  Of
    several results each is taken alone too: what nobody uses has the gradient None, which rules must bear.

    Args:
        build: makes the results; float arrays it is given as parameters, integers as constants, tensors as they are.
        inputs: its arguments, of any shape.  Leaves that `build` makes or closes over need a value.
        seed: of the random numbers.
        eps: half of the difference quotient's step.  It should not lead across a kink, as relu has one at 0.
        rtol: allowed difference, relative to the sum of all |gradient * direction|.
        directions: how many random directions of each kind.

    Raises:
        GradientMismatch: a rule and the quotient disagree; names the op, the parameter and both numbers.
        GradientError: there is no parameter, no float result, or an op without a rule.
    """
    results = _results(build, inputs)
    floats = [t for t in results if t.dtype.is_float]
    if not floats:
        raise GradientError("check_gradients(): nothing to differentiate, all results are integers")
    values = _leaf_values(Graph().build_forward_expand(*results))
    choices = [floats] if len(floats) == 1 else [floats, *([t] for t in floats)]
    for chosen in choices:
        check = _Check(chosen, values, np.random.default_rng(seed), eps, rtol)
        found = check.first_mismatch(directions)
        if found is not None:
            raise GradientMismatch(f"check_gradients(): {check.describe(found)}")


def check_kernel(
    build: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: ArrayLike | Tensor,
    threads: Sequence[int] = (1, 2, 3, 7),
    rtol: float | None = None,
    backward: bool = False,
) -> None:
    """Compare kernels with references, and the bits of every number of threads with each other.

    Before each run all memory that the graph plans is filled with NaN, so that a kernel which reads what
    nobody wrote, or writes outside of its result, gives itself away.

    An element may be off by `rtol` times the largest magnitude of its tensor: the error of a sum follows the
    size of its terms, and a result near zero may be the difference of large ones.  The default is 1e-5, about
    80 roundings of f32; where the graph holds results of f16 or bf16, which references do not round,
    2e-3 or 1.6e-2.  Integers, NaN and infinities must be equal.

    Args:
        build: makes the results; float arrays it is given as parameters, integers as constants, tensors as they are.
        inputs: its arguments.
        threads: numbers of threads to run with.
        rtol: allowed difference.
        backward: also check the gradients of sum(result * random numbers) by every parameter.

    Raises:
        KernelMismatch: names the op, the element and both numbers.
        KernelError: the C module was not built, or an op has no kernel.
    """
    if not native.built():
        raise KernelError("check_kernel(): there is no kernel to check, ggrad was installed without its C module")
    results = _results(build, inputs)
    graph = Graph().build_forward_expand(*results)
    if backward:
        loss, _ = _weighted_sum([t for t in results if t.dtype.is_float], np.random.default_rng(0))
        graph.build_backward_expand(loss)
    compare_with_reference(graph, threads=threads, rtol=rtol)


def session_of(graph: Graph, *, reuse: bool = True) -> Session:
    """What the graph runs by in C."""
    session = graph.prepared("native", reuse=reuse)
    assert isinstance(session, Session)
    return session


def compare_with_reference(graph: Graph, *, threads: Sequence[int] = (1, 2, 3, 7), rtol: float | None = None) -> None:
    """`check_kernel` of all values that a graph keeps and all leaves it updates, which are as before afterwards."""
    if rtol is None:
        rtol = max([KERNEL_RTOL, *(COARSE_RTOL.get(t.dtype, 0) for t in graph.nodes)])
    checked = sorted(graph.kept, key=lambda t: t.serial)
    updated = list(dict.fromkeys(leaf for t in graph.nodes for leaf in t.updates))
    before = {leaf: leaf.memory().copy() for leaf in graph.leaves}
    expected = evaluate(graph, _leaf_values(graph))
    first: dict[Tensor, np.ndarray] = {}
    try:
        for n in threads:
            for leaf, memory in before.items():
                leaf.memory()[...] = memory
            session = session_of(graph)
            session.poison(n)
            graph.compute(threads=n, backend="native")
            if not session.poison_between_results():
                raise KernelMismatch(
                    f"{_names(graph)}, {n} thread{'s' * (n > 1)}: a kernel wrote outside of its result"
                )
            for t in (*checked, *updated):
                got = t.numpy()
                where = f"{_application(t)}, {n} thread{'s' * (n > 1)}"
                if t not in first:
                    first[t] = got.copy()
                    for p, wanted in zip(t.outputs, expected[t] if t.parts else (expected[t],), strict=True):
                        _require_close(p.numpy(), wanted, rtol, where)
                elif not same_bits(got, first[t]):
                    raise KernelMismatch(f"{where}: other bits than with {threads[0]}")
            for leaf, memory in before.items():
                if leaf not in updated and leaf.memory().tobytes() != memory.tobytes():
                    raise KernelMismatch(f"{_names(graph)}: a kernel wrote into {leaf.label()}, which it only reads")
    finally:
        for leaf, memory in before.items():
            leaf.memory()[...] = memory


# -- gradients ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mismatch:
    params: list[Tensor]
    slope: float  # what the rules say
    quotient: float
    tolerance: float


class _Check:
    """The loss of some results with random weights, at given values of the leaves."""

    def __init__(
        self, results: list[Tensor], values: Values, rng: np.random.Generator, eps: float, rtol: float
    ) -> None:
        self.results, self.rng, self.eps, self.rtol = results, rng, eps, rtol
        self.loss, weights = _weighted_sum(results, rng)
        self.forward = Graph().build_forward_expand(self.loss)
        self.graph = Graph().build_backward_expand(self.loss)
        self.values = {t: values[t] if t in values else leaf_value(t) for t in self.graph.leaves}
        self.env = evaluate(self.graph, self.values)
        self.terms = sum(float(np.abs(self.env[w] * self.env[t]).sum()) for t, w in zip(results, weights, strict=True))

    def first_mismatch(self, directions: int = 1) -> _Mismatch | None:
        params = self.graph.params
        for chosen in [params] if len(params) == 1 else [*([p] for p in params), params]:
            for _ in range(directions):
                direction = {p: self.rng.standard_normal(p.shape) for p in chosen}
                found = self._compare(direction)
                if found is not None:
                    return found
        return None

    def _compare(self, direction: Values) -> _Mismatch | None:
        gradients = {p: g for p in direction if (g := self.graph.grad(p)) is not None}
        steps = [self.env[g] * direction[p] for p, g in gradients.items()]
        slope = float(sum(s.sum() for s in steps))
        size = float(sum(np.abs(s).sum() for s in steps))
        quotient = (self._loss_at(direction, self.eps) - self._loss_at(direction, -self.eps)) / (2 * self.eps)
        tolerance = self.rtol * size + NOISE * self.terms / self.eps
        if abs(slope - quotient) <= tolerance:  # false for NaN
            return None
        return _Mismatch(list(direction), slope, quotient, tolerance)

    def _loss_at(self, direction: Values, step: float) -> float:
        moved = {p: self.values[p] + step * d for p, d in direction.items()}
        at = {t: self.values[t] for t in self.forward.leaves} | moved
        return float(evaluate(self.forward, at, {self.loss})[self.loss])

    def describe(self, found: _Mismatch) -> str:
        what = ", ".join(_application(t) for t in self.results)
        params = ", ".join(p.label() for p in found.params)
        missing = " (no gradient at all)" if all(self.graph.grad(p) is None for p in found.params) else ""
        return (
            f"{what}: the gradient by {params} is wrong{self._culprit()}. Along a random direction the slope is "
            f"{found.slope:.9g} by the rules{missing} and {found.quotient:.9g} by the difference quotient; "
            f"{found.tolerance:.2g} would be tolerated"
        )

    def _culprit(self) -> str:
        """The op whose rule fails by itself, on the values that it has here."""
        nodes = [t for t in self.forward.nodes if t.op is not part]
        needed = depend_on(self.forward.nodes, self.forward.params)
        own = [t for t in nodes if needed.intersection(t.src) and t.serial <= max(r.serial for r in self.results)]
        if len(own) < 2:
            return ""
        for t in own:
            src = [
                None if s is None else tensor(shape=s.shape, dtype=s.dtype, param=s in needed, name=name)
                for s, name in _named_sources(t)
            ]
            values = {
                leaf: self.env[s] for leaf, s in zip(src, t.src, strict=True) if leaf is not None and s is not None
            }
            made = t.op.node(*src, **t.attrs)  # type: ignore[union-attr]
            results = [r for r in (made if isinstance(made, tuple) else (made,)) if r.dtype.is_float]
            if results and _Check(results, values, self.rng, self.eps, self.rtol).first_mismatch() is not None:
                return f": alone, the rule of {_application(t)} fails"
        return ", though the rule of each op alone is right"


def _weighted_sum(results: list[Tensor], rng: np.random.Generator) -> tuple[Tensor, list[Tensor]]:
    """sum of result * weight, over all elements of all results; and the weights."""
    from .. import ops

    weights = [tensor(rng.standard_normal(t.shape)) for t in results]
    loss, *more = (ops.sum(ops.mul(t, w)) for t, w in zip(results, weights, strict=True))
    for term in more:
        loss = ops.add(loss, term)
    return loss, weights


def _named_sources(t: Tensor) -> list[tuple[Tensor | None, str]]:
    inputs = t.op.inputs  # type: ignore[union-attr]
    return [(s, inputs[min(i, len(inputs) - 1)]) for i, s in enumerate(t.src)]


# -- kernels ------------------------------------------------------------------------------------------------


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether they hold the same, to the last bit; which of the many NaNs a NaN is does not matter."""
    if a.dtype.kind == "f":
        a, b = (np.where(np.isnan(x), np.nan, x) for x in (a, b))
    return a.tobytes() == b.tobytes()


def _require_close(got: np.ndarray, expected: np.ndarray, rtol: float, where: str) -> None:
    if got.dtype.kind == "i":
        off, allowed = (got != expected), 0.0
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            expected = expected.astype(np.float32).astype(np.float64)
            got = got.astype(np.float64)
            finite = np.abs(expected[np.isfinite(expected)])
            allowed = rtol * float(finite.max(initial=0.0))
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            off = ~(same | (np.abs(got - expected) <= allowed))
    if off.any():
        at = tuple(int(i) for i in np.argwhere(off)[0])
        raise KernelMismatch(
            f"{where}: element {at} is {got[at]:.9g} where the reference says {expected[at]:.9g} "
            f"({allowed:.2g} would be tolerated); {int(off.sum())} of {off.size} elements are off"
        )


# -- both ---------------------------------------------------------------------------------------------------


def _results(build, inputs) -> tuple[Tensor, ...]:
    made = build(*(t if isinstance(t, Tensor) else _leaf(np.asarray(t), i) for i, t in enumerate(inputs)))
    return made if isinstance(made, tuple) else (made,)


def _leaf(array: np.ndarray, i: int) -> Tensor:
    return tensor(array, name=f"input {i}", param=array.dtype.kind not in "iu")


def _leaf_values(graph: Graph) -> Values:
    for leaf in graph.leaves:
        if not leaf.holds_value:
            raise GraphError(f"the leaf {leaf.label()} holds no value to check with: set it with .set(array)")
    return {leaf: leaf_value(leaf) for leaf in graph.leaves}


def _names(graph: Graph) -> str:
    """The ops of a graph whose kernels run."""
    return ", ".join(dict.fromkeys(t.op.name for t in graph.nodes if not t.is_view))  # type: ignore[union-attr]


def _application(t: Tensor) -> str:
    """The op that made a tensor, with its arguments."""
    maker = t.src[0] if t.op is part else t
    if maker.is_leaf:  # type: ignore[union-attr]
        return t.label()
    return f"{maker.op.name}({maker.op.given(list(maker.src))})"  # type: ignore[union-attr]
