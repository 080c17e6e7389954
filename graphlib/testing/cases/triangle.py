"""Triangles of matrices."""

import ggrad as gg

INF = float("inf")

CASES = {
    "triangle": {
        "lower": lambda m: gg.tri(m(2, 5, 5), "lower"),
        "lower, with the diagonal": lambda m: gg.tri(m(2, 3, 5, 5)),
        "upper": lambda m: gg.tri(m(2, 5, 5), "upper"),
        "upper, with the diagonal": lambda m: gg.tri(m(2, 5, 5), "upper-diag"),
        "wide": lambda m: gg.triangle(m(3, 8), diagonal=2),
        "high": lambda m: gg.triangle(m(8, 3), diagonal=-2, upper=True),
        "all of it": lambda m: gg.triangle(m(4, 3), diagonal=2**62),
        "nothing of it": lambda m: gg.triangle(m(4, 3), diagonal=-(2**62)),
        "minus infinity": lambda m: gg.diag_mask_inf(m(2, 5, 7, param=False), 1),
        "masked before a softmax": lambda m: gg.diag_mask_zero(gg.soft_max(gg.diag_mask_inf(m(3, 4, 6), 2)), 1),
        "NaN where it is filled": lambda m: gg.tri(m.of([[1.0, float("nan")], [2.0, 3.0]], param=False)),
        "large": lambda m: gg.tri(m(3, 131, 133)),
        "no rows": lambda m: gg.tri(m(2, 0, 3)),
        "empty rows": lambda m: gg.tri(m(2, 3, 0)),
    },
}
