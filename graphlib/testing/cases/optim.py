"""Optimizer steps and the norm that gradients are clipped by."""

import numpy as np

import ggrad as gg

HYPER = [0.01, 0.9, 0.999, 1e-8, 0.1, 1 / (1 - 0.9**3), 1 / (1 - 0.999**3)]
INF, NAN = np.inf, np.nan


def adamw(m, *shape, factor=None):
    moments = m.leaf(*shape, param=False, role="moment"), m.leaf(*shape, low=0.1, param=False, role="moment")
    return gg.opt_step_adamw(
        m.leaf(*shape), m(*shape, param=False), *moments, m.of(HYPER, param=False), _factor(m, factor)
    )


def sgd(m, *shape, factor=None):
    return gg.opt_step_sgd(m.leaf(*shape), m(*shape, param=False), m.of([0.1, 0.01], param=False), _factor(m, factor))


def by_rule(m, *shape, rule, own, states="a", factor=None):
    """A step whose gradient has a part of x, and which shrinks x."""
    given = {n: m.leaf(*shape, low=0.1, param=False, role="moment") for n in states}
    hyper = m.of([0.1, 0.03, 0.02, *own, *[0] * (5 - len(own))], param=False)
    return gg.opt_step(m.leaf(*shape), m(*shape, param=False), hyper, _factor(m, factor), **given, rule=rule)


RULES = {
    "momentum": {"rule": "momentum", "own": [0.9, 0.4]},
    "nesterov": {"rule": "momentum", "own": [0.9, 1.0, 1.0]},
    "adam": {"rule": "adam", "own": [0.9, 0.99, 1e-8, 3.0, 30.0], "states": "ab"},
    "amsgrad": {"rule": "adam", "own": [0.9, 0.99, 1e-8, 3.0, 30.0], "states": "abc"},
    "rmsprop": {"rule": "rmsprop", "own": [0.9, 1e-6]},
    "rmsprop, momentum": {"rule": "rmsprop", "own": [0.9, 1e-6, 0.8], "states": "ac"},
    "adagrad": {"rule": "adagrad", "own": [1e-6]},
    "lion": {"rule": "lion", "own": [0.9, 0.99]},
    "average": {"rule": "average", "own": [0.1], "states": ""},
}


def centered(m):
    """Means of the square that are above the square of the mean."""
    x, mean = m.leaf(5, 7), m.leaf(5, 7, low=-0.3, high=0.3, param=False, role="moment")
    v = m.leaf(5, 7, low=0.5, param=False, role="moment")
    hyper = m.of([0.1, 0, 0, 0.9, 1e-6, 0, 0, 0], param=False)
    return gg.opt_step(x, m(5, 7, param=False), hyper, a=v, b=mean, rule="rmsprop")


def _factor(m, factor):
    return None if factor is None else m.of(factor, param=False)


STEPS = {
    "vector": lambda step: lambda m: step(m, 17),
    "4d": lambda step: lambda m: step(m, 2, 3, 4, 5),
    "scaled": lambda step: lambda m: step(m, 3, 33, factor=0.25),
    "skipped at NaN": lambda step: lambda m: step(m, 3, 5, factor=NAN),
    "skipped at inf": lambda step: lambda m: step(m, 3, 5, factor=INF),
    "several tasks": lambda step: lambda m: step(m, 131, 257),
    "scalar": lambda step: lambda m: step(m),
    "empty": lambda step: lambda m: step(m, 0, 3),
}

CASES = {
    "opt_step_adamw": {name: case(adamw) for name, case in STEPS.items()},
    "opt_step_sgd": {name: case(sgd) for name, case in STEPS.items()},
    "opt_step": {f"{name}, vector": lambda m, rule=rule: by_rule(m, 17, **rule) for name, rule in RULES.items()}
    | {
        "4d": lambda m: by_rule(m, 2, 3, 4, 5, **RULES["adam"]),
        "scaled": lambda m: by_rule(m, 3, 33, **RULES["lion"], factor=0.25),
        "skipped at NaN": lambda m: by_rule(m, 3, 5, **RULES["adagrad"], factor=NAN),
        "several tasks": lambda m: by_rule(m, 131, 257, **RULES["amsgrad"]),
        "scalar": lambda m: by_rule(m, **RULES["momentum"]),
        "centered": centered,
        "empty": lambda m: by_rule(m, 0, 3, **RULES["rmsprop"]),
    },
    "global_norm": {
        "one": lambda m: gg.global_norm(m(3, 17)),
        "several": lambda m: gg.global_norm(m(2, 3, 4, 5), m(), m(33), m(0, 3), m(7, 1)),
        "several tasks": lambda m: gg.global_norm(m(131, 257), m(5), m(20001)),
        "squares beyond f32": lambda m: gg.global_norm(m(3, 7, low=1e30, high=2e30, param=False)),
        "squares below f32": lambda m: gg.global_norm(m(3, 7, low=1e-30, high=2e-30, param=False)),
        "NaN": lambda m: gg.global_norm(m(3, 7, param=False), m.of([1, NAN], param=False)),
        "inf": lambda m: gg.global_norm(m(3, 7, param=False), m.of([1, -INF], param=False)),
        "empty": lambda m: gg.global_norm(m(0, 3, param=False)),
        "nothing": lambda m: gg.global_norm(),
    },
    "opt_step_count": {
        "a step": lambda m: gg.opt_step_count(m.leaf(dtype=gg.I32, param=False), m.of(0.5, param=False)),
        "skipped": lambda m: gg.opt_step_count(m.leaf(dtype=gg.I32, param=False), m.of(NAN, param=False)),
    },
    "clip_factor": {
        "clipped": lambda m: gg.clip_factor(m.of(5.0, param=False), max_norm=2.0),
        "small": lambda m: gg.clip_factor(m.of(0.5, param=False), max_norm=2.0),
        "zero": lambda m: gg.clip_factor(m.of(0.0, param=False), max_norm=2.0),
        "inf": lambda m: gg.clip_factor(m.of(INF, param=False), max_norm=2.0),
        "NaN": lambda m: gg.clip_factor(m.of(NAN, param=False), max_norm=2.0),
    },
}

NO_GRADIENT = {"clip_factor"}
NO_EMPTY = NO_TASKS = {"clip_factor", "opt_step_count"}
