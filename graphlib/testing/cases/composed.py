"""Public functions that are made of ops: what `python -m ggrad.check` and the tests ask of an op they ask of these too.

COMPOSED: {function name: {case name: build}}; the result may be any tensor, or a tuple of them.
"""

import numpy as np

import ggrad as gg

I32 = gg.I32
TRIANGLES = ("upper_diag", "upper", "lower_diag", "lower")


def ids(m, values):
    return m.of(values, dtype=I32, param=False)


def apart(m, *shape):
    """Values no two of which are near each other, for maxima."""
    return m.of(m.rng.permutation(np.prod(shape, dtype=int)).reshape(shape) / 8.0)


def unit(m, *shape):
    """Between 0 and 1, as decays are."""
    return m(*shape, low=0.2, high=0.9)


def kda_inputs(m, K=4, V=3):
    return (m(1, 6, 2, K), m(1, 6, 2, V), m(1, 6, 2, K, low=-0.5, high=-0.01), unit(m, 1, 6, 2))


def backwards(m, K=4, V=3):
    """Constants: what goes back has no gradient of its own."""
    q, k = m(1, 6, 2, K, param=False), m(1, 6, 2, K, param=False)
    g, beta = m(1, 6, 2, K, low=-0.5, high=-0.01, param=False), m(1, 6, 2, low=0.2, high=0.9, param=False)
    return q, k, g, beta, m(1, 6, 2, V, param=False)


def mamba(m, **options):
    s, x, dt = m(2, 2, 3, 4), m(2, 5, 2, 3), m(2, 5, 2)
    return gg.ssm_scan(s, x, dt, m(2, 1, low=-1.0, high=-0.1), m(2, 5, 1, 4), m(2, 5, 1, 4), **options)


