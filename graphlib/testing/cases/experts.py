"""Mixtures of experts: experts without rows, with all of them, the same one twice for a token."""

import ggrad as gg

from .blocks import SCALES, random_blocks


def product(m, E, M, K, T, U, rows=None, dtype=gg.F32):
    return gg.mul_mat_id(m(E, M, K, dtype=dtype), m(T, rows or U, K), m.ints(T, U, below=E))


def back(m, E, M, K, T, U, rows=None, below=None):
    return gg.mul_mat_id_back(m(T, rows or U, K), m(T, U, M), m.ints(T, U, below=below or E), experts=E)


def quantized(m, dtype, E=3, M=21, T=7, U=2, rows=None):
    a = random_blocks(m.rng, (E, M, 2 * dtype.block), dtype)
    return gg.mul_mat_id(a, m(T, rows or U, a.shape[2]), m.ints(T, U, below=E))


def quantized_back(m, dtype, E=3, M=21, T=7, U=2, blocks=2):
    a = random_blocks(m.rng, (E, M, blocks * dtype.block), dtype)
    return gg.mul_mat_id_quantized_back(a, m(T, U, M), m.ints(T, U, below=E))


CASES = {
    "mul_mat_id": {
        "a row for each": lambda m: product(m, 4, 6, 8, 5, 2),
        "one row for all": lambda m: product(m, 4, 6, 8, 5, 2, rows=1),
        "more experts than rows": lambda m: product(m, 9, 5, 3, 2, 1),
        "one expert": lambda m: product(m, 1, 7, 9, 13, 3),
        "many rows and blocks": lambda m: product(m, 3, 270, 400, 150, 3),
        "bf16 experts": lambda m: product(m, 3, 6, 8, 5, 2, dtype=gg.BF16),
        "nothing to sum": lambda m: product(m, 3, 4, 0, 5, 2),
        "no tokens": lambda m: product(m, 3, 4, 5, 0, 2),
        **{f"{dtype.name} experts": lambda m, d=dtype: quantized(m, d) for dtype in SCALES},
        "q4_0, one row for all": lambda m: quantized(m, gg.Q4_0, rows=1),
    },
    "mul_mat_id_quantized_back": {
        **{dtype.name: lambda m, d=dtype: quantized_back(m, d) for dtype in SCALES},
        "many rows and blocks": lambda m: quantized_back(m, gg.Q4_0, M=400, T=300, blocks=10),
        "no tokens": lambda m: quantized_back(m, gg.Q8_0, T=0),
    },
    "mul_mat_id_back": {
        "a row for each": lambda m: back(m, 4, 6, 8, 5, 2),
        "one row for all": lambda m: back(m, 4, 6, 8, 5, 2, rows=1),
        "experts without rows": lambda m: back(m, 9, 5, 3, 4, 2, below=2),
        "many rows and blocks": lambda m: back(m, 2, 270, 300, 450, 2),
        "no tokens": lambda m: back(m, 3, 4, 5, 0, 2),
        "no experts": lambda m: gg.mul_mat_id_back(m(0, 1, 4), m(0, 1, 3), m.ints(0, 1, below=1), experts=0),
    },
}
