"""The tree is the architecture: imports go down its floors, in no ring, and no module touches another's privates."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {ROOT / "graphlib": "ggrad", ROOT / "ops": "ggrad.ops"}

# The floors, from the ground up.  What stands on one floor may also use what stands beside it.
FLOORS = [
    {"core", "_native"},
    {"files"},
    {"jit"},
    {"diff"},
    {"ops"},
    {"compile"},
    {"run"},
    {"show"},
    {"graph"},
    {"call"},
    {"train"},
    {"testing", "nn", "distributed", "mimic"},
    {"models", "torch", "jax", "onnx"},
]
TOP = {"ggrad", "ggrad.former"}  # the list of public names, which everything may ask for the version only
FLOOR_OF = {part: i for i, floor in enumerate(FLOORS) for part in floor}

# Names of others' libraries that begin with an underscore and have no other way to them.
FOREIGN = {"_exit", "_fields", "_getvalue", "_library", "_at_fork_reinit"}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> list[tuple[int, str, bool]]:
    """(line, module, whether it is for type checkers only) of each import of the library's own, wherever it stands."""
    tree = ast.parse(path.read_text())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for_types = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and isinstance(outer.test, ast.Name) and outer.test.id == "TYPE_CHECKING"
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name, id(node) in for_types) for a in node.names if a.name.startswith("ggrad")]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base.partition(".")[0] != "ggrad":
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((node.lineno, full if full in MODULES else base, id(node) in for_types))
    return found


IMPORTS = {name: imports(name, path) for name, path in MODULES.items()}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def line(name: str, number: int) -> str:
    return f"{MODULES[name].relative_to(ROOT)}:{number}"


def is_case(name: str) -> bool:
    """Cases are written as users write: `import ggrad as gg`."""
    return name.startswith("ggrad.testing.cases")


def test_every_module_stands_on_a_floor():
    assert {part_of(name) for name in MODULES} - {"ggrad", "former"} <= set(FLOOR_OF)


def upward() -> list[str]:
    return [
        f"{line(name, number)}: {name} imports {module}, which stands above it"
        for name, found in IMPORTS.items()
        if name not in TOP and not is_case(name)
        for number, module, _ in found
        if module != "ggrad" and FLOOR_OF.get(part_of(module), 99) > FLOOR_OF[part_of(name)]
    ]


def rings() -> list[str]:
    """Each import that leads back to where it stands.  Those for type checkers only may do so, on one floor."""
    graph = {
        name: [(n, m) for n, m, types in found if m in MODULES and m not in ("ggrad", name) and not types]
        for name, found in IMPORTS.items()
        if name not in TOP
    }

    def reaches(start: str, goal: str) -> bool:
        seen, stack = {start}, [start]
        while stack:
            for _, module in graph.get(stack.pop(), ()):
                if module == goal:
                    return True
                if module not in seen:
                    seen.add(module)
                    stack.append(module)
        return False

    return [
        f"{line(name, number)}: {name} imports {module}, which imports {name}"
        for name, found in graph.items()
        for number, module in found
        if reaches(module, name)
    ]


@pytest.mark.quick
def test_imports_go_down():
    assert not upward(), "\n".join(upward())


@pytest.mark.quick
def test_there_is_no_ring():
    assert not rings(), "\n".join(rings())


def test_what_is_wrong_is_named_by_file_and_line(monkeypatch):
    monkeypatch.setitem(IMPORTS, "ggrad.core.dtype", [(7, "ggrad.core.quant", False), (8, "ggrad.graph", True)])
    assert (
        "graphlib/core/dtype.py:7: ggrad.core.dtype imports ggrad.core.quant, which imports ggrad.core.dtype" in rings()
    )
    assert upward() == ["graphlib/core/dtype.py:8: ggrad.core.dtype imports ggrad.graph, which stands above it"]


def privates() -> list[str]:
    """Attributes `x._name` of anything but self, where the module itself gives nothing that name."""
    found = []
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                base = node.value.id if isinstance(node.value, ast.Name) else ""
                if base not in ("self", "cls") and node.attr not in own | FOREIGN:
                    found.append(f"{line(name, node.lineno)}: {base or '...'}.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("ggrad")):
                found += [
                    f"{line(name, node.lineno)}: import {a.name}"
                    for a in node.names
                    if a.name.startswith("_") and not a.name.startswith("__") and a.name != "_native"
                ]
    return found


def test_no_module_touches_anothers_privates():
    assert not privates(), "\n".join(privates())


@pytest.mark.parametrize("source", ["def f(t):\n    return t._secret\n", "from .tensor import _secret\n"])
def test_a_private_name_touched_is_found(monkeypatch, tmp_path, source):
    path = ROOT / "graphlib" / "core" / "dtype.py"
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a: source if self == path else real(self, *a))
    assert any("_secret" in found and "core/dtype.py" in found for found in privates())
