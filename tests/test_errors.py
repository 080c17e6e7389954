"""Bad input is refused while the graph is built: the op, its arguments with their shapes, and the rule are named.

TABLE says for every op what is refused and how; a test fails for an op that is not there.  Then every input of
every op is replaced by inputs of other shapes and dtypes: what is not refused must be computed rightly.
"""

import contextlib
import re

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GgradError, IndexRangeError, ShapeError
from ggrad.core.op import part, registry
from ggrad.mimic import fla, npu
from ggrad.ops import collective
from ggrad.ops.kda import BetaForm, Form, Gate
from ggrad.testing import compare_with_reference
from ggrad.testing.cases import CASES, RTOL
from ggrad.testing.maker import Maker


def f(*shape, **options):
    """A float constant."""
    return gg.tensor(np.ones(shape), **options)


def i(*shape):
    """An integer constant."""
    return gg.tensor(np.zeros(shape, np.int32))


def mla(q=None, ori_kv=..., **options):
    """Five tokens of two heads."""
    return gg.sparse_flash_mla(
        f(1, 5, 2, 4) if q is None else q, ori_kv=f(1, 5, 1, 4) if ori_kv is ... else ori_kv, **options
    )


def q(*shape):
    """A quantized constant."""
    return gg.tensor(shape=shape, dtype=gg.Q4_0)


ONE = gg.distributed.Comm()  # a group of one rank


def refused(call, message, error=ShapeError):
    return call, message, error


BINARY = [
    (lambda op: op(f(3, 4), f(3, 5)), r"\(a=f32\[3,4\], b=f32\[3,5\]\): .*\(3, 4\) and \(3, 5\) do not fit"),
    (lambda op: op(f(4), i(4)), r"\(a=f32\[4\], b=i32\[4\]\): (b is i32, and must be f32|dtypes differ; gg.cast)"),
    (lambda op: op(f(0, 3), f(2, 3)), r".*do not fit"),
    (lambda op: op(f(2, 16, 8, 8), f(16)), r".*sizes are equal or one is 1; tile=True, or gg.repeat, would repeat"),
    (lambda op: op(f(6, 4), f(4, 4), tile=True), r".*\(6, 4\) and \(4, 4\) do not fit"),
]
FLOATS = [
    (lambda op: op(f(3, 4), f(3, 5)), r"\(a=f32\[3,4\], b=f32\[3,5\]\): .*\(3, 4\), \(3, 5\) do not fit"),
    (lambda op: op(f(4), i(4)), r"\(a=f32\[4\], b=i32\[4\]\): b is i32, and must be f32"),
]
COMPARISON = [FLOATS[0], (lambda op: op(f(4), i(4)), r"\(a=f32\[4\], b=i32\[4\]\): dtypes differ; gg.cast")]
INTS = [
    (lambda op: op(i(3, 4), i(3, 5)), r"\(a=i32\[3,4\], b=i32\[3,5\]\): .*do not fit"),
    (lambda op: op(i(4), f(4)), r"\(a=i32\[4\], b=f32\[4\]\): b is f32, and must be i32"),
]
UNARY = [(lambda op: op(i(4)), r"\(x=i32\[4\]\): x is i32, and must be f32")]
UNARY_WITH_SLOPE = [
    "abs",
    "cos",
    "elu",
    "gelu",
    "gelu_erf",
    "gelu_quick",
    "leaky_relu",
    "relu",
    "sigmoid",
    "silu",
    "sin",
]
UNARY_WITH_SLOPE += ["expm1", "hardsigmoid", "hardswish"]
UNARY_WITH_SLOPE += ["softplus", "sqr", "sqrt", "tanh"]  # with an op of their own for the gradient
GATED = ["swiglu", "geglu", "geglu_erf", "geglu_quick", "reglu", "swiglu_oai"]
ROWS = [*UNARY, (lambda op: op(f()), r"\(x=f32\[\]\): a scalar has no ")]


def same(names, checks):
    """One list of checks for several ops, whose name the message begins with."""
    return {
        name: [refused(lambda c=call, n=name: c(getattr(gg, n)), f"^{name}{message}") for call, message in checks]
        for name in names
    }


def kda(op=None, *, B=1, H=2, HV=None, K=4, **given):
    """A call of Kimi Delta Attention that is right but for what is given."""
    HV = HV or H
    inputs = {"q": f(B, 5, H, K), "k": f(B, 5, H, K), "v": f(B, 5, HV, 3), "g": f(B, 5, HV, K), "beta": f(B, 5, HV)}
    return (op or gg.kda)(**inputs | given)


def kda_back(needs=31, **given):
    form = Form(1.0, False, Gate.GIVEN, 0.0, BetaForm.GIVEN, False)
    return kda(lambda **inputs: gg.kda_back(**inputs, form=form, chunk_size=64, needs=needs), **given)


def pooled(pool, slots, accepted=None):
    return kda(gg.kda_recurrent, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=accepted)


