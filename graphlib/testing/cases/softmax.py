"""Softmax along the last axis, with masks."""

import numpy as np

import ggrad as gg

INF, NAN = np.inf, np.nan


def masked(m, *shape, p=0.4, dtype=gg.F32):
    """A mask of random values, -inf in some places."""
    values = m.rng.uniform(-2, 2, shape)
    values[m.rng.uniform(size=shape) < p] = -INF
    return m.of(values, dtype=dtype, param=False)


def sinks_back(m, x, mask, sinks, **options):
    y = gg.soft_max(x, mask, sinks, **options)
    return gg.soft_max_sinks_back(m(*y.shape), y, x, sinks, mask, **options)


CASES = {
    "soft_max": {
        "alone": lambda m: gg.soft_max(m(3, 17)),
        "scaled": lambda m: gg.soft_max(m(2, 3, 4, 33), scale=0.3),
        "mask": lambda m: gg.soft_max(m(2, 3, 4, 11), m(4, 11), scale=0.5),
        "mask of each head": lambda m: gg.soft_max(m(4, 6, 3, 7), m(2, 3, 3, 7)),
        "mask with more rows": lambda m: gg.soft_max(m(4, 5, 9), m(8, 9), scale=2.0),
        "mask of one row": lambda m: gg.soft_max(m(2, 5, 9), m(9)),
        "tiled rows": lambda m: gg.soft_max(m(6, 9), m(3, 9)),
        "alibi": lambda m: gg.soft_max(m(6, 3, 7), m(3, 7), scale=0.5, max_bias=8.0),
        "alibi, mask of each head": lambda m: gg.soft_max(m(2, 4, 5, 7), m(2, 2, 8, 7), max_bias=4.0),
        "sinks": lambda m: gg.soft_max(m(2, 3, 4, 17), None, m(3), scale=0.7),
        "sinks, mask and alibi": lambda m: gg.soft_max(m(6, 5, 19), m(5, 19), m(6), scale=0.5, max_bias=8.0),
        "sinks where all is masked out": lambda m: gg.soft_max(
            m(2, 4, 9), m.of(np.full((4, 9), -INF), param=False), m(2)
        ),
        "sinks beside infinities": lambda m: gg.soft_max(
            m.of([[[1.0, 2.0]], [[-INF, -INF]], [[3.0, 4.0]]], param=False),
            None,
            m.of([-INF, -INF, 500.0], param=False),
        ),
        "f16 mask": lambda m: gg.soft_max(m(2, 5, 37), masked(m, 8, 37, dtype=gg.F16)),
        "bf16 mask": lambda m: gg.soft_max(m(2, 5, 37), masked(m, 5, 37, dtype=gg.BF16)),
        "places masked out": lambda m: gg.soft_max(m(3, 5, 19), masked(m, 5, 19)),
        "rows masked out": lambda m: gg.soft_max(m(4, 19), m.of(np.full((4, 19), -INF), param=False)),
        "NaN masked out": lambda m: gg.soft_max(
            m.of([[NAN, 1, INF, 2]], param=False), m.of([[-INF, 0, -INF, 1]], param=False)
        ),
        "NaN in one row": lambda m: gg.soft_max(m.of([[NAN, 1, 3], [4, 5, -INF]], param=False)),
        "NaN in a row of -inf": lambda m: gg.soft_max(m.of([[NAN, -INF, -INF], [-INF, -INF, -INF]], param=False)),
        "large values": lambda m: gg.soft_max(m(3, 9, low=-1000.0, high=1000.0, param=False)),
        "many rows": lambda m: gg.soft_max(m(301, 67)),
        "a long row": lambda m: gg.soft_max(m(2, 5003)),
        "one row": lambda m: gg.soft_max(m(19, param=False), m(19, param=False)),
        "rows of one": lambda m: gg.soft_max(m(4, 1)),
        "no rows": lambda m: gg.soft_max(m(0, 5), m(0, 5)),
        "empty rows": lambda m: gg.soft_max(m(3, 0), m(3, 0)),
    },
    "soft_max_sinks_back": {
        "no mask": lambda m: sinks_back(m, m(2, 3, 4, 17), None, m(3), scale=0.7),
        "mask and slopes": lambda m: sinks_back(m, m(6, 4, 11), m(3, 4, 11), m(6), max_bias=8.0),
        "f16 mask": lambda m: sinks_back(m, m(2, 5, 37), masked(m, 8, 37, dtype=gg.F16), m(2)),
        "rows masked out": lambda m: sinks_back(m, m(2, 4, 9), m.of(np.full((4, 9), -INF), param=False), m(2)),
        "a small share": lambda m: sinks_back(m, m(2, 4, 9), None, m(2, low=-30.0, high=-20.0)),
        "many rows": lambda m: sinks_back(m, m(3, 101, 67), None, m(3)),
        "no rows": lambda m: sinks_back(m, m(2, 0, 5), None, m(2)),
        "empty rows": lambda m: sinks_back(m, m(2, 3, 0), None, m(2)),
    },
    "soft_max_back": {
        "plain": lambda m: gg.soft_max_back(m(3, 17), m(3, 17), scale=0.5),
        "4d": lambda m: gg.soft_max_back(m(2, 3, 4, 33), m(2, 3, 4, 33, low=0.0)),
        "NaN where y is 0": lambda m: gg.soft_max_back(
            m.of([[NAN, 1, 2, INF]]), m.of([[0, 0.25, 0.75, 0]], param=False)
        ),
        "NaN where y is not": lambda m: gg.soft_max_back(
            m.of([[NAN, 1], [1, 2]], param=False), m.of([[0.5, 0.5], [1, 0]], param=False)
        ),
        "a long row": lambda m: gg.soft_max_back(m(2, 5003), m(2, 5003, low=0.0)),
        "rows of one": lambda m: gg.soft_max_back(m(4, 1), m(4, 1)),
        "no rows": lambda m: gg.soft_max_back(m(0, 5), m(0, 5)),
        "empty rows": lambda m: gg.soft_max_back(m(3, 0), m(3, 0)),
    },
}

NO_GRADIENT = {"soft_max_sinks_back"}
