"""Holds an attention kernel of any framework against `attention_reference`, over shapes and options that trap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .attention_reference import AttentionResult, attention_reference, visible_pairs

__all__ = ["AttentionCase", "AttentionComparison", "AttentionRow", "attention_cases", "compare_attention"]

NAMES = tuple(f.name for f in fields(AttentionResult))


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
    def features(self) -> set[str]:
        """What an implementation must know for it: names of options, and of sizes that are not the usual one."""
        usual = {"HK": self.H, "M": self.N, "DV": self.DK}
        return {*self.options, *(name for name, size in usual.items() if getattr(self, name) not in (0, size))}

    def arrays(self, seed: int, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """q, k, v and d of normal random numbers."""
        rng = np.random.default_rng(seed)
        HK, M, DV = self.HK or self.H, self.M or self.N, self.DV or self.DK
        largest = 6e4 if np.dtype(dtype) == np.float16 else np.inf
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
        return q, k, v, d if self.backward else None

    def _visible(self, M: int) -> np.ndarray:
        rules = {name: self.options[name] for name in ("causal", "window", "prefix") if name in self.options}
        visible = visible_pairs(self.N, M, **rules)
        mask = self.options.get("mask")
        if mask is not None:
            kept = mask if mask.dtype == bool else mask != -np.inf
            visible &= kept.reshape(-1, *kept.shape[-2:]).any(axis=0)[: self.N]
        return visible


@dataclass(frozen=True)
class AttentionRow:
    """The verdict of one case."""

    case: AttentionCase
    errors: Mapping[str, float]  # name of a result -> relative error
    plain: Mapping[str, float]  # the plain implementation's
    excess: float  # largest error as a share of what is allowed: above 1 fails
    problem: str = ""  # what kept results from being compared

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound."""
        return self.excess <= 1

    def line(self, columns: Sequence[str]) -> str:
        """Of the table: the case, its excess, and of each column the error and the plain implementation's."""
        cells = [
            f"{self.errors[name]:.1e} ({self.plain[name]:.0e})" if name in self.errors else "-" for name in columns
        ]
        head = f"{'ok' if self.passed else 'FAILED':<7}{self.case.name:<38}{self.excess:<9.2g}"
        return (head + "".join(f"{cell:<18}" for cell in cells)).rstrip() + (
            f"\n       {self.problem}" * bool(self.problem)
        )


@dataclass(frozen=True)
class AttentionComparison:
    """What `compare_attention` found; prints as a table."""

    rows: Sequence[AttentionRow]  # worst first
    left_out: Sequence[AttentionCase]
    rule: str

    @property
    def worst(self) -> AttentionRow:
        """The row with the largest share of its bound."""
        return self.rows[0]

    @property
    def passed(self) -> bool:
        """Whether all rows have."""
        return all(row.passed for row in self.rows)

    @property
    def failed(self) -> list[AttentionRow]:
        """The rows that have not passed."""
        return [row for row in self.rows if not row.passed]

    def __str__(self) -> str:
        compared = [name for name in NAMES if any(name in row.errors for row in self.rows)]
        left_out = f", {len(self.left_out)} left out" * bool(self.left_out)
        head = f"{len(self.failed)} of {len(self.rows)} cases failed{left_out}; {self.rule}"
        titles = f"{'':<7}{'':<38}{'share':<9}" + "".join(f"{name:<18}" for name in compared)
        return "\n".join([head, titles.rstrip(), *(row.line(compared) for row in self.rows)])


