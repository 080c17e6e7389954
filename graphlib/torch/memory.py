"""Tensors of torch's as programs of ggrad's see them: layouts and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..call.compiled import Compiled, Layout, Strided
from ..core.dtype import BF16, F16, F32, I32
from ..core.errors import ShapeError
from ..core.tensor import write

DTYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.int32: I32}
_OF = {dtype: of for of, dtype in DTYPES.items()}
_WHOLE = (torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)  # become i32, if they fit


class Empty:
    """How to make tensors of some layouts."""

    def __init__(self, layouts: Sequence[Layout | None]) -> None:
        self.like = [None if x is None else _like(x) for x in layouts]

    def __call__(self) -> list[torch.Tensor]:
        """Those that are not None."""
        return [
            torch.empty_strided(like[0], like[1], dtype=like[2], device="cpu") for like in self.like if like is not None
        ]


class Entry:
    """A function compiled for tensors that lie like these.

    Attributes:
        wanted: of which inputs there are gradients.
    """

    def __init__(self, name: str, function: Callable, inputs: Sequence[torch.Tensor]) -> None:
        layouts: list[Layout | Strided] = []
        for i, x in enumerate(inputs):
            check(x, f"{name}: argument {i}")
            shape, strides = tuple(map(int, x.shape)), tuple(map(int, x.stride()))
            dtype = DTYPES.get(x.dtype)
            given = Layout.of(shape, I32) if dtype is None else Layout.of(shape, dtype, strides)
            layouts.append(given or Strided(shape, dtype or I32, strides))
        self._converted = [x.dtype not in DTYPES for x in inputs]
        self.name = name
        self.compiled = Compiled.of(function, layouts, [True] * len(layouts))
        self.results = Empty(self.compiled.results)
        self._douts = [_like(x) for x in self.compiled.results]
        self.integers = [i for i, y in enumerate(self.compiled.results) if not y.dtype.is_float]
        self._converts = any(self._converted)
        self._with_gradients = False

    def prepare_gradients(self) -> None:
        """Everything that calls with gradients need."""
        if not self._with_gradients:
            self.residuals, self.gradients = Empty(self.compiled.residuals), Empty(self.compiled.gradients)
            saves = self.compiled.saves
            n = len(self._converted)
            self._saved_inputs = [i for i in range(n) if saves[i]]
            self._saved_results = [i - n for i in range(n, len(saves)) if saves[i]]
            self._with_gradients = True

    def laid(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs, as i32 where they are other integers."""
        if self._converts:
            return [_as_i32(x, self.name) if c else x for x, c in zip(inputs, self._converted, strict=True)]
        return inputs

    def plain(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results."""
        results = self.results()
        self.compiled.plain(_addresses((*inputs, *results)))
        return results

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results, and the residuals."""
        self.prepare_gradients()
        results, residuals = self.results(), self.residuals()
        self.compiled.forward(_addresses((*inputs, *results, *residuals)))
        return results, residuals

    def saved(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that gradients read."""
        self.prepare_gradients()
        return [*[inputs[i] for i in self._saved_inputs], *[results[i] for i in self._saved_results]]

    def backward(self, saved: Sequence[torch.Tensor], douts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients that there are.

        Args:
            saved: what `saved` gives, and the residuals.
            douts: of each result; None for zeros.
        """
        self.prepare_gradients()
        given = [self._lies(d, like) for d, like in zip(douts, self._douts, strict=True)]
        made = self.gradients()
        self.compiled.backward(_addresses((*saved, *given, *made)))
        return made

    def _lies(self, dout: torch.Tensor | None, like: tuple) -> torch.Tensor:
        shape, strides, dtype = like
        if dout is None:
            return torch.zeros(shape, dtype=dtype).as_strided(shape, strides)
        if dout.stride() == strides and dout.dtype == dtype and not dout.is_neg():
            return dout
        return torch.empty_strided(shape, strides, dtype=dtype).copy_(dout)


def _like(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return layout.shape, layout.strides, _OF[layout.dtype]


def key_of(inputs: Sequence[torch.Tensor]) -> tuple:
    """What an entry follows from."""
    return tuple([(x.shape, x.dtype, x.stride()) for x in inputs])


def fixed_key_of(inputs: Sequence[torch.Tensor]) -> tuple:
    """The same, of sizes that a compiler has not fixed yet: now they are."""
    return tuple([(tuple(map(int, x.shape)), x.dtype, tuple(map(int, x.stride()))) for x in inputs])


def check(x: object, where: str) -> None:
    """Raise ShapeError unless kernels could read it, or a copy of it."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"{where} must be a tensor of torch's, not {type(x).__name__}")
    if x.device.type != "cpu" or x.layout != torch.strided:
        raise ShapeError(f"{where} must be a dense tensor on the CPU, not {x.layout} on {x.device}")
    if x.dtype not in DTYPES and x.dtype not in _WHOLE:
        hint = "; x.float() makes it f32" if x.is_floating_point() else ""
        raise ShapeError(f"{where} is {x.dtype}, and must be float32, float16, bfloat16, or integer{hint}")


def _as_i32(x: torch.Tensor, name: str) -> torch.Tensor:
    made = torch.empty(x.shape, dtype=torch.int32)
    write(made.numpy(), x.detach().numpy(), None, I32, name)
    return made


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.data_ptr() or 1 for x in tensors]
