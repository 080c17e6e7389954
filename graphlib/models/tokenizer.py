"""Tokenizers from what a GGUF file says, run by the library `tokenizers`: byte-level BPE, and SentencePiece's BPE.

Text is cut into tokens as llama.cpp cuts it.  A kind of tokenizer, or of pre-tokenizer, that is not known is refused:
a wrong one would train a model on tokens that it has never seen in such an order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ..core.errors import FormatError
from ..core.extras import need

# How text is cut before merges: patterns that are tried in order on what the ones before have left.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: dict[tuple[str, ...], list[str]] = {
    ("gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "gigachat"): [_GPT2],
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"): [r"\p{N}", _GPT2],
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"): [_LLAMA3],
    ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"): [_QWEN2],
    ("tekken",): [_TEKKEN],
    ("gpt-4o", "llama4"): [_GPT4O],
    ("deepseek-v3",): [r"\p{N}{1,3}", r"[一-龥\x{3040}-ゟ゠-ヿ]+", _DEEPSEEK3],
}
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}  # a word that is a token is not merged
_CONTROL, _USER = 3, 4  # types of tokens
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "<|eom_id|>",
    "</s>", "<|eos|>", "<｜end▁of▁sentence｜>", "<|return|>",
}  # fmt: skip


class Tokenizer:
    """Text to numbers of tokens and back.

    Attributes:
        size: tokens in the vocabulary.
        bos, eos: their numbers, None where there are none.
        adds_bos: whether a text should begin with bos.
        ends: numbers of tokens that end a text or a turn.
        template: the source of the chat template, or None.
    """

    def __init__(self, metadata: dict[str, Any], path: object = "the file") -> None:
        self._metadata, self._path = metadata, path
        self._tokens: list[str] = self._array("tokens", str)
        self._types = self._array("token_type", int, default=[1] * len(self._tokens))
        if len(self._types) != len(self._tokens):
            raise self._refused(f"has {len(self._tokens)} tokens, but types of {len(self._types)}")
        self._kind = metadata.get("tokenizer.ggml.model")
        self._pre = metadata.get("tokenizer.ggml.pre", "gpt-2" if self._kind == "gpt2" else "")
        if self._kind not in ("gpt2", "llama"):
            raise self._refused(f"is of the kind {self._kind!r}; known are 'gpt2' (byte-level BPE) and 'llama'")
        self._cuts = next((cuts for names, cuts in _CUTS.items() if self._pre in names), None)
        if self._kind == "gpt2" and self._cuts is None:
            known = ", ".join(name for names in _CUTS for name in names)
            raise self._refused(f"cuts words by {self._pre!r}, which is not known; known are {known}")
        self.size = len(self._tokens)
        self.bos, self.eos = self._number("bos_token_id"), self._number("eos_token_id")
        default = self._kind == "llama" or self._pre in _WHOLE_WORDS - {"tekken"}
        self.adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and self.bos is not None
        self.ends = {n for n in (self.eos, self._number("eot_token_id"), self._number("eom_token_id")) if n is not None}
        self.ends |= {i for i, t in enumerate(self._tokens) if t in _ENDS and self._types[i] in (_CONTROL, _USER)}
        template = metadata.get("tokenizer.chat_template")
        self.template = template if isinstance(template, str) else None

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        """Numbers of the text's tokens.

        Args:
            special: whether names of control tokens in the text, as "<|im_end|>", mean those tokens.
            bos: begin with bos, where texts of this model should.
        """
        return [i for i, _, _ in self.encode_with_places(text, special=special, bos=bos)]

    def encode_with_places(self, text: str, *, special: bool = True, bos: bool = False) -> list[tuple[int, int, int]]:
        """As `encode`, each with the places in the text between which it was."""
        tokenizer = self._tokenizer
        tokenizer.encode_special_tokens = not special
        found = tokenizer.encode(text, add_special_tokens=False)
        start = [(self.bos, 0, 0)] if bos and self.adds_bos and self.bos is not None else []
        return start + [(i, a, b) for i, (a, b) in zip(found.ids, found.offsets, strict=True)]

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """The text of tokens; `special`: with the names of control tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """The text of tokens piece by piece as they come; a character of several tokens comes when it is whole."""
        waiting: list[int] = []
        told = ""
        for i in ids:
            waiting.append(i)
            text = self.decode(waiting)
            if text.endswith("\ufffd") and len(waiting) < 64:
                continue
            yield text[len(told) :]
            # what was said before keeps the spaces of what follows as they are
            waiting, told = (waiting[-4:], self.decode(waiting[-4:])) if len(waiting) > 32 else (waiting, text)
        if waiting and (rest := self.decode(waiting)[len(told) :]):
            yield rest

    def name(self, number: int) -> str:
        """A token as the file writes it."""
        return self._tokens[number]

    # -- how it is made -----------------------------------------------------------------------------------

    @cached_property
    def _tokenizer(self):
        tokenizers = need("tokenizers", "reading text", "finetune")
        made = self._byte_level(tokenizers) if self._kind == "gpt2" else self._sentence_piece(tokenizers)
        control = [t for t, kind in zip(self._tokens, self._types, strict=True) if kind == _CONTROL and t]
        user = [t for t, kind in zip(self._tokens, self._types, strict=True) if kind == _USER and t]
        made.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in control])
        made.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in user])
        return made

    def _byte_level(self, tokenizers):
        merges = []
        for line in self._array("merges", str):
            first, gap, second = line.partition(" ")
            if not gap or not second:
                raise self._refused(f"has the merge {line!r}, which is no pair")
            merges.append((first, second))
        vocabulary = self._vocabulary()
        try:
            made = tokenizers.Tokenizer(
                tokenizers.models.BPE(vocabulary, merges, ignore_merges=self._pre in _WHOLE_WORDS)
            )
        except Exception as error:
            raise self._refused(f"has merges that do not fit its tokens: {error}") from None
        assert self._cuts is not None
        cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in self._cuts]
        bytes_only = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, bytes_only])
        made.decoder = tokenizers.decoders.ByteLevel()
        return made

    def _sentence_piece(self, tokenizers):
        """Pairs are merged whose whole has the highest score: the same order as that of a list of merges."""
        scores = self._array("scores", float)
        if len(scores) != len(self._tokens):
            raise self._refused(f"has {len(self._tokens)} tokens, but {len(scores)} scores")
        vocabulary = self._vocabulary()
        merges = []
        for number, (t, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind not in (1, _USER) or len(t) < 2:
                continue
            for cut in range(1, len(t)):
                if t[:cut] in vocabulary and t[cut:] in vocabulary:
                    merges.append((-scores[number], number, t[:cut], t[cut:]))
        merges.sort(key=lambda m: m[:2])
        unknown = self._number("unknown_token_id")
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocabulary, [m[2:] for m in merges], byte_fallback=True, fuse_unk=False,
                unk_token=self._tokens[unknown] if unknown is not None else None,
            )
        )  # fmt: skip
        prefix = bool(self._metadata.get("tokenizer.ggml.add_space_prefix", True))
        normalizers = tokenizers.normalizers
        made.normalizer = normalizers.Sequence(
            ([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")]
        )
        decoders = tokenizers.decoders
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            + ([decoders.Strip(" ", 1, 0)] if prefix else [])
        )
        return made

    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = {}
        for number, t in enumerate(self._tokens):
            vocabulary.setdefault(t, number)
        return vocabulary

    def _array(self, key: str, kind: type, default: list | None = None) -> list:
        name = f"tokenizer.ggml.{key}"
        value = self._metadata.get(name, default)
        if not isinstance(value, list) or not value or not all(isinstance(v, kind | int) for v in value[:1]):
            raise self._refused(f"needs {name}, a list of {kind.__name__}")
        return value

    def _number(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (not isinstance(value, int) or not 0 <= value < len(self._tokens)):
            raise self._refused(f"says that {key} is {value!r}, of {len(self._tokens)} tokens")
        return value

    def _refused(self, why: str) -> FormatError:
        return FormatError(f"{self._path}: its tokenizer {why}")
