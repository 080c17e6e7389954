"""Examples for tuning: files of conversations, prompts with completions, or text; tokens of which some are counted in
the loss; and rows that several short examples share, each attending to itself alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import FormatError, ShapeError
from .chat import Chat, Message
from .tokenizer import Tokenizer

IGNORED = -100  # the target of a token that is not counted
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_FORMS = '"messages", "conversations", "prompt" with "completion", or "text"'


@dataclass(frozen=True)
class Example:
    """Tokens i32 [n], and which of them are counted when they are predicted, bool [n]."""

    tokens: np.ndarray
    counted: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """Examples of a file.

    Attributes:
        examples: each of at most context + 1 tokens.
        cut: how many were longer, and end early.
        dropped: how many have nothing that is counted, and are left out.
    """

    examples: list[Example]
    cut: int = 0
    dropped: int = 0

    @property
    def counted(self) -> int:
        """Tokens that are counted."""
        return sum(int(e.counted[1:].sum()) for e in self.examples)

    def split(self, part: float, seed: int) -> tuple[Dataset, Dataset]:
        """Those to train on, and at least one that is held out, chosen by the seed."""
        n = len(self.examples)
        if n < 2:
            raise ShapeError(f"{n} example cannot be split into some to train on and some held out")
        order = np.random.default_rng([seed, 77]).permutation(n)
        held = set(order[: min(n - 1, max(1, round(n * part)))].tolist())
        rest = [e for i, e in enumerate(self.examples) if i not in held]
        return Dataset(rest, self.cut, self.dropped), Dataset([self.examples[i] for i in sorted(held)])


def of_text(text: str, tokenizer: Tokenizer, context: int) -> Dataset:
    """All of a text, in pieces that follow one another."""
    ids = np.array(tokenizer.encode(text, special=False), np.int32)
    pieces = [ids[i : i + context + 1] for i in range(0, max(1, len(ids) - 1), context)]
    return Dataset([Example(p, np.ones(len(p), bool)) for p in pieces if len(p) > 1])


def of_jsonl(path: str | os.PathLike[str], tokenizer: Tokenizer, context: int, *, answers_only: bool = True) -> Dataset:
    """The examples of a file with one in each line.

    Lines are objects with "messages" (of "role" and "content"), "conversations" (of "from" and "value"), "prompt" and
    "completion", or "text".

    Args:
        answers_only: count what the assistant wrote, or the completion, instead of all tokens.

    Raises:
        FormatError: says the line and what is wrong with it.
    """
    lines = Path(path).read_bytes().split(b"\n")
    chat: Chat | None = None
    examples, cut, dropped = [], 0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise FormatError(f"{path}, line {number} is no JSON: {error}") from None
        try:
            messages = conversation(record)
            if messages is not None:
                chat = chat or Chat(tokenizer)
                ids, answers = chat.tokens_and_answers(messages)
            else:
                ids, answers = _plain(record, tokenizer)
        except FormatError as error:
            raise FormatError(f"{path}, line {number}: {error}") from None
        counted = np.array(answers if answers_only else [True] * len(ids), bool)
        cut += len(ids) > context + 1
        ids, counted = ids[: context + 1], counted[: context + 1]
        if len(ids) < 2 or not counted[1:].any():
            dropped += 1
            continue
        examples.append(Example(np.array(ids, np.int32), counted))
    if not examples:
        raise FormatError(f"{path}: of {len(lines)} lines none has a token that is counted within {context} tokens")
    return Dataset(examples, cut, dropped)


def conversation(record: Any) -> list[Message] | None:
    """The messages of a line, None if it is no conversation.

    Raises:
        FormatError: the line is of no form that is known.
    """
    if not isinstance(record, dict):
        raise FormatError(f"it is {type(record).__name__}, and must be an object")
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key not in record:
            continue
        given = record[key]
        if not isinstance(given, list) or not given:
            raise FormatError(f'"{key}" must be a list of messages')
        messages = []
        for i, m in enumerate(given):
            if not isinstance(m, dict) or not isinstance(m.get(role), str) or not isinstance(m.get(content), str):
                raise FormatError(f'message {i} must have "{role}" and "{content}", both strings')
            if m[role] not in _ROLES:
                raise FormatError(f'message {i} is of "{m[role]}"; known are {", ".join(sorted(_ROLES))}')
            messages.append({"role": _ROLES[m[role]], "content": m[content]})
        if all(m["role"] != "assistant" for m in messages):
            raise FormatError("the assistant says nothing in it")
        return messages
    if not ("prompt" in record and "completion" in record or "text" in record):
        raise FormatError(f"it has {', '.join(map(repr, record)) or 'nothing'}, and must have {_FORMS}")
    return None


def _plain(record: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    parts = ("prompt", "completion") if "prompt" in record and "completion" in record else ("text",)
    for key in parts:
        if not isinstance(record[key], str):
            raise FormatError(f'"{key}" must be a string')
    end = [tokenizer.eos] if tokenizer.eos is not None else []
    if parts == ("text",):
        ids = [*tokenizer.encode(record["text"], bos=True), *end]
        return ids, [True] * len(ids)
    whole = record["prompt"] + record["completion"]
    found = tokenizer.encode_with_places(whole, bos=True)
    begin = len(record["prompt"])
    return [i for i, _, _ in found] + end, [b > begin or (a >= begin and b > a) for _, a, b in found] + [True] * len(
        end
    )


class Packed:
    """Batches for `Trainer`: rows of `context` tokens that examples share, in another order each time around.

    With `alone` each has a row of its own, as models need that carry states from token to token.

    A batch is tokens and targets i32 [1, context], positions i32 [context] and cu_seqlens i32 [most + 1].
    """

    def __init__(
        self, examples: Sequence[Example], *, context: int, seed: int = 0, shuffle: bool = True, alone: bool = False
    ) -> None:
        if not examples:
            raise ShapeError("Packed(): there are no examples")
        if too_long := [len(e.tokens) for e in examples if len(e.tokens) > context + 1]:
            raise ShapeError(f"Packed(): an example of {too_long[0]} tokens does not fit into rows of {context} + 1")
        self.examples, self.context, self.seed, self.shuffle = list(examples), context, seed, shuffle
        self.most = 1 if alone else max(1, min(len(self.examples), context // 4))  # examples in a row
        self._rows: list[list[int]] = []
        self._turn = -1
        self.position: list[int] = [0, 0]  # times around, and the next row

    def rows(self, turn: int) -> list[list[int]]:
        """Numbers of the examples in each row: each goes into the first of the last rows that has room."""
        if turn != self._turn:
            n = len(self.examples)
            order = np.random.default_rng([self.seed, turn]).permutation(n) if self.shuffle else np.arange(n)
            rows: list[list[int]] = []
            room: list[int] = []
            for i in order.tolist():
                length = len(self.examples[i].tokens) - 1
                for r in range(max(0, len(rows) - 16), len(rows)):
                    if room[r] >= length and len(rows[r]) < self.most:
                        rows[r].append(i)
                        room[r] -= length
                        break
                else:
                    rows.append([i])
                    room.append(self.context - length)
            self._rows, self._turn = rows, turn
        return self._rows

    def __iter__(self) -> Packed:
        return self

    def __next__(self) -> tuple[np.ndarray, ...]:
        turn, row = self.position
        if row == len(self.rows(turn)):
            turn, row = turn + 1, 0
        self.position = [turn, row + 1]
        return self.batch(self.rows(turn)[row])

    def batch(self, numbers: Iterable[int]) -> tuple[np.ndarray, ...]:
        tokens, targets = np.zeros((1, self.context), np.int32), np.full((1, self.context), IGNORED, np.int32)
        positions, cu = np.zeros(self.context, np.int32), np.zeros(self.most + 1, np.int32)
        at = 0
        for k, i in enumerate(numbers):
            e = self.examples[i]
            n = len(e.tokens) - 1
            tokens[0, at : at + n] = e.tokens[:-1]
            targets[0, at : at + n] = np.where(e.counted[1:], e.tokens[1:], IGNORED)
            positions[at : at + n] = np.arange(n)
            at += n
            cu[k + 1 :] = at
        return tokens, targets, positions, cu

    def seek(self, position: Any) -> None:
        """Let a row be the next one.

        Raises:
            ShapeError: it is no position that `position` had.
        """
        ok = isinstance(position, list | tuple) and len(position) == 2 and all(isinstance(n, int) for n in position)
        if not ok or min(position) < 0 or position[1] > len(self.rows(position[0])):
            raise ShapeError(f"Packed.seek(): {position!r} is no position of these examples")
        self.position = list(position)