TABLE = {
    **same(["add", "sub", "mul", "div"], BINARY),
    **same(["neg", "sum"], UNARY),
    **same(["exp2", "log2", "log1p", "erf", "tan", "asin", "acos", "atan"], UNARY),
    **same(["sinh", "cosh", "asinh", "acosh", "atanh"], UNARY),
    **same(["maximum", "minimum"], FLOATS),
    **same(["equal", "not_equal", "less", "less_equal"], COMPARISON),
    **same(["logical_and", "logical_or", "logical_xor", "floor_divide", "remainder"], INTS),
    "pow": [refused(lambda: gg.pow(f(3, 4), f(3, 5)), r"^pow\(a=f32\[3,4\], b=f32\[3,5\]\): .*do not fit")],
    "where": [
        refused(lambda: gg.where(i(3), f(3), i(3)), r"^where\(.*dtypes of a and b differ"),
        refused(lambda: gg.where(i(2), f(3), f(3)), r"^where\(.*shapes \(2,\), \(3,\), \(3,\) do not fit"),
        refused(lambda: gg.where(f(3), f(3), f(3)), r"condition is f32, and must be i32"),
        refused(lambda: gg.masked_fill(f(3), i(2, 3), 0.0), r"^masked_fill\(x=f32\[3\]\): a mask .* is larger"),
    ],
    "larger_back": [
        refused(lambda: gg.larger_back(f(3), f(3, 1), f(3)), r"dout must have the shape that a and b fill")
    ],
    **same(["sum_rows", "mean", "argmax"], ROWS),
    "scale": [
        refused(lambda: gg.scale(i(4), factor=2.0), r"^scale\(x=i32\[4\]\): x is i32, and must be f32"),
        refused(lambda: gg.scale(f(4), factor="two"), r"^scale\(\): factor must be float, not 'two'"),
        refused(lambda: gg.scale(f(4)), r"^scale\(\) needs the argument factor", TypeError),
    ],
    "cont": [refused(lambda: gg.cont(), r"^cont\(\) needs the input x", TypeError)],
    "cast": [
        refused(lambda: gg.cast(f(4), dtype="f16"), r"^cast\(\): dtype must be DType, not 'f16'"),
        refused(lambda: gg.cast(f(4)), r"^cast\(\) needs the argument dtype", TypeError),
    ],
    "reshape": [
        refused(
            lambda: registry["reshape"].node(f(3, 4).T, shape=(12,)), r"^reshape\(x=f32\[4,3\]\): strides .* cannot"
        )
    ],
    "view": [
        refused(lambda: gg.view(f(10), (4,), (4,), offset=28), r"view\(x=f32\[10\]\): elements 7 to 10 of 10"),
        refused(lambda: gg.view(f(10), (4,), (4,), offset=-4), r"view\(x=f32\[10\]\): elements -1 to 2 of 10"),
        refused(lambda: gg.view(f(10), (4,), (2,)), r"^view\(x=f32\[10\]\): .* must be multiples of 4"),
        refused(lambda: gg.view(f(10), (4,), (4, 4)), r"view\(x=f32\[10\]\): 2 strides for 1 axes"),
        refused(lambda: gg.view.node(f(2, 3).T, shape=(4,), strides=(1,)), r"must be contiguous; gg.view copies"),
    ],
    "strided_back": [
        refused(
            lambda: gg.strided_back(f(4), shape=(10,), strides=(3,), offset=1),
            r"^strided_back\(dout=f32\[4\]\): elements 1 to 10 of 10",
        ),
    ],
    "acc": [
        refused(lambda: gg.acc(f(4), f(2), offset=12), r"^acc\(a=f32\[4\], b=f32\[2\]\): elements 3 to 4 of 4"),
        refused(lambda: gg.acc(f(4), f(2), offset=2), r"^acc\(a=f32\[4\], b=f32\[2\]\): .* must be multiples of 4"),
        refused(lambda: gg.acc(f(4), f(2, 2)), r"^acc\(a=f32\[4\], b=f32\[2,2\]\): 0 strides for 2 axes"),
        refused(lambda: gg.acc(i(4), f(2)), r"a is i32, and must be f32"),
    ],
    "set": [
        refused(lambda: gg.set(f(4), f(2), offset=12), r"set\(a=f32\[4\], b=f32\[2\]\): elements 3 to 4 of 4"),
        refused(lambda: gg.set_1d(f(4), f(2), offset=-4), r"elements -1 to 0 of 4"),
        refused(lambda: gg.set_2d(f(4, 4), f(2, 2), stride=4, offset=0), r"elements of b would be written over each"),
        refused(lambda: gg.set(f(9), f(2, 3), strides=(8, 4)), r"with strides \(2, 1\), elements of b would"),
        refused(lambda: gg.set(f(4), i(2)), r"dtypes differ; gg.cast"),
    ],
    "triangle": [
        refused(lambda: gg.triangle(f(4)), r"^triangle\(x=f32\[4\]\): x must have two axes or more"),
        refused(lambda: gg.tri(f(4, 4), "left"), r"^tri\(x=f32\[4,4\]\): kind must be 'upper-diag' or .*'left'"),
        refused(lambda: gg.tri(f(4, 4), 7), r"kind must be .* not 7"),
        refused(lambda: gg.diag_mask_inf(f(4), 1), r"two axes or more"),
    ],
    "permute": [
        refused(lambda: gg.permute(f(2, 3), axes=(0, 0)), r"^permute\(x=f32\[2,3\]\): \(0, 0\) is no order of 2 axes"),
        refused(lambda: gg.permute(f(2, 3), axes=(0, 1, 2)), r"is no order of 2 axes"),
        refused(lambda: gg.permute(f(2, 3), axes=(0, 5)), r"is no order of 2 axes"),
        refused(lambda: gg.permute(f(2, 3), axes="ab"), r"^permute\(\): axes must be .*, not 'ab'"),
    ],
    "broadcast_to": [
        refused(lambda: gg.broadcast_to(f(3, 4), shape=(4,)), r"^broadcast_to\(x=f32\[3,4\]\): \(4,\) has fewer axes"),
        refused(lambda: gg.broadcast_to(f(3, 4), shape=(6, 4)), r"only sizes of 1 can grow, to \(6, 4\)"),
        refused(
            lambda: gg.broadcast_to(f(1), shape=(2, 2, 2, 2, 2)),
            r"^broadcast_to\(x=f32\[1\]\): .*5 axes.*the most is 4",
        ),
        refused(lambda: gg.broadcast_to(f(1), shape=(-1,)), r"negative size in \(-1,\)"),
    ],
    "slice_view": [
        refused(
            lambda: gg.slice_view(f(4), starts=(2,), steps=(1,), shape=(3,)),
            r"^slice_view\(x=f32\[4\]\): .* leave \(4,\)",
        ),
        refused(lambda: gg.slice_view(f(4), starts=(0,), steps=(-1,), shape=(2,)), r"leave \(4,\)"),
        refused(
            lambda: gg.slice_view(f(4), starts=(0, 0), steps=(1,), shape=(2,)),
            r"one start, step and size for each of 1 axes",
        ),
    ],
    "slice_back": [
        refused(
            lambda: gg.slice_back(f(3), shape=(4,), starts=(2,), steps=(1,)),
            r"^slice_back\(dout=f32\[3\]\): .* leave \(4,\)",
        ),
        refused(lambda: gg.slice_back(f(3), shape=(4,), starts=(-1,), steps=(1,)), r"leave \(4,\)"),
        refused(
            lambda: gg.slice_back(f(3), shape=(4, 4), starts=(0, 0), steps=(1, 1)), r"one start, step and size for each"
        ),
        refused(lambda: gg.slice_back(f(3), shape=(4,), starts=(0,), steps=(0,)), r"a step of 0"),
        refused(lambda: gg.pad(f(2, 3), left=(1,), right=(0, 0)), r"^pad\(x=f32\[2,3\]\): .* 2 numbers from 0"),
        refused(lambda: gg.pad(f(2, 3), left=(1, -1), right=(0, 0)), r"^pad\(x=f32\[2,3\]\): .*-1"),
    ],
    "slice_add": [
        refused(
            lambda: gg.slice_add(f(4), f(3), starts=(2,), steps=(1,)),
            r"^slice_add\(a=f32\[4\], b=f32\[3\]\): .* leave \(4,\)",
        ),
        refused(lambda: gg.slice_add(f(4), f(2, 2), starts=(0,), steps=(1,)), r"one start, step and size for each"),
        refused(lambda: gg.slice_add(f(4), f(3), starts=(0,), steps=(0,)), r"a step of 0"),
    ],
    "repeat": [
        refused(lambda: gg.repeat(f(3), shape=(4,)), r"^repeat\(x=f32\[3\]\): tiles of \(3,\) do not fill \(4,\)"),
        refused(lambda: gg.repeat(f(0), shape=(4,)), r"do not fill"),
        refused(lambda: gg.repeat(f(2, 2), shape=(4,)), r"do not fill"),
    ],
    "repeat_back": [
        refused(
            lambda: gg.repeat_back(f(4), shape=(3,)), r"^repeat_back\(x=f32\[4\]\): tiles of \(3,\) do not fill \(4,\)"
        )
    ],
    "accumulate": [
        refused(lambda: gg.accumulate(f(4), f(3)), r"^accumulate\(total=f32\[4\], gradient=f32\[3\]\): "),
        refused(lambda: gg.accumulate(gg.neg(f(4)), f(4)), r"neg: f32\[4\] is written to, so it must be a leaf"),
    ],
    "concat": [
        refused(lambda: gg.concat(f(2, 3), f(3, 3), axis=1), r"^concat\(.*f32\[2,3\], .*f32\[3,3\]\): "),
        refused(lambda: gg.concat(f(2, 3), f(2, 3), axis=2), r"^concat\(.*f32\[2,3\], .*f32\[2,3\]\): .*2"),
        refused(lambda: gg.concat(f(2, 3), f(3), axis=0), r"^concat\(.*f32\[2,3\], .*f32\[3\]\): "),
        refused(lambda: gg.concat(f(2), i(2)), r"^concat\(.*f32\[2\], .*i32\[2\]\): "),
    ],
    "get_rows": [
        refused(lambda: gg.get_rows(f(3), i(2)), r"^get_rows\(x=f32\[3\], ids=i32\[2\]\): x must have two axes"),
        refused(
            lambda: gg.get_rows(f(2, 3, 4), i(3, 5)), r"ids=i32\[3,5\]\): ids must have a list for each matrix of x"
        ),
        refused(lambda: gg.get_rows(f(3, 2), f(2)), r"ids is f32, and must be i32"),
    ],
    "get_rows_back": [
        refused(lambda: gg.get_rows_back(f(3, 2), i(2), rows=4), r"^get_rows_back\(dout=f32\[3,2\], ids=i32\[2\]\): "),
        refused(lambda: gg.get_rows_back(f(2, 2), i(2), rows=-1), r"rows=-1"),
        refused(lambda: gg.get_rows_back(f(2, 2), i(2), rows=1.5), r"^get_rows_back\(\): rows must be int, not 1.5"),
    ],
    "set_rows": [
        refused(lambda: gg.set_rows(f(8, 5), f(3, 4), i(3)), r"^set_rows\(.*\): a and b may differ only in their rows"),
        refused(lambda: gg.set_rows(f(8, 5), f(3, 5), i(2)), r"ids must have one for each of 3 rows"),
        refused(lambda: gg.set_rows(f(4, 8, 5), f(4, 2, 5), i(3, 2)), r"lists \(3,\) do not tile the batch \(4,\)"),
        refused(lambda: gg.set_rows(f(8), f(8), i(1)), r"must have two axes or more"),
    ],
    "write_rows": [
        refused(lambda: gg.write_rows(f(8, 5), f(3, 4), i(3)), r"a and b may differ only in their rows"),
        refused(lambda: gg.write_rows(f(8), f(8), i(1)), r"must have two axes or more"),
        refused(lambda: gg.write_rows(gg.neg(f(8, 5)), f(3, 5), i(3)), r"is written to, so it must be a leaf"),
    ],
    # over ranks
    **{
        name: [
            refused(lambda op=name: getattr(collective, op)(f(4, 3), comm=None), r"comm must be a group of ranks"),
            *more,
        ]
        for name, more in {
            "all_reduce": [],
            "replicated": [],
            "counted_once": [],
            "shift": [],
            "broadcast": [refused(lambda: gg.broadcast(f(3), root=1, comm=ONE), r"root=1 is no rank of a group of 1")],
            "reduce_to": [refused(lambda: gg.reduce_to(f(3), root=-1, comm=ONE), r"root=-1 is no rank")],
            "all_reduce_bucket": [refused(lambda: collective.all_reduce_bucket(comm=ONE), r"nothing to add up")],
            "reduce_scatter_bucket": [
                refused(lambda: collective.reduce_scatter_bucket(comm=ONE), r"nothing to add up")
            ],
        }.items()
    },
    "all_gather": [
        refused(lambda: gg.all_gather(f(4, 3), axis=0, comm=None), r"comm must be a group of ranks"),
        refused(lambda: gg.all_gather(f(4, 3), axis=2, comm=ONE), r"axis=2 is no axis of x, which has 2"),
    ],
    "reduce_scatter": [
        refused(lambda: gg.reduce_scatter(f(4, 3), axis=0, comm=None), r"comm must be a group of ranks"),
        refused(lambda: gg.reduce_scatter(f(4, 3), axis=2, comm=ONE), r"axis=2 is no axis of x, which has 2"),
    ],
    "all_to_all": [
        refused(lambda: gg.all_to_all(f(4, 3), split=0, join=1, comm=None), r"comm must be a group of ranks"),
        refused(lambda: gg.all_to_all(f(4, 3), split=2, join=1, comm=ONE), r"split=2 is no axis of x"),
    ],
    "after": [refused(lambda: gg.after(), r"nothing is given")],
    "wait_for": [refused(lambda: gg.wait_for(others=()), r"^wait_for\(\) needs the input x", TypeError)],
    "known_gradients": [refused(lambda: gg.known_gradients(known=None), r"nothing is given")],
    "mul_mat_onto": [
        refused(lambda: gg.mul_mat_onto(f(3, 4), f(2, 5), f(2, 3)), r"rows of a have 4 elements, rows of b 5"),
        refused(lambda: gg.mul_mat_onto(f(3, 4), f(2, 4), f(3, 2)), r"total must be \(2, 3\)"),
        refused(lambda: gg.mul_mat_onto(f(1, 3, 4), f(2, 4), f(2, 3)), r"a and b must be matrices"),
    ],
    "all_gather_into": [
        refused(lambda: collective.all_gather_into(f(4), comm=ONE, own=1), r"own=1 of 1 tensors leaves no leaves"),
        refused(lambda: collective.all_gather_into(f(4), f(3), comm=ONE, own=1), r"the pieces have 4 of 3 elements"),
    ],
    "set_rows_back": [
        refused(lambda: gg.set_rows_back(f(8, 5), i()), r"^set_rows_back\(.*\): one id is no list"),
        refused(lambda: gg.set_rows_back(f(8), i(1)), r"dout must have two axes or more"),
    ],
    "cumsum": [
        refused(lambda: gg.cumsum(f(2, 3), axis=2), r"^cumsum\(x=f32\[2,3\]\): there is no axis 2"),
        refused(lambda: gg.cumsum(f()), r"there is no axis -1"),
    ],
    "count_equal": [
        refused(lambda: gg.count_equal(i(3), i(4)), r"^count_equal\(a=i32\[3\], b=i32\[4\]\): the two differ"),
        refused(lambda: gg.count_equal(f(3), i(3)), r"a is f32, and must be i32"),
    ],
    "conv_3d": [
        refused(
            lambda: gg.conv_3d(f(6, 1, 3, 3), f(4, 1, 5, 5), channels=3), r"^conv_3d\(k=.*, x=.*\): x has 4 planes, no"
        ),
        refused(lambda: gg.conv_3d(f(6, 1, 3, 3), f(6, 1, 5, 5), channels=0), r"channels=0 must be 1 or more"),
        refused(lambda: gg.conv_3d(f(6, 3, 3), f(6, 1, 5, 5), channels=3), r"k must have four axes; gg.conv_1d and"),
        refused(
            lambda: gg.conv_3d(f(6, 1, 3, 3), f(6, 1, 2, 5), channels=3), r"spans \(1, 3, 3\), more than .* \(1, 2, 5\)"
        ),
        refused(
            lambda: gg.conv_3d(f(6, 1, 3, 3), f(6, 1, 5, 5), channels=3, stride=(1, 1)), r"stride=\(1, 1\) must be 3"
        ),
        refused(
            lambda: gg.conv_2d(f(4, 3, 3, 3), f(1, 2, 5, 5)), r"^conv_2d\(k=f32\[4,3,3,3\], x=.*\): x has 2 channels, k"
        ),
        refused(
            lambda: gg.conv_2d(f(4, 2, 3, 3), f(1, 2, 5, 5), stride=0), r"^conv_2d\(.*stride=0.*\): stride=\(1, 0, 0\)"
        ),
        refused(
            lambda: gg.conv_1d(f(4, 2, 3), f(1, 2, 5), padding=(1, 1)), r"^conv_1d\(.*padding takes one number, or 1"
        ),
    ],
    "conv_3d_back_x": [
        refused(
            lambda: gg.conv_3d_back_x(f(6, 1, 3, 3), f(2, 1, 3, 4), channels=3, size=(1, 5, 5)),
            r"^conv_3d_back_x\(k=.*, dout=.*\): the last axes of dout must be \(1, 3, 3\)",
        ),
        refused(
            lambda: gg.conv_transpose_2d(f(3, 4, 2, 2), f(1, 2, 5, 5)),
            r"^conv_transpose_2d\(.*x has 2 channels, k takes 3",
        ),
        refused(
            lambda: gg.conv_transpose_1d(f(2, 4, 2), f(2, 1), padding=3), r"the result would have the sizes \(-4,\)"
        ),
    ],
    "conv_3d_back_k": [
        refused(
            lambda: gg.conv_3d_back_k(f(3, 1, 5, 5), f(3, 1, 3, 3), channels=3, shape=(6, 1, 3, 3)),
            r"^conv_3d_back_k\(.*dout has 3 planes, not 2",
        ),
        refused(
            lambda: gg.conv_3d_back_k(f(4, 1, 5, 5), f(2, 1, 3, 3), channels=3, shape=(6, 1, 3, 3)),
            r"^conv_3d_back_k\(.*x has 4 planes, no multiple of 3 channels",
        ),
    ],
    "im2col_3d": [
        refused(lambda: gg.im2col_3d(f(3, 1, 5, 5), channels=2, kernel=(1, 1, 1)), r"x has 3 planes, no multiple of 2"),
        refused(lambda: gg.im2col(f(3, 5), 2), r"^im2col\(x=f32\[3,5\], kernel=2\): x must be \[N, IC, H, W\]"),
    ],
    "im2col_3d_back": [
        refused(
            lambda: gg.im2col_3d_back(f(1, 3, 3, 9), channels=1, kernel=(1, 3, 3), size=(1, 6, 5)),
            r"^im2col_3d_back\(dout=f32\[1,3,3,9\]\): dout must be \[N 1, 4, 3, 9\]",
        ),
        refused(lambda: gg.im2col_back(f(1, 3, 3, 10), (3, 3), (5, 5)), r"^im2col_back\(.*a row is a multiple of 9"),
        refused(lambda: gg.col2im_1d(f(5, 12), 5), r"^col2im_1d\(x=f32\[5,12\], channels=5.*x must be \[T, OC K\]"),
    ],
    "conv_dw": [
        refused(lambda: gg.conv_dw(f(3, 1, 2, 2), f(1, 4, 5, 5)), r"^conv_dw\(k=.*\): x must be \[N, 3, H, W\]"),
        refused(lambda: gg.conv_2d_dw(f(3, 2, 2, 2), f(1, 3, 5, 5)), r"^conv_2d_dw\(.*k \[C, 1, KH, KW\]"),
        refused(lambda: gg.conv_1d_dw(f(3, 2), f(1, 3, 5)), r"^conv_1d_dw\(.*k \[C, 1, KW\]"),
        refused(lambda: gg.ssm_conv(f(2, 6, 8), f(5, 4)), r"^ssm_conv\(sx=f32\[2,6,8\], c=f32\[5,4\]\): sx must be"),
    ],
    "conv_dw_back_x": [
        refused(lambda: gg.conv_dw_back_x(f(3, 1, 2, 2), f(1, 3, 4, 4), size=(4, 5)), r"must be \(3, 4\)")
    ],
    "conv_dw_back_k": [
        refused(lambda: gg.conv_dw_back_k(f(1, 3, 4, 4), f(1, 2, 3, 3), kernel=(2, 2)), r"\[N, C, ...\] alike")
    ],
    "pool_2d": [
        refused(
            lambda: gg.pool_2d(f(2, 4, 4), f(2, 4, 5), mode="max", kernel=(2, 2), stride=(2, 2)),
            r"^pool_2d\(x=f32\[2,4,4\], at=f32\[2,4,5\]\): at must have the shape of x, and mode be max",
        ),
        refused(
            lambda: gg.pool_2d(f(5), mode="max", kernel=(1, 1), stride=(1, 1)),
            r"^pool_2d\(x=f32\[5\]\): x must have two",
        ),
        refused(
            lambda: gg.pool_2d(f(5, 5), mode="sum", kernel=(1, 1), stride=(1, 1)),
            r"mode must be 'max' or 'avg', not 'sum'",
        ),
        refused(
            lambda: gg.pool_2d(f(5, 5), mode="max", kernel=(2, 2), stride=(1, 1), padding=(2, 0)),
            r"padding \(2, 0\) is not less than \(2, 2\)",
        ),
        refused(
            lambda: gg.pool_1d(f(3, 4), "max", 5, 1), r"^pool_1d\(x=f32\[3,4\], kernel=5.*no window of \(1, 5\) fits"
        ),
    ],
    "pool_2d_back": [
        refused(
            lambda: gg.pool_2d_back(f(2, 2), mode="max", kernel=(2, 2), stride=(2, 2), size=(4, 4)),
            r"^pool_2d_back\(dout=f32\[2,2\]\): the gradient of a maximum needs x=\(4, 4\)",
        ),
    ],
    "interpolate": [
        refused(
            lambda: gg.interpolate(f(4, 5), size=(0, 3), mode="nearest"),
            r"nothing to interpolate from \(4, 5\) to \(0, 3\)",
        ),
        refused(
            lambda: gg.interpolate(f(4, 5), size=(2, 3), mode="nearest", antialias=True),
            r"antialias is for the mode 'bilinear'",
        ),
        refused(lambda: gg.upscale(f(4), 2), r"^upscale\(x=f32\[4\], factor=2\): x must have two axes"),
        refused(lambda: gg.win_part(f(4, 5), 3), r"^win_part\(x=f32\[4,5\], window=3\): x must be \[H, W, C\]"),
        refused(lambda: gg.win_unpart(f(4, 3, 3, 2), (7, 5)), r"^win_unpart\(.*: 3 x 2 windows cover that size"),
        refused(lambda: gg.get_rel_pos(f(6, 3), 4, 4), r"^get_rel_pos\(a=f32\[6,3\], .*each of 2 n - 1 distances"),
        refused(
            lambda: gg.add_rel_pos(f(2, 4, 9), f(2, 4, 2), f(2, 4, 2)), r"^add_rel_pos\(a=.*of K columns a has K K"
        ),
        refused(
            lambda: gg.timestep_embedding(f(3, 1), 8), r"^timestep_embedding\(t=f32\[3,1\], dim=8, .*t must be \[N\]"
        ),
    ],
    "interpolate_back": [
        refused(
            lambda: gg.interpolate_back(f(4, 5), size=(2, 3), mode="nearest", shape=(2, 2)),
            r"^interpolate_back\(dout=f32\[4,5\]\): dout must be \[..., 2, 3\]",
        ),
    ],
    "sinkhorn": [
        refused(
            lambda: gg.sinkhorn(f(3, 4, 5), n_iter=1), r"^sinkhorn\(logits=f32\[3,4,5\]\): logits must be \[T, n, n\]"
        ),
        refused(lambda: gg.sinkhorn(f(3, 4, 4), n_iter=-1), r"n_iter=-1 is negative"),
        refused(lambda: gg.dsv4_hc_comb(f(5, 23), f(3), f(23)), r"^dsv4_hc_comb\(mixes=f32\[5,23\], .*\(2 \+ n\) n"),
        refused(
            lambda: gg.dsv4_hc_pre(f(5, 4, 8), f(5, 3)),
            r"^dsv4_hc_pre\(x=f32\[5,4,8\], weights=f32\[5,3\]\): x must be",
        ),
        refused(
            lambda: gg.dsv4_hc_post(f(5, 8), f(5, 4, 8), f(5, 4), f(5, 4, 3)),
            r"^dsv4_hc_post\(.*\[T, n\] and \[T, n, n\]",
        ),
    ],
    "sinkhorn_back": [
        refused(lambda: gg.sinkhorn_back(f(1, 4, 4), f(3, 4, 4), n_iter=1), r"dout must have the shape of logits")
    ],
    "solve_tri": [
        refused(
            lambda: gg.solve_tri(f(2, 3), f(2, 1)), r"^solve_tri\(a=f32\[2,3\], b=f32\[2,1\]\): a must be \[..., n, n\]"
        ),
        refused(lambda: gg.solve_tri(f(2, 3, 3), f(3, 1)), r"b must be \[2, 3, m\]"),
    ],
    "delta_scan": [
        refused(
            lambda: gg.delta_scan(*[f(1, 2, 3, 4)] * 3, f(1, 2, 3, 5), f(1, 3, 4, 5)),
            r"^delta_scan\(r=f32\[1,2,3,4\], .*\): state must be \(1, 3, 5, 4\)",
        ),
        refused(
            lambda: gg.delta_scan(*[f(1, 2, 3, 4)] * 3, f(1, 2, 3, 5), f(1, 3, 5, 4), f(1, 2, 3, 4)),
            r"a and b come together",
        ),
        refused(
            lambda: gg.delta_scan(*[f(1, 2, 3, 4)] * 3, f(1, 2, 3, 5), f(1, 3, 5, 4), snapshots=3),
            r"snapshots=3 must be 1 to 2",
        ),
        refused(lambda: gg.rwkv_wkv7(*[f(5, 2, 3)] * 6, f(2, 18)), r"^rwkv_wkv7\(r=f32\[5,2,3\], .*, of equal parts"),
        refused(
            lambda: gg.rwkv_wkv6(*[f(4, 2, 3)] * 3, f(3, 2), f(4, 2, 3), f(2, 18)), r"^rwkv_wkv6\(.*tf must be \[2, 3\]"
        ),
        refused(
            lambda: gg.gated_linear_attn(*[f(4, 2, 3)] * 4, f(2, 12)), r"^gated_linear_attn\(k=.*\[sequences, H S S\]"
        ),
        refused(
            lambda: gg.gated_delta_net(*[f(1, 2, 3, 4)] * 3, f(1, 2, 3, 2), f(1, 2, 3, 1), f(1, 3, 4, 4)),
            r"^gated_delta_net\(q=.*g must be \[N, T, H, 1 or D\]",
        ),
        refused(
            lambda: gg.ssm_scan(f(1, 3, 2, 4), f(1, 2, 3, 2), f(1, 2, 3), f(3, 2), f(1, 2, 1, 4), f(1, 2, 1, 4)),
            r"^ssm_scan\(s=.*\): A must be \[3, 1\] or \[3, 4\]",
        ),
    ],
    "delta_scan_back": [
        refused(
            lambda: gg.delta_scan_back(*[f(1, 2, 3, 4)] * 3, f(1, 2, 3, 5), f(1, 3, 5, 4), f(1, 2, 3, 4)),
            r"^delta_scan_back\(r=.*\): dy must have the shape of v",
        ),
    ],
    "selective_scan": [
        refused(
            lambda: gg.selective_scan(f(1, 3, 2, 4), f(1, 5, 3, 2), f(1, 5, 3), f(3, 2), f(1, 5, 1, 4), f(1, 5, 1, 4)),
            r"^selective_scan\(s=f32\[1,3,2,4\], .*\): A must be \(3, 1\) or \(3, 4\)",
        ),
        refused(
            lambda: gg.selective_scan(f(1, 3, 2, 4), f(1, 5, 3, 2), f(1, 5, 3), f(3, 4), f(1, 5, 2, 4), f(1, 5, 2, 4)),
            r"2 groups do not divide 3 heads",
        ),
        refused(
            lambda: gg.selective_scan(
                f(1, 3, 2, 4), f(1, 5, 3, 2), f(1, 5, 3), f(3, 4), f(1, 5, 1, 4), f(1, 5, 1, 4), snapshots=6
            ),
            r"snapshots=6 must be 1 to 5",
        ),
    ],
    "selective_scan_back": [
        refused(
            lambda: gg.selective_scan_back(
                f(1, 3, 2, 4), f(1, 5, 3, 2), f(1, 5, 3), f(3, 1), f(1, 5, 1, 4), f(1, 5, 1, 4), f(1, 5, 3, 4)
            ),
            r"^selective_scan_back\(s=.*\): dy must have the shape of x",
        ),
    ],
    "mul_mat_id": [
        refused(lambda: gg.mul_mat_id(f(3, 4, 8), f(5, 2, 7), i(5, 2)), r"rows of a have 8 elements, rows of b 7"),
        refused(lambda: gg.mul_mat_id(f(3, 4, 8), f(5, 3, 8), i(5, 2)), r"b must have 5 tokens, with 1 or 2 rows each"),
        refused(
            lambda: gg.mul_mat_id(f(4, 8), f(5, 2, 8), i(5, 2)), r"^mul_mat_id\(a=f32\[4,8\], .*a must be \[E, M, K\]"
        ),
        refused(
            lambda: gg.add_id(f(5, 2, 8), f(4, 7), i(5, 2)),
            r"^add_id\(a=f32\[5,2,8\], b=f32\[4,7\], ids=i32\[5,2\]\): ",
        ),
    ],
    "mul_mat_id_back": [
        refused(lambda: gg.mul_mat_id_back(f(5, 2, 8), f(4, 2, 3), i(5, 2), experts=3), r"dout must have 5 tokens"),
        refused(
            lambda: gg.mul_mat_id_back(f(5, 2, 8), f(5, 2, 3), i(5, 2), experts=-1), r"experts=-1 is no number from 0"
        ),
    ],
    "mul_mat_id_quantized_back": [
        refused(
            lambda: gg.mul_mat_id_quantized_back(q(3, 4, 32), f(5, 2, 3), i(5, 2)), r"a has 4 rows, rows of dout have 3"
        ),
    ],
    "mul_mat": [
        refused(
            lambda: gg.mul_mat(f(4, 8), f(4, 7)),
            r"^mul_mat\(a=f32\[4,8\], b=f32\[4,7\]\): rows of a have 8 elements, rows of b 7",
        ),
        refused(lambda: gg.mul_mat(f(8), f(4, 8)), r"two axes"),
        refused(lambda: gg.mul_mat(f(2, 4, 8), f(3, 4, 8)), r"^mul_mat\(a=f32\[2,4,8\], b=f32\[3,4,8\]\): "),
        refused(lambda: gg.mul_mat(i(4, 8), f(4, 8)), r"a is i32"),
        refused(lambda: gg.mul_mat(f(4, 32), q(4, 32)), r"b=q4_0\[4,32\]\): b is q4_0, .* or bf16; gg.cast expands it"),
        refused(lambda: gg.mul_mat(q(4, 32).T, f(4, 4)), r"^permute\(x=q4_0\[4,32\]\): rows of q4_0 blocks stay whole"),
    ],
    "mul_mat_quantized_back": [
        refused(
            lambda: gg.mul_mat_quantized_back(q(4, 32), f(5, 3)),
            r"^mul_mat_quantized_back\(a=q4_0\[4,32\], dout=f32\[5,3\]\): a has 4 rows, rows of dout have 3",
        ),
        refused(lambda: gg.mul_mat_quantized_back(q(3, 4, 32), f(2, 5, 4)), r"batch sizes of dout, \(2,\), are no"),
    ],
    **same(
        ["exp", "log", "sgn", "step", "floor", "ceil", "round", "trunc", *UNARY_WITH_SLOPE],
        UNARY,
    ),
    **same(
        [f"{name}_back" for name in UNARY_WITH_SLOPE],
        [
            (lambda op: op(f(3), f(4)), r"\(dout=f32\[3\], [xy]=f32\[4\]\): the two differ in shape"),
            (lambda op: op(f(4), i(4)), r"\(dout=f32\[4\], [xy]=i32\[4\]\): [xy] is i32, and must be f32"),
        ],
    ),
    "clamp_back": [
        refused(
            lambda: gg.clamp_back(f(3), f(4), min=0.0, max=1.0),
            r"^clamp_back\(dout=f32\[3\], x=f32\[4\]\): the two differ",
        )
    ],
    "clamp": [
        *same(["clamp"], [(lambda op: op(i(4), min=0, max=1), r"\(x=i32\[4\]\): x is i32, and must be f32")])["clamp"],
        refused(lambda: gg.clamp(f(4), min=2.0, max=1.0), r"^clamp\(x=f32\[4\]\): .*2.*1"),
    ],
    "xielu": [
        refused(lambda: gg.xielu(i(4), alpha_n=0.8, alpha_p=0.8), r"^xielu\(x=i32\[4\]\): x is i32, and must be f32"),
        refused(lambda: gg.xielu(f(4), alpha_n=0.8), r"^xielu\(\) needs the argument alpha_p", TypeError),
    ],
    "xielu_back": [
        refused(
            lambda: gg.xielu_back(f(3), f(4), alpha_n=0.8, alpha_p=0.8),
            r"^xielu_back\(dout=f32\[3\], x=f32\[4\]\): the two differ",
        )
    ],
    **same(
        GATED,
        [
            (lambda op: op(f(2, 3)), r"\(a=f32\[2,3\]\): the last axis cannot be halved"),
            (lambda op: op(f()), r"\(a=f32\[\]\): the last axis cannot be halved"),
            (lambda op: op(f(2, 3), f(2, 4)), r"\(a=f32\[2,3\], b=f32\[2,4\]\): the two differ in shape"),
            (lambda op: op(i(2, 4)), r"\(a=i32\[2,4\]\): a is i32"),
            (lambda op: op(f(2, 4), f(2, 4), swapped=True), r"\(.*\): swapped is for the single form"),
        ],
    ),
    **same(
        [f"{name}_back" for name in GATED],
        [
            (
                lambda op: op(f(2, 4), f(2, 4)),
                r"\(dout=f32\[2,4\], a=f32\[2,4\]\): dout must have the result's shape \(2, 2\)",
            ),
            (lambda op: op(f(2), f(4), f(3)), r"\(dout=f32\[2\], a=f32\[4\], b=f32\[3\]\): the two differ in shape"),
        ],
    ),
    **same(
        ["norm", "rms_norm"],
        [
            *ROWS,
            (lambda op: op(f(2, 3), f(2)), r"\(x=f32\[2,3\], weight=f32\[2\]\): weight must have the shape \(3,\)"),
            (lambda op: op(f(2, 3), eps=-1.0), r"\(x=f32\[2,3\]\): eps must not be negative"),
        ],
    ),
    **same(
        ["norm_back", "rms_norm_back"],
        [
            (lambda op: op(f(2, 3), f(2, 4)), r"\(dout=f32\[2,3\], x=f32\[2,4\]\): dout and x have different shapes"),
            (lambda op: op(f(2, 3), f(2, 3), f(2)), r"\(.*weight=f32\[2\]\): weight must have the shape \(3,\)"),
        ],
    ),
    "l2_norm": [
        refused(lambda: gg.l2_norm(f()), r"^l2_norm\(x=f32\[\]\): a scalar has no last axis"),
        refused(lambda: gg.l2_norm(f(3), eps=-1.0), r"eps must not be negative"),
    ],
    "l2_norm_back": [refused(lambda: gg.l2_norm_back(f(3), f(4)), r"^l2_norm_back\(.*\): dout and x have different")],
    "soft_max": [
        refused(lambda: gg.soft_max(f()), r"^soft_max\(x=f32\[\]\): a scalar has no last axis"),
        refused(
            lambda: gg.soft_max(f(2, 3), f(2, 4)),
            r"^soft_max\(x=f32\[2,3\], mask=f32\[2,4\]\): rows of the mask have 4",
        ),
        refused(lambda: gg.soft_max(f(3), f(2, 3)), r"the mask has 2 axes, x 1"),
        refused(
            lambda: gg.soft_max(f(4, 3, 5), f(3, 3, 5)),
            r"^soft_max\(.*mask=f32\[3,3,5\]\): 3 along axis .* do not tile the 4",
        ),
        refused(lambda: gg.soft_max(f(3), i(3)), r"mask is i32"),
        refused(
            lambda: gg.soft_max(f(2, 3, 4), None, f(3)), r"sinks=f32\[3\]\): sinks must have one logit for each of 2"
        ),
        refused(lambda: gg.soft_max(f(3, 4), None, f(3)), r"x must be \[..., H, rows, n\]"),
        refused(lambda: gg.soft_max(f(2, 3, 4), max_bias=8.0), r"max_bias=8.0 multiplies a mask, and there is none"),
        refused(lambda: gg.soft_max(f(2, 3, 4), f(3, 4), max_bias=-1.0), r"max_bias=-1.0 must not be negative"),
    ],
    "soft_max_sinks_back": [
        refused(
            lambda: gg.soft_max_sinks_back(f(2, 3, 4), f(2, 3, 5), f(2, 3, 4), f(2)),
            r"^soft_max_sinks_back\(.*\): dout, y and x have different shapes",
        )
    ],
    "soft_max_back": [
        refused(
            lambda: gg.soft_max_back(f(2, 3), f(2, 4)),
            r"^soft_max_back\(dout=f32\[2,3\], y=f32\[2,4\]\): .*different shapes",
        )
    ],
    "cross_entropy_class": [
        refused(
            lambda: gg.cross_entropy_loss(f(2, 3), i(3)), r"^cross_entropy\w*\(logits=f32\[2,3\], targets=i32\[3\]\): "
        ),
        refused(lambda: gg.cross_entropy_loss(f(), i()), r"^cross_entropy\w*\(logits=f32\[\].*an axis of classes"),
        refused(
            lambda: gg.cross_entropy_loss(f(2, 3), i(2), reduction="max"),
            r"reduction must be 'none' or 'sum' or 'mean', not 'max'",
        ),
    ],
    "cross_entropy_soft": [
        refused(
            lambda: gg.cross_entropy_loss(f(2, 3), f(2)), r"^cross_entropy\w*\(logits=f32\[2,3\], \w+=f32\[2\]\): "
        ),
    ],
    "cross_entropy_class_back": [
        refused(
            lambda: gg.cross_entropy_loss_back(f(2), f(2, 3), i(2)),
            r"^cross_entropy_loss_back\(\): dloss must have the shape \(\)",
        )
    ],
    "cross_entropy_soft_back": [
        refused(
            lambda: gg.cross_entropy_loss_back(f(2), f(2, 3), f(2, 3)),
            r"^cross_entropy_loss_back\(\): dloss must have the shape \(\)",
        )
    ],
    **same(
        ["rope", "rope_back"],
        [
            (lambda op: op(f(3, 8), i(3)), r"\(\w+=f32\[3,8\], pos=i32\[3\]\): x must have the axes \[..., T, H, D\]"),
            (lambda op: op(f(3, 2, 8), i(4)), r"\(.*\): pos must have one position for each of T=3"),
            (lambda op: op(f(3, 2, 8), f(3)), r"\(.*\): pos is f32, and must be i32"),
            (lambda op: op(f(3, 2, 8), i(3), n_dims=10), r"\(.*\): n_dims=10 must be from 0"),
            (lambda op: op(f(3, 2, 8), i(3), n_dims=3), r"\(.*\): .*n_dims=3 is odd"),
            (
                lambda op: op(f(3, 2, 8), i(3), f(3)),
                r"\(.*freq_factors=f32\[3\]\): freq_factors must have one number for each",
            ),
            (lambda op: op(f(3, 2, 8), i(3), freq_base=0.0), r"\(.*\): freq_base=0.0 must be positive"),
            (lambda op: op(f(3, 2, 8), i(3), mode="spiral"), r"\(\): mode must be .*'spiral'"),
            (lambda op: op(f(3, 2, 8), i(3), n_dims=4, offset=5), r"\(.*\): offset=5 and n_dims=4 go beyond 8"),
            (lambda op: op(f(3, 2, 8), i(3), offset=-2), r"\(.*\): offset=-2 must be from 0 to 8"),
            (lambda op: op(f(3, 2, 8), i(3), sections=(1,)), r"\(.*\): sections=\(1,\) are for the modes mrope"),
            (lambda op: op(f(3, 2, 8), i(3), mode="mrope", sections=(1,)), r"\(.*\): pos must have four positions"),
            (lambda op: op(f(3, 2, 8), i(12), mode="mrope"), r"\(.*\): sections=\(\) must be up to four numbers"),
            (
                lambda op: op(f(3, 2, 8), i(12), mode="vision", sections=(4,), n_dims=8),
                r"\(.*\): in the mode vision n_dims=8 must be half of a row, 4",
            ),
        ],
    ),
    "custom": [
        refused(
            lambda: gg.custom(f(3), function=1, shape=(3,)), r"^custom\(inputs0=f32\[3\]\): function=1 cannot be called"
        ),
        refused(lambda: gg.map_custom1(f(3), np.sin, grad=1), r"grad=1 cannot be called"),
        refused(lambda: gg.custom(f(3), function=np.sin, shape="a"), r"^custom\(\): shape must be .* not 'a'"),
        refused(lambda: gg.custom(f(3), function=np.sin), r"^custom\(\) needs the argument shape", TypeError),
    ],
    "custom_back": [
        refused(lambda: gg.custom_back(f(3), f(3), function=1, wanted=(0,)), r"function=1 cannot be called"),
        refused(
            lambda: gg.custom_back(f(3), f(3), function=np.sin, wanted=(1,)), r"wanted=\(1,\) must be numbers below 1"
        ),
        refused(lambda: gg.custom_back(function=np.sin, wanted=(0,)), r"dout is missing"),
    ],
    "dropout": [
        refused(lambda: gg.dropout(f(4), 1, p=1.5), r"^dropout\(x=f32\[4\], seed=i32\[\]\): p=1.5 must be from 0 to 1"),
        refused(lambda: gg.dropout(f(4), i(2), p=0.5), r"seed must be a scalar"),
        refused(lambda: gg.dropout(f(4), 1.5, p=0.5), r"seed is f32, and must be i32"),
        refused(lambda: gg.dropout(f(4), 1), r"^dropout\(\) needs the argument p", TypeError),
    ],
    "opt_step_adamw": [
        refused(lambda: gg.opt_step_adamw(f(4), f(3), f(4), f(4), f(7)), r"^opt_step_adamw\(x=f32\[4\], grad=f32\[3\]"),
        refused(lambda: gg.opt_step_adamw(f(4), f(4), f(4), f(4), f(6)), r"hyper must have 7 values"),
        refused(lambda: gg.opt_step_adamw(gg.neg(f(4)), f(4), f(4), f(4), f(7)), r"must be a leaf"),
        refused(lambda: gg.opt_step_adamw(f(4), f(4), f(4), f(4), f(7), f(2)), r"factor must be a scalar"),
    ],
    "opt_step_sgd": [
        refused(lambda: gg.opt_step_sgd(f(4), f(3), f(2)), r"^opt_step_sgd\(x=f32\[4\], grad=f32\[3\]"),
        refused(lambda: gg.opt_step_sgd(f(4), f(4), f(3)), r"hyper must have 2 values"),
        refused(lambda: gg.opt_step_sgd(gg.neg(f(4)), f(4), f(2)), r"must be a leaf"),
    ],
    "global_norm": [refused(lambda: gg.global_norm(f(2), i(2)), r"^global_norm\(.*i32\[2\]\): xs is i32")],
    "clip_factor": [
        refused(lambda: gg.clip_factor(f(2), max_norm=1.0), r"^clip_factor\(norm=f32\[2\]\): norm must be a scalar"),
        refused(lambda: gg.clip_factor(f(), max_norm=0.0), r"max_norm must be positive"),
    ],
    "flash_attn_ext": [
        refused(
            lambda: gg.flash_attn_ext(f(4, 8), f(4, 8), f(4, 8)),
            r"^flash_attn_ext\(q=f32\[4,8\], k=f32\[4,8\], v=f32\[4,8\]",
        ),
        refused(
            lambda: gg.flash_attn_ext(f(1, 2, 4, 8), f(1, 2, 4, 7), f(1, 2, 4, 8)),
            r"^flash_attn_ext\(.*k=f32\[1,2,4,7\]",
        ),
        refused(
            lambda: gg.flash_attn_ext(f(1, 3, 4, 8), f(1, 2, 4, 8), f(1, 2, 4, 8)), r"^flash_attn_ext\(q=f32\[1,3,4,8\]"
        ),
        refused(
            lambda: gg.flash_attn_ext(f(1, 2, 4, 8), f(1, 2, 5, 8), f(1, 2, 6, 8)),
            r"^flash_attn_ext\(.*v=f32\[1,2,6,8\]",
        ),
        refused(
            lambda: gg.flash_attn_ext(f(2, 2, 4, 8), f(1, 2, 4, 8), f(1, 2, 4, 8)), r"^flash_attn_ext\(q=f32\[2,2,4,8\]"
        ),
        refused(lambda: gg.flash_attn_ext(f(1, 2, 4, 8), f(1, 2, 5, 8), f(1, 2, 5, 8), f(4, 4)), r"mask=f32\[4,4\]"),
        refused(lambda: gg.flash_attn_ext(i(1, 2, 4, 8), f(1, 2, 5, 8), f(1, 2, 5, 8)), r"q is i32"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, causal="left"), r"causal.*'left'"),
        refused(
            lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, window=(1, -2)), r"window=\(1, -2\) must be two numbers"
        ),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, window=3), r"window=\(3,\) must be two numbers"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, prefix=-1), r"prefix=-1 is negative"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, sinks=f(3)), r"sinks=f32\[3\]\): .* of the 2 heads"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, max_bias=1.0), r"max_bias=1.0 multiplies a mask"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, dropout_p=0.5), r"dropout_p=0.5 needs a seed"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, dropout_p=1.5, seed=1), r"dropout_p=1.5 must be from"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, dropout_p=0.5, seed=i(2)), r"seed must be a scalar"),
        refused(lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, cu_seqlens_q=i(2)), r"need both cu_seqlens_q and"),
        refused(
            lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, cu_seqlens_q=i(2), cu_seqlens_k=i(3)), r"one element more"
        ),
        refused(
            lambda: gg.flash_attn_ext(*[f(2, 2, 4, 8)] * 3, cu_seqlens_q=i(2), cu_seqlens_k=i(2)), r"one batch, not 2"
        ),
        refused(
            lambda: gg.flash_attn_ext(*[f(1, 2, 4, 8)] * 3, cu_seqlens_q=f(2), cu_seqlens_k=i(2)),
            r"cu_seqlens_q is f32, and must be i32",
        ),
    ],
    "flash_attn_back": [
        refused(
            lambda: gg.flash_attn_back(*[f(1, 2, 4, 8)] * 3, None, f(1, 4, 2, 9)), r"^flash_attn_back\(.*f32\[1,4,2,9\]"
        ),
        refused(
            lambda: gg.flash_attn_back(*[f(1, 2, 4, 8)] * 2, f(1, 2, 5, 8), None, f(1, 4, 2, 8)), r"^flash_attn_back\("
        ),
        refused(
            lambda: gg.flash_attn_back(*[f(1, 2, 4, 8)] * 3, None, f(1, 4, 2, 8), sinks_gradient=True),
            r"sinks_gradient asks for .* and there are none",
        ),
        refused(
            lambda: gg.flash_attn_back(*[f(1, 2, 4, 8)] * 3, None, f(1, 4, 2, 8), mask_gradient=True),
            r"mask_gradient asks for .* and there is none",
        ),
        refused(
            lambda: gg.flash_attn_back(*[f(1, 2, 4, 8)] * 3, None, f(1, 4, 2, 8), d_lse=f(1, 2, 5)),
            r"dlse must have the shape \(1, 2, 4\)",
        ),
    ],
    "kda": [
        refused(lambda: kda(q=f(5, 2, 4)), r"^kda\(q=f32\[5,2,4\], .*\): q, k and v must have four axes"),
        refused(lambda: kda(k=f(1, 5, 2, 3)), r"^kda\(q=f32\[1,5,2,4\], .*\): q and k must have the same shape"),
        refused(lambda: kda(v=f(1, 6, 2, 3)), r"v has 1 batches of 6 tokens, q 1 of 5"),
        refused(lambda: kda(K=257), r"keys have 257 channels, and the most is 256"),
        refused(lambda: kda(H=2, HV=3), r"the 2 heads of q and k do not divide the 3 of v"),
        refused(lambda: kda(H=2, HV=1), r"the 2 heads of q and k do not divide the 1 of v"),
        refused(lambda: kda(g=f(1, 5, 2, 3)), r"g=f32\[1,5,2,3\].*\): g must have the shape \(1, 5, 2, 4\)"),
        refused(lambda: kda(beta=f(1, 5, 2, 1)), r"beta must have the shape \(1, 5, 2\)"),
        refused(lambda: kda(beta=f(1, 5, 2, 3)), r"beta must have the shape \(1, 5, 2\); kda_recurrent takes"),
        refused(lambda: kda(initial_state=f(2, 2, 4, 3)), r"states of 1 sequences must have the shape \(1, 2, 4, 3\)"),
        refused(lambda: kda(initial_state=f(1, 2, 4, 3), state_v_first=True), r"must have the shape \(1, 2, 3, 4\)"),
        refused(lambda: kda(initial_state=f(1, 2, 4, 3, dtype=gg.F16)), r"initial_state must be f32"),
        refused(lambda: kda(initial_state=f(2, 2, 4, 3), cu_seqlens=i(2)), r"must have the shape \(1, 2, 4, 3\)"),
        refused(lambda: kda(B=2, cu_seqlens=i(2)), r"packed with cu_seqlens lie in one batch, not in 2"),
        refused(lambda: kda(cu_seqlens=i(2, 1)), r"cu_seqlens must have the shape \[sequences \+ 1\]"),
        refused(lambda: kda(cu_seqlens=f(2)), r"cu_seqlens is f32, and must be i32"),
        refused(lambda: kda(chunk_size=16), r"^kda\(.*\): chunk_size must be 32 or 64, not 16"),
        refused(lambda: kda(use_gate_in_kernel=True), r"use_gate_in_kernel without lower_bound needs A_log"),
        refused(lambda: kda(use_gate_in_kernel=True, A_log=f(3)), r"A_log must have 2 elements"),
        refused(lambda: kda(use_gate_in_kernel=True, A_log=f(2), dt_bias=f(2)), r"dt_bias must have 8 elements"),
        refused(lambda: kda(use_gate_in_kernel=True, safe_gate=True, A_log=f(2)), r"safe_gate .* needs a lower_bound"),
        refused(
            lambda: kda(use_gate_in_kernel=True, safe_gate=True, lower_bound=-6.0), r"-6.0 is not in the safe range"
        ),
        refused(lambda: kda(use_gate_in_kernel=True, safe_gate=True, lower_bound=0.0), r"0.0 is not in the safe range"),
        refused(lambda: kda(allow_neg_eigval=True), r"it needs use_beta_sigmoid_in_kernel"),
        refused(lambda: kda(fla.chunk_kda, state_v_first=True, transpose_state_layout=True), r"were both given"),
        refused(lambda: kda(fla.chunk_kda, cp_context=object()), r"cp_context is not understood"),
        refused(lambda: kda(return_intermediate_states=True, disable_recompute=True), r"exclude each other"),
        refused(lambda: kda(chunks=64), r"unexpected keyword argument 'chunks'", TypeError),
    ],
    "kda_back": [
        refused(lambda: kda_back(do=f(1, 5, 2, 4)), r"^kda_back\(.*do=f32\[1,5,2,4\]\): do must have the shape"),
        refused(lambda: kda_back(dht=f(1, 2, 3, 4)), r"dht must have the shape \(1, 2, 4, 3\)"),
        refused(lambda: kda_back(states=f(1, 2, 4, 3)), r"states, scores, inverse and d come together"),
        refused(lambda: kda_back(needs=0), r"needs=0 must have some of the lowest 8 bits"),
        refused(lambda: kda_back(needs=32), r"dh0 of an input that was left out"),
    ],
    "kda_gate": [
        refused(lambda: gg.kda_gate(f(5, 2, 4)), r"^kda_gate\(g=f32\[5,2,4\]\): without a lower_bound A_log is needed"),
        refused(lambda: gg.kda_gate(f(5, 2, 4), f(3)), r"^kda_gate\(.*A_log=f32\[3\]\): A_log must have 2 elements"),
        refused(lambda: gg.kda_gate(f(5, 2, 4), f(2), f(4)), r"dt_bias must have 8 elements"),
        refused(lambda: gg.kda_gate(f(4), lower_bound=-1.0), r"g must have the axes \[..., heads, channels\]"),
    ],
    "kda_gate_back": [
        refused(lambda: gg.kda_gate_back(f(2, 4), f(3, 4), gate=2, lower_bound=-1.0), r"dout and g have different"),
        refused(lambda: gg.kda_gate_back(f(2, 4), f(2, 4), gate=1, lower_bound=0.0), r"softplus gate needs A_log"),
    ],
    "kda_recurrent": [
        refused(
            lambda: kda(op=gg.kda_recurrent, k=f(1, 5, 2, 3)), r"^kda_recurrent\(q=.*\): q and k must have the same"
        ),
        refused(lambda: kda(op=gg.kda_recurrent, use_gate_in_kernel=True), r"^kda_recurrent\(.*needs A_log"),
        refused(lambda: kda(op=gg.kda_recurrent, num_accepted_tokens=i(1)), r"num_accepted_tokens are of a pool"),
        refused(lambda: kda(op=gg.kda_recurrent, ssm_state_indices=i(1)), r"initial_state is a leaf, the pool"),
        refused(lambda: kda(op=gg.kda_recurrent, chunk_size=64), r"unexpected keyword argument", TypeError),
    ],
    "kda_recurrent_pool": [
        refused(lambda: pooled(f(7, 2, 3, 4), i(1, 5)), r"pool must have the shape \[states, 2, 4, 3\]"),
        refused(lambda: pooled(f(7, 2, 4, 3), i(2, 5)), r"slots must have the shape \[1\] or \[1, tokens\]"),
        refused(lambda: pooled(f(7, 2, 4, 3), i(1)), r"there are slots for 1 tokens of a sequence, and it has 5"),
        refused(lambda: pooled(f(7, 2, 4, 3), i(1, 5), i(2)), r"accepted must have the shape \(1,\)"),
        refused(lambda: pooled(gg.neg(f(7, 2, 4, 3)), i(1, 5)), r"is written to, so it must be a leaf"),
    ],
    "argsort": [
        refused(lambda: gg.argsort(f()), r"^argsort\(x=f32\[\]\): a scalar has no rows"),
        refused(lambda: gg.argsort(f(3), order="up"), r"^argsort\(\): order must be 'asc' or 'desc', not 'up'"),
    ],
    "top_k": [
        refused(lambda: gg.top_k(f(2, 3), k=4), r"^top_k\(x=f32\[2,3\]\): k=4 must be from 0 to 3"),
        refused(lambda: gg.top_k(f(2, 3), k=-1), r"k=-1 must be from 0 to 3"),
        refused(lambda: gg.top_k(f(), k=1), r"a scalar has no rows"),
    ],
    "stop_gradient": [refused(lambda: gg.stop_gradient(), r"^stop_gradient\(\) needs the input x", TypeError)],
    "lightning_indexer": [
        refused(lambda: gg.lightning_indexer(f(3, 2, 4), f(1, 5, 1, 4), f(1, 1, 3, 2)), r"q and k must have four axes"),
        refused(
            lambda: gg.lightning_indexer(f(1, 3, 2, 4), f(1, 5, 2, 4), f(1, 1, 3, 2)),
            r"^lightning_indexer\(q=f32\[1,3,2,4\], k=f32\[1,5,2,4\], .*\): k has 2 heads, and must have one",
        ),
        refused(lambda: gg.lightning_indexer(f(1, 3, 2, 4), f(2, 5, 1, 4), f(1, 1, 3, 2)), r"q has 1 batches, k 2"),
        refused(
            lambda: gg.lightning_indexer(f(1, 3, 2, 4), f(1, 5, 1, 3), f(1, 1, 3, 2)), r"rows of q have 4 .* of k 3"
        ),
        refused(
            lambda: gg.lightning_indexer(f(1, 3, 2, 4), f(1, 5, 1, 4), f(1, 3, 2)),
            r"weights must have the shape \(1, 1, 3, 2\)",
        ),
        refused(
            lambda: gg.lightning_indexer(f(1, 3, 2, 4), f(1, 5, 1, 4), f(1, 1, 3, 2), f(1, 1, 3, 4)),
            r"the mask must have the shape \(1, 1, 3, 5\)",
        ),
    ],
    "lightning_indexer_back": [
        refused(
            lambda: gg.lightning_indexer_back(f(1, 3, 5), f(1, 3, 2, 4), f(1, 5, 1, 4), f(1, 1, 3, 2)),
            r"^lightning_indexer_back\(dout=f32\[1,3,5\], .*\): dout must have the shape \(1, 1, 3, 5\)",
        )
    ],
    "sparse_flash_mla": [
        refused(call, rf"^sparse_flash_mla\(q=f32\[.*\): {message}")
        for call, message in (
            (lambda: mla(f(5, 2, 4)), r"q must have the axes \[B, S1, N1, D\] in the layout BSND"),
            (lambda: mla(ori_kv=None), r"there is neither ori_kv nor cmp_kv"),
            (lambda: mla(ori_kv=f(1, 5, 2, 4)), r"ori_kv must have one head, which all heads of q share, not 2"),
            (lambda: mla(ori_kv=f(1, 5, 1, 3)), r"rows of q have 4 elements, rows of ori_kv 3"),
            (lambda: mla(ori_kv=f(2, 5, 1, 4)), r"q has 1 sequences, ori_kv 2"),
            (lambda: mla(ori_kv=f(5, 1, 4)), r"ori_kv must have the axes \[B, S, 1, D\] in the layout BSND"),
            (lambda: mla(sinks=f(3)), r"sinks must have the shape \(2,\)"),
            (lambda: mla(cmp_ratio=0), r"cmp_ratio=0 must be from 1 to 128"),
            (lambda: mla(cmp_ratio=129), r"cmp_ratio=129 must be from 1 to 128"),
            (lambda: mla(ori_mask_mode=1), r"ori_mask_mode=1 must be 0, 3 or 4"),
            (lambda: mla(cmp_mask_mode=4), r"cmp_mask_mode=4 must be 0 or 3"),
            (lambda: mla(ori_win_left=-2), r"ori_win_left=-2 must be -1 \(no bound\) or from 0"),
            (lambda: mla(ori_win_right=2**40), r"ori_win_right=1099511627776 must be "),
            (lambda: mla(layout_kv="TND"), r"layout_kv='TND' must be layout_q='BSND', or 'PA_BBND'"),
            (lambda: mla(layout_q="PA_BBND", layout_kv="PA_BBND"), r"layout_q is 'BSND' or 'TND'"),
            (lambda: mla(f(5, 2, 4), layout_q="TND", layout_kv="TND"), r"the layout TND needs cu_seqlens_q"),
            (
                lambda: mla(f(5, 2, 4), ori_kv=f(5, 1, 4), layout_q="TND", layout_kv="TND", cu_seqlens_q=i(2)),
                r"the layout TND needs cu_seqlens_ori_kv",
            ),
            (lambda: mla(cu_seqlens_q=i(2)), r"cu_seqlens_q is for the layout TND"),
            (lambda: mla(cu_seqlens_ori_kv=i(2)), r"cu_seqlens_ori_kv is for the layout TND"),
            (lambda: mla(seqused_q=i(2)), r"seqused_q must have the shape \(1,\)"),
            (lambda: mla(seqused_ori_kv=i(2)), r"seqused_ori_kv must have the shape \(1,\)"),
            (lambda: mla(seqused_cmp_kv=i(1)), r"seqused_cmp_kv belongs to cmp_kv, which is not given"),
            (lambda: mla(cmp_sparse_indices=i(1, 5, 1, 3)), r"cmp_sparse_indices belongs to cmp_kv"),
            (lambda: mla(ori_topk_length=i(1, 5, 1)), r"ori_topk_length is the length of a list, and there is no ori_"),
            (lambda: mla(ori_sparse_indices=i(1, 5, 3)), r"ori_sparse_indices must have the shape \(1, 5, 1\) and"),
            (
                lambda: mla(ori_sparse_indices=i(1, 5, 1, 3)),
                r"ori_sparse_indices with ori_mask_mode 0 needs ori_topk_l",
            ),
            (lambda: mla(cmp_residual_kv=i(1)), r"cmp_residual_kv says where the mask of cmp_kv is: it needs"),
            (
                lambda: mla(cmp_kv=f(1, 2, 1, 4), cmp_ratio=2, cmp_residual_kv=i(1)),
                r"cmp_residual_kv says where the mask of cmp_kv is: it needs cmp_kv, cmp_mask_mode 3",
            ),
            (lambda: mla(ori_block_table=i(1, 2)), r"ori_block_table is for layout_kv='PA_BBND'"),
            (lambda: mla(layout_kv="PA_BBND"), r"PA_BBND needs ori_block_table and seqused_ori_kv"),
            (
                lambda: mla(layout_kv="PA_BBND", ori_block_table=i(2, 2), seqused_ori_kv=i(1)),
                r"ori_block_table must have the axes \[1, blocks\]",
            ),
        )
    ]
    + [
        refused(lambda: mla(layout_q="NBSD"), r"^sparse_flash_mla\(\): layout_q must be .* not 'NBSD'"),
        refused(
            lambda: npu.sparse_flash_mla(f(1, 2, 1, 4), topk_value_mode=2),
            r"^sparse_flash_mla\(\): topk_value_mode=2 must be 1",
        ),
        refused(lambda: npu.sparse_flash_mla_metadata(1, 1, 4, tasks=3), r"has no argument 'tasks'", TypeError),
    ],
    "sparse_flash_mla_grad": [
        refused(
            lambda: gg.sparse_flash_mla_grad(*[f(1, 5, 2, 4)] * 3, f(1, 5, 2), ori_kv=f(1, 5, 1, 4)),
            r"^sparse_flash_mla_grad\(q=f32\[1,5,2,4\], .*\): softmax_lse must have the shape \(1, 1, 5, 2\)",
        ),
        refused(
            lambda: gg.sparse_flash_mla_grad(
                f(1, 5, 2, 4), f(1, 5, 2, 3), f(1, 5, 2, 4), f(1, 1, 5, 2), ori_kv=f(1, 5, 1, 4)
            ),
            r"dout must have the shape \(1, 5, 2, 4\)",
        ),
        refused(
            lambda: gg.sparse_flash_mla_grad(
                *[f(1, 8, 2, 4)] * 3, f(1, 1, 8, 2), cmp_kv=f(1, 2, 1, 4), cmp_ratio=4, cmp_mask_mode=3
            ),
            r"cmp_mask_mode 3 with a cmp_ratio above 1 needs cmp_residual_kv",
        ),
    ],
}

