"""How exact kernels are: the worst relative errors of functions of one element, of losses, softmax and norms.

    python -m ggrad.check accuracy                            the table
    python -m ggrad.check accuracy --write docs/accuracy.md   the same, into the docs

Kernels of every instruction set that this machine has are compared with the references, which count in double
precision, forward and back.  Functions of one element are tried at some twelve thousand points of both signs: from the
smallest denormal to the largest f32, close together where functions bend and saturate, and close to 0 and 1.  An error
is relative to the value itself, so that a tail of 1e-30 needs its digits as 1 does; only below the smallest normal
number, where f32 itself has fewer, it is relative to that.  Of rows (softmax, norms, losses) it is relative to the
largest element of the result's row.

Every bound that is more than a few roundings of f32 has its reason beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import ops
from ..core import native
from ..core.errors import GgradError
from ..core.tensor import Tensor, tensor
from ..files.atomic import write_whole
from ..graph import Graph
from ..run.reference import evaluate, leaf_value

ROUNDINGS = 4e-7  # of f32, whose one is at most 6e-8: between six and seven of them
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Probe:
    """What one op is tried on, and how far off it may be.

    Attributes:
        build: makes the result, or several, of leaves.
        inputs: the leaves' values.
        forward, back: bounds of the relative errors of the results, and of the gradients by all inputs.
        reason: why a bound is more than `ROUNDINGS`.
        of_rows: whether errors are relative to the largest of a row, not to each element.
    """

    op: str
    build: Callable[..., Tensor]
    inputs: Sequence[np.ndarray]
    forward: float = ROUNDINGS
    back: float = ROUNDINGS
    reason: str = ""
    of_rows: bool = False


@dataclass(frozen=True)
class Worst:
    """A largest error, and the values of the inputs that gave it (of rows: the number of the row)."""

    error: float
    at: str

    def __str__(self) -> str:
        return f"{self.error:.1e} at {self.at}" if self.error else "0"


@dataclass(frozen=True)
class Row:
    """What was found of one op."""

    probe: Probe
    forward: Worst
    back: Worst | None

    @property
    def passed(self) -> bool:
        return self.forward.error <= self.probe.forward and (self.back is None or self.back.error <= self.probe.back)

    def cells(self) -> tuple[str, ...]:
        probe, back = self.probe, "-" if self.back is None else str(self.back)
        return (probe.op, str(self.forward), f"{probe.forward:.0e}", back, f"{probe.back:.0e}", probe.reason)


# -- what is tried ------------------------------------------------------------------------------------------------


def points() -> np.ndarray:
    """f32 of both signs, sorted, with 0."""
    magnitudes = np.concatenate(
        [
            10.0 ** np.arange(-44, 38.5, 1 / 6),
            np.linspace(0.01, 20, 4001),
            np.linspace(20, 110, 1801),
            1 + 2.0 ** -np.arange(1, 24),
            1 - 2.0 ** -np.arange(1, 24),
        ]
    )
    return np.unique(np.concatenate([-magnitudes, [0.0], magnitudes]).astype(np.float32))


def _spread(rng: np.random.Generator, n: int, low: float = -37.0, high: float = 37.0) -> np.ndarray:
    """Of magnitudes from 10^low to 10^high, of both signs."""
    return (rng.choice([-1.0, 1.0], n) * 10 ** rng.uniform(low, high, n)).astype(np.float32)


ARGUMENT = "the exponential's argument is rounded, and 100 times its error is the result's"
ROOT = "where a slope or a value goes through 0 its terms cancel"
UNARY: dict[str, dict] = {
    "silu": {"forward": 2e-5, "back": 2e-4, "reason": f"{ROOT}; sigmoid's last denormals, times x"},
    "gelu": {"forward": 2e-5, "back": 2e-4, "reason": f"{ROOT}; {ARGUMENT}"},
    "gelu_quick": {"forward": 2e-5, "back": 2e-4, "reason": f"{ROOT}; {ARGUMENT}"},
    "gelu_erf": {"forward": 2e-6, "back": 2e-4, "reason": f"{ROOT}; a rational fit of 7 ulp"},
    "xielu": {"forward": 2e-3, "back": 1e-3, "reason": ROOT},
    "softplus": {},
    "erf": {"forward": 1e-6, "back": 2e-5, "reason": "of the slope the exponential's argument is rounded, up to 88"},
    "exp2": {},
    "log2": {},
    "log1p": {},
    "tan": {},
    "asin": {},
    "acos": {},
    "atan": {},
    "sinh": {},
    "cosh": {},
    "asinh": {},
    "acosh": {},
    "atanh": {},
    "tanh": {"back": 1e-6, "reason": "4 times an exponential that is denormal"},
}
ATTRS: dict[str, dict] = {
    "leaky_relu": {"negative_slope": 0.25},
    "clamp": {"min": -0.75, "max": 1.25},
    "xielu": {"alpha_n": 0.8, "alpha_p": 0.3, "eps": -(2.0**-20)},
    "scale": {"factor": 1.25},
}
PLAIN = (
    "neg", "sqr", "sqrt", "log", "exp", "expm1", "sin", "cos", "abs", "sigmoid", "relu", "leaky_relu", "elu",
    "hardsigmoid", "hardswish", "sgn", "step", "floor", "ceil", "round", "trunc", "clamp", "scale",
)  # fmt: skip
GATED: dict[str, dict] = {
    "swiglu": UNARY["silu"], "geglu": UNARY["gelu"], "geglu_erf": UNARY["gelu_erf"],
    "geglu_quick": UNARY["gelu_quick"], "reglu": {}, "swiglu_oai": UNARY["gelu_quick"],
}  # fmt: skip


def probes() -> list[Probe]:
    """All that is tried, by the names of the ops."""
    rng = np.random.default_rng(0)
    x = points()
    found = [
        Probe(name, partial(getattr(ops, name), **ATTRS.get(name, {})), [x], **UNARY.get(name, {}))
        for name in (*PLAIN, *UNARY)
    ]
    gate = (rng.choice([-1.0, 1.0], x.size) * rng.uniform(0.5, 2, x.size)).astype(np.float32)
    found += [Probe(name, getattr(ops, name), [x, gate], **GATED[name]) for name in GATED]
    a, b = _spread(rng, 20000), _spread(rng, 20000)
    near = np.concatenate([a[:2000], a[2000:4000] * np.float32(1.0001)]), np.concatenate([a[:2000], -a[2000:4000]])
    a, b = np.concatenate([a, near[0]]), np.concatenate([b, near[1]])
    found += [Probe(name, getattr(ops, name), [a, b]) for name in ("add", "sub", "mul")]
    moderate = _spread(rng, 20000, -18, 18), _spread(rng, 20000, -18, 18)
    found.append(Probe("div", ops.div, moderate))
    found += _of_rows(rng)
    return sorted(found, key=lambda probe: probe.op)


def _of_rows(rng: np.random.Generator) -> list[Probe]:
    rows = np.concatenate([rng.normal(size=(60, 37)) * scale for scale in (1e-3, 1.0, 10.0)]).astype(np.float32)
    far = np.concatenate([rows, rows + 1e4, rows - 3e6]).astype(np.float32)
    sizes = np.concatenate([rows * scale for scale in (1e-12, 1.0, 1e12)]).astype(np.float32)
    classes = rng.integers(0, 37, len(far)).astype(np.int32)
    labels = rng.dirichlet(np.ones(37), len(far)).astype(np.float32)
    sums = "sums of 37 terms, and differences of what is nearly equal"
    sure = "where one place has nearly all, its gradient is exact to a rounding of the incoming one, not of itself"
    one_at_most = "the sum of exponentials has a 1 in it, whose rounding is the loss's of a row that is nearly sure"

    def losses(targets):
        return lambda x: ops.cross_entropy_loss(x, targets, reduction="sum")

    of: dict[str, Any] = {"of_rows": True, "back": 2e-6, "reason": sums}
    return [
        Probe("soft_max", ops.soft_max, [far[:120]], **of | {"reason": sure}),
        Probe("norm", lambda x: ops.norm(x, eps=0.0), [sizes], **of | {"forward": 2e-6}),
        Probe("rms_norm", lambda x: ops.rms_norm(x, eps=0.0), [sizes], **of),
        Probe("l2_norm", lambda x: ops.l2_norm(x, eps=0.0), [sizes], **of),
        Probe("sum_rows", ops.sum_rows, [np.abs(sizes)], of_rows=True),
        Probe("mean", ops.mean, [np.abs(sizes)], of_rows=True),
        Probe("cumsum", ops.cumsum, [np.abs(sizes)], **of | {"forward": 2e-6}),
        Probe("cross_entropy_loss, classes", losses(classes), [far], of_rows=True, back=1e-6, reason=one_at_most),
        Probe("cross_entropy_loss, labels", losses(labels), [far], of_rows=True, back=2e-6, reason=sums),
    ]


# -- the measuring ------------------------------------------------------------------------------------------------


def relative_errors(got: np.ndarray, exact: np.ndarray, of_rows: bool = False) -> np.ndarray:
    """0 where `got` is the exact value rounded to f32, also an infinity or NaN; inf where only one is not finite."""
    with np.errstate(all="ignore"):
        same = (got == exact.astype(np.float32)) | (np.isnan(got) & np.isnan(exact))
        size = np.abs(exact)
        if of_rows and size.ndim:
            size = np.broadcast_to(size.max(axis=-1, keepdims=True), size.shape)
        errors = np.abs(got.astype(np.float64) - exact) / np.maximum(size, SMALLEST_NORMAL)
    return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors))


def measure(probe: Probe) -> Row:
    """With the kernels of the instruction set that is selected."""
    leaves = [tensor(x, param=True) for x in probe.inputs]
    result = probe.build(*leaves)
    rng = np.random.default_rng(1)
    dout = tensor(rng.choice([-1.0, 1.0], result.shape) * rng.uniform(0.5, 2, result.shape))
    graph = Graph().build_backward_expand(ops.sum(ops.mul(result, dout)))
    graph.build_forward_expand(result)
    gradients = [g for leaf in leaves if (g := graph.grad(leaf)) is not None]
    exact = evaluate(graph, {leaf: leaf_value(leaf) for leaf in graph.leaves})
    graph.compute(backend="native")

    with np.errstate(over="ignore"):
        there = np.isfinite(exact[result].astype(np.float32))

    def worst(t: Tensor) -> Worst:
        errors = relative_errors(t.numpy(), exact[t], probe.of_rows)
        if t is not result and errors.shape == there.shape:
            errors = np.where(there, errors, 0)  # where the value has left f32 nobody asks for a slope
        i = int(errors.argmax())
        if probe.of_rows:
            return Worst(float(errors.flat[i]), f"row {i // max(1, t.shape[-1]) if t.ndim > 1 else i}")
        return Worst(float(errors.flat[i]), ", ".join(f"{x.flat[i]:.6g}" for x in probe.inputs))

    backs = [worst(g) for g in gradients]
    return Row(probe, worst(result), max(backs, key=lambda w: w.error) if backs else None)


def table(names: Sequence[str] = ()) -> list[Row]:
    """Of every probe, or of those ops, the worst that any instruction set of this machine gives.

    Raises:
        GgradError: there is no such op here, or there are no kernels.
    """
    if not native.built():
        raise GgradError("ggrad was installed without its C kernels: there is nothing to measure")
    wanted = [probe for probe in probes() if not names or probe.op.partition(",")[0] in names]
    missing = set(names) - {probe.op.partition(",")[0] for probe in wanted}
    if missing:
        raise GgradError(f"accuracy is not measured of {', '.join(sorted(missing))}")
    before = native.ffi.string(native.lib.gg_isa())
    found: list[Row] = []
    try:
        for isa in native.instruction_sets():
            if native.lib.gg_isa_select(isa) != 0:
                continue  # this machine has no such instructions
            rows = [measure(probe) for probe in wanted]
            found = [_worse(*pair) for pair in zip(found, rows, strict=True)] if found else rows
    finally:
        native.lib.gg_isa_select(before)
    return found


def _worse(a: Row, b: Row) -> Row:
    forward = max(a.forward, b.forward, key=lambda w: w.error)
    back = None if a.back is None or b.back is None else max(a.back, b.back, key=lambda w: w.error)
    return Row(a.probe, forward, back)


HEADER = """# Accuracy

