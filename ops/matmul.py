"""Products of matrices.  One op, ggml's `mul_mat`; transposes are views, so the others are made of it.

The smaller operand may be shared by groups of batches, as grouped-query attention needs: batch i of b
uses batch i // (B / A) of a, along each of the two batch axes.
"""

import numpy as np

from ..core.builtin import provides
from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.op import Blocks, Half, Weight, ensure, op
from ..core.tensor import Spec, Tensor, tensor
from .layout import broadcast_to, repeat_back, reshape, transpose

__all__ = ["matmul", "mul_mat", "mul_mat_onto", "mul_mat_quantized_back", "out_prod"]


@op(layout="any")
def mul_mat(a: Weight, b: Half):
    """b @ a^T: of a[..., M, K] and b[..., N, K] the products of all rows, f32 [..., N, M].

    Batch sizes of b are multiples of a's; equal blocks of them share a batch of a.  A quantized `a` is decoded
    piece by piece on the way, and has no gradient; b stays f32, where ggml rounds its rows to 8 bits.
    """
    ensure(a.ndim >= 2 and b.ndim >= 2, "a and b need two axes or more; gg.matmul takes vectors too")
    ensure(a.shape[-1] == b.shape[-1], f"rows of a have {a.shape[-1]} elements, rows of b {b.shape[-1]}")
    return Spec((*_batches(a, b, "b"), b.shape[-2], a.shape[-2]))


@mul_mat.grad
def _(t, dout, *, needs):
    a, b = t.src
    da = _gradient_of_shared(a, b, dout) if needs[0] else None
    db = None
    if needs[1]:
        db = reshape(mul_mat_quantized_back(a, dout) if a.dtype.quantized else mul_mat(transpose(a), dout), b.shape)
    return da, db


@mul_mat.flops
def _(t):
    return 2 * t.size * t.src[0].shape[-1]