# what is no op of its own, but said by users: composites, methods and operators
ALSO = {
    "reshape": [
        refused(lambda: gg.reshape(f(2, 3), (4, 2)), r"^reshape\(x=f32\[2,3\]\): 6 elements do not fill \(4, 2\)"),
        refused(lambda: f(2, 3).reshape(-1, -1), r"6 elements do not fill \(-1, -1\)"),
        refused(lambda: f(2, 3).reshape(-1, 4), r"6 elements do not fill \(-1, 4\)"),
        refused(lambda: f(0).reshape(-1, 0), r"do not fill"),
    ],
    "add1": [refused(lambda: gg.add1(f(3), f(2)), r"^add1\(a=f32\[3\], b=f32\[2\]\): b must have one element")],
    "arange": [refused(lambda: gg.arange(1, 0), r"^arange\(1, 0, 1.0\): the step does not lead there")],
    "cpy": [refused(lambda: gg.cpy(f(2, 3), f(5)), r"^cpy\(a=f32\[2,3\], b=f32\[5\]\): 6 elements do not fill 5")],
    "diag": [refused(lambda: gg.diag(f(2, 3)), r"^diag\(x=f32\[2,3\]\): x must be \[..., 1, n\]")],
    "pad_circular": [
        refused(lambda: gg.pad_circular(f(2, 3), (1,), (0, 0)), r"^pad_circular\(x=f32\[2,3\]\): .* 2 numbers from 0"),
        refused(lambda: gg.pad_circular(f(2, 0), (0, 1), (0, 0)), r"axis 1 has no elements to go on with"),
        refused(lambda: gg.pad_ext(f(2), (-1,), (0,), circular=True), r"-1"),
    ],
    "pad_reflect_1d": [
        refused(lambda: gg.pad_reflect_1d(f(3), 3, 0), r"^pad_reflect_1d\(x=f32\[3\]\): left 3 .* from 0 to 2"),
        refused(lambda: gg.pad_reflect_1d(f(), 0, 0), r"^pad_reflect_1d\(x=f32\[\]\)"),
    ],
    "roll": [
        refused(lambda: gg.roll(f(2, 3), (1,)), r"^roll\(x=f32\[2,3\]\): \(1,\) must be one number for each of 2")
    ],
    "transpose": [
        refused(lambda: f(3).T, r"^transpose\(x=f32\[3\]\): no axes"),
        refused(lambda: gg.transpose(f(2, 2), 0, 2), r"no axes 0 and 2"),
    ],
    "indexing": [
        refused(lambda: f(2, 3)[2], r"f32\[2,3\]\[2\]: index 2 is out of range for size 2"),
        refused(lambda: f(2, 3)[0, 0, 0], r"too many indices for 2 axes"),
        refused(lambda: f(2, 3)[..., ...], r"too many indices"),
        refused(lambda: f(2, 3)[:, [0, 1]], r"an index is an integer, a slice, ... or None"),
        refused(lambda: f(2, 3)[True], r"an index is an integer"),
        refused(lambda: f(2, 3)["a"], r"an index is an integer"),
    ],
    "matmul": [
        refused(lambda: f(2, 3) @ f(4, 2), r"^matmul\(a=f32\[2,3\], b=f32\[4,2\]\): .*3.*4"),
        refused(lambda: f() @ f(2), r"^matmul\("),
    ],
    "out_prod": [refused(lambda: gg.out_prod(f(3, 2), f(4, 2)), r"^out_prod\(a=f32\[3,2\], b=f32\[4,2\]\): ")],
    "compress_kv": [
        refused(
            lambda: gg.compress_kv(f(1, 8, 4), f(2), cmp_ratio=2), r"^compress_kv\(kv=f32\[1,8,4\], .*must have the"
        ),
        refused(
            lambda: gg.compress_kv(f(8, 1, 4), f(3), cmp_ratio=2), r"weights must have the shape \(2,\) or \(2, 4\)"
        ),
        refused(lambda: gg.compress_kv(f(8, 1, 4), f(0), cmp_ratio=0), r"cmp_ratio=0 must be 1 or more"),
    ],
    "operators": [
        refused(lambda: f(3) ** 3, r"only the powers 2 and 0.5"),
        refused(lambda: f(3) + "a", r"no dtype for NumPy's"),
        refused(lambda: bool(f(1)), r"no truth value", TypeError),
        refused(lambda: len(f()), r"no length", TypeError),
    ],
    "tensor": [
        refused(lambda: gg.tensor(), r"^tensor\(\): give either a value or a shape"),
        refused(lambda: gg.tensor(1.0, shape=(1,)), r"^tensor\(\): give either a value or a shape"),
        refused(lambda: gg.tensor(np.ones((1, 1, 1, 1, 1))), r"5 axes .*the most is 4"),
        refused(lambda: gg.tensor(shape=(-1,)), r"negative size in \(-1,\)"),
        refused(lambda: gg.tensor([2**40]), r"1099511627776 is outside of i32"),
        refused(lambda: gg.tensor([2**31 - 1, 2**31]), r"2147483648 is outside of i32"),
        refused(lambda: gg.tensor([-(2**31), -(2**31) - 1]), r"-2147483649 is outside of i32"),
        refused(lambda: gg.tensor([True]), r"no dtype for NumPy's bool"),
        refused(lambda: gg.tensor(["a"]), r"no dtype for NumPy's"),
        refused(lambda: gg.tensor([1j]), r"no dtype for NumPy's complex"),
        refused(lambda: gg.tensor([1], param=True), r"a parameter must be of a float dtype"),
        refused(lambda: gg.tensor([1.5], dtype=gg.I32), r"i32 takes integers, not float"),
        refused(lambda: gg.tensor(1.0, dtype="f32"), r"dtype must be one of f32, f16, bf16, i32, .*q6_k, not 'f32'"),
    ],
    "set": [
        refused(lambda: f(3).set(np.ones(4)), r"^set\(leaf: f32\[3\]\): the value has shape \(4,\)"),
        refused(lambda: gg.neg(f(3)).set(np.ones(3)), r"only leaves can be set", GgradError),
    ],
    "marks": [
        refused(lambda: gg.set_param(gg.neg(f(3))), r"only leaves can be parameters", GgradError),
        refused(lambda: gg.set_loss(f(3)), r"^set_loss\(leaf: f32\[3\]\): a loss is a scalar"),
    ],
}

