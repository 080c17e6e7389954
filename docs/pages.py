"""Writes a page for each family of ops: what it computes, its signature, an example with shapes, its gradients."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import ggrad as gg
from ggrad.testing.cases import CASES, COMPOSED
from ggrad.testing.check import node_of, results_of

HEAD = "# {title}\n\n{about}\n"
ENTRY = """
## {name}

```{{eval-rst}}
.. autofunction:: ggrad.ops.{name}
   :no-index:
```

{example}
"""


def write(folder: Path) -> None:
    """One page a family, and nothing else, in the folder."""
    folder.mkdir(exist_ok=True)
    made = set()
    for module in pkgutil.iter_modules(gg.ops.__path__):
        family = importlib.import_module(f"ggrad.ops.{module.name}")
        names = [name for name in family.__all__ if public(name)]
        if names:
            path = folder / f"{module.name}.md"
            path.write_text(page(module.name, family, names))
            made.add(path)
    for stale in set(folder.glob("*.md")) - made:
        stale.unlink()


def public(name: str) -> bool:
    return hasattr(gg, name) and not name.endswith("_back")


def page(title: str, family, names: list[str]) -> str:
    about, _, rest = (family.__doc__ or "").strip().partition("\n\n")
    entries = [ENTRY.format(name=name, example=example(name)) for name in sorted(names)]
    return HEAD.format(title=title.replace("_", " "), about=" ".join(f"{about} {rest}".split())) + "".join(entries)


def example(name: str) -> str:
    """What a case of the op gives, in shapes; and which inputs have gradients."""
    cases = {**CASES.get(name, {}), **COMPOSED.get(name, {})}
    if not cases:
        return ""
    results = results_of(next(iter(cases.values())))
    shapes = ", ".join(str(t.spec) for t in results)
    node = node_of(results)
    if node.op is None or node.op.name != name:
        return f"Example: a case of it gives `{shapes}`. It is made of other ops, and has their gradients."
    given = ", ".join(str(s.spec) for s in node.src if s is not None)
    gradient = "It has a gradient." if node.op._grad is not None else "It has no gradient."
    return f"Example: `{name}({given})` gives `{shapes}`. {gradient}"