Made by `python -m ggrad.check accuracy --write docs/accuracy.md`: the worst relative errors of kernels, on any
instruction set of the machine that it ran on, against references in double precision, and what each op's bound is.
Functions of one element are tried at some 12,000 points of both signs, from the smallest denormal to 3e38; errors are
relative to the value itself, below 1.2e-38 to that. Of softmax, norms and losses they are relative to the
largest of the row, with rows around 0, 1e4 and -3e6, and norms of values from 1e-12 to 1e12. Gradients are those by
all inputs, for incoming gradients between 0.5 and 2 of both signs, where the value itself is finite.

Losses, AdamW and SGD are tested with extreme arguments too: logits of 1e8, betas from 0 to 1 - 1e-6, eps 0, step 1 and
step 1,000,000. Products, convolutions, attention and scans are compared with their references at 1e-5 of the largest
element, about 80 roundings of f32.

## Long sums

A single f32 sum of 100,000 equal numbers is 10,000 roundings off. Here sums go by blocks: a block's terms are added up
by themselves, then the blocks, or what runs along a row goes on in double. So an error does not grow with the number of
terms: `tests/test_long_sums.py` has a run of 100,000 to 200,000 equal terms for every op that adds up, and none is more
than 64 roundings (4e-6) off, the worst about 62. Sums that are only as long as a window, a kernel or a head are plain:
the gradients of average pooling, `im2col_3d` and depthwise convolution with a stride, and those of scans over a head's
rows. 512 terms there, in one direction more than any model has, are 15 to 37 roundings off.

