"""Text from a model, token by token: a cache of keys and values that the graph writes, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from ..graph import Graph
from .builder import Memory

if TYPE_CHECKING:
    from .model import Model

CHUNK = 64  # tokens of a prompt that are read at once


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens; 0 for all.
        top_p: only the likeliest tokens that have this much of the probability together.
        min_p: only tokens at least this likely, as a part of the likeliest one's probability.
        repeat_penalty: logits of the last `repeat_last` tokens are divided by it where they are positive, else
            multiplied (Keskar et al., 2019, https://arxiv.org/abs/1909.05858).
        repeat_last: how many tokens that looks back.
        seed: of the choices.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ShapeError(f"{self}: temperature and top_k are at least 0, top_p is in (0, 1], min_p in [0, 1]")
        if not self.repeat_penalty > 0 or self.repeat_last < 0:
            raise ShapeError(f"{self}: repeat_penalty is positive, and repeat_last at least 0")

    def choose(self, logits: np.ndarray, before: Sequence[int], rng: np.random.Generator) -> int:
        """The next token's number, of logits [vocabulary]."""
        x = logits.astype(np.float64)
        if self.repeat_penalty != 1 and self.repeat_last:
            seen = np.unique(np.asarray(before[-self.repeat_last :], np.int64))
            x[seen] = np.where(x[seen] > 0, x[seen] / self.repeat_penalty, x[seen] * self.repeat_penalty)
        if self.temperature == 0:
            return int(x.argmax())
        kept = np.argsort(-x, kind="stable")
        kept = kept[: self.top_k] if self.top_k else kept
        p = np.exp(x[kept] - x[kept[0]])
        p /= p.sum()
        if self.top_p < 1:
            n = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1
            kept, p = kept[:n], p[:n]
        n = max(1, int((p >= self.min_p * p[0]).sum()))
        p = np.exp((x[kept[:n]] - x[kept[0]]) / self.temperature)
        return int(kept[rng.choice(n, p=p / p.sum())])


class Reader:
    """Reads tokens, one after another or many at once, and remembers them.

    Args:
        model: adapters included.
        room: tokens that can be remembered.
        threads: see `Graph.compute`.
    """

    def __init__(self, model: Model, room: int, *, threads: int | None = None) -> None:
        if room < 1:
            raise ShapeError(f"Reader(): room must be at least 1, not {room}")
        self.model, self.room, self.threads = model, room, threads
        self.memory = Memory(room + CHUNK)  # the last chunk may be filled up with tokens that nothing reads
        self.length = 0
        self._steps: dict[int, _Step] = {}

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits f32 [vocabulary] after the last of further tokens.

        Raises:
            ShapeError: no tokens, or more than there is room for.
        """
        ids = self.model.checked(tokens)
        if self.length + len(ids) > self.room:
            raise ShapeError(f"{self.length + len(ids)} tokens do not fit into a room of {self.room}")
        at = 0
        while at < len(ids):
            left = len(ids) - at
            n = 1 if left == 1 or left < CHUNK and self.model.architecture.recurrent else CHUNK
            part = ids[at : at + n]
            step = (
                self._steps.setdefault(n, _Step(self.model, self.memory, n)) if n not in self._steps else self._steps[n]
            )
            logits = step.run(part, self.length, self.threads)
            self.length += len(part)
            at += len(part)
        return logits

    def forget(self) -> None:
        """Begin anew."""
        self.length = 0
        for leaf in self.memory.leaves.values():
            leaf.memory()[...] = 0


class _Step:
    """A graph that reads so many tokens."""

    def __init__(self, model: Model, memory: Memory, n: int) -> None:
        self.memory = memory
        self.tokens = tensor(shape=(1, n), dtype=I32, name="tokens")
        self.positions = tensor(shape=(n,), dtype=I32, name="positions")
        self.last = tensor(shape=(1,), dtype=I32, name="last")
        states, b = model.states(self.tokens, self.positions, memory=memory)
        self.logits: Tensor = model.head(ops.get_rows(states.reshape(n, states.shape[-1]), self.last))
        self.graph = Graph().build_forward_expand(*b.updates, self.logits)

    def run(self, ids: np.ndarray, begin: int, threads: int | None) -> np.ndarray:
        n = self.tokens.shape[1]
        filled = np.zeros((1, n), np.int32)
        filled[0, : len(ids)] = ids
        self.tokens.set(filled)
        self.positions.set(np.arange(begin, begin + n, dtype=np.int32))
        self.last.set(np.array([len(ids) - 1], np.int32))
        self.memory.new.set(np.array([0, len(ids)], np.int32))
        self.memory.used.set(np.array([0, begin + len(ids)], np.int32))
        self.graph.compute(threads=threads)
        return self.logits.numpy()[0].copy()


def continued(reader: Reader, prompt: Sequence[int], sampling: Sampling, *, most: int, ends: set[int]) -> Iterator[int]:
    """Tokens that follow the prompt, until one ends the text (which is not given), or there are enough."""
    rng = np.random.default_rng(sampling.seed)
    before = list(prompt)
    fresh = before
    for _ in range(most):
        if reader.length + len(fresh) > reader.room:
            return
        token = sampling.choose(reader.read(fresh), before, rng)
        if token in ends:
            return
        yield token
        before.append(token)
        fresh = [token]


def until(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """Pieces of text up to the first of the stop words, which may lie across several of them."""
    held, longest = "", max((len(s) for s in stops), default=0)
    for piece in pieces:
        held += piece
        found = [at for s in stops if (at := held.find(s)) >= 0]
        if found:
            yield held[: min(found)]
            return
        free = len(held) - longest + 1 if longest else len(held)
        if free > 0:
            yield held[:free]
            held = held[free:]
    yield held
