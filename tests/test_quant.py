"""Quantized constants: how they are made, what they refuse, and that decoding is exact on every instruction set."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, ShapeError
from ggrad.testing.cases.blocks import SCALES, random_blocks

gguf = pytest.importorskip("gguf")

RNG = np.random.default_rng(0)
PLAIN = (gg.Q4_0, gg.Q4_1, gg.Q5_0, gg.Q5_1, gg.Q8_0)


def theirs(dtype):
    return getattr(gguf.GGMLQuantizationType, dtype.name.upper())


def values(kind: str) -> np.ndarray:
    x = RNG.normal(size=(6, 96)).astype(np.float32)
    if kind == "ties and zeros":
        x = np.round(x * 4) / 8
        x[2] = 0
    elif kind == "one sign":
        x = np.abs(x) + 3
    elif kind == "tiny":
        x *= 1e-34
    return x


@pytest.mark.parametrize("kind", ["normal", "ties and zeros", "one sign", "tiny"])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_quantizing_gives_the_bytes_of_the_gguf_package(dtype, kind):
    x = values(kind)
    np.testing.assert_array_equal(gg.quantize(x, dtype), gguf.quants.quantize(x, theirs(dtype)))


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_decoding_gives_the_values_of_the_gguf_package(dtype):
    t = random_blocks(RNG, (3, 2, 2 * dtype.block), dtype)
    np.testing.assert_array_equal(t.numpy(), gguf.quants.dequantize(t.memory(), theirs(dtype)).reshape(t.shape))


@pytest.mark.native
@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_kernels_decode_to_the_same_bits(dtype, isa):
    t = random_blocks(RNG, (5, 3 * dtype.block), dtype)
    whole, rows = gg.cast(t, dtype=gg.F32), gg.get_rows(t, [4, 0, 4])
    gg.Graph().build_forward_expand(whole, rows).compute(threads=2)
    np.testing.assert_array_equal(whole.numpy(), t.numpy())
    np.testing.assert_array_equal(rows.numpy(), t.numpy()[[4, 0, 4]])


LARGEST = {gg.Q4_0: 8 * 65519.0, gg.Q4_1: 65519.0, gg.Q5_0: 16 * 65519.0, gg.Q5_1: 65519.0, gg.Q8_0: 127 * 65519.0}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_a_block_whose_scale_leaves_f16_is_refused_and_the_largest_one_is_finite(dtype, sign):
    x = np.zeros((3, 64))
    x[1, 40] = sign * LARGEST[dtype]
    assert np.isfinite(gg.tensor(x, dtype=dtype).numpy()).all()
    for factor in (1.001, 1e10, 3e38 / LARGEST[dtype]):
        if dtype in (gg.Q4_1, gg.Q5_1) and sign > 0:
            x[1] = sign * LARGEST[dtype] * factor  # else the minimum is 0, and it is the scale that grows
        x[1, 40] = sign * LARGEST[dtype] * factor
        for make in (lambda: gg.quantize(x, dtype), lambda: gg.tensor(x, dtype=dtype)):
            with pytest.raises(ShapeError, match=r"block [23] of 6 holds values from .* largest f16"):
                make()


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_a_block_that_reaches_from_one_end_of_f32_to_the_other_is_refused(dtype):
    x = np.zeros(32)
    x[:2] = 3.4e38, -3.4e38
    with pytest.raises(ShapeError, match=r"block 0 of 1 .* largest f16"):
        gg.quantize(x, dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_nan_and_infinities_are_refused(dtype, value):
    x = np.zeros((2, 32))
    x[1, 7] = value
    with pytest.raises(ShapeError, match="NaN and infinities have no place in a block"):
        gg.quantize(x, dtype)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_values_below_the_smallest_scale_become_zero(dtype):
    got = gg.tensor(np.full((1, 32), 1e-9), dtype=dtype).numpy()
    assert np.isfinite(got).all() and np.abs(got).max() <= 6e-8


def test_a_leaf_takes_floats_or_blocks():
    x = values("normal")
    a = gg.tensor(x, dtype=gg.Q8_0)
    b = gg.tensor(gg.quantize(x, gg.Q8_0), dtype=gg.Q8_0)
    assert a.shape == b.shape == (6, 96) and a.nbytes == 6 * 3 * 34 and a.nb[:2] == (34, 102)
    np.testing.assert_array_equal(a.numpy(), b.numpy())
    np.testing.assert_allclose(a.numpy(), x, atol=np.abs(x).max() / 200)
    a.set(np.zeros((6, 96)))
    assert not a.numpy().any() and not a.memory().any()


def test_no_more_than_a_block_of_columns_is_decoded_at_a_time():
    w = gg.tensor(shape=(4096, 4096), dtype=gg.Q4_0)
    x = gg.tensor(shape=(64, 4096), param=True)
    plan = gg.Graph().build_backward_expand(gg.sum(gg.mul_mat(w, x))).plan()
    assert plan.inputs < 10 * 2**20 and plan.arena < 5 * 2**20 and plan.scratch < 2**20


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: gg.tensor(np.zeros((2, 48)), dtype=gg.Q4_0), ShapeError, r"multiples of 32 elements.* \(2, 48\)"),
        (lambda: gg.tensor(shape=(), dtype=gg.Q4_0), ShapeError, r"multiples of 32"),
        (lambda: gg.tensor(np.zeros((2, 256)), dtype=gg.Q4_K), ShapeError, r"quantized to q4_0, q4_1, .* only read"),
        (lambda: gg.quantize(np.full((1, 32), np.inf), gg.Q4_0), ShapeError, r"^quantize\(q4_0\): NaN and infinities"),
        (lambda: gg.quantize(np.zeros((1, 33)), gg.Q4_0), ShapeError, r"rows of numbers, multiples of 32"),
        (lambda: gg.tensor(shape=(2, 32), dtype=gg.Q4_0).set(np.zeros((2, 17), np.uint8)), ShapeError, r"\(2, 18\)"),
        (lambda: gg.tensor(shape=(2, 32), dtype=gg.Q4_0, param=True), GradientError, r"move in steps.* train a copy"),
        (
            lambda: gg.set_param(gg.tensor(shape=(2, 32), dtype=gg.Q4_0)),
            GradientError,
            r"gg.tensor\(t.numpy\(\)",
        ),
        (lambda: gg.cast(gg.tensor(shape=(2, 32)), dtype=gg.Q4_0), ShapeError, r"gg.quantize makes its blocks"),
        (lambda: gg.tensor(shape=(2, 64), dtype=gg.Q4_0)[:, 32:], ShapeError, r"rows of q4_0 blocks stay whole"),
        (lambda: gg.tensor(shape=(2, 64), dtype=gg.Q4_0) + 1.0, ShapeError, r"x is q4_0, .*gg.cast expands it"),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
