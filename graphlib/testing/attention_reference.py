"""What attention means: every result and every gradient, from the whole matrix of scores of each head.

Plain NumPy, one head at a time, written to be read beside the formula.  It shares no code with the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..core.errors import GradientError, ShapeError
from ..ops.dropout import philox4x32

__all__ = ["AttentionResult", "attention_reference", "dropout_factors", "visible_pairs"]


@dataclass(frozen=True)
class AttentionResult:
    """Results of attention, and gradients where an incoming one was given; None is what was not asked for."""

    out: np.ndarray  # [B, N, H, DV]
    lse: np.ndarray  # [B, H, N]
    dq: np.ndarray | None = None  # these five have their arguments' shapes
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dmask: np.ndarray | None = None
    dsinks: np.ndarray | None = None

    def present(self) -> dict[str, np.ndarray]:
        """Name -> array, of those that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@np.errstate(invalid="ignore", over="ignore", divide="ignore")  # NaN and infinities are input like any other
def attention_reference(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    d_lse: ArrayLike | None = None,
    scale: float | None = None,
    causal: str | bool | None = None,
    window: tuple[int, int] | None = None,
    prefix: int = 0,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    logit_softcap: float = 0.0,
    max_bias: float = 0.0,
    dropout_p: float = 0.0,
    seed: int = 0,
    dropout_key: int = 0,
    dtype: DTypeLike = np.float64,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> AttentionResult:
    """Attention and all of its gradients in double precision: what `flash_attn_ext` and any kernel should compute.

        s     = scale * q.k,  c * tanh(s / c) if softcapped,  + mask
        lse   = log(sum of exp(s) over the visible keys [+ exp(sink)])
        p     = exp(s - lse)
        out   = sum of p * v                                              p, dp times the dropout factor
        dp    = d.v
        ds    = p * (dp - sum(p * dp) + d_lse)                            also the gradient of the mask
        dv    = sum over queries of p * d
        dq    = scale * sum of ds * (1 - tanh^2) * k,  dk likewise
        dsink = -sum over queries of exp(sink - lse) * (sum(p * dp) - d_lse)

    A pair of query and key is hidden by -inf (or False) in the mask, by causality, by the window, or because they
    are of different sequences; what lies there counts for nothing, NaN included.  A query that sees no key has
    out = 0, lse = the sink or -inf, and no gradient but that of a sink through lse.

    Args:
        q: [B, H, N, DK].
        k, v: [B, HK, M, DK] and [B, HK, M, DV]; query head h reads kv head h // (H // HK).
        d: [B, N, H, DV], the gradient that comes in through out.
        mask: [Bm, Hm, N or more, M], or without the first axes, added to the scores; batch b and head h read
            row b % Bm, h % Hm.  Boolean: True keeps.
        sinks: [H], one more score for each head, which has no value.
        d_lse: [B, H, N], the gradient that comes in through lse.
        scale: default 1 / sqrt(DK).
        causal, window, prefix: see `visible_pairs`.
        cu_seqlens_q, cu_seqlens_k: [n + 1], both or none, with B = 1: sequence i has the queries and keys from
            cu_seqlens[i] up to cu_seqlens[i + 1], and positions are counted within it.
        logit_softcap: c, or 0 for none.
        max_bias: ALiBi as in ggml, the mask times a slope of each head.  Has no gradient.
        dropout_p, seed, dropout_key: see `dropout_factors`.
        dtype: to calculate in, float32 to see what rounding costs.
        rounded: applied to weights p and gradients ds where a kernel would store them, to imitate narrow formats.

    Raises:
        ShapeError: the arguments do not fit.
        GradientError: `d` or `d_lse` with `max_bias`.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    d, d_lse, sinks = (None if x is None else np.asarray(x).astype(dtype) for x in (d, d_lse, sinks))
    mask = None if mask is None else np.asarray(mask)
    bias = None if mask is None else _additive(mask, dtype)
    _require_fitting(q, k, v, d, d_lse, bias, sinks)
    B, H, N, DK = q.shape
    _, HK, M, DV = v.shape
    backward = d is not None or d_lse is not None
    if max_bias > 0 and backward:
        raise GradientError(
            f"attention_reference(): no gradient with max_bias={max_bias} (ALiBi): leave out d and d_lse"
        )
    if max_bias > 0 and mask is None:
        raise ShapeError(f"attention_reference(): max_bias={max_bias} multiplies a mask, and there is none")
    scale = max(1, DK) ** -0.5 if scale is None else float(scale)
    slopes = alibi_slopes(H, max_bias).astype(dtype)

    out, lse = np.zeros((B, N, H, DV), dtype), np.full((B, H, N), -np.inf, dtype)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    dbias = None if bias is None else np.zeros_like(bias)
    dsinks = None if sinks is None else np.zeros_like(sinks)

    for number, b, queries, keys in _sequences(B, N, M, cu_seqlens_q, cu_seqlens_k):
        n, m = queries.stop - queries.start, keys.stop - keys.start
        for h in range(H):
            hk = h // (H // HK)
            Q, K, V = q[b, h, queries], k[b, hk, keys], v[b, hk, keys]
            sink = -np.inf if sinks is None else sinks[h]

            visible = visible_pairs(n, m, causal=causal, window=window, prefix=prefix)
            S = scale * (Q @ K.T)
            slope = np.ones_like(S)
            if logit_softcap > 0:
                T = np.tanh(S / logit_softcap)
                S, slope = logit_softcap * T, 1 - T**2
            if bias is not None:
                here = (b % len(bias), h % bias.shape[1], queries, keys)
                visible &= bias[here] != -np.inf
                S = S + slopes[h] * bias[here]
            S = np.where(visible, S, -np.inf)

            top = np.maximum(S.max(axis=1, initial=-np.inf), sink)
            top = np.where(top == -np.inf, 0, top)
            E = np.where(visible, np.exp(S - top[:, None]), 0)
            total = E.sum(axis=1) + np.exp(sink - top)
            sees = visible.any(axis=1)
            P = rounded(np.divide(E, total[:, None], out=np.zeros_like(E), where=visible))
            F = dropout_factors(n, m, dropout_p, seed, key=dropout_key, head=h, sequence=number).astype(dtype)
            out[b, queries, h] = _weighted_sum(P * F, visible, V)
            lse[b, h, queries] = np.where(sees, top + np.log(total), sink)
            if not backward:
                continue

            D = np.zeros((n, DV), dtype) if d is None else d[b, queries, h]
            DL = np.zeros(n, dtype) if d_lse is None else d_lse[b, h, queries]
            DP = np.where(visible, F * (D @ V.T), 0)
            delta = (P * DP).sum(axis=1) - DL
            DS = np.where(visible, P * (DP - delta[:, None]), 0)
            dv[b, hk, keys] += _weighted_sum((P * F).T, visible.T, D)
            if dbias is not None:
                dbias[here] += DS
            DS = rounded(np.where(visible, DS * slope * scale, 0))
            dq[b, h, queries] = _weighted_sum(DS, visible, K)
            dk[b, hk, keys] += _weighted_sum(DS.T, visible.T, Q)
            if dsinks is not None and sink != -np.inf:
                dsinks[h] -= (np.exp(sink - lse[b, h, queries]) * delta).sum()

    if not backward:
        return AttentionResult(out, lse)
    dmask = None if mask is None or dbias is None or mask.dtype == bool else dbias.reshape(mask.shape)
    return AttentionResult(out, lse, dq, dk, dv, dmask, dsinks)


def visible_pairs(
    queries: int,
    keys: int,
    *,
    causal: str | bool | None = None,
    window: tuple[int, int] | None = None,
    prefix: int = 0,
) -> np.ndarray:
    """Which of the keys each query sees, bool [queries, keys].

    Query i stands at position i + keys - queries among the keys, with causal="top-left" at i.

    Args:
        causal: "top-left", or "bottom-right" (True means the same): no key after the query's position.
        window: (left, right): the keys from position - left to position + right; -1 is without bound.
        prefix: the first keys, that many, are in every window.
    """
    if causal not in (None, False, True, "top-left", "bottom-right"):
        raise ShapeError(f'visible_pairs(): causal={causal!r} must be None, "top-left", "bottom-right" or True')
    left, right = (-1, -1) if window is None else window
    position = np.arange(queries)[:, None] + (0 if causal == "top-left" else keys - queries)
    key = np.arange(keys)
    visible = np.ones((queries, keys), bool)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    visible |= key < prefix
    if causal:
        visible &= key <= position
    return visible


def dropout_factors(
    queries: int, keys: int, p: float, seed: int, *, key: int = 0, head: int = 0, sequence: int = 0
) -> np.ndarray:
    """What attention's weights are multiplied with: 0 with probability p, else 1 / (1 - p), [queries, keys].

    Query i and key j of their sequence (row of the batch, or packed one) are kept if a random word is below
    (1 - p) * 2^32: word j % 4 of Philox4x32-10 of counter (j // 4, i, head, sequence) and key (seed, key).
    """
    kept = int(np.rint((1.0 - np.float64(np.float32(p))) * 2**32))
    if kept == 2**32:
        return np.ones((queries, keys))
    i, j = np.mgrid[:queries, :keys].astype(np.uint64)
    words = np.stack(philox4x32((j // np.uint64(4), i, head + 0 * i, sequence + 0 * i), (seed % 2**32, key)))
    chosen = np.take_along_axis(words, (j % np.uint64(4)).astype(np.intp)[None], axis=0)[0]
    return np.where(chosen < kept, 2**32 / max(1, kept), 0.0)


def alibi_slopes(heads: int, max_bias: float) -> np.ndarray:
    """ggml's: for n = 2^floor(log2(heads)), head h has r^(h + 1), r = 2^(-max_bias / n); from n on r^(h - n + 1/2)."""
    if max_bias <= 0 or heads == 0:
        return np.ones(heads)
    n = 1 << (heads.bit_length() - 1)
    powers = [h + 1 if h < n else h - n + 0.5 for h in range(heads)]
    return 2.0 ** (-max_bias / n * np.array(powers))


def _sequences(B: int, N: int, M: int, cu_q, cu_k) -> Iterator[tuple[int, int, slice, slice]]:
    """Number, row of the batch, queries and keys of each sequence."""
    if cu_q is None and cu_k is None:
        for b in range(B):
            yield b, b, slice(0, N), slice(0, M)
        return
    if cu_q is None or cu_k is None or B != 1:
        raise ShapeError(
            f"attention_reference(): packed sequences need cu_seqlens_q, cu_seqlens_k and one batch, not {B}"
        )
    cu_q, cu_k = np.asarray(cu_q), np.asarray(cu_k)
    for name, cu, length in (("cu_seqlens_q", cu_q, N), ("cu_seqlens_k", cu_k, M)):
        if cu.ndim != 1 or len(cu) != len(cu_q) or cu[0] != 0 or cu[-1] > length or (np.diff(cu) < 0).any():
            raise ShapeError(
                f"attention_reference(): {name}={cu.tolist()} must be {len(cu_q)} numbers "
                f"that rise from 0 to at most {length}"
            )
    for i, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        yield i, 0, slice(int(q0), int(q1)), slice(int(k0), int(k1))
    yield len(cu_q) - 1, 0, slice(int(cu_q[-1]), N), slice(M, M)  # queries of no sequence see no key


def _weighted_sum(weights: np.ndarray, visible: np.ndarray, x: np.ndarray) -> np.ndarray:
    """weights @ x over the visible pairs: what is hidden in x may be NaN, and zero times NaN would not be zero."""
    if np.isfinite(x).all():
        return weights @ x
    made = np.zeros((len(weights), x.shape[1]), weights.dtype)
    for j, row in enumerate(x):
        made += np.where(visible[:, j, None], weights[:, j, None] * row, 0)
    return made


def _additive(mask: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """As four axes, to be added."""
    if not 2 <= mask.ndim <= 4:
        raise ShapeError(f"attention_reference(): the mask must have 2 to 4 axes, not {mask.ndim}")
    bias = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask
    return bias.astype(dtype).reshape((1,) * (4 - mask.ndim) + mask.shape)


def _require_fitting(q, k, v, d, d_lse, bias, sinks) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError("attention_reference(): q, k and v must have four axes: [batch, heads, queries or keys, d]")
    (B, H, N, DK), (_, HK, M, _), DV = q.shape, k.shape, v.shape[3]
    Bm, Hm, Nm, Mm = (1, 1, N, M) if bias is None else bias.shape
    rules = {
        f"k={list(k.shape)} must be [{B}, heads, keys, {DK}]": k.shape == (B, HK, M, DK),
        f"v={list(v.shape)} must be [{B}, {HK}, {M}, d]": v.shape == (B, HK, M, DV),
        f"the {HK} heads of k must divide the {H} of q": H % max(1, HK) == 0 and (HK > 0 or H == 0),
        f"d must be [{B}, {N}, {H}, {DV}]": d is None or d.shape == (B, N, H, DV),
        f"d_lse must be [{B}, {H}, {N}]": d_lse is None or d_lse.shape == (B, H, N),
        f"sinks must be [{H}]": sinks is None or sinks.shape == (H,),
        f"the mask must be [.., .., {N} or more, {M}], its first axes dividing {B} and {H}, not {[Bm, Hm, Nm, Mm]}": (
            Nm >= N and Mm == M and B % max(1, Bm) == 0 and H % max(1, Hm) == 0
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ShapeError(f"attention_reference(): {rule}")
