"""Orders of rows: equal elements, -0 beside 0, NaN and infinities, sizes round powers of two."""

import numpy as np

import ggrad as gg

SPECIAL = np.array([[0.0, -0.0, np.nan, np.inf, -np.inf, 0.0, np.nan, -1.0, 1e-45, -1e-45]] * 3)


def equal(m, *shape):
    """Values of which many are equal."""
    return m.of(m.rng.integers(-3, 3, shape).astype(float))


CASES = {
    "argsort": {
        "a matrix": lambda m: gg.argsort(m(3, 9)),
        "downwards": lambda m: gg.argsort(m(2, 3, 17), order="desc"),
        "equal elements": lambda m: gg.argsort(equal(m, 4, 33)),
        "equal elements, downwards": lambda m: gg.argsort(equal(m, 4, 32), order="desc"),
        "special values": lambda m: gg.argsort(m.of(SPECIAL)),
        "special values, downwards": lambda m: gg.argsort(m.of(SPECIAL), order="desc"),
        "several tasks": lambda m: gg.argsort(equal(m, 41, 301)),
        "one element": lambda m: gg.argsort(m(1)),
        "no elements": lambda m: gg.argsort(m(3, 0)),
    },
    "top_k": {
        "a matrix": lambda m: gg.top_k(m(3, 9), k=4),
        "one of many": lambda m: gg.top_k(m(2, 3, 4, 50), k=1),
        "all": lambda m: gg.top_k(equal(m, 5, 12), k=12),
        "equal elements": lambda m: gg.top_k(equal(m, 5, 40), k=13),
        "special values": lambda m: gg.top_k(m.of(SPECIAL), k=9),
        "several tasks": lambda m: gg.top_k(m(67, 129), k=16),
        "none": lambda m: gg.top_k(m(3, 4), k=0),
        "of no rows": lambda m: gg.top_k(m(0, 4), k=2),
    },
}
