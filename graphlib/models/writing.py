"""GGUF files as they are written: by gguf's own writer, to another name first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..core.dtype import DType
from ..core.errors import FormatError
from ..core.extras import need
from ..core.quant import quantize
from ..files.gguf import GgufFile


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to; the file is moved to `path` when it is whole, and is gone if something goes wrong."""
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


class Out:
    """A GGUF file under construction."""

    def __init__(self, path: Path, arch: str) -> None:
        self._gguf = need("gguf", "writing a GGUF file", "finetune")
        path.touch()  # so that a folder that cannot be written to is an error now
        self._writer = self._gguf.GGUFWriter(os.fspath(path), arch=arch, use_temp_file=False)

    def string(self, key: str, value: str) -> None:
        self._writer.add_string(key, value)

    def float32(self, key: str, value: float) -> None:
        self._writer.add_float32(key, float(value))

    def metadata_of(self, path: Path, *, without: tuple[str, ...] = ()) -> None:
        """All pairs of another file, each of its own type."""
        for key, kept in self._gguf.GGUFReader(os.fspath(path)).fields.items():
            if key.startswith("GGUF.") or key in ("general.architecture", *without):
                continue
            kind = kept.types[0]
            inner = kept.types[-1] if kind == self._gguf.GGUFValueType.ARRAY else None
            self._writer.add_key_value(key, kept.contents(), kind, inner)

    def tensor(self, name: str, value: np.ndarray, kind: str | None = None) -> None:
        """A tensor of NumPy's shape; with `kind`, its bytes [..., bytes of a row] and ggml's name of the type."""
        raw = getattr(self._gguf.GGMLQuantizationType, kind.upper()) if kind else None
        self._writer.add_tensor(name, value, raw_dtype=raw)

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def copy_with(
    file: GgufFile, path: str | os.PathLike[str], changed: Mapping[str, Callable[[], tuple[np.ndarray, str]]]
) -> None:
    """A file as another one, but for some tensors, given as functions that make their bytes and their type."""
    split: Any = file.metadata.get("split.count", 1)
    with replaced(path) as unfinished:
        out = Out(unfinished, file.metadata["general.architecture"])
        out.metadata_of(file.path, without=("split.no", "split.count", "split.tensors.count") if split != 1 else ())
        for name, info in file.tensors.items():
            if name in changed:
                value, kind = changed[name]()
            else:
                value, kind = file.raw(name).reshape(*info.shape[:-1], -1), info.type
            out.tensor(name, value, kind)
        out.close()


def as_type(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Values f32 as bytes [..., bytes of a row] of a dtype."""
    if dtype.quantized:
        return quantize(values, dtype)
    from ..core.tensor import converted

    try:
        stored = converted(values, dtype, "as_type()")
    except ValueError as error:
        raise FormatError(str(error)) from None
    return np.ascontiguousarray(stored).view(np.uint8).reshape(*values.shape[:-1], -1)
