"""Choosing between operands, comparisons, logic, powers, and ops of i32."""

import ggrad as gg

from .elementwise import BINARY as TILED

BINARY = {name: case for name, case in TILED.items() if name != "tiles"}
POWER = gg.ops.pow.node

INTS = {
    "same shapes": lambda op: lambda m: op(m.ints(2, 3, 4, 5, low=-3, below=4), m.ints(2, 3, 4, 5, low=-3, below=4)),
    "a row": lambda op: lambda m: op(m.ints(7, 33, low=-3, below=4), m.ints(33, low=-3, below=4)),
    "a column on the left": lambda op: lambda m: op(m.ints(7, 1, low=-3, below=4), m.ints(7, 33, low=-3, below=4)),
    "large": lambda op: lambda m: op(m.ints(150, 131, low=-3, below=4), m.ints(150, 131, low=-3, below=4)),
    "scalars": lambda op: lambda m: op(m.ints(low=-3, below=4), m.ints(low=-3, below=4)),
    "empty": lambda op: lambda m: op(m.ints(0, 3, below=4), m.ints(0, 3, below=4)),
}


def apart(op):
    """No two that are compared are near each other: the whole numbers, and the halves between them."""

    def grid(m, *shape, shift=0.0):
        return m.of(m.rng.integers(-4, 4, shape) + shift)

    return {
        "same shapes": lambda m: op(grid(m, 2, 3, 4, 5), grid(m, 2, 3, 4, 5, shift=0.5)),
        "a row": lambda m: op(grid(m, 7, 33), grid(m, 33, shift=0.5)),
        "each smaller along one axis": lambda m: op(grid(m, 5, 1, 3), grid(m, 1, 4, 3, shift=0.5)),
        "large": lambda m: op(grid(m, 150, 131), grid(m, 150, 131, shift=0.5)),
        "large, a row": lambda m: op(grid(m, 2, 75, 131), grid(m, 75, 131, shift=0.5)),
        "scalars": lambda m: op(grid(m), grid(m, shift=0.5)),
        "equals": lambda m: op(m.of([1.0, 2.0, -0.0], param=False), m.of([1.0, 3.0, 0.0], param=False)),
        "empty": lambda m: op(m(0, 3), m(1, 3)),
    }


def made(cases, op, prefix=""):
    return {prefix + name: make(op) for name, make in cases.items()}


def turned(op):
    """With the positive operand first."""
    return lambda a, b: op(b, a)


CASES = {
    "where": {
        "floats": lambda m: gg.where(m.ints(2, 3, 4, 5, below=2), m(2, 3, 4, 5), m(2, 3, 4, 5)),
        "ints": lambda m: gg.where(m.ints(7, 33, below=2), m.ints(7, 33, below=9), m.ints(7, 33, below=9)),
        "a row and a column": lambda m: gg.where(m.ints(7, 1, below=2), m(33), m(7, 33)),
        "all smaller": lambda m: gg.where(m.ints(5, 1, 1, below=2), m(1, 4, 1), m(3)),
        "a scalar": lambda m: gg.where(m.ints(7, 33, below=2), m(), m(7, 33)),
        "large": lambda m: gg.where(m.ints(150, 131, below=2), m(150, 131), m(131)),
        "empty": lambda m: gg.where(m.ints(0, 3, below=2), m(0, 3), m(1, 3)),
    },
    "maximum": apart(gg.maximum),
    "minimum": apart(gg.minimum),
    "larger_back": {
        "same shapes": lambda m: gg.larger_back(m(7, 33), m(7, 33), m(7, 33)),
        "a row": lambda m: gg.larger_back(m(7, 33), m(7, 33), m(33)),
        "a column": lambda m: gg.larger_back(m(7, 33), m(7, 1), m(7, 33)),
        "equals": lambda m: gg.larger_back(
            m(5), m.of([1, 2, 3, 4, 5.0], param=False), m.of([1, 3, 2, 4, 5.0], param=False)
        ),
        "large": lambda m: gg.larger_back(m(150, 131), m(150, 131), m(150, 131)),
        "empty": lambda m: gg.larger_back(m(0, 3), m(0, 3), m(0, 3)),
    },
    "pow": made(BINARY, turned(POWER))
    | {
        "of negatives": lambda m: gg.pow(m(5, 7, low=-3.0, high=-0.5), m.of([[-3.0, -2, 0, 1, 2, 3, 5]], param=False)),
        "special": lambda m: gg.pow(
            m.of([0.0, 0.0, 0.0, -1.0, 1.0, float("inf"), -8.0, 1e30], param=False),
            m.of([0.0, 2.0, -1.0, 0.5, float("nan"), -1.0, 3.0, 2.0], param=False),
        ),
    },
    "floor_divide": made(INTS, gg.floor_divide),
    "remainder": made(INTS, gg.remainder),
}  # fmt: skip

for _name in ("equal", "not_equal", "less", "less_equal"):
    CASES[_name] = made(BINARY, getattr(gg, _name)) | made(INTS, getattr(gg, _name), "i32, ")
    _op = getattr(gg, _name)
    CASES[_name]["NaN"] = lambda m, op=_op: op(
        m.of([1.0, float("nan"), float("nan"), -0.0, float("inf")], param=False),
        m.of([float("nan"), float("nan"), 1.0, 0.0, float("inf")], param=False),
    )
for _name in ("logical_and", "logical_or", "logical_xor"):
    CASES[_name] = made(INTS, getattr(gg, _name))
for _name in ("add", "sub", "mul"):
    CASES[_name] = made(INTS, getattr(gg, _name), "i32, ")

SPECIAL = [1.0, float("nan"), float("inf"), -float("inf"), 0.0]

COMPOSED = {
    "atan2": {
        "all quarters": lambda m: gg.atan2(m(7, 33), m(7, 33)),
        "on the axes": lambda m: gg.atan2(m.of([0.0, 0, 1, -1, 0], param=False), m.of([1.0, -1, 0, 0, 0], param=False)),
    },
    "fmod": {"a matrix": lambda m: gg.fmod(m(5, 7, low=3.1, high=3.9), m(5, 7, low=1.97, high=2.0))},
    "greater": {"a matrix": lambda m: gg.greater(m(5, 7), m(7))},
    "greater_equal": {"a matrix": lambda m: gg.greater_equal(m(5, 7), m(7))},
    "hypot": {"a matrix": lambda m: gg.hypot(m(5, 7), m(7))},
    "isfinite": {"special": lambda m: gg.isfinite(m.of(SPECIAL, param=False))},
    "isinf": {"special": lambda m: gg.isinf(m.of(SPECIAL, param=False))},
    "isnan": {"special": lambda m: gg.isnan(m.of(SPECIAL, param=False))},
    "lerp": {
        "a number": lambda m: gg.lerp(m(5, 7), m(5, 7), 0.3),
        "a tensor": lambda m: gg.lerp(m(5, 7), m(5, 7), m(7)),
    },
    "logaddexp": {"a matrix": lambda m: gg.logaddexp(m(5, 7), m(7))},
    "logical_not": {"a matrix": lambda m: gg.logical_not(m.ints(5, 7, below=2))},
    "masked_fill": {"a row of the mask": lambda m: gg.masked_fill(m(5, 7), m.ints(7, below=2), -1.5)},
    "xlogy": {"a matrix": lambda m: gg.xlogy(m(5, 7), m(5, 7, low=0.5))},
}
