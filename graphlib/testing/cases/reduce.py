"""Sums, means and the place of the largest."""

import ggrad as gg

ROWS = {
    "4d": lambda op: lambda m: op(m(2, 3, 4, 5)),
    "odd rows": lambda op: lambda m: op(m(7, 33)),
    "of one element": lambda op: lambda m: op(m(7, 1)),
    "one long row": lambda op: lambda m: op(m(1, 20011)),
    "many rows": lambda op: lambda m: op(m(301, 67)),
    "empty": lambda op: lambda m: op(m(0, 3)),
}

CASES = {
    name: {case: make(getattr(gg, name)) for case, make in ROWS.items()} for name in ("sum_rows", "mean_rows", "argmax")
}
CASES["sum"] = {
    "4d": lambda m: gg.sum(m(2, 3, 4, 5)),
    "a scalar": lambda m: gg.sum(m()),
    "long": lambda m: gg.sum(m(40009)),
    "wide": lambda m: gg.sum(m(150, 301)),
    "empty": lambda m: gg.sum(m(3, 0)),
}
CASES["argmax"] |= {
    "equals": lambda m: gg.argmax(m.of([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -3.0, -1.0, -2.0]])),
    "infinite": lambda m: gg.argmax(m.of([[float("-inf")] * 20, [float("-inf")] * 19 + [float("inf")]])),
    "a vector": lambda m: gg.argmax(m(40)),
}
CASES["repeat_back"] = {
    "sums along the first axis": lambda m: gg.sum(m(3, 4, 5), axis=0, keepdims=True),
    "sums along two axes": lambda m: gg.sum(m(3, 4, 5), axis=(0, -1), keepdims=True),
}
CASES["cumsum"] = {
    "4d": lambda m: gg.cumsum(m(2, 3, 4, 5)),
    "along the first axis": lambda m: gg.cumsum(m(7, 3, 2, 5), axis=0),
    "along a middle axis": lambda m: gg.cumsum(m(2, 7, 3, 37), axis=1),
    "along rows, from the last": lambda m: gg.cumsum(m(5, 20), axis=-2, reverse=True),
    "one long row": lambda m: gg.cumsum(m(20011)),
    "many rows": lambda m: gg.cumsum(m(301, 67)),
    "many columns": lambda m: gg.cumsum(m(67, 301), axis=0),
    "rows of one": lambda m: gg.cumsum(m(7, 1)),
    "empty": lambda m: gg.cumsum(m(0, 3)),
}
CASES["count_equal"] = {
    "2d": lambda m: gg.count_equal(m.ints(7, 33, below=3), m.ints(7, 33, below=3)),
    "large": lambda m: gg.count_equal(m.ints(150, 301, below=9), m.ints(150, 301, below=9)),
    "scalars": lambda m: gg.count_equal(m.ints(below=1), m.ints(below=1)),
    "empty": lambda m: gg.count_equal(m.ints(0, 3, below=3), m.ints(0, 3, below=3)),
}
