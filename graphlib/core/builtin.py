"""The ops that the engine itself puts into graphs, and those behind Python's operators on tensors.

The family that declares one hands it over here, once, so that what lies below the ops can use it:

    from .builtin import builtin

    builtin.cast(t, dtype=F32)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


class Builtin:
    """Each is an op, or a function of ops, of the library's; no op of a user's takes its place.  `python_kernel`
    and `foreign_kernel` are neither."""

    # the engine's
    accumulate: Callable[..., Any]
    add: Callable[..., Any]
    broadcast_to: Callable[..., Any]
    cast: Callable[..., Any]
    cont: Callable[..., Any]
    library: Any  # the package of all ops, for methods of tensors
    foreign_kernel: Callable[..., Any]  # makes the kernel of an op from a function in C
    python_kernel: Callable[..., Any]  # makes the kernel of an op from a Python function
    # the operators'
    abs: Callable[..., Any]
    div: Callable[..., Any]
    indexed: Callable[..., Any]
    matmul: Callable[..., Any]
    mul: Callable[..., Any]
    neg: Callable[..., Any]
    permute: Callable[..., Any]
    reshape: Callable[..., Any]
    scale: Callable[..., Any]
    sqr: Callable[..., Any]
    sqrt: Callable[..., Any]
    sub: Callable[..., Any]
    transpose: Callable[..., Any]


builtin = Builtin()


def provides(function: F) -> F:
    """Decorates what is listed above under its name."""
    name = function.__name__
    if name not in Builtin.__annotations__ or name in vars(builtin):
        raise TypeError(f"{name} is not asked for, or was provided before")
    setattr(builtin, name, function)
    return function
