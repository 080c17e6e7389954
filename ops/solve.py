"""Triangular systems."""

import numpy as np

from ..core.op import ensure, op
from .elementwise import neg
from .matmul import mul_mat
from .triangle import tri

__all__ = ["solve_tri"]


@op(layout="contiguous", inplace=("b",))
def solve_tri(a, b, *, transposed: bool = False):
    """x of a x = b, or of a^T x = b, for a[..., n, n], of which the lower triangle is read, and b[..., n, m]."""
    ensure(a.ndim >= 2 and a.shape[-1] == a.shape[-2], "a must be [..., n, n]")
    ensure(b.ndim == a.ndim and b.shape[:-1] == a.shape[:-1], f"b must be [{', '.join(map(str, a.shape[:-1]))}, m]")
    return b.spec


@solve_tri.grad
def _(t, dout):
    """db solves the transposed system; a x = b gives da x = -a dx, so da = -db x^T, below the diagonal and on it."""
    a, turned = t.src[0], t.attrs["transposed"]
    db = solve_tri(a, dout, transposed=not turned)
    da = mul_mat(db, t) if turned else mul_mat(t, db)
    return neg(tri(da, kind="lower-diag")), db


@solve_tri.flops
def _(t):
    return t.size * t.src[0].shape[-1]


@solve_tri.reference
def _(a, b, *, transposed):
    a = np.swapaxes(a, -1, -2) if transposed else a
    n, x = a.shape[-1], np.array(b)
    order = range(n)[::-1] if transposed else range(n)
    for i in order:
        for j in order[: order.index(i)]:
            x[..., i, :] -= a[..., i, j, None] * x[..., j, :]
        x[..., i, :] /= a[..., i, i, None]
    return x
