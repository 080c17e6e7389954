"""What a kernel in Python becomes before it is compiled: the text of a function over blocks that calls the body."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.tensor import MAX_DIMS

if TYPE_CHECKING:
    from .kernel import Kernel


@dataclass(frozen=True)
class Array:
    """One positional parameter of the body, as the compiler sees it; its words are names in `lowering`."""

    side: str  # DST or SRC
    index: int
    dims: int
    dtype: str  # FLOAT32 or INT32
    layout: str  # ANY, ROWS or CONTIGUOUS


def attribute_type(annotation) -> str:
    """How the body sees an attribute: FLOAT, INT, BOOL, ENUM or TUPLE."""
    if typing.get_origin(annotation) is tuple:
        return "TUPLE"
    return {float: "FLOAT", int: "INT", bool: "BOOL"}.get(annotation, "ENUM")


def source_of(kernel: Kernel, arrays: tuple[Array, ...]) -> str:
    """The text of the function that runs a range of tasks: all but the body, which it calls."""
    lead = [MAX_DIMS - a.dims for a in arrays]
    n = lead[0] if kernel.tasks is None else 0
    arguments = []
    for a, own in zip(arrays, lead, strict=True):
        # its leading axis j is axis j + n - own of the blocks; those beyond have size 1
        at = [f"i{j + n - own}" if j + n - own >= 0 else "0" for j in range(own)]
        index = "".join(f"{i}, " for i in at)
        arguments.append(f"block(call, {a.side}, {a.index}, {a.dims}, {a.dtype}, {a.layout}, {n}, ({index}))")
    for name in kernel.keywords:
        if name == "task":
            arguments.append("task")
        elif name == "tasks":
            arguments.append("task_count(call, stage)")
        elif name in ("stage", "work", "scratch"):
            arguments.append({"stage": "stage", "work": "work_of(call)", "scratch": "scratch_of(call, scratch)"}[name])
        else:
            offset = kernel.op.record.fields[name][1]  # type: ignore[index]
            arguments.append(f"attribute(call, {offset}, {attribute_type(kernel.op.attr_types[name])})")
    call = f"body({', '.join(arguments)})"
    if kernel.tasks is not None:
        return f"def run(call, stage, begin, end, scratch):\n    for task in range(begin, end):\n        {call}\n"
    sizes = [f"n{j}" for j in range(n)]
    lines = ["def run(call, stage, begin, end, scratch):"]
    lines += [f"    n{j} = blocks(call, {j})" for j in range(n)]
    lines += [f"    last = smaller(end * grain(call), {' * '.join(sizes) or '1'})", "    at = begin * grain(call)"]
    rest = "at"
    for j in reversed(range(n)):  # where the first block is
        if j == 0:
            lines.append(f"    i0 = {rest}")
        else:
            lines += [f"    r{j} = {rest} // larger(n{j}, 1)", f"    i{j} = {rest} - r{j} * n{j}"]
            rest = f"r{j}"
    lines += ["    while at < last:", f"        {call}", "        at += 1"]
    if n:
        lines.append(f"        i{n - 1} += 1")
    indent = "        "
    for j in reversed(range(1, n)):  # and from each to the next
        lines += [f"{indent}if i{j} == n{j}:", f"{indent}    i{j} = 0", f"{indent}    i{j - 1} += 1"]
        indent += "    "
    return "\n".join(lines) + "\n"