@mul_mat.reference
def _(a, b):
    n = max(a.ndim, b.ndim)
    a, b = a.reshape(_padded(a.shape, n)), b.reshape(_padded(b.shape, n))
    for axis in range(n - 2):
        if a.shape[axis] > 1:
            a = np.repeat(a, b.shape[axis] // a.shape[axis], axis)
    return b @ np.swapaxes(a, -1, -2)


@op(layout="any", inplace=("total",))
def mul_mat_onto(a: Half, b: Half, total):
    """total + b @ a^T: of matrices a[M, K], b[N, K] and total[N, M], in one pass over the total."""
    ensure(a.ndim == b.ndim == 2, "a and b must be matrices")
    ensure(a.shape[1] == b.shape[1], f"rows of a have {a.shape[1]} elements, rows of b {b.shape[1]}")
    ensure(total.shape == (b.shape[0], a.shape[0]), f"total must be {(b.shape[0], a.shape[0])}")
    return total.spec


@mul_mat_onto.grad
def _(t, dout):
    a, b, _ = t.src
    return mul_mat(transpose(b), transpose(dout)), mul_mat(transpose(a), dout), dout


@mul_mat_onto.flops
def _(t):
    return 2 * t.size * t.src[0].shape[1]


mul_mat_onto.reference(lambda a, b, total: total + b @ a.T)


@op(layout="any")
def mul_mat_quantized_back(a: Blocks, dout: Half):
    """dout @ a: of a[..., M, K] and dout[..., N, M] the gradient of `mul_mat` by b, f32 [..., N, K]."""
    ensure(a.ndim >= 2 and dout.ndim >= 2, "a and dout need two axes or more")
    ensure(a.shape[-2] == dout.shape[-1], f"a has {a.shape[-2]} rows, rows of dout have {dout.shape[-1]} elements")
    return Spec((*_batches(a, dout, "dout"), dout.shape[-2], a.shape[-1]))


@mul_mat_quantized_back.flops
def _(t):
    return 2 * t.size * t.src[0].shape[-2]


@mul_mat_quantized_back.grad
def _(t, g):
    a, dout = t.src
    return None, reshape(mul_mat(a, g), dout.shape)


@mul_mat_quantized_back.reference
def _(a, dout):
    return mul_mat.compute_reference([np.swapaxes(a, -1, -2), dout], {})


def _batches(a: Tensor, b: Tensor, name: str) -> tuple[int, ...]:
    """Batch sizes of the result: b's, of which a's are divisors."""
    n = max(a.ndim, b.ndim) - 2
    ours, theirs = _padded(a.shape[:-2], n), _padded(b.shape[:-2], n)
    for i, j in zip(ours, theirs, strict=True):
        ensure(j % i == 0 if i else j == 0, f"batch sizes of {name}, {theirs}, are no multiples of a's, {ours}")
    return theirs


def _gradient_of_shared(a: Tensor, b: Tensor, dout: Tensor) -> Tensor:
    """dout^T @ b, summed over the batches that share one of a's.

    A group that lies next to the rows is one longer sum: for a weight, over all tokens of all batches.
    """
    A0, A1, M, K = _padded(a.shape, 4)
    B0, B1, N, _ = _padded(b.shape, 4)
    batches: tuple[int, ...]
    if A1 == 1:
        batches = (A0,) if A0 != 1 else ()
        rows = B0 // A0 * B1 * N if A0 else 0
    else:
        batches = (B0, A1)
        rows = B1 // A1 * N if A1 else 0
    da = mul_mat(transpose(reshape(b, (*batches, rows, K))), transpose(reshape(dout, (*batches, rows, M))))
    if len(batches) == 2 and A0 != B0:
        da = repeat_back(reshape(da, (A0, B0 // A0, A1 * M * K)), shape=(A0, 1, A1 * M * K))
    return reshape(da, a.shape)


def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """b^T @ a: of a[..., K, M] and b[..., K, N] the sum over K of outer products, f32 [..., N, M].

    Batches broadcast as `mul_mat`'s.

    Raises:
        ShapeError: fewer than two axes, columns of different lengths, or batches that do not fit.
    """
    a, b = _as_tensors(a, b)
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeError(f"out_prod(a={a.spec}, b={b.spec}): a and b need two axes or more")
    if a.shape[-2] != b.shape[-2]:
        raise ShapeError(
            f"out_prod(a={a.spec}, b={b.spec}): columns of a have {a.shape[-2]} elements, columns of b {b.shape[-2]}"
        )
    return mul_mat(transpose(a), transpose(b))


@provides
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """NumPy's a @ b, f32: of a[..., N, K] and b[..., K, M] the product [..., N, M].

    A vector is a row on the left and a column on the right, and that axis of the result is dropped.
    Batch sizes are equal, or one of them is 1.

    Raises:
        ShapeError: a scalar, inner sizes that differ, or batches that do not fit.
    """
    a, b = _as_tensors(a, b)
    where = f"matmul(a={a.spec}, b={b.spec})"
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ShapeError(f"{where}: {name} is a scalar; the operator for that is *")
        if x.dtype is I32:
            raise ShapeError(f"{where}: {name} is i32, and must be f32, f16 or bf16; gg.cast converts")
    inner_b = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner_b:
        raise ShapeError(f"{where}: rows of a have {a.shape[-1]} elements, columns of b {inner_b}")
    left = a if a.ndim > 1 else reshape(a, (1, *a.shape))
    right = transpose(b) if b.ndim > 1 else reshape(b, (1, *b.shape))
    try:
        batches = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ShapeError(f"{where}: batch sizes {left.shape[:-2]} and {right.shape[:-2]} do not fit") from None
    if _padded(left.shape[:-2], len(batches)) != batches:
        left = broadcast_to(left, shape=(*batches, *left.shape[-2:]))
    out = mul_mat(right, left)
    rows = (a.shape[-2],) if a.ndim > 1 else ()
    columns = (b.shape[-1],) if b.ndim > 1 else ()
    return reshape(out, (*batches, *rows, *columns))


def _padded(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The shape with leading ones, so that it has n axes."""
    return (1,) * (n - len(shape)) + shape


def _as_tensors(*values) -> list[Tensor]:
    return [x if isinstance(x, Tensor) else tensor(x) for x in values]
