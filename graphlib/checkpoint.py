"""Checkpoints: all that a training run needs to go on to the same bits, in one safetensors file.

    gg.checkpoint.save("run.safetensors", params, optimizer=optimizer, step=step, data=data.position)
    state = gg.checkpoint.load("run.safetensors", params, optimizer=optimizer)

A file is written under a temporary name beside its own and moved into place when it is complete, so that
whatever happens there is an old one or a new one, whole.  Loading changes nothing unless everything fits.

Parameters lie in the file under their own names, moments under "optimizer/<parameter>/m" and so on; the rest is
JSON in the file's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtype import ALL, BF16
from .errors import CheckpointError
from .extras import need
from .files import write_whole
from .tensor import Tensor

if TYPE_CHECKING:
    from .optim import Optimizer

FORMAT = "1"
STATE = "optimizer/"  # what the names of moments begin with
DTYPE_NAMES = {dtype: dtype.name.upper() for dtype in ALL}


@dataclass(frozen=True)
class Info:
    """What a checkpoint holds beside tensors.

    Attributes:
        step: steps of training done.
        data: the position in the training data, as it was given to `save`.
        extra: whatever else was given to `save`.
    """

    step: int = 0
    data: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.dtype.lower()}[{','.join(map(str, self.shape))}]"


def save(
    path: str | os.PathLike,
    params: Iterable[Tensor],
    *,
    optimizer: Optimizer | None = None,
    step: int = 0,
    data: Any = None,
    rng: np.random.Generator | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint.

    Args:
        path: of the file; one that exists is replaced when the new one is complete.
        params: leaves to save, each with a name of its own.
        optimizer: whose moments and number of steps are saved too.
        step: steps of training done.
        data: position in the training data; anything that JSON can hold, as is `extra`.
        rng: a generator of random numbers whose state is saved.
        extra: hyperparameters of the model, say.

    Raises:
        CheckpointError: a name is missing or used twice.
        MissingExtraError: the package safetensors is not installed; ml_dtypes too, for bf16.
    """
    metadata = {"ggrad": FORMAT, "step": str(step), "data": json.dumps(data), "extra": json.dumps(extra or {})}
    if optimizer is not None:
        metadata["optimizer"] = json.dumps({"kind": type(optimizer).__name__, "steps": optimizer.steps})
    if rng is not None:
        metadata["rng"] = json.dumps(rng.bit_generator.state, default=lambda array: array.tolist())
    _write(Path(path), _named(params, optimizer), metadata)


def load(
    path: str | os.PathLike,
    params: Iterable[Tensor],
    *,
    optimizer: Optimizer | None = None,
    rng: np.random.Generator | None = None,
) -> Info:
    """Read a checkpoint into the tensors that it was made from, or others of the same names, shapes and dtypes.

    Args:
        path: of the file.
        params: leaves to fill: all that the file holds.
        optimizer: gets its moments and number of steps; without one they are left out.
        rng: gets the state that was saved.

    Raises:
        CheckpointError: it is no checkpoint, or does not fit; then nothing has changed.
        FileNotFoundError: there is no such file.
    """
    stored, metadata = _read(Path(path))
    if optimizer is None:
        stored = {name: s for name, s in stored.items() if not name.startswith(STATE)}
    tensors = _named(params, optimizer)
    if frozen := [t.label() for t in tensors.values() if t.frozen]:
        raise CheckpointError(f"load({path}): frozen leaves never change: {', '.join(frozen)}")
    _check_fit(path, stored, tensors)
    info = _info(path, metadata)
    steps = _optimizer_steps(path, metadata, optimizer)
    if rng is not None:
        _restore(path, metadata, rng)

    for name, t in tensors.items():
        t.memory()[...] = np.frombuffer(stored[name].content, t.dtype.storage).reshape(t.shape)
    if optimizer is not None:
        optimizer.steps = steps
    return info


def peek(path: str | os.PathLike) -> Info:
    """What a checkpoint holds beside tensors: for building the model that fits it.

    Raises:
        CheckpointError: it is no checkpoint.
    """
    return _info(path, _read(Path(path))[1])


# -- what is in it ------------------------------------------------------------------------------------------


def _named(params: Iterable[Tensor], optimizer: Optimizer | None) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their names in the file."""
    named: dict[str, Tensor] = {}
    for t in params:
        if not t.is_leaf:
            raise CheckpointError(f"{t.label()} is the result of {t.op.name}; only leaves can be saved")  # type: ignore[union-attr]
        if not t.name or t.name.startswith((STATE, "__")):
            raise CheckpointError(
                f"{t.label()} needs a name for the checkpoint, that does not begin with {STATE!r} or '__'"
            )
        if named.setdefault(t.name, t) is not t:
            raise CheckpointError(f"two tensors of the checkpoint are called {t.name!r}")
    if optimizer is not None:
        if not optimizer.built:
            raise CheckpointError("the optimizer has no state yet: optimizer.build(graph) comes first")
        named.update({STATE + name: moment for name, moment in optimizer.moments.items()})
    return named


def _check_fit(path, stored: dict[str, _Stored], tensors: dict[str, Tensor]) -> None:
    missing = sorted(set(tensors) - set(stored))
    unexpected = sorted(set(stored) - set(tensors))
    misshapen = [
        f"{name} (is {t.spec}, in the file {stored[name]})"
        for name, t in sorted(tensors.items())
        if name in stored and (stored[name].dtype, stored[name].shape) != (DTYPE_NAMES[t.dtype], t.shape)
    ]
    wrong = {"missing": missing, "unexpected": unexpected, "of another shape or dtype": misshapen}
    if any(wrong.values()):
        lines = [f"  {what}: {', '.join(names)}" for what, names in wrong.items() if names]
        raise CheckpointError(f"{path} does not fit:\n" + "\n".join(lines))


def _info(path, metadata: dict[str, str]) -> Info:
    try:
        return Info(int(metadata["step"]), json.loads(metadata["data"]), json.loads(metadata["extra"]))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} has no metadata of a checkpoint: {error!r}") from None


def _optimizer_steps(path, metadata: dict[str, str], optimizer: Optimizer | None) -> int:
    if optimizer is None:
        return 0
    saved = json.loads(metadata.get("optimizer", "{}"))
    if saved.get("kind") != type(optimizer).__name__:
        raise CheckpointError(
            f"{path} holds the state of {saved.get('kind', 'no optimizer')}, not of {type(optimizer).__name__}"
        )
    return int(saved["steps"])


def _restore(path, metadata: dict[str, str], rng: np.random.Generator) -> None:
    if "rng" not in metadata:
        raise CheckpointError(f"{path} holds no state of a random generator")
    try:
        rng.bit_generator.state = json.loads(metadata["rng"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its random state is of another generator: {error}") from None


# -- the file -----------------------------------------------------------------------------------------------


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    content = need("safetensors.numpy", "a checkpoint").save(
        {name: _array(t) for name, t in tensors.items()}, metadata=metadata
    )
    write_whole(path, content)


def _array(t: Tensor) -> np.ndarray:
    """The leaf's memory under a dtype that safetensors knows it by."""
    memory = t.memory()
    return memory.view(need("ml_dtypes", "a bf16 tensor in a checkpoint").bfloat16) if t.dtype is BF16 else memory


def _read(path: Path) -> tuple[dict[str, _Stored], dict[str, str]]:
    safetensors = need("safetensors", "a checkpoint")
    content = path.read_bytes()
    try:
        entries = safetensors.deserialize(content)
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file, or was cut short: {error}") from None
    return {name: _Stored(e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in entries}, metadata
