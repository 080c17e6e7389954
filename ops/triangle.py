"""Matrices of which one triangle counts: cut out, masked, or only the diagonal."""

import enum

import numpy as np

from ..core.errors import ShapeError
from ..core.op import ensure, op
from ..core.tensor import Tensor
from .layout import reshape, strided_back

__all__ = ["TriType", "diag", "diag_mask_inf", "diag_mask_zero", "tri", "triangle"]


class TriType(enum.IntEnum):
    """What `tri` keeps; the numbers are ggml's."""

    UPPER_DIAG = 0
    UPPER = 1
    LOWER_DIAG = 2
    LOWER = 3


@op(layout="any", inplace=("x",))
def triangle(x, *, diagonal: int = 0, upper: bool = False, fill: float = 0.0):
    """x[..., i, j] up to the diagonal j - i = `diagonal`, or from it on if `upper`; all else is `fill`.

    What is filled is not looked at.
    """
    ensure(x.ndim >= 2, "x must have two axes or more: [..., rows, columns]")
    return x.spec


@triangle.grad
def _(t, dout):
    return (triangle(dout, diagonal=t.attrs["diagonal"], upper=t.attrs["upper"]),)


@triangle.reference
def _(x, *, diagonal, upper, fill):
    kept = np.arange(x.shape[-1]) - np.arange(x.shape[-2])[:, None]
    return np.where(kept >= diagonal if upper else kept <= diagonal, x, fill)


def tri(x: Tensor, kind: TriType | str = TriType.LOWER_DIAG) -> Tensor:
    """A triangle of the matrices x[..., i, j], and zeros.

    Args:
        x: [..., rows, columns]; not only square ones, as in ggml.
        kind: "lower" or "upper" without the diagonal, "lower-diag" or "upper-diag" with it.

    Raises:
        ShapeError: `x` has fewer than two axes, or there is no such kind.
    """
    try:
        kind = TriType[kind.upper().replace("-", "_")] if isinstance(kind, str) else TriType(kind)
    except (KeyError, ValueError):
        names = " or ".join(repr(k.name.lower().replace("_", "-")) for k in TriType)
        raise ShapeError(f"tri(x={x.spec}): kind must be {names}, not {kind!r}") from None
    diagonal = {TriType.UPPER: 1, TriType.LOWER: -1}.get(kind, 0)
    return triangle(x, diagonal=diagonal, upper=kind in (TriType.UPPER, TriType.UPPER_DIAG))


def diag_mask_inf(x: Tensor, n_past: int = 0) -> Tensor:
    """x[..., i, j] where j <= n_past + i, and -inf where it is not: what a causal softmax is taken of.

    Args:
        x: f32 [..., rows, columns]; f16 and bf16 are cast.

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    return triangle(x, diagonal=n_past, fill=-np.inf)


def diag_mask_zero(x: Tensor, n_past: int = 0) -> Tensor:
    """x[..., i, j] where j <= n_past + i, and 0 where it is not.

    Args:
        x: f32 [..., rows, columns]; f16 and bf16 are cast.

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    return triangle(x, diagonal=n_past)


def diag(x: Tensor) -> Tensor:
    """Diagonal matrices [..., n, n] with the rows of x[..., 1, n], or of a vector x[n], and zeros around them.

    Raises:
        ShapeError: no such shape.
    """
    if x.ndim == 0 or (x.ndim > 1 and x.shape[-2] != 1):
        raise ShapeError(f"diag(x={x.spec}): x must be [..., 1, n], or a vector")
    batch, n = x.shape[:-2], x.shape[-1]
    strides = [n * n * int(np.prod(batch[axis + 1 :])) for axis in range(len(batch))]
    return strided_back(reshape(x, (*batch, n)), shape=(*batch, n, n), strides=(*strides, n + 1))
