"""Two operands, and one times a number."""

import ggrad as gg

BINARY = {
    "same shapes": lambda op: lambda m: op(m(2, 3, 4, 5), m(2, 3, 4, 5, low=0.5)),
    "a row": lambda op: lambda m: op(m(7, 33), m(33, low=0.5)),
    "a column": lambda op: lambda m: op(m(7, 33), m(7, 1, low=0.5)),
    "the left one smaller": lambda op: lambda m: op(m(1, 33), m(7, 33, low=0.5)),
    "each smaller along one axis": lambda op: lambda m: op(m(5, 1, 3), m(1, 4, 3, low=0.5)),
    "tiles": lambda op: lambda m: op(m(6, 8), m(2, 4, low=0.5), tile=True),
    "large": lambda op: lambda m: op(m(150, 131), m(150, 131, low=0.5)),
    "large, a row": lambda op: lambda m: op(m(2, 75, 131), m(75, 131, low=0.5)),
    "two axes of size 1": lambda op: lambda m: op(m(5, 1, 3, 1), m(5, 4, 3, 7, low=0.5)),
    "scalars": lambda op: lambda m: op(m(), m(low=0.5)),
    "empty": lambda op: lambda m: op(m(0, 3), m(0, 3)),
    "empty and a row": lambda op: lambda m: op(m(0, 3), m(1, 3)),
}

CASES = {
    name: {case: make(getattr(gg, name)) for case, make in BINARY.items()} for name in ("add", "sub", "mul", "div")
} | {
    "scale": {
        "by a negative": lambda m: gg.scale(m(3, 17), factor=-0.5),
        "and a bias": lambda m: gg.scale(m(2, 3, 4, 5), factor=2.0, bias=1.5),
        "empty": lambda m: gg.scale(m(0), factor=2.0),
    },
    "neg": {"4d": lambda m: gg.neg(m(2, 3, 4, 5)), "scalar": lambda m: gg.neg(m()), "empty": lambda m: gg.neg(m(0, 3))},
}