def compare_attention(
    fn: Callable[..., Any],
    cases: Iterable[AttentionCase] | None = None,
    *,
    without: Iterable[str] = (),
    dtype: DTypeLike = np.float32,
    factor: float = 3.0,
    floor: float = 1e-6,
    seed: int = 0,
) -> AttentionComparison:
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
        dtype: of q, k, v and d, float16 or ml_dtypes.bfloat16 too.  The plain implementation calculates in float32 and
            keeps weights and results in this format.
        factor, floor: of the rule.
        seed: of the arrays.

    Returns:
        `rows`, worst first, `worst`, `passed`, and a table when printed.
    """
    without = {without} if isinstance(without, str) else set(without)
    known = set(OPTIONS) | {"HK", "M", "DV"}
    if not without <= known:
        raise ValueError(
            f"compare_attention(): without={sorted(without - known)} must be of {', '.join(sorted(known))}"
        )
    chosen: list[AttentionCase] = []
    left_out: list[AttentionCase] = []
    for case in attention_cases() if cases is None else cases:
        (left_out if case.features & without else chosen).append(case)
    if not chosen:
        raise ValueError("compare_attention(): there is no case to compare")
    rows = [_compare(fn, case, seed + i, np.dtype(dtype), factor, floor) for i, case in enumerate(chosen)]
    rows.sort(key=lambda row: -row.excess)
    rule = (
        f"relative errors (and plain {np.dtype(dtype).name}'s), allowed are {factor:g} times those + {floor:g}, "
        "of which a share is used; worst first"
    )
    return AttentionComparison(rows, left_out, rule)


OPTIONS = (
    "mask", "sinks", "d_lse", "scale", "causal", "window", "prefix", "cu_seqlens_q", "cu_seqlens_k",
    "logit_softcap", "max_bias", "dropout_p", "seed", "dropout_key",
)  # fmt: skip


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


# -- one case -----------------------------------------------------------------------------------------------


def _compare(
    fn: Callable[..., Any], case: AttentionCase, seed: int, dtype: np.dtype, factor: float, floor: float
) -> AttentionRow:
    q, k, v, d = case.arrays(seed, dtype)
    arguments = {"q": q, "k": k, "v": v, "d": d, **case.options}
    exact = attention_reference(**arguments).present()
    plain = _plain(arguments, dtype)
    try:
        results = _named(_call(fn, arguments))
    except Exception as error:
        return AttentionRow(case, {}, {}, np.inf, f"{type(error).__name__}: {error}")
    errors: dict[str, float] = {}
    problems = []
    for name, got in results.items():
        problem = _unlike(got, exact.get(name))
        if problem:
            problems.append(f"{name}: {problem}")
        elif name in exact:
            errors[name] = _relative_error(got, exact[name])
    own = {name: _relative_error(plain[name], exact[name]) for name in errors}
    excess = max((error / (factor * own[name] + floor) for name, error in errors.items()), default=0.0)
    return AttentionRow(case, errors, own, np.inf if problems or not errors else excess, "; ".join(problems))


def _call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """fn's answer for copies of the arguments, which must be what they were."""
    given = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    options = {name: x for name, x in given.items() if name not in ("q", "k", "v", "d")}
    answer = fn(given["q"], given["k"], given["v"], given["d"], **options)
    for name, x in arguments.items():
        if isinstance(x, np.ndarray) and x.tobytes() != given[name].tobytes():
            raise ValueError(f"it wrote into its argument {name}")
    return answer


def _plain(arguments: Mapping[str, Any], dtype: np.dtype) -> dict[str, np.ndarray]:
    """All results in float32; weights, and results but lse, are kept in `dtype`."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float32)

    results = attention_reference(**arguments, dtype=np.float32, rounded=rounded).present()
    return {name: x if name == "lse" else rounded(x) for name, x in results.items()}


def _named(answer: Any) -> dict[str, np.ndarray]:
    if isinstance(answer, AttentionResult):
        answer = answer.present()
    if not isinstance(answer, Mapping):
        several = answer if isinstance(answer, (tuple, list)) else (answer,)
        if len(several) > len(NAMES):
            raise ValueError(f"{len(several)} results, at most {len(NAMES)} are known: {', '.join(NAMES)}")
        answer = dict(zip(NAMES, several, strict=False))
    unknown = sorted(set(answer) - set(NAMES))
    if unknown:
        raise ValueError(f"results {', '.join(unknown)} are none of {', '.join(NAMES)}")
    return {name: np.asarray(x).astype(np.float64) for name, x in answer.items() if x is not None}


def _unlike(got: np.ndarray, exact: np.ndarray | None) -> str:
    """What keeps two arrays from having a distance, or nothing."""
    if exact is None:
        return ""
    if got.shape != exact.shape:
        return f"shape {list(got.shape)}, not {list(exact.shape)}"
    for what, is_it in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = is_it(got) & ~is_it(exact)
        if wrong.any():
            return f"{what} in {int(wrong.sum())} of {got.size} elements, first at {np.argwhere(wrong)[0].tolist()}"
        missing = is_it(exact) & ~is_it(got)
        if missing.any():
            at = tuple(np.argwhere(missing)[0].tolist())
            return f"{got[at]:g} for {what} in {int(missing.sum())} of {got.size} elements, first at {list(at)}"
    return ""


def _relative_error(got: np.ndarray, exact: np.ndarray) -> float:
    finite = np.isfinite(exact)
    size = float(np.linalg.norm(exact[finite])) or np.sqrt(max(1, finite.sum()))
    return float(np.linalg.norm(got[finite] - exact[finite])) / size
