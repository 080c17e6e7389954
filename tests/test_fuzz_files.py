"""Damaged files of every format are read right or refused; and the fuzzer would tell if they were not."""

import numpy as np
import pytest

from ggrad.testing import check, fuzz_files
from ggrad.testing.fuzz_files import FORMATS, Format, damaged, fuzz


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_right_or_refused(name):
    happened = fuzz(name, 100_000, seed=1)
    assert not [what for what in happened if what.startswith("FOUND")], happened
    # Where a checksum covers all, little more than files that no damage was done to is read.
    assert happened["read"] > 10 and happened["refused"] > 10_000, happened


def test_the_fuzzer_tells_and_keeps_what_it_finds(tmp_path, monkeypatch, capsys):
    def careless(blob: bytes) -> str | None:
        return "a wrong magic" if blob[:4] != b"GGUF" else str(blob[5000]) and None  # an IndexError

    monkeypatch.setitem(FORMATS, "careless", lambda: Format([(b"GGUF" + bytes(60), 8)], careless))
    happened = fuzz("careless", 100, seed=2, keep=tmp_path)
    assert set(happened) == {"FOUND a wrong magic", "FOUND IndexError"}
    assert len(list(tmp_path.iterdir())) == 2
    arguments = ["fuzz-files", "--count", "100", "--keep", str(tmp_path)]
    assert check.main([*arguments, "--format", "careless"]) == 1
    assert check.main([*arguments, "--format", "gguf", "--seed", "3"]) == 0
    assert "gguf, seed 3: " in capsys.readouterr().out


def test_damage_follows_from_the_seed_and_is_of_many_kinds():
    whole = bytes(range(200))
    first, again = ([damaged(whole, 50, np.random.default_rng(s)) for s in range(300)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 250 and len({len(b) for b in first}) > 30


def test_a_reader_without_a_rule_is_found(monkeypatch):
    monkeypatch.setattr(fuzz_files.checkpoint, "_checksum", lambda stored, metadata: metadata.get("x", "0" * 64))
    assert [what for what in fuzz("checkpoint", 3000, seed=1) if what.startswith("FOUND")]
