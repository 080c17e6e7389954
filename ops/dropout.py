"""Dropout whose mask is a function of a seed and of each element's place: for any layout and number of threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import ShapeError
from ..core.op import Draws, Int, ensure, op
from ..core.rng import UNKEYED
from ..core.tensor import Tensor

__all__ = ["dropout"]

GROUP = 64  # elements that draw from the same 16 blocks of random words
BLOCKS = 16


@op(layout="contiguous", inplace=("x",))
def dropout(x, seed: Int, *, p: float, key: int):
    ensure(seed.shape == (), "seed must be a scalar")
    ensure(0 <= p <= 1, f"p={p} must be from 0 to 1")
    ensure(UNKEYED <= key < 2**32, f"key={key} must be from 0 to 2**32 - 1")
    return x.spec


@dropout.call
def _(x: Tensor | ArrayLike, seed: Tensor | int, *, p: float, key: int | None = None) -> Tensor:
    """Each element of `x` with probability 1 - p, multiplied with 1 / (1 - p), else zero.

    Sources: Srivastava et al. 2014; Salmon et al. 2011 (Philox).

    Args:
        x: f32; halves are cast.
        seed: a `Rng`, which draws anew in each run; an i32 tensor of shape () that is set to another value before each
            run; or an int, with which all runs have the same mask.
        p: from 0 (`x` itself) to 1 (zeros).
        key: from 0 to 2**32 - 1.  By default each dropout of a graph gets the next that is free, 0, 1, 2, ..., when it
            comes into the graph, so that no two have the same mask; those of one seed and key do.

    Raises:
        ShapeError: the seed is no i32 scalar, or p or key is out of range.
    """
    if key is not None and key < 0:
        raise ShapeError(f"dropout(): key={key} must be from 0 to 2**32 - 1")
    return dropout.node(x, seed, p=p, key=UNKEYED if key is None else key)


dropout.draws = Draws(lambda attrs: attrs["key"], lambda attrs, key: {**attrs, "key": key})


@dropout.grad
def _(t, dout):
    return dropout.node(dout, t.src[1], **t.attrs), None


@dropout.reference
def _(x, seed, *, p, key):
    kept = kept_of_2_32(p)
    if kept == 2**32:
        return x
    if kept == 0:
        return np.zeros_like(x)
    words = _words(x.size, int(seed) % 2**32, key)
    return np.where(words.reshape(x.shape) < kept, x * np.float64(np.float32(2**32 / kept)), 0.0)


def kept_of_2_32(p: float) -> int:
    """How many of the 2**32 random words keep an element: 1 - p in steps that the mask can meet exactly."""
    return int(np.rint((1.0 - np.float64(np.float32(p))) * 2**32))


def _words(n: int, seed: int, key: int) -> np.ndarray:
    """A random word for each of n elements.

    Element i takes word (i % 64) // 16 of block 16 * (i // 64) + i % 16: so vectors of any width find
    their words side by side.
    """
    groups = -(-n // GROUP)
    block = np.arange(groups * BLOCKS, dtype=np.uint64)
    zero = np.zeros_like(block)
    words = philox4x32((block & 0xFFFFFFFF, block >> 32, zero, zero), (seed, key))
    return np.stack([w.reshape(groups, BLOCKS) for w in words], axis=1).reshape(-1)[:n]


def philox4x32(counter, key) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011): four random words for a counter of four and a key of two."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.uint64(k) for k in key)
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> np.uint64(32)) ^ c1 ^ k0, right & low, (left >> np.uint64(32)) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3
