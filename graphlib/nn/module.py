"""What holds parameters under names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core.errors import GraphError, ShapeError
from ..core.extras import need
from ..core.tensor import Tensor, set_param, tensor
from ..files.atomic import write_whole

_random: np.random.Generator | None = None


def seed(number: int | None) -> None:
    """Begin the random numbers that new layers are filled with again, at a place of this number; None: at any."""
    global _random
    _random = np.random.default_rng(number)


def _numbers() -> np.random.Generator:
    if _random is None:
        seed(None)
    assert _random is not None
    return _random


def uniform(*shape: int, bound: float) -> Tensor:
    """A parameter of numbers between -bound and bound."""
    return tensor(_numbers().uniform(-bound, bound, shape).astype(np.float32), param=True)


def normal(*shape: int, std: float = 1.0) -> Tensor:
    """A parameter of normal random numbers."""
    return tensor((std * _numbers().standard_normal(shape)).astype(np.float32), param=True)


def filled(*shape: int, value: float, param: bool = True) -> Tensor:
    """A parameter, or a constant, of one number."""
    return tensor(np.full(shape, value, np.float32), param=param)


class Module:
    """A layer or a model: its attributes that are leaves, modules, or lists of modules are its parts.

    `forward` makes the nodes; the module is called in its place.

    Attributes:
        training: whether layers that differ do as in training: dropout drops.  See `train` and `eval`.
    """

    training = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Make the nodes of the result."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # -- parts ----------------------------------------------------------------------------------

    def children(self) -> Iterator[tuple[str, Module]]:
        """Name and module of every part that is one, in order; of lists of modules each."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, (list, tuple)):
                yield from ((f"{name}.{i}", part) for i, part in enumerate(value) if isinstance(part, Module))

    def modules(self) -> Iterator[Module]:
        """This module and all that are part of it."""
        yield self
        for _, child in self.children():
            yield from child.modules()

    def named_leaves(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Name and leaf of everything that the module holds, parameters and what is not trained."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_leaf:
                yield prefix + name, value
        for name, child in self.children():
            yield from child.named_leaves(f"{prefix}{name}.")

    def named_parameters(self) -> dict[str, Tensor]:
        """Name -> leaf of what is trained; of one that is shared the first name.  The leaves are named so."""
        found: dict[Tensor, str] = {}
        for name, leaf in self.named_leaves():
            found.setdefault(leaf, name)
        for leaf, name in found.items():
            leaf.name = leaf.name or name
        return {name: leaf for leaf, name in found.items() if leaf.param}

    def parameters(self, pattern: str = "") -> list[Tensor]:
        """What is trained, of those whose names have the regular expression in them.

        gg.AdamW([Group(net.parameters("weight")), Group(net.parameters("bias|norm"), weight_decay=0.0)], lr=1e-3)
        """
        return [leaf for name, leaf in self.named_parameters().items() if re.search(pattern, name)]

    # -- modes ----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Module:
        """Have this module and its parts do as in training, in what is built from now on.  Returns it."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Have this module and its parts do as after training, in what is built from now on.  Returns it."""
        return self.train(False)

    def freeze(self, pattern: str = "") -> Module:
        """Do not train what has the regular expression in its name; graphs that exist stay as they are.  Returns it."""
        for leaf in self.parameters(pattern):
            leaf.role = "constant"
        return self

    def unfreeze(self, pattern: str = "") -> Module:
        """Train floats that have the regular expression in their names.  Returns the module."""
        for name, leaf in self.named_leaves():
            if re.search(pattern, name) and leaf.dtype.is_float and not leaf.param:
                set_param(leaf)
        return self

    # -- values ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> a copy of the values, of all that the module holds."""
        return {name: leaf.numpy().copy() for name, leaf in self.named_leaves()}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Module:
        """Take values by name: arrays, or tensors of torch or JAX.  Returns the module.

        Args:
            state: name -> values.
            strict: every name must be there on both sides; else those that are.

        Raises:
            GraphError: names are missing or unknown; all are named, and nothing was taken.
            ShapeError: a shape differs; nothing was taken.
        """
        leaves = dict(self.named_leaves())
        missing, unknown = [n for n in leaves if n not in state], [n for n in state if n not in leaves]
        if strict and (missing or unknown):
            said = [
                f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names
            ]
            raise GraphError(
                f"load_state_dict() of {type(self).__name__}: {'; '.join(said)}. strict=False takes the rest"
            )
        taken = {leaf: state[name] for name, leaf in leaves.items() if name in state}
        wrong = [
            f"{name} is {list(leaf.shape)}, and {list(np.shape(state[name]))} was given"
            for name, leaf in leaves.items()
            if name in state and tuple(np.shape(state[name])) != leaf.shape
        ]
        if wrong:
            raise ShapeError(f"load_state_dict() of {type(self).__name__}: {'; '.join(wrong)}")
        for leaf, values in taken.items():
            leaf.set(values)
        return self

    def save_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` in a file, which is there whole or not at all.

        Raises:
            MissingExtraError: the package safetensors is not installed.
            OSError: the file cannot be written.
        """
        write_whole(path, need("safetensors.numpy", "save_safetensors()").save(self.state_dict()))

    def load_safetensors(self, path: str | os.PathLike[str], *, strict: bool = True) -> Module:
        """Take values from a file that this, torch or JAX wrote, of f32 or f16.  Returns the module.

        Raises:
            MissingExtraError: the package safetensors is not installed.
            GraphError, ShapeError: as `load_state_dict`.
            OSError: the file cannot be read.
        """
        return self.load_state_dict(need("safetensors.numpy", "load_safetensors()").load_file(path), strict=strict)

    def summary(self) -> str:
        """A table of all that the module holds: name, shape, dtype, numbers, bytes, and whether it is trained."""
        rows = [
            (
                name,
                str(list(leaf.shape)),
                leaf.dtype.name,
                f"{leaf.size:,}",
                f"{leaf.nbytes:,}",
                "yes" if leaf.param else "",
            )
            for name, leaf in self.named_leaves()
        ]
        each = dict.fromkeys(leaf for _, leaf in self.named_leaves())
        trained = sum(leaf.size for leaf in each if leaf.param)
        total = ("total", "", "", f"{sum(leaf.size for leaf in each):,}", f"{sum(leaf.nbytes for leaf in each):,}", "")
        head = ("name", "shape", "dtype", "numbers", "bytes", "trained")
        table = [head, *rows, total]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.rjust(w) if i in (3, 4) else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([*lines, f"{trained:,} numbers are trained"])


class ModuleList(Module):
    """Modules in a row, numbered, to go through."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add one at the end."""
        setattr(self, str(len(self)), module)

    def __len__(self) -> int:
        return sum(1 for _ in self.children())

    def __iter__(self) -> Iterator[Module]:
        return (module for _, module in self.children())

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]


class Sequential(ModuleList):
    """Modules and functions of a tensor, each called with the result of the one before."""

    def __init__(self, *steps: Any) -> None:
        self._steps = steps
        for i, step in enumerate(steps):
            if isinstance(step, Module):
                setattr(self, str(i), step)

    def append(self, module: Any) -> None:
        """Add a step at the end."""
        if isinstance(module, Module):
            setattr(self, str(len(self._steps)), module)
        self._steps = (*self._steps, module)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Name and module of every step that is one."""
        return ((str(i), step) for i, step in enumerate(self._steps) if isinstance(step, Module))

    def forward(self, x: Tensor) -> Tensor:
        """The result of the last step."""
        for step in self._steps:
            x = step(x)
        return x