EVERY_CHECK = [
    pytest.param(*check, id=f"{name} {n}") for name, checks in (TABLE | ALSO).items() for n, check in enumerate(checks)
]


@pytest.mark.parametrize("call, message, error", EVERY_CHECK)
def test_bad_input_is_refused_with_a_message_that_helps(call, message, error):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, (GgradError, TypeError))


def test_every_op_is_in_the_table():
    assert set(TABLE) == set(registry) - {part.name}


# -- what holds for every op ----------------------------------------------------------------------------------

FIRST_CASES = [pytest.param(op, next(iter(cases.values())), id=op) for op, cases in CASES.items()]


def node_of(build):
    made = build(Maker())
    t = made[0] if isinstance(made, tuple) else made
    return t.src[0] if t.op is part else t


@pytest.mark.parametrize("op, build", FIRST_CASES)
def test_missing_and_unknown_arguments_are_named(op, build):
    t = node_of(build)
    if t.op.required:
        with pytest.raises(TypeError, match=rf"^{op}\(\) needs the input {t.op.inputs[0]}"):
            t.op.node(**t.attrs)
    with pytest.raises(TypeError, match=rf"^{op}\(\) has no argument 'bogus'"):
        t.op.node(*t.src, **t.attrs, bogus=1)
    if not t.op.variadic:
        with pytest.raises(TypeError, match=rf"^{op}\(\) takes at most"):
            t.op.node(*t.src, *t.attrs.values(), 1, 2)


