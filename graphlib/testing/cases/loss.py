"""Cross entropy."""

import numpy as np

import ggrad as gg

INF, NAN = np.inf, np.nan
IGNORED = -100


def classes(m, *shape, below, ignored=()):
    """Targets, some rows of them ignored."""
    values = m.rng.integers(0, below, shape)
    values.reshape(-1)[list(ignored)] = IGNORED
    return m.of(values, dtype=gg.I32, param=False)


def labels(m, *shape):
    """Probabilities whose rows do not sum to 1, with zeros among them."""
    values = m.rng.uniform(-0.5, 1, shape)
    return m.of(np.maximum(values, 0))


def class_weights(m, n):
    """One of them 0."""
    return m.of([0.0, *m.rng.uniform(0.5, 2, n - 1)], param=False)


def back(m, *shape, ignored=(), dlse=False, each=False, weighed=False, **options):
    rows = shape[:-1]
    logits, targets = m(*shape), classes(m, *rows, below=shape[-1], ignored=ignored)
    _, top, total, _ = gg.cross_entropy_class(logits, targets)
    return gg.cross_entropy_class_back(
        m(*rows) if each else m(), logits, targets, top, total, m(low=0.1), m(*rows) if dlse else None,
        class_weights(m, shape[-1]) if weighed else None, **options,
    )  # fmt: skip


def soft_back(m, *shape, dlse=False, each=False, **options):
    logits, given = m(*shape), labels(m, *shape)
    _, top, total = gg.cross_entropy_soft(logits, given)
    dloss = m(*shape[:-1]) if each else m()
    return gg.cross_entropy_soft_back(dloss, logits, given, top, total, m(*shape[:-1]) if dlse else None, **options)


def sure(m):
    logits, targets = m.of([[9.0, -7.0, -8.0], [-6.0, 0.5, 12.0]]), m.of([0, 2], dtype=gg.I32, param=False)
    _, top, total, weight = gg.cross_entropy_class(logits, targets)
    return gg.cross_entropy_class_back(m(), logits, targets, top, total, weight)


def hard(*arguments, **options):
    """The loss alone: what depends on the logits of the other results is used together only."""
    return gg.cross_entropy_class(*arguments, **options)[0]


def soft(*arguments, **options):
    return gg.cross_entropy_soft(*arguments, **options)[0]


def known_square(m, *shape):
    x = m(*shape)
    return gg.known_gradients(gg.sqr(x), x, m.ints(below=2), known=lambda dout: [2.0 * x * dout])


WITH_INF = [[1.0, -INF, 2.0, 0.5], [0.25, 0.5, -INF, -INF]]

