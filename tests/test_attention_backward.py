"""What a backward pass of ggml's attention must show: its numbers, its way through a graph, its packing."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.testing import attention_reference

pytestmark = pytest.mark.native
B, H, HK, N, M, DK, DV = 2, 4, 2, 2, 4, 3, 5  # all sizes differ where they can


def uniform(rng, *shape):
    return rng.uniform(-1, 1, shape).astype(np.float32)


def inputs(seed, B=1, H=1, HK=1, N=3, M=5, DK=4, DV=4):
    """q, k, v and the gradient d of the result."""
    rng = np.random.default_rng(seed)
    return (
        uniform(rng, B, H, N, DK),
        uniform(rng, B, HK, M, DK),
        uniform(rng, B, HK, M, DV),
        uniform(rng, B, N, H, DV),
    )


def packed_gradients(q, k, v, d, mask=None, *, threads=2):
    """The one buffer of flash_attn_back, computed in memory that held NaN; and the places of its parts, in floats."""
    packed = gg.set_output(gg.flash_attn_back(q, k, v, mask, d))
    graph = gg.Graph().build_forward_expand(packed)
    graph.prepared("native").poison(threads)
    graph.compute(threads=threads)
    return packed.numpy(), [offset // 4 for offset in packed.offsets]


def gradients(q, k, v, d, mask=None):
    """dq, dk and dv, cut out of the buffer by hand."""
    flat, begins = packed_gradients(q, k, v, d, mask)
    return [flat[at : at + x.size].reshape(x.shape) for x, at in zip((q, k, v), begins, strict=True)]


def difference_quotients(q, k, v, d, mask=None, step=1e-5):
    """Of sum(d * out) by every element of q, k and v in turn, in double precision."""
    moved = [x.astype(np.float64) for x in (q, k, v)]
    for x in moved:
        quotient = np.empty_like(x)
        for at in np.ndindex(x.shape):
            here = x[at]
            high, low = ((d * attention_reference(*moved, mask=mask).out).sum() for x[at] in (here + step, here - step))
            x[at] = here
            quotient[at] = (high - low) / (2 * step)
        yield quotient


def require_difference_quotients(*arguments):
    for got, quotient in zip(gradients(*arguments), difference_quotients(*arguments), strict=True):
        np.testing.assert_allclose(got, quotient, rtol=0, atol=2e-6)  # the gradients are f32, of size one


def test_gradients_of_a_single_head_are_difference_quotients():
    require_difference_quotients(*inputs(11))


def test_gradients_under_a_mask_are_difference_quotients_and_a_key_nobody_sees_gets_none():
    q, k, v, d = inputs(12, N=3, M=4)
    mask = np.where(np.tri(3, 4, dtype=bool), 0, -np.inf).astype(np.float16)  # key 3 lies after the last query
    require_difference_quotients(q, k, v, d, mask)
    _, dk, dv = gradients(q, k, v, d, mask)
    assert np.isfinite(dk).all() and not dk[:, :, 3].any() and not dv[:, :, 3].any()
    assert dk[:, :, :3].all() and dv[:, :, :3].all()


def test_gradients_of_grouped_heads_in_batches_are_difference_quotients():
    require_difference_quotients(*inputs(13, B=2, H=4, HK=2, N=2, M=3))


def test_a_node_of_attention_is_differentiated_in_a_graph():
    q, k, v, _ = inputs(14, N=3, M=4)
    q, k, v = gg.tensor(q), gg.tensor(k), gg.tensor(v)
    gg.set_param(q)
    gg.set_param(v)
    loss = gg.set_loss(gg.sum(gg.flash_attn_ext(q, k, v)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    graph.compute()
    dq, dv = graph.grad(q).numpy(), graph.grad(v).numpy()
    assert graph.grad(k) is None  # not a parameter
    assert np.isfinite(dq).all() and dq.any()
    # The loss is the sum of weights times values, and the weights of each of the three queries sum to one.
    assert (dv > 0).all()
    np.testing.assert_allclose(dv.sum(axis=2), 3, rtol=1e-6)


def test_alibi_runs_forward_and_is_refused_when_gradients_are_built():
    q, k, v, _ = inputs(15, N=2, M=2)
    q = gg.tensor(q, name="q", param=True)
    mask = np.zeros((2, 2), np.float16)
    out = gg.flash_attn_ext(q, k, v, mask, max_bias=8.0)
    loss = gg.set_loss(gg.sum(out))
    graph = gg.Graph().build_forward_expand(loss)
    graph.compute()
    assert np.isfinite(loss.item())
    with pytest.raises(gg.errors.GradientError, match="max_bias"):
        graph.build_backward_expand()


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        ({"B": B, "H": H, "HK": HK, "N": N, "M": M, "DK": DK, "DV": DV}, False),
        ({"B": 1, "H": 3, "HK": 1, "N": 3, "M": 5, "DK": 3, "DV": 5}, True),
        ({"B": 3, "H": 1, "HK": 1, "N": 1, "M": 7, "DK": 1, "DV": 3}, True),
    ],
)
def test_packed_gradients_lie_apart_within_the_buffer_and_between_them_is_zero(sizes, padding):
    *sources, d = inputs(31, **sizes)
    flat, begins = packed_gradients(*sources, d)
    begins.append(flat.size)
    assert begins[0] == 0 and not flat.size % 4
    gaps = 0
    for x, begin, end in zip(sources, begins[:-1], begins[1:], strict=True):
        assert not begin % 4 and begin + x.size <= end  # 16 bytes
        assert flat[begin : begin + x.size].any() or sizes["M"] == 1
        gap = flat[begin + x.size : end]
        assert gap.size < 4 and not gap.view(np.int32).any()  # +0.0, not the NaN that was there
        gaps += gap.size
    assert (gaps > 0) == padding


@pytest.mark.parametrize("sizes", [(B, H, HK, N, M, DK, DV), (1, 3, 1, 3, 5, 3, 5)])
def test_each_gradient_of_a_graph_is_its_own_part_of_the_buffer(sizes):
    *arrays, d = inputs(32, *sizes)
    leaves = [gg.tensor(x, param=True) for x in arrays]
    loss = gg.set_loss(gg.sum(gg.flash_attn_ext(*leaves)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    graph.compute()
    by_hand = gradients(*arrays, np.ones_like(d))  # the gradient of a sum
    for leaf, expected in zip(leaves, by_hand, strict=True):
        got = graph.grad(leaf).numpy()
        assert got.shape == leaf.shape
        np.testing.assert_array_equal(got, expected)
