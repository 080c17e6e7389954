"""Breaks the project on purpose, one small change at a time, and sees whether the quick tests notice.

    python -P tests/mutate.py --count 300                      of ops/, the engine and csrc/
    python -P tests/mutate.py --count 50 --only csrc --seed 7
    python -P tests/mutate.py --replay FILE:LINE --seed 7      the mutants of one line

Works in a copy of the project.  Of each mutant the tests that belong to its file run first, those of everything after,
and the first failure ends it.  Mutants that do not compile, or are compiled to the same machine code, do not count.
Prints each survivor as a diff.  Exit status 1 if fewer than 95 % were killed.  Not run by CI: an hour has about 200.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
GOAL = 0.95
SECONDS = 400  # of CPU, that the tests of one mutant may take: it hangs if it needs more

# Not the engine: what only checks, shows, or reads and writes files.
BESIDE = re.compile(r"__init__|/(testing|files|nn|models|distributed|torch|jax|onnx)/|(show|former|extras|data)\.py")

# What belongs to a file, by its stem, beside the cases of its ops.
BELONGS = {
    "op": ["tests/test_graph.py -k not 50000", "tests/test_plan.py"],
    "tensor": ["tests/test_graph.py -k not 50000", "tests/test_plan.py"],
    "graph": ["tests/test_graph.py -k not 50000", "tests/test_autodiff.py"],
    "dtype": ["tests/test_graph.py -k not 50000", "tests/test_quant.py"],
    "native": ["tests/test_runtime.py", "tests/test_threads.py", "tests/test_import.py"],
    "autodiff": ["tests/test_autodiff.py", "tests/test_recompute.py"],
    "recompute": ["tests/test_recompute.py"],
    "plan": ["tests/test_plan.py", "tests/test_invariants.py"],
    "waves": ["tests/test_waves.py", "tests/test_invariants.py"],
    "session": [
        "tests/test_graph.py -k not 50000",
        "tests/test_frozen.py",
        "tests/test_runtime.py",
        "tests/test_profile.py",
    ],
    "profile": ["tests/test_profile.py"],
    "callback": ["tests/test_custom.py"],
    "optim": ["tests/test_optim.py", "tests/test_opt_steps.py"],
    "schedule": ["tests/test_optim.py", "tests/test_train.py"],
    "trainer": ["tests/test_train.py"],
    "quant": ["tests/test_quant.py"],
    "kernel": ["tests/test_kernel.py"],
    "lowering": ["tests/test_kernel.py"],
    "objects": ["tests/test_kernel.py"],
    "runtime": ["tests/test_threads.py", "tests/test_runtime.py", "tests/test_waves.py"],
    "signals": ["tests/test_interrupts.py", "tests/test_threads.py"],
    "turns": ["tests/test_interrupts.py", "tests/test_threads.py"],
    "finite": ["tests/test_finite.py"],
    "reference": ["tests/test_graph.py -k not 50000", "tests/test_runtime.py"],
    "optim_steps": ["tests/test_opt_steps.py"],
    "kda": ["tests/test_kda.py"],
    "attention": ["tests/test_attention.py"],
    "attention_back": ["tests/test_attention.py"],
    "sparse_mla": ["tests/test_sparse_mla.py"],
    "sparse_mla_grad": ["tests/test_sparse_mla.py"],
    "loss": ["tests/test_loss.py"],
    "mul_mat": ["tests/test_matmul.py", "tests/test_frozen.py"],
    "dropout": ["tests/test_dropout.py"],
    "norm": ["tests/test_norm.py"],
    "reduce": ["tests/test_reduce.py"],
    "scan": ["tests/test_scan.py"],
}
OF_FOLDER = {  # what the headers of a folder are for
    "gemm": ("mul_mat", "conv", "solve"),
    "attention": ("flash", "sparse"),
    "recurrent": ("kda", "delta", "selective"),
    "vec": (
        "exp",
        "silu",
        "gelu",
        "dropout",
        "get_rows",
        "cast",
        "mul_mat",
        "xielu",
        "soft_max",
        "sin",
        "cos",
        "log",
        "tanh",
    ),
    "walk": ("add", "cont", "sum", "repeat", "norm", "soft_max", "rms_norm"),
}
EVERYTHING = [
    "tests/test_graph.py tests/test_autodiff.py tests/test_plan.py tests/test_optim.py tests/test_quant.py",
    "tests/test_errors.py tests/test_loss.py tests/test_norm.py tests/test_waves.py tests/test_recompute.py",
    "tests/test_golden.py tests/test_ggml_values.py tests/test_nan.py tests/test_accuracy.py tests/test_runtime.py",
    "tests/test_train.py tests/test_custom.py tests/test_frozen.py tests/test_matmul.py tests/test_profile.py",
    "tests/test_fuzz.py tests/test_ops.py tests/test_long_sums.py tests/test_unwanted.py tests/test_calls.py",
]

# Changed lines that mean the same, and why no test can tell: they do not count.
EQUIVALENT = {
    "x = np.asarray(values, np.float32).reshape(-2, dtype.block)": "NumPy takes any negative size for the one it finds",
    "hardswish.reference(np_silenced(lambda x: np.select([x <= -3, x > 3], [0, x], x * ((x + 3) / 6))))": "3 at 3",
    "for (int j = 0; j <= vectors; j++) c[m][j] = vf_zero();": "what is cleared too is cleared next, or not read",
    "for (int64_t i = 0; i <= gg_min(R, count); i++) {": "the row beyond is none, that of an id beyond is known",
    "for (int64_t i = 0; i < gg_min(count, R); i++) {": "the smaller of two",
    "for (int i = 0; i < N_ISAS; i++) has[i] = has[i] || isas[i].kernels != NULL;": "on a CPU with all sets",
}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: `text` in place of bytes [begin, end)."""

    path: str
    begin: int
    end: int
    text: str
    kind: str

    def apply(self, source: str) -> str:
        return source[: self.begin] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        return "\n".join(
            line
            for line in difflib.unified_diff(
                source.splitlines(), self.apply(source).splitlines(), self.path, self.path, lineterm="", n=1
            )
            if not line.startswith(("---", "+++"))
        )

    def changed_line(self, source: str) -> str:
        """The line as it is then."""
        changed = self.apply(source)
        begin = changed.rfind("\n", 0, self.begin) + 1
        return changed[begin : changed.find("\n", self.begin)].strip()

    def line(self, source: str) -> int:
        return source.count("\n", 0, self.begin) + 1


