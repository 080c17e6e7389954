"""Element types: f32, f16, bf16, i32, and ggml's quantized blocks.  References compute in double precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DType:
    """An element type, or a block of elements quantized together.

    `nbytes` is the size of a block and `block` the elements in it (1 unless quantized), so that a
    row of n elements takes n / block * nbytes bytes.
    """

    name: str
    code: int  # enum gg_dtype
    nbytes: int
    storage: np.dtype  # what NumPy sees of the memory
    block: int = 1

    @property
    def quantized(self) -> bool:
        """Whether values lie in blocks, each of which has a scale."""
        return self.block > 1

    def bytes_of(self, elements: int) -> int:
        """What so many elements take: whole blocks of them."""
        return elements // self.block * self.nbytes

    @property
    def is_float(self) -> bool:
        """Whether it is not i32: gradients flow through values of it, or into them."""
        return self.code != I32.code

    def __repr__(self) -> str:
        return self.name


F32 = DType("f32", 0, 4, np.dtype(np.float32))
F16 = DType("f16", 1, 2, np.dtype(np.float16))
BF16 = DType("bf16", 2, 2, np.dtype(np.uint16))  # NumPy has no bfloat16: its bits
I32 = DType("i32", 3, 4, np.dtype(np.int32))

ALL = (F32, F16, BF16, I32)

_BYTES = np.dtype(np.uint8)
Q4_0 = DType("q4_0", 4, 18, _BYTES, 32)
Q4_1 = DType("q4_1", 5, 20, _BYTES, 32)
Q5_0 = DType("q5_0", 6, 22, _BYTES, 32)
Q5_1 = DType("q5_1", 7, 24, _BYTES, 32)
Q8_0 = DType("q8_0", 8, 34, _BYTES, 32)
Q4_K = DType("q4_k", 9, 144, _BYTES, 256)
Q5_K = DType("q5_k", 10, 176, _BYTES, 256)
Q6_K = DType("q6_k", 11, 210, _BYTES, 256)

QUANTIZED = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)  # constants: leaves, and looks at whole rows of them


DTypeLike = DType | str | type | np.dtype  # what is taken for one
_BY_NAME = {d.name: d for d in (*ALL, *QUANTIZED)} | {
    "float32": F32, "float16": F16, "bfloat16": BF16, "int32": I32,
}  # fmt: skip


def dtype_of(given: DTypeLike) -> DType:
    """The dtype meant: itself, its name, "f16" or "float16", or NumPy's, np.float16.

    Raises:
        ValueError: there is no such dtype.
    """
    if isinstance(given, DType):
        return given
    name = given if isinstance(given, str) else None
    if name is None:
        try:
            name = np.dtype(given).name
        except TypeError:
            name = ""
    if name not in _BY_NAME:
        raise ValueError(f"dtype must be one of {', '.join(d.name for d in (*ALL, *QUANTIZED))}, not {given!r}")
    return _BY_NAME[name]


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to the nearest, ties to even; NaN stays NaN."""
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 to float32, exactly."""
    return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)  # of shape () too an array, not a NumPy scalar
