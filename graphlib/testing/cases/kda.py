"""Kimi Delta Attention: lengths round the edges of chunks and blocks, grouped values, packed sequences, all options."""

from dataclasses import replace

import numpy as np

import ggrad as gg
from ggrad.core.op import registry
from ggrad.ops.kda import BetaForm, Form, Gate

PLAIN = Form(scale=0.5, l2norm=False, gate=Gate.GIVEN, lower_bound=0.0, beta_form=BetaForm.GIVEN, state_v_first=False)


def inputs(m, B=1, T=5, H=2, K=4, *, HV=None, V=None, low=-1.5, high=0.0, param=True):
    """q, k, v, g, beta."""
    HV, V = H if HV is None else HV, K if V is None else V
    q, k = (m(B, T, H, K, low=-0.6, high=0.6, param=param) for _ in range(2))
    g = m(B, T, HV, K, low=low, high=high, param=param)
    return q, k, m(B, T, HV, V, param=param), g, m(B, T, HV, low=0.1, high=1.0, param=param)


def packed(*boundaries):
    """Not from the maker, whose layouts change values: these must stay boundaries."""
    return gg.tensor(np.array(boundaries, np.int32))


def full_layer(m, op, *, cu=None, N=1, T=37):
    q, k, v, g, beta = inputs(m, T=T, H=1, HV=2, K=6, V=5, low=-5.0, high=-1.0)  # little is forgotten
    A_log, bias, state = m(2, low=-0.5, high=0.5), m(12, low=-1.0, high=1.0), m(N, 2, 5, 6)
    return op(
        q, k, v, g, beta, initial_state=state, A_log=A_log, dt_bias=bias, cu_seqlens=cu,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        state_v_first=True, output_final_state=True,
    )  # fmt: skip


