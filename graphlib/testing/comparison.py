"""Holds a kernel of any framework against the answer in double precision, case by case, and prints a table."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["Comparison", "Row"]

WIDTH = 110  # of a line that says what went wrong
Arguments = Mapping[str, Any]
Results = dict[str, np.ndarray]
Rounding = Callable[[np.ndarray], np.ndarray]
Refusals = type[BaseException] | tuple[type[BaseException], ...]


class Case(Protocol):
    """Shapes and options of one comparison; its arrays are drawn when it runs."""

    @property
    def name(self) -> str:
        """In the table."""

    @property
    def features(self) -> set[str]:
        """What an implementation must know for it, beside the usual."""

    @property
    def results(self) -> Sequence[str]:
        """Names of the results and gradients that a kernel may give, in order."""

    def arguments(self, seed: int, dtype: np.dtype) -> dict[str, Any]:
        """Name -> array, number or None; those in `dtype` that a kernel would be given in it."""

    def answer(self, arguments: Arguments, *, dtype: DTypeLike, rounded: Rounding) -> Results:
        """All results and gradients by their definition, calculated in `dtype`; `rounded` is applied where a plain
        implementation multiplies or stores in a narrow format."""


def options_of(reference: Callable[..., Any]) -> frozenset[str]:
    """What an implementation may be told, from the definition's own signature."""
    parameters = inspect.signature(reference).parameters.values()
    named = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return frozenset(named - {"dtype", "rounded"})


# -- formats ------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """What numbers a kernel is given, and what it may do to factors of its products."""

    name: str
    dtype: np.dtype  # of the arrays
    rounded: Rounding  # f32 -> f32
    keeps: bool  # results are in the format too


def as_format(given: str | DTypeLike) -> Format:
    """Of "f32", "tf32" (arrays in f32, products of factors with ten bits after the point), "f16", "bf16", or a dtype.

    Raises:
        ValueError: it is none of these.
        ModuleNotFoundError: bf16 without the package ml_dtypes.
    """
    if isinstance(given, str) and given == "tf32":
        return Format("tf32", np.dtype(np.float32), _tf32, False)
    if isinstance(given, str) and given in ("bf16", "bfloat16"):
        import ml_dtypes

        given = ml_dtypes.bfloat16
    names = {"f32": np.float32, "f16": np.float16}
    try:
        dtype = np.dtype(names.get(given, given) if isinstance(given, str) else given)
    except TypeError:
        raise ValueError(f'dtype={given!r} must be "f32", "tf32", "f16", "bf16" or a floating dtype') from None
    if dtype.name not in ("float64", "float32", "float16", "bfloat16"):
        raise ValueError(f'dtype={given!r} must be "f32", "tf32", "f16", "bf16" or a floating dtype')
    return Format(dtype.name, dtype, lambda x: x.astype(dtype).astype(np.float32), True)


def _tf32(x: np.ndarray) -> np.ndarray:
    """To the nearest with ten bits after the point, to even between two; infinities and NaN stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), nearest.view(np.float32), x).astype(np.float32)


# -- what is found ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The verdict of one case."""

    case: Case
    errors: Mapping[str, float]  # name of a result -> relative error
    plain: Mapping[str, float]  # the plain implementation's
    excess: float  # largest error as a share of what is allowed: above 1 fails
    problem: str = ""  # what kept results from being compared
    refused: bool = False  # the kernel said that it does not know this

    @property
    def passed(self) -> bool:
        """Whether the results are right; what was refused is neither right nor wrong."""
        return not self.refused and self.excess <= 1

    @property
    def failed(self) -> bool:
        """Whether something is wrong."""
        return not self.refused and self.excess > 1

    def line(self, columns: Sequence[str], width: int) -> str:
        """Of the table: the case, its excess, and of each column the error and the plain implementation's."""
        cells = [
            f"{self.errors[name]:.1e} ({self.plain[name]:.0e})" if name in self.errors else "-" for name in columns
        ]
        head = f"{'ok' if self.passed else 'FAILED':<7}{self.case.name:<{width}}{self.excess:<9.2g}"
        return (head + "".join(f"{cell:<18}" for cell in cells)).rstrip() + _indented(self.problem)


