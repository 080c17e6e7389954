"""Questions to every op, the library's and one's own.

    python -m ggrad.check test              kernels against references: every layout, 1 to 7 threads
    python -m ggrad.check grad -o rms_norm  gradient rules against difference quotients, in double precision
    python -m ggrad.check perf -o mul_mat   GFLOP/s, or GB/s where the op does not count its operations
    python -m ggrad.check support           which op takes which dtypes and has gradients by which inputs
    python -m ggrad.check fuzz --minutes 60 random graphs of all ops, with everything that must hold of them
    python -m ggrad.check fuzz-files        damaged GGUF files, checkpoints and compiled kernels; see its --help
    python -m ggrad.check accuracy          worst relative errors of functions, losses and norms, as in docs/accuracy.md

`-m MODULE` adds the ops that a module of yours declares: import it, and tell in its CASES what to try them on, as
`ggrad.testing.cases` does.  Exit status: 0 if all is well, 1 if an answer is wrong, 2 if the question was.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from .. import ops
from ..core import native
from ..core.dtype import ALL
from ..core.errors import GgradError, GradientError
from ..core.op import Op, own, part, registry
from ..core.tensor import Tensor
from ..diff.autodiff import depend_on
from ..files.atomic import write_whole
from ..graph import Graph
from ..run.profile import bytes_of
from . import accuracy, fuzz
from .compare import check_gradients, check_kernel, compare_with_reference
from .ggml_support import GGML
from .maker import LAYOUTS, Maker

Build = Callable[[Maker], "Tensor | tuple[Tensor, ...]"]

# -- a case, taken apart ------------------------------------------------------------------------------------


def results_of(build: Build, maker: Maker | None = None) -> tuple[Tensor, ...]:
    """The case's results."""
    made = build(maker or Maker())
    return made if isinstance(made, tuple) else (made,)


def node_of(results: Sequence[Tensor]) -> Tensor:
    """The node that made them."""
    t = results[0]
    return t.src[0] if t.op is part else t  # type: ignore[return-value]


def gradients_of(results: tuple[Tensor, ...], maker: Maker, used: Iterable[int] | None = None) -> dict[int, Tensor]:
    """What the rule of the results' op gives for incoming gradients as the maker lays them out, by input.

    `used` tells of which results there is a gradient; None: of all.
    """
    node = node_of(results)
    graph = Graph().build_forward_expand(*results)
    needed = depend_on(graph.nodes, graph.params)
    douts = [
        maker(*t.shape, param=False) if t.dtype.is_float and (used is None or i in used) else None
        for i, t in enumerate(node.outputs)
    ]
    needs = [s in needed for s in node.src]
    if not any(needs) or not any(d is not None for d in douts):
        return {}
    rule = node.op.vjp(node, douts, needs)  # type: ignore[union-attr]
    return {i: g for i, (g, wanted) in enumerate(zip(rule, needs, strict=True)) if wanted and g is not None}


# -- the list of cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Composed:
    """A public function that is made of ops."""

    name: str


@dataclass(frozen=True)
class Case:
    """A graph that one op, or function made of ops, is tried on."""

    op: Op | Composed
    name: str
    build: Build

    def __str__(self) -> str:
        return f"{self.op.name}: {self.name}"


@dataclass
class Suite:
    """Ops and what they are tried on.

    `rtol`: what kernels may be off, of the largest magnitude.  `large`: what speed is measured on.
    """

    cases: list[Case] = field(default_factory=list)
    rtol: dict[str, float] = field(default_factory=dict)
    large: dict[str, Case] = field(default_factory=dict)

    def add(self, module: ModuleType) -> None:
        """The CASES, COMPOSED, RTOL and PERF of a module like those of `ggrad.testing.cases`.

        Raises:
            GgradError: it has no CASES, or a case of an op that does not exist.
        """
        if not isinstance(getattr(module, "CASES", None), dict):
            raise GgradError(f"{module.__name__} has no CASES: a dict {{op name: {{case name: build}}}}")
        ops_of = registry if module.__name__.startswith(__package__) else {**registry, **own}
        for name, builds in module.CASES.items():
            if name not in ops_of:
                raise GgradError(f"{module.__name__} has cases of {name}, and there is no op of that name")
            self.cases += [Case(ops_of[name], case, build) for case, build in builds.items()]
        for name, builds in getattr(module, "COMPOSED", {}).items():
            self.cases += [Case(Composed(name), case, build) for case, build in builds.items()]
        self.rtol |= getattr(module, "RTOL", {})
        for name, build in getattr(module, "PERF", {}).items():
            self.large[name] = Case(ops_of[name], "at size", build)

    def of(self, names: Sequence[str]) -> Suite:
        """Only these ops.

        Raises:
            GgradError: there is no case of one.
        """
        for name in names:
            if all(case.op.name != name for case in self.cases):
                raise GgradError(f"there is no case of an op {name!r}")
        return Suite([case for case in self.cases if case.op.name in names], self.rtol, self.large)

    def by_op(self) -> dict[Op | Composed, list[Case]]:
        """The cases of each op and function, by name."""
        grouped: dict[Op | Composed, list[Case]] = {}
        for case in sorted(self.cases, key=lambda case: case.op.name):
            grouped.setdefault(case.op, []).append(case)
        return grouped