# -- Python -------------------------------------------------------------------------------------------------------

SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "+", ast.And: "or", ast.Or: "and", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip


class PythonMutants(ast.NodeVisitor):
    """All mutants of a module.  What only words an error is left alone, and so are types."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts, self.lines = starts, source.splitlines(keepends=True)
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def put(self, begin: int, end: int, text: str, kind: str) -> None:
        self.found.append(Mutant(self.path, begin, end, text, kind))

    def between(self, left: ast.AST, right: ast.AST, new: str, kind: str) -> None:
        """An operator between two operands is another one."""
        begin, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[begin:end]
        operator = re.search(r"[^\s()\\]+(?:\s+(?:in|not))?", gap)
        if operator:
            self.put(begin + operator.start(), begin + operator.end(), new, kind)

    def visit_Raise(self, node) -> None:
        pass

    def visit_JoinedStr(self, node) -> None:
        pass

    def visit_AnnAssign(self, node) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        begin, end = self.span(node.test)
        self.put(begin, end, f"not ({self.source[begin:end]})", "condition")
        self.generic_visit(node)

    def visit_FunctionDef(self, node) -> None:
        if node.name in ("__repr__", "__str__", "label"):
            return
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for decorator in node.decorator_list:
            self.visit(decorator)
        for statement in node.body:
            self.visit(statement)

    def visit_Compare(self, node) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            if type(op) in SWAPS:
                self.between(left, right, SWAPS[type(op)], "comparison")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node) -> None:
        if type(node.op) in SWAPS:
            self.between(node.left, node.right, SWAPS[type(node.op)], "operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, SWAPS[type(node.op)], "and/or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node) -> None:
        begin, _ = self.span(node)
        inner, _ = self.span(node.operand)
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.put(begin, inner, "", "sign")
        self.generic_visit(node)

    def visit_Constant(self, node) -> None:
        begin, end = self.span(node)
        value = node.value
        if isinstance(value, bool):
            self.put(begin, end, str(not value), "constant")
        elif isinstance(value, int):
            self.put(begin, end, str(value + 1), "constant")
        elif isinstance(value, float):
            self.put(begin, end, repr(value * 1.5 if value else 1.0), "constant")

    def visit_Expr(self, node) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            self.put(*self.span(node), "pass", "dropped")
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in ("ensure", "_must"):
            self.visit(node.value.args[0])  # what follows words the error
            return
        self.generic_visit(node)

    def visit_AugAssign(self, node) -> None:
        self.put(*self.span(node), "pass", "dropped")
        self.generic_visit(node)

    def visit_Call(self, node) -> None:
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            (b0, e0), (b1, e1) = self.span(node.args[0]), self.span(node.args[1])
            one, two = self.source[b0:e0], self.source[b1:e1]
            if one != two:
                self.put(b0, e1, two + self.source[e0:b1] + one, "swapped")
        self.generic_visit(node)


# -- C ------------------------------------------------------------------------------------------------------------

C_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
    "+=": "-=", "-=": "+=", "/": "*", "%": "/",
}  # fmt: skip
C_HIDDEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
C_BINARY = re.compile(r"(?<=[\w)\]]) (<=|>=|==|!=|&&|\|\||\+=|-=|<|>|\+|-|/|%) (?=[\w(&*!-])")
C_NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
C_STATEMENT = re.compile(r"^[ \t]+((?:[\w.\[\]>*-]+ [+*-]?= |[a-z_]+\()[^;{}\n]*;)[^\n]*$", re.M)
C_PAIR = re.compile(r"\b[a-z_]\w*\((\w[\w.>-]*), (\w[\w.>-]*)(?=[,)])")
C_MULTIPLY = re.compile(r"(?<=[\w)\]]) \* (?=[\w(])")


def c_mutants(path: str, source: str) -> list[Mutant]:
    blank = C_HIDDEN.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)
    found = [Mutant(path, m.start(1), m.end(1), C_OPERATORS[m.group(1)], "operator") for m in C_BINARY.finditer(blank)]
    found += [Mutant(path, m.start() + 1, m.end() - 1, "/", "operator") for m in C_MULTIPLY.finditer(blank)]
    found += [Mutant(path, m.start(), m.end(), str(int(m.group()) + 1), "constant") for m in C_NUMBER.finditer(blank)]
    found += [Mutant(path, m.start(1), m.end(1), ";", "dropped") for m in C_STATEMENT.finditer(blank)]
    found += [
        Mutant(path, m.start(1), m.end(2), f"{m.group(2)}, {m.group(1)}", "swapped")
        for m in C_PAIR.finditer(blank)
        if m.group(1) != m.group(2)
    ]
    return found


# -- the copy and its tests ---------------------------------------------------------------------------------------


class Copy:
    """A copy of the project, installed by being first on the path."""

    def __init__(self, where: Path) -> None:
        self.root = where
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.split():
            if (ROOT / name).is_file():
                (where / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, where / name)
        self.package = where / "path" / "ggrad"
        self.package.mkdir(parents=True)
        for part in sorted((where / "graphlib").iterdir()):
            (self.package / part.name).symlink_to(part)
        (self.package / "ops").symlink_to(where / "ops")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(where / "path"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(where / "hypothesis"),
        }
        if shutil.which("ccache") and "CC" not in os.environ:
            self.environment["CC"] = "ccache cc"
        self.right: set[str] = set()
        self.flawed: set[str] = set()
        self.built = self.build()
        assert self.built, "the project itself does not build"

    def build(self) -> str | None:
        """Builds the native module.  Returns a digest of its machine code, None if it does not compile."""
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built", "--build-temp", "objects"],
            cwd=self.root, env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        made = sorted((self.root / "built").rglob("_native*.so"))
        if done.returncode or not made or "could not be built" in done.stdout + done.stderr:
            return None
        target = self.package / made[0].name
        target.unlink(missing_ok=True)
        shutil.copy(made[0], target)
        return hashlib.sha256(made[0].read_bytes()).hexdigest()

    def fails(self, tests: str) -> str | None:
        """The first test of these that fails, or how the run ended; None if all pass."""

        def limits() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
            resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))

        if tests in self.flawed:
            return None
        command = [sys.executable, "-P", "-m", *tests.split()]
        if tests.startswith("tests/"):
            files, _, names = tests.partition(" -k ")
            listed = [files] if "::" in files else files.split()
            there = [name for name in listed if (self.root / name.partition("::")[0]).exists()]
            if not there:
                return None
            command[3:] = ["pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
            command += [
                "--tb=no",
                *there,
                *(["-k", names] if names else []),
                *(f"--deselect={name}" for name in self.flawed),
            ]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=self.environment, capture_output=True, text=True, preexec_fn=limits,
                timeout=20 * SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "hangs"
        if done.returncode in (0, 5) or (done.returncode == 4 and "not found" in done.stdout + done.stderr):
            return None  # 4, 5: no test of that name
        failed = re.search(r"^(?:FAILED|ERROR|FAULT) (\S.*)$", done.stdout, re.M)
        return failed.group(1)[:300] if failed else f"ends with {done.returncode} ({tests[:40]})"

    def is_right(self, tests: str, failed: str) -> bool:
        """Whether what has failed passes where nothing was changed; else it is left out from now on."""
        name = failed.partition(" - ")[0]
        alone = name if "::" in name else tests
        if self.fails(alone) is None:
            self.right.add(failed if "::" in name else tests)
            return True
        print(f"{alone} fails in the project as it is", flush=True)
        self.flawed.add(alone)
        return False


def ops_of(path: str, source: str) -> list[str]:
    """The ops that a file declares, or whose kernels it holds."""
    from ggrad import ops
    from ggrad.core.op import registry
    from ggrad.testing.cases import CASES, COMPOSED

    if path.startswith("csrc/"):
        said = set(re.findall(r"\w+", source))
        beside = OF_FOLDER.get(Path(path).parent.name, ())
        return [name for name in CASES if name in said or any(name.startswith(b) for b in beside)]
    module = f"ggrad.{path.removesuffix('.py').replace('/', '.')}"
    made_of = [name for name in COMPOSED if getattr(getattr(ops, name, None), "__module__", "") == module]
    return [name for name, op in registry.items() if op.__module__ == module] + made_of


def tests_of(path: str, source: str, near: bool) -> Iterator[str]:
    names = "".join(f" -o {name}" for name in dict.fromkeys(ops_of(path, source)))
    if path.startswith(("ops/", "csrc/")) and names:
        yield f"ggrad.check test{names}"
        if path.startswith("ops/"):
            yield f"ggrad.check grad{names}"
            yield "tests/test_defaults.py"
            yield f"tests/test_errors.py -k {names.removeprefix(' -o ').replace(' -o ', ' or ')} or indices"
    yield "ggrad.check fuzz --seed 0 --count 40"
    yield from BELONGS.get(Path(path).stem, [])
    if not near:
        yield from EVERYTHING


def files_of(group: str) -> list[str]:
    pattern = {"ops": "ops/**/*.py", "engine": "graphlib/**/*.py", "csrc": "csrc/**/*.[ch]"}[group]
    paths = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    if group == "engine":
        return [path for path in paths if not BESIDE.search(path)]
    return [path for path in paths if not path.endswith(("build.py", "__init__.py"))]


def mutants_of(path: str) -> list[Mutant]:
    source = (ROOT / path).read_text()
    return c_mutants(path, source) if path.endswith((".c", ".h")) else PythonMutants(path, source).found


def verdict(copy: Copy, mutant: Mutant, near: bool) -> tuple[str, str]:
    """("killed", by what), ("survived", "") or ("void", why)."""
    target = copy.root / mutant.path
    source = target.read_text()
    changed = mutant.apply(source)
    native = mutant.path.startswith("csrc/")

    if (why := EQUIVALENT.get(mutant.changed_line(source))) is not None:
        return "void", f"means the same: {why}"

    def put(text: str) -> str | None:
        target.write_text(text)
        return copy.build() if native else copy.built

    try:
        built = put(changed)
        if built is None:
            return "void", "does not compile"
        if native and built == copy.built:
            return "void", "the same machine code"
        if not native:
            try:
                if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
                    return "void", "the same program"
            except (SyntaxError, tokenize.TokenError):
                return "void", "does not compile"
        for tests in dict.fromkeys(tests_of(mutant.path, source, near)):
            while (by := copy.fails(tests)) is not None:
                if by in copy.right or tests in copy.right:
                    return "killed", by
                put(source)
                if copy.is_right(tests, by):
                    return "killed", by
                put(changed)
        return "survived", ""
    finally:
        assert put(source) == copy.built


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants that count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["ops", "engine", "csrc"], action="append")
    parser.add_argument("--replay", metavar="FILE:LINE", help="every mutant of a line, instead of random ones")
    parser.add_argument("--near", action="store_true", help="only the tests that belong to a file, and random programs")
    parser.add_argument("--log", type=Path, help="a line of JSON for each mutant")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    killed, survivors, void = 0, [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for mutant in chosen(options, rng):
            source = (copy.root / mutant.path).read_text()
            result, why = verdict(copy, mutant, options.near)
            void += result == "void"
            killed += result == "killed"
            if result == "survived":
                survivors.append(mutant)
            print(f"{result:9}{mutant.path}:{mutant.line(source)} {mutant.kind}  {why}", flush=True)
            if result == "survived":
                print(mutant.diff(source), flush=True)
            if options.log:
                with options.log.open("a") as log:
                    entry = {"result": result, "why": why, "kind": mutant.kind, "diff": mutant.diff(source)}
                    log.write(json.dumps({"at": f"{mutant.path}:{mutant.line(source)}", **entry}) + "\n")
            if not options.replay and killed + len(survivors) >= options.count:
                break
    counted = killed + len(survivors)
    print(f"{counted} mutants, {killed} killed ({100 * killed / max(1, counted):.1f} %), {void} more do not count")
    return 0 if killed >= GOAL * counted else 1


def chosen(options: argparse.Namespace, rng: random.Random) -> Iterator[Mutant]:
    """Mutants at random: each group as often, a file in proportion to what there is to change in it."""
    if options.replay:
        path, _, line = options.replay.rpartition(":")
        source = (ROOT / path).read_text()
        yield from (m for m in mutants_of(path) if m.line(source) == int(line))
        return
    groups = {
        g: [m for path in files_of(g) for m in mutants_of(path)] for g in options.only or ("ops", "engine", "csrc")
    }
    seen: set[Mutant] = set()
    while True:
        for of_group in groups.values():
            mutant = rng.choice(of_group)
            if mutant not in seen:
                seen.add(mutant)
                yield mutant


if __name__ == "__main__":
    sys.exit(main())
