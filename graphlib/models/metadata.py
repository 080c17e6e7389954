"""What a GGUF file says of its model, asked key by key, so that a missing or absurd value is an error that names it."""

from __future__ import annotations

from typing import Any

from ..core.errors import FormatError
from ..files.gguf import GgufFile

_MISSING: Any = object()


class Metadata:
    """Values under the architecture's own prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self.all = file.path, file.metadata
        arch = self.all.get("general.architecture")
        if not isinstance(arch, str):
            raise FormatError(f"{self.path}: general.architecture is {arch!r}, and must be a name")
        self.arch = arch

    def refuse(self, key: str, why: str) -> FormatError:
        return FormatError(f"{self.path}: {key} {why}")

    def number(self, key: str, default: Any = _MISSING, *, least: float = 0) -> Any:
        """A number, or the default where the key is not there."""
        name = f"{self.arch}.{key}"
        value = self.all.get(name, default)
        if value is _MISSING:
            raise self.refuse(name, "is not there, and the architecture needs it")
        if value is None or value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"must be a number, not {value!r}")
        if not least <= value < 1e15:
            raise self.refuse(name, f"must be at least {least:g}, not {value!r}")
        return value

    def count(self, key: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """A whole number."""
        value = self.number(key, default, least=least)
        if value is not default and not isinstance(value, int):
            raise self.refuse(f"{self.arch}.{key}", f"must be a whole number, not {value!r}")
        return value

    def by_layer(self, key: str, layers: int, default: Any = _MISSING, *, least: int = 0) -> list[int]:
        """A whole number for each layer: of an array, or the same for all."""
        name = f"{self.arch}.{key}"
        value = self.all.get(name, default)
        if isinstance(value, list):
            if len(value) < layers or not all(isinstance(n, int) and least <= n < 1 << 31 for n in value):
                raise self.refuse(name, f"must have a whole number for each of {layers} layers")
            return value[:layers]
        return [self.count(key, default, least=least)] * layers

    def text(self, key: str, default: str = "") -> str:
        value = self.all.get(f"{self.arch}.{key}", default)
        if not isinstance(value, str):
            raise self.refuse(f"{self.arch}.{key}", f"must be a string, not {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.all.get(f"{self.arch}.{key}", default)
        if not isinstance(value, bool):
            raise self.refuse(f"{self.arch}.{key}", f"must be true or false, not {value!r}")
        return value