# -- the questions ------------------------------------------------------------------------------------------


def test(case: Case, rtol: float | None) -> None:
    """Raise `KernelMismatch` unless kernel and gradient kernels do what their references say."""
    for layout in LAYOUTS:
        results = results_of(case.build, Maker(layout))
        compare_with_reference(Graph().build_forward_expand(*results), rtol=rtol)
        if isinstance(case.op, Composed):
            _test_backward(results, layout, rtol)
        elif case.op.has_gradient:
            compare_with_reference(
                Graph().build_forward_expand(*gradients_of(results, Maker(layout, seed=1)).values()), rtol=rtol
            )


def _test_backward(results: tuple[Tensor, ...], layout: str, rtol: float | None) -> None:
    """The same of the gradients by all parameters.  (Of values that are all equal, rounding alone may be left.)"""
    graph = Graph().build_forward_expand(*results)
    if any(p.size for p in graph.params) and any(t.dtype.is_float for t in results) and layout != "stride0":
        check_kernel(lambda: results, backward=True, rtol=rtol)


def grad(case: Case) -> bool:
    """Raise `GradientMismatch` unless the rule is the derivative.  Returns whether there was one to ask about."""
    results = results_of(case.build)
    params = Graph().build_forward_expand(*results).params
    if isinstance(case.op, Op) and not case.op.has_gradient:
        return False
    if not any(p.size for p in params) or not any(t.dtype.is_float for t in results):
        return False
    check_gradients(lambda: results_of(case.build))
    return True


@dataclass(frozen=True)
class Speed:
    """Medians over runs of one node."""

    case: Case
    seconds: float
    flops: int
    nbytes: int

    def __str__(self) -> str:
        rate = (
            f"{self.flops / self.seconds / 1e9:9.2f} GFLOP/s"
            if self.flops
            else f"{self.nbytes / self.seconds / 1e9:9.2f} GB/s"
        )
        return f"{self.case!s:<60}{self.seconds * 1e6:12.1f} us  {rate}"


def perf(case: Case, threads: int, seconds: float) -> Speed:
    """How long the kernel takes, or all kernels of a function that is made of ops."""
    results = results_of(case.build)
    node, graph = node_of(results), Graph().build_forward_expand(*results)
    graph.compute(threads=threads)
    times: list[float] = []
    until = time.monotonic() + seconds
    while not times or time.monotonic() < until:
        profile = graph.compute(threads=threads, profile=True).profile
        mine = profile.spans  # type: ignore[union-attr]
        if isinstance(case.op, Op):
            mine = mine[mine["index"] == profile.nodes.index(node)]  # type: ignore[union-attr]
        times.append(float(mine["end"].max() - mine["begin"].min()) / 1e9 if mine.size else 0.0)
    nodes = [node] if isinstance(case.op, Op) else [t for t in graph.nodes if not t.is_view and t.op is not part]
    flops, nbytes = (sum(count(t) for t in nodes) for count in (lambda t: t.op.count_flops(t), bytes_of))
    return Speed(case, max(statistics.median(times), 1e-9), flops, nbytes)


# -- what is supported --------------------------------------------------------------------------------------


def support(suite: Suite) -> str:
    """A table in Markdown: every op, what it takes, its gradients, its kernel; beside ggml's."""
    rows = [_row_of_op(op, of_one_op) for op, of_one_op in suite.by_op().items() if isinstance(op, Op)]
    functions = (name for name in ops.__all__ if inspect.isfunction(getattr(ops, name)))
    rows += [_row_of_function(name) for name in functions if name not in registry]
    rows.sort()
    here = {name for name, *_ in rows}
    absent = sorted(name for name, gradient in GGML.items() if name not in here)
    header = ("op", "inputs", "gradient by", "kernel", "gradient in ggml")
    lines = [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)]
    if absent:
        lines += [
            "",
            "Of ggml's ops these have no counterpart of the same name: " + ", ".join(f"`{n}`" for n in absent) + ".",
        ]
    return "\n".join(lines)


def _row_of_op(op: Op, of_one_op: Sequence[Case]) -> tuple[str, ...]:
    inputs = ", ".join(f"{name}: {_dtypes(op, i)}" for i, name in enumerate(op.inputs))
    names: list[str] = []
    for case in of_one_op:
        with suppress(GradientError):
            results = results_of(case.build)
            if op.has_gradient:
                names += [op.inputs[min(i, len(op.inputs) - 1)] for i in gradients_of(results, Maker(seed=1))]
    gradient = ", ".join(name for name in op.inputs if name in names) or ("0" if op.has_gradient else "-")
    node = node_of(results_of(of_one_op[0].build))
    kernel = "view" if node.is_view and not node.updates else op.in_python.language if op.in_python is not None else "C"
    return op.name, inputs, gradient, kernel, GGML.get(op.name, "")


