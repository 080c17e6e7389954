"""Checkpoints: all that a training run needs to go on to the same bits, in one safetensors file.

    gg.checkpoint.save("run.safetensors", params, optimizer=optimizer, step=step, data=data.position)
    state = gg.checkpoint.load("run.safetensors", params, optimizer=optimizer)

A file is written under a temporary name beside its own and moved into place when it is complete, so that
whatever happens there is an old one or a new one, whole.  Loading reads one file once, checks its checksum (the first
files had none), and changes nothing unless everything fits.

Parameters lie in the file under their own names, moments under "optimizer/<parameter>/m" and so on; the rest is
JSON in the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.dtype import ALL, BF16
from ..core.errors import CheckpointError, FormatError
from ..core.extras import need
from ..core.tensor import Tensor
from .atomic import read_whole, write_whole

FORMAT = "2"
WITHOUT_CHECKSUM = "1"  # the format of files that have none
_UNSIGNED = "0" * 64  # stands where the checksum will


class Optimizer(Protocol):
    """What a checkpoint keeps of one: see `ggrad.train.optim.Optimizer`."""

    steps: int

    @property
    def built(self) -> bool:
        """Whether it has a graph to step with."""

    @property
    def moments(self) -> Mapping[str, Tensor]:
        """Its state, by name."""

    def whole_moments(self) -> dict[str, Tensor]:
        """The state of all ranks."""

    def take_moments(self, whole: dict[str, Tensor]) -> None:
        """Takes over what `whole_moments` gave: this rank's part of it."""


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
    content: np.ndarray = field(repr=False)

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
    write: bool = True,
) -> None:
    """Write a checkpoint.

    Args:
        path: of the file; one that exists is replaced when the new one is complete.
        params: leaves to save, each with a name of its own.
        optimizer: whose moments and number of steps are saved too.
        step: steps of training done.
        data: position in the training data; anything that JSON can hold, as is `extra`.  Scalars of NumPy are saved
            as the numbers that they are; tuples come back as lists.
        rng: a generator of random numbers whose state is saved.
        extra: hyperparameters of the model, say.
        write: of several ranks one writes; the others only tell it what they have of the optimizer.

    Raises:
        CheckpointError: a name is missing or used twice, or something cannot be saved.
        MissingExtraError: the package safetensors is not installed; ml_dtypes too, for bf16.
    """
    metadata = {
        "ggrad": FORMAT,
        "step": str(_step(step)),
        "data": as_json(data, "data"),
        "extra": as_json(extra or {}, "extra"),
    }
    if optimizer is not None:
        metadata["optimizer"] = json.dumps({"kind": type(optimizer).__name__, "steps": optimizer.steps})
    if rng is not None:
        metadata["rng"] = rng_as_json(rng)
    tensors = _named(params, optimizer)
    if write:
        _write(Path(path), tensors, metadata)


def load(
    path: str | os.PathLike,
    params: Iterable[Tensor],
    *,
    optimizer: Optimizer | None = None,
    rng: np.random.Generator | None = None,
    accept: Callable[[Info], None] | None = None,
) -> Info:
    """Read a checkpoint into the tensors that it was made from, or others of the same names, shapes and dtypes.

    Args:
        path: of the file.
        params: leaves to fill: all that the file holds.
        optimizer: gets its moments and number of steps; without one they are left out.
        rng: gets the state that was saved.
        accept: is given what else the file holds before anything changes; what it raises comes out.

    Raises:
        CheckpointError: it is no checkpoint, or does not fit; then nothing has changed.
        FileNotFoundError: there is no such file.
    """
    return restore(_content(path), path, params, optimizer=optimizer, rng=rng, accept=accept)


def restore(
    content: bytes,
    path: str | os.PathLike,
    params: Iterable[Tensor],
    *,
    optimizer: Optimizer | None = None,
    rng: np.random.Generator | None = None,
    accept: Callable[[Info], None] | None = None,
) -> Info:
    """`load` from the bytes of a checkpoint; the path is for messages.

    Raises:
        CheckpointError: as `load`: names, shapes or dtypes of the parameters differ, or the file is damaged.
    """
    stored, metadata = _read(content, path)
    if optimizer is None:
        stored = {name: s for name, s in stored.items() if not name.startswith(STATE)}
    tensors = _named(params, optimizer)
    if frozen := [t.label() for t in tensors.values() if t.frozen]:
        raise CheckpointError(f"load({path}): frozen leaves never change: {', '.join(frozen)}")
    _check_fit(path, stored, tensors)
    info = _info(path, metadata)
    steps = _optimizer_steps(path, metadata, optimizer)
    if accept is not None:
        accept(info)
    if rng is not None:
        _restore(path, metadata, rng)

    for name, t in tensors.items():
        t.memory()[...] = np.frombuffer(stored[name].content, t.dtype.storage).reshape(t.shape)
    if optimizer is not None:
        optimizer.take_moments({name.removeprefix(STATE): t for name, t in tensors.items() if name.startswith(STATE)})
        optimizer.steps = steps
    return info


def peek(path: str | os.PathLike) -> Info:
    """What a checkpoint holds beside tensors: for building the model that fits it.

    Raises:
        CheckpointError: it is no checkpoint.
    """
    return _info(path, _read(_content(path), path)[1])


# -- what is in it ------------------------------------------------------------------------------------------


def check_savable(params: Iterable[Tensor], optimizer: Optimizer | None = None) -> None:
    """Raises what `save` would: of names, and of packages that are not installed.

    Raises:
        CheckpointError: a parameter is no leaf, or has no name or one that is taken; its shape and dtype may be any.
    """
    for t in _named(params, optimizer).values():
        if t.dtype is BF16:
            need("ml_dtypes", "a bf16 tensor in a checkpoint")
    need("safetensors", "a checkpoint")


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
        named.update({STATE + name: moment for name, moment in optimizer.whole_moments().items()})
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


