"""The documentation site: `sphinx-build -W docs docs/_build`.  Pages of ops are made from the ops themselves."""

import inspect
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402

import ggrad  # noqa: E402

project = "ggrad"
copyright = "the ggrad authors"
release = ggrad.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "ggrad"
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_custom_sections = []
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, which the site does not hold


def plain_words(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are written for the eye: `x` is code, |x| an absolute value, *xs stars; and at the head of a module a
    block that is set in is a program."""
    if what == "module":
        text = "\n".join(lines)
        lines[:] = re.sub(r"(^|\n)(\S[^\n]*[^:\n])\n\n(?=    )", r"\1\2\n\n::\n\n", text).split("\n")
    for i, line in enumerate(lines):
        parts = re.split(r"(`+[^`]*`+)", line)
        lines[i] = "".join(
            f"``{part.strip('`')}``" if part.startswith("`") else re.sub(r"([|*_\\])", r"\\\1", part) for part in parts
        )


def signature_of_op(app, what, name, obj, options, signature, returns):
    """An op is an object that is called like a function."""
    if isinstance(obj, ggrad.Op):
        return str(inspect.signature(obj)), ""
    return None


def setup(app) -> None:
    app.connect("autodoc-process-docstring", plain_words, priority=1000)
    app.connect("autodoc-process-signature", signature_of_op)
    pages.write(HERE / "ops")