def _dtypes(op: Op, i: int) -> str:
    names = [d.name for d in ALL if d in op.dtypes[i]]
    return " ".join(names + ["quantized"] * any(d.quantized for d in op.dtypes[i]))


def _row_of_function(name: str) -> tuple[str, ...]:
    return name, "", "as its parts", "made of other ops", GGML.get(name, "")


# -- the program --------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module.  Returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["fuzz-files"]:
        from . import fuzz_files

        return fuzz_files.main(given[1:])
    options = _parser().parse_args(given)
    try:
        if options.question == "accuracy":
            return accuracy.report(options.op, options.write)
        suite = _suite(options.module, options.op)
        if options.question == "support":
            return _support(suite, options.write)
        if not native.built() and options.question != "grad":
            raise GgradError("ggrad was installed without its C kernels: only 'grad' and 'support' can be asked")
    except (GgradError, ImportError) as error:
        print(f"ggrad.check: {error}", file=sys.stderr)
        return 2
    if options.question == "fuzz":
        seed = options.seed if options.seed is not None else time.time_ns() // 1000 % 10**9
        minutes = options.minutes if options.minutes or options.count else 1.0
        return 1 if fuzz.run(seed, minutes, options.count) else 0
    if options.question == "perf":
        return _perf(suite, options.threads or native.default_threads(), options.seconds)
    return _judge(suite, options.question)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m ggrad.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["test", "grad", "perf", "support", "fuzz", "accuracy"])
    parser.add_argument("-o", "--op", action="append", default=[], metavar="OP", help="only this op; may be repeated")
    parser.add_argument("-m", "--module", action="append", default=[], help="a module with ops of your own, and CASES")
    parser.add_argument("--threads", type=int, help="of perf; default: the cores this process may use")
    parser.add_argument("--seconds", type=float, default=0.2, help="of perf, for each op")
    parser.add_argument("--minutes", type=float, help="of fuzz: when to end; default 1")
    parser.add_argument("--seed", type=int, help="of fuzz: of the first program, which the next ones follow")
    parser.add_argument("--count", type=int, help="of fuzz: how many programs")
    parser.add_argument("--write", type=Path, metavar="FILE", help="support, accuracy: write the table there")
    return parser


def _suite(modules: Sequence[str], names: Sequence[str]) -> Suite:
    suite = Suite()
    for module in ["ggrad.testing.cases", *modules]:
        suite.add(importlib.import_module(module))
    return suite.of(names) if names else suite


def _support(suite: Suite, path: Path | None) -> int:
    table = support(suite)
    if path is None:
        print(table)
    else:
        write_whole(path, f"{HEADER}{table}\n".encode())
    return 0


HEADER = """# Ops

Made by `python -m ggrad.check support --write docs/ops.md`. Gradients by an input: "0" where an op is constant but for
jumps, "-" where there is none. Every float input may be f32, f16 or bf16: of dtypes that
are not listed a copy in f32 is made, and gradients are f32. The last column says what ggml's own backward pass does:
"full", "partial" (not for every layout, shape or input), "aborts" (the process ends), "zero" (of integers and steps),
or nothing where ggml has no such op.

"""


def _perf(suite: Suite, threads: int, seconds: float) -> int:
    print(f"{threads} threads; of ops without a case of a size to measure, the largest")
    for op, of_one_op in suite.by_op().items():
        case = suite.large.get(op.name) or max(of_one_op, key=lambda case: bytes_of(node_of(results_of(case.build))))
        if not node_of(results_of(case.build)).is_view:
            print(perf(case, threads, seconds), flush=True)
    return 0


def _judge(suite: Suite, question: str) -> int:
    began, asked, failures = time.monotonic(), 0, []
    for case in _progress(suite.cases, question):
        try:
            if question == "test":
                test(case, suite.rtol.get(case.op.name))
                asked += 1
            else:
                asked += grad(case)
        except Exception as error:  # whatever an op of the user's does, the others are asked too
            asked += 1
            failures.append(f"FAILED {case}\n    {type(error).__name__}: {error}")
    print(
        "\n".join(
            [*failures, f"{asked - len(failures)} passed, {len(failures)} failed in {time.monotonic() - began:.1f} s"]
        )
    )
    return 1 if failures else 0


def _progress(items: list[Case], question: str) -> Iterator[Case]:
    """The cases, behind a bar where somebody watches: tqdm's, or a plain count without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        for i, case in enumerate(items):
            if sys.stderr.isatty():
                print(f"\r{question}: {i + 1} of {len(items)}", end="", file=sys.stderr, flush=True)
            yield case
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return
    yield from tqdm(items, desc=question, unit="case", disable=None)


if __name__ == "__main__":
    sys.exit(main())