## Softmax where one place has nearly all

A probability near 1 is known to 6e-8, hence what it lacks of 1 no better than that. The gradient by its logit is of the
size of what it lacks, and is exact to a rounding of the incoming gradient, not of itself; that by another logit is as
exact as the difference of its incoming gradient and the large place's. Attention and the losses keep the largest score
and the sum, and have no such loss: where a loss follows a softmax, `cross_entropy_loss` of the logits is what keeps the
digits.

## Quantized blocks

A block's scale is f16. One that is more than 65504 is refused by name, with the block's place and its largest value;
one below 6e-8, f16's smallest, becomes 0, and the block's values its minimum or 0.

## Relative errors

"""


def markdown(rows: Sequence[Row]) -> str:
    header = ("op", "worst forward", "bound", "worst gradient", "bound", "why more than 4e-07")
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *(r.cells() for r in rows)))


# -- the program --------------------------------------------------------------------------------------------------


def report(names: Sequence[str], write: Path | None) -> int:
    """What `python -m ggrad.check accuracy` does.  Returns the exit status: 1 if an op is worse than its bound."""
    rows = table(names)
    if write is None:
        print(markdown(rows))
    else:
        write_whole(write, f"{HEADER}{markdown(rows)}\n".encode())
    failed = [row for row in rows if not row.passed]
    for row in failed:
        print(f"FAILED {row.probe.op}: {' | '.join(row.cells()[1:5])}")
    return 1 if failed else 0
