"""Rotary position embedding: pairs of elements turned by angles that grow with the position, as ggml's `rope_ext`
and `rope_multi`."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.dtype import F32
from ..core.op import Int, ensure, op
from ..core.tensor import Tensor, tensor
from .elementwise import div, mul, sub
from .layout import cast, repeat_back, reshape, transpose
from .reduce import sum as sum_of
from .rows import get_rows
from .unary import sqr

__all__ = ["RopeMode", "rope", "rope_back", "rope_multi"]


class RopeMode(enum.IntEnum):
    """Which elements of a row are turned together, and by which positions; the numbers are ggml's."""

    NORMAL = 0  # 2i and 2i + 1
    NEOX = 2  # i and i + n_dims / 2
    MROPE = 8  # as NEOX; pairs in sections, each of which has positions of its own
    VISION = 24  # i and i + n_dims, so that all of a row is turned; frequencies begin anew in each section
    IMROPE = 40  # as MROPE, with the sections interleaved

    @property
    def multi(self) -> bool:
        """Whether a place has four positions: time, height, width and one more."""
        return self in (RopeMode.MROPE, RopeMode.VISION, RopeMode.IMROPE)


@dataclass(frozen=True)
class _Pairs:
    """Pair i of a row: elements first[i] and second[i], turned by the positions of `stream[i]`."""

    first: slice
    second: slice
    stream: np.ndarray
    exponent: np.ndarray  # its frequency is freq_base ** (-2 exponent / n_dims)
    n_dims: int

    @property
    def count(self) -> int:
        return len(self.stream)


