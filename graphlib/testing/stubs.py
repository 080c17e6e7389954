"""What type checkers and editors see of the ops: a stub made from their declarations.

python -m ggrad.testing.stubs            prints it
python -m ggrad.testing.stubs --write    writes ops/__init__.pyi, which a test compares
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from pathlib import Path

from .. import ops
from ..core.op import Op, Record, Wanted
from ..core.tensor import Tensor
from ..files.atomic import write_whole
from . import cases
from .check import node_of, results_of

HEADER = '''"""The ops, by family: made from their declarations by `python -m ggrad.testing.stubs --write`."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import F32, DType
from ..core.tensor import Tensor
'''


def stub() -> str:
    """The text of the stub."""
    imports, declared = [], []
    for name in sorted(ops.__all__):
        value = getattr(ops, name)
        if isinstance(value, Op):
            imports.extend(_imports(value))
            declared.append(_declaration(name, value))
        elif inspect.isfunction(value) or inspect.isclass(value):
            imports.append(f"from {_relative(value.__module__)} import {name} as {name}")
        else:
            declared.append(f"{name}: Any")
    names = "".join(f"    {name!r},\n" for name in sorted(ops.__all__))
    lists = f"\nCOMMON: frozenset[str]\n__all__ = [\n{names}]\n"
    return "\n".join([HEADER + "\n".join(sorted(set(imports))), lists, *declared]) + "\n"


def _relative(module: str) -> str:
    inside = module.removeprefix(f"{ops.__name__}.")
    return f".{inside}" if inside != module else ".." + module.partition(".")[2]


def _declaration(name: str, op: Op) -> str:
    doc = textwrap.indent(inspect.cleandoc(op.__doc__ or ""), "    ").strip()
    doc = doc.replace("\\", "\\\\")
    close = "\n    " if "\n" in doc else ""
    return f'def {name}{_signature(op)}:\n    """{doc}{close}"""\n'


def _signature(op: Op) -> str:
    if op.called is not None:
        return _signature_of_call(op.called)
    texts, defaulted, starred = [], False, op.variadic
    for p in inspect.signature(op.infer).parameters.values():
        if p.kind is p.KEYWORD_ONLY and defaulted and p.default is p.empty and not starred:
            texts.append("*")  # otherwise attributes may follow the inputs by position
            starred = True
        defaulted = defaulted or p.default is not p.empty
        texts.append(_parameter(p, op))
    return f"({', '.join(texts)}) -> {_result(op)}"


def _signature_of_call(function: Callable) -> str:
    """As it is written: annotations are text in the modules of ops."""
    texts, starred = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            texts.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = "*" if p.kind is p.VAR_POSITIONAL else ""
        default = "" if p.default is p.empty else f" = {_literal(p.default)}"
        texts.append(f"{star}{p.name}: {p.annotation}{default}")
    return f"({', '.join(texts)}) -> {function.__annotations__['return']}"


def _imports(op: Op) -> list[str]:
    """Of the classes that the signature names, and the package does not offer."""
    if op.called is None:
        classes = [c for c in op.attr_types.values() if _is_record(c)]
    else:
        words = set(re.findall(r"\w+", " ".join(op.called.__annotations__.values())))
        classes = [c for word in words if inspect.isclass(c := op.called.__globals__.get(word))]
    return [
        f"from {_relative(c.__module__)} import {c.__name__}"
        for c in classes
        if c.__module__.startswith(f"{ops.__name__}.") and c.__name__ not in ops.__all__
    ]


def _is_record(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Record)


def _parameter(p: inspect.Parameter, op: Op) -> str:
    if p.kind is p.VAR_POSITIONAL:
        return f"*{p.name}: Tensor | ArrayLike" + (" | None" if p.default is None else "")
    if p.kind is not p.KEYWORD_ONLY:
        return f"{p.name}: Tensor | ArrayLike" + ("" if p.default is p.empty else " | None = None")
    default = "" if p.default is p.empty else f" = {_literal(p.default)}"
    return f"{p.name}: {_type(op.attr_types[p.name])}{default}"


def _type(annotation: object) -> str:
    if annotation in (int, float, bool, str):
        return annotation.__name__
    if annotation is Wanted:
        return "Sequence[bool]"
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "enum.IntEnum | str | int"
    origin = typing.get_origin(annotation)
    if origin is tuple:
        inner = typing.get_args(annotation)
        return f"Sequence[{_type(inner[0])}]" if len(inner) == 2 and inner[1] is ... else "Sequence[Any]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(a) for a in typing.get_args(annotation)))
    if isinstance(annotation, type) and annotation.__name__ == "DType":
        return "DType"
    if _is_record(annotation):
        return annotation.__name__  # type: ignore[attr-defined]
    if annotation is tuple:
        return "Sequence[Any]"
    if callable(annotation) and "Callable" in str(annotation):
        return "Callable[..., Any]"
    return "Any"


def _literal(value: object) -> str:
    if isinstance(value, enum.Enum) or not isinstance(value, (bool, int, float, str, tuple, type(None))):
        return "..."
    text = repr(value)
    return "..." if re.search(r"\b(inf|nan)\b", text) else text


def _result(op: Op) -> str:
    if op.chooses:
        return "tuple[Any, ...]"
    for build in cases.CASES.get(op.name, {}).values():
        return "tuple[Tensor, ...]" if node_of(results_of(build)).parts else Tensor.__name__
    return "Any"


def path() -> Path:
    """Where the stub lies."""
    return Path(ops.__file__).with_suffix(".pyi")


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        write_whole(path(), stub().encode())
    else:
        print(stub(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
