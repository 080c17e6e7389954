"""Holds a kernel of any framework against an op of ggrad: its reference and gradient rule in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .. import ops
from ..core.tensor import Tensor, tensor
from ..graph import Graph
from ..run.reference import evaluate, leaf_value
from .comparison import Arguments, Comparison, Question, Refusals, Results, Rounding

__all__ = ["OpCase", "compare"]

Op = Callable[..., "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class OpCase:
    """Inputs and options of one comparison.

    Args:
        name: in the table.
        inputs: name -> a shape, for normal random numbers; or an array, of integers or booleans as it is, of floats
            rounded to the format.  They are given to the op in this order.
        options: keyword arguments of the op and of the kernel.
        backward: whether gradients are asked for.
        magnitude: standard deviation of the random numbers.
    """

    name: str
    inputs: Mapping[str, tuple[int, ...] | np.ndarray]
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True)
class _Asked:
    """A case of an op."""

    case: OpCase
    op: Op

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def features(self) -> set[str]:
        return {*self.case.inputs, *self.case.options}

    @cached_property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """Of the op's results; None of those that are no floats."""
        drawn = self._inputs(np.random.default_rng(0), np.dtype(np.float32))
        return [t.shape if t.dtype.is_float else None for t in self._built(drawn)[1]]

    @property
    def results(self) -> Sequence[str]:
        n = len(self.shapes)
        floats = [name for name, x in self.case.inputs.items() if not isinstance(x, np.ndarray) or x.dtype.kind == "f"]
        return [*(["out"] if n == 1 else [f"out{i}" for i in range(n)]), *(f"d{name}" for name in floats)]

    def arguments(self, seed: int, dtype: np.dtype) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        inputs = self._inputs(rng, dtype)
        d = [None if shape is None else rng.standard_normal(shape).astype(dtype) for shape in self.shapes]
        incoming = None if not self.case.backward else d[0] if len(d) == 1 else tuple(d)
        return {"d": incoming, **inputs, **self.case.options}

    def answer(self, arguments: Arguments, *, dtype: DTypeLike, rounded: Rounding) -> Results:
        """In double precision by references and rules, else by the op's own kernels in f32."""
        given = {name: arguments[name] for name in self.case.inputs}
        leaves, results = self._built({n: rounded(x) if x.dtype.kind not in "iub" else x for n, x in given.items()})
        graph, loss = Graph().build_forward_expand(*results), None
        if arguments["d"] is not None:
            d = arguments["d"] if isinstance(arguments["d"], tuple) else (arguments["d"],)
            terms = [ops.sum(ops.mul(t, tensor(rounded(x)))) for t, x in zip(results, d, strict=True) if x is not None]
            loss = terms[0]
            for term in terms[1:]:
                loss = ops.add(loss, term)
            graph.build_forward_expand(loss).build_backward_expand(loss)
        gradients = {} if loss is None else {n: graph.grad(t) for n, t in leaves.items() if t.param}
        wanted = dict(zip(self.results, results, strict=False))
        wanted |= {f"d{name}": g for name, g in gradients.items() if g is not None}
        if dtype == np.float64:
            values = evaluate(graph, {leaf: leaf_value(leaf) for leaf in graph.leaves})
            return {name: values[t] for name, t in wanted.items()}
        graph.compute()
        return {name: t.numpy() for name, t in wanted.items()}

    def _inputs(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        made = {
            name: x if isinstance(x, np.ndarray) else self.case.magnitude * rng.standard_normal(x)
            for name, x in self.case.inputs.items()
        }
        return {name: x.astype(dtype) if x.dtype.kind == "f" else x for name, x in made.items()}

    def _built(self, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        leaves = {name: tensor(x, name=name, param=x.dtype.kind not in "iub") for name, x in inputs.items()}
        made = self.op(*leaves.values(), **self.case.options)
        return leaves, made if isinstance(made, tuple) else (made,)


def compare(
    op: Op,
    fn: Callable[..., Any],
    cases: Iterable[OpCase],
    *,
    without: str | Iterable[str] = (),
    refuses: Refusals = (),
    dtype: str | DTypeLike = np.float32,
    factor: float = 3.0,
    floor: float = 1e-6,
    seed: int = 0,
) -> Comparison:
    """Compare a kernel with an op of ggrad, or a function of tensors, in double precision.

        cases = [OpCase("ragged", {"a": (5, 70)}, {"eps": 1e-5}), OpCase("one", {"a": (1, 1)}, {"eps": 1e-5})]
        result = gg.testing.compare(gg.rms_norm, my_rms_norm, cases)
        assert result.passed, result

    The rule is that of `compare_attention`; the plain implementation is the op's own kernel in f32, of inputs and with
    results that are rounded to the format.

    Args:
        op: called with the inputs as tensors, in order, and the options.
        fn: `fn(d, **inputs, **options)` of NumPy arrays; `d` is the gradient of the result, a tuple of one for each
            where there are several (None for one of integers), or None where only the forward pass is wanted.  It
            returns the result, called "out", or "out0", "out1", ..., and the gradients of float inputs, "d" and the
            input's name; as an array, a tuple, of which the last may be left off and others None, or a dict.
        cases: what to try.
        without: what `fn` does not know: names of inputs and options; cases that have them are left out.
        refuses: exceptions, beside NotImplementedError, by which `fn` says that it has no kernel for a case.
        dtype: of float inputs and `d`, as in `compare_attention`.
        factor, floor: of the rule.
        seed: of the arrays.

    Returns:
        As `compare_attention`.

    Raises:
        ValueError: there is no case to compare, or the dtype is none.
        GgradError: the op refuses a case.
    """
    return QUESTION.ask(
        fn, [_Asked(case, op) for case in cases], without=without, refuses=refuses, dtype=dtype, factor=factor,
        floor=floor, seed=seed,
    )  # fmt: skip


QUESTION = Question("compare", ("d",))
