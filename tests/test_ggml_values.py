"""Ops under ggml's names give ggml's values: where both might well differ, and on a grid like that of its own tests.

The grid needs libggml-python, whose kernels it runs; what may differ is 2e-5 of the largest magnitude, about 170
roundings of f32, or more where ggml sums in f16 or in f32 along long rows.
"""

import ctypes
import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.testing.ggml_support import GGML

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_means_of_pool_1d_are_of_what_lies_inside(backend):
    x = gg.tensor(np.ones(5), param=True)
    out = gg.pool_1d(x, "avg", 2, 1, 1)
    graph = gg.Graph().build_backward_expand(gg.sum(out))
    graph.build_forward_expand(out).compute(backend=backend)
    np.testing.assert_array_equal(out.numpy(), np.ones(6))
    np.testing.assert_array_equal(graph.grad(x).numpy(), [1.5, 1, 1, 1, 1.5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_means_of_pool_2d_count_the_padding(backend):
    x = gg.tensor(np.ones((2, 2)))
    options = dict(mode="avg", kernel=(2, 2), stride=(1, 1), padding=(1, 1))
    counted, inside = gg.pool_2d(x, **options), gg.pool_2d(x, **options, count_padding=False)
    gg.Graph().build_forward_expand(counted, inside).compute(backend=backend)
    np.testing.assert_array_equal(counted.numpy(), [[0.25, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 0.25]])
    np.testing.assert_array_equal(inside.numpy(), np.ones((3, 3)))


# -- ggml itself, on the grid of its own tests ------------------------------------------------------------------

F, I = ctypes.c_float, ctypes.c_int
RNG = np.random.default_rng(0)
SHAPES = [(2, 2, 2, 128), (13, 11, 7, 5)]
TABLE = 2e-3  # ggml reads these from a table of f16


def normal(*shape, low=-3.0, high=3.0):
    return RNG.uniform(low, high, shape).astype(np.float32)


def ids(*shape, below):
    return RNG.integers(0, below, shape).astype(np.int32)


def grid():
    """(ggml's name, inputs, its further arguments, the same in ggrad, what may differ, of the largest)."""
    near = 2e-5
    for shape in SHAPES:
        for name in [
            "abs",
            "neg",
            "sgn",
            "step",
            "tanh",
            "elu",
            "relu",
            "sigmoid",
            "silu",
            "hardswish",
            "hardsigmoid",
            "exp",
            "expm1",
            "softplus",
            "gelu_erf",
            "floor",
            "ceil",
            "round",
            "trunc",
            "sqr",
            "sin",
            "cos",
        ]:
            yield name, [normal(*shape)], (), getattr(gg, name), near
        for name in ("gelu", "gelu_quick"):
            yield name, [normal(*shape)], (), getattr(gg, name), TABLE
        for name in ("log", "sqrt"):
            yield name, [normal(*shape, low=0.1)], (), getattr(gg, name), near
        yield (
            "leaky_relu",
            [normal(*shape)],
            (F(0.1), ctypes.c_bool(False)),
            lambda x: gg.leaky_relu(x, negative_slope=0.1),
            near,
        )
        yield "clamp", [normal(*shape)], (F(-0.5), F(0.5)), lambda x: gg.clamp(x, min=-0.5, max=0.5), near
        yield "scale", [normal(*shape)], (F(2.0),), lambda x: gg.scale(x, factor=2.0), near
        yield "scale_bias", [normal(*shape)], (F(2.0), F(1.0)), lambda x: gg.scale(x, factor=2.0, bias=1.0), near
        xielu = dict(alpha_n=4.0, alpha_p=20.0, beta=0.5, eps=1e-7)
        yield "xielu", [normal(*shape)], tuple(map(F, xielu.values())), lambda x, a=xielu: gg.xielu(x, **a), near
        for name, ours in {"sum_rows": gg.sum_rows, "mean": gg.mean_rows, "cumsum": gg.cumsum}.items():
            yield name, [normal(*shape)], (), ours, near
        yield "sum", [normal(*shape)], (), lambda x: gg.sum(x), near
        for tile in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 3, 1), (1, 1, 1, 2), (2, 1, 2, 2)):
            large = tuple(n * t for n, t in zip(shape, tile, strict=True))
            for name in ("add", "sub", "mul", "div"):
                tiled = partial(getattr(gg, name), tile=True)
                yield name, [normal(*large), normal(*shape, low=0.5)], (), tiled, near
            yield (
                "repeat_4d",
                [normal(*shape)],
                tuple(ctypes.c_int64(n) for n in large[::-1]),
                lambda x, s=large: gg.repeat_4d(x, *s),
                0,
            )
        for axis in range(4):
            yield (
                "concat",
                [normal(*shape), normal(*shape)],
                (I(3 - axis),),
                lambda a, b, i=axis: gg.concat(a, b, axis=i),
                0,
            )
        yield "pad_reflect_1d", [normal(*shape)], (I(3), I(2)), lambda x: gg.pad_reflect_1d(x, 3, 2), 0
        yield "roll", [normal(*shape)], (I(2), I(-1), I(1), I(0)), lambda x: gg.roll(x, (0, 1, -1, 2)), 0
        yield "pad", [normal(*shape)], (I(1), I(2), I(0), I(1)), lambda x: gg.pad(x, (0, 0, 0, 0), (1, 0, 2, 1)), 0
    for rows, n in ((1, 1), (5, 33), (3, 64), (4, 1025)):
        for eps in (0.0, 1e-6, 1e-4, 1e-1):
            if n > 1 or eps:
                yield "norm", [normal(2, rows, n)], (F(eps),), lambda x, e=eps: gg.norm(x, eps=e), 1e-4
            yield "rms_norm", [normal(2, rows, n)], (F(eps),), lambda x, e=eps: gg.rms_norm(x, eps=e), near
            yield "l2_norm", [normal(2, rows, n)], (F(eps),), lambda x, e=eps: gg.l2_norm(x, eps=e), near
        yield "soft_max", [normal(2, rows, n)], (), gg.soft_max, near
        yield "argmax", [normal(rows, n)], (), gg.argmax, 0
        for order in (0, 1):
            yield "argsort", [normal(rows, n)], (I(order),), lambda x, o=order: gg.argsort(x, order=o), 0
        for scale in (1.0, 0.1):
            for bias in (0.0, 8.0):
                yield (
                    "soft_max_ext",
                    [normal(2, 4, rows, n), normal(1, 1, rows, n)],
                    (F(scale), F(bias)),
                    lambda x, m, s=scale, b=bias: gg.soft_max(x, m, scale=s, max_bias=b),
                    near,
                )
    for groups in (1, 2, 3, 8):
        yield (
            "group_norm",
            [normal(2, 8, 5, 6)],
            (I(groups), F(1e-6)),
            lambda x, g=groups: gg.group_norm(x, g, 1e-6),
            1e-4,
        )
    for kernel in (1, 2, 3):
        for stride in (1, 2):
            for padding in range(min(2, kernel)):
                for mode, number in (("max", 0), ("avg", 1)):
                    yield (
                        "pool_1d",
                        [normal(3, 10)],
                        (I(number), I(kernel), I(stride), I(padding)),
                        lambda x, m=mode, k=kernel, s=stride, p=padding: gg.pool_1d(x, m, k, s, p),
                        near,
                    )
                    for width in (1, 3):
                        more = (I(number), I(width), I(kernel), I(stride), I(stride), F(0), F(padding))
                        yield (
                            "pool_2d",
                            [normal(2, 3, 9, 10)],
                            more,
                            lambda x, m=mode, k=(kernel, width), s=stride, p=padding: gg.pool_2d(
                                x, mode=m, kernel=k, stride=(s, s), padding=(p, 0)
                            ),
                            near,
                        )
    for m, n, k, heads, groups in (
        (1, 1, 1, 1, 1),
        (16, 1, 256, 1, 1),
        (7, 5, 33, 4, 1),
        (7, 5, 32, 2, 3),
        (64, 77, 77, 1, 1),
    ):
        yield "mul_mat", [normal(heads, m, k), normal(heads * groups, n, k)], (), gg.mul_mat, 1e-4
        yield "out_prod", [normal(heads, k, m), normal(heads, k, n)], (), gg.out_prod, 1e-4
    for mode in (0, 2):
        for dims in (32, 16):
            for scale in (1.0, 0.5):
                more = (None, I(dims), I(mode), I(0), F(10000.0), F(scale), F(0.0), F(1.0), F(32.0), F(1.0))
                yield (
                    "rope_ext",
                    [normal(1, 5, 3, 32), np.arange(2, 7, dtype=np.int32)],
                    more,
                    lambda x, p, m=mode, d=dims, s=scale: gg.rope(x, p, mode=m, n_dims=d, freq_scale=s),
                    1e-4,
                )
    for stride, padding, dilation in ((1, 0, 1), (2, 1, 1), (1, 2, 2)):
        more = tuple(I(v) for v in (stride, stride, padding, padding, dilation, dilation))
        yield (
            "conv_2d_direct",
            [normal(4, 3, 3, 2), normal(2, 3, 9, 10)],
            more,
            lambda k, x, s=stride, p=padding, d=dilation: gg.conv_2d(k, x, s, p, d),
            1e-4,
        )
        yield (
            "conv_2d_dw_direct",
            [normal(3, 1, 3, 2), normal(2, 3, 9, 10)],
            more,
            lambda k, x, s=stride, p=padding, d=dilation: gg.conv_2d_dw(k, x, s, p, d),
            1e-4,
        )
    for shape in ((5, 10), (3, 33)):
        labels = RNG.dirichlet(np.ones(shape[1]), shape[0]).astype(np.float32)
        yield "cross_entropy_loss", [normal(*shape), labels], (), gg.cross_entropy_loss, 1e-4
    for mode, number in (("nearest", 0), ("bilinear", 1), ("bicubic", 2)):
        yield "upscale", [normal(2, 3, 5, 7)], (I(2), I(number)), lambda x, m=mode: gg.upscale(x, 2, m), 1e-4
    yield "get_rows", [normal(7, 33), ids(5, below=7)], (), gg.get_rows, 0
    for past in (0, 3):
        yield "diag_mask_inf", [normal(2, 5, 8)], (I(past),), lambda x, n=past: gg.diag_mask_inf(x, n), 0
        yield "diag_mask_zero", [normal(2, 5, 8)], (I(past),), lambda x, n=past: gg.diag_mask_zero(x, n), 0
    for dim, period in ((32, 10000), (15, 1000)):
        yield (
            "timestep_embedding",
            [normal(4, low=0.0)],
            (I(dim), I(period)),
            lambda t, d=dim, p=period: gg.timestep_embedding(t, d, p),
            1e-4,
        )
    for experts, used, rows, n, k in ((4, 2, 5, 7, 33), (8, 1, 1, 16, 64), (2, 2, 9, 3, 32)):
        more = [normal(experts, n, k), normal(rows, used, k), ids(rows, used, below=experts)]
        yield "mul_mat_id", more, (), gg.mul_mat_id, 1e-4
    for heads, kv_heads, queries, keys, d in ((4, 4, 3, 32, 64), (4, 2, 7, 64, 64), (8, 1, 1, 96, 128)):
        qkv = [normal(2, heads, queries, d), normal(2, kv_heads, keys, d), normal(2, kv_heads, keys, d)]
        mask = np.where(RNG.random((1, 1, queries, keys)) < 0.8, normal(1, 1, queries, keys), -np.inf).astype(
            np.float16
        )
        for bias, cap in ((0.0, 0.0), (8.0, 0.0), (0.0, 10.0)):
            more = (F(d**-0.5), F(bias), F(cap))
            options = {"max_bias": bias, "logit_softcap": cap}
            yield "flash_attn_ext", [*qkv, mask], more, partial(gg.flash_attn_ext, **options), 2e-4
    for n, m in ((4, 3), (11, 11), (32, 5)):
        a = np.tril(normal(2, n, n, low=0.5, high=1.0) / n) + np.eye(n, dtype=np.float32)
        more = tuple(map(ctypes.c_bool, (True, True, False)))
        yield "solve_tri", [a.astype(np.float32), normal(2, n, m)], more, gg.solve_tri, 1e-4
    for stride in (1, 2, 3):
        more = (I(stride), I(0), I(1))
        yield (
            "conv_transpose_1d",
            [normal(3, 2, 4), normal(3, 5)],
            more,
            partial(gg.conv_transpose_1d, stride=stride),
            1e-4,
        )
    for stride, padding, dilation in ((1, 0, 1), (2, 1, 1), (1, 2, 2)):
        more = tuple(I(v) for v in (stride, stride, padding, padding, dilation, dilation, 1, 0))  # 2d, f32
        options = {"kernel": (3, 2), "stride": stride, "padding": padding, "dilation": dilation}
        yield "im2col", [normal(4, 3, 3, 2), normal(2, 3, 9, 10)], more, unfold(options), 0
    yield "get_rows_back", [normal(5, 33), ids(5, below=7), normal(7, 33)], (), rows_back, near
    yield "count_equal", [ids(5, 33, below=3), ids(5, 33, below=3)], (), gg.count_equal, 0
    for kind, number in (("upper_diag", 0), ("upper", 1), ("lower_diag", 2), ("lower", 3)):
        yield "tri", [normal(2, 7, 7)], (I(number),), partial(gg.tri, kind=kind), 0
    yield "ssm_conv", [normal(2, 6, 10), normal(6, 4)], (), gg.ssm_conv, near
    for name in ("swiglu", "reglu", "geglu_erf"):
        yield name, [normal(3, 5, 64)], (), getattr(gg, name), near
        yield f"{name}_swapped", [normal(3, 5, 64)], (), partial(getattr(gg, name), swapped=True), near
        yield f"{name}_split", [normal(3, 5, 32), normal(3, 5, 32)], (), getattr(gg, name), near
    for name in ("geglu", "geglu_quick"):
        yield name, [normal(3, 5, 64)], (), getattr(gg, name), TABLE
    yield "swiglu_oai", [normal(3, 5, 32), normal(3, 5, 32)], (F(1.702), F(7.0)), gg.swiglu_oai, near


