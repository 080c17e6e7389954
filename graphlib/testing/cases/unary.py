"""Functions of one element, and their gradients."""

import ggrad as gg

ATTRS = {
    "leaky_relu": {"negative_slope": 0.2},
    "clamp": {"min": -0.75, "max": 1.25},
    "xielu": {"alpha_n": 0.8, "alpha_p": 0.3, "beta": 0.4, "eps": -0.5},
}
POSITIVE = {"sqrt", "log"}
OF_X = ("sqr", "sin", "cos", "abs", "clamp", "leaky_relu", "softplus", "silu", "gelu", "gelu_erf", "gelu_quick")
OF_X += ("sigmoid", "tanh", "elu", "expm1", "hardsigmoid", "hardswish", "xielu")
STEPS = ("sgn", "step", "floor", "ceil", "round", "trunc")
OF_RESULT = ("sqrt", "relu")
RESULTS = {"sqrt": (0.1, 2.0)}

CASES = {}

for _name in (*OF_X, *OF_RESULT, "log", "exp"):
    _op, _attrs = getattr(gg, _name), ATTRS.get(_name, {})
    _low = 0.1 if _name in POSITIVE else -4.0
    CASES[_name] = {
        "4d": lambda m, op=_op, low=_low, attrs=_attrs: op(m(2, 3, 4, 5, low=low, high=4.0), **attrs),
        "odd rows": lambda m, op=_op, low=_low, attrs=_attrs: op(m(7, 33, low=low, high=4.0), **attrs),
        "large": lambda m, op=_op, low=_low, attrs=_attrs: op(m(131, 150, low=low, high=4.0), **attrs),
        "scalar": lambda m, op=_op, low=_low, attrs=_attrs: op(m(low=low), **attrs),
        "empty": lambda m, op=_op, attrs=_attrs: op(m(0, 3), **attrs),
    }

for _name in (*OF_X, *OF_RESULT):
    _op, _attrs = getattr(gg, f"{_name}_back"), ATTRS.get(_name, {})
    _range = dict(zip(("low", "high"), RESULTS.get(_name, (-4.0, 4.0)), strict=True))
    CASES[f"{_name}_back"] = {
        "4d": lambda m, op=_op, r=_range, attrs=_attrs: op(m(2, 3, 4, 5), m(2, 3, 4, 5, **r), **attrs),
        "odd rows": lambda m, op=_op, r=_range, attrs=_attrs: op(m(7, 33), m(7, 33, **r), **attrs),
        "scalar": lambda m, op=_op, r=_range, attrs=_attrs: op(m(), m(**r), **attrs),
        "empty": lambda m, op=_op, attrs=_attrs: op(m(0, 3), m(0, 3), **attrs),
    }

CASES["leaky_relu"]["a slope of 0"] = lambda m: gg.leaky_relu(m(5, 7), negative_slope=0.0)
CASES["leaky_relu"]["a negative slope"] = lambda m: gg.leaky_relu(m(5, 7), negative_slope=-0.5)
CASES["relu"]["at 0"] = lambda m: gg.relu(m.of([[0.0, -0.0, 1.0, -1.0]], param=False))
# at the ends themselves the slope is 1, of both sides
CASES["clamp_back"]["at the ends"] = lambda m: gg.clamp_back(
    m(5), m.of([-0.75, -0.5, 1.25, 1.5, -1.0], param=False), min=-0.75, max=1.25
)
CASES["clamp"]["without a lower end"] = lambda m: gg.clamp(m(5, 7), min=float("-inf"), max=0.5)


def between_jumps(m, *shape):
    """Values that are not within 0.1 of a whole number or of a half."""
    return m.of(m.rng.integers(-4, 4, shape) + m.rng.integers(0, 2, shape) / 2 + m.rng.uniform(0.1, 0.4, shape))


JUMPS = [[-2.5, -1.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.5, 2.5, 0.49999997, -0.49999997]]
WHOLE = [8388607.5, -8388607.5, 8388609.0, 3e9, -3e38]  # from 2^23 on all numbers are

for _op in (getattr(gg, name) for name in STEPS):
    CASES[_op.name] = {
        "4d": lambda m, op=_op: op(between_jumps(m, 2, 3, 4, 5)),
        "large": lambda m, op=_op: op(between_jumps(m, 131, 150)),
        "on the jumps": lambda m, op=_op: op(m.of(JUMPS, param=False)),
        "without a fraction": lambda m, op=_op: op(m.of(WHOLE, param=False)),
        "scalar": lambda m, op=_op: op(between_jumps(m)),
        "empty": lambda m, op=_op: op(m(0, 3)),
    }

CASES["expm1"]["near 0"] = lambda m: gg.expm1(m(5, 7, low=-1e-4, high=1e-4))
CASES["expm1"]["above 20"] = lambda m: gg.expm1(m(5, 7, low=15.0, high=25.0))
CASES["hardswish"]["at the ends"] = lambda m: gg.hardswish(m.of([[-3.0, 3.0, -3.5, 3.5, 0.0]], param=False))
CASES["xielu"]["eps as in ggml"] = lambda m: gg.xielu(m(5, 7), alpha_n=0.8, alpha_p=0.8)

MORE = {  # where they are tried
    "exp2": (-4.0, 4.0), "log2": (0.1, 4.0), "log1p": (-0.9, 4.0), "erf": (-3.0, 3.0), "tan": (-1.4, 1.4),
    "asin": (-0.95, 0.95), "acos": (-0.95, 0.95), "atan": (-4.0, 4.0), "sinh": (-3.0, 3.0), "cosh": (-3.0, 3.0),
    "asinh": (-4.0, 4.0), "acosh": (1.1, 5.0), "atanh": (-0.95, 0.95),
}  # fmt: skip

for _name, (_low, _high) in MORE.items():
    _op, _range = getattr(gg, _name), {"low": _low, "high": _high}
    CASES[_name] = {
        "4d": lambda m, op=_op, r=_range: op(m(2, 3, 4, 5, **r)),
        "odd rows": lambda m, op=_op, r=_range: op(m(7, 33, **r)),
        "large": lambda m, op=_op, r=_range: op(m(131, 150, **r)),
        "scalar": lambda m, op=_op, r=_range: op(m(**r)),
        "empty": lambda m, op=_op: op(m(0, 3)),
    }

COMPOSED = {
    name: {"a matrix": lambda m, name=name: getattr(gg, name)(m(5, 7, low=0.3, high=3.0))}
    for name in ("log10", "rsqrt", "reciprocal")
} | {
    name: {"a matrix": lambda m, name=name: getattr(gg, name)(m(5, 7, low=-4.0, high=4.0))}
    for name in ("mish", "selu", "celu", "logsigmoid", "hardtanh", "relu6", "softsign", "tanhshrink")
}
