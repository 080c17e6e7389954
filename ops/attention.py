"""Attention without the score matrix.

q: [B, H, N, DK].  k: [B, HK, M, DK].  v: [B, HK, M, DV].  mask: [Bm, Hm, N or more, M], tiled over batch and heads.
out: [B, N, H, DV], ggml's order.  lse: [B, H, N].  Query head h reads kv head h // (H // HK).
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike

from ..errors import GradientError, ShapeError
from ..op import Half, ensure, op
from ..tensor import Pack, Spec, Tensor, tensor
from .layout import broadcast_to

__all__ = ["Causal", "flash_attn_back", "flash_attn_ext"]


class Causal(enum.IntEnum):
    """Which keys a query sees, of N queries and M keys.

    N = 2, M = 4     top-left      bottom-right
    query 0          x . . .       x x x .
    query 1          x x . .       x x x x
    """

    NONE = 0  # all
    TOP_LEFT = 1  # query i the keys up to i
    BOTTOM_RIGHT = 2  # query i the keys up to i + M - N: the last query sees the last key


# -- as graphs hold them ------------------------------------------------------------------------------------


@op
def flash_attn_ext(
    q, k, v, mask: Half | None = None, *, scale: float, max_bias: float, logit_softcap: float, causal: Causal
):
    """Attention and the log of each row's sum of exponentials, packed; see the function of this name."""
    B, H, N, DV = _sizes(q, k, v, mask)
    ensure(max_bias >= 0 and logit_softcap >= 0, "max_bias and logit_softcap must not be negative")
    ensure(max_bias == 0 or mask is not None, f"max_bias={max_bias} multiplies a mask, and there is none")
    return Pack(out=Spec((B, N, H, DV)), lse=Spec((B, H, N)))


@flash_attn_ext.grad
def _(t, dout, dlse, *, needs):
    q, k, v, mask = t.src
    out, lse = t.parts
    attrs = dict(t.attrs)
    _refuse_alibi("flash_attn_ext", attrs.pop("max_bias"))
    if needs[3]:
        raise GradientError(
            "flash_attn_ext gives its mask no gradient: make it a leaf without param=True; "
            "a bias that is to be learnt goes through soft_max(mul_mat(k, q), mask)"
        )
    if dout is None:  # only lse is used
        dout = broadcast_to(tensor(np.zeros(out.shape[-1])), shape=out.shape)
    return *back(q, k, v, out, lse, dout, mask, dlse, **attrs), None