def as_json(value: Any, what: str) -> str:
    """What JSON keeps of a value, scalars of NumPy as numbers.

    Raises:
        CheckpointError: something in it cannot be saved, or would come back as something else.
    """
    try:
        return json.dumps(_plain(value, what))
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply to be saved") from None


def rng_as_json(rng: np.random.Generator) -> str:
    """The state of a generator of random numbers.  Raises CheckpointError where JSON cannot hold it."""
    try:
        return json.dumps(rng.bit_generator.state, default=lambda array: array.tolist())
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of {rng!r:.80} cannot be saved: {error}") from None


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{what} has the key {key!r}, and only strings can be saved as keys")
        return {key: _plain(v, f"{what}[{key!r}]") for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{what}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} is a {type(value).__name__}, and cannot be saved: {value!r:.80}")


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step must be a number of steps, not {step!r}")
    return number


def _info(path, metadata: dict[str, str]) -> Info:
    step = _parsed(path, metadata, "step", int)
    if step < 0:
        raise CheckpointError(f"{path}: step must not be negative, but is {step}")
    return Info(step, _parsed(path, metadata, "data"), _parsed(path, metadata, "extra", dict))


def _parsed(path, metadata: dict[str, str], key: str, kind: type = object) -> Any:
    """A value of the metadata."""
    if key not in metadata:
        raise CheckpointError(f"{path} has no metadata of a checkpoint: {key} is missing")
    try:
        value = json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {key} is no JSON: {error}") from None
    if not isinstance(value, kind) or isinstance(value, bool) and kind is int:
        raise CheckpointError(f"{path}: its {key} must be of type {kind.__name__}, but is {value!r:.80}")
    return value


def _optimizer_steps(path, metadata: dict[str, str], optimizer: Optimizer | None) -> int:
    if optimizer is None:
        return 0
    saved = _parsed(path, metadata, "optimizer", dict) if "optimizer" in metadata else {}
    if saved.get("kind") != type(optimizer).__name__:
        raise CheckpointError(
            f"{path} holds the state of {saved.get('kind', 'no optimizer')}, not of {type(optimizer).__name__}"
        )
    steps = saved.get("steps")
    if type(steps) is not int or steps < 0:
        raise CheckpointError(f"{path}: the optimizer's steps must be a number of steps, but are {steps!r:.80}")
    return steps


def _restore(path, metadata: dict[str, str], rng: np.random.Generator) -> None:
    if "rng" not in metadata:
        raise CheckpointError(f"{path} holds no state of a random generator")
    try:
        state = json.loads(metadata["rng"])
        type(rng.bit_generator)(0).state = state  # what does not fit may be found half way
        rng.bit_generator.state = state
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: its random state is of another generator: {error}") from None


# -- the file -----------------------------------------------------------------------------------------------


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    for text in (*tensors, *metadata.values()):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{text!r:.80} is no text that can be saved") from None
    arrays = {name: _array(t) for name, t in tensors.items()}
    unsigned = {**metadata, "checksum": _UNSIGNED}
    content = need("safetensors.numpy", "a checkpoint").save(arrays, metadata=unsigned)
    # Of what was written, not of the leaves: somebody may set one meanwhile.
    checksum = _checksum(_views(content), metadata)
    at = content.index(f'"checksum":"{_UNSIGNED}"'.encode()) + len('"checksum":"')
    whole = memoryview(content)
    write_whole(path, [whole[:at], checksum.encode(), whole[at + len(checksum) :]])


def _views(content: bytes) -> dict[str, _Stored]:
    """The tensors of a whole safetensors file, where they lie in it."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    views = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        stored = np.frombuffer(content, np.uint8, end - begin, start + begin)
        views[name] = _Stored(entry["dtype"], tuple(entry["shape"]), stored)
    return views


def _checksum(stored: dict[str, _Stored], metadata: dict[str, str]) -> str:
    """Of all that a checkpoint says, in whatever order."""
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, s in sorted(stored.items()):
        digest.update(repr((name, s.dtype, s.shape)).encode())
        digest.update(s.content.data)
    return digest.hexdigest()


def _array(t: Tensor) -> np.ndarray:
    """The leaf's memory under a dtype that safetensors knows it by."""
    memory = t.memory()
    return memory.view(need("ml_dtypes", "a bf16 tensor in a checkpoint").bfloat16) if t.dtype is BF16 else memory


def _content(path: str | os.PathLike) -> bytes:
    try:
        return read_whole(path)
    except FormatError as error:
        raise CheckpointError(str(error)) from None


def _read(content: bytes, path) -> tuple[dict[str, _Stored], dict[str, str]]:
    safetensors = need("safetensors", "a checkpoint")
    try:
        entries = safetensors.deserialize(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        stored = {
            name: _Stored(e["dtype"], tuple(e["shape"]), np.frombuffer(e["data"], np.uint8)) for name, e in entries
        }
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or was cut short: {error}") from None
    found = metadata.get("ggrad")
    if found not in (FORMAT, WITHOUT_CHECKSUM):
        raise CheckpointError(f"{path} has no metadata of a checkpoint: its format is {found!r}, and {FORMAT} is read")
    expected = metadata.pop("checksum", None)
    if (expected is not None or found == FORMAT) and expected != _checksum(stored, metadata):
        raise CheckpointError(f"{path} is damaged: its checksum is not that of what it holds")
    return stored, metadata
