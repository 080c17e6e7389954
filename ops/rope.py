"""Rotary position embedding: pairs of elements turned by angles that grow with the position, as ggml's `rope_ext`."""

import enum
import math

import numpy as np

from ..errors import GradientError
from ..op import Int, ensure, op

__all__ = ["RopeMode", "rope", "rope_back"]


class RopeMode(enum.IntEnum):
    """Which elements of a row are turned together; the numbers are ggml's."""

    NORMAL = 0  # 2i and 2i + 1
    NEOX = 2  # i and i + n_dims / 2


def _shape(x, pos, freq_factors, *, n_dims, n_ctx_orig, freq_base, freq_scale, ext_factor, **_):
    ensure(x.ndim >= 3, "x must have the axes [..., T, H, D]")
    T, D = x.shape[-3], x.shape[-1]
    ensure(pos.shape == (T,), f"pos must have one position for each of T={T} places")
    ensure(0 <= n_dims <= D, f"n_dims={n_dims} must be from 0 (all) to {D}, the size of a row")
    n_dims = n_dims or D
    ensure(n_dims % 2 == 0, f"elements are turned in pairs, and n_dims={n_dims} is odd")
    if freq_factors is not None:
        ensure(
            freq_factors.shape == (n_dims // 2,), f"freq_factors must have one number for each of {n_dims // 2} pairs"
        )
    ensure(freq_base > 0, f"freq_base={freq_base} must be positive")
    if ext_factor != 0:
        ensure(n_ctx_orig > 0, "ext_factor (YaRN) needs n_ctx_orig, the context length of the training")
        ensure(freq_scale > 0, f"ext_factor (YaRN) needs a positive freq_scale, not {freq_scale}")
    return x.spec


def _constant_factors(needs) -> None:
    if needs[2]:
        raise GradientError("freq_factors are taken as constants: make them a leaf without param=True")


@op(inplace=("x",))
def rope(
    x,
    pos: Int,
    freq_factors=None,
    *,
    n_dims: int = 0,
    mode: RopeMode = RopeMode.NORMAL,
    n_ctx_orig: int = 0,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
):
    """The pairs of elements of x[..., T, H, D] turned by the angles of their positions pos[T].

    Pair i turns by pos * freq_base ** (-2 i / n_dims), divided by freq_factors[i].

    Args:
        n_dims: elements of a row that are turned, the others stay as they are; 0: all.
        mode: "normal" turns 2i with 2i + 1, "neox" i with i + n_dims / 2.
        freq_scale: every angle is multiplied with it: 1 / s for a context s times as long.
        ext_factor: YaRN: how much of that is taken back for pairs that turn often within n_ctx_orig positions:
            all of it above beta_fast turns, nothing below beta_slow; 0 switches it off.
        attn_factor: every turned element is multiplied with it, and with YaRN also with 1 + 0.1 ln(1 / freq_scale).
    """
    return _shape(
        x, pos, freq_factors, n_dims=n_dims, n_ctx_orig=n_ctx_orig, freq_base=freq_base, freq_scale=freq_scale,
        ext_factor=ext_factor,
    )  # fmt: skip


@rope.grad
def _(t, dout, *, needs):
    _constant_factors(needs)
    return rope_back(dout, *t.src[1:], **t.attrs), None, None


@op(inplace=("dout",))
def rope_back(
    dout,
    pos: Int,
    freq_factors=None,
    *,
    n_dims: int = 0,
    mode: RopeMode = RopeMode.NORMAL,
    n_ctx_orig: int = 0,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
):
    """The gradient of `rope`: turned the other way, and multiplied with the same factor."""
    return _shape(
        dout, pos, freq_factors, n_dims=n_dims, n_ctx_orig=n_ctx_orig, freq_base=freq_base, freq_scale=freq_scale,
        ext_factor=ext_factor,
    )  # fmt: skip


@rope_back.grad
def _(t, dout, *, needs):
    _constant_factors(needs)
    return rope(dout, *t.src[1:], **t.attrs), None, None


@rope.reference
def _(x, pos, freq_factors, *, n_dims, mode, **yarn):
    return _turned(x, pos, freq_factors, n_dims, mode, yarn, sign=1)


@rope_back.reference
def _(dout, pos, freq_factors, *, n_dims, mode, **yarn):
    return _turned(dout, pos, freq_factors, n_dims, mode, yarn, sign=-1)


def _turned(x, pos, freq_factors, n_dims, mode, yarn, sign):
    n_dims = n_dims or x.shape[-1]
    frequencies, factor = _frequencies(n_dims, **yarn)
    if freq_factors is not None:
        frequencies = frequencies / freq_factors
    angle = pos[:, None, None] * frequencies  # [T, 1, pairs]
    cos, sin = factor * np.cos(angle), sign * factor * np.sin(angle)
    first, second = (slice(0, n_dims, 2), slice(1, n_dims, 2))
    if mode is RopeMode.NEOX:
        first, second = slice(0, n_dims // 2), slice(n_dims // 2, n_dims)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def _frequencies(n_dims, *, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow):
    """Angles per position of the pairs, and the factor on turned elements."""
    pair = np.arange(n_dims // 2)
    frequencies = freq_base ** (-2.0 * pair / n_dims)
    if ext_factor == 0:
        return frequencies * freq_scale, attn_factor

    def pair_that_turns(times):
        """The pair that turns so often within n_ctx_orig positions."""
        return n_dims * math.log(n_ctx_orig / (times * 2 * math.pi)) / (2 * math.log(freq_base))

    low = max(0, math.floor(pair_that_turns(beta_fast)))
    high = min(n_dims - 1, math.ceil(pair_that_turns(beta_slow)))
    unscaled = ext_factor * (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1))
    return frequencies * (freq_scale * (1 - unscaled) + unscaled), attn_factor * (1 + 0.1 * math.log(1 / freq_scale))
