"""The floors of csrc: a file includes what lies on its own floor or below, by its path from csrc."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

# Each folder, and the folders that its files may include beside their own.  What all kernels include knows no family's
# attributes: so a new one rebuilds its family alone.
FLOORS = {
    "abi": [],
    "abi/attrs": [],
    "vec": ["abi"],
    "walk": ["abi", "vec"],
    "gemm": ["abi", "vec", "walk"],
    "attention": ["abi", "abi/attrs", "vec", "walk", "gemm"],
    "recurrent": ["abi", "abi/attrs", "vec", "walk", "gemm"],
    "kernels": ["abi", "abi/attrs", "vec", "walk", "gemm", "attention", "recurrent"],
    "runtime": ["abi"],
}


def arrows_upward(folder: Path) -> list[str]:
    """Every line that includes what it must not, as file:line: text."""
    wrong = []
    for file in sorted(folder.rglob("*.[ch]")):
        here = file.relative_to(folder)
        floor = here.parent.as_posix()
        for number, line in enumerate(file.read_text().splitlines(), 1):
            included = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if included is None:
                continue
            there = Path(included[1]).parent.as_posix()
            if there not in (floor, *FLOORS.get(floor, ())) or not (folder / included[1]).is_file():
                wrong.append(f"csrc/{here.as_posix()}:{number}: {line.strip()}")
    return wrong


def test_every_file_lies_on_a_floor():
    assert {path.parent.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.[ch]")} == set(FLOORS)


def test_includes_point_downward():
    assert arrows_upward(CSRC) == []


@pytest.mark.parametrize(
    "line",
    [
        '#include "walk/rows.h"',  # upward
        '  #  include "gemm/tile.h"',
        '#include "simd.h"',  # without its floor
        '#include "../vec/simd.h"',
        '#include "vec/missing.h"',
    ],
)
def test_an_arrow_upward_is_named(tmp_path, line):
    for name in ("walk/rows.h", "gemm/tile.h", "vec/simd.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "vec" / "convert.h").write_text(f'#include "vec/simd.h"\n{line}\n')
    assert arrows_upward(tmp_path) == [f"csrc/vec/convert.h:2: {line.strip()}"]
