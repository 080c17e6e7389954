"""Files that the project writes are there whole or not at all, whoever else writes, reads, dies or plants links."""

import json
import os
import stat
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import CheckpointError, FormatError
from ggrad.files.atomic import _beginning, _sweep, open_regular, read_whole, write_whole

safetensors = pytest.importorskip("safetensors.numpy")

ROOT = hasattr(os, "getuid") and os.getuid() == 0


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_new_file_has_the_umasks_mode_and_an_old_one_keeps_its_own(tmp_path):
    path = tmp_path / "f"
    before = os.umask(0o027)
    try:
        write_whole(path, b"a")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write_whole(path, [b"b", b"c"])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert path.read_bytes() == b"bc" and names(tmp_path) == ["f"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("sub/real")
    (tmp_path / "dangling").symlink_to("sub/new")
    for name, target in (("link", "real"), ("dangling", "new")):
        write_whole(tmp_path / name, b"x")
        assert (tmp_path / name).is_symlink() and (tmp_path / "sub" / target).read_bytes() == b"x"


def test_planted_links_are_never_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    tokens = iter(["taken", "free"])
    monkeypatch.setattr("secrets.token_hex", lambda n: next(tokens))
    planted = tmp_path / f"{_beginning(tmp_path / 'f')}taken.unfinished"
    planted.symlink_to(victim)
    write_whole(tmp_path / "f", b"x")
    assert victim.read_bytes() == b"precious" and (tmp_path / "f").read_bytes() == b"x" and planted.is_symlink()


def test_what_cannot_be_replaced_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, error in (("dir", IsADirectoryError), ("pipe", OSError), ("no/f", FileNotFoundError)):
        with pytest.raises(error, match=f"{tmp_path / path}"):  # and not of the new file beside it
            write_whole(tmp_path / path, b"x")
    with pytest.raises(FileNotFoundError):
        write_whole("", b"x")
    assert names(tmp_path) == ["dir", "pipe"]
    write_whole(tmp_path / ("n" * 255), b"x")  # as long as a name may be


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    program = textwrap.dedent(f"""
        import resource, signal
        from ggrad.files.atomic import write_whole
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_whole({str(tmp_path / "f")!r}, b"x" * 10000)
        except OSError as error:
            print(error.errno)
    """)
    (tmp_path / "f").write_bytes(b"old")
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "27"
    assert (tmp_path / "f").read_bytes() == b"old" and names(tmp_path) == ["f"]


def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(FormatError, match="no regular file"):
            open_regular(path)
    (tmp_path / "f").write_bytes(b"abc")
    assert read_whole(tmp_path / "f") == b"abc"


def test_two_writers_and_a_reader_never_see_a_mixture(tmp_path):
    path = tmp_path / "c"
    n, rounds = 40_000, 25

    def leaves(value):
        return [gg.tensor(np.full(n, float(value)), name=name, param=True) for name in "ab"]

    gg.checkpoint.save(path, leaves(1), step=1)
    failed = []

    def save(value):
        try:
            for _ in range(rounds):
                gg.checkpoint.save(path, leaves(value), step=value)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=save, args=(value,)) for value in (1, 2)]
    for w in writers:
        w.start()
    while any(w.is_alive() for w in writers):
        a, b = leaves(0)
        step = gg.checkpoint.load(path, [a, b]).step
        assert (a.numpy() == step).all() and (b.numpy() == step).all()
    for w in writers:
        w.join()
    assert not failed and names(tmp_path) == ["c"]


# -- checkpoints --------------------------------------------------------------------------------------------------


def w(value=1.0, name="w"):
    return gg.tensor(np.full((2, 3), value), name=name, param=True)


