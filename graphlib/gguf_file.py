"""Tensors from a GGUF file, in which ggml keeps models.  Reads with the gguf package (the extra `gguf`)."""

from __future__ import annotations

import os

import numpy as np

from .dtype import ALL, BF16, QUANTIZED
from .errors import ShapeError
from .extras import need
from .tensor import Tensor, set_frozen, tensor


def load_gguf(path: str | os.PathLike[str], *, frozen: bool = False) -> dict[str, Tensor]:
    """The tensors of a GGUF file by name, as constants; shapes in NumPy order.

    Quantized ones stay as they are in the file: `mul_mat`, `get_rows` and `mul_mat_id` read their blocks.  To train
    one of another dtype, `gg.set_param` it.

    Args:
        path: of the file.
        frozen: none of them will ever change; see `gg.tensor`.

    Raises:
        MissingExtraError: the gguf package is not installed.
        OSError: the file cannot be read.
        ShapeError: a tensor of a type that ggrad does not know, or of more than four axes.
    """
    gguf = need("gguf", "reading a GGUF file")
    known = {d.name: d for d in (*ALL, *QUANTIZED)}
    leaves = {}
    for entry in gguf.GGUFReader(os.fspath(path)).tensors:
        kind = entry.tensor_type.name.lower()
        if kind not in known:
            raise ShapeError(f"load_gguf({entry.name}): its type is {kind}; ggrad reads {', '.join(known)}")
        shape = tuple(int(n) for n in reversed(entry.shape))
        leaf = tensor(shape=shape, dtype=known[kind], name=entry.name)
        if leaf.dtype is BF16:
            leaf.memory()[...] = np.ascontiguousarray(entry.data).view(np.uint16).reshape(shape)
        else:
            leaf.set(entry.data)
        leaves[entry.name] = set_frozen(leaf) if frozen else leaf
    return leaves
