"""Kimi Delta Attention: linear attention with the delta rule and a decay for every key channel.

For every value head a state S, K x V, runs through the tokens of a sequence:

    S'_t = diag(exp g_t) S_{t-1}            decay
    d_t  = beta_t (v_t - S'_t^T k_t)        what the state does not yet answer to k_t
    S_t  = S'_t + k_t d_t^T                 write
    o_t  = scale S_t^T q_t                  read

q, k: [B, T, H, K].  v, o: [B, T, HV, V].  g: [B, T, HV, K].  beta: [B, T, HV].  States: [N, HV, K, V].
Value head h reads the q and k of head h // (HV // H).  N is B, or the number of packed sequences.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import F32
from ..core.errors import GradientError, IndexRangeError, ShapeError
from ..core.op import Int, Record, Wanted, ensure, op, results
from ..core.tensor import Pack, Spec, Tensor, Update, tensor
from .layout import broadcast_to, concat, kept_alone, reshape, transpose

__all__ = [
    "kda", "kda_back", "kda_gate", "kda_gate_back", "kda_recurrent", "kda_recurrent_pool", "kda_state_map",
    "kda_state_map_back",
]  # fmt: skip

CHUNKS = (32, 64)  # tokens
MOST_K = 256  # channels of a key
DH0 = 5  # which of `kda_back`'s results
L2_EPS = 1e-6  # added to the sum of squares
LARGEST_SAFE_GATE = 0.4  # above it products of exp(g) may overflow, and tokens go one by one


class Gate(enum.IntEnum):
    """What `g` holds.  x = g + dt_bias, A = exp(A_log) of the head."""

    GIVEN = 0  # the logarithm of the decay itself
    SOFTPLUS = 1  # it is -A softplus(x)
    LOWER_BOUND = 2  # it is lower_bound * sigmoid(A x)


class BetaForm(enum.IntEnum):
    """What `beta` holds."""

    GIVEN = 0
    SIGMOID = 1  # beta is sigmoid of it
    TWICE_SIGMOID = 2  # the state's transition may have negative eigenvalues


@dataclass(frozen=True)
class Form(Record):
    """How inputs are taken.  In C it is gg_kda_form."""

    scale: float
    l2norm: bool  # q and k are divided by sqrt(sum of squares + L2_EPS), in each head
    gate: Gate
    lower_bound: float  # of the gate
    beta_form: BetaForm
    state_v_first: bool  # states are V x K


class Keep(enum.IntEnum):
    """Which intermediate results the forward pass leaves for others."""

    NOTHING = 0  # the gradient computes them again
    STATES = 1
    ALL = 2


# -- as graphs hold them ------------------------------------------------------------------------------------


@op
def kda(
    q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, cu_seqlens: Int | None = None, *,
    form: Form, chunk_size: int, final_state: bool, keep: Keep,
):  # fmt: skip
    """Packed: o, the final state if asked for, and what is kept.

    states: [slots, HV, K, V] at the start of every chunk.  scores, inverse: [slots, HV, C, C], of the strictly
    lower triangle M of beta_i k_i . k_j exp(G_i - G_j) the inverse of 1 + M.  d: [slots, HV, C, V].
    A slot is a chunk; those that nothing fills hold 0, and so do the scores and the inverse of a chunk from the
    first token on that goes through the recurrence: one that is not finite, or has a gate above 0.4.
    """
    s = _sizes(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, form)
    ensure(beta.ndim == 3, f"beta must have the shape {(s.B, s.T, s.HV)}; kda_recurrent takes one of {v.shape} too")
    _ensure_chunk_size(chunk_size)
    parts = {"o": v.spec}
    if final_state:
        parts["final_state"] = s.states
    return Pack(**parts, **s.kept(chunk_size, cu_seqlens is not None, keep))


@kda.grad
def _(t, do, *others, needs):
    dht, dkept = (others[0], others[1:]) if t.attrs["final_state"] else (None, others)
    if any(d is not None for d in dkept):
        raise GradientError(
            "kda gives its intermediate states no gradient: build the loss from the result and the final state"
        )
    first = 2 if t.attrs["final_state"] else 1
    kept = t.parts[first:] if t.attrs["keep"] is Keep.ALL else (None,) * 4
    return _gradients(t, do, dht, kept, needs, t.attrs["chunk_size"])


@kda.flops
def _(t):
    K, V, C = t.src[0].shape[-1], t.src[2].shape[-1], t.attrs["chunk_size"]
    return _tokens(t) * (2 * C * K + C * C // 3 + 6 * K * V + 2 * C * V)  # triangles are half of their squares


@kda.reference
def _(q, k, v, g, beta, h0, A_log, dt_bias, cu, *, form, final_state, keep, chunk_size):
    p = _prepared("kda", q, k, v, g, beta, h0, A_log, dt_bias, cu, form)
    o, ht, d, states = _run_forward(p)
    made = [o]
    if final_state:
        made.append(p.layout(ht))
    if keep is not Keep.NOTHING:
        made.extend(_kept(p, d, states, chunk_size, cu is not None)[: 1 if keep is Keep.STATES else 4])
    return tuple(made)


@op
def kda_back(
    q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, cu_seqlens: Int | None = None,
    do=None, dht=None, states=None, scores=None, inverse=None, d=None, *,
    form: Form, chunk_size: int, wanted: Wanted = (),
):  # fmt: skip
    """Gradients of `kda` by its inputs: those of dq, dk, dv, dg, dbeta, dh0, dA_log and ddt_bias that are wanted.

    Args:
        do: gradient of the result, [B, T, HV, V]; dht: of the final state.  Either may be left out.
        states, scores, inverse, d: what `kda` kept of its intermediate results, or none of them: they are then
            computed again.
    """
    s = _sizes(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, form)
    ensure(beta.ndim == 3, f"beta must have the shape {(s.B, s.T, s.HV)}")
    _ensure_chunk_size(chunk_size)
    ensure(do is None or do.shape == v.shape, f"do must have the shape {v.shape} of v")
    ensure(dht is None or dht.shape == s.states.shape, f"dht must have the shape {s.states.shape}")
    kept = {"states": states, "scores": scores, "inverse": inverse, "d": d}
    for name, spec in s.kept(chunk_size, cu_seqlens is not None, Keep.ALL).items():
        ensure((kept[name] is None) == (states is None), "states, scores, inverse and d come together")
        ensure(kept[name] is None or kept[name].shape == spec.shape, f"{name} must have the shape {spec.shape}")
    return results(
        wanted, dq=q.spec, dk=k.spec, dv=v.spec, dg=g.spec, dbeta=beta.spec,
        dh0=None if initial_state is None else s.states, dA_log=None if A_log is None else Spec((s.HV,)),
        ddt_bias=None if dt_bias is None else Spec((s.HV * s.K,)),
    )  # fmt: skip


@kda_back.flops
def _(t):
    """Without what is computed again."""
    K, V, C = t.src[0].shape[-1], t.src[2].shape[-1], t.attrs["chunk_size"]
    return _tokens(t) * (4 * C * K + 12 * K * V + 4 * C * V)


@kda_back.reference
def _(
    q, k, v, g, beta, h0, A_log, dt_bias, cu, do, dht, states, scores, inverse, d, *, form, chunk_size
):  # fmt: skip
    p = _prepared("kda_back", q, k, v, g, beta, h0, A_log, dt_bias, cu, form)
    return _run_backward(p, np.zeros(v.shape, v.dtype) if do is None else do, dht)


@op
def kda_recurrent(
    q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, cu_seqlens: Int | None = None, *,
    form: Form, final_state: bool,
):  # fmt: skip
    s = _sizes(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, form)
    return Pack(o=v.spec, final_state=s.states) if final_state else Pack(o=v.spec)


@kda_recurrent.grad
def _(t, do, dht=None, *, needs):
    if t.src[4].ndim == 4:
        raise GradientError(
            "kda_recurrent has no gradient with a beta for every value channel: give it one for every head"
        )
    return _gradients(t, do, dht, (None,) * 4, needs, CHUNKS[-1])


@kda_recurrent.flops
def _(t):
    return 7 * _tokens(t) * t.src[0].shape[-1] * t.src[2].shape[-1]


@kda_recurrent.reference
def _(q, k, v, g, beta, h0, A_log, dt_bias, cu, *, form, final_state):
    p = _prepared("kda_recurrent", q, k, v, g, beta, h0, A_log, dt_bias, cu, form)
    o, ht, _, _ = _run_forward(p)
    return (o, p.layout(ht)) if final_state else (o,)


@op
def kda_recurrent_pool(
    out, pool, q, k, v, g, beta, slots: Int, accepted: Int | None = None, A_log=None, dt_bias=None,
    cu_seqlens: Int | None = None, *,
    form: Form,
):  # fmt: skip
    """`kda_recurrent` on a pool of states, written into the leaves `out` and `pool`; gives `out`.

    Args:
        out: [B, T, HV, V].
        pool: [states, HV, K, V], or [states, HV, V, K].
        slots: [N, S], or [N] for sequences of one token: after token t sequence n leaves its state in the
            pool's state slots[n, t].  A state belongs to one sequence.
        accepted: [N]; the sequence begins with the state slots[n, accepted[n] - 1].  Left out, with slots[n, 0].
    """
    s = _sizes(q, k, v, g, beta, None, A_log, dt_bias, cu_seqlens, form)
    ensure(out.shape == v.shape, f"out must have the shape {v.shape} of v")
    ensure(
        pool.ndim == 4 and pool.shape[1:] == s.states.shape[1:], f"pool must have the shape [states, {s.states_text}]"
    )
    ensure(out is not pool, "out and pool must be two leaves")
    ensure(slots.ndim in (1, 2) and slots.shape[0] == s.N, f"slots must have the shape [{s.N}] or [{s.N}, tokens]")
    most = slots.shape[1] if slots.ndim == 2 else 1
    ensure(most >= 1, "slots must name a state for at least one token")
    ensure(cu_seqlens is not None or most >= s.T, f"there are slots for {most} tokens of a sequence, and it has {s.T}")
    ensure(accepted is None or accepted.shape == (s.N,), f"accepted must have the shape ({s.N},)")
    return Update(out, pool)


@kda_recurrent_pool.flops
def _(t):
    return 7 * prod(t.src[4].shape[:3]) * t.src[2].shape[-1] * t.src[4].shape[-1]


@kda_recurrent_pool.reference
def _(out, pool, q, k, v, g, beta, slots, accepted, A_log, dt_bias, cu, *, form):
    name = "kda_recurrent_pool"
    p = _prepared(name, q, k, v, g, beta, None, A_log, dt_bias, cu, form)
    slots = slots.reshape(len(slots), -1)
    _check_slots(name, p.sequences, slots, accepted, len(pool))
    out, pool = np.zeros(v.shape), pool.copy()
    for n, b, begin, end in p.sequences:
        S = p.layout(pool[slots[n, 0 if accepted is None else accepted[n] - 1]])
        for t in range(begin, end):
            S, _, out[b, t] = _step(p, S, b, t)
            pool[slots[n, t - begin]] = p.layout(S)
    return out, pool


@op
def kda_gate(g, A_log=None, dt_bias=None, *, gate: Gate, lower_bound: float):
    _ensure_gate(g, A_log, dt_bias, gate)
    return g.spec


@kda_gate.grad
def _(t, dout, *, needs):
    dg, *others = kda_gate_back(dout, *t.src, wanted=needs, **t.attrs)
    return dg, *map(kept_alone, others)


@kda_gate.reference
def _(g, A_log, dt_bias, *, gate, lower_bound):
    return _gate(g, A_log, dt_bias, gate, lower_bound)


@op
def kda_gate_back(dout, g, A_log=None, dt_bias=None, *, gate: Gate, lower_bound: float, wanted: Wanted = ()):
    """Gradients of `kda_gate`: those of dg, dA_log and ddt_bias that are wanted, and of which there are inputs."""
    _ensure_gate(g, A_log, dt_bias, gate)
    ensure(dout.shape == g.shape, "dout and g have different shapes")
    return results(
        wanted, dg=g.spec, dA_log=None if A_log is None else A_log.spec,
        ddt_bias=None if dt_bias is None else dt_bias.spec,
    )  # fmt: skip


@kda_gate_back.reference
def _(dout, g, A_log, dt_bias, *, gate, lower_bound):
    return _gate_back(dout, g, A_log, dt_bias, gate, lower_bound)


def _tokens(t: Tensor) -> int:
    """Of all heads of values."""
    return prod(t.src[2].shape[:3])  # type: ignore[union-attr]


def _gradients(t, do, dht, kept, needs, chunk_size):
    """What the rules of both forms of attention give: a `kda_back`, asked for what is needed."""
    *tokens, dh0, dA_log, ddt_bias = kda_back(
        *t.src, do, dht, *kept, form=t.attrs["form"], chunk_size=chunk_size, wanted=needs[:8]
    )
    return *tokens, *map(kept_alone, (dh0, dA_log, ddt_bias)), None


# -- shapes -------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Of a call; see the module."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    state_v_first: bool

    @property
    def states(self) -> Spec:
        shape = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        return Spec((self.N, self.HV, *shape))

    @property
    def states_text(self) -> str:
        return ", ".join(map(str, self.states.shape[1:]))

    def kept(self, chunk_size: int, packed: bool, keep: Keep) -> dict[str, Spec]:
        """The intermediate results, of every chunk that there may be."""
        n = _slots(self.B, self.T, self.N, chunk_size, packed)
        shapes = {
            "states": (self.K, self.V),
            "scores": (chunk_size, chunk_size),
            "inverse": (chunk_size, chunk_size),
            "d": (chunk_size, self.V),
        }
        count = {Keep.NOTHING: 0, Keep.STATES: 1, Keep.ALL: 4}[keep]
        return {name: Spec((n, self.HV, *shape)) for name, shape in list(shapes.items())[:count]}


def _slots(B: int, T: int, N: int, chunk_size: int, packed: bool) -> int:
    """Chunks of B sequences, or the most that N packed ones can have: each may end with a chunk of one token."""
    return (T + N * (chunk_size - 1)) // chunk_size if packed else B * -(-T // chunk_size)


def _sizes(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, form: Form) -> Sizes:
    """Once everything fits."""
    ensure(q.ndim == v.ndim == 4, "q, k and v must have four axes: [batch, tokens, heads, channels]")
    ensure(q.shape == k.shape, f"q and k must have the same shape, not {q.shape} and {k.shape}")
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    ensure(v.shape[:2] == (B, T), f"v has {v.shape[0]} batches of {v.shape[1]} tokens, q {B} of {T}")
    ensure(K <= MOST_K, f"keys have {K} channels, and the most is {MOST_K}")
    ensure(HV % H == 0 if H else HV == 0, f"the {H} heads of q and k do not divide the {HV} of v")
    ensure(g.shape == (B, T, HV, K), f"g must have the shape {(B, T, HV, K)}, a number for every channel of a key")
    ensure(
        beta.shape in ((B, T, HV), (B, T, HV, V)), f"beta must have the shape {(B, T, HV)}, one number for every head"
    )
    N = B
    if cu_seqlens is not None:
        ensure(cu_seqlens.ndim == 1 and cu_seqlens.size >= 1, "cu_seqlens must have the shape [sequences + 1]")
        ensure(B == 1, f"sequences packed with cu_seqlens lie in one batch, not in {B}")
        N = cu_seqlens.size - 1
    s = Sizes(B, T, H, HV, K, V, N, form.state_v_first)
    if initial_state is not None:
        ensure(
            initial_state.shape == s.states.shape,
            f"the initial states of {N} sequences must have the shape {s.states.shape}",
        )
    _ensure_gate(g, A_log, dt_bias, form.gate)
    return s


def _ensure_chunk_size(chunk_size: int) -> None:
    ensure(chunk_size in CHUNKS, f"chunk_size must be 32 or 64, not {chunk_size}")


def _ensure_gate(g, A_log, dt_bias, gate) -> None:
    ensure(g.ndim >= 2, "g must have the axes [..., heads, channels]")
    HV, K = g.shape[-2:]
    ensure(gate is not Gate.SOFTPLUS or A_log is not None, "the softplus gate needs A_log")
    ensure(A_log is None or A_log.shape == (HV,), f"A_log must have {HV} elements, one for every value head")
    ensure(
        dt_bias is None or dt_bias.shape == (HV * K,),
        f"dt_bias must have {HV * K} elements, one for every channel of a value head",
    )


# -- as users call them -------------------------------------------------------------------------------------


@kda.call
def _(
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    g: Tensor | ArrayLike,
    beta: Tensor | ArrayLike,
    *,
    scale: float | None = None,
    initial_state: Tensor | ArrayLike | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | ArrayLike | None = None,
    A_log: Tensor | ArrayLike | None = None,
    dt_bias: Tensor | ArrayLike | None = None,
    chunk_size: int = 64,
) -> Tensor | tuple:
    """Kimi Delta Attention, in chunks: time and memory grow with the number of tokens, not with its square.

    For every value head a state S, K x V, runs through the tokens of a sequence:

        S'_t = diag(exp g_t) S_(t-1),  d_t = beta_t (v_t - S'_t^T k_t),  S_t = S'_t + k_t d_t^T,  o_t = scale S_t^T q_t

    `ggrad.mimic.fla` has it under the names of flash-linear-attention.

    Source: Kimi Team 2025, "Kimi Linear", arXiv:2510.26692.

    Args:
        q, k: [B, T, H, K], K up to 256.  v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural logarithms of the decays, meant to be 0 or less; from one above 0.4 to the end of
            its chunk tokens are computed one by one.
        beta: [B, T, HV], how much of the error each token corrects.
        scale: default 1 / sqrt(K).
        initial_state: f32 [N, HV, K, V], zeros if left out.
        output_final_state: also give the states after the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6), in each head.
        use_gate_in_kernel: g holds x of `kda_gate`, which A_log [HV], dt_bias [HV * K] and lower_bound belong to.
        use_beta_sigmoid_in_kernel: beta is sigmoid of what is given; with allow_neg_eigval, twice that.
        safe_gate: promises -5 <= g.  It is checked, where it can be, and changes nothing else.
        disable_recompute: keep intermediate results for the gradient: faster, and takes memory until then.
        return_intermediate_states: also give the states at the starts of all chunks.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: i32 [N + 1], with B = 1: sequence n is the tokens cu_seqlens[n] ... cu_seqlens[n + 1] - 1.  They
            begin at 0, do not decrease and end at T.
        A_log, dt_bias: of any shape with so many elements.
        chunk_size: 32 or 64 tokens.

    Returns:
        o [B, T, HV, V]; with `output_final_state` (o, final_state); with `return_intermediate_states`
        (o, final_state or None, states), states [chunks, HV, K, V] where cu_seqlens make the number of chunks the most
        that N sequences of T tokens can have; those that are none hold 0.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        IndexRangeError: at run time, when cu_seqlens are no boundaries.
        GradientError: when gradients are built, through intermediate states.
    """
    tensors = _Tensors("kda", q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)
    tensors.require(
        not (return_intermediate_states and disable_recompute),
        "return_intermediate_states and disable_recompute exclude each other",
    )
    if safe_gate and use_gate_in_kernel:
        tensors.require(lower_bound is not None, "safe_gate with use_gate_in_kernel needs a lower_bound")
        tensors.require(-5 <= lower_bound < 0, f"lower_bound={lower_bound} is not in the safe range [-5, 0)")  # type: ignore[operator]
    form = tensors.form(
        scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first,
    )  # fmt: skip
    keep = Keep.ALL if disable_recompute else Keep.STATES if return_intermediate_states else Keep.NOTHING
    final_state = bool(output_final_state)
    made = kda.node(*tensors.src, form=form, chunk_size=chunk_size, final_state=final_state, keep=keep)
    ht = made[1] if output_final_state else None
    if return_intermediate_states:
        return made[0], ht, transpose(made[-1]) if state_v_first else made[-1]
    return (made[0], ht) if output_final_state else made[0]


@kda_recurrent.call
def _(
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    g: Tensor | ArrayLike,
    beta: Tensor | ArrayLike,
    *,
    A_log: Tensor | ArrayLike | None = None,
    dt_bias: Tensor | ArrayLike | None = None,
    scale: float | None = None,
    initial_state: Tensor | ArrayLike | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | ArrayLike | None = None,
    ssm_state_indices: Tensor | ArrayLike | None = None,
    num_accepted_tokens: Tensor | ArrayLike | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Kimi Delta Attention token by token: for decoding, where a call goes on from the state of the one before.

    Arguments and result are those of `kda`, and these besides:

    Source: Kimi Team 2025, arXiv:2510.26692.

    Args:
        beta: [B, T, HV], or [B, T, HV, V] for one in every value channel (which has no gradient).
        ssm_state_indices: i32 [N], or [N, S] for up to S tokens a sequence.  initial_state is then a leaf, a pool
            [states, HV, K, V]: token t of sequence n leaves its state in place ssm_state_indices[n, t] of it.
            A place belongs to one sequence.  The pool is updated in place; o is the result.
        num_accepted_tokens: i32 [N], with the pool: sequence n begins with the state in place
            ssm_state_indices[n, num_accepted_tokens[n] - 1], default 1.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        IndexRangeError: at run time, when cu_seqlens are no boundaries or a place is not in the pool.  Nothing has
            been written then.
    """
    pooled = ssm_state_indices is not None
    tensors = _Tensors("kda_recurrent", q, k, v, g, beta, None if pooled else initial_state, A_log, dt_bias, cu_seqlens)
    form = tensors.form(
        scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first,
    )  # fmt: skip
    if not pooled:
        tensors.require(num_accepted_tokens is None, "num_accepted_tokens are of a pool with ssm_state_indices")
        made = kda_recurrent.node(*tensors.src, form=form, final_state=bool(output_final_state))
        return made if output_final_state else made[0]
    tensors.require(isinstance(initial_state, Tensor), "with ssm_state_indices initial_state is a leaf, the pool")
    tensors.require(not output_final_state, "with ssm_state_indices the final states are in the pool")
    inputs, gates_and_sequences = tensors.src[:5], tensors.src[6:]
    out = tensor(shape=inputs[2].shape, name="o of kda_recurrent")  # type: ignore[union-attr]
    out.memory()
    return kda_recurrent_pool(
        out, initial_state, *inputs, ssm_state_indices, num_accepted_tokens, *gates_and_sequences, form=form
    )