@pytest.mark.parametrize("op, build", FIRST_CASES)
def test_attributes_of_a_wrong_type_are_named(op, build):
    t = node_of(build)
    for name in t.op.record.names or ():
        for wrong in (object(), None, "wrong", [1.5, "a"]):
            with pytest.raises(ShapeError, match=rf"^{op}\(\): {name} must be "):
                t.op.node(*t.src, **t.attrs | {name: wrong})


@pytest.mark.parametrize("op, build", FIRST_CASES)
def test_inputs_of_a_wrong_dtype_are_named(op, build):
    t = node_of(build)
    for at, s in enumerate(t.src):
        accepted = t.op.dtypes[min(at, len(t.op.dtypes) - 1)]
        wrong = next((d for d in (gg.I32, gg.F32) if d not in accepted), None)
        if s is None or wrong is None:
            continue
        src = [gg.tensor(shape=s.shape, dtype=wrong) if j == at else u for j, u in enumerate(t.src)]
        with pytest.raises(ShapeError, match=rf"^{op}\(.*\): \w+ is {wrong}, and must be "):
            t.op.node(*src, **t.attrs)


SHAPES = [(), (1,), (3,), (0,), (2, 3), (3, 2), (1, 1), (2, 3, 4), (1, 5, 1), (2, 2, 2, 2), (0, 3), (3, 1, 1, 3)]


