"""Hyper-connections: several residual streams that are mixed by small matrices, which Sinkhorn's method balances."""

import numpy as np

from ..core.errors import ShapeError
from ..core.op import ensure, op
from ..core.tensor import Tensor
from ..diff.autodiff import through_gradients_of
from .elementwise import add, div, mul
from .elementwise import scale as times
from .layout import reshape, transpose
from .matmul import mul_mat
from .reduce import sum as total
from .softmax import soft_max

__all__ = ["dsv4_hc_comb", "dsv4_hc_post", "dsv4_hc_pre", "sinkhorn", "sinkhorn_back"]


@op(layout="contiguous")
def sinkhorn(logits, *, eps: float = 1e-6, n_iter: int):
    """Of logits[T, n, n] matrices whose rows and columns sum to about 1.

    softmax along rows + eps; then `n_iter` times (the first time columns only) rows and columns divided by their
    sums + eps.

    Source: Sinkhorn and Knopp 1967.
    """
    _check(logits, n_iter)
    return logits.spec


@sinkhorn.grad
def _(t, dout):
    return (sinkhorn_back(dout, t.src[0], **t.attrs),)


@sinkhorn.reference
def _(logits, *, eps, n_iter):
    return _rounds(logits, eps, n_iter)[-1][0]


@op(layout="contiguous")
def sinkhorn_back(dout, logits, *, eps: float = 1e-6, n_iter: int):
    """The gradient of `sinkhorn` by its logits: the rounds again, then backwards."""
    _check(logits, n_iter)
    ensure(dout.shape == logits.shape, "dout must have the shape of logits")
    return logits.spec


@sinkhorn_back.reference
def _(dout, logits, *, eps, n_iter):
    (soft, _, _), *divisions = _rounds(logits, eps, n_iter)
    d = dout
    for value, sums, axis in reversed(divisions):
        d = (d - (d * value).sum(axis, keepdims=True)) / sums
    soft = soft - eps
    return soft * (d - (d * soft).sum(-1, keepdims=True))


@sinkhorn_back.grad
@through_gradients_of
def _(logits, *, eps, n_iter):
    value = times(soft_max(logits), factor=1, bias=eps)
    for axis in _axes(n_iter):
        value = div(value, times(total(value, axis, keepdims=True), factor=1, bias=eps))
    return value


def _check(logits: Tensor, n_iter: int) -> None:
    ensure(logits.ndim == 3 and logits.shape[1] == logits.shape[2], "logits must be [T, n, n]")
    ensure(n_iter >= 0, f"n_iter={n_iter} is negative")


def _axes(n_iter: int) -> list[int]:
    """Of columns first, then of rows and columns in turn."""
    return [-2] + [-1, -2] * (n_iter - 1) if n_iter else []


def _rounds(logits, eps, n_iter):
    """What each step gave, the sums it divided by, and the axis of these."""
    e = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    steps: list[tuple] = [(e / e.sum(-1, keepdims=True) + eps, None, None)]
    for axis in _axes(n_iter):
        value = steps[-1][0]
        sums = value.sum(axis, keepdims=True) + eps
        steps.append((value / sums, sums, axis))
    return steps


def dsv4_hc_comb(mixes: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, n_iter: int = 20) -> Tensor:
    """The mixing matrices [T, n, n] of n streams, from the last n n of mixes[T, (2 + n) n].

    `sinkhorn` of mixes * scale[2] + base, where scale is [3] and base [(2 + n) n].

    Sources: Zhu et al. 2024, "Hyper-Connections", arXiv:2409.19606; Xie et al. 2025, arXiv:2512.24880.

    Raises:
        ShapeError: sizes of no n.
    """
    where = f"dsv4_hc_comb(mixes={mixes.spec}, scale={scale.spec}, base={base.spec})"
    width = mixes.shape[-1] if mixes.ndim == 2 else 0
    n = next((n for n in range(1, width + 1) if (2 + n) * n >= width), 0)
    if (2 + n) * n != width or not n or base.shape != (width,) or scale.shape != (3,):
        raise ShapeError(f"{where}: mixes must be [T, (2 + n) n], scale [3] and base [(2 + n) n]")
    logits = add(mul(mixes[:, 2 * n :], scale[2:]), base[2 * n :])
    return sinkhorn(reshape(logits, (mixes.shape[0], n, n)), eps=eps, n_iter=n_iter)


def dsv4_hc_pre(x: Tensor, weights: Tensor) -> Tensor:
    """The streams of x[T, n, d] added up with weights[T, n]: [T, d].

    Source: Zhu et al. 2024, arXiv:2409.19606.

    Raises:
        ShapeError: sizes that differ.
    """
    if x.ndim != 3 or weights.shape != x.shape[:2]:
        raise ShapeError(f"dsv4_hc_pre(x={x.spec}, weights={weights.spec}): x must be [T, n, d] and weights [T, n]")
    T, n, d = x.shape
    return reshape(mul_mat(transpose(x), reshape(weights, (T, 1, n))), (T, d))


def dsv4_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The new streams [T, n, d]: out[t, i] = x[t] post[t, i] + sum over j of comb[t, j, i] residual[t, j].

    Source: Zhu et al. 2024, arXiv:2409.19606.

    Raises:
        ShapeError: sizes that differ; x is [T, d], residual [T, n, d], post [T, n], comb [T, n, n].
    """
    given = f"x={x.spec}, residual={residual.spec}, post={post.spec}, comb={comb.spec}"
    T, n, d = residual.shape if residual.ndim == 3 else (0, 0, 0)
    if residual.ndim != 3 or (x.shape, post.shape, comb.shape) != ((T, d), (T, n), (T, n, n)):
        raise ShapeError(f"dsv4_hc_post({given}): they must be [T, d], [T, n, d], [T, n] and [T, n, n]")
    new = mul_mat(reshape(x, (T, d, 1)), reshape(post, (T, n, 1)))
    return add(mul_mat(transpose(residual), transpose(comb)), new)
