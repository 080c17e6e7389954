"""GGUF files, in which ggml keeps models: a strict reader, and their tensors as leaves.

All that a header says is checked, against the file's length too, before anything is made of it.  The rules are those
of ggml's own reader: little-endian files of version 2 and 3; names unique, those of tensors shorter than 64 bytes; at
most four axes; whole blocks; data one tensor after the other in the header's order, each begun at a multiple of
the alignment.  What is not read: version 1, big-endian files, arrays of arrays.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from ..core.dtype import ALL, QUANTIZED
from ..core.errors import FormatError
from ..core.tensor import Tensor, set_frozen, tensor
from .atomic import open_regular

# Types of tensors: their number in a file, elements in a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18),
}  # fmt: skip

_NUMBERS: dict[int, np.dtype[Any]] = {  # types of metadata that are numbers
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_ALIGNMENT = 32  # bytes, where the file does not say
_LONGEST_NAME = 63  # bytes of a tensor's
_LARGEST = 1 << 30  # bytes of a string, elements of an array
_LEAST_PAIR, _LEAST_TENSOR = 13, 24  # bytes that one takes in a header, at least
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a GGUF file.

    Attributes:
        name: its name.
        shape: in NumPy's order: rows last.
        type: ggml's name of it in small letters, as "f32" or "q4_k".
        offset: of its first byte in its file.
        nbytes: how many it has.
        part: which file it is in, from 0; more than one only of a split model.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    part: int = 0


class GgufFile:
    """A GGUF file, or all the files of a split one ("-00001-of-0000N.gguf", of which the first is given).

    The header is read and checked at once, tensors when they are asked for.  It may be used in a `with` statement;
    arrays that it gave outlive it.

    Attributes:
        path: of the file, the first of a split one.
        metadata: what the header says, by key: numbers, bools, strings and lists of them; of a split model what
            its first file says.  Bytes of strings that are no UTF-8 are kept as surrogate escapes.
        tensors: infos by name, in the file's order.

    Raises:
        FormatError: the file breaks a rule of the format; says the file, the key or tensor, the rule and the values.
        OSError: it cannot be opened, or a part of it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._files: list[tuple[BinaryIO, int]] = []
        self._maps: dict[int, mmap.mmap] = {}
        try:
            self._open(self.path)
            self._open_others()
        except BaseException:
            self.close()
            raise

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [nbytes], read-only: mapped from the file, so they cost nothing until read.

        Nobody may cut the file short while they are in use: the system ends processes that read what is gone.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the file was closed.
        """
        info = self._info(name)
        if not info.nbytes:
            return np.empty(0, np.uint8)
        if info.part not in self._maps:
            file, size = self._files[info.part]
            self._maps[info.part] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[info.part], np.uint8, info.nbytes, info.offset)

    def read_into(self, name: str, memory: np.ndarray) -> None:
        """Copy the bytes of a tensor to contiguous memory of as many, without mapping the file.

        Raises:
            FormatError: the file has become shorter since it was opened.
        """
        info = self._info(name)
        into = memory.reshape(-1).view(np.uint8)
        if into.nbytes != info.nbytes:
            raise ValueError(f"read_into({name}): {info.nbytes} bytes do not go into {into.nbytes}")
        file, _ = self._files[info.part]
        file.seek(info.offset)
        if file.readinto(into.data) != info.nbytes:  # type: ignore[attr-defined]
            raise FormatError(f"{self.path}: tensor {name!r}: its file was cut short while it was read")

    def close(self) -> None:
        """Let go of the files.  Arrays that `raw` gave hold theirs as long as they live."""
        for file, _ in self._files:
            file.close()
        self._files, self._maps = [], {}

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if not self._files:
            raise ValueError(f"{self.path} was closed")
        return self.tensors[name]

    def _open(self, path: Path) -> dict[str, Any]:
        """Read one file's header; tensors are added to those of the files before."""
        part = len(self._files)
        self._files.append(open_regular(path))
        metadata, infos = read_header(*self._files[-1], os.fspath(path), part)
        for info in infos.values():
            if info.name in self.tensors:
                raise FormatError(f"{path}: tensor {info.name!r}: an earlier file of the model has one of this name")
            self.tensors[info.name] = info
        if not part:
            self.metadata = metadata
        return metadata

    def _open_others(self) -> None:
        count = _whole(self.path, self.metadata, "split.count", 1)
        if count <= 1:
            return
        if (number := _whole(self.path, self.metadata, "split.no", 0)) != 0:
            raise FormatError(f"{self.path}: it is file {number + 1} of {count}; the first one is to be opened")
        match = _PART.fullmatch(self.path.name)
        if not match or (int(match[2]), int(match[3])) != (1, count):
            raise FormatError(
                f"{self.path}: the first of {count} files must be called ...-00001-of-{count:05}.gguf, "
                "so that the others are found"
            )
        for part in range(1, count):
            path = self.path.with_name(f"{match[1]}-{part + 1:05}-of-{count:05}.gguf")
            metadata = self._open(path)
            found = _whole(path, metadata, "split.no", -1), _whole(path, metadata, "split.count", -1)
            if found != (part, count):
                raise FormatError(f"{path}: split.no and split.count are {found}, but must be {(part, count)}")
        total = _whole(self.path, self.metadata, "split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise FormatError(f"{self.path}: split.tensors.count is {total}, but the files hold {len(self.tensors)}")


def load_gguf(path: str | os.PathLike[str], *, frozen: bool = False) -> dict[str, Tensor]:
    """The tensors of a GGUF file by name, as constants; shapes in NumPy order.

    Quantized ones stay as they are in the file: `mul_mat`, `get_rows` and `mul_mat_id` read their blocks.  To train
    one of another dtype, `gg.set_param` it.

    Args:
        path: of the file, or of the first of a split one.
        frozen: none of them will ever change; see `gg.tensor`.

    Raises:
        FormatError: the file breaks a rule of the format, or has a tensor of a type that ggrad does not know.
        OSError: the file cannot be read.
    """
    known = {d.name: d for d in (*ALL, *QUANTIZED)}
    leaves = {}
    with GgufFile(path) as file:
        for info in file.tensors.values():
            if info.type not in known:
                raise FormatError(
                    f"{file.path}: tensor {info.name!r}: its type is {info.type}; ggrad reads {', '.join(known)}"
                )
        for name, info in file.tensors.items():
            leaf = tensor(shape=info.shape, dtype=known[info.type], name=name)
            file.read_into(name, leaf.memory())
            leaves[name] = set_frozen(leaf) if frozen else leaf
    return leaves


# -- the header ---------------------------------------------------------------------------------------------


def read_header(file: BinaryIO, size: int, path: str, part: int = 0) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata, and infos of tensors by name, of a file of `size` bytes.

    Time and memory are bounded by its length, whatever it says.

    Raises:
        FormatError: it breaks a rule of the format.
    """
    header = _Header(file, size, path)
    header.check_start()
    tensors = header.count("tensors", _LEAST_TENSOR)
    pairs = header.count("pairs of metadata", _LEAST_PAIR)
    metadata: dict[str, Any] = {}
    alignment = _ALIGNMENT
    for i in range(pairs):
        header.where = f"key {i}"
        key = header.name()
        header.where = f"key {key!r}"
        if key in metadata:
            header.refuse("it is there twice")
        kind = header.number("I")
        metadata[key] = header.value(kind)
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _U32 or alignment.bit_count() != 1:
                header.refuse(f"it must be a power of two, an u32, but is {alignment!r} of type {kind}")

    infos: dict[str, tuple[tuple[int, ...], str, int, int]] = {}  # shape, type, offset in the data, bytes
    expected = 0
    for i in range(tensors):
        header.where = f"tensor {i}"
        name = header.name(_LONGEST_NAME)
        header.where = f"tensor {name!r}"
        if name in infos:
            header.refuse("it is there twice")
        infos[name] = header.tensor(alignment, expected)
        expected += _up(infos[name][3], alignment)
    start = _up(header.at, alignment)
    for name, (_, _, offset, nbytes) in infos.items():
        if nbytes and start + offset + nbytes > size:
            header.where = f"tensor {name!r}"
            header.refuse(f"its data end at byte {start + offset + nbytes}, but the file has {size}")
    return metadata, {
        name: TensorInfo(name, shape, kind, start + offset, nbytes, part)
        for name, (shape, kind, offset, nbytes) in infos.items()
    }


class _Header:
    """What is left of a header: `at` is where it is read."""

    def __init__(self, file: BinaryIO, size: int, path: str) -> None:
        self.file, self.size, self.path = file, size, path
        self.at = 0
        self.where = "header"

    def refuse(self, why: str) -> NoReturn:
        raise FormatError(f"{self.path}: {self.where}: {why}")

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            self.refuse(f"{n} bytes from byte {self.at} on, but the file has {self.size}")
        taken = self.file.read(n)
        if len(taken) != n:
            self.refuse(f"the file was cut short to {self.at + len(taken)} bytes while it was read")
        self.at += n
        return taken

    def number(self, kind: str) -> int:
        return struct.unpack("<" + kind, self.take(struct.calcsize(kind)))[0]

    def check_start(self) -> None:
        magic = self.take(4)
        if magic != b"GGUF":
            self.refuse(f"a GGUF file begins with b'GGUF', not {magic!r}")
        version = self.number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "it is big-endian" if swapped in (2, 3) else f"its version is {version}"
            self.refuse(f"{why}; read are little-endian files of version 2 and 3")

    def count(self, of: str, least: int) -> int:
        """How many things follow that take at least so many bytes each."""
        n = self.number("Q")
        if n > (self.size - self.at) // least:
            self.refuse(f"{n} {of} do not fit into the {self.size - self.at} bytes that follow")
        return n

    def string(self, longest: int = _LARGEST) -> bytes:
        n = self.number("Q")
        if n > longest:
            self.refuse(f"a string of {n} bytes; at most {longest} are allowed")
        return self.take(n)

    def name(self, longest: int = _LARGEST) -> str:
        found = self.string(longest)
        try:
            return found.decode()
        except UnicodeDecodeError:
            self.refuse(f"its name is no UTF-8: {found[:80]!r}")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            self.refuse(f"there is no type {kind} of metadata")
        kind = self.number("I")
        if kind != _STRING and kind not in _NUMBERS:
            self.refuse(f"arrays hold numbers or strings, not type {kind}")
        least = 8 if kind == _STRING else _NUMBERS[kind].itemsize
        n = self.count("elements of an array", least)
        if n > _LARGEST:
            self.refuse(f"an array of {n} elements; at most {_LARGEST} are allowed")
        if kind == _STRING:
            return [self._text() for _ in range(n)]
        return self._numbers(kind, n)

    def _text(self) -> str:
        return self.string().decode(errors="surrogateescape")

    def _numbers(self, kind: int, n: int) -> list:
        found = np.frombuffer(self.take(n * _NUMBERS[kind].itemsize), _NUMBERS[kind])
        return (found != 0 if kind == _BOOL else found).tolist()

    def tensor(self, alignment: int, expected: int) -> tuple[tuple[int, ...], str, int, int]:
        """Shape, type, offset in the data and bytes of the next tensor, whose data should begin at `expected`."""
        axes = self.number("I")
        if axes > 4:
            self.refuse(f"it has {axes} axes; at most 4 are allowed")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        elements = 1
        for n in shape:
            elements *= max(n, 1)
        if elements >= 1 << 63:
            self.refuse(f"its shape {shape} has more elements than can be counted")
        number = self.number("I")
        if number not in TYPES:
            self.refuse(f"there is no type {number} of tensors")
        kind, block, nbytes = TYPES[number]
        if shape and shape[-1] % block or not shape and block > 1:
            self.refuse(f"rows of {shape[-1] if shape else 1} elements are no whole blocks of {kind}, {block} each")
        offset = self.number("Q")
        if offset != expected:
            self.refuse(
                f"its data begin {offset} bytes into the data, but must at {expected}: after the tensor before it, "
                f"at a multiple of {alignment}"
            )
        if 0 in shape:
            elements = 0
        return shape, kind, offset, elements // block * nbytes


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _whole(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{path}: key {key!r}: it must be an integer, but is {value!r}")
    return value
