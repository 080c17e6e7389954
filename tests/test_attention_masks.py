"""Attention as people call it: masks of padding, boolean masks, one k and v for all batches, no axis of batches."""

import numpy as np
import pytest

import ggrad as gg

B, H, N, M, D = 3, 4, 9, 11, 8
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(s).astype(np.float32) for s in [(B, H, N, D), (B, H, M, D), (B, H, M, D)])
SEEN = np.arange(M) < np.array([11, 5, 1])[:, None]  # [B, M]: how long each sequence is
MASKS = {
    "padding": SEEN[:, None, None, :],
    "padding of each head": np.broadcast_to(SEEN[:, None, None, :], (B, H, 1, M)) & (np.arange(H) < 9)[:, None, None],
    "one row": SEEN[1][None],
    "whole": SEEN[:, None, None, :] & (RNG.uniform(size=(B, 1, N, M)) < 0.9) | (np.arange(M) == 0),
}


def by_hand(q, k, v, seen=None):
    scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) / np.sqrt(D)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.moveaxis(p / p.sum(-1, keepdims=True) @ v, -3, -2)


def value(t):
    gg.Graph().build_forward_expand(t).compute()
    return t.numpy()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["bools", "a leaf of bools", "a comparison", "f32", "f16"])
def test_masks(name, kind):
    seen = MASKS[name]
    mask = {
        "bools": lambda: seen,
        "a leaf of bools": lambda: gg.tensor(seen),
        "a comparison": lambda: gg.tensor(seen.astype(np.float32)) > 0.5,
        "f32": lambda: gg.tensor(np.where(seen, 0, -np.inf)),
        "f16": lambda: gg.tensor(np.where(seen, 0, -np.inf), dtype="f16"),
    }[kind]()
    np.testing.assert_allclose(value(gg.flash_attn_ext(Q, K, V, mask)), by_hand(Q, K, V, seen), rtol=2e-5, atol=2e-6)


def test_one_row_of_a_mask_is_no_copy_for_each_query():
    mask = gg.tensor(np.where(SEEN, 0, -np.inf)[:, None, None, :])
    out = gg.flash_attn_ext(*(gg.tensor(x) for x in (Q, K, V)), mask)
    graph = gg.Graph().build_forward_expand(out)
    assert not [t for t in graph.nodes if t.op.name in ("cont", "repeat")]
    assert all(t.is_view or t.op.name == "flash_attn_ext" for t in graph.nodes)


def test_a_leaf_of_bools_can_be_set():
    seen = gg.tensor(shape=(B, 1, 1, M), dtype="i32")
    out = gg.flash_attn_ext(Q, K, V, seen)
    graph = gg.Graph().build_forward_expand(out)
    for length in (1, 7):
        here = np.broadcast_to(np.arange(M) < length, (B, 1, 1, M))
        seen.set(here)
        graph.compute()
        np.testing.assert_allclose(out.numpy(), by_hand(Q, K, V, here), rtol=2e-5, atol=2e-6)


def test_one_k_and_v_for_all_batches_without_a_copy():
    q, k, v = gg.tensor(Q, param=True), gg.tensor(K[:1], param=True), gg.tensor(V[:1], param=True)
    out = gg.flash_attn_ext(q, k, v)
    graph = gg.Graph().build_forward_expand(out)
    assert not [t for t in graph.nodes if t.op.name in ("cont", "repeat")]
    graph.build_backward_expand(gg.sum(gg.sqr(out)))
    graph.compute()
    whole = [gg.tensor(x, param=True) for x in (Q, np.repeat(K[:1], B, 0), np.repeat(V[:1], B, 0))]
    expected = gg.flash_attn_ext(*whole)
    other = gg.Graph().build_forward_expand(expected).build_backward_expand(gg.sum(gg.sqr(expected)))
    other.compute()
    np.testing.assert_array_equal(out.numpy(), expected.numpy())
    for ours, theirs in zip((q, k, v), whole, strict=True):
        summed = other.grad(theirs).numpy().sum(0, keepdims=ours.shape[0] == 1)
        summed = summed if ours.shape[0] == 1 else other.grad(theirs).numpy()
        np.testing.assert_allclose(graph.grad(ours).numpy(), summed, rtol=1e-4, atol=1e-5)


def test_without_an_axis_of_batches():
    q, k, v = (gg.tensor(x[0], param=True) for x in (Q, K, V))
    out, lse = gg.flash_attn_ext(q, k, v, causal="bottom-right", return_lse=True)
    assert out.shape == (N, H, D) and lse.shape == (H, N)
    graph = gg.Graph().build_forward_expand(out, lse)
    assert not [t for t in graph.nodes if t.op.name == "cont"]
    graph.build_backward_expand(gg.sum(gg.sqr(out))).compute()
    whole = [gg.tensor(x[:1], param=True) for x in (Q, K, V)]
    expected = gg.flash_attn_ext(*whole, causal="bottom-right")
    other = gg.Graph().build_forward_expand(expected).build_backward_expand(gg.sum(gg.sqr(expected)))
    other.compute()
    np.testing.assert_array_equal(out.numpy(), expected.numpy()[0])
    for ours, theirs in zip((q, k, v), whole, strict=True):
        np.testing.assert_array_equal(graph.grad(ours).numpy(), other.grad(theirs).numpy()[0])


def test_the_gradient_of_a_mask_of_one_row_is_summed_over_queries():
    mask = gg.tensor(RNG.standard_normal((B, 1, 1, M)), param=True)
    wide = gg.tensor(np.repeat(mask.numpy(), N, 2), param=True)
    graphs = []
    for m in (mask, wide):
        out = gg.flash_attn_ext(Q, K, V, m)
        graphs.append(gg.Graph().build_forward_expand(out).build_backward_expand(gg.sum(gg.sqr(out))).compute())
    expected = graphs[1].grad(wide).numpy().sum(2, keepdims=True)
    np.testing.assert_allclose(graphs[0].grad(mask).numpy(), expected, rtol=1e-4, atol=1e-6)
