"""The README's code does what the README says, and its numbers are those that were measured."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.native
def test_twenty_lines_learn(capsys):
    scope: dict = {}
    exec(BLOCKS[0], scope)
    printed = capsys.readouterr().out
    assert scope["loss"].item() < 0.5 * np.log(2)
    assert "(32, 2)" in printed and "activations" in printed
    assert len(BLOCKS[0].splitlines()) <= 26


def test_the_op_shown_is_declared_as_shown():
    scope: dict = {"gg": gg, "np": np}
    exec(BLOCKS[1], scope)
    t = gg.Graph().build_forward_expand(y := scope["softsign"](gg.tensor([1.0, -3.0]), sharpness=2.0))
    t.compute(backend="reference")
    np.testing.assert_allclose(y.numpy(), [1 / 3, -3 / 7])


def test_a_kernel_is_checked_as_shown(capsys):
    def my_attention(q, k, v, d, **options):
        return gg.testing.attention_reference(q, k, v, d, **options, dtype=np.float32)

    exec(BLOCKS[2], {"gg": gg, "my_attention": my_attention})
    assert "share" in capsys.readouterr().out


def report_program():
    """tests/bench/report.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "tests" / "bench" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_speed_are_made_of_what_was_measured():
    report = report_program()
    results = json.loads(report.RESULTS.read_text())
    for path, tables in ((report.README, report.headline(results)), (report.SPEED, report.report(results))):
        text = path.read_text()
        assert report.placed(text, tables) == text, "run python tests/bench/report.py"
        other = text.replace("elementwise chain", "chain of elements")
        assert other != text and report.placed(other, tables) == text
