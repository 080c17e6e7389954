"""Functions of ggrad's as functions of torch's: on autograd's tape, or as an operator that compilers see.

The operator is ggrad::call, and ggrad::pull_back the gradients of it; both name the function by a string.  Programs
that run as they stand take a shorter way to the same kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import GradientError, GraphError
from .memory import Entry, check, fixed_key_of, key_of

_functions: dict[str, Function] = {}
_makers: list[Callable[[str], Function | None]] = []  # of functions that are named by their arguments
_numbers = itertools.count()


class Function:
    """A function of ggrad's tensors that takes torch's; see `function`."""

    def __init__(self, made_of: Callable, name: str) -> None:
        self._made_of, self.name = made_of, name
        self._entries: dict[tuple, Entry] = {}
        _functions[name] = self

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        made = called(self, self.name, tensors)
        return made[0] if len(made) == 1 else tuple(made)

    def entry(self, inputs: Sequence[torch.Tensor]) -> Entry:
        """What is compiled for tensors that lie like these."""
        key = key_of(inputs)
        try:
            found = self._entries.get(key)
        except TypeError:  # a compiler's sizes, not known yet: from here on they are
            key = fixed_key_of(inputs)
            found = self._entries.get(key)
        if found is None:
            found = self._entries.setdefault(key, Entry(self.name, self._made_of, inputs))
        return found


def function(f: Callable) -> Function:
    """Any function of ggrad's tensors as a function of torch's, with gradients.

        @ggrad.torch.function
        def swiglu(x, gate, up):
            return gg.silu(gg.mul_mat(gate, x)) * gg.mul_mat(up, x)

    Tensors are f32, f16, bf16 or integers (as i32), of at most four axes, on the CPU.  The function is called once for
    each set of shapes, dtypes and strides; what it reads beside its arguments is a constant.  Differentiating twice is
    refused.

    Args:
        f: from tensors to a tensor or a tuple of tensors.

    Raises:
        ShapeError: when called with tensors on another device, of another dtype, or that `f` refuses.
        GradientError: when called with tensors that require a gradient, if an op has none.
    """
    return Function(f, f"function {next(_numbers)} {getattr(f, '__name__', '')}")


def called(function: Function | None, name: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The results.  A compiler has only the function's name."""
    plain, taped = True, False  # in one loop, since short calls are many
    for x in tensors:
        plain = plain and type(x) in _PLAIN
        taped = taped or (plain and x.requires_grad)
    if not plain or torch.compiler.is_compiling():
        for i, x in enumerate(tensors):
            check(x, f"{name}: argument {i}")
        return torch.ops.ggrad.call(list(tensors), name)[0]
    assert function is not None
    if taped and torch.is_grad_enabled():
        made = _Call.apply(function, *tensors)
        return made if isinstance(made, tuple) else (made,)
    inputs = _resolved(tensors)
    entry = function.entry(inputs)
    return entry.plain(entry.laid(inputs))


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def named(name: str) -> Function:
    """The function of this name, made of it if need be.

    Raises:
        GraphError: no function of this process has it.
    """
    found = _functions.get(name)
    if found is None:
        found = next((made for make in _makers if (made := make(name)) is not None), None)
    if found is None:
        raise GraphError(f"ggrad::call: no function {name!r} was made in this process")
    return found


def makes_functions(make: Callable[[str], Function | None]) -> None:
    """Have `make` asked for functions whose names are not known yet."""
    _makers.append(make)


def _resolved(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    for x in tensors:
        if x.is_neg():
            return [y.resolve_neg() for y in tensors]
    return tensors


class _Call(torch.autograd.Function):
    """On autograd's tape."""

    @staticmethod
    def forward(ctx: Any, function: Function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = _resolved(tensors)
        entry = function.entry(given)
        inputs = entry.laid(given)
        results, residuals = entry.forward(inputs)
        ctx.save_for_backward(*entry.saved(inputs, results), *residuals)
        ctx.entry = entry
        if entry.integers:
            ctx.mark_non_differentiable(*[results[i] for i in entry.integers])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        entry = ctx.entry
        if torch.is_grad_enabled():  # the gradients would be taken for constants
            raise GradientError(f"{entry.name}: its gradients cannot be differentiated again (create_graph=True)")
        made = iter(entry.backward(ctx.saved_tensors, douts))
        return (None, *[None if like is None else next(made) for like in entry.gradients.like])


# -- as an operator -------------------------------------------------------------------------------------------

_library = torch.library.Library("ggrad", "DEF")
_library.define("call(Tensor[] inputs, str function) -> (Tensor[], Tensor[])")
_library.define(
    "pull_back(Tensor[] inputs, Tensor[] results, Tensor[] residuals, Tensor[] douts, str function) -> Tensor[]"
)


def _call(inputs: list[torch.Tensor], function: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    given = _resolved(inputs)
    entry = named(function).entry(given)
    return entry.forward(entry.laid(given))


def _call_fake(inputs: list[torch.Tensor], function: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    entry = named(function).entry(inputs)
    entry.prepare_gradients()
    return entry.results(), entry.residuals()


def _pull_back(
    inputs: list[torch.Tensor],
    results: list[torch.Tensor],
    residuals: list[torch.Tensor],
    douts: list[torch.Tensor],
    function: str,
) -> list[torch.Tensor]:
    given = _resolved(inputs)
    entry = named(function).entry(given)
    return entry.backward([*entry.saved(entry.laid(given), results), *residuals], douts)


def _pull_back_fake(inputs: list[torch.Tensor], *others: Any) -> list[torch.Tensor]:
    entry = named(others[-1]).entry(inputs)
    entry.prepare_gradients()
    return entry.gradients()


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, ctx.function = inputs
    results, residuals = output
    ctx.n = len(tensors), len(results)
    ctx.save_for_backward(*tensors, *results, *residuals)


def _differentiated(ctx: Any, douts: list[torch.Tensor | None], _: Any) -> tuple[list[torch.Tensor | None], None]:
    saved, (n, m) = ctx.saved_tensors, ctx.n
    inputs, results, residuals = list(saved[:n]), list(saved[n : n + m]), list(saved[n + m :])
    given = [torch.zeros_like(y) if d is None else d for d, y in zip(douts, results, strict=True)]
    made = iter(torch.ops.ggrad.pull_back(inputs, results, residuals, given, ctx.function))
    entry = named(ctx.function).entry(inputs)
    return [None if like is None else next(made) for like in entry.gradients.like], None


_library.impl("call", _call, "CPU")
_library.impl("pull_back", _pull_back, "CPU")
torch.library.register_fake("ggrad::call", _call_fake, lib=_library)
torch.library.register_fake("ggrad::pull_back", _pull_back_fake, lib=_library)
torch.library.register_autograd("ggrad::call", _differentiated, setup_context=_setup, lib=_library)
