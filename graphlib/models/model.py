"""A language model from a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .. import ops
from ..core.errors import FormatError, ShapeError
from ..core.tensor import Tensor, tensor
from ..files.gguf import GgufFile
from ..graph import Graph
from .architecture import ARCHITECTURES
from .builder import Builder, Memory
from .config import Config
from .metadata import Metadata
from .weights import Weights


def load(path: str | os.PathLike[str]) -> Model:
    """The model of a GGUF file, or of the first of a split one.  Its weights stay in the file, which is mapped.

    Raises:
        FormatError: the file is damaged, or of an architecture that is not known; says what is missing.
        OSError: it cannot be read.
    """
    return Model(GgufFile(path))


class Model:
    """A language model: constants, adapters beside them, and the graphs made of both.

    Attributes:
        file: where it comes from.
        config: its sizes.
        weights: its constants by name.
        architecture: how it is built.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        metadata = Metadata(file)
        if metadata.arch not in ARCHITECTURES:
            raise FormatError(
                f"{file.path}: its architecture is {metadata.arch!r}; ggrad knows {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[metadata.arch]
        self.weights = Weights(file)
        table = self.weights["token_embd.weight"]
        self.config = _adjusted(Config.of(metadata, table.shape[0]))
        self._check()

    def __repr__(self) -> str:
        return f"<Model {self.file.path.name}: {self.config.arch}, {self.config.layers} blocks>"

    @property
    def tied(self) -> bool:
        """Whether the head is the table of embeddings."""
        return "output.weight" not in self.weights

    def states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        memory: Memory | None = None,
        context: int = 0,
    ) -> tuple[Tensor, Builder]:
        """The states from which `head` makes logits, [batch, tokens, width], and what built them.

        Args:
            tokens: i32 [batch, tokens].
            positions: i32 [tokens]; default 0, 1, 2, ...
            cu_seqlens: see `ggrad.flash_attn_ext`: tokens[0] holds several sequences.
            memory: see `Builder`.
            context: tokens of the longest sequence; default is what the memory holds, or all tokens.
        """
        length = tokens.shape[1]
        if positions is None:
            positions = tensor(np.arange(length, dtype=np.int32), name="positions")
        context = context or (memory.length if memory else length)
        b = Builder(self.config, self.weights, positions, context, cu_seqlens, memory)
        return self.architecture.build(b, b.embedding(tokens)), b

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of states [..., width]."""
        c = self.config
        name = "token_embd.weight" if self.tied else "output.weight"
        logits = ops.mul_mat(self.weights[name], states)
        if "output.bias" in self.weights:
            logits = logits + self.weights["output.bias"]
        if c.logit_scale:
            logits = logits * (1 / c.logit_scale)
        return ops.tanh(logits * (1 / c.final_softcap)) * c.final_softcap if c.final_softcap else logits

    def logits(self, tokens: Sequence[int] | np.ndarray, *, threads: int | None = None) -> np.ndarray:
        """Logits f32 [tokens, vocabulary] (or [batch, tokens, vocabulary]) after each of the tokens.

        Raises:
            ShapeError: no tokens, or some that the vocabulary does not have.
        """
        ids = self.checked(tokens)
        leaf = tensor(ids.reshape(-1, ids.shape[-1]), name="tokens")
        states, _ = self.states(leaf)
        out = self.head(states)
        Graph().build_forward_expand(out).compute(threads=threads)
        return out.numpy().reshape(*ids.shape, -1).copy()

    def checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens as i32, [tokens] or [batch, tokens]."""
        ids = np.asarray(tokens)
        if ids.ndim not in (1, 2) or not ids.size or ids.dtype.kind not in "iu":
            raise ShapeError(f"tokens must be integers, [tokens] or [batch, tokens], not {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config.vocabulary:
            raise ShapeError(
                f"tokens are from {ids.min()} to {ids.max()}, but the vocabulary has {self.config.vocabulary}"
            )
        return ids.astype(np.int32)

    def _check(self) -> None:
        """Build a graph once, so that what is missing, left over or of another shape is told now."""
        states, _ = self.states(tensor(np.zeros((1, 1), np.int32)))
        self.head(states)
        optional = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
        left = [n for n in self.weights if n not in self.weights.used | optional and "rope_freqs" not in n]
        if left:
            some = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise FormatError(
                f"{self.file.path}: {self.config.arch} as ggrad knows it has no use for these tensors: {some}"
            )


def _adjusted(c: Config) -> Config:
    """What depends on the size of a model of its architecture."""
    if (c.arch, c.layers) in (("gemma2", 46), ("gemma3", 62)):  # of 27 billion parameters
        return replace(c, scale=(c.width / c.heads[0]) ** -0.5)
    if c.arch == "gemma2" and not c.window:
        return replace(c, window=4096)
    return c
