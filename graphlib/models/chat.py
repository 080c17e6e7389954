"""Conversations as text, by the template in a model's file, which runs in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..core.errors import FormatError
from ..core.extras import need
from .tokenizer import Tokenizer

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Chat:
    """The template of a tokenizer.

    Raises:
        FormatError: there is none, or it is none that jinja2 can read.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        source = template or tokenizer.template
        if source is None:
            raise FormatError("the model has no chat template; give one, or train on prompts or on plain text")
        self.tokenizer = tokenizer
        sandbox = need("jinja2.sandbox", "a chat template", "finetune")
        jinja2 = need("jinja2", "a chat template", "finetune")
        self._errors = jinja2.TemplateError
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation(jinja2)]
        )
        environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except self._errors as error:
            raise FormatError(f"the chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            messages: with "role" and "content".
            prompt: whether the assistant is about to answer.

        Raises:
            FormatError: the template refuses it.
        """
        t = self.tokenizer
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=prompt,
                bos_token=t.name(t.bos) if t.bos is not None else "",
                eos_token=t.name(t.eos) if t.eos is not None else "",
            )
        except (self._errors, TypeError, ValueError, KeyError, OverflowError) as error:
            raise FormatError(f"the chat template refuses the conversation: {error}") from None

    def tokens(self, messages: Sequence[Message], *, prompt: bool = False) -> list[int]:
        """The conversation's tokens."""
        return self._encoded(self.render(messages, prompt=prompt))[0]

    def tokens_and_answers(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The tokens, and which of them the assistant wrote: its words up to the token that ends its turn.

        Raises:
            FormatError: the template refuses the conversation, or changes earlier turns when later ones are added, so
                that it cannot be said where an answer is.
        """
        text = self.render(messages)
        ranges = []
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:k], prompt=True), self.render(messages[: k + 1])
            if not after.startswith(before) or not text.startswith(after.rstrip()):
                start = _common(self.render(messages[:k]), after)
                if not text.startswith(after[:start]) or message["content"] not in after[start:]:
                    raise FormatError(f"the chat template changes earlier turns, so answer {k} cannot be told apart")
                begin = after.index(message["content"], start)
                ranges.append((begin, len(after)))
            else:
                ranges.append((len(before), len(after)))
        ids, places = self._encoded(text)
        answer = [False] * len(ids)
        for begin, end in ranges:
            for i, (a, b) in enumerate(places):
                if begin <= a < end and b > a:
                    answer[i] = True
                    if ids[i] in self.tokenizer.ends:
                        break
        return ids, answer

    def _encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        t = self.tokenizer
        starts = t.bos is not None and text.startswith(t.name(t.bos))
        found = t.encode_with_places(text, bos=not starts)
        return [i for i, _, _ in found], [(a, b) for _, a, b in found]

    def _raise(self, message: str):
        raise self._errors(message)


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)


def _generation(jinja2):
    """An extension for {% generation %} ... {% endgeneration %}, which marks answers and adds no text."""

    ext = need("jinja2.ext", "a chat template", "finetune")

    class Generation(ext.Extension):  # type: ignore[name-defined]
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return Generation