@flash_attn_ext.reference
def _(q, k, v, mask, *, scale, max_bias, logit_softcap, causal):
    k, v = (x.repeat(q.shape[1] // max(1, x.shape[1]), axis=1) for x in (k, v))
    scores, hidden, _ = _scores(q, k, mask, scale, max_bias, logit_softcap, causal)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.where(hidden, 0, np.exp(scores - _or_zero(largest)))
    total = weights.sum(-1, keepdims=True)
    out = _product(weights / np.where(total == 0, 1, total), hidden, v)
    return out.swapaxes(1, 2), (largest + np.log(total))[..., 0]


@op
def flash_attn_back(
    q, k, v, out, lse, dout, mask: Half | None = None, dlse=None, *, scale: float, logit_softcap: float, causal: Causal
):
    """Gradients of attention by q, k and v, packed; see the function of this name."""
    B, H, N, DV = _sizes(q, k, v, mask)
    for name, t, shape in (
        ("out", out, (B, N, H, DV)),
        ("dout", dout, (B, N, H, DV)),
        ("lse", lse, (B, H, N)),
        ("dlse", dlse, (B, H, N)),
    ):
        ensure(t is None or t.shape == shape, f"{name} must have the shape {shape}")
    return Pack(dq=q.spec, dk=k.spec, dv=v.spec)


@flash_attn_back.reference
def _(q, k, v, out, lse, dout, mask, dlse, *, scale, logit_softcap, causal):
    B, HK, M, _ = k.shape
    H = q.shape[1]
    group = H // max(1, HK)
    k, v, dout = k.repeat(group, axis=1), v.repeat(group, axis=1), dout.swapaxes(1, 2)
    scores, hidden, slope = _scores(q, k, mask, scale, 0.0, logit_softcap, causal)
    weights = np.where(hidden, 0, np.exp(scores - _or_zero(lse)[..., None]))
    delta = (dout * out.swapaxes(1, 2)).sum(-1) - (0 if dlse is None else dlse)
    ds = np.where(hidden, 0, weights * (dout @ v.swapaxes(2, 3) - delta[..., None]) * slope * scale)

    def per_kv_head(x):
        return x.reshape(B, HK, group, M, x.shape[-1]).sum(2)

    seen_by = hidden.swapaxes(2, 3)
    dk = _product(ds.swapaxes(2, 3), seen_by, q)
    dv = _product(weights.swapaxes(2, 3), seen_by, dout)
    return _product(ds, hidden, k), per_kv_head(dk), per_kv_head(dv)


forward, back = flash_attn_ext, flash_attn_back  # their names are the users', below


def _refuse_alibi(op_name: str, max_bias: float) -> None:
    if max_bias > 0:
        raise GradientError(
            f"{op_name} has no gradient with max_bias={max_bias} (ALiBi): "
            "leave max_bias at 0 and multiply the slopes of the heads into a mask of shape [1, H, N, M]"
        )


def _sizes(q, k, v, mask) -> tuple[int, int, int, int]:
    """B, H, N, DV, once everything fits."""
    ensure(q.ndim == k.ndim == v.ndim == 4, "q, k and v must have four axes: [batch, heads, queries or keys, d]")
    (B, H, N, DK), (HB, HK, M, HD), DV = q.shape, k.shape, v.shape[3]
    ensure(k.shape[:3] == v.shape[:3], f"k and v differ in batch, heads or keys: {k.shape[:3]} and {v.shape[:3]}")
    ensure(HB == B, f"q has {B} batches, k {HB}")
    ensure(HD == DK, f"rows of q have {DK} elements, rows of k {HD}")
    ensure(H % HK == 0 if HK else H == 0, f"the {HK} heads of k do not divide the {H} of q")
    if mask is not None:
        ensure(2 <= mask.ndim <= 4, f"the mask must have 2 to 4 axes, not {mask.ndim}")
        Bm, Hm, Nm, Mm = (1,) * (4 - mask.ndim) + mask.shape
        ensure(Mm == M, f"rows of the mask have {Mm} elements for {M} keys")
        ensure(Nm >= N, f"the mask has {Nm} rows for {N} queries")
        ensure(B % Bm == 0 if Bm else B == 0, f"the {Bm} batches of the mask do not tile {B}")
        ensure(H % Hm == 0 if Hm else H == 0, f"the {Hm} heads of the mask do not tile {H}")
    return B, H, N, DV


# -- as users call them -------------------------------------------------------------------------------------


def flash_attn_ext(  # type: ignore[no-redef]
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    mask: Tensor | ArrayLike | None = None,
    *,
    scale: float | None = None,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    causal: str | bool | Causal | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention: softmax(scale * q @ k.T + mask) @ v for every head, in memory that grows with N + M only.

    Args:
        q: [B, H, N, DK].
        k, v: [B, HK, M, DK] and [B, HK, M, DV]; query head h reads kv head h // (H // HK).
        mask: f32, f16 or bf16 [N or more, M], with [Hm] or [Bm, Hm] before that which tile heads and batches; it is
            added to the scores.  A boolean NumPy array says which keys to keep.
        scale: default 1 / sqrt(DK).
        max_bias: of ALiBi, as in ggml: the mask is multiplied with a slope for each head.  No gradient.
        logit_softcap: c > 0 makes scores s into c * tanh(s / c), before the mask.
        causal: "top-left": query i sees the keys up to i.  "bottom-right" or True: up to i + M - N, so that the
            last query sees the last key.
        return_lse: also give the log of the sum of exp(scores) of each row, [B, H, N].

    Returns:
        [B, N, H, DV].  What is masked out (-inf) or hidden by causality counts for nothing, whatever it holds; a
        row that sees no key gives 0, and -inf as its lse.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        GradientError: when gradients are built, with max_bias or for a mask.
    """
    q = _tensor(q)
    out, lse = forward(
        q, k, v, _mask(mask), scale=_scale(scale, q), max_bias=max_bias, logit_softcap=logit_softcap,
        causal=_causal(causal),
    )  # fmt: skip
    return (out, lse) if return_lse else out


def flash_attn_back(  # type: ignore[no-redef]
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    mask: Tensor | ArrayLike | None = None,
    d: Tensor | ArrayLike | None = None,
    *,
    scale: float | None = None,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    causal: str | bool | Causal | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """The gradients of `flash_attn_ext` by q, k and v, for the gradient `d` of its result.

    Args:
        d: [B, N, H, DV].
        out, lse: results of `flash_attn_ext` for the same arguments; left out, they are computed first.

    Returns:
        One tensor of one axis that holds dq, dk and dv: `parts` are the three, `offsets` their places in bytes.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        GradientError: max_bias is not 0.
    """
    _refuse_alibi("flash_attn_back", max_bias)
    if d is None:
        raise TypeError("flash_attn_back() needs d, the gradient of the result")
    q, k, v, d, mask = _tensor(q), _tensor(k), _tensor(v), _tensor(d), _mask(mask)
    attrs = {"scale": _scale(scale, q), "logit_softcap": logit_softcap, "causal": _causal(causal)}
    if out is None or lse is None:
        try:
            _sizes(q, k, v, mask)
        except ShapeError as error:
            raise ShapeError(f"flash_attn_back({back._given([q, k, v, None, None, d, mask, None])}): {error}") from None
        out, lse = forward(q, k, v, mask, max_bias=0.0, **attrs)
    dq, _, _ = back(q, k, v, out, lse, d, mask, **attrs)
    return dq.src[0]


def _tensor(x: Tensor | ArrayLike) -> Tensor:
    return x if isinstance(x, Tensor) else tensor(x)


def _mask(mask: Tensor | ArrayLike | None) -> Tensor | None:
    if mask is None or isinstance(mask, Tensor):
        return mask
    mask = np.asarray(mask)
    return tensor(np.where(mask, 0, -np.inf).astype(np.float16) if mask.dtype == bool else mask)


def _scale(scale: float | None, q: Tensor) -> float:
    return max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale


def _causal(causal: str | bool | Causal | None):
    if causal is None or causal is False:
        return Causal.NONE
    return Causal.BOTTOM_RIGHT if causal is True else causal


# -- in NumPy -----------------------------------------------------------------------------------------------


def _scores(q, k, mask, scale, max_bias, logit_softcap, causal):
    """Of every pair its score (-inf where hidden), whether it is hidden, and the softcap's derivative."""
    B, H, N, _ = q.shape
    M = k.shape[2]
    scores = scale * (q @ k.swapaxes(2, 3))
    slope = np.ones(())
    if logit_softcap > 0:
        capped = np.tanh(scores / logit_softcap)
        scores, slope = logit_softcap * capped, 1 - capped**2
    shift = {Causal.NONE: M, Causal.TOP_LEFT: 0, Causal.BOTTOM_RIGHT: M - N}[Causal(causal)]
    hidden = np.broadcast_to(~np.tri(N, M, shift, bool), scores.shape)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)[:, :, :N]
        mask = mask[np.ix_(np.arange(B) % max(1, len(mask)), np.arange(H) % max(1, mask.shape[1]))]
        hidden = hidden | (mask == -np.inf)
        scores = scores + _alibi_slopes(H, max_bias)[:, None, None] * mask
    return np.where(hidden, -np.inf, scores), hidden, slope


def _or_zero(largest):
    """What to subtract before exp: nothing in a row that sees no key, whose scores are all -inf."""
    return np.where(largest == -np.inf, 0, largest)


def _alibi_slopes(H: int, max_bias: float):
    """ggml's: falling powers of 2^(-max_bias / n) for n heads, n a power of two, and values between for the rest."""
    h = np.arange(H)
    if max_bias == 0 or H == 0:
        return np.ones(H)
    n = 2 ** int(np.log2(H))
    return np.where(h < n, 2.0 ** (-max_bias / n * (h + 1)), 2.0 ** (-max_bias / 2 / n * (2 * (h - n) + 1)))


def _product(weights, hidden, x):
    """weights @ x without the hidden pairs, whose x may be anything."""
    if np.isfinite(x).all():
        return weights @ x
    made = np.zeros((*weights.shape[:-1], x.shape[-1]))
    for j in range(x.shape[-2]):
        made += np.where(hidden[..., j, None], 0, weights[..., j, None] * x[..., None, j, :])
    return made
