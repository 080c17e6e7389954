"""What sparse latent attention means: every result and every gradient, one query at a time.

Plain NumPy, written to be read beside the formula.  It shares no code with the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..core.errors import ShapeError

__all__ = ["SparseMlaResult", "sparse_mla_reference"]


class SparseMlaResult(NamedTuple):
    """Results, and gradients where one came in; None is what was not asked for."""

    attn_out: np.ndarray  # of q's shape
    softmax_lse: np.ndarray  # [B, 1, S1, N1], packed [1, T1, N1]
    dq: np.ndarray | None = None  # these have their arguments' shapes
    d_ori_kv: np.ndarray | None = None
    d_cmp_kv: np.ndarray | None = None
    d_sinks: np.ndarray | None = None

    def present(self) -> dict[str, np.ndarray]:
        """Name -> array, of those that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def sparse_mla_reference(
    q: ArrayLike,
    ori_kv: ArrayLike | None,
    cmp_kv: ArrayLike | None,
    d: ArrayLike | None = None,
    *,
    sinks: ArrayLike | None = None,
    ori_sparse_indices: ArrayLike | None = None,
    cmp_sparse_indices: ArrayLike | None = None,
    ori_topk_length: ArrayLike | None = None,
    cmp_topk_length: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_ori_kv: ArrayLike | None = None,
    cu_seqlens_cmp_kv: ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_ori_kv: ArrayLike | None = None,
    seqused_cmp_kv: ArrayLike | None = None,
    cmp_residual_kv: ArrayLike | None = None,
    cmp_ratio: int = 1,
    ori_mask_mode: int = 0,
    cmp_mask_mode: int = 0,
    ori_win_left: int = -1,
    ori_win_right: int = -1,
    softmax_scale: float | None = None,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    dtype: DTypeLike = np.float64,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> SparseMlaResult:
    """Sparse latent attention and all of its gradients in double precision: what `sparse_flash_mla` should compute.

    Each query sees some rows x, which are keys and values at once (DeepSeek-AI 2025, "DeepSeek-V3.2"):

        s = scale * q.x      lse = log(sum of exp(s) [+ exp(sink)])      p = exp(s - lse)      out = sum of p * x
        ds = p * (d.x - d.out)      dq = scale * sum of ds * x      dx = sum over heads of scale * ds * q + p * d
        dsink = -sum over queries of exp(sink - lse) * d.out

    A query that sees nothing has out = 0 and lse = 0; a row that is listed twice counts twice.

    Args:
        q: [B, S1, N1, D], packed (layout_q and layout_kv "TND") [T1, N1, D].
        ori_kv, cmp_kv: [B, rows, 1, D], packed [rows, 1, D]; a row of cmp_kv stands for `cmp_ratio` tokens.
        d: of q's shape, the gradient that comes in through attn_out.
        others: as in `sparse_flash_mla`; pages are not understood.
        dtype: to calculate in, float32 to see what rounding costs.
        rounded: applied to the factors of every product, to imitate narrow formats.

    Raises:
        ShapeError: there are no rows, or q's axes are not those of the layout.
    """
    q = np.asarray(q)
    packed = layout_q == "TND"
    if q.ndim != 4 - packed or (ori_kv is None and cmp_kv is None):
        raise ShapeError(
            f"sparse_mla_reference(): q={list(q.shape)} must be {'[T1, N1, D]' if packed else '[B, S1, N1, D]'}, with "
            "ori_kv, cmp_kv or both"
        )
    *tokens, heads, D = q.shape
    c = max(1, D) ** -0.5 if softmax_scale is None else softmax_scale

    def flat(x: ArrayLike) -> np.ndarray:
        return rounded(np.asarray(x).astype(dtype)).reshape(-1, D)

    Q = rounded(q.astype(dtype)).reshape(-1, heads, D)
    do = None if d is None else rounded(np.asarray(d).astype(dtype)).reshape(Q.shape)
    sink = np.full(heads, -np.inf, dtype) if sinks is None else np.asarray(sinks).astype(dtype)
    rows = {kind: flat(x) for kind, x in (("ori", ori_kv), ("cmp", cmp_kv)) if x is not None}
    kinds = list(rows)
    seen_by = _Rules(
        {"ori": ori_sparse_indices, "cmp": cmp_sparse_indices}, {"ori": ori_topk_length, "cmp": cmp_topk_length},
        cmp_ratio, {"ori": ori_mask_mode, "cmp": cmp_mask_mode}, ori_win_left, ori_win_right,
    )  # fmt: skip
    given = (("q", q, cu_seqlens_q, seqused_q), ("ori", ori_kv, cu_seqlens_ori_kv, seqused_ori_kv),
             ("cmp", cmp_kv, cu_seqlens_cmp_kv, seqused_cmp_kv))  # fmt: skip
    spans = {what: _spans(x, cu, used) for what, x, cu, used in given if x is not None}

    out, lse = np.zeros_like(Q), np.zeros(Q.shape[:2], Q.dtype)
    dq, dsinks = np.zeros_like(Q), np.zeros(heads, Q.dtype)
    drows = {kind: np.zeros_like(rows[kind]) for kind in kinds}
    for b, (first, count) in enumerate(spans["q"]):
        residual = 0 if cmp_residual_kv is None else int(np.asarray(cmp_residual_kv)[b])
        lengths = {kind: spans[kind][b] for kind in kinds}
        for i in range(count):
            t = first + i
            at = {k: lengths[k][0] + seen_by.rows(k, t, i - count, lengths[k][1], residual) for k in kinds}
            X = np.concatenate([rows[kind][at[kind]] for kind in kinds])
            if not len(X):
                continue
            s = c * (Q[t] @ X.T)
            top = np.maximum(s.max(axis=1), sink)
            weights = np.exp(s - top[:, None])
            total = weights.sum(axis=1) + np.exp(sink - top)
            P = weights / total[:, None]
            out[t], lse[t] = rounded(P) @ X, top + np.log(total)
            if do is None:
                continue
            delta = (do[t] * out[t]).sum(axis=1)
            DS = rounded(c * P * (do[t] @ X.T - delta[:, None]))
            dq[t] = DS @ X
            dsinks -= np.exp(sink - lse[t]) * delta
            DX, begin = DS.T @ Q[t] + rounded(P).T @ do[t], 0
            for kind in kinds:
                np.add.at(drows[kind], at[kind], DX[begin : begin + len(at[kind])])
                begin += len(at[kind])
    lse = lse.reshape((1, *tokens, heads) if packed else (tokens[0], 1, tokens[1], heads))
    if do is None:
        return SparseMlaResult(out.reshape(q.shape), lse)
    d_kv = {kind: drows[kind].reshape(np.asarray(ori_kv if kind == "ori" else cmp_kv).shape) for kind in kinds}
    return SparseMlaResult(
        out.reshape(q.shape), lse, dq.reshape(q.shape), d_kv.get("ori"), d_kv.get("cmp"),
        None if sinks is None else dsinks,
    )  # fmt: skip


class _Rules(NamedTuple):
    """Which rows of a sequence a query sees."""

    lists: dict[str, ArrayLike | None]
    lengths: dict[str, ArrayLike | None]
    ratio: int
    mode: dict[str, int]
    left: int
    right: int

    def rows(self, kind: str, token: int, back: int, count: int, residual: int) -> np.ndarray:
        """Of `count` rows of a kind; the query is number `token` of all, and -back places before the sequence's end."""
        row = np.arange(count)
        if kind == "cmp":
            position = count * self.ratio + residual + back
            allowed = (row + 1) * self.ratio <= position + 1 if self.mode[kind] else row >= 0
        else:
            position = count + back
            allowed = row >= 0
            if self.mode[kind] == 4:
                allowed = (row >= position - self.left) | (self.left < 0)
                allowed &= (row <= position + self.right) | (self.right < 0)
            elif self.mode[kind] == 3:
                allowed = row <= position
        if self.lists[kind] is None:
            return row[allowed]
        listed = list(self._listed(kind, token))
        return np.array([r for r in listed if r < count and allowed[r]], np.intp)

    def _listed(self, kind: str, token: int) -> Iterator[int]:
        """Up to the first negative entry, and to the length of the list."""
        entries = np.asarray(self.lists[kind])
        entries = entries.reshape(-1, entries.shape[-1])[token]
        lengths = self.lengths[kind]
        most = len(entries) if lengths is None else int(np.asarray(lengths).reshape(-1)[token])
        for entry in entries[: max(0, most)].tolist():
            if entry < 0:
                return
            yield entry


def _spans(x: ArrayLike, cu: ArrayLike | None, used: ArrayLike | None) -> list[tuple[int, int]]:
    """Of each sequence: its first row among all, and how many are in use."""
    if cu is not None:
        ends = np.asarray(cu).tolist()
        spans = [(a, b - a) for a, b in pairwise(ends)]
    else:
        B, rows = np.asarray(x).shape[:2]
        spans = [(b * rows, rows) for b in range(B)]
    return spans if used is None else [(a, int(n)) for (a, _), n in zip(spans, np.asarray(used), strict=True)]
