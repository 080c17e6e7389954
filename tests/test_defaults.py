"""What a user leaves out is part of what they call: another default gives other numbers, in silence.

`python -P tests/test_defaults.py` writes the list anew, for a change that is meant.
"""

import enum
import inspect
from pathlib import Path

import ggrad as gg
from ggrad.core.op import Op

LIST = Path(__file__).parent / "golden" / "defaults.txt"


def shown(value) -> str:
    return value.name if isinstance(value, (enum.Enum, gg.DType)) else repr(value)


def defaults_of(function) -> str:
    given = [
        f"{p.name}={shown(p.default)}"
        for p in inspect.signature(function).parameters.values()
        if p.default is not inspect.Parameter.empty and p.default is not None
    ]
    return ", ".join(given)


def listed() -> str:
    lines = []
    for name in sorted({*dir(gg), *gg.ops.__all__}):
        made = getattr(gg, name, None) or getattr(gg.ops, name)
        if name.startswith("_") or inspect.ismodule(made) or not (callable(made) or isinstance(made, Op)):
            continue
        if inspect.isclass(made) and issubclass(made, (BaseException, enum.Enum)):
            continue
        if text := defaults_of(made):
            lines.append(f"{name}: {text}")
        if inspect.isclass(made):
            for method, function in sorted(vars(made).items()):
                if not method.startswith("_") and inspect.isfunction(function) and (text := defaults_of(function)):
                    lines.append(f"{name}.{method}: {text}")
    for function in sorted(gg.schedule.__all__ if hasattr(gg.schedule, "__all__") else vars(gg.schedule)):
        made = getattr(gg.schedule, function)
        if inspect.isfunction(made) and not function.startswith("_") and (text := defaults_of(made)):
            lines.append(f"schedule.{function}: {text}")
    return "\n".join(lines) + "\n"


def parsed(text: str) -> dict[str, set[str]]:
    return {name: set(given.split(", ")) for name, _, given in (line.partition(": ") for line in text.splitlines())}


def test_defaults_are_what_they_were():
    """More may come: those of the list are kept."""
    now, before = parsed(listed()), parsed(LIST.read_text())
    changed = {name: given - now.get(name, set()) for name, given in before.items() if given - now.get(name, set())}
    assert not changed


if __name__ == "__main__":
    LIST.write_text(listed())