@dataclass(frozen=True)
class Comparison:
    """What a comparison found; prints as a table."""

    rows: Sequence[Row]  # worst first, then what was refused
    left_out: Sequence[Case]
    rule: str

    @property
    def worst(self) -> Row:
        """The row with the largest share of its bound."""
        return self.rows[0]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong, and something is right."""
        return not self.failed and any(row.passed for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        """The rows that are wrong."""
        return [row for row in self.rows if row.failed]

    @property
    def refused(self) -> list[Row]:
        """Cases for which the kernel raised what says that it does not know them."""
        return [row for row in self.rows if row.refused]

    @property
    def summary(self) -> str:
        """How many cases are right, wrong, refused, and left out unasked."""
        right = sum(row.passed for row in self.rows)
        counts = f"{right} right, {len(self.failed)} wrong, {len(self.refused)} refused"
        return counts + f", {len(self.left_out)} left out" * bool(self.left_out)

    def __str__(self) -> str:
        compared = list(dict.fromkeys(name for row in self.rows for name in row.case.results if name in row.errors))
        width = 2 + max(len(row.case.name) for row in self.rows)
        titles = f"{'':<7}{'':<{width}}{'share':<9}" + "".join(f"{name:<18}" for name in compared)
        answered = [row.line(compared, width) for row in self.rows if not row.refused]
        table = [titles.rstrip(), *answered] if answered else []
        refused = [f"refused {row.case.name}{_indented(row.problem)}" for row in self.refused]
        return "\n".join([f"{self.summary}; {self.rule}", *table, *refused])


def _indented(problem: str) -> str:
    return f"\n       {problem}" if problem else ""


# -- the comparison -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """How kernels of one kind are asked."""

    caller: str  # for errors
    positional: Sequence[str]  # arguments that are not passed by name
    known: frozenset[str] | None = None  # what may be left out; None: anything
    wide: frozenset[str] = frozenset()  # results that are f32 in any format

    def ask(
        self,
        fn: Callable[..., Any],
        cases: Iterable[Case],
        *,
        without: str | Iterable[str],
        refuses: Refusals,
        dtype: str | DTypeLike,
        factor: float,
        floor: float,
        seed: int,
    ) -> Comparison:
        """Every case but those that need what is in `without`.

        Raises:
            ValueError: `without` names what no case needs, there is no case left, or the dtype is none.
        """
        given = as_format(dtype)
        without = {without} if isinstance(without, str) else set(without)
        if self.known is not None and not without <= self.known:
            unknown = sorted(without - self.known)
            raise ValueError(f"{self.caller}(): without={unknown} must be of {', '.join(sorted(self.known))}")
        chosen: list[Case] = []
        left_out: list[Case] = []
        for case in cases:
            (left_out if case.features & without else chosen).append(case)
        if not chosen:
            raise ValueError(f"{self.caller}(): there is no case to compare")
        refusals = (NotImplementedError, *(refuses if isinstance(refuses, tuple) else (refuses,)))
        rows = [self._row(fn, case, seed + i, given, refusals, factor, floor) for i, case in enumerate(chosen)]
        rows.sort(key=lambda row: (row.refused, -row.excess))
        rule = (
            f"relative errors (and plain {given.name}'s), allowed are {factor:g} times those + {floor:g}, "
            "of which a share is used; worst first"
        )
        return Comparison(rows, left_out, rule)

    def _row(self, fn, case: Case, seed: int, given: Format, refusals, factor: float, floor: float) -> Row:
        arguments = case.arguments(seed, given.dtype)
        try:
            results = _named(self._call(fn, arguments), case.results)
        except refusals as error:
            return Row(case, {}, {}, 0.0, _one_line(error), refused=True)
        except Exception as error:
            return Row(case, {}, {}, np.inf, _one_line(error))
        exact = case.answer(arguments, dtype=np.float64, rounded=lambda x: x)
        plain = self._plain(case, arguments, given)
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
        return Row(case, errors, own, np.inf if problems or not errors else excess, "; ".join(problems))

    def _call(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """fn's answer for copies of the arguments, which must be what they were."""
        given = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
        options = {name: x for name, x in given.items() if name not in self.positional}
        answer = fn(*(given[name] for name in self.positional), **options)
        for name, x in arguments.items():
            if isinstance(x, np.ndarray) and x.tobytes() != given[name].tobytes():
                raise ValueError(f"it wrote into its argument {name}")
        return answer

    def _plain(self, case: Case, arguments: Arguments, given: Format) -> Results:
        """All results in float32, from factors that are rounded to the format."""
        results = case.answer(arguments, dtype=np.float32, rounded=given.rounded)
        wide = self.wide if given.keeps else results.keys()
        return {name: x if name in wide else given.rounded(x) for name, x in results.items()}


def _named(answer: Any, names: Sequence[str]) -> Results:
    if hasattr(answer, "present"):
        answer = answer.present()
    if not isinstance(answer, Mapping):
        several = answer if isinstance(answer, (tuple, list)) else (answer,)
        if len(several) > len(names):
            raise ValueError(f"{len(several)} results, at most {len(names)} are known: {', '.join(names)}")
        answer = dict(zip(names, several, strict=False))
    unknown = sorted(set(answer) - set(names))
    if unknown:
        raise ValueError(f"results {', '.join(unknown)} are none of {', '.join(names)}")
    return {name: np.asarray(x).astype(np.float64) for name, x in answer.items() if x is not None}


def _one_line(error: BaseException) -> str:
    """The kind of an exception and the beginning of what it says."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", WIDTH, placeholder=" ...")


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
    """The norm of the difference, relative to the norm of what is right, to that of as many ones where it is all 0."""
    finite = np.isfinite(exact)
    size = float(np.linalg.norm(exact[finite])) or np.sqrt(max(1, finite.sum()))
    return float(np.linalg.norm(got[finite] - exact[finite])) / size
