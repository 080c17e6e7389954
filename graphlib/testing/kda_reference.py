"""What Kimi Delta Attention means: every result and every gradient, one token of one head at a time.

Plain NumPy, written to be read beside the formula.  It shares no code with the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..core.errors import ShapeError

__all__ = ["KdaResult", "kda_reference"]

EPS = 1e-6  # added to the sum of squares that q and k are divided by the root of


class KdaResult(NamedTuple):
    """Results, and gradients where one came in; None is what was not asked for."""

    o: np.ndarray  # [B, T, HV, V]
    final_state: np.ndarray  # [N, HV, K, V]
    dq: np.ndarray | None = None  # these have their arguments' shapes
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dg: np.ndarray | None = None
    dbeta: np.ndarray | None = None
    dh0: np.ndarray | None = None
    dA_log: np.ndarray | None = None
    ddt_bias: np.ndarray | None = None

    def present(self) -> dict[str, np.ndarray]:
        """Name -> array, of those that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def kda_reference(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    d: ArrayLike | None = None,
    *,
    dht: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    dtype: DTypeLike = np.float64,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> KdaResult:
    """Kimi Delta Attention and all of its gradients in double precision: what `kda` and any kernel should compute.

    For each head a state S, K x V, goes from token to token (Kimi Team 2025, "Kimi Linear"):

        S' = diag(exp g) S,    e = v - S'^T k,    S = S' + beta k e^T,    o = scale S^T q

    and backwards D, the gradient of S, which o adds scale q do^T to:

        dq = scale S do                     with what was written, w = beta e, and x = D^T k, the gradient of it
        dv = beta x,   dbeta = x . e,   dk = D w - S' dv,   then D' = D - k dv^T
        dg = rowwise sum of D' * S',   and diag(exp g) D' is the gradient of the state before

    Args:
        q, k: [B, T, H, K].  v: [B, T, HV, V]; value head h reads head h // (HV // H) of q and k.
        g: [B, T, HV, K], logarithms of the decays.  beta: [B, T, HV].
        d: [B, T, HV, V], the gradient that comes in through o; dht: that of the final states, in their shape.
        initial_state: [N, HV, K, V], zeros if left out; with `state_v_first` states are [N, HV, V, K].
        cu_seqlens: [N + 1], with B = 1: sequence n has the tokens from cu_seqlens[n] up to cu_seqlens[n + 1].
        scale: default 1 / sqrt(K).
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: g is made of x = g + dt_bias and A = exp(A_log): -A softplus(x), or, with a lower_bound,
            lower_bound * sigmoid(A x).
        use_beta_sigmoid_in_kernel: beta is sigmoid of what is given; with allow_neg_eigval twice that.
        dtype: to calculate in, float32 to see what rounding costs.
        rounded: applied to the factors of every product, to imitate narrow formats.

    Raises:
        ShapeError: q and k, or their heads and those of v, do not fit.
    """
    given = [np.asarray(x).astype(dtype) for x in (q, k, v, g, beta)]
    xq, xk, xv, xg, xb = given
    B, T, H, K = xq.shape
    HV, V = xv.shape[2:]
    if xk.shape != xq.shape or xg.shape != (B, T, HV, K) or HV % max(1, H):
        raise ShapeError(
            f"kda_reference(): q={list(xq.shape)}, k={list(xk.shape)}, v={list(xv.shape)} and g={list(xg.shape)} "
            "must be [B, T, H, K], the same, [B, T, HV, V] and [B, T, HV, K], and H must divide HV"
        )
    group = HV // max(1, H)
    c = K**-0.5 if scale is None else scale
    nq, q_back = _normed(xq, use_qk_l2norm_in_kernel)
    nk, k_back = _normed(xk, use_qk_l2norm_in_kernel)
    decay, g_back = _gate(xg, A_log, dt_bias, use_gate_in_kernel, lower_bound)
    rate, b_back = _beta(xb, use_beta_sigmoid_in_kernel, allow_neg_eigval)

    cu = np.arange(B + 1) * T if cu_seqlens is None else np.asarray(cu_seqlens)
    N = len(cu) - 1
    turned = (lambda x: x.swapaxes(-1, -2)) if state_v_first else (lambda x: x)
    S0 = np.zeros((N, HV, K, V), dtype) if initial_state is None else turned(np.asarray(initial_state).astype(dtype))
    D1 = np.zeros_like(S0) if dht is None else turned(np.asarray(dht).astype(dtype))
    rows = [x.reshape(B * T, *x.shape[2:]) for x in (nq, nk, xv, decay, rate)]
    do = np.zeros_like(xv) if d is None else np.asarray(d).astype(dtype)
    do = do.reshape(rows[2].shape)
    o, S1, D0 = np.zeros_like(rows[2]), np.zeros_like(S0), np.zeros_like(S0)
    grads = [np.zeros_like(x) for x in rows]
    for n in range(N):
        t = slice(int(cu[n]), int(cu[n + 1]))
        for h in range(HV):
            heads = (h // group, h // group, h, h, h)
            q_h, k_h, v_h, g_h, b_h = (x[t, i] for x, i in zip(rows, heads, strict=True))
            head = _Head(q_h, k_h, v_h, g_h, b_h, c, rounded)
            o[t, h], S1[n, h], states = head.forward(S0[n, h])
            if d is None and dht is None:
                continue
            *made, D0[n, h] = head.backward(states, do[t, h], D1[n, h])
            for total, i, part in zip(grads, heads, made, strict=True):
                total[t, i] += part
    o = o.reshape(xv.shape)
    if d is None and dht is None:
        return KdaResult(o, turned(S1))
    dq, dk, dv, dg, db = (x.reshape(like.shape) for x, like in zip(grads, given, strict=True))
    dg, dA_log, ddt_bias = g_back(dg)
    return KdaResult(
        o, turned(S1), q_back(dq), k_back(dk), dv, dg, b_back(db),
        None if initial_state is None else turned(D0), dA_log, ddt_bias,
    )  # fmt: skip


class _Head(NamedTuple):
    """The tokens of one head in one sequence."""

    q: np.ndarray  # [T, K]
    k: np.ndarray
    v: np.ndarray  # [T, V]
    g: np.ndarray  # [T, K]
    beta: np.ndarray  # [T]
    scale: float
    rounded: Callable[[np.ndarray], np.ndarray]

    def forward(self, S: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Results, the state after the last token, and that before each."""
        r, o, before = self.rounded, np.zeros_like(self.v), []
        for t, (q, k) in enumerate(zip(r(self.q), r(self.k), strict=True)):
            before.append(S)
            S = np.exp(self.g[t])[:, None] * S
            error = self.v[t] - r(S).T @ k
            S = S + np.outer(k, r(self.beta[t] * error))
            o[t] = self.scale * (r(S).T @ q)
        return o, S, before

    def backward(self, before: list[np.ndarray], do: np.ndarray, D: np.ndarray) -> tuple[np.ndarray, ...]:
        """Gradients of q, k, v, g, beta and the first state; D is that of the last."""
        r = self.rounded
        dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in self[:5])
        for t in reversed(range(len(before))):
            q, k, incoming = r(self.q[t]), r(self.k[t]), r(do[t])
            decay = np.exp(self.g[t])[:, None]
            decayed = decay * before[t]
            error = self.v[t] - r(decayed).T @ k
            written = r(self.beta[t] * error)
            S = decayed + np.outer(k, written)
            dq[t] = self.scale * (r(S) @ incoming)
            D = D + self.scale * np.outer(q, incoming)
            back = r(D).T @ k  # gradient of what was written
            dbeta[t] = back @ error
            dv[t] = self.beta[t] * back
            dk[t] = r(D) @ written - r(decayed) @ r(dv[t])
            D = D - np.outer(k, r(dv[t]))
            dg[t] = (D * decayed).sum(axis=1)
            D = decay * D
        return dq, dk, dv, dg, dbeta, D


# -- what stands before the recurrence: a value, and what its gradient becomes ------------------------------


def _normed(x: np.ndarray, wanted: bool) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    if not wanted:
        return x, lambda d: d
    length = np.sqrt((x**2).sum(axis=-1, keepdims=True) + np.asarray(EPS, x.dtype))
    y = x / length
    return y, lambda d: (d - y * (y * d).sum(axis=-1, keepdims=True)) / length


def _gate(g: np.ndarray, A_log: Any, dt_bias: Any, wanted: bool, lower_bound: float | None):
    if not wanted:
        return g, lambda d: (d, None, None)
    HV, K = g.shape[-2:]
    A = np.ones((HV, 1), g.dtype) if A_log is None else np.exp(np.asarray(A_log).astype(g.dtype)).reshape(HV, 1)
    x = g if dt_bias is None else g + np.asarray(dt_bias).astype(g.dtype).reshape(HV, K)
    if lower_bound is None:
        value, slope, by_A = -A * np.logaddexp(0, x), -A * _sigmoid(x), -np.logaddexp(0, x)
    else:
        s = _sigmoid(A * x)
        steep = lower_bound * s * (1 - s)
        value, slope, by_A = lower_bound * s, A * steep, x * steep

    def back(d: np.ndarray):
        dx, tokens = d * slope, (0, 1)
        dA_log = None if A_log is None else (d * by_A * A).sum(axis=(*tokens, 3)).reshape(np.shape(A_log))
        return dx, dA_log, None if dt_bias is None else dx.sum(axis=tokens).reshape(np.shape(dt_bias))

    return value, back


def _beta(x: np.ndarray, wanted: bool, twice: bool) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    if not wanted:
        return x, lambda d: d
    s = _sigmoid(x)
    return (1 + twice) * s, lambda d: d * (1 + twice) * s * (1 - s)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))
