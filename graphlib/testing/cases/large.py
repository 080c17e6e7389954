"""Cases that kernels cut into several tasks: without them equal bits for any number of threads would say nothing.

Sizes are odd, so that tasks begin and end within rows.  Families whose own cases are large enough are not here.
"""

import numpy as np

import ggrad as gg
from ggrad.core.op import registry

SHAPE = (3, 41, 401)  # 49323 elements
TALL = (401, 123)

UNARY_BACK = ["abs", "cos", "elu", "gelu", "gelu_erf", "gelu_quick", "leaky_relu", "relu", "sigmoid", "silu", "sin"]
UNARY_BACK += ["expm1", "hardsigmoid", "hardswish"]
UNARY_BACK += ["softplus", "sqr", "sqrt", "tanh"]


def ids(m, *shape, below):
    """Row numbers that are not sorted, some of them often, some never."""
    return m.of(m.rng.integers(0, below, shape).astype(np.int32) // 3 * 3, dtype=gg.I32, param=False)


def heads(m, tokens, heads, size):
    return gg.permute(m(tokens, heads, size), axes=(1, 0, 2))


def apart(m, rows, size, batches):
    """Batches whose elements lie between each other's."""
    return gg.permute(m(rows, size, batches), axes=(2, 0, 1))


CASES = {
    **{
        f"{name}_back": {"large": lambda m, op=f"{name}_back": registry[op](m(*SHAPE), m(*SHAPE, low=0.5))}
        for name in UNARY_BACK
    },
    "xielu_back": {"large": lambda m: registry["xielu_back"](m(*SHAPE), m(*SHAPE), alpha_n=0.8, alpha_p=0.3, eps=-0.5)},
    "clamp_back": {"large": lambda m: registry["clamp_back"](m(*SHAPE), m(*SHAPE), min=-1.0, max=0.5)},
    "accumulate": {
        "large": lambda m: gg.accumulate(m.leaf(*SHAPE, param=False, role="accumulator"), m(*SHAPE, param=False))
    },
    "neg": {"large": lambda m: gg.neg(m(*SHAPE))},
    "scale": {"large": lambda m: gg.scale(m(*SHAPE), factor=-1.5, bias=0.25)},
    "cast": {
        "large to f16": lambda m: gg.cast(m(*SHAPE), dtype=gg.F16),
        "large from bf16": lambda m: gg.cast(m(*SHAPE, dtype=gg.BF16), dtype=gg.F32),
    },
    "repeat": {"large": lambda m: gg.repeat(m(3, 1, 401), shape=(6, 41, 401))},
    "slice_back": {
        "large": lambda m: registry["slice_back"](m(151, 203), shape=(307, 411), starts=(303, 1), steps=(-2, 2))
    },
    "slice_add": {
        "large": lambda m: registry["slice_add"](m(307, 411), m(151, 203), starts=(303, 1), steps=(-2, 2)),
        "the whole of it, reversed": lambda m: registry["slice_add"](m(5, 7), m(5, 7), starts=(4, 6), steps=(-1, -1)),
    },
    "get_rows": {"large": lambda m: gg.get_rows(m(*TALL), ids(m, 17, 29, below=401))},
    "mul_mat": {
        "large": lambda m: gg.mul_mat(m(203, 131), m(157, 131)),
        "large, grouped heads": lambda m: gg.mul_mat(m(2, 67, 45), m(6, 101, 45)),
        "large, the right one transposed": lambda m: gg.mul_mat(m(103, 67), m(67, 131).T),
        "large, both transposed, k in two blocks": lambda m: gg.mul_mat(m(401, 103).T, m(401, 131).T),
        "large, rows of more than a page": lambda m: gg.mul_mat(m(13, 37, 67), heads(m, 77, 13, 67)),
        "large, elements of a row apart": lambda m: gg.mul_mat(apart(m, 53, 35, 3), apart(m, 77, 35, 3)),
        **{
            f"large, {dtype.name}": lambda m, dtype=dtype: gg.mul_mat(m(103, 75, dtype=dtype), m(101, 75, dtype=dtype))
            for dtype in (gg.F16, gg.BF16)
        },
        **{
            f"large, {dtype.name}, both transposed": lambda m, dtype=dtype: gg.mul_mat(
                m(75, 103, dtype=dtype).T, m(75, 101, dtype=dtype).T
            )
            for dtype in (gg.F16, gg.BF16)
        },
    },
    "rope": {"large": lambda m: gg.rope(m(123, 5, 98), ids(m, 123, below=500), mode="neox")},
    "rope_back": {"large": lambda m: registry["rope_back"](m(123, 5, 98), ids(m, 123, below=500))},
}
