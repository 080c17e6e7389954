"""Damaged files, in process: each is either read as a valid reading has it, or refused by an error of ggrad's.

    python -m ggrad.check fuzz-files --format gguf --count 1000000 --seed 1

What is tried follows from the seed.  Finds are written to a folder, one file each.
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import FormatError
from ..core.tensor import Tensor, tensor
from ..files import checkpoint
from ..files.atomic import write_whole
from ..files.gguf import TYPES, read_header
from ..jit import objects

WORDS = [0, 1, 2, 31, 32, 63, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [b"0", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'"', b"\\ud800", b"9" * 25, b"[" * 50, b"F64", b"\xff"]


@dataclass(frozen=True)
class Format:
    """What is fuzzed.

    Attributes:
        files: valid ones, each with the bytes from its start in which most damage is done.
        read: raises FormatError, or says by returning a string what is wrong with having read the file.
    """

    files: Sequence[tuple[bytes, int]]
    read: Callable[[bytes], str | None]


def damaged(content: bytes, header: int, rng: np.random.Generator) -> bytes:
    """The file with one to three things done to it."""
    b = bytearray(content)
    kind, times, *places = rng.integers(0, 1 << 30, 14).tolist()
    for i in range(1 + times % 3):
        p, q, n, w = (places[3 * i + k] if k < 3 else places[-1 - i] for k in range(4))
        limit = min(header if n % 8 else len(b), len(b)) or 1
        p, q, n = p % limit, q % limit, 1 + n % 16
        match kind % 8:
            case 0 if b:
                b[p] ^= 1 << w % 8
            case 1 if b:
                b[p] = w % 256
            case 2:
                del b[w % (len(b) + 1) :]
            case 3:
                b[p : p + 8] = struct.pack("<Q", WORDS[w % len(WORDS)])
            case 4:
                b[p : p + 4] = struct.pack("<I", WORDS[w % len(WORDS)] & 0xFFFFFFFF)
            case 5:
                del b[p : p + n]
            case 6:
                b[p:p] = TEXTS[w % len(TEXTS)]
            case 7:
                b[p : p + n] = b[q : q + n]
    return bytes(b)


def fuzz(name: str, count: int, seed: int = 0, keep: Path | None = None) -> Counter[str]:
    """How often each thing happened in so many tries; what begins with "FOUND" should not.

    Args:
        name: of the format; see FORMATS.
        count: of tries.
        seed: of all of them.
        keep: a folder for the first file of each find.
    """
    rng = np.random.default_rng(seed)
    form = FORMATS[name]()
    happened: Counter[str] = Counter()
    for _ in range(count):
        content, header = form.files[int(rng.integers(len(form.files)))]
        blob = damaged(content, header, rng)
        try:
            wrong = form.read(blob)
            what = f"FOUND {wrong}" if wrong else "read"
        except FormatError:
            what = "refused"
        except Exception as error:  # also MemoryError and RecursionError: what a file says must not cause them
            what = f"FOUND {type(error).__name__}"
        if what.startswith("FOUND") and what not in happened and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            write_whole(keep / f"{name}-{seed}-{len(happened)}", blob)
        happened[what] += 1
    return happened


# -- GGUF ---------------------------------------------------------------------------------------------------


def _text(s: str) -> bytes:
    return struct.pack("<Q", len(s)) + s.encode()


def _gguf_file(seed: int) -> tuple[bytes, int]:
    rng = np.random.default_rng(seed)
    alignment = (32, 64)[seed % 2]
    pairs = [_text("general.alignment") + struct.pack("<II", 4, alignment)]
    pairs.append(_text("texts") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("bc"))
    pairs.append(
        _text("numbers") + struct.pack("<IIQ3d", 9, 12, 3, 1, 2, 3) + _text("s") + struct.pack("<I", 8) + _text("x")
    )
    infos, data = [], b""
    for i, number in enumerate(rng.choice(list(TYPES), 4, replace=False).tolist()):
        _, block, nbytes = TYPES[number]
        infos.append(_text(f"t{i}") + struct.pack("<IQQIQ", 2, block, 2, number, len(data)))
        data += rng.bytes(2 * nbytes)
        data += b"\0" * (-len(data) % alignment)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs) + 1) + b"".join(pairs) + b"".join(infos)
    header += b"\0" * (-len(header) % alignment)
    return header + data, len(header)


def _read_gguf(blob: bytes) -> str | None:
    _, infos = read_header(io.BytesIO(blob), len(blob), "a.gguf")
    end = 0
    for info in infos.values():
        if not info.nbytes:
            continue
        if info.offset < end:
            return "overlap"
        end = info.offset + info.nbytes
        if end > len(blob):
            return "data past the end"
    return None


def _gguf() -> Format:
    return Format([_gguf_file(seed) for seed in range(8)], _read_gguf)


# -- checkpoints --------------------------------------------------------------------------------------------


def _checkpoint(checksum: bool) -> Format:
    def leaves() -> list[Tensor]:
        return [tensor(np.arange(6.0).reshape(2, 3), name="w", param=True), tensor(np.ones(3), name="b", param=True)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        rng = np.random.default_rng(1)
        checkpoint.save(path, leaves(), step=3, data={"at": [1, 2]}, rng=rng, extra={"lr": 0.5})
        content = path.read_bytes()
    if not checksum:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"] |= {"ggrad": checkpoint.WITHOUT_CHECKSUM}
        del header["__metadata__"]["checksum"]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    filled = leaves()
    expected = [leaf.numpy().tobytes() for leaf in filled]

    def read(blob: bytes) -> str | None:
        for leaf in filled:
            leaf.memory()[...] = 7
        rng = np.random.default_rng(5)
        try:
            info = checkpoint.restore(blob, "c", filled, rng=rng)
        except FormatError:
            untouched = rng.bit_generator.state == np.random.default_rng(5).bit_generator.state
            if not untouched or any((leaf.memory() != 7).any() for leaf in filled):
                return "a change by a file that was refused"
            raise
        if checksum and (info.step, info.data, info.extra) != (3, {"at": [1, 2]}, {"lr": 0.5}):
            return "another meaning"
        if checksum and [leaf.numpy().tobytes() for leaf in filled] != expected:
            return "other tensors"
        return None

    return Format([(content, header_bytes)], read)


# -- compiled kernels ---------------------------------------------------------------------------------------


def _objects() -> Format:
    whole = objects.packed("entry", bytes(range(256)))

    def read(blob: bytes) -> str | None:
        found = objects.unpacked(blob)
        if found is None:
            raise FormatError("damaged")
        return None if found == ("entry", bytes(range(256))) else "another object"

    return Format([(whole, 80)], read)


FORMATS: dict[str, Callable[[], Format]] = {
    "gguf": _gguf,
    "checkpoint": lambda: _checkpoint(True),
    "checkpoint-1": lambda: _checkpoint(False),
    "objects": _objects,
}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 if nothing was found, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m ggrad.check fuzz-files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", choices=FORMATS, action="append", help="default: all; may be repeated")
    parser.add_argument("--count", type=int, default=100_000, help="tries for each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-finds"), help="a folder for what was found")
    options = parser.parse_args(arguments)
    found = 0
    for name in options.format or FORMATS:
        began = time.perf_counter()
        happened = fuzz(name, options.count, options.seed, options.keep)
        told = ", ".join(f"{n} {what}" for what, n in happened.most_common())
        print(f"{name}, seed {options.seed}: {told}; {time.perf_counter() - began:.0f} s", flush=True)
        found += sum(n for what, n in happened.items() if what.startswith("FOUND"))
    return min(found, 1)
