"""Quantized constants: read by rows, expanded, multiplied.  All types, rows of one block and of several."""

import ggrad as gg

from .blocks import SCALES, random_blocks

ALL = {dtype.name: dtype for dtype in SCALES}


def weights(m, *shape, dtype=gg.Q4_0):
    return random_blocks(m.rng, shape, dtype)


def each(build):
    return {name: lambda m, d=dtype: build(m, d) for name, dtype in ALL.items()}


def few(build, *counts):
    """So few rows that what is decoded is not kept."""
    return {
        f"{name}, {n} of few rows": lambda m, d=dtype, n=n: build(m, d, n)
        for name, dtype in ALL.items()
        for n in counts
    }


CASES = {
    "get_rows": each(lambda m, d: gg.get_rows(weights(m, 5, 3 * d.block, dtype=d), m.ints(2, 3, below=5))),
    "cast": each(lambda m, d: gg.cast(weights(m, 2, 3, 2 * d.block, dtype=d), dtype=gg.F32))
    | {
        "q8_0 to f16": lambda m: gg.cast(weights(m, 3, 64, dtype=gg.Q8_0), dtype=gg.F16),
        "q4_0 to i32": lambda m: gg.cast(weights(m, 3, 64), dtype=gg.I32),
        "many q5_1 rows, from the last": lambda m: gg.cast(weights(m, 150, 96, dtype=gg.Q5_1)[::-1], dtype=gg.F32),
        "no q4_k rows": lambda m: gg.cast(weights(m, 0, 256, dtype=gg.Q4_K), dtype=gg.F32),
    },
    "slice_view": {"q4_k rows, reversed": lambda m: weights(m, 7, 3, 256, dtype=gg.Q4_K)[5:0:-2, 1:]},
    "permute": {"q8_0 heads": lambda m: gg.permute(weights(m, 2, 5, 3, 32, dtype=gg.Q8_0), axes=(0, 2, 1, 3))},
    "reshape": {"q6_k rows": lambda m: gg.reshape(weights(m, 2, 3, 256, dtype=gg.Q6_K), (6, 256))},
    "mul_mat": each(lambda m, d: gg.mul_mat(weights(m, 37, 2 * d.block, dtype=d), m(29, 2 * d.block)))
    | few(lambda m, d, n: gg.mul_mat(weights(m, 11, 256 + d.block, dtype=d), m(n, 256 + d.block)), 1, 2, 3, 5)
    | {
        "q8_0, few rows": lambda m: gg.mul_mat(weights(m, 37, 160, dtype=gg.Q8_0), m(3, 160)),
        "q6_k, one row": lambda m: gg.mul_mat(weights(m, 21, 512, dtype=gg.Q6_K), m(1, 512)),
        "q4_1, few columns": lambda m: gg.mul_mat(weights(m, 3, 96, dtype=gg.Q4_1), m(19, 96)),
        "q4_k, three blocks along k": lambda m: gg.mul_mat(weights(m, 67, 768, dtype=gg.Q4_K), m(33, 768)),
        "q5_0, large": lambda m: gg.mul_mat(weights(m, 203, 416, dtype=gg.Q5_0), m(157, 416)),
        "q4_0, grouped heads": lambda m: gg.mul_mat(weights(m, 2, 2, 5, 32), m(2, 6, 9, 32)),
        "q8_0 heads that lie permuted": lambda m: gg.mul_mat(
            gg.permute(weights(m, 1, 35, 2, 64, dtype=gg.Q8_0), axes=(0, 2, 1, 3)), m(1, 4, 9, 64)
        ),
        "q4_0 rows from the last": lambda m: gg.mul_mat(weights(m, 37, 64)[::-1], m(29, 64)),
        "no q4_0 rows": lambda m: gg.mul_mat(weights(m, 0, 32), m(5, 32)),
        "q4_0 and bf16": lambda m: gg.mul_mat(weights(m, 7, 32), m(5, 32, dtype=gg.BF16)),
    },
    "mul_mat_quantized_back": each(
        lambda m, d: gg.mul_mat_quantized_back(weights(m, 19, 3 * d.block, dtype=d), m(23, 19))
    )
    | few(lambda m, d, n: gg.mul_mat_quantized_back(weights(m, 10, 512 + d.block, dtype=d), m(n, 10)), 1, 3)
    | {
        "one row": lambda m: gg.mul_mat_quantized_back(weights(m, 400, 96), m(1, 400)),
        "large": lambda m: gg.mul_mat_quantized_back(weights(m, 203, 416, dtype=gg.Q5_0), m(157, 203)),
        "wide q6_k": lambda m: gg.mul_mat_quantized_back(weights(m, 9, 1280, dtype=gg.Q6_K), m(33, 9)),
        "grouped heads": lambda m: gg.mul_mat_quantized_back(weights(m, 2, 2, 5, 32), m(2, 6, 9, 5)),
        "nothing to sum": lambda m: gg.mul_mat_quantized_back(weights(m, 0, 32), m(5, 0)),
        "no rows": lambda m: gg.mul_mat_quantized_back(weights(m, 4, 32), m(0, 4)),
    },
}
