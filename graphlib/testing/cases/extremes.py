"""Extremes, spread and softmax along axes; elements by index and in order; and arrays put together."""

import ggrad as gg

from .composed import apart

COMPOSED = {
    "amax": {
        "of all": lambda m: gg.amax(apart(m, 3, 4, 5)),
        "along the first": lambda m: gg.amax(apart(m, 3, 4, 5), 0),
        "along two": lambda m: gg.amax(apart(m, 3, 4, 5), (0, -1), keepdims=True),
    },
    "amin": {"along a middle one": lambda m: gg.amin(apart(m, 3, 4, 5), 1)},
    "argmin": {"rows": lambda m: gg.argmin(apart(m, 3, 7))},
    "eye": {"square": lambda m: gg.eye(3), "wide": lambda m: gg.eye(2, 4)},
    "flip": {"all": lambda m: gg.flip(m(3, 4)), "one axis": lambda m: gg.flip(m(3, 4, 5), 1)},
    "full": {"a matrix": lambda m: gg.full((2, 3), 1.5)},
    "gather": {"rows": lambda m: gg.gather(m(3, 5), 1, m.ints(3, 4, below=5))},
    "index_add": {
        "rows": lambda m: gg.index_add(m(5, 3), 0, m.ints(7, below=5), m(7, 3)),
        "a middle axis": lambda m: gg.index_add(m(2, 5, 3), 1, m.ints(4, below=5), m(2, 4, 3)),
    },
    "linspace": {"five": lambda m: gg.linspace(-1.0, 1.0, 5)},
    "log_softmax": {
        "rows": lambda m: gg.log_softmax(m(3, 7)),
        "columns": lambda m: gg.log_softmax(m(2, 5, 3), 1),
    },
    "logsumexp": {
        "rows": lambda m: gg.logsumexp(m(3, 7), -1),
        "two axes": lambda m: gg.logsumexp(m(2, 5, 3), (0, 2), keepdims=True),
        "nothing there": lambda m: gg.logsumexp(m.of([[float("-inf")] * 3, [0.0, 1.0, 2.0]], param=False), 1),
    },
    "mean": {
        "of all": lambda m: gg.mean(m(3, 5)),
        "rows": lambda m: gg.mean(m(3, 5), -1),
        "two axes": lambda m: gg.mean(m(2, 5, 3), (0, 2), keepdims=True),
    },
    "prod": {
        "of all": lambda m: gg.prod(m(3, 5)),
        "columns": lambda m: gg.prod(m(2, 5, 3), 1, keepdims=True),
        "with zeros": lambda m: gg.prod(m.of([[2.0, 0.0, 3.0], [0.0, 1.0, 0.0]]), -1),
    },
    "max": {"of all": lambda m: gg.max(apart(m, 3, 4)), "along an axis": lambda m: gg.max(apart(m, 3, 4, 5), 1)},
    "min": {"of all": lambda m: gg.min(apart(m, 3, 4)), "along an axis": lambda m: gg.min(apart(m, 3, 4, 5), 0)},
    "one_hot": {"a matrix of ids": lambda m: gg.one_hot(m.ints(2, 3, below=4), 4)},
    "ones": {"a matrix": lambda m: gg.ones((2, 3))},
    "ones_like": {"a matrix": lambda m: gg.ones_like(m(2, 3))},
    "scatter_add": {
        "rows": lambda m: gg.scatter_add(m(3, 5), 1, m.ints(3, 7, below=5), m(3, 7)),
        "columns": lambda m: gg.scatter_add(m(2, 5, 3), 1, m.ints(2, 4, 3, below=5), m(2, 4, 3)),
    },
    "softmax": {"rows": lambda m: gg.softmax(m(3, 7)), "columns": lambda m: gg.softmax(m(2, 5, 3), 1)},
    "sort": {
        "rows": lambda m: gg.sort(apart(m, 3, 7)),
        "columns, the largest first": lambda m: gg.sort(apart(m, 7, 3), 0, descending=True),
    },
    "stack": {"first": lambda m: gg.stack([m(3, 4), m(3, 4)]), "last": lambda m: gg.stack([m(3, 4), m(3, 4)], -1)},
    "std": {"rows": lambda m: gg.std(m(3, 7), -1)},
    "take_along_axis": {
        "rows": lambda m: gg.take_along_axis(m(3, 5), m.ints(3, 7, below=5)),
        "a middle axis": lambda m: gg.take_along_axis(m(2, 5, 3), m.ints(2, 4, 3, below=5), 1),
    },
    "var": {
        "of all": lambda m: gg.var(m(3, 4, 5)),
        "NumPy's": lambda m: gg.var(m(3, 4, 5), (0, 2), correction=0, keepdims=True),
    },
    "zeros": {"a matrix": lambda m: gg.zeros((2, 3))},
    "zeros_like": {"a matrix": lambda m: gg.zeros_like(m(2, 3))},
}