def _pairs(D: int, n_dims: int, mode: RopeMode, sections: tuple[int, ...], offset: int) -> _Pairs:
    vision = mode is RopeMode.VISION
    n_dims = n_dims or (D // 2 if vision else D - offset)
    n = n_dims if vision else n_dims // 2
    pair = np.arange(n)
    stream, exponent = np.zeros(n, np.int64), pair
    if mode.multi and n:
        sections = (*sections, 0, 0, 0)[:4]
        starts = np.cumsum((0, *sections))
        sector = pair % starts[4]
        stream = np.searchsorted(starts[1:], sector, side="right")
        if vision:
            exponent = sector - starts[stream]
        if mode is RopeMode.IMROPE:
            turn = sector % 3
            stream = np.where(sector < 3 * np.array(sections)[turn], turn, 3)
    if mode is RopeMode.NORMAL:
        first, second = slice(offset, offset + 2 * n, 2), slice(offset + 1, offset + 2 * n, 2)
    else:
        first, second = slice(offset, offset + n), slice(offset + n, offset + 2 * n)
    return _Pairs(first, second, stream, exponent, n_dims)


def _shape(x, pos, freq_factors, *, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, sections, offset, **_):
    ensure(x.ndim >= 3, "x must have the axes [..., T, H, D]")
    T, D = x.shape[-3], x.shape[-1]
    if mode.multi:
        ensure(pos.shape == (4 * T,), f"pos must have four positions for each of T={T} places: all first ones, ...")
        ensure(
            1 <= len(sections) <= 4 and min(sections) >= 0 and max(sections) > 0,
            f"sections={sections} must be up to four numbers of pairs, not all of them 0",
        )
    else:
        ensure(pos.shape == (T,), f"pos must have one position for each of T={T} places")
        ensure(not any(sections), f"sections={sections} are for the modes mrope, imrope and vision")
    ensure(0 <= n_dims <= D, f"n_dims={n_dims} must be from 0 (all) to {D}, the size of a row")
    ensure(0 <= offset <= D, f"offset={offset} must be from 0 to {D}, the size of a row")
    pairs = _pairs(D, n_dims, mode, sections, offset)
    if mode is RopeMode.VISION:
        ensure(
            2 * pairs.count == D and offset == 0, f"in the mode vision n_dims={n_dims} must be half of a row, {D / 2:g}"
        )
    else:
        ensure(pairs.n_dims % 2 == 0, f"elements are turned in pairs, and n_dims={pairs.n_dims} is odd")
        ensure(offset + pairs.n_dims <= D, f"offset={offset} and n_dims={n_dims} go beyond {D}, the size of a row")
    if freq_factors is not None:
        ensure(
            freq_factors.shape == (pairs.count,), f"freq_factors must have one number for each of {pairs.count} pairs"
        )
    ensure(freq_base > 0, f"freq_base={freq_base} must be positive")
    if ext_factor != 0:
        ensure(n_ctx_orig > 0, "ext_factor (YaRN) needs n_ctx_orig, the context length of the training")
        ensure(freq_scale > 0, f"ext_factor (YaRN) needs a positive freq_scale, not {freq_scale}")
    return x.spec


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
    sections: tuple[int, ...] = (),
    offset: int = 0,
):
    """The pairs of elements of x[..., T, H, D] turned by the angles of their positions pos[T].

    Pair i turns by pos * freq_base ** (-2 i / n_dims), divided by freq_factors[i].

    Sources: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (YaRN: ext_factor,
    attn_factor, beta_fast and beta_slow).

    Args:
        n_dims: elements of a row that are turned, the others stay as they are; 0: all from `offset` on.
        mode: "normal" turns 2i with 2i + 1, "neox" i with i + n_dims / 2.  "mrope", "imrope" and "vision" have four
            positions for each place, pos[4 T]: all first ones, all second ones, ...; see `rope_multi`.
        freq_scale: every angle is multiplied with it: 1 / s for a context s times as long.
        ext_factor: YaRN: how much of that is taken back for pairs that turn often within n_ctx_orig positions:
            all of it above beta_fast turns, nothing below beta_slow; 0 switches it off.
        attn_factor: every turned element is multiplied with it, and with YaRN also with 1 + 0.1 ln(1 / freq_scale).
        sections: of the modes with four positions: how many pairs in turn use each of them.
        offset: the first element of a row that is turned.
    """
    return _shape(
        x, pos, freq_factors, n_dims=n_dims, mode=mode, n_ctx_orig=n_ctx_orig, freq_base=freq_base,
        freq_scale=freq_scale, ext_factor=ext_factor, sections=sections, offset=offset,
    )  # fmt: skip


@rope.grad
def _(t, dout, *, needs):
    dx = rope_back(dout, *t.src[1:], **t.attrs) if needs[0] else None
    return dx, None, _factors_gradient(t, dout, sign=1) if needs[2] else None


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
    sections: tuple[int, ...] = (),
    offset: int = 0,
):
    """The gradient of `rope`, its transpose: turned the other way, and multiplied with the same factor."""
    return _shape(
        dout, pos, freq_factors, n_dims=n_dims, mode=mode, n_ctx_orig=n_ctx_orig, freq_base=freq_base,
        freq_scale=freq_scale, ext_factor=ext_factor, sections=sections, offset=offset,
    )  # fmt: skip


@rope_back.grad
def _(t, dout, *, needs):
    dx = rope(dout, *t.src[1:], **t.attrs) if needs[0] else None
    return dx, None, _factors_gradient(t, dout, sign=-1) if needs[2] else None