COMPOSED = {
    "add1": {"a scalar": lambda m: gg.add1(m(3, 5), m(1, 1)), "no rows": lambda m: gg.add1(m(0, 5), m())},
    "add_id": {"experts": lambda m: gg.add_id(m(3, 2, 5), m(4, 5), m.ints(3, 2, below=4))},
    "add_rel_pos": {"scores": lambda m: gg.add_rel_pos(m(2, 9, 9), m(2, 3, 3, 3), m(2, 3, 3, 3))},
    "arange": {"whole numbers": lambda m: gg.arange(0, 7), "steps": lambda m: gg.arange(0.5, -2.0, -0.25)},
    "col2im_1d": {"overlapping": lambda m: gg.col2im_1d(m(5, 6), 2, stride=2, padding=1)},
    "compress_kv": {"by four": lambda m: gg.compress_kv(m(2, 8, 1, 5), m(4, 5), cmp_ratio=4)},
    "conv_1d": {
        "padded": lambda m: gg.conv_1d(m(4, 3, 3), m(2, 3, 9), 2, 1),
        "dilated": lambda m: gg.conv_1d(m(4, 3, 2), m(2, 3, 9), dilation=3),
    },
    "conv_1d_dw": {"padded": lambda m: gg.conv_1d_dw(m(3, 1, 3), m(2, 3, 9), 1, 1)},
    "conv_2d": {
        "padded": lambda m: gg.conv_2d(m(4, 3, 3, 3), m(2, 3, 6, 5), 1, 1),
        "uneven": lambda m: gg.conv_2d(m(2, 3, 2, 3), m(1, 3, 7, 8), (2, 1), (0, 1), (1, 2)),
    },
    "conv_2d_dw": {"padded": lambda m: gg.conv_2d_dw(m(3, 1, 3, 3), m(2, 3, 6, 5), 2, 1)},
    "conv_transpose_1d": {"stride": lambda m: gg.conv_transpose_1d(m(3, 2, 4), m(1, 3, 5), 2)},
    "conv_transpose_2d": {"stride": lambda m: gg.conv_transpose_2d(m(3, 2, 2, 3), m(1, 3, 4, 5), 2)},
    "cpy": {"to another shape": lambda m: gg.cpy(m(3, 4), m.leaf(2, 6, param=False))},
    "cross_entropy_loss": {
        "classes": lambda m: gg.cross_entropy_loss(m(5, 7), m.ints(5, below=7)),
        "probabilities": lambda m: gg.cross_entropy_loss(m(5, 7), m(5, 7, low=0.0, high=0.5), reduction="sum"),
        "some ignored": lambda m: gg.cross_entropy_loss(m(4, 7), ids(m, [1, -1, 6, -1]), ignore_index=-1),
        "z-loss": lambda m: gg.cross_entropy_loss(
            m(4, 7), ids(m, [1, -1, 6, -1]), ignore_index=-1, z_loss=0.1, label_smoothing=0.1
        ),
        "probabilities, weighed, smoothed, each row": lambda m: gg.cross_entropy_loss(
            m(5, 7), m(5, 7, low=0.0, high=0.5), class_weights=m(7, low=0.5, param=False), label_smoothing=0.1,
            z_loss=0.2, reduction="none",
        ),
    },
    "cross_entropy_loss_back": {
        "classes": lambda m: gg.cross_entropy_loss_back(m(), m(5, 7), m.ints(5, below=7)),
        "each row": lambda m: gg.cross_entropy_loss_back(
            m(5), m(5, 7), m.ints(5, below=7), reduction="none", z_loss=0.1
        ),
        "probabilities": lambda m: gg.cross_entropy_loss_back(m(), m(5, 7), m(5, 7, low=0.0, high=0.5)),
    },
    "diag": {"rows": lambda m: gg.diag(m(2, 1, 4)), "a vector": lambda m: gg.diag(m(5))},
    "diag_mask_inf": {"softmax": lambda m: gg.soft_max(gg.diag_mask_inf(m(2, 4, 6), 2))},
    "diag_mask_zero": {"a past": lambda m: gg.diag_mask_zero(m(2, 4, 6), 2)},
    "dsv4_hc_comb": {"two streams": lambda m: gg.dsv4_hc_comb(m(3, 8), m(3), m(8), n_iter=3)},
    "dsv4_hc_post": {"streams": lambda m: gg.dsv4_hc_post(m(3, 5), m(3, 2, 5), m(3, 2), m(3, 2, 2))},
    "dsv4_hc_pre": {"streams": lambda m: gg.dsv4_hc_pre(m(3, 2, 5), m(3, 2))},
    "dup": {"a matrix": lambda m: gg.dup(m(3, 5))},
    "fill": {"a matrix": lambda m: gg.fill(m(3, 5), 2.5)},
    "gated_delta_net": {
        "two heads": lambda m: gg.gated_delta_net(
            m(1, 5, 2, 4), m(1, 5, 2, 4, low=-0.5, high=0.5), m(1, 5, 2, 4), m(1, 5, 2, 1, low=-0.5, high=0.0),
            unit(m, 1, 5, 2, 1), m(1, 2, 4, 4),
        ),
    },
    "gated_linear_attn": {
        "one sequence": lambda m: gg.gated_linear_attn(
            m(5, 2, 4), m(5, 2, 4), m(5, 2, 4), unit(m, 5, 2, 4), m(1, 2, 4, 4), 0.5
        ),
    },
    "get_rel_pos": {"equal": lambda m: gg.get_rel_pos(m(7, 3), 4, 4)},
    "group_norm": {"uneven groups": lambda m: gg.group_norm(m(2, 5, 3, 4), 2)},
    "im2col": {"padded": lambda m: gg.im2col(m(2, 3, 5, 6), (2, 3), 1, 1)},
    "im2col_back": {"padded": lambda m: gg.im2col_back(m(2, 5, 6, 18), (2, 3), (4, 6), 1, 1)},
    "kda_state_map": {"tokens": lambda m: gg.kda_state_map(*kda_inputs(m))},
    "kda_state_map_back": {"tokens": lambda m: gg.kda_state_map_back(*backwards(m))},
    "linear_cross_entropy": {
        "rows": lambda m: gg.linear_cross_entropy(m(2, 3, 5), m(7, 5), m.ints(2, 3, below=7)),
        "all of it": lambda m: gg.linear_cross_entropy(
            m(4, 5), m(7, 5), ids(m, [1, -1, 6, 0]), m(7), class_weights=m(7, low=0.5, param=False), ignore_index=-1,
            label_smoothing=0.1, z_loss=0.1,
        ),
        "each row": lambda m: gg.linear_cross_entropy(
            m(4, 5), m(7, 5), m.ints(4, below=7), z_loss=0.1, reduction="none"
        ),
        "chunks": lambda m: gg.linear_cross_entropy(m(150, 3), m(5, 3), m.ints(150, below=5), chunk_rows=64),
    },
    "map_custom1": {"a cube": lambda m: gg.map_custom1(m(3, 5), lambda a: a**3, lambda d, a: 3 * a * a * d)},
    "map_custom2": {
        "a product": lambda m: gg.map_custom2(m(3, 5), m(3, 5), lambda a, b: a * b, lambda d, a, b: (d * b, d * a))
    },
    "map_custom3": {
        "a sum": lambda m: gg.map_custom3(
            m(3, 5), m(3, 5), m(3, 5), lambda a, b, c: a * b + c, lambda d, a, b, c: (d * b, d * a, d)
        )
    },
    "matmul": {
        "batches": lambda m: gg.matmul(m(2, 3, 4), m(2, 4, 5)),
        "matrices": lambda m: gg.matmul(m(3, 4), m(4, 5)),
    },
    "out_prod": {"batches": lambda m: gg.out_prod(m(2, 4, 3), m(2, 4, 5))},
    "pad": {"both axes": lambda m: gg.pad(m(3, 4), (1, 0), (0, 2))},
    "pad_circular": {"both axes": lambda m: gg.pad_circular(m(3, 4), (1, 0), (2, 3))},
    "pad_ext": {
        "zeros": lambda m: gg.pad_ext(m(3, 4), (1, 0), (0, 2)),
        "circular": lambda m: gg.pad_ext(m(3, 4), (1, 0), (0, 2), circular=True),
    },
    "pad_reflect_1d": {"rows": lambda m: gg.pad_reflect_1d(m(3, 5), 2, 3)},
    "pool_1d": {
        "largest": lambda m: gg.pool_1d(apart(m, 3, 9), "max", 3, 2, 1),
        "means": lambda m: gg.pool_1d(m(3, 9), "avg", 3, 2, 1),
        "means of three axes": lambda m: gg.pool_1d(m(2, 3, 8), "avg", 4, 1, 2),
    },
    "repeat_4d": {"to four axes": lambda m: gg.repeat_4d(m(2, 3), 2, 1, 4, 6)},
    "roll": {"both axes": lambda m: gg.roll(m(3, 5), (1, -2))},
    "rope_multi": {"mrope": lambda m: gg.rope_multi(m(1, 3, 2, 8), m.ints(4, 3, below=9), sections=(2, 1, 1, 0))},
    "rwkv_wkv6": {
        "one sequence": lambda m: gg.rwkv_wkv6(
            m(5, 2, 4), m(5, 2, 4), m(5, 2, 4), m(2, 4), unit(m, 5, 2, 4), m(1, 2, 4, 4)
        )
    },
    "rwkv_wkv7": {
        "one sequence": lambda m: gg.rwkv_wkv7(
            m(5, 2, 4), unit(m, 5, 2, 4), m(5, 2, 4), m(5, 2, 4), m(5, 2, 4, low=-0.3, high=0.3),
            m(5, 2, 4, low=-0.3, high=0.3), m(1, 2, 4, 4),
        )
    },
    "set_1d": {"from the third on": lambda m: gg.set_1d(m.leaf(7), m(3), 8)},
    "set_2d": {"a window": lambda m: gg.set_2d(m.leaf(4, 7), m(2, 2), 28, 20)},
    "indexed": {
        "rows": lambda m: gg.indexed(m(4, 2, 3), [[0, -1], [2, 0]]),
        "a mask": lambda m: gg.indexed(m(5), np.array([True, False, True, True, False])),
    },
    "slice_of": {
        "steps": lambda m: gg.slice_of(m(4, 7), (slice(None, None, -2), slice(1, 6, 3))),
        "an axis more": lambda m: gg.slice_of(m(4, 7), (2, None, ...)),
    },
    "ssm_conv": {"two sequences": lambda m: gg.ssm_conv(m(2, 3, 7), m(3, 4))},
    "ssm_scan": {"Mamba 2": mamba},
    "timestep_embedding": {"odd": lambda m: gg.timestep_embedding(m(4, low=0.0, high=5.0, param=False), 7)},
    "transpose": {
        "the last two": lambda m: gg.transpose(m(2, 3, 4)),
        "others": lambda m: gg.transpose(m(2, 3, 4), 0, 1),
    },
    "tri": {kind: lambda m, kind=kind: gg.tri(m(2, 4, 4), kind) for kind in TRIANGLES},
    "upscale": {
        "twice": lambda m: gg.upscale(m(2, 3, 4), 2),
        "bilinear": lambda m: gg.upscale(m(2, 3, 4), 2, "bilinear"),
    },
    "win_part": {"with a rest": lambda m: gg.win_part(m(5, 7, 2), 3)},
    "win_unpart": {"with a rest": lambda m: gg.win_unpart(m(6, 3, 3, 2), (5, 7))},
}  # fmt: skip
