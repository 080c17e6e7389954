"""Quantized leaves with random bytes in their blocks: every bit that a decoder looks at is tried."""

import numpy as np

import ggrad as gg

SCALES = {  # where the halves of a block are
    gg.Q4_0: (0,), gg.Q4_1: (0, 2), gg.Q5_0: (0,), gg.Q5_1: (0, 2), gg.Q8_0: (0,), gg.Q4_K: (0, 2), gg.Q5_K: (0, 2),
    gg.Q6_K: (208,),
}  # fmt: skip


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: gg.DType) -> gg.Tensor:
    """A constant of random blocks; their scales are such that values are of the order of 1."""
    t = gg.tensor(shape=shape, dtype=dtype)
    memory = t.memory()
    memory[...] = rng.integers(0, 256, memory.shape)
    by_block = memory.reshape(-1, dtype.nbytes)
    size = 1 / np.abs(gg.dequantize(with_scales(by_block, dtype, np.ones(len(by_block))), dtype)).max(initial=1.0)
    with_scales(by_block, dtype, size * rng.uniform(-2, 2, len(by_block)))
    return t


def with_scales(by_block: np.ndarray, dtype: gg.DType, values: np.ndarray) -> np.ndarray:
    for at in SCALES[dtype]:
        by_block[:, at : at + 2] = values.astype(np.float16)[:, None].view(np.uint8)
    return by_block
