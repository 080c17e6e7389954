"""Linear recurrences over tokens: RWKV 6 and 7, gated linear attention, the gated delta rule, Mamba 1 and 2.

All but Mamba's are one scan, `delta_scan`, of a state [V, S] for each head, and differ in what they give it.
`selective_scan`, Mamba's, makes its decays from fewer numbers while it goes.
"""

from typing import cast

import numpy as np

from ..core.errors import ShapeError
from ..core.op import Float, ensure, op
from ..core.tensor import Pack, Spec, Tensor, tensor
from ..diff.autodiff import pull_back, through
from .elementwise import add, mul, neg, scale
from .layout import broadcast_to, concat, cont, permute, repeat, reshape, transpose
from .matmul import mul_mat
from .reduce import sum as total
from .reduce import sum_rows
from .rows import get_rows
from .unary import exp, softplus

__all__ = [
    "delta_scan", "delta_scan_back", "gated_delta_net", "gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7",
    "selective_scan", "selective_scan_back", "ssm_scan",
]  # fmt: skip

Count = object  # an int, which kernels read from the result


@op(layout="contiguous")
def delta_scan(r, w, k, v, state, a: Float | None = None, b: Float | None = None, *, snapshots: Count = 1):
    """y[N, T, H, V] and states[snapshots N, H, V, S] of a scan over tokens t, head by head:

        S_t = S_(t-1) diag(w_t) + v_t k_t^T + (S_(t-1) a_t) b_t^T        y_t = S_t r_t

    r, w, k, and both or neither of a and b, are [N, T, H, S], v [N, T, H, V] and the first state [N, H, V, S].
    `states` are the N states after the last token, then those after the one before, and so on.
    """
    ensure(r.ndim == v.ndim == state.ndim == 4, "r must be [N, T, H, S], v [N, T, H, V] and state [N, H, V, S]")
    ensure((a is None) == (b is None), "a and b come together")
    _check_alike(r, w=w, k=k, a=a, b=b)
    N, T, H, S = r.shape
    ensure(v.shape[:3] == (N, T, H), f"v must be [{N}, {T}, {H}, V]")
    ensure(state.shape == (N, H, v.shape[3], S), f"state must be {(N, H, v.shape[3], S)}")
    ensure(snapshots in range(1, max(1, T) + 1), f"snapshots={snapshots} must be 1 to {max(1, T)}")
    return Pack(y=Spec(v.shape), states=Spec((cast(int, snapshots) * N, H, v.shape[3], S)))


@delta_scan.grad
def _(t, dy, dstates):
    r, w, k, v, state, a, b = t.src
    dr, dw, dk, dv, dstate, *rest = delta_scan_back(r, w, k, v, state, dy, dstates, a, b)
    da, db = rest or (None, None)
    return dr, dw, dk, dv, dstate, da, db


@delta_scan.reference
def _(r, w, k, v, state, a, b, *, snapshots):
    states = _states(w, k, v, state, a, b)
    y = np.zeros(v.shape)
    for t in range(r.shape[1]):
        y[:, t] = np.einsum("nhvs,nhs->nhv", states[t + 1], r[:, t])
    return y, np.concatenate([states[-1 - i] for i in range(snapshots)])


@op(layout="contiguous")
def delta_scan_back(
    r,
    w,
    k,
    v,
    state,
    dy: Float | None = None,
    dstates: Float | None = None,
    a: Float | None = None,
    b: Float | None = None,
):
    """The gradients of `delta_scan` by r, w, k, v, state and, if there are any, a and b, in that order."""
    ensure(r.ndim == v.ndim == state.ndim == 4, "r must be [N, T, H, S], v [N, T, H, V] and state [N, H, V, S]")
    ensure((a is None) == (b is None), "a and b come together")
    _check_alike(r, w=w, k=k, a=a, b=b)
    N, T, H, S = r.shape
    ensure(v.shape[:3] == (N, T, H), f"v must be [{N}, {T}, {H}, V]")
    ensure(state.shape == (N, H, v.shape[3], S), f"state must be {(N, H, v.shape[3], S)}")
    ensure(dy is None or dy.shape == v.shape, "dy must have the shape of v")
    _check_snapshots(dstates, state, T)
    delta = {} if a is None else {"da": a.spec, "db": r.spec}
    return Pack(dr=r.spec, dw=r.spec, dk=r.spec, dv=v.spec, dstate=state.spec, **delta)


