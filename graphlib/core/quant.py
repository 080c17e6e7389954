"""ggml's quantized blocks in NumPy: what their bytes mean, and how floats become blocks; for kernels, csrc/vec/quant.h.

A block is 32 values, or 256 in eight groups of 32 or sixteen of 16, that share a scale d of f16, and in some
types a minimum:

    q4_0, q5_0, q8_0   d q           q signed, of 4, 5 or 8 bits
    q4_1, q5_1         d q + m       q from 0; m of f16
    q4_k, q5_k         d s q - e m   q from 0; s, m of 6 bits for each group; e of f16
    q6_k               d s q         q signed, of 6 bits; s of 8 bits for each group

Values are exact in f32 but for the one rounding of the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .dtype import Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType
from .errors import ShapeError


def row_bytes(n: int, dtype: DType) -> int:
    """Bytes of a row of n elements."""
    return dtype.bytes_of(n)


def dequantize(blocks: np.ndarray, dtype: DType) -> np.ndarray:
    """The values, float32 [..., n], of blocks given as uint8 [..., bytes of a row]."""
    rows = np.ascontiguousarray(blocks).reshape(-1, dtype.nbytes)
    values = _DECODERS[dtype](rows)
    n = blocks.shape[-1] // dtype.nbytes * dtype.block
    return values.astype(np.float32).reshape(*blocks.shape[:-1], n)


def quantize(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The nearest blocks that ggml's own plain quantizers make: uint8 [..., bytes of a row].

    Args:
        values: floats [..., n], n a multiple of the dtype's block.
        dtype: Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0.

    Raises:
        ShapeError: another dtype, rows that are no whole number of blocks, NaN or infinities in them, or a block
            whose scale or minimum is more than f16 holds (65504): no byte of such a block would mean a number.  A
            scale that is less than f16's smallest (6e-8) becomes 0, and the block's values its minimum or 0.
    """
    values = np.asarray(values)
    where = f"quantize({dtype!r})"
    if dtype not in _ENCODERS:
        names = ", ".join(d.name for d in _ENCODERS)
        raise ShapeError(f"{where}: values can be quantized to {names}; blocks of other types are only read")
    if values.dtype.kind not in "fiu" or values.ndim == 0 or values.shape[-1] % dtype.block:
        raise ShapeError(
            f"{where}: it takes rows of numbers, multiples of {dtype.block}, not {values.dtype} {values.shape}"
        )
    with np.errstate(over="ignore"):
        x = np.asarray(values, np.float32).reshape(-1, dtype.block)
    if not np.isfinite(x).all():
        raise ShapeError(f"{where}: NaN and infinities have no place in a block")
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of an infinite scale is refused
        blocks = np.concatenate(_ENCODERS[dtype](x), axis=1) if x.size else np.empty((0, dtype.nbytes), np.uint8)
    _require_finite(where, x, blocks, dtype)
    return blocks.reshape(*values.shape[:-1], row_bytes(values.shape[-1], dtype))


def _require_finite(where: str, x: np.ndarray, blocks: np.ndarray, dtype: DType) -> None:
    """Refuse blocks with a scale or a minimum that is no finite f16: these are all that a block has of f16."""
    halves = 2 if dtype in (Q4_1, Q5_1) else 1
    wrong = ~np.isfinite(np.ascontiguousarray(blocks[:, : 2 * halves]).view(np.float16)).all(axis=1)
    if wrong.any():
        at = int(wrong.argmax())
        raise ShapeError(
            f"{where}: block {at} of {len(x)} holds values from {x[at].min():.6g} to {x[at].max():.6g}, and its "
            f"{'scale and minimum' if halves == 2 else 'scale'} must be at most 65504, the largest f16: "
            "divide the values by a constant, and multiply what is made of them with it"
        )


# -- values of blocks: uint8 [blocks, bytes] to float64 [blocks, elements] ---------------------------------------


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float64)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """All low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int64)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits.astype(np.int64) << 4


def _groups_of_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of each of eight groups, 6 bits each, from the twelve bytes behind the two halves."""
    low, high, rest = (blocks[:, a : a + 4].astype(np.int64) for a in (4, 8, 12))
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _nibbles_of_k(packed: np.ndarray) -> np.ndarray:
    """Group by group [blocks, 8, 32]: 32 bytes hold two groups, one in the low halves and one in the high."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_0(b):
    return _half(b, 0) * (_nibbles(b[:, 2:]) - 8)


def _q4_1(b):
    return _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)


def _q5_0(b):
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)) - 16)


def _q5_1(b):
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)) + _half(b, 2)


def _q8_0(b):
    return _half(b, 0) * b[:, 2:].view(np.int8)


def _q4_k(b):
    scale, minimum = _groups_of_k(b)
    return scale[..., None] * _nibbles_of_k(b[:, 16:]) - minimum[..., None]


def _q5_k(b):
    scale, minimum = _groups_of_k(b)
    fifth = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g of a byte is group g's
    return scale[..., None] * (_nibbles_of_k(b[:, 48:]) | fifth.astype(np.int64) << 4) - minimum[..., None]


def _q6_k(b):
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pairs = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | pairs.astype(np.int64) << 4) - 32
    scale = _half(b, 208) * b[:, 192:208].view(np.int8)
    return scale[..., None] * q.reshape(-1, 16, 16)


_DECODERS: dict[DType, Callable[[np.ndarray], np.ndarray]] = {
    Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q8_0: _q8_0, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k,
}  # fmt: skip


# -- blocks of values: float32 [blocks, 32] to the fields of the blocks ------------------------------------------


def _as_half(d: np.ndarray) -> np.ndarray:
    return d.astype(np.float16).view(np.uint8)


def _inverse(d: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))  # d is no f16 then, but 0


def _signed(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and q: the largest magnitude becomes -2**(bits - 1), so that its sign has one step more."""
    half = 1 << (bits - 1)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(-half)
    q = np.trunc(x * _inverse(d) + np.float32(half + 0.5))
    return d, np.clip(q, 0, 2 * half - 1).astype(np.uint8)


def _from_least(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, minimum and q."""
    most = (1 << bits) - 1
    least = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - least) / np.float32(most)
    q = np.trunc((x - least) * _inverse(d) + np.float32(0.5))
    return d, least, np.clip(q, 0, most).astype(np.uint8)


def _in_pairs(q: np.ndarray) -> np.ndarray:
    return (q[:, :16] & 15) | (q[:, 16:] & 15) << 4


def _fifths(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _to_q4_0(x):
    d, q = _signed(x, 4)
    return _as_half(d), _in_pairs(q)


def _to_q4_1(x):
    d, m, q = _from_least(x, 4)
    return _as_half(d), _as_half(m), _in_pairs(q)


def _to_q5_0(x):
    d, q = _signed(x, 5)
    return _as_half(d), _fifths(q), _in_pairs(q)


def _to_q5_1(x):
    d, m, q = _from_least(x, 5)
    return _as_half(d), _as_half(m), _fifths(q), _in_pairs(q)


def _to_q8_0(x):
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = (x * _inverse(d)).astype(np.float64)
    q = np.trunc(scaled + np.copysign(0.5, scaled))  # halves away from zero
    return _as_half(d), q.astype(np.int8).view(np.uint8)


_ENCODERS: dict[DType, Callable[[np.ndarray], tuple[np.ndarray, ...]]] = {
    Q4_0: _to_q4_0, Q4_1: _to_q4_1, Q5_0: _to_q5_0, Q5_1: _to_q5_1, Q8_0: _to_q8_0,
}  # fmt: skip
