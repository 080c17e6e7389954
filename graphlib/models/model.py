"""A language model from a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from .. import ops
from ..core.dtype import F16, Q8_0, DType
from ..core.errors import FormatError, GraphError, ShapeError
from ..core.tensor import Tensor, tensor
from ..files.gguf import GgufFile
from ..graph import Graph
from . import lora
from .architecture import ARCHITECTURES
from .builder import Builder, Memory
from .chat import Chat, Message
from .config import Config
from .generate import Reader, Sampling, continued, until
from .lora import Lora
from .metadata import Metadata
from .tokenizer import Tokenizer
from .weights import Weights
from .writing import as_type, copy_with


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
        lora: the adapters, if there are any; graphs that are built from then on have them.
        tokenizer: of the file.
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
        self.lora: Lora | None = None
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
        seed: Tensor | None = None,
    ) -> tuple[Tensor, Builder]:
        """The states from which `head` makes logits, [batch, tokens, width], and what built them.

        Args:
            tokens: i32 [batch, tokens].
            positions: i32 [tokens]; default 0, 1, 2, ...
            cu_seqlens: see `ggrad.flash_attn_ext`: tokens[0] holds several sequences.
            memory: see `Builder`.
            context: tokens of the longest sequence; default is what the memory holds, or all tokens.
            seed: of the dropout beside adapters, a scalar i32; without one nothing is dropped.
        """
        length = tokens.shape[1]
        if positions is None:
            positions = tensor(np.arange(length, dtype=np.int32), name="positions")
        context = context or (memory.length if memory else length)
        b = Builder(self.config, self.weights, positions, context, cu_seqlens, memory, self.lora, seed)
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

    def loss_and_gradient(self, states: Tensor, targets: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the cross entropies of states [rows, width] and targets [rows], and the gradient of factor times
        that sum by the states, both in the forward pass: the logits [rows, vocabulary] are not kept for later."""
        c = self.config
        logits = self.head(states)
        loss = ops.cross_entropy_loss(logits, targets, reduction="sum")
        packed = loss.src[0]
        assert packed is not None and packed.op is not None
        pulled = [factor, *[None] * (len(packed.parts) - 1)]
        dlogits = packed.op.vjp(packed, pulled, [True, False])[0]
        assert dlogits is not None
        if c.final_softcap:
            dlogits = dlogits * (1.0 - ops.sqr(logits * (1 / c.final_softcap)))
        if c.logit_scale:
            dlogits = dlogits * (1 / c.logit_scale)
        w = self.weights["token_embd.weight" if self.tied else "output.weight"]
        if w.dtype.quantized:
            return loss, ops.mul_mat_quantized_back(w, dlogits)
        return loss, ops.mul_mat(ops.transpose(w), dlogits)

    # -- adapters -----------------------------------------------------------------------------------------

    def add_lora(
        self,
        rank: int = 16,
        *,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        rslora: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Lora:
        """New adapters, which change nothing until they are trained; see `models.lora`.  They replace those there are.

        Args:
            rank: of the thin matrices.
            alpha: default is twice the rank.
            targets: last parts of names, as "attn_q"; default is all matrices of the blocks.

        Raises:
            ShapeError: the model has no such matrices, or numbers make no sense.
        """
        self.lora = lora.new(
            self.weights, rank=rank, alpha=2.0 * rank if alpha is None else alpha, rslora=rslora, dropout=dropout,
            seed=seed, targets=self._targets() if targets is None else targets,
        )  # fmt: skip
        return self.lora

    def _targets(self) -> list[str]:
        """Of the architecture's, those that the file has: experts have no plain matrices."""
        ends = {name.removesuffix(".weight").rpartition(".")[2] for name, w in self.weights.items() if w.ndim == 2}
        return [t for t in self.architecture.targets if t in ends]

    def load_adapter(self, path: str | os.PathLike[str]) -> Lora:
        """Adapters from a GGUF file, or a folder in peft's layout, instead of those there are.

        Raises:
            FormatError: it holds none, or none of this model.
        """
        self.lora = lora.read(path, self.config, self.weights)
        return self.lora

    def save_adapter(self, path: str | os.PathLike[str]) -> None:
        """Write the adapters: a name that ends with .gguf becomes a file that llama.cpp loads, another one a folder in
        peft's layout.  What was there stays until the new is whole."""
        if self.lora is None:
            raise GraphError("save_adapter(): the model has no adapters; add_lora() adds them")
        self.lora.save(path, self.config)

    def merge(self, path: str | os.PathLike[str], *, dtype: DType | None = None) -> dict[str, int]:
        """Write the model with its adapters added to its matrices.

        Args:
            dtype: of the matrices that have adapters.  Default: as they were, but q8_0 for those of fewer bits than
                that, since an adapter's changes are often smaller than the steps of those.

        Returns:
            How many matrices were written in each type.
        """
        if self.lora is None:
            raise GraphError("merge(): the model has no adapters; load_adapter() reads them")
        counts: dict[str, int] = {}
        changed = {}
        for name in self.lora.names:
            w = self.weights[name]
            kind = dtype or (w.dtype if not w.dtype.quantized or w.shape[-1] % Q8_0.block else Q8_0)
            if kind.quantized and w.shape[-1] % kind.block:
                kind = F16
            counts[kind.name] = counts.get(kind.name, 0) + 1
            changed[name] = partial(self._merged, name, kind)
        copy_with(self.file, path, changed)
        return counts

    def _merged(self, name: str, kind: DType) -> tuple[np.ndarray, str]:
        assert self.lora is not None
        values = self.weights[name].numpy().astype(np.float32) + self.lora.delta(name)
        return as_type(values, kind), kind.name

    # -- text ---------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises FormatError: the file has none, or one of a kind that is not known."""
        return Tokenizer(self.file.metadata, self.file.path)

    @cached_property
    def chat(self) -> Chat:
        """The chat template.  Raises FormatError: there is none."""
        return Chat(self.tokenizer)

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        threads: int | None = None,
    ) -> Iterator[str]:
        """Text that follows, in pieces as it is made.

        Args:
            prompt: text, in which names of control tokens mean those tokens; or the messages of a conversation, to
                which the assistant answers.
            tokens: the most.
            stop: words before which the text ends.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, bos=True)
        else:
            ids = self.chat.tokens(prompt, prompt=True)
        if not ids:
            raise ShapeError("generate(): the prompt has no tokens")
        reader = Reader(self, len(ids) + tokens, threads=threads)
        found = continued(reader, ids, sampling or Sampling(), most=tokens, ends=self.tokenizer.ends)
        return until(self.tokenizer.stream(found), stop)

    # -- numbers ------------------------------------------------------------------------------------------

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
        optional |= {f"blk.0.time_mix_v{j}.weight" for j in range(3)}  # RWKV's first block has no block before it
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