@delta_scan_back.reference
def _(r, w, k, v, state, dy, dstates, a, b):
    states = _states(w, k, v, state, a, b)
    N, T = r.shape[:2]
    dr, dw, dk, dv = np.zeros(r.shape), np.zeros(r.shape), np.zeros(r.shape), np.zeros(v.shape)
    da, db = np.zeros(r.shape), np.zeros(r.shape)
    d = np.zeros(state.shape)
    sets = [] if dstates is None else list(dstates.reshape(len(dstates) // N, *state.shape)) if N else []
    if T == 0 and sets:
        d = d + sets[0]
    for t in reversed(range(T)):
        old, new = states[t], states[t + 1]
        if T - 1 - t < len(sets):
            d = d + sets[T - 1 - t]
        if dy is not None:
            d = d + dy[:, t, :, :, None] * r[:, t, :, None, :]
            dr[:, t] = np.einsum("nhvs,nhv->nhs", new, dy[:, t])
        dw[:, t] = (d * old).sum(2)
        dk[:, t] = np.einsum("nhvs,nhv->nhs", d, v[:, t])
        dv[:, t] = np.einsum("nhvs,nhs->nhv", d, k[:, t])
        before = d * w[:, t, :, None, :]
        if a is not None:
            sa, dsa = np.einsum("nhvs,nhs->nhv", old, a[:, t]), np.einsum("nhvs,nhs->nhv", d, b[:, t])
            db[:, t] = np.einsum("nhvs,nhv->nhs", d, sa)
            da[:, t] = np.einsum("nhvs,nhv->nhs", old, dsa)
            before = before + dsa[..., None] * a[:, t, :, None, :]
        d = before
    return (dr, dw, dk, dv, d) if a is None else (dr, dw, dk, dv, d, da, db)


@delta_scan_back.grad
@through
def _(r, w, k, v, state, dy, dstates, a, b):
    """With all states and their gradients side by side, each T times the size of the state."""
    N, T, H, S = r.shape
    V = v.shape[3]
    per_state = (T, N * H, V, S)
    if T == 0:
        first = scale(state, factor=0.0) if dstates is None else dstates[:N]
        zeros = [scale(x, factor=0.0) for x in (r, w, k, v)]
        return (*zeros, first) if a is None else (*zeros, first, scale(a, factor=0.0), scale(r, factor=0.0))

    def columns(x: Tensor) -> Tensor:  # of a token and head, against the rows of its state
        return reshape(permute(x, axes=(1, 0, 2, 3)), (T, N * H, 1, S))

    def rows(x: Tensor) -> Tensor:
        return reshape(permute(x, axes=(1, 0, 2, 3)), (T, N * H, V, 1))

    def of_tokens(x: Tensor) -> Tensor:
        return permute(reshape(x, (T, N, H, x.size // (T * N * H))), axes=(1, 0, 2, 3))

    _, states = delta_scan(r, w, k, v, state, a, b, snapshots=T)
    new = reshape(states, per_state)[::-1]
    old = concat(reshape(state, (1, *per_state[1:])), new[:-1], axis=0) if T > 1 else reshape(state, per_state)
    d = reshape(_gradients_of_states(r, w, dy, dstates, a, b, state), per_state)
    dr = scale(r, factor=0.0) if dy is None else of_tokens(total(mul(new, rows(dy)), 2))
    dw, dk = of_tokens(total(mul(d, old), 2)), of_tokens(total(mul(d, rows(v)), 2))
    dv = of_tokens(total(mul(d, columns(k)), 3))
    first = mul(d[:1], columns(w)[:1])
    if a is None:
        return dr, dw, dk, dv, reshape(first, state.shape)
    sa, dsa = total(mul(old, columns(a)), 3, keepdims=True), total(mul(d, columns(b)), 3, keepdims=True)
    first = add(first, mul(repeat(dsa[:1], shape=(1, *per_state[1:])), columns(a)[:1]))
    da, db = of_tokens(total(mul(old, dsa), 2)), of_tokens(total(mul(d, sa), 2))
    return dr, dw, dk, dv, reshape(first, state.shape), da, db


def _gradients_of_states(r, w, dy, dstates, a, b, state) -> Tensor:
    """By the states after the tokens, first to last, [T N, H, V, S]: a scan from the last token to the first.

    D_t = D_(t+1) diag(w_(t+1)) + (D_(t+1) b_(t+1)) a_(t+1)^T + dy_t r_t^T + the gradient of its snapshot
    """
    N, T = r.shape[:2]

    def later(x: Tensor | None, behind: float) -> Tensor | None:
        """Of each token what x holds for the next; the last comes first."""
        if x is None:
            return None
        end = _all(behind, (N, 1, *x.shape[2:]))
        return concat(end, x[:, :0:-1], axis=1) if T > 1 else end

    def scanned(state: Tensor, tokens: slice, snapshots: int) -> Tensor:
        parts = [x if x is None else x[:, tokens] for x in inputs]
        return delta_scan(*parts[:4], state, *parts[4:], snapshots=snapshots)[1]

    back = r[:, ::-1]
    values = _all(0.0, (*r.shape[:3], state.shape[2])) if dy is None else dy[:, ::-1]
    inputs = [back, later(w, 1.0), back, values, later(b, 0.0), later(a, 0.0)]
    d, found = _all(0.0, state.shape), []
    sets = 0 if dstates is None else dstates.shape[0] // N if N else 0
    for slot in range(sets):
        d = add(scanned(d, slice(slot, slot + 1), 1), dstates[slot * N : (slot + 1) * N])
        found.append(d)
    if sets < T:
        found.append(scanned(d, slice(sets, None), T - sets))
    return concat(*reversed(found), axis=0) if len(found) > 1 else found[0]


def _all(value: float, shape: tuple[int, ...]) -> Tensor:
    return broadcast_to(tensor(np.full((1,) * len(shape), value)), shape=shape)


@delta_scan.flops
def _(t):
    r, v, a = t.src[0], t.src[3], t.src[5]
    return (5 + 4 * (a is not None)) * r.size * v.shape[3]


@delta_scan_back.flops
def _(t):
    r, v, a = t.src[0], t.src[3], t.src[7]
    return (11 + 8 * (a is not None)) * r.size * v.shape[3]


def _check_alike(r: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        ensure(x is None or x.shape == r.shape, f"{name} must have the shape of r")


def _states(w, k, v, state, a, b) -> list[np.ndarray]:
    """Before the first token, and after each."""
    states = [state]
    for t in range(w.shape[1]):
        old = states[-1]
        new = old * w[:, t, :, None, :] + v[:, t, :, :, None] * k[:, t, :, None, :]
        if a is not None:
            new = new + np.einsum("nhvs,nhs->nhv", old, a[:, t])[..., None] * b[:, t, :, None, :]
        states.append(new)
    return states


@op(layout="contiguous")
def selective_scan(s, x, dt, A, B, C, *, snapshots: Count = 1):
    """y[N, T, H, D] and states[snapshots N, H, D, S] of a scan over tokens t, of heads that decay at their own paces:

        S_t = exp(dt_t A) S_(t-1) + (dt_t x_t) B_t^T        y_t = S_t C_t

    s: [N, H, D, S]; x: [N, T, H, D]; dt: [N, T, H]; A: [H, S] or [H, 1]; B, C: [N, T, G, S], shared by the H / G heads
    of a group.  `states` are the N states after the last token, then those after the one before, and so on.
    """
    _check_selective(s, x, dt, A, B, C)
    N, T, H, D = x.shape
    ensure(snapshots in range(1, max(1, T) + 1), f"snapshots={snapshots} must be 1 to {max(1, T)}")
    return Pack(y=x.spec, states=Spec((cast(int, snapshots) * N, H, D, s.shape[3])))


@selective_scan.grad
def _(t, dy, dstates):
    return selective_scan_back(*t.src, dy, dstates)


@selective_scan.reference
def _(s, x, dt, A, B, C, *, snapshots):
    states = _selective_states(s, x, dt, A, B)
    y = np.zeros(x.shape)
    for t in range(x.shape[1]):
        y[:, t] = np.einsum("nhds,nhs->nhd", states[t + 1], _by_head(C, x)[:, t])
    return y, np.concatenate([states[-1 - i] for i in range(snapshots)])


@selective_scan.flops
def _(t):
    s, x = t.src[:2]
    return 6 * x.size * s.shape[3]


@op(layout="contiguous")
def selective_scan_back(s, x, dt, A, B, C, dy: Float | None = None, dstates: Float | None = None):
    """The gradients of `selective_scan` by its inputs, in their order."""
    _check_selective(s, x, dt, A, B, C)
    ensure(dy is None or dy.shape == x.shape, "dy must have the shape of x")
    _check_snapshots(dstates, s, x.shape[1])
    return Pack(ds=s.spec, dx=x.spec, ddt=dt.spec, dA=A.spec, dB=B.spec, dC=C.spec)


@selective_scan_back.grad
@through
def _(s, x, dt, A, B, C, dy, dstates):
    snapshots = 1 if dstates is None else dstates.shape[0] // max(1, s.shape[0])
    return tuple(pull_back(_of_delta_scan, (s, x, dt, A, B, C), (dy, dstates), [True] * 6, snapshots=snapshots))


@selective_scan_back.flops
def _(t):
    s, x = t.src[:2]
    return 15 * x.size * s.shape[3]


@selective_scan_back.reference
def _(s, x, dt, A, B, C, dy, dstates):
    states, (N, T, H, _), S = _selective_states(s, x, dt, A, B), x.shape, s.shape[3]
    ds, dx, ddt = np.zeros(s.shape), np.zeros(x.shape), np.zeros(dt.shape)
    dA, dB, dC = np.zeros((H, S)), np.zeros((N, T, H, S)), np.zeros((N, T, H, S))
    groups, B, C = B.shape[2], _by_head(B, x), _by_head(C, x)
    sets = list(dstates.reshape(len(dstates) // N, *s.shape)) if dstates is not None and N else []
    if T == 0 and sets:
        ds = ds + sets[0]
    for t in reversed(range(T)):
        if T - 1 - t < len(sets):
            ds = ds + sets[T - 1 - t]
        if dy is not None:
            ds = ds + dy[:, t, :, :, None] * C[:, t, :, None]
            dC[:, t] = np.einsum("nhd,nhds->nhs", dy[:, t], states[t + 1])
        dwrite, decay = np.einsum("nhds,nhs->nhd", ds, B[:, t]), np.exp(dt[:, t, :, None] * A)
        dB[:, t] = np.einsum("nhds,nhd->nhs", ds, x[:, t] * dt[:, t, :, None])
        paced = ds * states[t] * decay[:, :, None]  # by dt A
        dx[:, t] = dwrite * dt[:, t, :, None]
        ddt[:, t] = (dwrite * x[:, t]).sum(-1) + (paced * A[:, None]).sum((2, 3))
        dA += (paced * dt[:, t, :, None, None]).sum((0, 2))
        ds = ds * decay[:, :, None]
    dB, dC = (d.reshape(N, T, groups, H // groups, S).sum(3) for d in (dB, dC))
    return ds, dx, ddt, dA if A.shape[1] == S else dA.sum(1, keepdims=True), dB, dC


def _check_selective(s, x, dt, A, B, C) -> None:
    ensure(s.ndim == x.ndim == B.ndim == 4, "s, x and B must have four axes")
    (N, T, H, D), G, S = x.shape, B.shape[2], s.shape[3]
    ensure(s.shape == (N, H, D, S), f"s must be {(N, H, D, S)}")
    ensure(dt.shape == (N, T, H), f"dt must be {(N, T, H)}")
    ensure(A.shape in ((H, 1), (H, S)), f"A must be {(H, 1)} or {(H, S)}")
    ensure(B.shape == C.shape == (N, T, G, S), f"B and C must be [{N}, {T}, groups, {S}]")
    ensure(G > 0 and H % G == 0, f"{G} groups do not divide {H} heads")


def _check_snapshots(dstates, state, tokens: int) -> None:
    if dstates is not None:
        N = state.shape[0]
        sets = dstates.shape[0] // max(1, N) if dstates.ndim == 4 else 0
        fits = dstates.shape == (sets * N, *state.shape[1:]) and (N == 0 or 1 <= sets <= max(1, tokens))
        ensure(fits, f"dstates must be {state.shape} or several of them")


def _by_head(B, x) -> np.ndarray:
    """What the heads of a group share, for each of them: [N, T, H, S]."""
    return np.repeat(B, x.shape[2] // B.shape[2], axis=2)


def _selective_states(s, x, dt, A, B) -> list[np.ndarray]:
    """Before the first token, and after each."""
    states, B = [s], _by_head(B, x)
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t, :, None] * A)[:, :, None]
        states.append(states[-1] * decay + (x[:, t] * dt[:, t, :, None])[..., None] * B[:, t, :, None])
    return states


def _of_delta_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, snapshots: int):
    """`selective_scan`, with decays, B and C of each head."""
    (N, T, H, _), S = x.shape, s.shape[3]
    step = reshape(dt, (N, T, H, 1))
    decay = exp(mul(step, A))
    decay = decay if A.shape[1] == S else repeat(decay, shape=(N, T, H, S))
    read, write = (_of_heads(t, H) for t in (C, B))
    return delta_scan(read, decay, write, mul(x, step), s, snapshots=snapshots)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Each group's vectors for every one of its heads, one after another: [N, T, G, S] to [N, T, heads, S]."""
    N, T, G, S = x.shape
    if heads == G:
        return x
    return reshape(repeat(reshape(x, (N * T, G, 1, S)), shape=(N * T, G, heads // G, S)), (N, T, heads, S))


# -- as ggml has them -------------------------------------------------------------------------------------------


def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The heart of RWKV 7: `delta_scan` of r, w, k, v, a, b, each [tokens, H, S], sequence after sequence.

    state: [sequences, H S S] (or [sequences, H, S, S]); S[i][j] has value i and key j.

    Source: Peng et al. 2025, "RWKV-7", arXiv:2503.14456.

    Returns:
        y[tokens, H, S] and the states after the last tokens, [sequences, H, S, S].

    Raises:
        ShapeError: sizes that differ.
    """
    N = _sequences("rwkv_wkv7", state, r=r, w=w, k=k, v=v, a=a, b=b)
    split = [_by_sequence(x, N) for x in (r, w, k, v, a, b)]
    y, states = delta_scan(*split[:4], _square(state, N, r), *split[4:])
    return reshape(y, r.shape), states


def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The heart of RWKV 6, of k, v, r and td [tokens, H, S], the bonus tf[H, S] of the token itself, and the states:

        y_t = (S_(t-1) + diag(tf) k_t v_t^T)^T r_t        S_t = diag(td_t) S_(t-1) + k_t v_t^T

    state: [sequences, H S S] (or [sequences, H, S, S]); S[i][j] has key i and value j.

    Source: Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892.

    Returns:
        y[tokens, H, S] and the states after the last tokens, [sequences, H, S, S].

    Raises:
        ShapeError: sizes that differ.
    """
    N = _sequences("rwkv_wkv6", state, k=k, v=v, r=r, td=td)
    if tf.shape != k.shape[1:]:
        raise ShapeError(f"rwkv_wkv6(k={k.spec}, tf={tf.spec}): tf must be {list(k.shape[1:])}")
    first = transpose(_square(state, N, k))
    kk, vv, rr, dd = (_by_sequence(x, N) for x in (k, v, r, td))
    T = kk.shape[1]
    own = mul(sum_rows(mul(mul(kk, rr), tf)), vv)
    if T == 0:
        return reshape(own, k.shape), cont(transpose(first))
    # y_t reads the state before its token: what the scan gives for token t - 1, were r the next one's
    later = concat(rr[:, 1:], scale(rr[:, :1], factor=0.0), axis=1) if T > 1 else scale(rr, factor=0.0)
    after, states = delta_scan(later, dd, kk, vv, first)
    begin = permute(mul_mat(first, permute(rr[:, :1], axes=(0, 2, 1, 3))), axes=(0, 2, 1, 3))
    before = concat(begin, after[:, :-1], axis=1) if T > 1 else begin
    return reshape(add(before, own), k.shape), transpose(states)


def gated_linear_attn(
    k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """S_t = diag(g_t) S_(t-1) + k_t v_t^T and y_t = factor S_t^T q_t, of k, v, q and g [tokens, H, S].

    state: [sequences, H S S] (or [sequences, H, S, S]); S[i][j] has key i and value j.

    Source: Yang et al. 2023, arXiv:2312.06635.

    Returns:
        y[tokens, H, S] and the states after the last tokens, [sequences, H, S, S].

    Raises:
        ShapeError: sizes that differ.
    """
    N = _sequences("gated_linear_attn", state, k=k, v=v, q=q, g=g)
    kk, vv, qq, gate = (_by_sequence(x, N) for x in (k, v, q, g))
    y, states = delta_scan(scale(qq, factor=factor), gate, kk, vv, transpose(_square(state, N, k)))
    return reshape(y, k.shape), transpose(states)


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, snapshots: int = 1
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: S = S exp(g), then S += k (beta (v - S^T k))^T, and y = S^T q / sqrt(D).

    q, k: [N, T, HK, D]; v: [N, T, H, D], head h of which uses head h % HK of those; g: [N, T, H, 1 or D], a decay of
    heads or of their key channels; beta: [N, T, H, 1]; state: [N, H, D, D], stored with values first.

    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.

    Returns:
        y[N, T, H, D] and states[snapshots N, H, D, D], after the last token, then after the one before, ...

    Raises:
        ShapeError: sizes that differ.
    """
    where = f"gated_delta_net(q={q.spec}, k={k.spec}, v={v.spec}, g={g.spec}, beta={beta.spec}, state={state.spec})"
    fits = q.ndim == v.ndim == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2] and q.shape[3] == v.shape[3]
    if not fits or not q.shape[2] or v.shape[2] % q.shape[2]:
        raise ShapeError(f"{where}: q and k must be [N, T, HK, D] and v [N, T, H, D], with H a multiple of HK")
    N, T, H, D = v.shape
    if g.shape not in ((N, T, H, 1), (N, T, H, D)) or beta.shape != (N, T, H, 1) or state.shape != (N, H, D, D):
        raise ShapeError(f"{where}: g must be [N, T, H, 1 or D], beta [N, T, H, 1] and state [N, H, D, D]")
    heads = [x if q.shape[2] == H else repeat(x, shape=v.shape) for x in (q, k)]
    decay = exp(g if g.shape == v.shape else repeat(g, shape=v.shape))
    read = scale(heads[0], factor=1 / np.sqrt(max(1, D)))
    # beta (v - D k) with D the decayed state: what D forgets is a product with w k
    return delta_scan(
        read, decay, heads[1], mul(v, beta), state, mul(decay, heads[1]), neg(mul(heads[1], beta)), snapshots=snapshots
    )


def ssm_scan(
    s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor | None = None, snapshots: int = 1
) -> tuple[Tensor, Tensor]:
    """The selective scan of Mamba: S_t = exp(A d) S_(t-1) + (x_t d) B_t^T and y_t = S_t C_t, where d = softplus(dt_t).

    s: [states, H, D, S], of which sequence n begins with number ids[n] (n itself without ids); x: [N, T, H, D];
    dt: [N, T, H]; A: [H, 1] (Mamba 2) or [H, S] (Mamba 1); B, C: [N, T, G, S], shared by the H / G heads of a group.

    Sources: Gu and Dao 2023, arXiv:2312.00752 (Mamba 1); Dao and Gu 2024, arXiv:2405.21060 (Mamba 2).

    Returns:
        y[N, T, H, D] and states[snapshots N, H, D, S], after the last token, then after the one before, ...

    Raises:
        ShapeError: sizes that differ.
    """
    where = f"ssm_scan(s={s.spec}, x={x.spec}, dt={dt.spec}, A={A.spec}, B={B.spec}, C={C.spec})"
    if s.ndim != 4 or x.ndim != 4 or B.ndim != 4 or B.shape != C.shape:
        raise ShapeError(f"{where}: s, x, B and C must have four axes, and B and C the same sizes")
    (N, T, H, D), G, S = x.shape, B.shape[2], s.shape[3]
    if not G or H % G or B.shape != (N, T, G, S) or dt.shape != (N, T, H) or s.shape[1:3] != (H, D):
        raise ShapeError(f"{where}: of x[N, T, H, D] and s[states, H, D, S], dt is [N, T, H] and B [N, T, G, S]")
    if A.shape not in ((H, 1), (H, S)):
        raise ShapeError(f"{where}: A must be [{H}, 1] or [{H}, {S}]")
    if ids is not None:
        s = reshape(get_rows(reshape(s, (s.shape[0], H * D * S)), ids), (*ids.shape, H, D, S))
    return selective_scan(s, x, softplus(dt), A, B, C, snapshots=snapshots)


def _sequences(name: str, state: Tensor, **vectors: Tensor) -> int:
    """How many sequences there are, all vectors being [tokens, H, S]."""
    first = next(iter(vectors.values()))
    given = ", ".join(f"{key}={x.spec}" for key, x in (*vectors.items(), ("state", state)))
    N = state.shape[0] if state.ndim else 0
    alike = first.ndim == 3 and all(x.shape == first.shape for x in vectors.values())
    if not alike or not N or first.shape[0] % N or state.size != N * first.shape[1] * first.shape[2] ** 2:
        raise ShapeError(
            f"{name}({given}): vectors must be [tokens, H, S] and state [sequences, H S S], of equal parts"
        )
    return N


def _by_sequence(x: Tensor, N: int) -> Tensor:
    return reshape(x, (N, x.shape[0] // N, *x.shape[1:]))


def _square(state: Tensor, N: int, x: Tensor) -> Tensor:
    return reshape(state, (N, x.shape[1], x.shape[2], x.shape[2]))
