"""The lightning indexer: cheap scores that say which tokens are worth attending to."""

from math import prod

import numpy as np

from ..core.errors import GradientError
from ..core.op import Half, Wanted, ensure, op, results
from ..core.tensor import Spec

__all__ = ["lightning_indexer", "lightning_indexer_back"]


@op
def lightning_indexer(q, k, weights, mask: Half | None = None):
    """sum over heads h of weights[h] * relu(q[h] . k), plus the mask: a score for each query and key, [B, 1, N, M].

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556.

    Args:
        q: [B, N, H, E], some heads for each of N queries.
        k: [B, M, 1, E], one for all heads.
        weights: [B, 1, N, H].
        mask: [B, 1, N, M], or of one batch for all.  Where it is -inf the score is, whatever q and k hold.
    """
    _check(q, k, weights, mask)
    return Spec(_shape(q, k))


@lightning_indexer.grad
def _(t, dout, *, needs):
    if needs[3]:
        raise GradientError("lightning_indexer gives its mask no gradient: make it a leaf without param=True")
    return *lightning_indexer_back(dout, *t.src, wanted=needs[:3]), None


@lightning_indexer.flops
def _(t):
    q, k = t.src[:2]
    return (2 * q.shape[3] + 2) * q.shape[2] * prod(_shape(q, k))


@lightning_indexer.reference
def _(q, k, weights, mask):
    s, hidden = _scores(q, k, mask)
    scores = np.einsum("bnh,bnhm->bnm", weights[:, 0], np.maximum(s, 0))[:, None]
    return scores if mask is None else np.where(hidden, -np.inf, scores + mask)


@op
def lightning_indexer_back(dout, q, k, weights, mask: Half | None = None, *, wanted: Wanted = ()):
    """The gradients of `lightning_indexer` by q, k and weights, those that are wanted.

    relu has the slope 0 at 0, and NaN at NaN.
    """
    _check(q, k, weights, mask)
    ensure(dout.shape == _shape(q, k), f"dout must have the shape {_shape(q, k)}")
    return results(wanted, dq=q.spec, dk=k.spec, dweights=weights.spec)


@lightning_indexer_back.flops
def _(t):
    q, k = t.src[1:3]
    return (4 * q.shape[3] + 4) * q.shape[2] * prod(_shape(q, k))


@lightning_indexer_back.reference
def _(dout, q, k, weights, mask):
    s, hidden = _scores(q, k, mask)
    d = np.broadcast_to(np.where(hidden, 0, dout), dout.shape)[:, 0, :, None]  # [B, N, 1, M]
    ds = np.select([s > 0, s <= 0], [d * weights[:, 0, :, :, None], 0], s)
    if np.isfinite(q).all() and np.isfinite(k).all():
        dq, dk = np.einsum("bnhm,bme->bnhe", ds, k[:, :, 0]), np.einsum("bnhm,bnhe->bme", ds, q)
    else:  # pair by pair, without those that are hidden
        pairs = hidden[:, 0, :, None, :, None]
        dq = np.where(pairs, 0, ds[..., None] * k[:, None, None, :, 0]).sum(3)
        dk = np.where(pairs, 0, ds[..., None] * q[:, :, :, None]).sum((1, 2))
    return dq, dk[:, :, None], np.where(hidden[:, 0, :, None], 0, d * np.maximum(s, 0)).sum(-1)[:, None]


def _shape(q, k) -> tuple[int, ...]:
    return q.shape[0], 1, q.shape[1], k.shape[1]


def _check(q, k, weights, mask) -> None:
    ensure(q.ndim == k.ndim == 4, "q and k must have four axes: [B, N, H, E] and [B, M, 1, E]")
    (B, N, H, E), (KB, M, KH, KE) = q.shape, k.shape
    ensure(KB == B, f"q has {B} batches, k {KB}")
    ensure(KH == 1, f"k has {KH} heads, and must have one, for all of q's")
    ensure(KE == E, f"rows of q have {E} elements, rows of k {KE}")
    ensure(weights.shape == (B, 1, N, H), f"weights must have the shape {(B, 1, N, H)}")
    if mask is not None:
        ensure(mask.shape in ((B, 1, N, M), (1, 1, N, M)), f"the mask must have the shape {(B, 1, N, M)}")


def _scores(q, k, mask):
    """q . k of every head, [B, N, H, M], and what the mask hides, [B, 1, N, M]."""
    s = np.einsum("bnhe,bme->bnhm", q, k[:, :, 0])
    hidden = np.zeros(_shape(q, k), bool) if mask is None else np.broadcast_to(mask == -np.inf, _shape(q, k))
    return np.where(hidden[:, 0, :, None], 0, s), hidden
