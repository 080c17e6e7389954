"""Random programs, and everything that must hold of each: kernels, plans, threads, gradients.

    python -m ggrad.check fuzz --minutes 60
    python -m ggrad.check fuzz --seed 12345 --count 1    the program of one seed again

Of every graph of a program:

- Its waves and its plan keep their rules, with and without sharing of memory, and where small nodes share waves.
- Each node, in a run that keeps all, gives what its reference makes of the very inputs that the node had: so an error
  is seen where it is made, and no error of an input counts.  Allowed is what `compare_with_reference` allows; beyond
  that, what the reference itself changes by when the inputs move by a rounding of f32, or when it is made of f32.
- No task of a wave touches what another one of it writes.
- Runs with 1, 2, 3 and 5 threads, with memory shared or not, profiled, and repeated, over memory full of NaN, give the
  same bits; nothing is written beside the results; leaves are only read.
- Gradients are difference quotients of the references, where these are smooth.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ..compile import waves
from ..core.errors import GgradError
from ..core.op import part, registry
from ..core.tensor import Tensor, look
from ..graph import Graph
from ..run.reference import as_promised, computed, leaf_value
from .compare import COARSE_RTOL, KERNEL_RTOL, same_bits, session_of
from .growing import random_program
from .invariants import check_graph
from .programs import SEED, Call, Program, shrink
from .races import RaceError, check_races

THREADS = (1, 2, 3, 5)
ROUNDING = 2.0**-24  # of f32
ROUNDINGS = 64  # what a kernel may do of them where a reference depends on the last bits of its inputs
TINY = 1e-36  # what flushing denormals may lose: a few times the smallest normal number
RACES = 1 << 16  # bytes of results, up to which tasks are run one by one
SMOOTH = 3_000  # elements, up to which gradients are compared with difference quotients


def _of_norm(dout, x, weight=None, *, eps, wanted, centred=False):
    """How large the terms are of which the gradient by a row is the difference: in a row of one nothing may be left."""
    n = max(1, x.shape[-1] if x.ndim else 1)
    x = x - x.mean(-1, keepdims=True) if centred and x.size else x
    size = np.sqrt((x**2).sum(-1, keepdims=True) / n + eps)
    terms = np.abs(dout * (1 if weight is None else weight)) / size
    return float(terms[np.isfinite(terms)].max(initial=0))


def _of_length(dout, x, *, eps):
    terms = np.abs(dout) / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), eps)
    return float(terms[np.isfinite(terms)].max(initial=0))


TERMS = {
    "norm_back": partial(_of_norm, centred=True),
    "rms_norm_back": _of_norm,
    "l2_norm_back": _of_length,
}


class Found(AssertionError):
    """A program that shows a fault; the message says which rule is broken, and by which node."""


def check(program: Program, *, repeats: int = 4) -> None:
    """Raise `Found` unless all holds that the module names.

    Args:
        repeats: runs more with two and with three threads, for races.
    """
    for graph in program.build():
        try:
            check_one(graph, repeats=repeats)
        except GgradError as error:
            raise Found(f"{type(error).__name__}: {error}") from error


def check_one(graph: Graph, *, repeats: int = 0) -> None:
    """`check` of a graph as it stands; leaves that it updates are as before afterwards."""
    _check_statics(graph)
    before = {leaf: leaf.memory().copy() for leaf in graph.leaves}
    updated = {leaf for t in graph.nodes for leaf in t.updates}
    if graph.grads and not updated:
        _check_gradients(graph)
    runs = 2 if updated else 1
    expected = _check_nodes(graph, before, runs)
    for small in (waves.SMALL, -1):
        with _smallest_wave(small):
            for reuse in (True, False):
                graph.forget()
                for threads in THREADS if reuse else (2,):
                    again = repeats if reuse and threads in (2, 3) else 0
                    for turn in range(1 + again):
                        how = f"{threads} threads, reuse={reuse}, smallest wave {small}, run {turn}"
                        _restore(before)
                        for _ in range(runs):
                            _run(graph, threads, reuse, how, poison=turn == 0)
                        _compare_bits(graph, updated, expected, how)
    _check_races(graph, before)
    _restore(before)
    for _ in range(runs):
        graph.compute(threads=3, backend="native", profile=True)
    _compare_bits(graph, updated, expected, "a profiled run")
    _restore(before)
    graph.forget()


@contextmanager
def _smallest_wave(small: int) -> Iterator[None]:
    normal = waves.SMALL
    waves.SMALL = small
    try:
        yield
    finally:
        waves.SMALL = normal


def _check_statics(graph: Graph) -> None:
    for small in (waves.SMALL, -1):
        with _smallest_wave(small):
            for reuse in (True, False):
                graph.forget()
                try:
                    check_graph(graph, reuse=reuse)
                except AssertionError as error:
                    raise Found(f"rules: {error}") from None
    graph.forget()


def _check_races(graph: Graph, before: dict[Tensor, np.ndarray]) -> None:
    """Where it does not take long: every task of a wave is run alone on all memory."""
    with _smallest_wave(-1):
        graph.forget()
        if session_of(graph).plan.arena > RACES:
            return
        _restore(before)
        _begin(graph)
        try:
            check_races(graph)
        except RaceError as error:
            raise Found(f"races: {error}") from None
    graph.forget()


def _restore(before: dict[Tensor, np.ndarray]) -> None:
    for leaf, memory in before.items():
        leaf.memory()[...] = memory


def _begin(graph: Graph) -> None:
    """What a run sets before it begins, which comes to the same when the run does it again."""
    for begin in graph.before_run:
        begin()


def _run(graph: Graph, threads: int, reuse: bool, how: str, poison: bool) -> None:
    session = session_of(graph, reuse=reuse)
    if poison:
        session.poison(threads)
    _begin(graph)
    written = {leaf for t in graph.nodes for leaf in t.updates}
    before = {leaf: leaf.memory().copy() for leaf in graph.leaves if leaf not in written}
    graph.compute(threads=threads, reuse=reuse, backend="native")
    if poison and not session.poison_between_results():
        raise Found(f"memory: a kernel wrote outside of its result; {how}")
    for leaf, memory in before.items():
        if leaf.memory().tobytes() != memory.tobytes():
            raise Found(f"memory: a kernel wrote into {leaf.label()}, which it only reads; {how}")


def _kept(graph: Graph) -> list[Tensor]:
    return sorted((t for t in graph.kept if not t.storage[0].is_leaf), key=lambda t: t.serial)


def _compare_bits(graph: Graph, updated: set[Tensor], expected: dict[Tensor, np.ndarray], how: str) -> None:
    for t in _kept(graph):
        if not same_bits(t.numpy(), expected[t]):
            raise Found(f"bits: {_name(t)} has others; {how}")
    for leaf in updated:
        if not same_bits(leaf.memory(), expected[leaf]):
            raise Found(f"bits: the updated {leaf.label()} has others; {how}")


def _name(t: Tensor) -> str:
    maker = t.src[0] if t.op is part else t
    return f"{maker.op.name}({maker.op.given(list(maker.src))})" if maker.op else t.label()  # type: ignore[union-attr]


# -- every node against its reference -----------------------------------------------------------------------------


def _check_nodes(graph: Graph, before: dict[Tensor, np.ndarray], runs: int) -> dict[Tensor, np.ndarray]:
    """Run with bytes of its own for every result, one thread, and compare each node.  Returns what is kept, and what
    updated leaves hold."""
    graph.forget()
    session = session_of(graph, reuse=False)
    _restore(before)
    for _ in range(runs):
        _begin(graph)
        env = {leaf: leaf_value(leaf) for leaf in graph.leaves}
        _run(graph, 1, False, "1 thread, reuse=False", poison=True)
        with np.errstate(all="ignore"):
            _compare_nodes(graph, session, env)
    updated = {leaf for t in graph.nodes for leaf in t.updates}
    kept = {t: t.numpy().copy() for t in _kept(graph)}
    return kept | {leaf: leaf.memory().copy() for leaf in updated}


def _compare_nodes(graph: Graph, session, env: dict[Tensor, np.ndarray]) -> None:
    last = {leaf: t for t in graph.nodes for leaf in t.updates}
    for t in graph.nodes:
        if t.parts:
            _compare(t, [_read(session, p) for p in t.parts], env)
            env.update({p: _wide(_read(session, p)) for p in t.parts})
        elif t.updates:
            src = [None if s is None else env[s] for s in t.src]
            made = [*computed(t, src)]
            if all(last[leaf] is t for leaf in t.updates):
                got = [leaf.numpy() for leaf in t.updates]
                _require_near(t, got, made, src, partial(_new_values, t))
                made = [_wide(x) for x in got]
            env.update(dict(zip(t.updates, made, strict=True)))
            env[t] = made[0]
        elif t.op is part:
            continue
        elif t.is_view and t.storage[0].is_leaf:
            env[t] = _result(t, [env[s] for s in t.src if s is not None])[0]
        else:
            result = _read(session, t)
            _compare(t, [result], env)
            env[t] = _wide(result)


def _read(session, t: Tensor) -> np.ndarray:
    owner, offset = t.storage
    start = session.plan.offsets[owner]
    return look(session.values.arena[start : start + owner.nbytes], t, offset, writable=False)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int64 if array.dtype.kind == "i" else np.float64)


def _result(t: Tensor, src: list) -> list[np.ndarray]:
    made = as_promised(t, computed(t, src))
    return [*made] if t.parts else [made]


def _new_values(t: Tensor, src: list) -> list[np.ndarray]:
    return [*computed(t, src)]


def _compare(t: Tensor, got: list[np.ndarray], env: dict[Tensor, np.ndarray]) -> None:
    src = [None if s is None else env[s] for s in t.src]
    _require_near(t, got, _result(t, src), src, partial(_result, t))


def _require_near(
    t: Tensor, got: list[np.ndarray], wanted: list[np.ndarray], src: list, anew: Callable[[list], list[np.ndarray]]
) -> None:
    if any(s is not None and s.dtype.kind == "f" and not np.isfinite(s).all() for s in src):
        return  # what becomes of NaN and infinity has tests of its own
    rtol = max([_rtol(t), *(COARSE_RTOL.get(p.dtype, 0) for p in t.outputs)])
    if all(_near(g, w, rtol, 0.0) for g, w in zip(got, wanted, strict=True)):
        return
    rng = np.random.default_rng(0)
    slack = [0.0] * len(got)
    for _ in range(6):
        inputs = [_moved(s, rng) for s in src]
        moved = anew(inputs)
        in_f32 = anew([s if s is None or s.dtype.kind == "i" else s.astype(np.float32) for s in inputs])
        for k, (m, w, f) in enumerate(zip(moved, wanted, in_f32, strict=True)):
            if w.dtype.kind == "i":
                slack[k] = max(slack[k], float((m != w).any() or (f != w).any()))
            else:
                slack[k] = max(slack[k], ROUNDINGS * _apart(m, w), ROUNDINGS * _apart(f, m))
    terms: Any = TERMS.get(t.op.name)  # type: ignore[union-attr]
    if terms is not None:
        slack = [max(s, ROUNDINGS * ROUNDING * terms(*src[:3], **t.attrs)) for s in slack]
    for k, (g, w) in enumerate(zip(got, wanted, strict=True)):
        if not _near(g, w, rtol, slack[k]):
            raise Found(f"values: {_name(t)}, result {k}: {_difference(g, w, rtol, slack[k])}")


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        changes = np.abs(a - b)
    return float(changes[np.isfinite(changes)].max(initial=0))


def _rtol(t: Tensor) -> float:
    import importlib

    return importlib.import_module("ggrad.testing.cases").RTOL.get(t.op.name, KERNEL_RTOL)  # type: ignore[union-attr]


def _moved(s: np.ndarray | None, rng: np.random.Generator) -> np.ndarray | None:
    if s is None or s.dtype.kind == "i":
        return s
    return s * (1 + ROUNDING * rng.choice([-1.0, 1.0], s.shape))


def _off(got: np.ndarray, wanted: np.ndarray, rtol: float, slack: float) -> np.ndarray:
    if wanted.dtype.kind == "i":
        return (got != wanted) & (slack == 0)
    with np.errstate(all="ignore"):
        wanted = _rounded_as(got, wanted)
        got = got.astype(np.float64)
        finite = np.abs(wanted[np.isfinite(wanted)])
        allowed = rtol * float(finite.max(initial=0.0)) + slack + TINY
        same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        return ~(same | (np.abs(got - wanted) <= allowed))


def _rounded_as(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """In the range of the dtype that it is compared in: beyond lies infinity."""
    dtype = np.float16 if got.dtype == np.float16 else np.float32
    return wanted.astype(dtype).astype(np.float64)


def _near(got: np.ndarray, wanted: np.ndarray, rtol: float, slack: float) -> bool:
    return not _off(got, wanted, rtol, slack).any()


def _difference(got: np.ndarray, wanted: np.ndarray, rtol: float, slack: float) -> str:
    off = _off(got, wanted, rtol, slack)
    at = tuple(int(i) for i in np.argwhere(off)[0])
    largest = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
    return (
        f"element {at} is {got[at]:.9g}, the reference of its own inputs {wanted[at]:.9g}; {rtol:.2g} of the largest, "
        f"{largest:.3g}, and {slack:.2g} would be tolerated; {int(off.sum())} of {off.size} elements are off"
    )


# -- gradients ----------------------------------------------------------------------------------------------------


def _check_gradients(graph: Graph) -> None:
    """By all parameters together, along a random direction."""
    if sum(t.size for t in graph.nodes) > SMOOTH:
        return
    grads = {p: g for p in graph.params if (g := graph.grad(p)) is not None}
    values = {leaf: leaf_value(leaf) for leaf in graph.leaves}
    rng = np.random.default_rng(0)
    direction = {p: rng.standard_normal(p.shape) for p in graph.params}
    with np.errstate(all="ignore"):
        env = _forward(graph.nodes, values, {})
        loss = graph.loss
        forward = Graph().build_forward_expand(loss)  # type: ignore[arg-type]
        # nothing flows back through these, however they depend on parameters
        pins = {t: env[t] for t in forward.nodes if t.op is registry["stop_gradient"]}
        seed = float(next((values[leaf] for leaf in graph.leaves if leaf.name == SEED), 1.0))

        def at(step: float) -> float:
            moved = {p: values[p] + step * d for p, d in direction.items()}
            return float(_forward(forward.nodes, values | moved, pins)[loss].item())

        def quotient(eps: float) -> float:
            return seed * (at(eps) - at(-eps)) / (2 * eps)

        terms = [env[g] * direction[p] for p, g in grads.items()]
        slope = float(sum(term.sum() for term in terms))
        size = float(sum(np.abs(term).sum() for term in terms))
        sums = sum(float(np.abs(env[t.src[0]]).sum()) for t in forward.nodes if t.op is registry["sum"])
        quotients = [quotient(eps) for eps in (1e-5, 3e-6, 1e-6)]
        here = at(0.0)
        bend = abs(seed) * abs(at(1e-6) - 2 * here + at(-1e-6)) / 1e-6  # at a kink the slopes of both sides differ
    spread = max(quotients) - min(quotients)
    noise = 1e-14 * (sums + abs(seed)) * max(1.0, abs(seed)) / 1e-6
    if not np.isfinite([slope, size, *quotients]).all() or spread > 1e-4 * (size + abs(slope)) + 10 * noise:
        return  # a kink, a jump or a pole is near
    if abs(slope - quotients[0]) > 1e-5 * size + 4 * spread + 10 * noise + bend:
        raise Found(
            f"gradients: along a random direction the slope is {slope:.9g} by the rules and {quotients[0]:.9g} by the "
            f"difference quotient (spread {spread:.2g})"
        )


def _forward(nodes: list[Tensor], values: dict[Tensor, np.ndarray], pins: dict[Tensor, np.ndarray]) -> dict:
    env = dict(values)
    for t in nodes:
        if t in pins:
            env[t] = pins[t]
        elif t.op is part:
            env[t] = env[t.src[0]][t.attrs["index"]]  # type: ignore[index]
        else:
            env[t] = as_promised(t, computed(t, [None if s is None else env[s] for s in t.src]))
    return env


# -- the program --------------------------------------------------------------------------------------------------


def fault_of(program: Program, repeats: int = 4) -> str | None:
    """What is wrong with it; None if nothing is.

    Raises:
        GgradError: it cannot be built.
    """
    try:
        check(program, repeats=repeats)
    except Found as found:
        return str(found)
    return None


def explain(program: Program, fault: str) -> str:
    """The shrunk program, as Python, and what is wrong with it."""
    kind = fault.split(":")[0]

    def fails(candidate: Program) -> bool:
        repeats = 40 if kind == "bits" else 1
        found = fault_of(candidate, repeats)
        return found is not None and found.split(":")[0] == kind

    small = shrink(program, fails)
    return f"# {fault_of(small, 40) or fault}\n{small.text()}"


def run(seed: int, minutes: float | None, count: int | None, out=sys.stdout) -> int:
    """Programs of this seed and those that follow, until the time is up, as many are tried, or Ctrl-C.  Returns how
    many had a fault, each of which is printed."""
    began, faults, tried = time.monotonic(), 0, 0
    ops: Counter[str] = Counter()
    print(f"seed {seed}", file=out, flush=True)
    try:
        while (count is None or tried < count) and (minutes is None or time.monotonic() - began < 60 * minutes):
            this = seed + tried
            if sys.stderr.isatty():  # the last thing to be read should the process end
                print(f"\rseed {this}", end="", file=sys.stderr, flush=True)
            program = random_program(this)
            ops.update(step.op for step in program.steps if isinstance(step, Call))
            fault = fault_of(program)
            tried += 1
            if fault is not None:
                faults += 1
                print(f"\nFAULT of seed {this}: {fault}\n{explain(program, fault)}", file=out, flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=out, flush=True)
    seconds = time.monotonic() - began
    print(
        f"{tried} programs, {sum(ops.values())} nodes of {len(ops)} ops, {faults} with a fault, in {seconds:.0f} s; "
        f"go on with --seed {seed + tried}",
        file=out,
        flush=True,
    )
    return faults


__all__ = ["Found", "check", "check_one", "explain", "fault_of", "run"]