@pytest.mark.native
@pytest.mark.parametrize(
    "op, build", [pytest.param(o, b, id=f"{o}: {n}") for o, c in CASES.items() for n, b in c.items()]
)
def test_other_shapes_are_refused_or_computed_rightly(op, build):
    """Never a crash, an unexplained error, or a wrong result."""
    if op in ("custom", "custom_back"):
        return  # what a user's function does with them is its own matter
    t = node_of(build)
    rng = np.random.default_rng(0)
    for at, s in enumerate(t.src):
        if s is None or s in t.updates or s.dtype.quantized:  # whose rows have few sizes
            continue
        longer = [(*s.shape[:a], s.shape[a] + 1, *s.shape[a + 1 :]) for a in range(s.ndim)]
        for shape in (*SHAPES, *longer, s.shape[1:], (1, *s.shape)[-5:]):
            if len(shape) > 4:
                continue
            value = np.zeros(shape, np.int32) if s.dtype is gg.I32 else rng.uniform(0.1, 1, shape)
            other = gg.tensor(value, dtype=s.dtype)
            try:
                made = t.op.node(*(other if j == at else u for j, u in enumerate(t.src)), **t.attrs)
            except ShapeError as error:
                assert re.match(rf"{op}\(.*\w+=\w+\[.*\): .", str(error)), error
                continue
            graph = gg.Graph().build_forward_expand(*(made if isinstance(made, tuple) else (made,)))
            with contextlib.suppress(IndexRangeError):  # of a table without rows
                compare_with_reference(graph, threads=(1, 2), rtol=RTOL.get(op))