CASES = {
    "cross_entropy_class": {
        "rows": lambda m: hard(m(5, 17), classes(m, 5, below=17)),
        "4d": lambda m: hard(m(2, 3, 4, 33), classes(m, 2, 3, 4, below=33)),
        "some ignored": lambda m: hard(m(2, 5, 7), classes(m, 2, 5, below=7, ignored=(1, 2, 9))),
        "all ignored": lambda m: hard(m(3, 7), classes(m, 3, below=7, ignored=(0, 1, 2))),
        "all ignored, sum": lambda m: hard(m(3, 7), classes(m, 3, below=7, ignored=(0, 1, 2)), reduction="sum"),
        "sum": lambda m: hard(m(5, 17), classes(m, 5, below=17, ignored=(3,)), reduction="sum"),
        "another ignore_index": lambda m: hard(m(5, 7), m.ints(5, below=7), ignore_index=3),
        "NaN ignored": lambda m: hard(
            m.of([[NAN, 1], [2, 3]], param=False), m.of([IGNORED, 1], dtype=gg.I32, param=False)
        ),
        "NaN counted": lambda m: hard(
            m.of([[NAN, 1], [2, 3]], param=False), m.of([1, IGNORED], dtype=gg.I32, param=False)
        ),
        "-inf elsewhere": lambda m: hard(m.of(WITH_INF, param=False), m.of([2, 0], dtype=gg.I32, param=False)),
        "large logits": lambda m: hard(m(4, 9, low=-1000.0, high=1000.0, param=False), classes(m, 4, below=9)),
        "many rows": lambda m: hard(m(301, 67), classes(m, 301, below=67, ignored=range(0, 301, 3))),
        "a large vocabulary": lambda m: hard(m(3, 5003, low=-9.0, high=9.0), classes(m, 3, below=5003)),
        "each row": lambda m: hard(m(2, 5, 17), classes(m, 2, 5, below=17, ignored=(3,)), reduction="none"),
        "smoothed": lambda m: hard(m(5, 37), classes(m, 5, below=37, ignored=(3,)), label_smoothing=0.1),
        "weights": lambda m: hard(m(5, 17), classes(m, 5, below=17, ignored=(1,)), class_weights(m, 17)),
        "weights, smoothed": lambda m: hard(
            m(5, 37), classes(m, 5, below=37), class_weights(m, 37), label_smoothing=0.3, reduction="sum"
        ),
        "nothing but what smoothing gives": lambda m: hard(m(5, 7), classes(m, 5, below=7), label_smoothing=1.0),
        "weights of 0 alone": lambda m: hard(
            m(2, 3), m.of([0, 0], dtype=gg.I32, param=False), m.of([0.0, 1, 1], param=False)
        ),
        "-inf, smoothed": lambda m: hard(
            m.of(WITH_INF, param=False), m.of([2, 0], dtype=gg.I32, param=False), label_smoothing=0.1
        ),
        "one row": lambda m: hard(m(9), classes(m, below=9)),
        "one class": lambda m: hard(m(4, 1), classes(m, 4, below=1)),
        "no rows": lambda m: hard(m(0, 5), classes(m, 0, below=5)),
        "no classes": lambda m: hard(m(2, 0), classes(m, 2, below=1, ignored=(0, 1))),
    },
    "cross_entropy_class_back": {
        "rows": lambda m: back(m, 5, 17),
        "4d": lambda m: back(m, 2, 3, 4, 33, ignored=(0, 7, 23)),
        "through lse": lambda m: back(m, 2, 5, 17, ignored=(3,), dlse=True),
        "each row": lambda m: back(m, 2, 5, 17, ignored=(3,), each=True),
        "smoothed": lambda m: back(m, 5, 37, ignored=(3,), label_smoothing=0.1),
        "weights": lambda m: back(m, 5, 17, ignored=(3,), weighed=True),
        "weights, smoothed, through lse": lambda m: back(
            m, 5, 37, ignored=(3,), weighed=True, dlse=True, each=True, label_smoothing=0.3
        ),
        "all ignored": lambda m: back(m, 3, 7, ignored=(0, 1, 2)),
        "many rows": lambda m: back(m, 301, 67, ignored=range(0, 301, 3)),
        "one row": lambda m: back(m, 1, 9),
        "one class": lambda m: back(m, 4, 1),
        "no rows": lambda m: back(m, 0, 5),
        "a target that has nearly all": sure,
        "no classes": lambda m: gg.cross_entropy_class_back(
            m(), m(2, 0), m.of([IGNORED] * 2, dtype=gg.I32, param=False), m(2), m(2, low=1.0), m()
        ),
    },
    "known_gradients": {
        "a square": lambda m: known_square(m, 5, 7),
        "nothing": lambda m: known_square(m, 0, 7),
    },
    "cross_entropy_soft": {
        "rows": lambda m: soft(m(5, 17), labels(m, 5, 17)),
        "4d": lambda m: soft(m(2, 3, 4, 33), labels(m, 2, 3, 4, 33)),
        "sum": lambda m: soft(m(5, 17), labels(m, 5, 17), reduction="sum"),
        "each row": lambda m: soft(m(2, 5, 17), labels(m, 2, 5, 17), reduction="none"),
        "-inf where the label is 0": lambda m: soft(
            m.of(WITH_INF, param=False), m.of([[0.5, 0, 0.25, 0.25], [1, 0, 0, 0]], param=False)
        ),
        "-inf where it is not": lambda m: soft(
            m.of(WITH_INF, param=False), m.of([[0.5, 0.5, 0, 0], [1, 0, 0, 0]], param=False)
        ),
        "NaN": lambda m: soft(m.of([[NAN, 1.0]], param=False), m.of([[0, 1.0]], param=False)),
        "many rows": lambda m: soft(m(301, 67), labels(m, 301, 67)),
        "a large vocabulary": lambda m: soft(m(3, 5003, low=-9.0, high=9.0), labels(m, 3, 5003)),
        "one row": lambda m: soft(m(9), labels(m, 9)),
        "one class": lambda m: soft(m(4, 1), labels(m, 4, 1)),
        "no rows": lambda m: soft(m(0, 5), labels(m, 0, 5)),
        "no classes": lambda m: soft(m(2, 0, param=False), m(2, 0, param=False)),
    },
    "cross_entropy_soft_back": {
        "rows": lambda m: soft_back(m, 5, 17),
        "4d": lambda m: soft_back(m, 2, 3, 4, 33),
        "through lse": lambda m: soft_back(m, 2, 5, 7, dlse=True),
        "each row": lambda m: soft_back(m, 2, 5, 17, each=True),
        "sum": lambda m: soft_back(m, 5, 17, mean=False),
        "many rows": lambda m: soft_back(m, 301, 67),
        "one class": lambda m: soft_back(m, 4, 1),
        "no rows": lambda m: soft_back(m, 0, 5),
        "no classes": lambda m: soft_back(m, 2, 0),
    },
}

# Of their gradients by the total, dloss and weight: the terms of those sums cancel each other.
RTOL = {"cross_entropy_class_back": 1e-4, "cross_entropy_soft_back": 3e-5}