def test_every_flipped_bit_is_told_or_changes_nothing(tmp_path):
    path = tmp_path / "c"
    gg.checkpoint.save(path, [w()], step=3, data={"at": [1, 2]}, rng=np.random.default_rng(1), extra={"lr": 0.5})
    whole = path.read_bytes()
    told = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        leaf, rng = w(0.0), np.random.default_rng(7)
        try:
            info = gg.checkpoint.load(path, [leaf], rng=rng)
        except CheckpointError:
            told += 1
            assert not leaf.numpy().any() and rng.bit_generator.state == np.random.default_rng(7).bit_generator.state
            continue
        assert (info.step, info.data, info.extra) == (3, {"at": [1, 2]}, {"lr": 0.5})
        assert (leaf.numpy() == 1).all() and rng.bit_generator.state == np.random.default_rng(1).bit_generator.state
    assert told > 0.95 * len(whole)  # but for spaces in the header


def test_files_without_a_checksum_still_load(tmp_path):
    metadata = {"ggrad": "1", "step": "4", "data": "null", "extra": "{}"}
    safetensors.save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "old", metadata)
    leaf = w(0.0)
    assert gg.checkpoint.load(tmp_path / "old", [leaf]).step == 4 and leaf.numpy().all()
    for key, value in {"step": "1e3", "extra": "[]", "data": "[" * 10**5, "ggrad": "3", "checksum": "abc"}.items():
        safetensors.save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "bad", metadata | {key: value})
        with pytest.raises(CheckpointError):
            gg.checkpoint.load(tmp_path / "bad", [w()])


def test_a_random_state_that_fits_half_way_changes_nothing(tmp_path):
    metadata = {"ggrad": "1", "step": "4", "data": "null", "extra": "{}"}
    rng = np.random.Generator(np.random.MT19937(3))
    state = json.loads(json.dumps(rng.bit_generator.state, default=lambda array: array.tolist()))
    state["state"]["key"][300] = "no number"  # NumPy takes one number after the other
    safetensors.save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "c", metadata | {"rng": json.dumps(state)})
    mine, other = (np.random.Generator(np.random.MT19937(7)) for _ in range(2))
    leaf = w(0.0)
    with pytest.raises(CheckpointError, match="its random state is of another generator"):
        gg.checkpoint.load(tmp_path / "c", [leaf], rng=mine)
    assert not leaf.numpy().any()
    np.testing.assert_array_equal(mine.random(700), other.random(700))


def test_numpy_scalars_are_numbers_and_what_cannot_be_saved_is_refused(tmp_path):
    path = tmp_path / "c"
    gg.checkpoint.save(path, [w()], step=np.int64(3), data=(np.int32(4), np.float32(0.5)), extra={"on": np.bool_(True)})
    info = gg.checkpoint.peek(path)
    assert (info.step, info.data, info.extra) == (3, [4, 0.5], {"on": True})
    before = path.read_bytes()
    for wrong in (
        dict(step=3.5), dict(step=-1), dict(data={1: 2}), dict(data=np.ones(2)), dict(extra={"f": print}),
        dict(extra={"a": [{2: 1}]}),
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            gg.checkpoint.save(path, [w()], **wrong)
    with pytest.raises(CheckpointError, match="no text"):
        gg.checkpoint.save(path, [w(name="a\ud800b")])
    assert path.read_bytes() == before
    assert json.loads(before[8 : 8 + int.from_bytes(before[:8], "little")])["__metadata__"]["ggrad"] == "2"


def test_a_file_that_is_being_written_is_never_taken_for_a_dead_writers(tmp_path, monkeypatch):
    path = tmp_path / "f"
    replace, swept = os.replace, []

    def sweep_first(source, target):
        swept.append(_sweep(path))  # as another writer does when it is done
        replace(source, target)

    monkeypatch.setattr(os, "replace", sweep_first)
    write_whole(path, b"x")
    assert swept and path.read_bytes() == b"x"
    dead = tmp_path / f"{_beginning(path)}0.unfinished"
    dead.write_bytes(b"half")
    other = tmp_path / f"{_beginning(tmp_path / 'other')}0.unfinished"
    other.write_bytes(b"half")
    write_whole(path, b"y")
    assert names(tmp_path) == sorted([other.name, "f"])