@kda_gate.call
def _(
    g: Tensor | ArrayLike,
    A_log: Tensor | ArrayLike | None = None,
    dt_bias: Tensor | ArrayLike | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Decays, as logarithms, from what a layer computes: with x = g + dt_bias and A = exp(A_log)

        -A softplus(x)                  where there is no lower_bound
        lower_bound * sigmoid(A x)      where there is; A = 1 if A_log is left out

    Source: Kimi Team 2025, arXiv:2510.26692.

    Args:
        g: [..., HV, K].
        A_log: HV elements; dt_bias: HV * K elements; of any shape.

    Returns:
        f32, of g's shape.

    Raises:
        ShapeError: there is neither A_log nor lower_bound, or shapes or dtypes do not fit.
    """
    g = _tensor(g)
    given = {"g": g, "A_log": _optional(A_log), "dt_bias": _optional(dt_bias)}
    _require("kda_gate", given, lower_bound is not None or A_log is not None, "without a lower_bound A_log is needed")
    A_log, dt_bias = (_flat(x) for x in (given["A_log"], given["dt_bias"]))
    gate = Gate.SOFTPLUS if lower_bound is None else Gate.LOWER_BOUND
    return kda_gate.node(g, A_log, dt_bias, gate=gate, lower_bound=lower_bound or 0.0)


def kda_state_map(k, v, g, beta, **options) -> Tensor:
    """What a run of tokens does to any state: S_after = M S_before + S_ext, as [N, HV, K, V + K], S_ext and M side by
    side.  Of two runs one after another the map is M2 M1 and M2 S_ext1 + S_ext2.

    Args: as of `kda`, whose options it takes too; there is no query and no initial state.
    """
    k, v = _tensor(k), _tensor(v)
    _, _, HV, V = v.shape
    N, K = _sequences_of(v, options), k.shape[-1]
    both = concat(v, broadcast_to(tensor(np.zeros(K)), shape=(*v.shape[:3], K)), axis=3)
    _, made = kda(k, k, both, g, beta, **options, initial_state=_beside_identity(N, HV, K, V), output_final_state=True)
    return made


def kda_state_map_back(q, k, g, beta, do, **options) -> Tensor:
    """What a run of tokens does to any gradient of the state after it: D_before = M^T D_after + D_ext, as
    [N, HV, K, V + K], D_ext and M^T side by side; `do` is the gradient of the run's result.

    Args: as of `kda`, whose options it takes too.
    """
    q, do = _tensor(q), _tensor(do)
    _, _, HV, V = do.shape
    N, K = _sequences_of(do, options), q.shape[-1]
    zeros = broadcast_to(tensor(np.zeros(V + K)), shape=(*do.shape[:3], V + K))  # the map is the same for any v
    D = _beside_identity(N, HV, K, V)
    tensors = _Tensors(
        "kda_state_map_back", q, k, zeros, g, beta, D, options.pop("A_log", None), options.pop("dt_bias", None),
        options.pop("cu_seqlens", None),
    )  # fmt: skip
    chunk_size = options.pop("chunk_size", CHUNKS[-1])
    form = tensors.form(*[options.pop(name, default) for name, default in _OPTIONS.items()])
    tensors.require(not options, f"unknown arguments: {', '.join(options)}")
    return kda_back(*tensors.src, concat(do, zeros[..., :K], axis=3), D, form=form, chunk_size=chunk_size,
                    wanted=[i == DH0 for i in range(8)])[DH0]  # fmt: skip


_OPTIONS = {
    "scale": None, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "lower_bound": None,
    "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False,
}  # fmt: skip


def _sequences_of(v: Tensor, options: dict) -> int:
    cu_seqlens = options.get("cu_seqlens")
    return v.shape[0] if cu_seqlens is None else _tensor(cu_seqlens).size - 1


def _beside_identity(N: int, HV: int, K: int, V: int) -> Tensor:
    """States whose first V columns are 0 and whose other K are the identity: what comes of them is a map."""
    return broadcast_to(tensor(np.concatenate([np.zeros((K, V)), np.eye(K)], axis=1)), shape=(N, HV, K, V + K))


class _Tensors:
    """The inputs of a call as tensors, and checks that speak of them."""

    NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens")

    def __init__(self, op_name: str, *given) -> None:
        self.op_name = op_name
        self.src = [_optional(x) for x in given]
        state = self.src[5]
        self.require(state is None or state.dtype is F32, "initial_state must be f32")

    def require(self, condition: bool, message: str) -> None:
        _require(self.op_name, dict(zip(self.NAMES, self.src, strict=True)), condition, message)

    def form(self, scale, l2norm, use_gate, lower_bound, sigmoid, allow_neg_eigval, state_v_first=False) -> Form:
        """How they are taken; inputs of a gate that is not used are dropped."""
        self.require(
            sigmoid or not allow_neg_eigval, "allow_neg_eigval doubles a sigmoid: it needs use_beta_sigmoid_in_kernel"
        )
        gate = Gate.GIVEN if not use_gate else Gate.SOFTPLUS if lower_bound is None else Gate.LOWER_BOUND
        if gate is Gate.GIVEN:
            self.src[6] = self.src[7] = None
        self.require(
            gate is not Gate.SOFTPLUS or self.src[6] is not None, "use_gate_in_kernel without lower_bound needs A_log"
        )
        self.src[6:8] = [_flat(x) for x in self.src[6:8]]
        K = max(1, *self.src[0].shape[-1:])  # type: ignore[union-attr]
        return Form(
            scale=K**-0.5 if scale is None else scale,
            l2norm=l2norm,
            gate=gate,
            lower_bound=lower_bound if gate is Gate.LOWER_BOUND else 0.0,
            beta_form=BetaForm.GIVEN if not sigmoid else BetaForm(1 + bool(allow_neg_eigval)),
            state_v_first=state_v_first,
        )


def _require(op_name: str, given: dict, condition: bool, message: str) -> None:
    if not condition:
        named = ", ".join(f"{name}={t.spec}" for name, t in given.items() if t is not None)
        raise ShapeError(f"{op_name}({named}): {message}")


def _tensor(x: Tensor | ArrayLike) -> Tensor:
    return x if isinstance(x, Tensor) else tensor(x)


def _optional(x: Tensor | ArrayLike | None) -> Tensor | None:
    return None if x is None else _tensor(x)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else reshape(x, (x.size,))


# -- in NumPy -----------------------------------------------------------------------------------------------


class _Prepared(NamedTuple):
    """The inputs with gates and norms applied, one q and k for every value head; and what gradients need of them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray  # [B, T, HV, 1 or V]
    h0: np.ndarray  # [N, HV, K, V]
    raw: dict
    form: Form
    sequences: list[tuple[int, int, int, int]]  # (number, batch, first token, end)

    def layout(self, state: np.ndarray) -> np.ndarray:
        """States as they are kept, or back."""
        return state.swapaxes(-1, -2) if self.form.state_v_first else state


def _prepared(name, q, k, v, g, beta, h0, A_log, dt_bias, cu, form) -> _Prepared:
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if cu is None:
        sequences = [(b, b, 0, T) for b in range(B)]
    else:
        _check_boundaries(name, cu, T)
        sequences = [(n, 0, int(cu[n]), int(cu[n + 1])) for n in range(len(cu) - 1)]
    raw = {"q": q, "k": k, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "h0": h0}
    group = HV // max(1, H)
    if form.l2norm:
        q, k = _unit(q)[0], _unit(k)[0]
    if form.gate != Gate.GIVEN:
        g = _gate(g, A_log, dt_bias, form.gate, form.lower_bound)
    if form.beta_form != BetaForm.GIVEN:
        beta = form.beta_form * _sigmoid(beta)
    state = np.zeros((len(sequences), HV, K, V), v.dtype)
    if h0 is not None:
        state = h0.swapaxes(-1, -2) if form.state_v_first else h0
    return _Prepared(
        q.repeat(group, axis=2), k.repeat(group, axis=2), v, g, beta if beta.ndim == 4 else beta[..., None], state,
        raw, form, sequences,
    )  # fmt: skip


def _check_boundaries(name: str, cu: np.ndarray, T: int) -> None:
    last = len(cu) - 1
    for i, at in enumerate(cu):
        _within(name, "cu_seqlens", at, T if i == last else cu[i - 1] if i else 0, T if i or i == last else 0)


def _check_slots(name: str, sequences, slots: np.ndarray, accepted: np.ndarray | None, states: int) -> None:
    """Everything that a run looks up in the pool."""
    owner: dict[int, int] = {}
    room = slots.shape[1]
    for n, _, begin, end in sequences:
        _within(name, "cu_seqlens", end, begin, begin + room)
        start = 1 if accepted is None else accepted[n]
        _within(name, "accepted", start, 1, room)
        for slot in (slots[n, start - 1], *slots[n, : end - begin]):
            _within(name, "slots", slot, 0, states - 1)
            if owner.setdefault(slot, n) != n:
                raise IndexRangeError(f"{name}: slots holds {slot} for two sequences, and each needs its own")


def _within(op_name: str, name: str, value, least, most) -> None:
    if not least <= value <= most:
        raise IndexRangeError(f"{op_name}: {name} holds {value}, and must be from {least} to {most}")


def _step(p: _Prepared, S, b: int, t: int):
    """The state after a token, what it wrote, and the result."""
    k = p.k[b, t][..., None]
    decayed = np.exp(p.g[b, t])[..., None] * S
    d = p.beta[b, t] * (p.v[b, t] - (decayed * k).sum(axis=1))
    S = decayed + k * d[:, None, :]
    return S, d, p.form.scale * (S * p.q[b, t][..., None]).sum(axis=1)


def _run_forward(p: _Prepared):
    """o, the final states, d of every token, and the states before every token."""
    o, d = np.zeros_like(p.v), np.zeros_like(p.v)
    B, T, HV, V = p.v.shape
    states = np.zeros((B, T, HV, p.k.shape[-1], V), p.v.dtype)
    ht = np.zeros(p.h0.shape, p.v.dtype)
    for n, b, begin, end in p.sequences:
        S = p.h0[n]
        for t in range(begin, end):
            states[b, t] = S
            S, d[b, t], o[b, t] = _step(p, S, b, t)
        ht[n] = S
    return o, ht, d, states


def _run_backward(p: _Prepared, do, dht):
    """The gradients by all inputs, by the recurrence in reverse; of inputs left out None."""
    form, raw = p.form, p.raw
    _, _, d, states = _run_forward(p)
    dq, dk, dv, dg = (np.zeros_like(x) for x in (p.q, p.k, p.v, p.g))
    dbeta, dh0 = np.zeros(p.beta.shape[:3], p.v.dtype), np.zeros_like(p.h0)
    for n, b, begin, end in p.sequences:
        D = np.zeros_like(p.h0[n]) if dht is None else p.layout(dht[n])
        for t in range(end - 1, begin - 1, -1):
            q, k, a = p.q[b, t][..., None], p.k[b, t][..., None], np.exp(p.g[b, t])[..., None]
            decayed = a * states[b, t]
            S = decayed + k * d[b, t][:, None, :]
            dout = do[b, t][:, None, :]
            dq[b, t] = form.scale * (S * dout).sum(axis=2)
            D = D + form.scale * q * dout
            dd = (D * k).sum(axis=1)
            dbeta[b, t] = (dd * (p.v[b, t] - (decayed * k).sum(axis=1))).sum(axis=1)
            dv[b, t] = p.beta[b, t] * dd
            dk[b, t] = (D * d[b, t][:, None, :] - decayed * dv[b, t][:, None, :]).sum(axis=2)
            D = D - k * dv[b, t][:, None, :]
            dg[b, t] = (D * decayed).sum(axis=2)
            D = a * D
        dh0[n] = D
    dq, dk = (_per_head(x, raw["q"].shape) for x in (dq, dk))
    if form.l2norm:
        dq, dk = _unit_back(dq, raw["q"]), _unit_back(dk, raw["k"])
    dA_log = ddt_bias = None
    if form.gate != Gate.GIVEN:
        dg, dA_log, ddt_bias = _gate_back(dg, raw["g"], raw["A_log"], raw["dt_bias"], form.gate, form.lower_bound)
    if form.beta_form != BetaForm.GIVEN:
        dbeta = dbeta * form.beta_form * _sigmoid(raw["beta"]) * _sigmoid(-raw["beta"])
    return dq, dk, dv, dg, dbeta, p.layout(dh0), dA_log, ddt_bias


def _kept(p: _Prepared, d, states, C: int, packed: bool):
    """The intermediate results of chunks; see the op."""
    B, T, HV, V = p.v.shape
    K = p.k.shape[-1]
    slots = _slots(B, T, len(p.sequences), C, packed)
    made = [np.zeros((slots, HV, *shape), p.v.dtype) for shape in ((K, V), (C, C), (C, C), (C, V))]
    chunks = [(b, t, min(t + C, end)) for _, b, begin, end in p.sequences for t in range(begin, end, C)]
    for slot, (b, begin, end) in enumerate(chunks):
        made[0][slot] = states[b, begin]
        made[3][slot, :, : end - begin] = d[b, begin:end].swapaxes(0, 1)
        for h in range(HV):
            own = [x[b, begin:end, h] for x in (p.q, p.k, p.v, p.g, p.beta)]
            tame = np.all([np.isfinite(own[i]).all(axis=1) for i in (0, 1, 2, 4)], axis=0)
            tame &= (own[3] <= LARGEST_SAFE_GATE).all(axis=1)
            n = len(tame) if tame.all() else int(np.argmin(tame))
            q, k, _, g, beta = (x[:n] for x in own)
            G = np.maximum(g, -1e4).cumsum(axis=0)
            lower = np.tri(n, dtype=bool)[..., None]
            E = np.exp(np.where(lower, G[:, None] - G[None], -np.inf))
            made[1][slot, h, :n, :n] = p.form.scale * np.einsum("ik,jk,ijk->ij", q, k, E)
            M = np.tril(beta * np.einsum("ik,jk,ijk->ij", k, k, E), -1)
            made[2][slot, h, :n, :n] = np.linalg.inv(np.eye(n) + M)
    return made


def _per_head(x, shape):
    """Sums over the value heads that share a q or k."""
    B, T, H, K = shape
    return x.reshape(B, T, H, -1, K).sum(axis=3) if x.size else np.zeros(shape, x.dtype)


def _unit(x):
    """x / sqrt(sum of squares + eps), and what it was multiplied with."""
    r = 1 / np.sqrt((x * x).sum(axis=-1, keepdims=True) + L2_EPS)
    return x * r, r


def _unit_back(dy, x):
    y, r = _unit(x)
    return (dy - (dy * y).sum(axis=-1, keepdims=True) * y) * r


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def _gate_inputs(g, A_log, dt_bias):
    """x and A, both of g's number of axes."""
    HV, K = g.shape[-2:]
    x = g if dt_bias is None else g + dt_bias.reshape(HV, K)
    return x, np.ones((HV, 1)) if A_log is None else np.exp(A_log)[:, None]


def _gate(g, A_log, dt_bias, gate, lower_bound):
    x, A = _gate_inputs(g, A_log, dt_bias)
    return -A * np.logaddexp(0, x) if gate == Gate.SOFTPLUS else lower_bound * _sigmoid(A * x)


def _gate_back(dg, g, A_log, dt_bias, gate, lower_bound):
    x, A = _gate_inputs(g, A_log, dt_bias)
    if gate == Gate.SOFTPLUS:
        dx = -A * _sigmoid(x) * dg
        by_A = dg * -A * np.logaddexp(0, x)
    else:
        slope = _sigmoid(A * x) * _sigmoid(-A * x)  # first: a saturated one is 0, whatever A is
        dx = dg * (lower_bound * slope * A)
        by_A = dx * x
    tokens = tuple(range(g.ndim - 2))
    dA_log = None if A_log is None else by_A.sum(axis=(*tokens, g.ndim - 1))
    return dx, dA_log, None if dt_bias is None else dx.sum(axis=tokens).reshape(-1)
