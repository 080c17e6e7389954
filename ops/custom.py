"""Nodes that call a function of the user's with NumPy arrays: ggml's map_custom1 to 3 and custom.

The function runs under the GIL, on one thread, and reads copies of inputs that are not contiguous.  What is to run on
all threads, and without Python, is an op of one's own: see `ggrad.core.op` and its `.kernel`.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np

from ..core.dtype import F32, I32, DType
from ..core.errors import GradientError, ShapeError
from ..core.op import ensure, op
from ..core.tensor import Pack, Spec, Tensor
from ..jit.callback import Callback

__all__ = ["custom", "custom_back", "map_custom1", "map_custom2", "map_custom3"]

Number = Annotated[Tensor, (F32, I32)]


@op(layout="contiguous")
def custom(
    *inputs: Number,
    function: Callable,
    shape: tuple[int, ...],
    dtype: DType = F32,
    grad: Callable | None = None,
):
    """What function(*inputs) gives, computed in each run.

    Args:
        inputs: the function gets arrays that it must not write to, of f32 (halves are cast) or i32; and of float64
            and int64 in a run of the references, as for checks of its gradient.
        function: gives an array, or what can be made one; compiled functions of numba's are fine.  What it raises
            ends the run and comes out of `compute`.
        shape, dtype: of the result; a float result is rounded to the dtype.
        grad: grad(dout, *inputs) gives the gradients by the inputs: an array, or for several inputs a tuple, with None
            for those that have none.  Without it, no gradient can be had through this node.

    Raises:
        ShapeError: when a run finds that the result has another shape, or no such values.
    """
    ensure(callable(function), f"function={function!r} cannot be called")
    ensure(grad is None or callable(grad), f"grad={grad!r} cannot be called")
    return Spec(shape, dtype)


@custom.grad
def _(t, dout, *, needs):
    grad = t.attrs["grad"]
    if grad is None:
        raise GradientError("the function has no gradient: give custom(..., grad=) a function of (dout, *inputs)")
    wanted = tuple(i for i, needed in enumerate(needs) if needed)
    made = iter(custom_back(dout, *t.src, function=grad, wanted=wanted))
    return [next(made) if needed else None for needed in needs]


@custom.reference
def _(*inputs, function, shape, dtype, grad):
    return _fitting("the function", function(*inputs), shape, "iuf" if dtype.is_float else "iu")


custom.in_python = Callback("custom", lambda t, arrays: (custom.compute_reference(arrays, t.attrs),))


@op(layout="contiguous")
def custom_back(*inputs: Number, function: Callable, wanted: tuple):
    """The gradients that function(dout, *inputs) gives of `custom`, those by the inputs `wanted` packed in order."""
    ensure(callable(function), f"function={function!r} cannot be called")
    ensure(len(inputs) > 0, "dout is missing")
    count = len(inputs) - 1
    ensure(all(0 <= i < count for i in wanted) and len(wanted) > 0, f"wanted={wanted} must be numbers below {count}")
    return Pack(**{f"d{i}": Spec(inputs[1 + i].shape) for i in wanted})


@custom_back.reference
def _(*inputs, function, wanted):
    gradients = function(*inputs)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    if len(gradients) != len(inputs) - 1:
        raise ShapeError(f"custom: grad gave {len(gradients)} gradients for {len(inputs) - 1} inputs")
    return tuple(
        np.zeros(inputs[1 + i].shape) if gradients[i] is None else _fitting("grad", gradients[i], inputs[1 + i].shape)
        for i in wanted
    )


custom_back.in_python = Callback("custom_back", lambda t, arrays: custom_back.compute_reference(arrays, t.attrs))


def _fitting(who: str, value, shape: tuple[int, ...], kinds: str = "iuf") -> np.ndarray:
    """The value as an array, or an error that says what was expected."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in kinds:
        wanted = "integers" if kinds == "iu" else "numbers"
        raise ShapeError(f"custom: {who} gave {array.dtype}{list(array.shape)}, and must give {wanted} {list(shape)}")
    return array


def map_custom1(a: Tensor, function: Callable, grad: Callable | None = None) -> Tensor:
    """function(a), an array of a's shape; grad(dout, a) gives its gradient.  See `custom`.

    Raises:
        ShapeError: a run finds that the result is of another shape than a's.
    """
    return custom(a, function=function, shape=a.shape, grad=grad)


def map_custom2(a: Tensor, b: Tensor, function: Callable, grad: Callable | None = None) -> Tensor:
    """function(a, b), an array of a's shape; grad(dout, a, b) gives both gradients.  See `custom`.

    Raises:
        ShapeError: a run finds that the result is of another shape than a's.
    """
    return custom(a, b, function=function, shape=a.shape, grad=grad)


def map_custom3(a: Tensor, b: Tensor, c: Tensor, function: Callable, grad: Callable | None = None) -> Tensor:
    """function(a, b, c), an array of a's shape; grad(dout, a, b, c) gives three gradients.  See `custom`.

    Raises:
        ShapeError: a run finds that the result is of another shape than a's.
    """
    return custom(a, b, c, function=function, shape=a.shape, grad=grad)
