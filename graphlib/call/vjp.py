"""`gg.vjp`: a function called on arrays, and then what pulls gradients back through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.dtype import BF16, DType, bf16_values
from ..core.errors import ShapeError
from ..core.exchange import array_of
from ..core.tensor import converted, natural_dtype
from .compiled import Compiled, Layout

Arrays = np.ndarray | tuple[np.ndarray, ...]


def vjp(function: Callable) -> Vjp:
    """A function of tensors that can be called on arrays, and differentiated later, as other engines' tapes want it.

        attention = gg.vjp(lambda q, k, v: gg.flash_attn_ext(q, k, v, causal=True))
        out, pull_back = attention(q, k, v)
        dq, dk, dv = pull_back(dout)

    For each set of shapes, dtypes and orders of axes there is a graph, made when it is first met and kept.  Any number
    of calls may come before their `pull_back`s, in any order, each more than once, from any threads.  The GIL is
    released while kernels run.

    Args:
        function: from f32, f16, bf16 and i32 tensors of any shapes to such a tensor, or a tuple of them.  It is called
            once for each graph; what it reads beside its arguments is a constant.

    Raises:
        GraphError: the function gives something else.
        ShapeError: when called with what is no array, or with what the function refuses.
        GradientError: when called, of an op without a gradient.
    """
    return Vjp(function)


class Vjp:
    """What `vjp` gives: called with arrays it returns the results, and a function from the gradients of the results to
    those of the arrays.  Both are as the function's: one array, or a tuple.

    The arrays that gradients need are not copied where they have the dtype and no gaps: they must stay as they are
    until then.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        self._compiled: dict[tuple[Layout, ...], Compiled] = {}

    def compiled(self, *layouts: Layout) -> Compiled:
        """The programs for inputs that lie like this."""
        made = self._compiled.get(layouts)
        if made is None:
            made = Compiled.of(self._function, layouts, [True] * len(layouts))
            made = self._compiled.setdefault(layouts, made)
        return made

    def __call__(self, *arrays: Any) -> tuple[Arrays, PullBack]:
        laid = [_laid(x, f"argument {i}") for i, x in enumerate(arrays)]
        compiled = self.compiled(*(layout for _, layout in laid))
        inputs = [array for array, _ in laid]
        results = [_empty(layout) for layout in compiled.results]
        residuals = [_empty(layout) for layout in compiled.residuals]
        compiled.forward(_addresses([*inputs, *results, *residuals]))
        shown = tuple(_shown(y, layout.dtype) for y, layout in zip(results, compiled.results, strict=True))
        saved = [x for x, saved in zip((*inputs, *results), compiled.saves, strict=True) if saved]
        return _one_or_all(shown), PullBack(compiled, [*saved, *residuals])


class PullBack:
    """From the gradients of the results of one call, in their shapes, those of its arguments, f32; None of i32 ones.

    Raises:
        ShapeError: another number of gradients, or other shapes.
    """

    def __init__(self, compiled: Compiled, saved: list[np.ndarray]) -> None:
        self._compiled, self._saved = compiled, saved

    def __call__(self, *douts: Any) -> np.ndarray | tuple[np.ndarray | None, ...] | None:
        wanted = self._compiled.results
        if len(douts) != len(wanted):
            raise ShapeError(f"pull_back(): {len(douts)} gradients were given for {len(wanted)} results")
        given = [
            _like(d, layout, f"pull_back(): gradient {i}")
            for i, (d, layout) in enumerate(zip(douts, wanted, strict=True))
        ]
        layouts = self._compiled.gradients
        made = [None if layout is None else _empty(layout) for layout in layouts]
        self._compiled.backward(_addresses([*self._saved, *given, *(g for g in made if g is not None)]))
        shown = tuple(
            _zeros(x) if g is None else _shown(g, x.dtype) for x, g in zip(self._compiled.inputs, made, strict=True)
        )
        return _one_or_all(shown)


def _laid(value: Any, where: str) -> tuple[np.ndarray, Layout]:
    """An array in a storage type and without gaps, and its layout: the value itself if it is such."""
    array, dtype = array_of(value, where)
    if dtype is None:
        dtype = natural_dtype(array)
        if array.dtype != dtype.storage:
            array = converted(array, dtype, where)
    layout = Layout.of(array.shape, dtype, [s // array.itemsize for s in array.strides])
    if layout is None or not array.flags.aligned:
        array = np.array(array, order="C")
        layout = Layout.of(array.shape, dtype)
    assert layout is not None
    return array, layout


def _like(value: Any, layout: Layout, where: str) -> np.ndarray:
    """An array that lies like this."""
    array, given = array_of(value, where)
    if array.shape != layout.shape:
        raise ShapeError(f"{where} has shape {array.shape}, and its result {layout.shape}")
    same = (given or natural_dtype(array)) is layout.dtype and array.dtype == layout.dtype.storage
    if same and array.flags.aligned and layout.lies([s // array.itemsize for s in array.strides]):
        return array
    made = _empty(layout)
    made[...] = array if given is layout.dtype else converted(_numbers(array, given), layout.dtype, where)
    return made


def _numbers(array: np.ndarray, given: DType | None) -> np.ndarray:
    return array if given is None else bf16_values(array)


def _empty(layout: Layout) -> np.ndarray:
    memory = np.empty([layout.shape[i] for i in layout.order], layout.dtype.storage)
    return memory.transpose(np.argsort(layout.order)) if layout.order else memory


def _zeros(layout: Layout) -> np.ndarray | None:
    return np.zeros(layout.shape, np.float32) if layout.dtype.is_float else None


def _shown(array: np.ndarray, dtype: DType) -> np.ndarray:
    return bf16_values(array) if dtype is BF16 else array


def _addresses(arrays: list[np.ndarray]) -> list[int]:
    return [array.ctypes.data or 1 for array in arrays]


def _one_or_all(arrays: tuple) -> Any:
    return arrays[0] if len(arrays) == 1 else arrays
