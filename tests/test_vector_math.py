"""The vector functions behind unary ops, over all of f32: against double precision, in units in the last place.

The bounds hold for every instruction set; most reach less with FMA.
"""

import math

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import registry

pytestmark = pytest.mark.native

TINY = 2.0**-149  # f32's smallest denormal: the unit below 2^-126
EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, math.inf, -math.inf, math.nan, TINY, -TINY, 2.0**-126, -(2.0**-126),
    2.0**-126 - TINY, 3.4028234663852886e38, -3.4028234663852886e38, 88.72283, 88.72284, -87.33654, -87.3366, -103.97,
    -103.98, -104.0, 1e-8, 0.6249999, 0.625, 0.41421354, 0.70710677, 0.7071068, 1.4142135, 1.4142137, math.pi,
    math.pi / 2, 11999.9, 12000.1, 1e10,
]  # fmt: skip


def every_magnitude(n: int = 1 << 18) -> np.ndarray:
    """Random bit patterns, so that all exponents are equally likely, and ordinary numbers."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([bits, rng.normal(0, 3, n).astype(np.float32), rng.uniform(-110, 110, n).astype(np.float32)])


VALUES = np.concatenate([np.array(EDGES, np.float32), every_magnitude()])


def computed(op: str, *inputs: np.ndarray, **attrs) -> np.ndarray:
    with np.errstate(all="ignore"):
        t = registry[op].node(*map(gg.tensor, inputs), **attrs)
    gg.Graph().build_forward_expand(t).compute(threads=1)
    return t.numpy()


def exact(op: str, *inputs: np.ndarray, **attrs) -> np.ndarray:
    with np.errstate(all="ignore"):
        return registry[op].compute_reference([x.astype(np.float64) for x in inputs], attrs)


def ulps(got: np.ndarray, wanted: np.ndarray, coarse: float = 2.0**-126) -> np.ndarray:
    """How far apart, in units of the last place of the wanted value; where NaN or infinities differ, infinitely.

    Below `coarse` the unit grows no smaller.
    """
    with np.errstate(all="ignore"):
        rounded = wanted.astype(np.float32)
        unit = np.spacing(np.maximum(np.abs(rounded), np.float32(coarse))).astype(np.float64)
        off = np.abs(got.astype(np.float64) - wanted) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(wanted))
    return np.where(same, 0, np.where(np.isfinite(off), off, np.inf))


BOUNDS = {
    "exp": 1.3, "log": 1, "sin": 2, "cos": 2, "tanh": 1.5, "sigmoid": 3, "softplus": 2, "elu": 1,
    "sqrt": 0.51, "sqr": 0.51, "abs": 0, "relu": 0, "neg": 0, "silu": 4, "gelu_erf": 8, "expm1": 2, "sgn": 0,
    "step": 0, "floor": 0, "ceil": 0, "round": 0, "trunc": 0,
    "exp2": 1.3, "log2": 2, "log1p": 2, "erf": 4, "tan": 5, "asin": 3, "acos": 3, "atan": 3, "sinh": 4, "cosh": 4,
    "asinh": 4, "acosh": 4, "atanh": 4,
    # far below 0 they are exp of numbers that are themselves rounded: of 1.702 x, and of a cubic
    "gelu_quick": 100, "gelu": 200,
}  # fmt: skip
COARSE = {"silu": 2.0**-118, "gelu_quick": 2.0**-118, "gelu": 2.0**-118, "gelu_erf": 2.0**-118}  # x times a denormal


@pytest.mark.parametrize("op", BOUNDS)
def test_functions_are_within_a_few_ulp_everywhere(op, isa):
    off = ulps(computed(op, VALUES), exact(op, VALUES), COARSE.get(op, 2.0**-126))
    worst = np.argmax(off)
    assert off[worst] <= BOUNDS[op], f"{op}({VALUES[worst]!r}) is off by {off[worst]:.2f} ulp"


@pytest.mark.parametrize("op", ["silu_back", "gelu_back", "gelu_erf_back", "gelu_quick_back", "softplus_back"])
def test_slopes_are_within_six_roundings_everywhere(op, isa):
    """Slopes lie between -0.2 and 1.2 and cross 0, so their error is measured against 1."""
    ones = np.ones_like(VALUES)
    got, wanted = computed(op, ones, VALUES), exact(op, ones, VALUES)
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    off = np.nan_to_num(np.abs(got - wanted))
    worst = np.argmax(off)
    assert off[worst] <= 6 * 2.0**-24, f"{op} at {VALUES[worst]!r} is off by {off[worst]:.3g}"


def test_an_element_has_the_same_bits_wherever_it_stands_in_a_row(isa):
    x = np.random.default_rng(1).normal(0, 4, 131).astype(np.float32)
    for op in BOUNDS:
        whole = computed(op, x)
        for start in (1, 7, 16, 50):
            assert np.array_equal(computed(op, x[start:]), whole[start:], equal_nan=True), op
