"""Gradient checkpointing: the same gradients to the last bit, from fewer bytes."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import registry

WIDTH, TOKENS = 48, 64


def blocks(layers=4, seed=0):
    """Residual blocks with views, a packed result, dropout and a value that all blocks read: the loss, the
    blocks' outputs and the parameters."""
    rng = np.random.default_rng(seed)
    params, outputs = [], []

    def weight(*shape):
        params.append(gg.tensor(rng.normal(size=shape) / np.sqrt(shape[-1]), param=True))
        return params[-1]

    x = gg.tensor(rng.normal(size=(1, TOKENS, WIDTH)))
    shared = gg.sigmoid(weight(WIDTH))  # of no block: every block reads it
    for _ in range(layers):
        qkv = gg.mul_mat(weight(3 * WIDTH, WIDTH), gg.rms_norm(x, weight(WIDTH)))
        q, k, v = (
            qkv[..., j * WIDTH : (j + 1) * WIDTH].reshape(1, TOKENS, 3, WIDTH // 3).permute(0, 2, 1, 3)
            for j in range(3)
        )
        seen = gg.flash_attn_ext(q, k, v, causal="top-left").reshape(1, TOKENS, WIDTH)
        x = x + gg.dropout(gg.mul_mat(weight(WIDTH, WIDTH), seen), 7, p=0.1, key=len(outputs)) * shared
        x = x + gg.mul_mat(weight(WIDTH, 2 * WIDTH), gg.silu(gg.mul_mat(weight(2 * WIDTH, WIDTH), x)))
        outputs.append(x)
    return gg.sum(x * x), outputs, params


def gradients(checkpoints, **options):
    loss, outputs, params = blocks(**options)
    graph = gg.Graph().build_forward_expand(loss)
    graph.build_backward_expand(gradient_checkpoints=[outputs[i] for i in checkpoints])
    graph.compute()
    return [graph.grad(p).numpy().tobytes() for p in params], graph


@pytest.mark.parametrize("checkpoints", [[0], [3], [0, 1, 2, 3], [2, 0], [1, 1]], ids=str)
def test_gradients_are_the_same_bits(checkpoints):
    plain, whole = gradients([])
    again, graph = gradients(checkpoints)
    assert again == plain
    assert len(graph.nodes) > len(whole.nodes)


def test_the_reference_backend_agrees():
    plain, _ = gradients([0, 2])
    loss, outputs, params = blocks()
    graph = gg.Graph().build_forward_expand(loss)
    graph.build_backward_expand(gradient_checkpoints=outputs)
    graph.compute(backend="reference")
    for p, bits in zip(params, plain, strict=True):
        np.testing.assert_allclose(
            graph.grad(p).numpy().ravel(), np.frombuffer(bits, np.float32), rtol=1e-3, atol=1e-4
        )  # a sum of single precision beside one of double


def test_memory_falls_with_a_checkpoint_at_every_block():
    """Kept: an output a block, and the insides of one block at a time."""
    _, whole = gradients([], layers=12)
    _, graph = gradients(range(12), layers=12)
    assert graph.plan().activations < 0.35 * whole.plan().activations


def test_nothing_after_the_last_checkpoint_is_computed_twice():
    loss, outputs, _ = blocks(layers=2)
    graph = gg.Graph().build_forward_expand(loss)
    forward = len([t for t in graph.nodes if t.op.name == "silu"])
    graph.build_backward_expand(gradient_checkpoints=[outputs[0]])
    assert len([t for t in graph.nodes if t.op.name == "silu"]) == forward + 1


def test_what_the_gradients_do_not_need_is_not_computed_again():
    loss, outputs, _ = blocks(layers=2)
    graph = gg.Graph().build_forward_expand(loss)
    graph.build_backward_expand(gradient_checkpoints=outputs)
    forward, all_of_them = (
        [t for t in nodes if t.op.name == "mul_mat"] for nodes in (graph.nodes[: graph.nodes.index(loss)], graph.nodes)
    )
    backward = 2 * len(forward)
    last_of_each_block = 2  # its result goes into a sum, whose gradient reads nothing
    assert len(all_of_them) == 2 * len(forward) + backward - last_of_each_block


def test_a_checkpoint_that_is_not_on_the_way_is_refused():
    loss, _, _ = blocks(layers=1)
    stranger = gg.sqr(gg.tensor(np.ones(3)))
    graph = gg.Graph().build_forward_expand(loss)
    nodes = len(graph.nodes)
    with pytest.raises(gg.errors.GradientError, match="cannot be a checkpoint"):
        graph.build_backward_expand(gradient_checkpoints=[stranger])
    assert len(graph.nodes) == nodes and graph.loss is None


def test_an_update_on_the_way_happens_once():
    total = gg.tensor(np.zeros(3), role="accumulator")
    w = gg.tensor(np.ones(3), param=True)
    seen = registry["accumulate"](total, gg.tensor(np.array([1.0, 4.0, 9.0])))
    cut = gg.exp(seen * 0.01) * w
    graph = gg.Graph().build_forward_expand(gg.sum(gg.sin(cut)))
    graph.build_backward_expand(gradient_checkpoints=[cut])
    graph.compute()
    assert total.numpy().tolist() == [1, 4, 9]
