"""Gradients that ggml (0.21.0) gets wrong, or ends the process over: rules against difference quotients, and kernels
against references, with an incoming gradient that is different everywhere and lies as `how` says."""

import numpy as np
import pytest

import ggrad as gg

RNG = np.random.default_rng(0)


def r(*shape):
    return RNG.uniform(-1, 1, shape)


IDS = gg.tensor(np.array([[3, 0, 3], [1, 1, 1]]))  # duplicates
WINDOW = {"strides": (96, 24, 4), "offset": 28}

# name: (what ggml does, function of the parameters, their values)
CASES = {
    "add1": ("the mean instead of the sum", gg.add1, r(4, 5), r(1)),
    "sub, broadcast": ("aborts", lambda a, b: gg.sub(a, b, tile=True), r(4, 6), r(2, 1)),
    "div, broadcast": ("aborts", lambda a, b: gg.div(a, b, tile=True), r(4, 6), r(2, 3) + 2),
    "acc": ("wrong for a transposed gradient", lambda a, b: gg.acc(a, b, **WINDOW), r(3, 4, 6), r(2, 2, 3)),
    "set": ("aborts for a transposed gradient", lambda a, b: gg.set(a, b, **WINDOW), r(3, 4, 6), r(2, 2, 3)),
    "cpy": ("aborts for a transposed gradient", lambda a, b: gg.cpy(a, b), r(4, 6), r(3, 8)),
    "mean, used twice": ("aborts", lambda x: gg.add(gg.sub(x, gg.mean_rows(x)), gg.mean_rows(x)), r(4, 5)),
    "norm": ("aborts", gg.norm, r(4, 5), r(5), r(5)),
    "silu": ("wrong for a transposed gradient", gg.silu, r(4, 5)),
    "soft_max, mask": ("aborts", gg.soft_max, r(2, 4, 5), r(4, 5)),
    "soft_max, alibi": ("aborts", lambda x, mask: gg.soft_max(x, mask, max_bias=8.0), r(6, 4, 5), r(4, 5)),
    "soft_max, sinks": ("crashes", lambda x, sinks: gg.soft_max(x, None, sinks), r(3, 4, 5), r(3)),
    "rope, offset": ("ignores the offset", lambda x: gg.rope(x, np.arange(4), n_dims=4, offset=3), r(4, 2, 8)),
    "rope, factors": (
        "aborts", lambda x, f: gg.rope(x, np.arange(4), f, mode="neox"), r(4, 2, 8), r(4) + 2
    ),
    "view of a view, used twice": (
        "wrong places",
        lambda x: gg.add(gg.view(gg.view(x, (4, 6), (40, 4)), (3, 4), (24, 4)), gg.view(x, (3, 4), (40, 4), 8)),
        r(6, 10),
    ),
    "view beside infinities": (
        "NaN outside of the window",
        lambda x: gg.view(gg.add(x, gg.tensor([0.0, 0.0, np.inf, np.nan])), (2,), (4,)),
        r(4),
    ),
    "get_rows, batched": ("aborts", lambda x: gg.get_rows(x, IDS), r(2, 5, 3)),
    "get_rows, transposed": ("wrong values", lambda x: gg.get_rows(x.T, IDS), r(3, 5)),
    "set_rows": ("aborts", lambda a, b: gg.set_rows(a, b, IDS), r(2, 5, 3), r(2, 3, 3)),
    "mul_mat, second operand transposed": ("aborts", lambda a, b: gg.mul_mat(a, b.T), r(4, 5), r(5, 3)),
    "mul_mat, first operand broadcast": ("aborts", gg.mul_mat, r(1, 2, 4, 5), r(2, 4, 3, 5)),
    "clamp": ("aborts", lambda x: gg.clamp(x, -0.5, 0.5), r(4, 5)),
    "concat": ("aborts", lambda a, b: gg.concat(a, b, axis=0), r(2, 3), r(4, 3)),
    "roll": ("aborts", lambda x: gg.roll(x, (1, -2)), r(4, 5)),
    "pad_circular": ("aborts", lambda x: gg.pad_circular(x, (1, 2), (5, 0)), r(4, 5)),
    "pad_reflect_1d": ("aborts", lambda x: gg.pad_reflect_1d(x, 3, 2), r(4, 5)),
    "cumsum": ("aborts", gg.cumsum, r(4, 5)),
    "diag": ("aborts", gg.diag, r(2, 1, 5)),
    "tri": ("aborts", gg.tri, r(2, 5, 5)),
    "group_norm": ("aborts", lambda x: gg.group_norm(x, 2), r(2, 5, 3, 2)),
    "l2_norm": ("aborts", gg.l2_norm, r(4, 5)),
    "swiglu, one tensor": ("aborts", gg.swiglu, r(4, 6)),
    "swiglu_oai": ("aborts", lambda a, b: gg.swiglu_oai(a, b, 1.7, 0.6), r(4, 5), r(4, 5)),
    "gelu": ("aborts", gg.gelu, r(4, 5)),
    "custom": ("aborts", lambda x: gg.map_custom1(x, np.sin, lambda dout, x: dout * np.cos(x)), r(4, 5)),
}  # fmt: skip

HOW = {
    "as it is": lambda t: t,
    "transposed": lambda t: gg.transpose(t) if t.ndim > 1 else t,
    "reversed": lambda t: t[(slice(None, None, -1),) * t.ndim],
    "added to itself": lambda t: gg.add(t, t),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_the_derivative(name, how):
    _, function, *values = CASES[name]
    gg.testing.check_gradients(lambda *params: HOW[how](function(*params)), *values)


@pytest.mark.native
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree(name, how):
    _, function, *values = CASES[name]
    gg.testing.check_kernel(lambda *params: HOW[how](function(*params)), *values, threads=(1, 3), backward=True)


@pytest.mark.parametrize("name", ["norm", "silu", "soft_max, sinks", "rope, offset"])
def test_an_incoming_gradient_of_stride_0_is_right_too(name):
    _, function, *values = CASES[name]
    gg.testing.check_gradients(lambda *params: gg.mean(function(*params)), *values)
    gg.testing.check_kernel(lambda *params: gg.mean(function(*params)), *values, threads=(1, 3), backward=True)