def bounded(m, op):
    q, k, v, g, beta = inputs(m, B=2, T=9, low=-3.0, high=3.0)
    A_log, bias = m(1, 2, 1, low=-0.5, high=0.5), m(2, 4)
    return op(
        q, k, v, g, beta, A_log=A_log, dt_bias=bias, use_gate_in_kernel=True, lower_bound=-3.0,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def with_states(m, op, N=1, cu=None, **sizes):
    q, k, v, g, beta = inputs(m, **sizes)
    state = m(N, v.shape[2], q.shape[3], v.shape[3])
    return op(q, k, v, g, beta, initial_state=state, cu_seqlens=cu, output_final_state=True)


def chunked(*args, **options):
    return gg.kda(*args, chunk_size=32, **options)


def kept(m, *, cu=None, N=1, T=37):
    """Everything that the forward pass leaves; it has no gradient, so there are no parameters."""
    q, k, v, g, beta = inputs(m, T=T, H=1, HV=2, K=5, V=7, param=False)
    state = m(N, 2, 5, 7, param=False)
    return registry["kda"].node(
        q, k, v, g, beta, state, None, None, cu, form=PLAIN, chunk_size=32, final_state=True, keep=2
    )


def only(*of, count=8):
    return [i in of for i in range(count)]


def back(m, *, cu=None, N=1, T=5, C=32, wanted=(), keep=False, ends=True, **sizes):
    """`kda_back` of every option, with or without what the forward pass has kept."""
    q, k, v, g, beta = inputs(m, T=T, **sizes)
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    form = replace(PLAIN, l2norm=True, gate=Gate.SOFTPLUS, beta_form=BetaForm.SIGMOID)
    src = (q, k, v, g, beta, m(N, HV, K, V), m(HV, low=-0.5, high=0.5), m(HV * K), cu)
    made = registry["kda"].node(*src, form=form, chunk_size=C, final_state=False, keep=2 * keep)
    do, dht = m(*v.shape), m(N, HV, K, V) if ends else None
    return registry["kda_back"](*src, do, dht, *made[1:], form=form, chunk_size=C, wanted=wanted)


FORWARD = {
    "a few tokens": lambda m: gg.kda(*inputs(m)),
    "three chunks, the last of one token": lambda m: with_states(m, chunked, T=65, H=1, HV=2, K=5, V=7),
    "batches, grouped values": lambda m: with_states(m, gg.kda, N=2, B=2, T=11, H=2, HV=4, K=3, V=2),
    "packed, one of them empty": lambda m: with_states(
        m, chunked, N=4, cu=packed(0, 3, 3, 36, 37), T=37, H=1, HV=2, K=4, V=3
    ),
    "every option": lambda m: full_layer(m, gg.kda),
    "every option, packed": lambda m: full_layer(m, gg.kda, cu=packed(0, 9, 37), N=2),
    "a gate with a lower bound": lambda m: bounded(m, gg.kda),
    "panels of channels": lambda m: with_states(m, gg.kda, T=19, H=1, K=40, V=72),
    "gates a little above 0": lambda m: with_states(m, gg.kda, T=20, low=-0.5, high=0.3),
    "gates above 0": lambda m: with_states(m, gg.kda, T=9, low=-1.0, high=1.0),
    "what is kept": kept,
    "what is kept, packed": lambda m: kept(m, cu=packed(0, 35, 37), N=2),
    "what is kept, with room for a chunk more": lambda m: kept(m, cu=packed(0, 0, 37), N=2),
    "one token": lambda m: with_states(m, gg.kda, T=1),
    "one channel": lambda m: gg.kda(*inputs(m, H=1, K=1)),
    "no tokens": lambda m: with_states(m, gg.kda, T=0),
    "no batches": lambda m: with_states(m, gg.kda, N=0, B=0),
    "no heads": lambda m: gg.kda(*inputs(m, H=0)),
    "no channels": lambda m: with_states(m, gg.kda, K=0, V=3),
    "no value channels": lambda m: with_states(m, gg.kda, V=0),
}

BACK = {
    "a few tokens": lambda m: back(m),
    "chunks, grouped values": lambda m: back(m, T=67, H=1, HV=2, K=5, V=3),
    "kept": lambda m: back(m, T=67, H=1, HV=2, K=5, V=3, keep=True),
    "packed, kept": lambda m: back(m, cu=packed(0, 3, 3, 36, 37), N=4, T=37, keep=True, ends=False),
    "of values alone": lambda m: back(m, wanted=only(2), ends=False),
    "of the initial state alone": lambda m: back(m, wanted=only(5), T=33),
    "of q and the bias": lambda m: back(m, wanted=only(0, 7)),
    "no tokens": lambda m: back(m, T=0),
}

RECURRENT = {
    "a few tokens": lambda m: gg.kda_recurrent(*inputs(m)),
    "with states": lambda m: with_states(m, gg.kda_recurrent, N=2, B=2, T=3, H=2, HV=4, K=5, V=7),
    "packed, one of them empty": lambda m: with_states(m, gg.kda_recurrent, N=3, cu=packed(0, 3, 3, 7), T=7, K=3, V=70),
    "every option": lambda m: full_layer(m, gg.kda_recurrent, T=5),
    "a gate with a lower bound": lambda m: bounded(m, gg.kda_recurrent),
    "a beta for every channel": lambda m: gg.kda_recurrent(
        *inputs(m, V=3, param=False)[:4], m(1, 5, 2, 3, param=False), use_beta_sigmoid_in_kernel=True
    ),
    "no tokens": lambda m: with_states(m, gg.kda_recurrent, T=0),
    "no channels": lambda m: with_states(m, gg.kda_recurrent, K=0, V=3),
}


def pool(m, slots, *, T=2, N=2, accepted=None, cu=None, **options):
    q, k, v, g, beta = inputs(m, B=N if cu is None else 1, T=T, V=3, param=False)
    states = m.leaf(7, 2, *((3, 4) if options else (4, 3)), param=False)
    of = lambda x: None if x is None else gg.tensor(np.array(x, np.int32))  # noqa: E731
    return registry["kda_recurrent_pool"](
        m.leaf(*v.shape, param=False), states, q, k, v, g, beta, of(slots), of(accepted), None, None, cu,
        form=replace(PLAIN, **options),
    )  # fmt: skip


POOL = {
    "decoding": lambda m: pool(m, [3, 5], T=1),
    "drafts": lambda m: pool(m, [[3, 6, 0], [5, 1, 2]], accepted=[3, 1], state_v_first=True),
    "the same place again": lambda m: pool(m, [[3, 3], [5, 5]]),
    "packed, one of them empty": lambda m: pool(m, [[3, 1], [0, 2], [5, 6]], N=3, T=3, cu=packed(0, 1, 1, 3)),
    "no tokens": lambda m: pool(m, [3, 5], T=0),
}

GATE = {
    "softplus": lambda m: gg.kda_gate(m(2, 5, 3, 7), m(3), m(21)),
    "softplus without bias": lambda m: gg.kda_gate(m(5, 3, 7), m(1, 3, 1)),
    "lower bound": lambda m: gg.kda_gate(m(2, 5, 3, 7), m(3), m(3, 7), lower_bound=-5.0),
    "lower bound alone": lambda m: gg.kda_gate(m(3, 20), lower_bound=-2.5),
    "large": lambda m: gg.kda_gate(m(2, 101, 3, 67), m(3), m(3 * 67)),
    "empty": lambda m: gg.kda_gate(m(0, 3, 7), m(3), m(21)),
    "no channels": lambda m: gg.kda_gate(m(2, 3, 0), m(3), m(0)),
}

GATE_BACK = {
    "softplus": lambda m: gg.kda_gate_back(m(5, 3, 7), m(5, 3, 7), m(3), m(21), gate=Gate.SOFTPLUS, lower_bound=0.0),
    "lower bound": lambda m: gg.kda_gate_back(
        m(5, 3, 7), m(5, 3, 7), m(3), None, gate=Gate.LOWER_BOUND, lower_bound=-5.0
    ),
    "large": lambda m: gg.kda_gate_back(
        m(2, 101, 3, 67), m(2, 101, 3, 67), m(3), m(201), gate=Gate.SOFTPLUS, lower_bound=0.0
    ),
    "empty": lambda m: gg.kda_gate_back(m(0, 3, 7), m(0, 3, 7), m(3), m(21), gate=Gate.SOFTPLUS, lower_bound=0.0),
}

CASES = {
    "kda": FORWARD,
    "kda_back": BACK,
    "kda_gate": GATE,
    "kda_gate_back": GATE_BACK,
    "kda_recurrent": RECURRENT,
    "kda_recurrent_pool": POOL,
}
NO_GRADIENT = {"kda_back", "kda_gate_back"}
