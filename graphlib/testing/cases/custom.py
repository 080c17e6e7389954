"""Functions of the user's."""

import numpy as np

import ggrad as gg


def distance(a, b):
    return np.sqrt(((a - b) ** 2).sum(axis=-1))


def distance_back(dout, a, b):
    da = (dout / distance(a, b))[..., None] * (a - b)
    return da, -da


def shifted(x, places):
    return x[..., places]


def shifted_back(dout, x, places):
    dx = np.zeros_like(x)
    np.add.at(dx, (..., places), dout)
    return dx, None


CASES = {
    "custom": {
        "one input": lambda m: gg.map_custom1(m(3, 5), np.tanh, lambda dout, x: dout / np.cosh(x) ** 2),
        "two inputs": lambda m: gg.custom(m(3, 5), m(3, 5), function=distance, shape=(3,), grad=distance_back),
        "an input without a gradient": lambda m: gg.custom(
            m(2, 5), m.ints(7, below=5), function=shifted, shape=(2, 7), grad=shifted_back
        ),
        "three inputs, one of them alone": lambda m: gg.map_custom3(
            m(4), m(4, param=False), m(4), lambda a, b, c: a * b + c, lambda dout, a, b, c: (dout * b, dout * a, dout)
        ),
        "integers": lambda m: gg.custom(
            m(3, 5, param=False), function=lambda x: x.argmin(-1), shape=(3,), dtype=gg.I32
        ),
        "a scalar": lambda m: gg.custom(m(3, 5), function=np.sum, shape=(), grad=lambda dout, x: dout + 0 * x),
        "halves in and out": lambda m: gg.custom(
            m(3, 5, dtype=gg.BF16), function=lambda x: x + 1, shape=(3, 5), dtype=gg.F16, grad=lambda dout, x: dout
        ),
        "empty": lambda m: gg.map_custom2(m(0, 3), m(2), lambda a, b: a, lambda dout, a, b: (dout, None)),
    },
    "custom_back": {
        "two inputs": lambda m: gg.custom_back(m(3), m(3, 5), m(3, 5), function=distance_back, wanted=(0, 1)),
        "one of two": lambda m: gg.custom_back(m(3), m(3, 5), m(3, 5), function=distance_back, wanted=(1,)),
        "none given": lambda m: gg.custom_back(m(3), m(5), function=lambda dout, x: None, wanted=(0,)),
        "empty": lambda m: gg.custom_back(m(0), m(0), function=lambda dout, x: dout, wanted=(0,)),
    },
}
NO_GRADIENT = {"custom_back"}
NO_TASKS = {"custom", "custom_back"}
