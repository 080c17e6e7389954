"""The documents: links lead somewhere, code in them runs, the site builds without a warning and has every op."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").glob("*.md"))])


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files_that_are_there(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


BLOCKS = [
    pytest.param(code, id=f"{path.stem} {i}")
    for path in PAGES
    if path.name not in ("README.md",)  # test_readme.py runs its blocks, and looks at what they do
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("code", BLOCKS or [pytest.param("", id="none")])
def test_code_in_the_documents_runs(code, tmp_path, monkeypatch):
    for name in re.findall(r"^import (torch|jax)\b", code, re.M):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    exec(code, {"gg": gg, "np": np})


@pytest.mark.parametrize("word", ["core", "diff", "compile", "run", "jit", "train", "files", "testing"])
def test_the_architecture_names_every_layer(word):
    assert (ROOT / "graphlib" / word / "__init__.py").exists()
    assert f"{word}/" in (ROOT / "docs" / "architecture.md").read_text()


def test_every_public_name_is_in_the_documents():
    """Ops are on their families' pages, and what modules offer is documented with them."""
    text = "".join(path.read_text() for path in PAGES)
    others = {name for name in dir(gg) if not name.startswith("_")} - {*gg.ops.__all__}
    assert not [name for name in sorted(others) if not re.search(rf"\b{name}\b", text)]


def test_the_site_has_every_op_and_builds_without_a_warning(tmp_path):
    for name in ("sphinx", "furo", "myst_parser"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(tmp_path / "site")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = "".join(p.read_text() for p in (tmp_path / "site" / "ops").glob("*.html"))
    missing = [
        name for name in gg.ops.__all__ if hasattr(gg, name) and not name.endswith("_back") and f">{name}<" not in pages
    ]
    assert not missing