def rope_multi(
    x: Tensor,
    pos: Tensor,
    freq_factors: Tensor | None = None,
    *,
    sections: Sequence[int],
    mode: RopeMode | str = RopeMode.MROPE,
    **options,
) -> Tensor:
    """`rope` with several positions for each place, as those of images and videos have.

    Pair i turns by the position of its section: with sections (s0, s1, s2, s3) the first s0 pairs by the first
    position, the next s1 by the second, and so on, over and over.

    Source: Wang et al. 2024, "Qwen2-VL", arXiv:2409.12191.

    Args:
        x: [..., T, H, D].
        pos: [4, T], or [4 T] in that order: time, height, width and one more.
        freq_factors: as of `rope`.
        sections: up to four numbers of pairs.
        mode: "mrope"; "imrope", where pairs take turns among time, height and width as long as their sections last;
            "vision", where all of a row is turned, and frequencies begin anew in each section.
        options: those of `rope`.

    Raises:
        ShapeError: there are not four positions for each place, or sections, shapes or dtypes do not fit.
    """
    flat = reshape(pos, (pos.size,)) if pos.shape[:1] == (4,) and pos.ndim == 2 else pos
    return rope(x, flat, freq_factors, mode=mode, sections=tuple(sections), **options)


def _factors_gradient(t: Tensor, dout: Tensor, sign: int) -> Tensor:
    """By freq_factors: a pair's angle is a / f, so da = -a / f^2 df; and its elements (u, v) move by (-v, u) da."""
    pos, factors = t.src[1:]
    assert pos is not None and factors is not None
    names = ("n_dims", "mode", "sections", "offset")
    pairs = _pairs(t.shape[-1], *(t.attrs[name] for name in names))
    yarn = {name: value for name, value in t.attrs.items() if name not in names}
    frequencies, _ = _frequencies(pairs, **yarn)
    T = t.shape[-3]
    turns = sub(mul(dout[..., pairs.second], t[..., pairs.first]), mul(dout[..., pairs.first], t[..., pairs.second]))
    turns = reshape(repeat_back(turns, shape=(T, 1, pairs.count)), (T, pairs.count))
    places = get_rows(reshape(cast(pos, dtype=F32), (pos.size // T, T)), tensor(pairs.stream))  # [pairs, T]
    return div(mul(sum_of(mul(turns, transpose(places)), axis=0), tensor(-sign * frequencies)), sqr(factors))


@rope.reference
def _(x, pos, freq_factors, **attrs):
    return _turned(x, pos, freq_factors, sign=1, **attrs)


@rope_back.reference
def _(dout, pos, freq_factors, **attrs):
    return _turned(dout, pos, freq_factors, sign=-1, **attrs)


def _turned(x, pos, freq_factors, *, sign, n_dims, mode, sections, offset, **yarn):
    pairs = _pairs(x.shape[-1], n_dims, mode, sections, offset)
    frequencies, factor = _frequencies(pairs, **yarn)
    if freq_factors is not None:
        frequencies = frequencies / freq_factors
    positions = pos.reshape(-1, x.shape[-3])[pairs.stream].T if pos.size else np.zeros((0, pairs.count))
    angle = (positions * frequencies)[:, None, :]  # [T, 1, pairs]
    cos, sin = factor * np.cos(angle), sign * factor * np.sin(angle)
    out = x.copy()
    out[..., pairs.first] = x[..., pairs.first] * cos - x[..., pairs.second] * sin
    out[..., pairs.second] = x[..., pairs.first] * sin + x[..., pairs.second] * cos
    return out


def _frequencies(pairs: _Pairs, *, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow):
    """Angles per position of the pairs, and the factor on turned elements."""
    n_dims, pair = pairs.n_dims, np.arange(pairs.count)
    frequencies = freq_base ** (-2.0 * pairs.exponent / max(1, n_dims))
    if ext_factor == 0:
        return frequencies * freq_scale, attn_factor

    def pair_that_turns(times):
        """The pair that turns so often within n_ctx_orig positions."""
        return n_dims * math.log(n_ctx_orig / (times * 2 * math.pi)) / (2 * math.log(freq_base))

    low = max(0, math.floor(pair_that_turns(beta_fast)))
    high = min(n_dims - 1, math.ceil(pair_that_turns(beta_slow)))
    unscaled = ext_factor * (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1))
    return frequencies * (freq_scale * (1 - unscaled) + unscaled), attn_factor * (1 + 0.1 * math.log(1 / freq_scale))
