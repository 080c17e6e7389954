"""Holds an attention kernel of any framework against `attention_reference`, over shapes and options that trap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .attention_reference import AttentionResult, attention_reference, visible_pairs
from .comparison import Arguments, Comparison, Question, Refusals, Results, Rounding, options_of

__all__ = ["AttentionCase", "attention_cases", "compare_attention"]

INPUTS = ("q", "k", "v", "d")


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Shapes and options of one comparison; q, k, v and d are drawn when it runs."""

    name: str
    B: int = 1
    H: int = 2
    N: int = 5
    DK: int = 8
    HK: int = 0  # 0: as many as H
    M: int = 0  # 0: as many as N
    DV: int = 0  # 0: as large as DK
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments, as attention_reference takes them
    backward: bool = True  # else d is None
    magnitude: float = 1.0  # standard deviation of q and k
    garbage: bool = False  # NaN and infinities in keys and values that no query sees

    @property
    def results(self) -> Sequence[str]:
        """Names of what a kernel may give."""
        return [f.name for f in fields(AttentionResult)]

    @property
    def features(self) -> set[str]:
        """What an implementation must know for it: names of options, and of sizes that are not the usual one."""
        usual = {"HK": self.H, "M": self.N, "DV": self.DK}
        return {*self.options, *(name for name, size in usual.items() if getattr(self, name) not in (0, size))}

    def arguments(self, seed: int, dtype: np.dtype) -> dict[str, Any]:
        """q, k, v and d of normal random numbers, and the options."""
        rng = np.random.default_rng(seed)
        HK, M, DV = self.HK or self.H, self.M or self.N, self.DV or self.DK
        largest = 6e4 if dtype == np.float16 else np.inf
        q, k, v, d = (
            np.clip(size * rng.standard_normal(shape), -largest, largest).astype(dtype)
            for size, shape in (
                (self.magnitude, (self.B, self.H, self.N, self.DK)),
                (self.magnitude, (self.B, HK, M, self.DK)),
                (1, (self.B, HK, M, DV)),
                (1, (self.B, self.N, self.H, DV)),
            )
        )
        if self.garbage:
            hidden = ~self._visible(M).any(axis=0)
            k[:, :, hidden, ::2], v[:, :, hidden, 1::2] = np.nan, np.inf
            k[:, :, hidden, 1::2] = -np.inf
        return {"q": q, "k": k, "v": v, "d": d if self.backward else None, **self.options}

    def _visible(self, M: int) -> np.ndarray:
        rules = {name: self.options[name] for name in ("causal", "window", "prefix") if name in self.options}
        visible = visible_pairs(self.N, M, **rules)
        mask = self.options.get("mask")
        if mask is not None:
            kept = mask if mask.dtype == bool else mask != -np.inf
            visible &= kept.reshape(-1, *kept.shape[-2:]).any(axis=0)[: self.N]
        return visible

    def answer(self, arguments: Arguments, *, dtype: DTypeLike, rounded: Rounding) -> Results:
        """By the whole matrix of scores."""
        factors = {name: None if (x := arguments[name]) is None else rounded(x) for name in INPUTS}
        return attention_reference(**{**arguments, **factors}, dtype=dtype, rounded=rounded).present()


