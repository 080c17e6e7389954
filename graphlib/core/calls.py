"""Which call a node comes from: what is made of several ops answers for its parts.

softmax(x=scores f32[3,4], axis=7): ...        and not an error of a `permute` that nobody called
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .errors import ShapeError

if TYPE_CHECKING:
    from .op import Op
    from .tensor import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Call:
    """A call of a function as messages show it.  It holds no tensor, only what these look like."""

    def __init__(self, name: str, names: list[str], args: tuple, kwargs: dict[str, Any]) -> None:
        self.name = name
        rest = [f"{names[-1] if names else 'x'}{i}" for i in range(len(names), len(args))]
        self._given = [(n, _look(v)) for n, v in (*zip([*names, *rest], args, strict=False), *kwargs.items())]

    @property
    def has_names(self) -> bool:
        """Whether a tensor was given that has a name."""
        return any(isinstance(look, tuple) and look[0] for _, look in self._given)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{n}={_shown(look)}' for n, look in self._given if look is not None)})"


def _shown(look: str | tuple) -> str:
    if isinstance(look, str):
        return look
    name, spec = look
    return f"{name}: {spec}" if name else str(spec)


def _look(value: Any) -> str | tuple | None:
    """What a message shows of an argument, of a tensor its name and what it looks like; None: nothing."""
    if hasattr(value, "spec"):
        return value.name, value.spec
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str, tuple)) and len(repr(value)) <= 40 else None


_outermost: ContextVar[Call | None] = ContextVar("call", default=None)


def call_at_hand() -> Call | None:
    """The call in which nodes are being made, of those that are made of several ops; None outside of any."""
    return _outermost.get()


def answered(name: str, names: list[str], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the function gives for these arguments; its parts' errors and nodes are of this call, unless it is itself
    part of another one.

    Raises:
        ShapeError: as its parts, in the name of the call.
    """
    if _outermost.get() is not None:
        return function(*args, **kwargs)
    call = Call(name, names, args, kwargs)
    token = _outermost.set(call)
    try:
        return function(*args, **kwargs)
    except ShapeError as error:
        text = str(error)
        if text.startswith(f"{name}("):
            if not call.has_names:
                raise
            text = text.partition("): ")[2]
        raise ShapeError(f"{call}: {text}") from None
    finally:
        _outermost.reset(token)


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of its arguments."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]


def composed(function: F) -> F:
    """A function made of ops that answers for them."""
    names = parameters_of(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return answered(function.__name__, names, function, args, kwargs)

    return call  # type: ignore[return-value]


def application(t: Tensor) -> str:
    """A node as messages show it: the call that it is part of, or its op and what that was given."""
    op: Op = t.op  # type: ignore[assignment]
    return f"{op.name}({op.given(list(t.src))})" if t.call is None or t.call.name == op.name else str(t.call)