def unfold(options):
    return lambda k, x: gg.im2col(x, **options)


def rows_back(dout, indices, like):
    x = gg.tensor(np.zeros(like.shape), param=True)
    rows = gg.get_rows(x, indices)
    return gg.Graph().build_backward_expand(gg.sum(gg.mul(rows, dout))).grad(x)


GRID = list(grid())


@pytest.fixture(scope="module")
def ggml():
    pytest.importorskip("libggml")
    path = Path(__file__).parent / "bench" / "ggml_peer.py"
    spec = importlib.util.spec_from_file_location("ggml_peer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Ggml()


@pytest.mark.native
@pytest.mark.parametrize(
    "case", GRID, ids=[f"{i} {case[0]} {[x.shape for x in case[1]]}" for i, case in enumerate(GRID)]
)
def test_values_are_ggmls(case, ggml):
    name, inputs, more, build, rtol = case
    ours = build(*(gg.tensor(x) for x in inputs))
    gg.Graph().build_forward_expand(ours).compute()
    node = ggml.pointer(name, ggml.context, *map(ggml.of, inputs), *more)
    ggml.graph(node, 1)()
    wide = name == "count_equal"  # ggml counts in 64 bits
    theirs = ggml.values(node, ours.shape, np.int64 if wide else np.int32 if ours.dtype is gg.I32 else np.float32)
    finite = np.abs(theirs[np.isfinite(theirs)])
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=rtol * finite.max(initial=0))


NOT_COMPARED = {
    **dict.fromkeys(("custom", "map_custom1", "map_custom2", "map_custom3"), "the user's function is all that they do"),
    "flash_attn_back": "ggml's ends the process",
    "soft_max_back": "tests/test_golden.py has it with a scale, as ggml's soft_max_ext_back",
}


def test_every_op_that_ggml_has_too_is_compared():
    files = (Path(__file__).parent / "golden" / "ggml").glob("golden_ggml_*.npz")
    written = {path.stem.removeprefix("golden_ggml_").replace("mean", "mean_rows") for path in files}
    compared = {"mean_rows" if case[0] == "mean" else case[0] for case in GRID}
    both = {name for name in GGML if hasattr(gg, name)}
    alone = {name for name in both - compared if not any(key == name or key.startswith(f"{name}_") for key in written)}
    assert alone == set(NOT_COMPARED)
