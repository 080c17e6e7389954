"""Every op that adds up does so with an error that hardly grows with the number of terms.

Each op has a long run of terms here, one number again and again: the roundings of a single f32 sum then all point the
same way, and after 1e5 terms it is off by 1e4 ulp.  Blocked, pairwise and compensated sums stay below the bound.
Numbers differ from one result to the next.
"""

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import registry
from ggrad.run.reference import evaluate, leaf_value

ULPS = 64  # of a result, in which a rounding is at most half a one


def again(*shape, axis=0, seed=0, low=1.0, high=2.0):
    """The same numbers all along some axes."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    own = tuple(1 if i in axes else n for i, n in enumerate(shape))
    values = np.random.default_rng(seed).uniform(low, high, own)
    return gg.tensor(np.broadcast_to(values, shape).astype(np.float32))


def beside(*shape, axis=-1, times=3):
    """The same, but every other one along the axis so many times as large: their mean leaves something of them."""
    values = np.moveaxis(leaf_value(again(*shape, axis=axis)).copy(), axis, 0)
    values[1::2] *= times
    return gg.tensor(np.ascontiguousarray(np.moveaxis(values, 0, axis), np.float32))


def zeros(*shape):
    return gg.tensor(np.zeros(shape, np.int32))


def gradients(build, *leaves, wanted):
    """Gradients of the sum of a result, by some of the leaves."""
    params = [gg.tensor(t.memory(), param=i in wanted, dtype=t.dtype) for i, t in enumerate(leaves)]
    graph = gg.Graph().build_backward_expand(gg.sum(build(*params)))
    return tuple(graph.grad(params[i]) for i in wanted)


def peak(*shape):
    """A one in the middle of each row of zeros."""
    values = np.zeros(shape, np.float32)
    values[..., shape[-1] // 2] = 1
    return gg.tensor(values)


def head(K):
    """q, k, v, g, beta of two tokens."""
    keys = [again(1, 2, 1, K, axis=(1, 3), seed=i, low=0.02, high=0.04) for i in range(2)]
    return *keys, again(1, 2, 1, 4, axis=()), peak(1, 2, 1, K), again(1, 2, 1, axis=(1,), low=0.5, high=1.0)


def quantized(*shape):
    t = gg.tensor(shape=shape, dtype=gg.Q8_0)
    t.memory()[...] = gg.quantize(again(*shape, axis=tuple(range(len(shape)))).memory(), gg.Q8_0)
    return t


# Terms of a sum; of one that a product or attention makes of tiles of some hundred terms; of one as long as a window or
# a head, which nobody makes longer.
N, TILED, WINDOW = 200_000, 100_000, 512

CASES = {
    "sum": lambda: gg.sum(again(N)),
    "sum_rows": lambda: gg.sum_rows(again(5, N, axis=1)),
    "mean": lambda: gg.mean(again(5, N, axis=1)),
    "repeat_back, of rows": lambda: gg.sum(again(N, 19), axis=0),
    "repeat_back, of both ends": lambda: gg.sum(again(400, 5, 500, axis=(0, 2)), axis=(0, 2)),
    "cumsum": lambda: (gg.cumsum(again(5, N, axis=1)), gg.cumsum(again(N, 19), axis=0)),
    "norm": lambda: gg.norm(beside(3, N)),
    "norm_back, of a row": lambda: gg.norm_back(beside(3, N), again(3, N, axis=0)),
    "norm_back, of rows": lambda: gg.norm_back(again(N, 19), again(N, 19, seed=1), again(19, axis=()))[1:],
    "rms_norm": lambda: gg.rms_norm(again(3, N, axis=1)),
    "rms_norm_back, of a row": lambda: gg.rms_norm_back(beside(3, N), again(3, N, axis=1)),
    "rms_norm_back, of rows": lambda: gg.rms_norm_back(again(N, 19), again(N, 19, seed=1), again(19, axis=()))[1:],
    "l2_norm": lambda: gg.l2_norm(again(3, N, axis=1)),
    "l2_norm_back": lambda: gg.l2_norm_back(beside(3, N), again(3, N, axis=1)),
    "soft_max": lambda: gg.soft_max(again(3, N, axis=1)),
    "soft_max_back": lambda: gg.soft_max_back(beside(3, N), again(3, N, axis=1)),
    "soft_max_sinks_back": lambda: gg.soft_max_sinks_back(
        again(3, 2, N, axis=2), again(3, 2, N, axis=2), again(3, 2, N, axis=2), again(3, axis=())
    ),
    "cross_entropy_class, of rows": lambda: gg.cross_entropy_class(again(N, 3), zeros(N), reduction="sum"),
    "cross_entropy_class, of classes": lambda: gg.cross_entropy_class(again(1, N, axis=1), zeros(1)),
    "cross_entropy_soft, of rows": lambda: gg.cross_entropy_soft(again(N, 3), again(N, 3, seed=1), reduction="sum"),
    "cross_entropy_soft, of classes": lambda: gg.cross_entropy_soft(again(1, N, axis=1), again(1, N, axis=1)),
    "global_norm": lambda: gg.global_norm(again(N), again(19, N, axis=1)),
    "count_equal": lambda: gg.count_equal(zeros(N), zeros(N)),
    "get_rows_back, few rows": lambda: gg.get_rows_back(again(N, 19), zeros(N), rows=2),
    "get_rows_back, many rows": lambda: gg.get_rows_back(again(N, 19), zeros(N), rows=500),
    "get_rows_back, a batch": lambda: gg.get_rows_back(again(2, N, 19, axis=1), zeros(2, N), rows=3, batched=True),
    "pool_2d": lambda: gg.pool_2d(again(5, 400, 500, axis=(1, 2)), mode="avg", kernel=(400, 500), stride=(1, 1)),
    "pool_2d_back, averages": lambda: gg.pool_2d_back(
        again(3, 1, WINDOW, axis=2), mode="avg", kernel=(1, WINDOW), stride=(1, 1), size=(1, 2 * WINDOW - 1)
    ),
    "pool_2d_back, maxima": lambda: gg.pool_2d_back(
        again(3, 1, WINDOW, axis=2), peak(3, 1, 2 * WINDOW - 1),
        mode="max", kernel=(1, WINDOW), stride=(1, 1), size=(1, 2 * WINDOW - 1),
    ),
    "interpolate": lambda: gg.interpolate(
        again(3, 1, 2000, axis=2), size=(1, 2), mode="bilinear", antialias=True
    ),
    "interpolate_back": lambda: gg.interpolate_back(
        again(3, N // 4, 2, axis=1), size=(N // 4, 2), mode="bilinear", shape=(1, 1)
    ),
    "conv_3d": lambda: gg.conv_3d(again(3 * 8, 1, 1, N // 8, axis=(3,)), again(8, 1, 1, N // 8, axis=3), channels=8),
    "conv_3d_back_x, of channels": lambda: gg.conv_3d_back_x(
        again(N // 9, 1, 3, 3, axis=(0,)), again(N // 9, 1, 3, 4, axis=0), channels=1, size=(1, 5, 6)
    ),
    "conv_3d_back_x, of taps": lambda: gg.conv_3d_back_x(
        again(2, 1, 1, WINDOW, axis=3), again(2, 1, 1, WINDOW, axis=3), channels=1, size=(1, 1, 2 * WINDOW - 1)
    ),
    "conv_3d_back_k": lambda: gg.conv_3d_back_k(
        again(2 * 50, 1, 64, 64, axis=(0, 2, 3)), again(3 * 50, 1, 64, 64, axis=(0, 2, 3)), channels=2,
        shape=(6, 1, 1, 1),
    ),
    "im2col_3d_back": lambda: gg.im2col_3d_back(
        again(1, 1, WINDOW, WINDOW, axis=(2, 3)), channels=1, kernel=(1, 1, WINDOW), size=(1, 1, 2 * WINDOW - 1)
    ),
    "conv_dw": lambda: gg.conv_dw(again(3, 1, 1, N, axis=3), again(1, 3, 1, N, axis=3)),
    "conv_dw_back_x, stride 1": lambda: gg.conv_dw_back_x(
        again(3, 1, 1, 8192, axis=3), again(1, 3, 1, 8192, axis=3), size=(1, 16383)
    ),
    "conv_dw_back_x, stride 2": lambda: gg.conv_dw_back_x(
        again(3, 1, 1, 2 * WINDOW, axis=3), again(1, 3, 1, WINDOW, axis=3), stride=(1, 2), size=(1, 4 * WINDOW - 2)
    ),
    "conv_dw_back_k, small planes": lambda: gg.conv_dw_back_k(
        again(N // 64, 3, 8, 8, axis=(0, 2, 3)), again(N // 64, 3, 8, 8, axis=(0, 2, 3), seed=1), kernel=(1, 1)
    ),
    "conv_dw_back_k, a large plane": lambda: gg.conv_dw_back_k(
        again(1, 3, 450, 450, axis=(2, 3)), again(1, 3, 448, 448, axis=(2, 3), seed=1), kernel=(3, 3)
    ),
    "mul_mat, a row": lambda: gg.mul_mat(again(37, N, axis=1), again(1, N, axis=1)),
    "mul_mat, rows": lambda: gg.mul_mat(again(37, TILED, axis=1), again(41, TILED, axis=1)),
    "mul_mat, across": lambda: gg.mul_mat(
        gg.permute(again(TILED, 37), axes=(1, 0)), gg.permute(again(TILED, 41), axes=(1, 0))
    ),
    "mul_mat, a row across": lambda: gg.mul_mat(gg.permute(again(TILED, 37), axes=(1, 0)), again(1, TILED, axis=1)),
    "mul_mat_onto": lambda: gg.mul_mat_onto(again(37, N, axis=1), again(5, N, axis=1), again(5, 37)),
    "mul_mat, quantized": lambda: gg.mul_mat(quantized(5, N), again(1, N, axis=1)),
    "mul_mat, quantized rows": lambda: gg.mul_mat(quantized(33, TILED), again(33, TILED, axis=1)),
    "mul_mat_quantized_back": lambda: gg.mul_mat_quantized_back(quantized(N, 32), again(1, N, axis=1)),
    "mul_mat_quantized_back, rows": lambda: gg.mul_mat_quantized_back(quantized(TILED, 32), again(33, TILED, axis=1)),
    "mul_mat_id": lambda: gg.mul_mat_id(again(2, 7, TILED, axis=2), again(5, 1, TILED, axis=2), zeros(5, 1)),
    "mul_mat_id_back": lambda: gg.mul_mat_id_back(
        again(TILED, 1, 19), again(TILED, 1, 7, seed=1), zeros(TILED, 1), experts=2
    ),
    "mul_mat_id_quantized_back": lambda: gg.mul_mat_id_quantized_back(
        quantized(1, TILED, 32), again(3, 1, TILED, axis=2), zeros(3, 1)
    ),
    "flash_attn_ext": lambda: gg.flash_attn_ext(
        again(1, 2, 3, 8, axis=()), again(1, 2, N, 8, axis=2), again(1, 2, N, 8, axis=2, seed=1)
    ),
    "flash_attn_back, of queries": lambda: gradients(
        lambda q, k, v, s: gg.flash_attn_ext(q, k, v, sinks=s),
        again(1, 2, N, 8, axis=2), again(1, 2, 2, 8, axis=()), again(1, 2, 2, 8, axis=(), seed=1), again(2, axis=()),
        wanted=(1, 2, 3),
    ),
    "flash_attn_back, of keys": lambda: gradients(
        lambda q, k, v: gg.flash_attn_ext(q, k, v, scale=0.01), again(1, 2, 3, 8, axis=()),
        beside(1, 2, TILED, 8, axis=2, times=-1),
        beside(1, 2, TILED, 8, axis=2), wanted=(0,),
    ),
    "flash_attn_back, of heads": lambda: gradients(
        lambda q, k, v, m: gg.flash_attn_ext(q, k, v, m),
        again(512, 16, 2, 8, axis=(0, 1)), again(512, 16, 2, 8, axis=(0, 1)), again(512, 16, 2, 8, axis=(0, 1), seed=1),
        again(2, 2, axis=()), wanted=(3,),
    ),
    "lightning_indexer_back, of queries": lambda: gradients(
        gg.lightning_indexer, again(1, N, 2, 8, axis=1), again(1, 3, 1, 8, axis=()), again(1, 1, N, 2, axis=2),
        wanted=(1,),
    ),
    "lightning_indexer_back, of keys": lambda: gradients(
        gg.lightning_indexer, again(1, 3, 2, 8, axis=()), again(1, N, 1, 8, axis=1), again(1, 1, 3, 2, axis=()),
        wanted=(0, 2),
    ),
    "sparse_flash_mla": lambda: gg.sparse_flash_mla(again(1, 3, 2, 8, axis=()), ori_kv=again(1, TILED, 1, 8, axis=1)),
    "sparse_flash_mla_grad, of queries": lambda: gradients(
        lambda q, kv, s: gg.sparse_flash_mla(q, ori_kv=kv, sinks=s),
        again(1, TILED // 4, 2, 8, axis=1), again(1, 2, 1, 8, axis=()), again(2, axis=()), wanted=(1, 2),
    ),
    "sparse_flash_mla_grad, of keys": lambda: gradients(
        lambda q, kv: gg.sparse_flash_mla(q, ori_kv=kv, softmax_scale=0.01), again(1, 3, 2, 8, axis=()),
        beside(1, TILED // 2, 1, 8, axis=1, times=-1), wanted=(0,),
    ),
    "selective_scan_back, of tokens": lambda: registry["selective_scan_back"](
        again(50, 3, 2, 4, axis=0), again(50, 4000, 3, 2, axis=(0, 1)), again(50, 4000, 3, axis=(0, 1)),
        gg.tensor(np.full((3, 1), -3, np.float32)), again(50, 4000, 1, 4, axis=(0, 1)),
        again(50, 4000, 1, 4, axis=(0, 1)), again(50, 4000, 3, 2, axis=(0, 1), seed=1), None,
    ),
    "kda_gate_back": lambda: registry["kda_gate_back"](
        again(4, 50_000, 2, 8, axis=(0, 1)), again(4, 50_000, 2, 8, axis=(0, 1), seed=1), again(2, axis=()),
        again(16, axis=()), gate=1, lower_bound=0.0,
    ),
    "kda_back": lambda: gradients(
        lambda q, k, v, g, beta, A_log, dt_bias: gg.kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True
        ),
        again(16, 2048, 2, 4, axis=(0, 1), high=1.1), again(16, 2048, 2, 4, axis=(0, 1), high=1.1),
        again(16, 2048, 2, 4, axis=(0, 1)), again(16, 2048, 2, 4, axis=(0, 1)),
        again(16, 2048, 2, axis=(0, 1), low=0.01, high=0.02), again(2, axis=()), again(8, axis=()), wanted=(5, 6),
    ),
    "delta_scan_back": lambda: registry["delta_scan_back"](
        again(1, 2, 1, 4, axis=()), again(1, 2, 1, 4, axis=()), again(1, 2, 1, 4, axis=()),
        again(1, 2, 1, WINDOW, axis=3), again(1, 1, WINDOW, 4, axis=2), again(1, 2, 1, WINDOW, axis=3), *[None] * 3,
    ),
    "delta_scan": lambda: registry["delta_scan"](
        again(1, 1, 2, WINDOW, axis=3), again(1, 1, 2, WINDOW, axis=3), again(1, 1, 2, WINDOW, axis=3),
        again(1, 1, 2, 1, axis=()), again(1, 2, 1, WINDOW, axis=3), None, None,
    )[0],
    "selective_scan": lambda: registry["selective_scan"](
        again(1, 2, 3, WINDOW, axis=3), again(1, 1, 2, 3, axis=()), again(1, 1, 2, axis=()),
        gg.tensor(np.full((2, 1), -3, np.float32)), again(1, 1, 1, WINDOW, axis=3), again(1, 1, 1, WINDOW, axis=3),
    )[0],
    "kda": lambda: gg.kda(*head(256)),
    "kda_recurrent": lambda: gg.kda_recurrent(*head(256)),
    "lightning_indexer": lambda: gg.lightning_indexer(
        again(1, 3, WINDOW, WINDOW, axis=(2, 3)), again(1, 5, 1, WINDOW, axis=3), again(1, 1, 3, WINDOW, axis=3)
    ),
    "solve_tri": lambda: gg.solve_tri(
        gg.tensor((np.eye(WINDOW) - np.tri(WINDOW, k=-1) / WINDOW).astype(np.float32)), again(WINDOW, 3, axis=0)
    ),
    "strided_back": lambda: gg.strided_back(again(N, 19), shape=(19,), strides=(0, 1)),
    "acc": lambda: gg.acc(again(19, axis=()), again(N, 19), strides=(0, 4)),
}  # fmt: skip


# Ops without a case, by the reason.
EXEMPT = {
    "each result is made of one element of each input, or of two": """
        abs abs_back add argmax argsort broadcast_to cast ceil clamp clamp_back clip_factor concat cont cos cos_back
        cross_entropy_class_back div dropout elu elu_back exp expm1 expm1_back floor geglu geglu_back geglu_erf
        geglu_erf_back geglu_quick geglu_quick_back gelu gelu_back gelu_erf gelu_erf_back gelu_quick gelu_quick_back
        get_rows hardsigmoid hardsigmoid_back hardswish hardswish_back im2col_3d kda_gate leaky_relu leaky_relu_back log
        mul neg opt_step_adamw opt_step_sgd part permute reglu reglu_back relu relu_back repeat rope rope_back round
        scale set_rows set_rows_back sgn sigmoid sigmoid_back silu silu_back sin sin_back slice_add slice_back
        slice_view softplus softplus_back sqr sqr_back sqrt sqrt_back step stop_gradient set view sub
        swiglu swiglu_back swiglu_oai swiglu_oai_back tanh tanh_back top_k triangle trunc reshape xielu xielu_back
        acos acosh asin asinh atan atanh cosh equal erf exp2 floor_divide larger_back less less_equal log1p log2
        logical_and logical_or logical_xor maximum minimum not_equal pow remainder sinh tan where write_rows
    """,
    "moves elements between ranks, or leaves them where they are": """
        after all_gather all_gather_into all_to_all broadcast counted_once known_gradients replicated shift wait_for
    """,
    "a term for each rank": "all_reduce all_reduce_bucket reduce_scatter reduce_scatter_bucket reduce_to",
    "a term in each run": "accumulate",
    "its only sum is that of a row's labels, as cross_entropy_soft has it": "cross_entropy_soft_back",
    "the user's own function": "custom custom_back",
    "rows and columns of as many elements as there are streams": "sinkhorn sinkhorn_back",
    "its steps are those of kda_recurrent": "kda_recurrent_pool",
}


def test_every_op_that_adds_up_is_here():
    exempt = [name for names in EXEMPT.values() for name in names.split()]
    cases = {case.split(",")[0] for case in CASES}
    assert len(exempt) == len(set(exempt))
    assert not cases & set(exempt)
    assert cases | set(exempt) == set(registry)


def error_in_ulps(case):
    made = CASES[case]()
    results = made if isinstance(made, tuple) else (made,)
    graph = gg.Graph().build_forward_expand(*results)
    for t in results:
        gg.set_output(t)
    wanted = evaluate(graph, {leaf: leaf_value(leaf) for leaf in graph.leaves}, set(results))
    graph.compute()
    assert any(t.op is registry[case.split(",")[0]] for t in graph.nodes), f"no {case} in the graph"
    worst = 0.0
    for t in results:
        got, exact = t.numpy().astype(np.float64), np.asarray(wanted[t], np.float64)
        size = np.abs(exact).max()
        assert size > 0, "there is nothing to be wrong"
        worst = max(worst, np.abs(got - exact).max() / size * 2**23)
    return worst


@pytest.mark.native
@pytest.mark.parametrize("case", CASES)
def test_long_sums_are_as_good_as_short_ones(case):
    assert error_in_ulps(case) <= ULPS
