"""Mixtures of experts: products with a matrix chosen for each row, and the bias that goes with it."""

from typing import cast

import numpy as np

from ..core.errors import IndexRangeError, ShapeError
from ..core.op import Blocks, Half, Int, Weight, ensure, op
from ..core.tensor import Spec, Tensor
from .elementwise import add
from .layout import repeat_back, transpose
from .rows import get_rows

__all__ = ["add_id", "mul_mat_id", "mul_mat_id_back", "mul_mat_id_quantized_back"]


Count = object  # an int, which kernels read from the result


@op(layout="any")
def mul_mat_id(a: Weight, b: Half, ids: Int):
    """Each row times the matrix of its expert: of a[E, M, K], b[T, U, K] and ids[T, U] the [T, U, M], f32.

    A b[T, 1, K] is one row for all U experts of a token.  An id outside of 0 ... E-1 stops the run.  A quantized `a`
    has no gradient.

    Source: Shazeer et al. 2017, arXiv:1701.06538.
    """
    ensure(a.ndim == b.ndim == 3 and ids.ndim == 2, "a must be [E, M, K], b [T, U, K] and ids [T, U]")
    ensure(a.shape[2] == b.shape[2], f"rows of a have {a.shape[2]} elements, rows of b {b.shape[2]}")
    _check_rows("b", b, ids)
    return Spec((*ids.shape, a.shape[1]))


@mul_mat_id.grad
def _(t, dout, *, needs):
    a, b, ids = t.src
    da = mul_mat_id_back(b, dout, ids, experts=a.shape[0]) if needs[0] else None
    if not needs[1]:
        return da, None, None
    db = mul_mat_id_quantized_back(a, dout, ids) if a.dtype.quantized else mul_mat_id(transpose(a), dout, ids)
    return da, db if db.shape == b.shape else repeat_back(db, shape=b.shape), None


@mul_mat_id.reference
def _(a, b, ids):
    _check_ids("mul_mat_id", ids, len(a))
    out = np.zeros((*ids.shape, a.shape[1]))
    for e, matrix in enumerate(a):
        t, u = np.nonzero(ids == e)
        out[t, u] = b[t, u % b.shape[1]] @ matrix.T
    return out


@mul_mat_id.flops
def _(t):
    return 2 * t.size * t.src[0].shape[2]


@op(layout="any")
def mul_mat_id_quantized_back(a: Blocks, dout: Half, ids: Int):
    """The gradient of `mul_mat_id` by b: of a[E, M, K] and dout[T, U, M] the [T, U, K], f32."""
    ensure(a.ndim == dout.ndim == 3 and ids.ndim == 2, "a must be [E, M, K], dout [T, U, M] and ids [T, U]")
    ensure(a.shape[1] == dout.shape[2], f"a has {a.shape[1]} rows, rows of dout have {dout.shape[2]} elements")
    _check_rows("dout", dout, ids)
    return Spec((*ids.shape, a.shape[2]))


@mul_mat_id_quantized_back.flops
def _(t):
    return 2 * t.size * t.src[0].shape[1]


@mul_mat_id_quantized_back.grad
def _(t, g):
    a, dout, ids = t.src
    d = mul_mat_id(a, g, ids)
    return None, d if d.shape == dout.shape else repeat_back(d, shape=dout.shape), None


@mul_mat_id_quantized_back.reference
def _(a, dout, ids):
    return mul_mat_id.compute_reference([np.swapaxes(a, 1, 2), dout, ids], {})


@op(layout="any")
def mul_mat_id_back(b: Half, dout: Half, ids: Int, *, experts: Count):
    """The gradient of `mul_mat_id` by a, of so many experts: [E, M, K], the sum of dout^T b over each expert's rows."""
    ensure(b.ndim == dout.ndim == 3 and ids.ndim == 2, "b must be [T, U, K], dout [T, U, M] and ids [T, U]")
    ensure(isinstance(experts, int) and experts >= 0, f"experts={experts} is no number from 0")
    _check_rows("b", b, ids)
    _check_rows("dout", dout, ids)
    return Spec((cast(int, experts), dout.shape[2], b.shape[2]))


@mul_mat_id_back.grad
def _(t, g, *, needs):
    b, dout, ids = t.src
    db = mul_mat_id(transpose(g), dout, ids) if needs[0] else None
    ddout = mul_mat_id(g, b, ids) if needs[1] else None
    both = zip((db, ddout), (b, dout), strict=True)
    return *(d if d is None or d.shape == x.shape else repeat_back(d, shape=x.shape) for d, x in both), None


@mul_mat_id_back.reference
def _(b, dout, ids, *, experts):
    _check_ids("mul_mat_id_back", ids, experts)
    da = np.zeros((experts, dout.shape[2], b.shape[2]))
    for e in range(experts):
        t, u = np.nonzero(ids == e)
        da[e] = dout[t, u % dout.shape[1]].T @ b[t, u % b.shape[1]]
    return da


@mul_mat_id_back.flops
def _(t):
    return 2 * t.src[2].size * t.shape[1] * t.shape[2]


def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """a[T, U, n] plus row ids[t, u] of b[E, n]: the bias of each row's expert.

    Raises:
        ShapeError: sizes that differ.
    """
    if a.ndim != 3 or b.ndim != 2 or ids.shape != a.shape[:2] or b.shape[1] != a.shape[2]:
        raise ShapeError(f"add_id(a={a.spec}, b={b.spec}, ids={ids.spec}): they must be [T, U, n], [E, n] and [T, U]")
    return add(a, get_rows(b, ids))


def _check_rows(name: str, x: Tensor, ids: Tensor) -> None:
    fits = x.shape[0] == ids.shape[0] and x.shape[1] in (1, ids.shape[1])
    ensure(fits, f"{name} must have {ids.shape[0]} tokens, with 1 or {ids.shape[1]} rows each")


def _check_ids(name: str, ids: np.ndarray, experts: int) -> None:
    wrong = (ids < 0) | (ids >= experts)
    if wrong.any():
        raise IndexRangeError(f"{name}: ids holds {ids[wrong].flat[0]}, and must be from 0 to {experts - 1}")
