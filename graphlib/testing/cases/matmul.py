"""Products of matrices, with batches shared by groups."""

import ggrad as gg

CASES = {
    "mul_mat": {
        "2d": lambda m: gg.mul_mat(m(7, 33), m(5, 33)),
        "one weight for all batches": lambda m: gg.mul_mat(m(7, 9), m(2, 3, 5, 9)),
        "one batch more on the left": lambda m: gg.mul_mat(m(1, 7, 9), m(5, 9)),
        "grouped heads": lambda m: gg.mul_mat(m(2, 5, 8), m(6, 4, 8)),
        "grouped heads of two sequences": lambda m: gg.mul_mat(m(2, 2, 5, 7), m(2, 6, 4, 7)),
        "groups of outer batches": lambda m: gg.mul_mat(m(2, 3, 4, 5), m(6, 3, 2, 5)),
        "groups along both": lambda m: gg.mul_mat(m(2, 2, 3, 5), m(4, 6, 2, 5)),
        "one inner batch for many": lambda m: gg.mul_mat(m(2, 1, 3, 5), m(4, 3, 2, 5)),
        "heads that lie permuted": lambda m: gg.mul_mat(
            gg.permute(m(2, 5, 2, 8), axes=(0, 2, 1, 3)), gg.permute(m(2, 3, 4, 8), axes=(0, 2, 1, 3))
        ),
        "f16 weight": lambda m: gg.mul_mat(m(7, 33, dtype=gg.F16), m(3, 2, 33)),
        "bf16 on both sides": lambda m: gg.mul_mat(m(7, 18, dtype=gg.BF16), m(5, 18, dtype=gg.BF16)),
        "one row, one column": lambda m: gg.mul_mat(m(1, 17), m(1, 17)),
        "rows of one element": lambda m: gg.mul_mat(m(4, 1), m(5, 1)),
        "nothing to sum": lambda m: gg.mul_mat(m(4, 0), m(5, 0)),
        "no rows": lambda m: gg.mul_mat(m(4, 3), m(2, 0, 3)),
        "no columns": lambda m: gg.mul_mat(m(0, 3), m(5, 3)),
        "no batch to share it": lambda m: gg.mul_mat(m(2, 4, 3), m(0, 5, 3)),
    },
    "mul_mat_onto": {
        "2d": lambda m: gg.mul_mat_onto(m(7, 33), m(5, 33), m(5, 7)),
        "blocks": lambda m: gg.mul_mat_onto(m(130, 400), m(65, 400), m(65, 130)),
        "bf16 and f16": lambda m: gg.mul_mat_onto(m(7, 33, dtype=gg.BF16), m(5, 33, dtype=gg.F16), m(5, 7)),
        "one row, one column": lambda m: gg.mul_mat_onto(m(1, 17), m(1, 17), m(1, 1)),
        "nothing to add": lambda m: gg.mul_mat_onto(m(4, 0), m(5, 0), m(5, 4)),
        "no rows": lambda m: gg.mul_mat_onto(m(4, 3), m(0, 3), m(0, 4)),
    },
}
