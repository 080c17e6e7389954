"""The tensors of a GGUF file as constants.  Types that ggrad's products read stay as they are, mapped from the file;
others are expanded to f32 when the file is loaded, by gguf's own decoders."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from ..core.dtype import ALL, QUANTIZED, DType
from ..core.errors import FormatError
from ..core.extras import need
from ..core.tensor import Tensor, set_frozen, tensor
from ..files.gguf import GgufFile, TensorInfo

KNOWN: dict[str, DType] = {d.name: d for d in (*ALL, *QUANTIZED)}


class Weights(Mapping[str, Tensor]):
    """Constants by name.

    Attributes:
        used: the names that a graph has asked for.
        expanded: names of tensors that are held as f32 since products do not read their type.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.used: set[str] = set()
        self.expanded: list[str] = []
        self._leaves = {name: self._leaf(info) for name, info in file.tensors.items()}
        if self.expanded:
            types = sorted({file.tensors[name].type for name in self.expanded})
            total = sum(self._leaves[name].nbytes for name in self.expanded)
            warnings.warn(
                f"{file.path}: {len(self.expanded)} tensors of {', '.join(types)} are expanded to f32, which takes "
                f"{total / 2**20:.0f} MiB of memory",
                stacklevel=4,
            )

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._leaves:
            raise FormatError(f"{self.file.path}: there is no tensor {name!r}, which its architecture needs")
        self.used.add(name)
        return self._leaves[name]

    def __contains__(self, name: object) -> bool:
        return name in self._leaves

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def _leaf(self, info: TensorInfo) -> Tensor:
        dtype = KNOWN.get(info.type)
        if dtype is None:
            self.expanded.append(info.name)
            return tensor(self._expanded(info), name=info.name, frozen=False)
        leaf = tensor(shape=info.shape, dtype=dtype, name=info.name)
        shape = info.shape if not dtype.quantized else (*info.shape[:-1], dtype.bytes_of(info.shape[-1]))
        leaf._data = self.file.raw(info.name).view(dtype.storage).reshape(shape)
        return set_frozen(leaf) if len(info.shape) < 2 else leaf

    def _expanded(self, info: TensorInfo) -> np.ndarray:
        raw = self.file.raw(info.name)
        if info.type == "f64":
            return raw.view("<f8").astype(np.float32).reshape(info.shape)
        if info.type in ("i8", "i16", "i64"):
            return raw.view("<" + info.type).astype(np.float32).reshape(info.shape)
        gguf = need("gguf", f"reading tensors of type {info.type}")
        kind = getattr(gguf.GGMLQuantizationType, info.type.upper(), None)
        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            if kind is None:
                raise NotImplementedError
            return np.asarray(gguf.quants.dequantize(rows, kind), np.float32).reshape(info.shape)
        except (NotImplementedError, KeyError):
            raise FormatError(
                f"{self.file.path}: tensor {info.name!r}: its type {info.type} is read neither by ggrad nor by gguf"
            ) from None