def compare_attention(
    fn: Callable[..., Any],
    cases: Iterable[AttentionCase] | None = None,
    *,
    without: str | Iterable[str] = (),
    refuses: Refusals = (),
    dtype: str | DTypeLike = np.float32,
    factor: float = 3.0,
    floor: float = 1e-6,
    seed: int = 0,
) -> Comparison:
    """Compare an attention kernel with the answer in double precision, on shapes and options that trap.

        result = gg.testing.compare_attention(my_attention, without=("dropout_p", "max_bias"))
        assert result.passed, result

    The error of a result is the norm of its difference from double precision, relative to the norm of that (to that
    of as many ones where it is all zero).  It may be `factor` times the error that a plain implementation makes
    in `dtype`, plus `floor`: so no more is asked than the format can give.  NaN, infinities and shapes must be
    those of the answer.  Whatever goes wrong in one case, an exception too, is a row of the result.

    Args:
        fn: `fn(q, k, v, d, **options)`, of NumPy arrays shaped as in `attention_reference`, with only those
            options that a case sets.  `d` is the gradient of out, or None where only the forward pass is wanted.
            It returns out; or a tuple of out, lse, dq, dk, dv, dmask, dsinks, of which it may leave off the last and
            set others to None; or a dict of these.
        cases: default `attention_cases()`.
        without: what `fn` does not know: cases that need it are left out.  Names of options ("sinks", "window",
            "cu_seqlens_q", "d_lse", ...), "HK" (grouped heads), "M" (other than N), "DV" (other than DK).
        refuses: an exception, or a tuple of several, by which `fn` says that it has no kernel for a case, beside
            NotImplementedError.  Such cases are listed apart, and are neither right nor wrong.
        dtype: of q, k, v and d: "f32", "f16", "bf16" (with the package ml_dtypes) or a dtype; or "tf32", f32 of which
            products see ten bits after the point.  The plain implementation calculates in float32, from factors of
            products that are rounded to this format, and keeps its results in it (lse and, for tf32, all in f32).
        factor, floor: of the rule.
        seed: of the arrays.

    Returns:
        `rows`, worst first, `worst`, `passed`, `failed`, `refused`, `summary` ("N right, N wrong, N refused"), and a
        table when printed.

    Raises:
        ValueError: `without` names no option, there is no case to compare, or the dtype is none.
    """
    return QUESTION.ask(
        fn, attention_cases() if cases is None else cases, without=without,
        refuses=refuses, dtype=dtype, factor=factor, floor=floor, seed=seed,
    )  # fmt: skip


QUESTION = Question(
    "compare_attention", INPUTS, options_of(attention_reference) | {"HK", "M", "DV"}, frozenset({"lse"})
)


