"""Attention without the score matrix.

q: [B, H, N, DK].  k: [B, HK, M, DK].  v: [B, HK, M, DV].  mask: [Bm, Hm, N or more, M], tiled over batch and heads.
out: [B, N, H, DV], ggml's order.  lse: [B, H, N].  Query head h reads kv head h // (H // HK).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import GradientError, IndexRangeError, ShapeError
from ..core.exchange import array_of
from ..core.op import Draws, Half, Int, Record, Wanted, Weight, ensure, op, part, results
from ..core.rng import UNKEYED
from ..core.tensor import Pack, Spec, Tensor, tensor
from .dropout import kept_of_2_32, philox4x32
from .layout import broadcast_to, permute

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


@dataclass(frozen=True)
class Rules(Record):
    """Who sees whom, and how scores become weights; see `flash_attn_ext`.  In C it is gg_attention_rules."""

    scale: float
    logit_softcap: float
    causal: Causal
    window: tuple[int, ...]
    prefix: int
    dropout_p: float
    dropout_key: int

    @classmethod
    def of(cls, q: Tensor, scale, logit_softcap, causal, window, prefix, dropout_p, dropout_key) -> Rules:
        """Of what callers give, with defaults that depend on `q`."""
        if causal is None or causal is False:
            causal = Causal.NONE
        elif causal is True:
            causal = Causal.BOTTOM_RIGHT
        scale = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
        return cls(scale, logit_softcap, causal, (-1, -1) if window is None else window, prefix, dropout_p, dropout_key)


# -- as graphs hold them ------------------------------------------------------------------------------------


@op
def flash_attn_ext(
    q,
    k: Weight,
    v: Weight,
    mask: Half | None = None,
    sinks=None,
    cu_seqlens_q: Int | None = None,
    cu_seqlens_k: Int | None = None,
    seed: Int | None = None,
    *,
    rules: Rules,
    max_bias: float,
):
    # lse is top + log(total), where top is the largest score and total the sum of exp(score - top): of scores of
    # 1e30 lse alone would know the count of keys no more.
    B, H, N, DV = _sizes(q, k, v, mask, sinks)
    _check_structure(B, cu_seqlens_q, cu_seqlens_k, rules)
    _check_dropout(seed, rules)
    ensure(max_bias >= 0 and rules.logit_softcap >= 0, "max_bias and logit_softcap must not be negative")
    ensure(max_bias == 0 or mask is not None, f"max_bias={max_bias} multiplies a mask, and there is none")
    row = Spec((B, H, N))
    return Pack(out=Spec((B, N, H, DV)), lse=row, top=row, total=row)


@flash_attn_ext.grad
def _(t, dout, dlse, dtop, dtotal, *, needs):
    q, k, v, mask, sinks, *rest = t.src
    out, _, top, total = t.parts
    _refuse_alibi("flash_attn_ext", t.attrs["max_bias"])
    for name, x, needed in zip("kv", (k, v), needs[1:3], strict=True):
        _refuse_quantized(name, x, needed)
    if dout is None:  # only lse is used
        dout = broadcast_to(tensor(np.zeros(out.shape[-1])), shape=out.shape)
    by_token = q.shape[1] > 1 and all(x.shape[1] == 1 or x.strides[1] < x.strides[2] for x in (q, k, v))
    *dqkv, d_sinks, d_mask = flash_attn_back.node(
        q, k, v, out, top, dout, total, mask, dlse, sinks, *rest,
        rules=t.attrs["rules"], by_token=by_token, wanted=[*needs[:3], needs[4], needs[3]],
    )  # fmt: skip
    if by_token:
        dqkv = [None if d is None else permute(d, axes=(0, 2, 1, 3)) for d in dqkv]
    return *dqkv, d_mask, d_sinks, None, None, None


@flash_attn_ext.flops
def _(t):
    q, k, v = t.src[:3]
    return 2 * _pairs(q, k, t.attrs["rules"]) * (q.shape[3] + v.shape[3])


@flash_attn_ext.reference
def _(q, k, v, mask, sinks, cu_seqlens_q, cu_seqlens_k, seed, *, rules, max_bias):
    k, v = _of_query_heads(q, k), _of_query_heads(q, v)
    s = _Scores.of("flash_attn_ext", q, k, mask, sinks, cu_seqlens_q, cu_seqlens_k, seed, max_bias, rules)
    top = np.maximum(s.scores.max(-1, keepdims=True, initial=-np.inf), s.sinks)
    weights = np.where(s.hidden, 0, np.exp(s.scores - _or_zero(top)))
    total = weights.sum(-1, keepdims=True) + np.exp(s.sinks - _or_zero(top))
    top = np.where(np.isnan(total), np.nan, top)
    kept = np.where(s.hidden, 0, s.dropout * weights / np.where(total == 0, 1, total))
    out = _product(kept, s.hidden, v)
    return out.swapaxes(1, 2), (top + np.log(total))[..., 0], top[..., 0], total[..., 0]


@op
def flash_attn_back(
    q,
    k: Weight,
    v: Weight,
    out,
    top,
    dout,
    total=None,
    mask: Half | None = None,
    dlse=None,
    sinks=None,
    cu_seqlens_q: Int | None = None,
    cu_seqlens_k: Int | None = None,
    seed: Int | None = None,
    *,
    rules: Rules,
    by_token: bool,
    wanted: Wanted = (),
):
    # dq, dk and dv are [B, heads, N or M, D], or by token [B, N or M, heads, D], as q, k and v lie in the product that
    # makes all of them.
    B, H, N, DV = _sizes(q, k, v, mask, sinks)
    _check_structure(B, cu_seqlens_q, cu_seqlens_k, rules)
    _check_dropout(seed, rules)
    for name, t, shape in (
        ("out", out, (B, N, H, DV)),
        ("dout", dout, (B, N, H, DV)),
        ("lse", top, (B, H, N)),
        ("total", total, (B, H, N)),
        ("dlse", dlse, (B, H, N)),
    ):
        ensure(t is None or t.shape == shape, f"{name} must have the shape {shape}")
    dq, dk, dv = (Spec((b, n, h, d) if by_token else (b, h, n, d)) for b, h, n, d in (q.shape, k.shape, v.shape))
    d_sinks, d_mask = (None if t is None else Spec(t.shape) for t in (sinks, mask))
    return results(wanted, dq=dq, dk=dk, dv=dv, d_sinks=d_sinks, d_mask=d_mask)


@flash_attn_back.flops
def _(t):
    q, k, v = t.src[:3]
    dq, dk, dv, *_ = t.attrs["wanted"]
    return 2 * _pairs(q, k, t.attrs["rules"]) * ((1 + dq + dk) * q.shape[3] + (1 + dv) * v.shape[3])


@flash_attn_back.reference
def _(
    q, k, v, out, top, dout, total, mask, dlse, sinks, cu_seqlens_q, cu_seqlens_k, seed,
    *, rules, by_token,
):  # fmt: skip
    k_shape, v_shape = k.shape, v.shape
    k, v, dout = _of_query_heads(q, k), _of_query_heads(q, v), dout.swapaxes(1, 2)
    s = _Scores.of("flash_attn_back", q, k, mask, sinks, cu_seqlens_q, cu_seqlens_k, seed, 0.0, rules)
    total = np.ones((*top.shape, 1)) if total is None else np.where(total == 0, 1, total)[..., None]
    weights = np.where(s.hidden, 0, np.exp(s.scores - _or_zero(top)[..., None]) / total)
    out = out.swapaxes(1, 2)
    delta = np.where(out == 0, 0, dout * out).sum(-1) - (0 if dlse is None else dlse)
    dweights = np.where(s.dropout == 0, 0, s.dropout * (dout @ v.swapaxes(2, 3)))
    dmasked = np.where(s.hidden, 0, weights * (dweights - delta[..., None]))
    ds = np.where(s.hidden, 0, dmasked * s.slope * rules.scale)
    seen_by = s.hidden.swapaxes(2, 3)
    dk = _product(ds.swapaxes(2, 3), seen_by, q)
    dv = _product((s.dropout * weights).swapaxes(2, 3), seen_by, dout)
    made = [_product(ds, s.hidden, k), _per_kv_head(dk, k_shape), _per_kv_head(dv, v_shape)]
    made = [x.swapaxes(1, 2) for x in made] if by_token else made
    share = np.exp(s.sinks - _or_zero(top)[..., None]) / total
    d_sinks = -np.where(s.sinks == -np.inf, 0, share * delta[..., None]).sum((0, 2, 3))
    return *made, d_sinks, None if mask is None else _mask_gradient(dmasked, mask)


# -- what is refused ----------------------------------------------------------------------------------------


def _refuse_alibi(op_name: str, max_bias: float) -> None:
    if max_bias > 0:
        raise GradientError(
            f"{op_name} has no gradient with max_bias={max_bias} (ALiBi): "
            "leave max_bias at 0 and multiply the slopes of the heads into a mask of shape [1, H, N, M]"
        )


def _refuse_quantized(name: str, x: Tensor, needed: bool) -> None:
    if needed and x.dtype.quantized:
        raise GradientError(
            f"flash_attn_ext has no gradient for {name}, which is {x.dtype}: "
            "train it as f32, f16 or bf16 and quantize it afterwards"
        )


def _sizes(q, k, v, mask, sinks) -> tuple[int, int, int, int]:
    """B, H, N, DV, once everything fits."""
    ensure(q.ndim == k.ndim == v.ndim == 4, "q, k and v must have four axes: [batch, heads, queries or keys, d]")
    (B, H, N, DK), (HB, HK, M, HD), DV = q.shape, k.shape, v.shape[3]
    ensure(k.shape[:3] == v.shape[:3], f"k and v differ in batch, heads or keys: {k.shape[:3]} and {v.shape[:3]}")
    ensure(HB == B, f"q has {B} batches, k {HB}")
    ensure(HD == DK, f"rows of q have {DK} elements, rows of k {HD}")
    ensure(H % HK == 0 if HK else H == 0, f"the {HK} heads of k do not divide the {H} of q")
    ensure(sinks is None or sinks.shape == (H,), f"sinks must have one element for each of the {H} heads")
    if mask is not None:
        ensure(2 <= mask.ndim <= 4, f"the mask must have 2 to 4 axes, not {mask.ndim}")
        Bm, Hm, Nm, Mm = (1,) * (4 - mask.ndim) + mask.shape
        ensure(Mm == M, f"rows of the mask have {Mm} elements for {M} keys")
        ensure(Nm >= N, f"the mask has {Nm} rows for {N} queries")
        ensure(B % Bm == 0 if Bm else B == 0, f"the {Bm} batches of the mask do not tile {B}")
        ensure(H % Hm == 0 if Hm else H == 0, f"the {Hm} heads of the mask do not tile {H}")
    return B, H, N, DV


def _check_structure(B: int, cu_q, cu_k, rules: Rules) -> None:
    window = rules.window
    ensure(len(window) == 2 and min(window) >= -1, f"window={window} must be two numbers of keys, -1 for no bound")
    ensure(rules.prefix >= 0, f"prefix={rules.prefix} is negative")
    ensure((cu_q is None) == (cu_k is None), "packed sequences need both cu_seqlens_q and cu_seqlens_k")
    if cu_q is not None:
        ensure(B == 1, f"packed sequences are one batch, not {B}")
        ensure(
            cu_q.ndim == 1 and cu_q.shape == cu_k.shape and cu_q.size > 0,
            "cu_seqlens_q and cu_seqlens_k must have one element more than there are sequences",
        )


def _check_dropout(seed, rules: Rules) -> None:
    p, key = rules.dropout_p, rules.dropout_key
    ensure(0 <= p <= 1, f"dropout_p={p} must be from 0 to 1")
    ensure(UNKEYED <= key < 2**32, f"dropout_key={key} must be from 0 to 2**32 - 1")
    ensure(p == 0 or seed is not None, f"dropout_p={p} needs a seed")
    ensure(seed is None or seed.shape == (), "seed must be a scalar")


# -- as users call them -------------------------------------------------------------------------------------


@flash_attn_ext.call
def _(
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    mask: Tensor | ArrayLike | None = None,
    *,
    sinks: Tensor | ArrayLike | None = None,
    cu_seqlens_q: Tensor | ArrayLike | None = None,
    cu_seqlens_k: Tensor | ArrayLike | None = None,
    scale: float | None = None,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    causal: str | bool | Causal | None = None,
    window: tuple[int, int] | None = None,
    prefix: int = 0,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    dropout_key: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention: softmax(scale * q @ k.T + mask) @ v for every head, in memory that grows with N + M only.

        s = scale * q.k,  c tanh(s / c) if there is a softcap,  + mask
        p = exp(s - lse),  lse = log(sum of exp(s) over the keys that the query sees [+ exp(sink)])
        out = sum of p v, with dropout: of those p that are kept, over 1 - dropout_p

    A query sees a key unless the mask, causality or the window hides it, or it is of another sequence:

        N = 2, M = 4     causal="top-left"     "bottom-right"     causal=None, window=(1, 0)
        query 0          x . . .               x x x .            . x x .
        query 1          x x . .               x x x x            . . x x

    Sources: Dao et al. 2022, arXiv:2205.14135, and Dao 2023, arXiv:2307.08691, which compute it in tiles; Press et al.
    2021, arXiv:2108.12409 (ALiBi); Xiao et al. 2023, arXiv:2309.17453 (sinks); Salmon et al. 2011 (Philox).

    Args:
        q: [B, H, N, DK].
        k, v: [B, HK, M, DK] and [B, HK, M, DV]; query head h reads kv head h // (H // HK).  f16, bf16 and
            quantized ones are read as they are.
        mask: f32, f16 or bf16 [N or more, M], with [Hm] or [Bm, Hm] before that which tile heads and batches; it is
            added to the scores.  A boolean NumPy array says which keys to keep.
        sinks: [H], one more score for each head, of a key without a value.
        cu_seqlens_q, cu_seqlens_k: i32 [n + 1], with B = 1: n sequences lie one after another along N and M,
            number i from cu_seqlens[i] up to cu_seqlens[i + 1], and each is attended to by itself.  The numbers rise
            from 0 to N and M at most; rows beyond the last belong to no sequence and see nothing.
        scale: default 1 / sqrt(DK).
        max_bias: of ALiBi, as in ggml: the mask is multiplied with a slope for each head.  No gradient.
        logit_softcap: c > 0 makes scores s into c * tanh(s / c), before the mask.
        causal: "top-left": query i sees the keys up to i.  "bottom-right" or True: up to i + M - N, so that the
            last query sees the last key.
        window: (left, right): the keys from p - left up to p + right, -1 for no bound, where p is the query's
            position among the keys: i with causal="top-left", else i + M - N.
        prefix: so many of the first keys are in every window (causality still hides them).
        dropout_p: the chance that a weight is dropped; the others are divided by 1 - dropout_p.
        seed: of dropout, as of `ggrad.dropout`: a `Rng`, a scalar i32 tensor, or an int.  Whether query i of
            head h keeps key j of sequence b (a row of the batch, or a packed one) is decided by word j % 4
            of Philox4x32-10 of the counter (j // 4, i, h, b) and the key (seed, dropout_key).
        dropout_key: by default the next that is free in the graph, when the node comes into it.
        return_lse: also give lse, [B, H, N].

    Returns:
        [B, N, H, DV].  What is masked out (-inf) or hidden counts for nothing, whatever it holds; a row that sees
        no key gives 0, and the sink or -inf as its lse.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        GradientError: when gradients are built, with max_bias, or for k or v if they are quantized.
        IndexRangeError: during a run, cu_seqlens that do not rise from 0 to N and M at most.
    """
    q = _tensor(q)
    seed = seed if dropout_p else None
    if dropout_key is None:
        dropout_key = 0 if seed is None else UNKEYED
    elif dropout_key < 0:
        raise ShapeError(f"flash_attn_ext(): dropout_key={dropout_key} must be from 0 to 2**32 - 1")
    rules = Rules.of(q, scale, logit_softcap, causal, window, prefix, dropout_p, dropout_key)
    out, lse, _, _ = flash_attn_ext.node(
        q, k, v, _mask(mask), sinks, cu_seqlens_q, cu_seqlens_k, seed, rules=rules, max_bias=max_bias
    )
    return (out, lse) if return_lse else out


