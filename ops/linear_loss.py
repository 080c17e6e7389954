"""Cross entropy of a last layer's logits, which are made some rows at a time: all of them never exist at once.

The nodes of a chunk of rows are its logits, its losses and, where gradients are wanted, what these rows add to each
gradient; one chunk after the other.  All that is read of a chunk's logits is read while they are there, so nothing is
computed twice.  The idea is that of Liger Kernel (Hsu et al. 2024).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from numpy.typing import ArrayLike

from ..core.dtype import F32, I32
from ..core.errors import ShapeError
from ..core.op import AnyRows, ensure, op
from ..core.tensor import Tensor, View, tensor
from .elementwise import add, div, mul, scale
from .extremes import take_along_axis
from .layout import cast, concat, reshape, transpose, wait_for
from .loss import Reduction, as_tensor, check_range, count_rows, cross_entropy_class, cross_entropy_class_back, reduced
from .matmul import mul_mat, mul_mat_onto, mul_mat_quantized_back
from .reduce import sum as sum_of
from .select import equal, not_equal, where
from .unary import log, sqr

__all__ = ["known_gradients", "linear_cross_entropy"]

CHUNK_ELEMENTS = 1 << 23  # of the logits that a chunk has: 32 MiB
LEAST_ROWS = 128  # of a chunk, for each of which the weight and its gradient are read


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | ArrayLike,
    bias: Tensor | None = None,
    *,
    class_weights: Tensor | ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction | str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """`cross_entropy_loss` of the logits x @ weight^T + bias, which are made chunk by chunk: neither the logits nor
    their gradient, each [rows, classes], is ever whole.

    A training step has the same three products as without; a graph without gradients the first of them, and one whose
    weight is no parameter two.  With reduction "none" logits are made once more when the losses' gradient is known.

    Args:
        x: [..., K].
        weight: [classes, K], f32, a half or quantized.
        targets: i32 of the shape x.shape[:-1], a class for each row.
        bias: f32 [classes], default none.
        class_weights, ignore_index, label_smoothing, z_loss, reduction: as `cross_entropy_loss` has them.
        chunk_rows: how many rows of logits there are at once; default as many as make 2^23 logits, and at least 128.

    Raises:
        ShapeError: shapes or dtypes do not fit, or label_smoothing, z_loss or chunk_rows is out of range.
        IndexRangeError: in the run, a target that is no class.
    """
    who = "linear_cross_entropy"
    reduction = reduced(who, reduction)
    check_range(who, label_smoothing, z_loss)
    if chunk_rows is not None and chunk_rows < 1:
        raise ShapeError(f"{who}(): chunk_rows must be a positive number, not {chunk_rows!r}")
    targets = as_tensor(targets)
    _check(x, weight, targets, bias)
    layer = _Layer(
        reshape(x, (targets.size, x.shape[-1])), weight, bias, reshape(targets, (targets.size,)),
        None if class_weights is None else as_tensor(class_weights), ignore_index, label_smoothing, z_loss,
        chunk_rows or max(LEAST_ROWS, CHUNK_ELEMENTS // max(1, weight.shape[0])),
    )  # fmt: skip
    each = reduction is Reduction.NONE
    share = layer.share() if reduction is Reduction.MEAN else tensor(1.0)
    losses, gradients = layer.made(None if each else share)
    loss = reshape(losses, targets.shape) if each else mul(sum_of(losses), share)

    def known(dloss: Tensor) -> list[Tensor | None]:
        if each:
            return layer.made(reshape(dloss, (targets.size,)))[1]
        return gradients if _is_one(dloss) else [None if g is None else mul(g, dloss) for g in gradients]

    inputs = [layer.x, weight, *([] if bias is None else [bias]), layer.targets]
    counts = None if each else (ignore_index, layer.class_weights, reduction is Reduction.MEAN)
    return known_gradients(loss, *inputs, known=known, counts=counts)


@op(layout="any")
def known_gradients(*xs: AnyRows, known: Any, counts: Any = None):
    """The first input, whose gradients by the others are known: `known(dout)` makes them, None of the last one.

    Args:
        xs: the value; what it depends on; targets that are classes.
        counts: ignore_index, class_weights and whether the value is a mean over the targets that count; None: the
            value does not say.
    """
    ensure(len(xs) > 0, "nothing is given")
    return View(xs[0], xs[0].shape, xs[0].strides)


@known_gradients.grad
def _(t, dout):
    return (None, *t.attrs["known"](dout), None)


known_gradients.reference(lambda value, *inputs, known, counts: value)


@known_gradients.counted
def _(t):
    return None if t.attrs["counts"] is None else count_rows(t.src[-1], *t.attrs["counts"])


@dataclass
class _Layer:
    """The last layer and its loss: x [rows, K], weight [classes, K], targets [rows]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weights: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk_rows: int

    def share(self) -> Tensor:
        """What each row has in a mean: 1 / what those that count weigh together, 0 if none does."""
        counted = not_equal(self.targets, tensor(self.ignore_index))
        if self.class_weights is None:
            weights = cast(counted, dtype=F32)
        else:
            of_targets = take_along_axis(self.class_weights, where(counted, self.targets, tensor(0)), axis=0)
            weights = where(counted, of_targets, tensor(0.0))
        together = sum_of(weights)
        none = equal(together, tensor(0.0))
        return where(none, tensor(0.0), div(tensor(1.0), where(none, tensor(1.0), together)))

    def made(self, dlosses: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The rows' losses, and gradients by x, weight and, if there is one, bias: for gradients of the losses that
        are one number or one for each row; none for None."""
        losses: list[Tensor] = []
        dx: list[Tensor] = []
        dweight: Tensor | None = None
        dbias: Tensor | None = None
        for rows in self._chunks():
            x, targets = self.x[rows], self.targets[rows]
            if losses:
                x = wait_for(x, others=losses[-1:])  # so that the logits of the chunk before are gone
            loss, dlogits = self._chunk(x, targets, dlosses if dlosses is None or not dlosses.shape else dlosses[rows])
            losses.append(loss)
            if dlogits is None:
                continue
            across, down = transpose(x), transpose(dlogits)
            dx.append(self._back(dlogits))
            if not self.weight.dtype.quantized:
                dweight = mul_mat(across, down) if dweight is None else mul_mat_onto(across, down, dweight)
            if self.bias is not None:
                dbias = sum_of(dlogits, axis=0) if dbias is None else add(dbias, sum_of(dlogits, axis=0))
        gradients = [_joined(dx) if dx else None, dweight, *([] if self.bias is None else [dbias])]
        return _joined(losses), gradients

    def _chunk(self, x: Tensor, targets: Tensor, dlosses: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Some rows' losses, and the gradient by their logits."""
        logits = mul_mat(self.weight, x)
        if self.bias is not None:
            logits = add(logits, self.bias)
        same: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        loss, top, total, weight = cross_entropy_class(logits, targets, self.class_weights, reduction=0, **same)
        dlse = None
        if self.z_loss:
            lse = add(top, log(total))  # 0 in rows that do not count
            loss = add(loss, scale(sqr(lse), factor=self.z_loss))
            dlse = None if dlosses is None else mul(scale(lse, factor=2 * self.z_loss), dlosses)
        if dlosses is None:
            return loss, None
        given = (dlosses, logits, targets, top, total, weight, dlse, self.class_weights)
        return loss, cross_entropy_class_back(*given, **same)

    def _back(self, dlogits: Tensor) -> Tensor:
        if self.weight.dtype.quantized:
            return mul_mat_quantized_back(self.weight, dlogits)
        return mul_mat(transpose(self.weight), dlogits)

    def _chunks(self) -> Iterator[slice]:
        rows = self.targets.size
        n = max(1, ceil(rows / self.chunk_rows))
        return (slice(rows * i // n, rows * (i + 1) // n) for i in range(n))


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else concat(*pieces, axis=0)


def _is_one(t: Tensor) -> bool:
    """Whether it is 1 and always will be."""
    owner, _ = t.storage
    return owner.is_leaf and owner.frozen and owner.size == 1 and owner.item() == 1


def _check(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    given = f"linear_cross_entropy(x={x.spec}, weight={weight.spec}, targets={targets.spec}): "
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"{given}x must be [..., K] and weight [classes, K]")
    if targets.dtype is not I32:
        raise ShapeError(f"{given}targets is {targets.dtype}, and must be i32")
    if targets.shape != x.shape[:-1]:
        raise ShapeError(f"{given}targets must have the shape {x.shape[:-1]}, a class for each row of x")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"{given}bias must have the shape {weight.shape[:1]}, not {bias.shape}")
