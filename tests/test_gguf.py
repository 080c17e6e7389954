"""GGUF files are read as the gguf package reads them; what breaks a rule is refused by an error that names it."""

import os
import struct

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import FormatError
from ggrad.files.gguf import TYPES

gguf = pytest.importorskip("gguf")

Kind = gguf.GGMLQuantizationType
Value = gguf.GGUFValueType


def text(s: bytes | str) -> bytes:
    s = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(s)) + s


def pair(key, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name, shape, kind=0, offset=0) -> bytes:
    """A tensor's info, the shape in NumPy's order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def content(pairs=(), tensors=(), data=b"", *, version=3, magic=b"GGUF", alignment=32, counts=None) -> bytes:
    counts = counts or (len(tensors), len(pairs))
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


@pytest.fixture
def opened(tmp_path):
    def open_(blob: bytes, name="a.gguf") -> gg.GgufFile:
        (tmp_path / name).write_bytes(blob)
        return gg.GgufFile(tmp_path / name)

    return open_


def writer(path, **more) -> gguf.GGUFWriter:
    return gguf.GGUFWriter(path, "llama", **more)


def finish(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_types_and_their_sizes_are_those_of_the_gguf_package():
    theirs = {int(kind): (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    assert {number: TYPES.get(number) for number in theirs} == theirs


def test_metadata_of_every_type_is_read_as_the_gguf_package_reads_it(tmp_path):
    w = writer(tmp_path / "a.gguf")
    numbers = {
        Value.UINT8: 200, Value.INT8: -100, Value.UINT16: 60000, Value.INT16: -30000, Value.UINT32: 2**32 - 1,
        Value.INT32: -(2**31), Value.FLOAT32: 0.1, Value.UINT64: 2**64 - 1, Value.INT64: -(2**63),
        Value.FLOAT64: 0.1, Value.BOOL: True,
    }  # fmt: skip
    for kind, value in numbers.items():
        w.add_key_value(f"one.{kind.name}", value, kind)
        w.add_key_value(f"many.{kind.name}", [value] * 3, Value.ARRAY, sub_type=kind)
    w.add_string("text", "ein Käfer ☃")
    w.add_array("texts", ["", "a", "Käfer"])
    finish(w)
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    with gg.GgufFile(tmp_path / "a.gguf") as ours:
        expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert ours.metadata == expected and len(expected) == 2 * len(numbers) + 3
        assert {k: type(v) for k, v in ours.metadata.items()} == {k: type(v) for k, v in expected.items()}


@pytest.mark.parametrize("alignment", [32, 64])
def test_tensors_of_every_type_are_read_as_the_gguf_package_reads_them(tmp_path, alignment):
    rng = np.random.default_rng(1)
    w = writer(tmp_path / "a.gguf")
    w.add_custom_alignment(alignment)
    plain = {
        Kind.F32: "f4",
        Kind.F16: "f2",
        Kind.F64: "f8",
        Kind.I8: "i1",
        Kind.I16: "i2",
        Kind.I32: "i4",
        Kind.I64: "i8",
    }
    for kind in Kind:
        _, nbytes = gguf.GGML_QUANT_SIZES[kind]
        if kind in plain:
            w.add_tensor(kind.name, rng.integers(-9, 9, size=(3, 1, 5)).astype(plain[kind]))
        else:
            w.add_tensor(kind.name, rng.integers(0, 256, size=(3, 2 * nbytes), dtype=np.uint8), raw_dtype=kind)
    finish(w)
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    ours = gg.GgufFile(tmp_path / "a.gguf")
    assert list(ours.tensors) == [t.name for t in theirs.tensors] == [kind.name for kind in Kind]
    for t in theirs.tensors:
        info, raw = ours.tensors[t.name], ours.raw(t.name)
        assert (info.shape, info.type) == (tuple(t.shape.tolist()[::-1]), t.tensor_type.name.lower())
        assert (info.offset, info.nbytes) == (t.data_offset, t.n_bytes)
        assert raw.tobytes() == t.data.tobytes() and not raw.flags.writeable
        copy = np.empty(info.nbytes, np.uint8)
        ours.read_into(t.name, copy)
        assert copy.tobytes() == t.data.tobytes()
    ours.close()
    assert raw.tobytes() == theirs.tensors[-1].data.tobytes()  # what was given outlives the file
    with pytest.raises(ValueError, match="was closed"):
        ours.raw("F32")


def test_leaves_hold_what_the_file_holds(tmp_path):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 64)).astype(np.float32)
    w = writer(tmp_path / "a.gguf")
    w.add_tensor("x", x)
    for dtype in (gg.Q4_0, gg.Q8_0):
        w.add_tensor(dtype.name, gg.quantize(x, dtype), raw_dtype=Kind[dtype.name.upper()])
    w.add_tensor("half", gguf.quants.quantize(x, Kind.BF16), raw_dtype=Kind.BF16)
    finish(w)
    leaves = gg.load_gguf(tmp_path / "a.gguf")
    np.testing.assert_array_equal(leaves["x"].numpy(), x)
    np.testing.assert_array_equal(leaves["q8_0"].memory(), gg.quantize(x, gg.Q8_0))
    assert leaves["half"].dtype is gg.BF16 and leaves["q4_0"].shape == (2, 64)
    np.testing.assert_allclose(leaves["half"].numpy(), x, rtol=2**-8)


@pytest.mark.parametrize("version", [2, 3])
def test_the_smallest_files(opened, version):
    assert opened(content(version=version)).tensors == {}
    file = opened(
        content([], [entry("s", ()), entry("none", (0, 7), offset=32)], struct.pack("<f", 2.5), version=version)
    )
    assert [(t.shape, t.nbytes) for t in file.tensors.values()] == [((), 4), ((0, 7), 0)]
    assert file.raw("s").view("<f4") == 2.5 and file.raw("none").size == 0


def test_text_that_is_no_utf8_loses_nothing(opened):
    file = opened(content([pair("t", 8, text(b"a\xff"))]))
    assert file.metadata["t"].encode(errors="surrogateescape") == b"a\xff"


U32 = struct.pack("<I", 7)
REFUSED = {
    "begins with b'GGUF'": content(magic=b"GGML"),
    "its version is 1": content(version=1),
    "big-endian": content(version=int.from_bytes(b"\0\0\0\3", "little")),
    "tensors do not fit into": content(counts=(2**63, 0)),
    "pairs of metadata do not fit": content(counts=(0, 2**40)),
    "bytes from byte": b"GGUF\3\0",
    "key 'k': it is there twice": content([pair("k", 4, U32), pair("k", 4, U32)]),
    "key 'k': there is no type 13": content([pair("k", 13, U32)]),
    "key 'k': arrays hold numbers or strings, not type 9": content([pair("k", 9, struct.pack("<IQ", 9, 0))]),
    "key 'k': 1152921504606846976 elements": content([pair("k", 9, struct.pack("<IQ", 0, 1 << 60))]),
    "key 'k': a string of 18446744073709551615 bytes": content([pair("k", 8, struct.pack("<Q", 2**64 - 1))]),
    "key 0: its name is no UTF-8": content([pair(b"\xff", 4, U32)]),
    "power of two, an u32, but is 7": content([pair("general.alignment", 4, U32)]),
    "power of two, an u32, but is 0": content([pair("general.alignment", 4, struct.pack("<I", 0))]),
    "power of two, an u32, but is 32 of type 10": content([pair("general.alignment", 10, struct.pack("<Q", 32))]),
    "power of two, an u32, but is '32'": content([pair("general.alignment", 8, text("32"))]),
    "power of two, an u32, but is .32.": content([pair("general.alignment", 9, struct.pack("<IQI", 4, 1, 32))]),
    "tensor 'w': it is there twice": content([], [entry("w", (0,)), entry("w", (0,))]),
    "a string of 64 bytes; at most 63": content([], [entry("w" * 64, (1,))], b"1234"),
    "tensor 'w': it has 5 axes": content([], [entry("w", (1,) * 5)], b"1234"),
    "more elements than can be counted": content([], [entry("w", (2**32, 2**31))]),
    "tensor 'w': there is no type 4 of tensors": content([], [entry("w", (1,), 4)], b"1234"),
    "rows of 16 elements are no whole blocks of q4_0, 32 each": content([], [entry("w", (2, 16), 2)], b"0" * 99),
    "rows of 1 elements are no whole blocks": content([], [entry("w", (), 2)], b"0" * 99),
    "tensor 'w': its data begin 4 bytes into the data, but must at 0": content([], [entry("w", (1,), 0, 4)], b"0" * 9),
    "tensor 'v': its data begin 0 bytes into the data, but must at 32": content(
        [], [entry("w", (1,)), entry("v", (1,))], b"0" * 99
    ),
    "must at 64": content(
        [pair("general.alignment", 4, struct.pack("<I", 64))], [entry("w", (1,)), entry("v", (1,), 0, 32)], b"0" * 99
    ),
    "tensor 'w': its data end at byte 72, but the file has 68": content([], [entry("w", (2,))], b"1234"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_breaks_a_rule_is_refused_with_the_file_and_the_rule(opened, why):
    with pytest.raises(FormatError, match=why) as caught:
        opened(REFUSED[why], "named.gguf")
    assert "named.gguf" in str(caught.value)


def test_every_file_that_was_cut_short_is_refused(opened, tmp_path):
    w = writer(tmp_path / "a.gguf")
    w.add_array("list", ["a", "bc"])
    w.add_tensor("w", np.ones((3, 4), np.float32))
    finish(w)
    whole = (tmp_path / "a.gguf").read_bytes()
    for n in range(len(whole) - 16):  # the last 16 bytes are padding
        with pytest.raises(FormatError):
            opened(whole[:n])
    assert opened(whole[:-16]).tensors


def test_types_that_ggrad_does_not_compute_with_can_be_read_but_not_loaded(opened, tmp_path):
    file = opened(content([], [entry("w", (256,), 10)], bytes(range(84))))
    assert file.raw("w").tobytes() == bytes(range(84))
    with pytest.raises(FormatError, match="tensor 'w': its type is q2_k; ggrad reads"):
        gg.load_gguf(tmp_path / "a.gguf")


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(FormatError, match="no regular file"):
            gg.GgufFile(path)
    with pytest.raises(FileNotFoundError):
        gg.load_gguf(tmp_path / "none.gguf")


# -- split models -------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path):
    w = writer(tmp_path / "m.gguf", split_max_tensors=2)
    for i in range(5):
        w.add_tensor(f"t{i}", np.full((2, 3), i, np.float32))
    finish(w)
    return sorted(tmp_path.glob("*.gguf"))


def test_a_split_model_is_read_as_one(split):
    assert len(split) == 3
    file = gg.GgufFile(split[0])
    assert list(file.tensors) == [f"t{i}" for i in range(5)]
    assert [info.part for info in file.tensors.values()] == [0, 0, 1, 1, 2]
    leaves = gg.load_gguf(split[0])
    for i in range(5):
        np.testing.assert_array_equal(leaves[f"t{i}"].numpy(), np.full((2, 3), i))
        np.testing.assert_array_equal(file.raw(f"t{i}").view("<f4"), np.full(6, i))
    assert file.metadata["general.architecture"] == "llama"


def test_a_part_that_is_missing_another_or_not_the_first_is_told(split, tmp_path):
    with pytest.raises(FormatError, match=r"it is file 2 of 3; the first one is to be opened"):
        gg.GgufFile(split[1])
    other = tmp_path / "renamed.gguf"
    other.write_bytes(split[0].read_bytes())
    with pytest.raises(FormatError, match=r"must be called \.\.\.-00001-of-00003\.gguf"):
        gg.GgufFile(other)
    last = split[2].read_bytes()
    split[2].write_bytes(split[1].read_bytes())
    with pytest.raises(FormatError, match=r"'t2': an earlier file of the model|split.no and split.count are"):
        gg.GgufFile(split[0])
    split[2].write_bytes(last.replace(b"t4", b"t0"))
    with pytest.raises(FormatError, match="'t0': an earlier file"):
        gg.GgufFile(split[0])
    split[2].unlink()
    with pytest.raises(FileNotFoundError):
        gg.GgufFile(split[0])


def part_of_two(number: int, *, no=None, count=2, total=2) -> bytes:
    """A file of a split model of two, each with one tensor."""
    sizes = {"split.no": number if no is None else no, "split.count": count, "split.tensors.count": total}
    pairs = [pair(key, 4, struct.pack("<I", value)) for key, value in sizes.items()]
    return content(pairs, [entry(f"t{number}", (1,))], b"1234")


def test_the_files_of_a_split_model_must_agree(opened, tmp_path):
    first, second = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
    (tmp_path / second).write_bytes(part_of_two(1))
    assert len(opened(part_of_two(0), first).tensors) == 2
    with pytest.raises(FormatError, match=r"split.tensors.count is 3, but the files hold 2"):
        opened(part_of_two(0, total=3), first)
    for wrong in (dict(no=0), dict(count=3)):
        (tmp_path / second).write_bytes(part_of_two(1, **wrong))
        with pytest.raises(FormatError, match=r"00002-of.*split.no and split.count are .*, but must be \(1, 2\)"):
            opened(part_of_two(0), first)
    with pytest.raises(FormatError, match=r"key 'split.count': it must be an integer, but is '2'"):
        opened(content([pair("split.count", 8, text("2"))]), first)