flash_attn_ext.draws = Draws(
    lambda attrs: attrs["rules"].dropout_key,
    lambda attrs, key: {**attrs, "rules": replace(attrs["rules"], dropout_key=key)},
)


@flash_attn_back.call
def _(
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    mask: Tensor | ArrayLike | None = None,
    d: Tensor | ArrayLike | None = None,
    *,
    d_lse: Tensor | ArrayLike | None = None,
    out: Tensor | ArrayLike | None = None,
    lse: Tensor | ArrayLike | None = None,
    sinks: Tensor | ArrayLike | None = None,
    cu_seqlens_q: Tensor | ArrayLike | None = None,
    cu_seqlens_k: Tensor | ArrayLike | None = None,
    scale: float | None = None,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    causal: str | bool | Causal | None = None,
    window: tuple[int, int] | None = None,
    prefix: int = 0,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    dropout_key: int = 0,
    sinks_gradient: bool = False,
    mask_gradient: bool = False,
) -> Tensor:
    """The gradients of `flash_attn_ext` for the gradient `d` of its result, by the formulas

        D = rowsum(d * out) - d_lse,  dp = d.v (kept weights over 1 - dropout_p, dropped ones 0)
        ds = p (dp - D),  the gradient of the mask, summed over what the mask was tiled to
        dq = scale sum of ds (1 - tanh^2) k,  dk = scale sum of ds (1 - tanh^2) q,  dv = sum of p d
        d_sinks = -sum of exp(sink - lse) D

    Source: Dao 2023, arXiv:2307.08691.

    Args:
        d: [B, N, H, DV].
        d_lse: [B, H, N], of the gradient of lse.
        out, lse: results of `flash_attn_ext` for the same arguments; left out, they are computed first, and the sums
            with them.  Of scores of 1e5 and more lse alone, rounded to f32, has lost digits of those: leave them out.
        sinks_gradient, mask_gradient: whether the gradient of sinks and mask is wanted too.

    The others are those of `flash_attn_ext`.

    Returns:
        One f32 tensor of one axis that holds dq, dk, dv and then, where asked for, d_sinks and d_mask, each like its
        source and f32: `parts` are they, `offsets` their places in bytes, multiples of 16.  The padding is 0.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        GradientError: max_bias is not 0, or k or v is quantized.
        IndexRangeError: as in `flash_attn_ext`.
    """
    _refuse_alibi("flash_attn_back", max_bias)
    if d is None:
        raise TypeError("flash_attn_back() needs d, the gradient of the result")
    q, k, v, d, mask = _tensor(q), _tensor(k), _tensor(v), _tensor(d), _mask(mask)
    _refuse_quantized("k", k, True)
    _refuse_quantized("v", v, True)
    for name, asked, of in (("sinks", sinks_gradient, sinks), ("mask", mask_gradient, mask)):
        if asked and of is None:
            raise ShapeError(f"flash_attn_back(): {name}_gradient asks for the gradient of {name}, which was left out")
    sinks, cu_seqlens_q, cu_seqlens_k, seed = (
        None if x is None else _tensor(x) for x in (sinks, cu_seqlens_q, cu_seqlens_k, seed if dropout_p else None)
    )
    rest = (sinks, cu_seqlens_q, cu_seqlens_k, seed)
    rules = Rules.of(q, scale, logit_softcap, causal, window, prefix, dropout_p, dropout_key)
    if out is None or lse is None:
        try:
            _sizes(q, k, v, mask, sinks)
        except ShapeError as error:
            given = flash_attn_back.given([q, k, v, None, None, d, None, mask, None, *rest])
            raise ShapeError(f"flash_attn_back({given}): {error}") from None
        out, lse, _, _ = flash_attn_ext.node(q, k, v, mask, *rest, rules=rules, max_bias=0.0)
    top, total = _top_and_total(_tensor(lse))
    wanted = (True, True, True, sinks_gradient, mask_gradient)
    dq, *_ = flash_attn_back.node(
        q, k, v, out, top, d, total, mask, d_lse, *rest, rules=rules, by_token=False, wanted=wanted
    )
    return dq.src[0]