def attention_cases(seed: int = 0) -> list[AttentionCase]:
    """What `compare_attention` tries: each option at sizes that tell it from its neighbours, and edges."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal

    def holes(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < 0.3, -np.inf, normal(shape)).astype(np.float32)

    def case(name: str, *sizes: int, HK=0, M=0, DV=0, backward=True, magnitude=1.0, garbage=False, **options):
        B, H, N, DK = sizes
        return AttentionCase(
            name=name, B=B, H=H, N=N, DK=DK, HK=HK, M=M, DV=DV, options=options,
            backward=backward, magnitude=magnitude, garbage=garbage,
        )  # fmt: skip

    f32 = np.float32
    empty_rows = holes(9, 9)
    empty_rows[[2, 7]] = -np.inf
    hidden_keys = holes(9, 11)
    hidden_keys[:, [0, 4, 10]] = -np.inf
    packed = {"cu_seqlens_q": np.array([0, 5, 5, 9, 23]), "cu_seqlens_k": np.array([0, 7, 12, 12, 30])}
    packed = {name: value.astype(np.int32) for name, value in packed.items()}
    return [
        case("one query, one key, one element", 1, 1, 1, 1),
        case("one key", 1, 2, 5, 8, M=1),
        case("one query", 2, 2, 1, 16, M=37),
        case("64 x 64", 1, 2, 64, 64),
        case("several tiles, ragged", 1, 2, 130, 64, M=197),
        case("d = 7", 2, 3, 17, 7, M=19),
        case("d = 264", 1, 1, 20, 264, M=33),
        case("d of v larger", 1, 2, 33, 16, DV=40),
        case("d of v smaller", 1, 2, 33, 24, DV=5),
        case("scale", 1, 2, 17, 16, scale=0.7),
        case("grouped heads", 2, 6, 17, 16, HK=2),
        case("one kv head", 2, 4, 19, 8, HK=1, M=33),
        case("top-left", 1, 2, 70, 16, causal="top-left"),
        case("top-left, more keys", 1, 2, 40, 16, M=90, causal="top-left"),
        case("top-left, more queries", 1, 2, 90, 16, M=40, causal="top-left"),
        case("bottom-right, more keys", 1, 2, 40, 16, M=90, causal="bottom-right"),
        case("bottom-right, rows that see nothing", 1, 2, 90, 16, M=40, causal="bottom-right"),
        case("window", 1, 2, 40, 8, window=(3, 2)),
        case("window to the left, causal, long", 1, 2, 150, 16, causal="bottom-right", window=(33, 0)),
        case("window of one key", 1, 2, 9, 8, window=(0, 0)),
        case("window without left bound", 1, 2, 21, 8, M=30, window=(-1, 4)),
        case("window, top-left, more keys", 1, 2, 20, 8, M=33, causal="top-left", window=(5, -1)),
        case("window, bottom-right, more queries", 1, 2, 33, 8, M=20, causal="bottom-right", window=(5, 0)),
        case("window and prefix", 1, 2, 40, 8, causal="bottom-right", window=(4, 0), prefix=3),
        case("window and prefix, long", 1, 1, 600, 16, M=610, causal="bottom-right", window=(20, 0), prefix=5),
        case("mask", 2, 2, 9, 8, M=11, mask=holes(9, 11)),
        case("mask of each head", 2, 4, 9, 8, HK=2, mask=holes(4, 9, 9)),
        case("mask that tiles batches and heads", 4, 4, 5, 8, mask=holes(2, 2, 5, 5)),
        case("mask with rows to spare", 1, 2, 9, 8, mask=holes(16, 9)),
        case("mask, f16, causal", 1, 2, 50, 16, mask=holes(50, 50).astype(np.float16), causal="bottom-right"),
        case("mask, boolean", 1, 2, 33, 8, mask=rng.random((33, 33)) < 0.5),
        case("mask with empty rows", 1, 2, 9, 8, mask=empty_rows),
        case("mask of large finite negatives", 1, 2, 9, 8, mask=np.full((9, 9), -3.4e38, f32)),
        case("NaN in hidden keys", 1, 2, 9, 8, M=11, mask=hidden_keys, garbage=True),
        case("NaN after the last query", 1, 2, 20, 8, M=33, causal="top-left", garbage=True),
        case("sinks", 1, 4, 33, 16, HK=2, sinks=normal(4).astype(f32)),
        case("sinks: large, small, none", 1, 3, 9, 8, sinks=np.array([30, -30, -np.inf], f32), causal="top-left"),
        case("sinks and rows that see nothing", 1, 2, 21, 8, M=9, sinks=normal(2).astype(f32), causal="bottom-right"),
        case("gradient through lse", 2, 2, 17, 8, d_lse=normal((2, 2, 17)).astype(f32)),
        case("gradient through lse, sinks", 1, 2, 17, 8, d_lse=normal((1, 2, 17)).astype(f32), sinks=np.ones(2, f32)),
        case("softcap", 1, 2, 33, 16, logit_softcap=0.8),
        case("softcap, mask, causal", 1, 2, 33, 16, logit_softcap=1.5, mask=holes(33, 33), causal="top-left"),
        case("ALiBi", 1, 6, 17, 8, mask=holes(17, 17), max_bias=8.0, backward=False),
        case("dropout", 2, 4, 33, 16, HK=2, M=50, dropout_p=0.3, seed=11),
        case("dropout, causal, sinks", 1, 2, 70, 8, dropout_p=0.1, seed=5, causal="top-left", sinks=np.ones(2, f32)),
        case("packed", 1, 4, 23, 8, HK=2, M=30, **packed),
        case("packed, top-left", 1, 2, 23, 8, M=30, causal="top-left", **packed),
        case("packed, bottom-right, window", 1, 2, 23, 8, M=30, causal="bottom-right", window=(3, 0), **packed),
        case(
            "packed, mask, dropout", 1, 2, 12, 8, M=150, mask=holes(12, 150), dropout_p=0.2, seed=3,
            cu_seqlens_q=np.array([0, 2, 12], np.int32), cu_seqlens_k=np.array([0, 1, 150], np.int32),
        ),
        case("scores of 1e30", 1, 2, 20, 8, magnitude=1e15, backward=False),
        case("scores of 50", 1, 2, 33, 8, magnitude=7.0, scale=1.0),
    ]  # fmt: skip
