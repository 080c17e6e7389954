"""The dq kernel of a GPU's flash attention, row by row: what it makes of a given out and lse, and flash_attn_back too.

For query i, with D = sum(d * out) over the row:

    dq = scale * sum over keys j of exp(scale * q.k_j - lse) * (d.v_j - D) * k_j

Causality there counts from the top left, key j <= query i, also where there are more keys or more queries; blocks
of 16 queries and 16 keys have ragged tails.  The kernel trusts the lse that it is given.
"""

import numpy as np
import pytest

import ggrad as gg

pytestmark = pytest.mark.native
LENGTHS = [(16, 16), (17, 33), (33, 17), (50, 15), (1, 40), (40, 1), (31, 64)]


def inputs(B, H, N, M, D, seed=0):
    """q, k, v, d in the ops' layouts."""
    rng = np.random.default_rng(seed)
    shapes = (B, H, N, D), (B, H, M, D), (B, H, M, D), (B, N, H, D)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def forward(q, k, v, causal):
    out, lse = gg.flash_attn_ext(q, k, v, causal=causal, return_lse=True)
    gg.Graph().build_forward_expand(gg.set_output(out), gg.set_output(lse)).compute()
    return out.numpy(), lse.numpy()


def backward(q, k, v, d, out, lse, causal):
    packed = gg.flash_attn_back(q, k, v, None, d, out=gg.tensor(out), lse=gg.tensor(lse), causal=causal)
    gg.Graph().build_forward_expand(*map(gg.set_output, packed.parts)).compute()
    return [part.numpy() for part in packed.parts]


def row_by_row(q, k, v, d, out, lse, causal):
    """dq, dk and dv in double precision, one pair of query and key at a time."""
    q, k, v, d, out, lse = (x.astype(np.float64) for x in (q, k, v, d, out, lse))
    B, H, N, D = q.shape
    scale = D**-0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, i in np.ndindex(B, H, N):
        delta = d[b, i, h] @ out[b, i, h]
        for j in range(k.shape[2]):
            if causal and j > i:
                continue
            p = np.exp(scale * (q[b, h, i] @ k[b, h, j]) - lse[b, h, i])
            ds = p * (d[b, i, h] @ v[b, h, j] - delta)
            dq[b, h, i] += scale * ds * k[b, h, j]
            dk[b, h, j] += scale * ds * q[b, h, i]
            dv[b, h, j] += p * d[b, i, h]
    return dq, dk, dv


def require_close(got, expected):
    for name, a, b in zip(("dq", "dk", "dv"), got, expected, strict=True):
        error = np.linalg.norm(a - b) / (np.linalg.norm(b) or np.sqrt(b.size))
        assert error < 2e-6, f"{name}: {error:.1e}"  # what f32 results may be off


@pytest.mark.parametrize("causal", [None, "top-left"])
@pytest.mark.parametrize(("N", "M"), LENGTHS)
def test_gradients_are_those_of_the_rows(N, M, causal):
    q, k, v, d = inputs(2, 2, N, M, 64)
    out, lse = forward(q, k, v, causal)
    require_close(backward(q, k, v, d, out, lse, causal), row_by_row(q, k, v, d, out, lse, causal))


@pytest.mark.parametrize("D", [1, 13, 40, 128])
def test_heads_need_not_be_of_64(D):
    q, k, v, d = inputs(1, 2, 19, 23, D)
    out, lse = forward(q, k, v, "top-left")
    require_close(backward(q, k, v, d, out, lse, "top-left"), row_by_row(q, k, v, d, out, lse, "top-left"))


def test_the_lse_and_out_that_are_given_count_whatever_they_are():
    q, k, v, d = inputs(1, 2, 37, 21, 16)
    rng = np.random.default_rng(1)
    out = rng.standard_normal((1, 37, 2, 16), dtype=np.float32)
    lse = rng.uniform(1, 5, (1, 2, 37)).astype(np.float32)  # weights that do not sum to one
    require_close(backward(q, k, v, d, out, lse, "top-left"), row_by_row(q, k, v, d, out, lse, "top-left"))


def test_a_key_after_the_last_query_gets_no_gradient_and_gives_none():
    q, k, v, d = inputs(1, 2, 17, 33, 16)
    out, lse = forward(q, k, v, "top-left")
    clean = backward(q, k, v, d, out, lse, "top-left")
    assert not clean[1][:, :, 17:].any() and not clean[2][:, :, 17:].any()
    k[:, :, 17:], v[:, :, 17:] = np.nan, np.inf
    for a, b in zip(clean, backward(q, k, v, d, out, lse, "top-left"), strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_first_query_sees_only_the_first_key():
    q, k, v, d = inputs(1, 1, 20, 20, 64)
    out, lse = forward(q, k, v, "top-left")
    assert (out[0, 0, 0] == v[0, 0, 0]).all()
    dq, _, _ = backward(q, k, v, d, out, lse, "top-left")
    # One weight of 1: dq is the rounding of lse and of two sums of 64 products, times scale and a row of k.
    assert np.abs(dq[0, 0, 0]).max() < 1e-5 < np.abs(dq[0, 0, 1]).max()
