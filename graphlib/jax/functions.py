"""Functions of ggrad's as functions of JAX's, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ..call.compiled import Compiled, Layout
from .calls import Call, layout_of


def function(f: Callable) -> Callable[..., Any]:
    """Any function of ggrad's tensors as a function of JAX's arrays, under jit, grad and vmap.

        @ggrad.jax.function
        def swiglu(x, gate, up):
            return gg.silu(gg.mul_mat(gate, x)) * gg.mul_mat(up, x)

    Arrays are f32, f16, bf16 or i32, of at most four axes, on the CPU.  The function is called once for each set of
    shapes and dtypes; what it reads beside its arguments is a constant.  Its gradients cannot be differentiated again.
    Each set of shapes keeps its memory for as long as the process, since compiled programs name it.

    Args:
        f: from tensors to a tensor or a tuple of tensors.

    Raises:
        ShapeError: when called with arrays of another dtype, or that `f` refuses.
        GradientError: when differentiated, if an op has no gradient.
        KernelError: ggrad was installed without its C kernels.
    """
    return function_named(f, getattr(f, "__name__", "function"))


def function_named(f: Callable, name: str) -> Callable[..., Any]:
    """`function`, with its name for messages."""
    calls = cache(lambda *layouts: _Calls(f, name, layouts))

    def of(arrays: tuple[Any, ...]) -> _Calls:
        return calls(*(layout_of(x, f"{name}: argument {i}") for i, x in enumerate(arrays)))

    @jax.custom_vjp
    def call(*arrays: jax.Array) -> Any:
        return _one_or_all(of(arrays).plain(*arrays))

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        calls = of(arrays)
        n = len(calls.compiled.results)
        made = calls.forward(*arrays)
        kept = [x for x, saved in zip((*arrays, *made[:n]), calls.compiled.saves, strict=True) if saved]
        return _one_or_all(made[:n]), (_Static(calls), [*kept, *made[n:]])

    def backward(saved: Any, douts: Any) -> tuple[jax.Array | None, ...]:
        static, kept = saved
        calls = static.value
        results = calls.compiled.results
        given = douts if isinstance(douts, tuple) else (douts,)
        floats = [
            d if layout.dtype.is_float else jnp.zeros(layout.shape, jnp.int32)
            for d, layout in zip(given, results, strict=True)
        ]
        made = iter(calls.backward(*kept, *floats))
        return tuple(None if layout is None else next(made) for layout in calls.compiled.gradients)

    call.defvjp(forward, backward)

    def checked(*arrays: Any) -> Any:
        return call(*map(jnp.asarray, arrays))

    checked.__name__, checked.__doc__ = name, f.__doc__
    return checked


class _Calls:
    """What is compiled for arguments that lie like these, as XLA calls it: each when it is first asked for."""

    def __init__(self, f: Callable, name: str, layouts: tuple[Layout, ...]) -> None:
        self.name, self.compiled = name, Compiled.of(f, layouts, [True] * len(layouts))
        self._made: dict[str, Call] = {}

    def plain(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results."""
        c = self.compiled
        return self._call("plain", lambda: Call(self.name, c.plain, c.inputs, c.results))(*arrays)

    def forward(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results, then the residuals."""
        c = self.compiled
        return self._call("forward", lambda: Call(self.name, c.forward, c.inputs, [*c.results, *c.residuals]))(*arrays)

    def backward(self, *arrays: jax.Array) -> list[jax.Array]:
        """The gradients that there are, of what was saved and of the gradients of the results."""
        c = self.compiled

        def make() -> Call:
            saved = [x for x, saved in zip((*c.inputs, *c.results), c.saves, strict=True) if saved]
            args = [*saved, *c.residuals, *c.results]
            return Call(f"gradient of {self.name}", c.backward, args, [g for g in c.gradients if g is not None])

        return self._call("backward", make)(*arrays)

    def _call(self, which: str, make: Callable[[], Call]) -> Call:
        if which not in self._made:
            self._made.setdefault(which, make())
        return self._made[which]


@jax.tree_util.register_static
class _Static:
    """What travels from forward to backward and is no array."""

    def __init__(self, value: _Calls) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and other.value is self.value

    def __hash__(self) -> int:
        return hash(id(self.value))


def _one_or_all(arrays: list[jax.Array]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)