# -- what only a run can see ----------------------------------------------------------------------------------

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1, -(2**31)])
def test_an_index_out_of_range_stops_the_run(backend, wrong):
    table, ids = gg.tensor(np.eye(3)), gg.tensor([0, 1, wrong, 2])
    later = gg.tensor(np.zeros((4, 3)), role="accumulator")
    graph = gg.Graph().build_forward_expand(gg.accumulate(later, gg.get_rows(table, ids)))
    with pytest.raises(
        IndexRangeError, match=rf"^get_rows\(x=f32\[3,3\], ids=i32\[4\]\): ids holds {wrong}, .* 0 to 2"
    ):
        graph.compute(backend=backend)
    assert not later.numpy().any(), "a later node has run"
    ids.set(np.array([0, 1, 2, 2]))
    graph.compute(backend=backend)
    np.testing.assert_array_equal(later.numpy(), np.eye(3)[[0, 1, 2, 2]])


INDEXED = {
    "mul_mat_id": (3, lambda ids: gg.mul_mat_id(f(3, 2, 5), f(4, 1, 5), ids.reshape(4, 1))),
    "mul_mat_id_back": (3, lambda ids: gg.mul_mat_id_back(f(4, 1, 5), f(4, 1, 4), ids.reshape(4, 1), experts=3)),
    "get_rows": (3, lambda ids: gg.get_rows(f(3, 2), ids)),
    "get_rows_back": (3, lambda ids: gg.get_rows_back(f(4, 2), ids, rows=3)),
    "set_rows": (3, lambda ids: gg.set_rows(f(3, 2), f(4, 2), ids)),
    "set_rows_back": (3, lambda ids: gg.set_rows_back(f(3, 2), ids)),
    "cross_entropy_class": (3, lambda ids: gg.cross_entropy_loss(f(4, 3), ids)),
    "cross_entropy_class_back": (3, lambda ids: gg.cross_entropy_loss_back(f(), f(4, 3), ids)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("limit, build", INDEXED.values(), ids=INDEXED)
def test_every_op_that_takes_indices_checks_them(limit, build, wrong, backend):
    graph = gg.Graph().build_forward_expand(build(gg.tensor([0, limit - 1, wrong, 1])))
    with pytest.raises(IndexRangeError, match=rf"^\w+\(.*i32\[4.*\].*\): \w+ holds {wrong}, .* 0 to {limit - 1}"):
        graph.compute(backend=backend)


@pytest.mark.native
def test_an_index_out_of_range_is_found_by_any_number_of_threads():
    table = gg.tensor(np.ones((5, 64)))
    for at in (0, 4000, 8191):
        ids = np.zeros(8192, np.int32)
        ids[at] = 9
        graph = gg.Graph().build_forward_expand(gg.get_rows(table, gg.tensor(ids)))
        for threads in (1, 2, 7):
            with pytest.raises(IndexRangeError, match="ids holds 9"):
                graph.compute(threads=threads)


@pytest.mark.native
def test_an_op_without_a_kernel_is_named():
    from python_kernels import temporary_ops

    with temporary_ops():

        @gg.op(layout="any")
        def no_kernel(x):
            """x"""
            return x.spec

        no_kernel.reference(lambda x: x)
        graph = gg.Graph().build_forward_expand(no_kernel(f(3)))
        with pytest.raises(gg.errors.KernelError, match=r"no_kernel has no kernel: declare one with @no_kernel.kernel"):
            graph.compute(backend="native")


def test_all_errors_have_one_base():
    raised = [
        e
        for e in vars(gg.errors).values()
        if isinstance(e, type) and issubclass(e, Exception) and not issubclass(e, Warning)
    ]
    assert all(issubclass(e, GgradError) for e in raised)
    assert issubclass(ShapeError, ValueError) and issubclass(IndexRangeError, IndexError)


KDA_FAULTS = {
    "begin at 0": ([1, 3, 5], "1, and must be from 0 to 0"),
    "never decrease": ([0, 4, 3, 5], "3, and must be from 4 to 5"),
    "end at T": ([0, 4], "4, and must be from 5 to 5"),
    "not beyond T": ([0, 6, 5], "6, and must be from 0 to 5"),
    "not before 0": ([0, -1, 5], "-1, and must be from 0 to 5"),
    "some sequence": ([0], "0, and must be from 5 to 5"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("boundaries, found", KDA_FAULTS.values(), ids=KDA_FAULTS)
@pytest.mark.parametrize("op", ["kda", "kda_recurrent", "kda_back"])
def test_boundaries_that_are_none_stop_the_run(op, boundaries, found, backend):
    call = kda_back if op == "kda_back" else kda
    options = {"do": f(1, 5, 2, 3)} if op == "kda_back" else {"op": getattr(gg, op)}
    made = call(cu_seqlens=gg.tensor(boundaries), **options)
    graph = gg.Graph().build_forward_expand(made[0] if isinstance(made, tuple) else made)
    with pytest.raises(IndexRangeError, match=rf"^{op}\(.*\): cu_seqlens holds {found}. What is made of it was not"):
        graph.compute(backend=backend)


POOL_FAULTS = {
    "a place beyond the pool": ([[0, 7]], None, [0, 2], r"slots holds 7, and must be from 0 to 6"),
    "a place before it": ([[0, -1]], None, [0, 2], r"slots holds -1, and must be from 0 to 6"),
    "a place of two sequences": ([[0, 1], [1, 2]], None, [0, 1, 2], None),
    "a place that two use": ([[0, 1], [1, 2]], None, [0, 2, 2], r"slots holds 1 for two sequences"),
    "no token accepted": ([[0, 1]], [0], [0, 2], r"accepted holds 0, and must be from 1 to 2"),
    "more accepted than there are": ([[0, 1]], [3], [0, 2], r"accepted holds 3, and must be from 1 to 2"),
    "too long a sequence": ([[0]], None, [0, 2], r"cu_seqlens holds 2, and must be from 0 to 1"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots, accepted, boundaries, message", POOL_FAULTS.values(), ids=POOL_FAULTS)
def test_wrong_places_in_a_pool_stop_the_run_before_it_writes(slots, accepted, boundaries, message, backend):
    pool = gg.tensor(np.ones((7, 2, 4, 3)))
    out = gg.kda_recurrent(
        f(1, 2, 2, 4), f(1, 2, 2, 4), f(1, 2, 2, 3), f(1, 2, 2, 4), f(1, 2, 2), initial_state=pool,
        ssm_state_indices=slots, num_accepted_tokens=accepted, cu_seqlens=boundaries,
    )  # fmt: skip
    graph = gg.Graph().build_forward_expand(out)
    if message is None:
        graph.compute(backend=backend)
        assert (pool.numpy() != 1).any()
        return
    with pytest.raises(IndexRangeError, match=rf"^kda_recurrent_pool\(.*\): {message}"):
        graph.compute(backend=backend)
    assert (pool.numpy() == 1).all() and not out.numpy().any()


# -- functions that are made of ops refuse what their docstrings say -------------------------------------------

OF_ONE = "log10 logsigmoid mish reciprocal relu6 rsqrt selu softsign tanhshrink celu hardtanh isfinite isinf softmax " \
    "log_softmax sort logsumexp std var argmin amin min"  # fmt: skip
OF_AXES = "softmax log_softmax sort logsumexp std var amin min flip"
OF_TWO = "atan2 fmod hypot logaddexp xlogy greater greater_equal"


@pytest.mark.parametrize("name", OF_ONE.split())
def test_functions_of_floats_refuse_integers_and_blocks(name):
    for x in (i(2, 3), gg.tensor(shape=(2, 32), dtype=gg.Q8_0)):
        with pytest.raises(ShapeError):
            getattr(gg, name)(x)


@pytest.mark.parametrize("name", OF_AXES.split())
def test_functions_along_axes_refuse_those_that_there_are_not(name):
    with pytest.raises(ShapeError, match=r"axis|axes"):
        getattr(gg, name)(f(2, 3), axis=5)


@pytest.mark.parametrize("name", OF_TWO.split())
def test_functions_of_two_refuse_what_does_not_broadcast_and_other_dtypes(name):
    for other in (f(2, 4), i(2, 3)):
        with pytest.raises(ShapeError):
            getattr(gg, name)(f(2, 3), other)


@pytest.mark.parametrize("name", ["dup", "ones_like", "zeros_like", "isnan", "transpose", "flip"])
def test_functions_that_move_elements_do_not_cut_blocks(name):
    with pytest.raises(ShapeError):
        getattr(gg, name)(gg.tensor(shape=(2, 32), dtype=gg.Q8_0))
