"""The recurrences made of `delta_scan`: gradients by every input, and the state as an input of the next piece."""

import numpy as np
import pytest

import ggrad as gg

RNG = np.random.default_rng(0)
TOKENS, H, S, N = 6, 2, 3, 2


def x(*shape, low=-1.0, high=1.0):
    return RNG.uniform(low, high, shape)


def vectors(count):
    return [x(TOKENS, H, S) for _ in range(count)]


def decay(*shape):
    return x(*shape, low=0.3, high=0.9)


FORMS = {
    "rwkv_wkv6": (gg.rwkv_wkv6, [*vectors(3), x(H, S), decay(TOKENS, H, S), x(N, H * S * S)]),
    "rwkv_wkv6, a token each": (
        gg.rwkv_wkv6, [x(N, H, S), x(N, H, S), x(N, H, S), x(H, S), x(N, H, S), x(N, H * S * S)],
    ),
    "rwkv_wkv7": (gg.rwkv_wkv7, [*vectors(1), decay(TOKENS, H, S), *vectors(4), x(N, H * S * S)]),
    "gated_linear_attn": (gg.gated_linear_attn, [*vectors(3), decay(TOKENS, H, S), x(N, H, S, S)]),
    "gated_delta_net": (
        lambda *args: gg.gated_delta_net(*args, snapshots=2),
        [x(1, 3, 1, S), x(1, 3, 1, S), x(1, 3, H, S), x(1, 3, H, 1), x(1, 3, H, 1, low=0.1), x(1, H, S, S)],
    ),
    "gated_delta_net, decay of channels": (
        gg.gated_delta_net, [x(1, 3, H, S), x(1, 3, H, S), x(1, 3, H, S), x(1, 3, H, S), x(1, 3, H, 1), x(1, H, S, S)],
    ),
    "Mamba 1": (
        lambda *args: gg.ssm_scan(*args, gg.tensor([1, 1])),
        [x(3, H, 1, S), x(2, 3, H, 1), x(2, 3, H), x(H, S), x(2, 3, 1, S), x(2, 3, 1, S)],
    ),
    "Mamba 2": (
        lambda *args: gg.ssm_scan(*args, snapshots=2),
        [x(2, 4, 2, S), x(2, 3, 4, 2), x(2, 3, 4), x(4, 1), x(2, 3, 2, S), x(2, 3, 2, S)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_gradients_by_every_input_are_derivatives(name):
    form, inputs = FORMS[name]
    gg.testing.check_gradients(form, *inputs)


@pytest.mark.native
@pytest.mark.parametrize("name", FORMS)
def test_kernels_agree_with_references(name):
    form, inputs = FORMS[name]
    gg.testing.check_kernel(form, *inputs, backward=True)


@pytest.mark.parametrize("name", ["rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn"])
def test_a_sequence_in_pieces_is_the_sequence(name):
    """The state after the first piece is the state before the second."""
    form, (*tokens, state) = FORMS[name]
    tokens = [gg.tensor(t) for t in tokens]
    whole, last = form(*tokens, gg.tensor(state[:1]))
    first, between = form(*(t[:2] if len(t) == TOKENS else t for t in tokens), gg.tensor(state[:1]))
    second, end = form(*(t[2:] if len(t) == TOKENS else t for t in tokens), between)
    graph = gg.Graph().build_forward_expand(whole, last, first, second, end).compute(backend="reference")
    np.testing.assert_allclose(np.concatenate([first.numpy(), second.numpy()]), whole.numpy(), rtol=1e-12)
    np.testing.assert_allclose(end.numpy(), last.numpy(), rtol=1e-12)
    assert graph.loss is None
