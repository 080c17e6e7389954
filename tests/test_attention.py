"""What attention promises beyond agreeing with its reference: exact zeros, nothing hidden leaks, the same bits."""

import numpy as np
import pytest

import ggrad as gg

pytestmark = pytest.mark.native
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


def attend(q, k, v, mask=None, d=None, *, threads=2, **options):
    """out, and where d is given dq, dk, dv."""
    out = gg.flash_attn_ext(q, k, v, mask, **options)
    results = [out]
    if d is not None:
        packed = gg.flash_attn_back(q, k, v, mask, d, **options)
        results += packed.parts
    gg.Graph().build_forward_expand(*map(gg.set_output, results)).compute(threads=threads)
    return [t.numpy() for t in results]


def test_with_one_visible_key_dq_and_dk_are_exactly_zero_and_dv_is_d():
    q, k, v, d = normal(2, 3, 1, 40), normal(2, 3, 1, 40), normal(2, 3, 1, 70), normal(2, 1, 3, 70)
    out, dq, dk, dv = attend(q, k, v, d=d)
    assert (out.swapaxes(1, 2) == v).all()
    assert not dq.any() and not dk.any()
    assert (dv == d.swapaxes(1, 2)).all()


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 2.0}, {"causal": "bottom-right"}])
def test_garbage_in_masked_keys_changes_no_bit(options):
    q, k, v, d = normal(1, 4, 50, 24), normal(1, 2, 70, 24), normal(1, 2, 70, 33), normal(1, 50, 4, 33)
    hidden = rng.random(70) < 0.3
    mask = np.where(rng.random((50, 70)) < 0.2, -np.inf, 0).astype(np.float32)
    mask[:, hidden] = -np.inf
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, hidden, ::3], dirty_v[:, :, hidden, 1::2] = np.nan, -np.inf
    clean = attend(q, k, v, mask, d, **options)
    dirty = attend(q, dirty_k, dirty_v, mask, d, **options)
    for a, b in zip(clean, dirty, strict=True):
        assert a.tobytes() == b.tobytes()


def test_garbage_in_a_row_that_sees_no_key_reaches_nothing():
    q, k, v, d = normal(1, 2, 9, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), normal(1, 9, 2, 8)
    clean = attend(q, k, v, d=d, causal="bottom-right")  # the first four of the nine queries see nothing
    q[:, :, :4], d[:, :4] = np.nan, np.inf
    for a, b in zip(clean, attend(q, k, v, d=d, causal="bottom-right"), strict=True):
        assert a.tobytes() == b.tobytes()
    assert not clean[0][:, :4].any() and not clean[1][:, :, :4].any()


@pytest.mark.parametrize("N", [64, 330])
def test_a_kv_head_gives_the_same_bits_alone_and_among_others(N):
    q, k, v, d = normal(5, 8, N, 16), normal(5, 4, N, 16), normal(5, 4, N, 16), normal(5, N, 8, 16)
    together = attend(q, k, v, d=d, causal=True, threads=3)
    alone = attend(q[3:4, 2:4], k[3:4, 1:2], v[3:4, 1:2], d=d[3:4, :, 2:4], causal=True, threads=1)
    assert (together[0][3:4, :, 2:4] == alone[0]).all()
    for a, b, heads in zip(together[1:], alone[1:], (slice(2, 4), slice(1, 2), slice(1, 2)), strict=True):
        assert (a[3:4, heads] == b).all()


def test_scores_of_1e30_are_finite():
    q, k, v, d = normal(1, 1, 20, 8) * 1e15, normal(1, 1, 20, 8) * 1e15, normal(1, 1, 20, 8), normal(1, 20, 1, 8)
    out, dq, dk, dv = attend(q, k, v, d=d)
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    best = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3)).argmax(-1)[0, 0]
    np.testing.assert_array_equal(out[0, :, 0], v[0, 0, best])


def test_no_result_holds_a_score_for_every_pair():
    N = 2048
    q, k, v = (gg.tensor(normal(1, 2, N, 16), param=True) for _ in range(3))
    graph = gg.Graph().build_forward_expand(gg.sum(gg.flash_attn_ext(q, k, v, causal=True)))
    graph.build_backward_expand()
    assert graph.plan().total(threads=2) < N * N * 4


def test_flash_attn_back_is_one_tensor_of_three_parts():
    q, k, v, d = normal(1, 2, 3, 5), normal(1, 1, 3, 5), normal(1, 1, 3, 7), normal(1, 3, 2, 7)
    packed = gg.flash_attn_back(q, k, v, None, d)
    assert packed.ndim == 1
    assert [p.shape for p in packed.parts] == [q.shape, k.shape, v.shape]
    assert packed.offsets == (0, 128, 192)


def test_out_and_lse_of_the_forward_are_taken_over():
    q, k, v, d = (gg.tensor(normal(1, 3, 3, 3)) for _ in range(4))
    out, lse = gg.flash_attn_ext(q, k, v, return_lse=True)
    packed = gg.flash_attn_back(q, k, v, None, d, out=out, lse=lse)
    assert out in packed.src and lse in packed.src


def test_causal_true_means_bottom_right():
    for causal in (True, "bottom-right", gg.Causal.BOTTOM_RIGHT):
        t = gg.flash_attn_ext(*(normal(1, 1, 2, 4) for _ in range(3)), causal=causal)
        assert t.src[0].attrs["causal"] is gg.Causal.BOTTOM_RIGHT


def gradient_of(**options):
    q, k, v = (gg.tensor(normal(1, 2, 3, 4), param=True) for _ in range(3))
    mask = options.pop("mask", None)
    loss = gg.sum(gg.flash_attn_ext(q, k, v, mask, **options))
    gg.Graph().build_forward_expand(loss).build_backward_expand()


def test_combinations_without_gradient_are_refused_when_the_graph_is_built():
    with pytest.raises(gg.errors.GradientError, match=r"flash_attn_ext .*max_bias=8.0 \(ALiBi\): leave"):
        gradient_of(mask=np.zeros((3, 3), np.float32), max_bias=8.0)
    with pytest.raises(gg.errors.GradientError, match="flash_attn_ext gives its mask no gradient: make"):
        gradient_of(mask=gg.tensor(np.zeros((3, 3)), param=True))
    with pytest.raises(gg.errors.GradientError, match=r"flash_attn_back .*max_bias=2.0"):
        gg.flash_attn_back(*(normal(1, 1, 2, 2) for _ in range(3)), normal(2, 2), normal(1, 2, 1, 2), max_bias=2.0)