def _tensor(x: Tensor | ArrayLike) -> Tensor:
    return x if isinstance(x, Tensor) else tensor(x)


def _mask(mask: Tensor | ArrayLike | None) -> Tensor | None:
    if mask is None or isinstance(mask, Tensor):
        return mask
    array, _ = array_of(mask, "the mask")
    return tensor(np.where(array, 0, -np.inf).astype(np.float16) if array.dtype == bool else mask)


def _top_and_total(lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """What `flash_attn_ext` packed with this lse; of an lse from elsewhere, itself: then total is 1."""
    if lse.op is part and lse.src[0].op is flash_attn_ext:  # type: ignore[union-attr]
        _, _, top, total = lse.src[0].parts  # type: ignore[union-attr]
        return top, total
    return lse, None


# -- in NumPy -----------------------------------------------------------------------------------------------


def _pairs(q: Tensor, k: Tensor, rules: Rules) -> int:
    """How many pairs of query and key count, masks and packing aside."""
    B, H, N, _ = q.shape
    return B * H * _seen(N, k.shape[2], rules)


@dataclass(frozen=True)
class _Scores:
    """All pairs of query and key, [B, H, N, M]."""

    scores: np.ndarray  # -inf where hidden
    hidden: np.ndarray
    slope: np.ndarray  # the softcap's derivative
    dropout: np.ndarray  # what weights are multiplied with
    sinks: np.ndarray  # [H, 1, 1], -inf if there are none

    @classmethod
    def of(cls, op_name, q, k, mask, sinks, cu_q, cu_k, seed, max_bias, rules) -> _Scores:
        B, H, N, _ = q.shape
        M = k.shape[2]
        scores = rules.scale * (q @ k.swapaxes(2, 3))
        slope, cap = np.ones(()), rules.logit_softcap
        if cap > 0:
            capped = np.tanh(scores / cap)
            scores, slope = cap * capped, 1 - capped**2
        hidden, dropout = np.ones(scores.shape, bool), np.ones(scores.shape)
        for number, b, queries, keys in _sequences(op_name, B, N, M, cu_q, cu_k):
            n, m = queries.stop - queries.start, keys.stop - keys.start
            here = (b, slice(None), queries, keys)
            hidden[here] = ~_visible(n, m, rules)
            if rules.dropout_p > 0:
                dropout[here] = _dropout(number, H, n, m, int(seed), rules)
        if mask is not None:
            mask = _tiled(mask, B, H)[:, :, :N]
            hidden = hidden | (mask == -np.inf)
            scores = scores + alibi_slopes(H, max_bias)[:, None, None] * mask
        sinks = np.full((H, 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
        return cls(np.where(hidden, -np.inf, scores), hidden, slope, dropout, sinks)


def _visible(N: int, M: int, rules: Rules) -> np.ndarray:
    """Which of M keys each of N queries of a sequence sees."""
    (left, right), causal = rules.window, rules.causal
    p = np.arange(N)[:, None] + (0 if causal == Causal.TOP_LEFT else M - N)
    key = np.arange(M)
    seen = (key >= p - left) | (left < 0)
    seen &= (key <= p + right) | (right < 0)
    seen |= key < rules.prefix
    return seen if causal == Causal.NONE else seen & (key <= p)


def _seen(N: int, M: int, rules: Rules) -> int:
    """The number of pairs in `_visible`, without the matrix."""
    (left, right), causal = rules.window, rules.causal
    p = np.arange(N) + (0 if causal == Causal.TOP_LEFT else M - N)
    end = np.clip(p + 1, 0, M) if causal != Causal.NONE else np.full(N, M)
    first = np.clip(p - left if left >= 0 else 0, 0, end)
    last = np.clip(p + right + 1 if right >= 0 else M, first, end)  # one beyond
    before = np.minimum(rules.prefix, end)
    return int((last - first + before - np.clip(np.minimum(before, last) - first, 0, None)).sum())


def _sequences(op_name, B, N, M, cu_q, cu_k) -> Iterator[tuple[int, int, slice, slice]]:
    """Number, row of the batch, queries and keys of each sequence."""
    if cu_q is None:
        yield from ((b, b, slice(0, N), slice(0, M)) for b in range(B))
        return
    for name, cu, length in (("cu_seqlens_q", cu_q, N), ("cu_seqlens_k", cu_k, M)):
        least = 0
        for i, at in enumerate(cu):
            most = length if i else 0
            if not least <= at <= most:
                raise IndexRangeError(f"{op_name}: {name} holds {at}, and must be from {least} to {most}")
            least = at
    for i, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        yield i, 0, slice(q0, q1), slice(k0, k1)


def _dropout(number: int, H: int, N: int, M: int, seed: int, rules: Rules) -> np.ndarray:
    """What the weights of a sequence are multiplied with: 0, or 1 over the exact chance to be kept."""
    kept = kept_of_2_32(rules.dropout_p)
    if kept == 2**32:
        return np.ones((H, N, M))
    h, i, block = np.ogrid[:H, :N, : -(-M // 4)]
    zero = np.zeros(np.broadcast_shapes(h.shape, i.shape, block.shape), np.uint64)
    counter = (zero + block.astype(np.uint64), zero + i.astype(np.uint64), zero + h.astype(np.uint64), zero + number)
    words = np.stack(philox4x32(counter, (seed % 2**32, rules.dropout_key)), axis=-1)
    words = words.reshape(H, N, 4 * block.size)[..., :M]
    return np.where(words < kept, np.float64(np.float32(2**32 / max(1, kept))), 0.0)


def _of_query_heads(q, x):
    """Keys or values, for each head of `q` those that it reads."""
    return x.repeat(q.shape[1] // max(1, x.shape[1]), axis=1)


def _per_kv_head(x, shape):
    """The gradient of `_of_query_heads`."""
    B, HK, M, D = shape
    return x.reshape(B, HK, x.shape[1] // max(1, HK), M, D).sum(2)


def _tiled(mask, B: int, H: int):
    """The mask of every batch and head."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mask[np.ix_(np.arange(B) % max(1, len(mask)), np.arange(H) % max(1, mask.shape[1]))]


def _mask_gradient(dmasked, mask):
    """The gradient of `_tiled`, which leaves rows beyond N at 0."""
    made = np.zeros((1,) * (4 - mask.ndim) + mask.shape)
    B, H, N, _ = dmasked.shape
    for b in range(B):
        for h in range(H):
            made[b % len(made), h % made.shape[1], :N] += dmasked[b, h]
    return made.reshape(mask.shape)


def _or_zero(largest):
    """What to subtract before exp: nothing in a row that sees no key, whose scores are all -inf."""
    return np.where(largest == -np.inf, 0, largest)


def alibi_slopes(H: int, max_bias: float):
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
