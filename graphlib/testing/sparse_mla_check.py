"""Holds a kernel of sparse latent attention, of any framework, against `sparse_mla_reference`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .comparison import Arguments, Comparison, Question, Refusals, Results, Rounding, options_of
from .sparse_mla_reference import SparseMlaResult, sparse_mla_reference

__all__ = ["SparseMlaCase", "compare_sparse_mla", "sparse_mla_cases"]

INPUTS = ("q", "ori_kv", "cmp_kv", "d")


@dataclass(frozen=True, kw_only=True)
class SparseMlaCase:
    """Shapes and options of one comparison; q, rows and d are drawn when it runs."""

    name: str
    q: tuple[int, ...]  # [B, S1, N1, D], packed [T1, N1, D]
    ori: int = 0  # rows of a sequence, packed of all; 0: there is no ori_kv
    cmp: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments, as sparse_mla_reference takes them
    backward: bool = True  # else d is None
    magnitude: float = 1.0  # standard deviation of q

    @property
    def results(self) -> Sequence[str]:
        """Names of what a kernel may give."""
        return SparseMlaResult._fields

    @property
    def features(self) -> set[str]:
        """What an implementation must know for it: names of options, and of the kinds of rows."""
        return {*self.options, *(name for name in ("ori", "cmp") if getattr(self, name))}

    def arguments(self, seed: int, dtype: np.dtype) -> dict[str, Any]:
        """q, the rows and d of normal random numbers, and the options."""
        rng = np.random.default_rng(seed)
        batch, D = self.q[:-3], self.q[-1]

        def normal(shape: tuple[int, ...], size: float = 1.0) -> np.ndarray:
            return (size * rng.standard_normal(shape)).astype(dtype)

        return {
            "q": normal(self.q, self.magnitude),
            "ori_kv": normal((*batch, self.ori, 1, D)) if self.ori else None,
            "cmp_kv": normal((*batch, self.cmp, 1, D)) if self.cmp else None,
            "d": normal(self.q) if self.backward else None,
            **self.options,
        }

    def answer(self, arguments: Arguments, *, dtype: DTypeLike, rounded: Rounding) -> Results:
        """Query by query."""
        return sparse_mla_reference(**arguments, dtype=dtype, rounded=rounded).present()


def compare_sparse_mla(
    fn: Callable[..., Any],
    cases: Iterable[SparseMlaCase] | None = None,
    *,
    without: str | Iterable[str] = (),
    refuses: Refusals = (),
    dtype: str | DTypeLike = np.float32,
    factor: float = 3.0,
    floor: float = 1e-6,
    seed: int = 0,
) -> Comparison:
    """Compare a kernel of sparse latent attention with the answer in double precision, on options that trap.

        result = gg.testing.compare_sparse_mla(my_sparse_attention, without=["cu_seqlens_q", "sinks"], dtype="bf16")
        assert result.passed, result

    The rule is that of `compare_attention`.

    Args:
        fn: `fn(q, ori_kv, cmp_kv, d, **options)`, of NumPy arrays shaped as in `sparse_mla_reference`; rows of a kind
            that a case has not are None, and so is `d`, the gradient of attn_out, where only the forward is wanted.
            It gets only those options that a case sets.  It returns attn_out; or a tuple of attn_out, softmax_lse, dq,
            d_ori_kv, d_cmp_kv, d_sinks, of which it may leave off the last and set others to None; or a dict of these.
        cases: default `sparse_mla_cases()`.
        without: what `fn` does not know: names of options, or the kinds of rows "ori" and "cmp".
        refuses: exceptions, beside NotImplementedError, by which `fn` says that it has no kernel for a case.
        dtype: of q, rows and d, as in `compare_attention`.
        factor, floor: of the rule.
        seed: of the arrays.

    Returns:
        As `compare_attention`.

    Raises:
        ValueError: `without` names no option, there is no case to compare, or the dtype is none.
    """
    return QUESTION.ask(
        fn, sparse_mla_cases() if cases is None else cases, without=without,
        refuses=refuses, dtype=dtype, factor=factor, floor=floor, seed=seed,
    )  # fmt: skip


QUESTION = Question(
    "compare_sparse_mla",
    INPUTS,
    options_of(sparse_mla_reference) | {"ori", "cmp"},
    frozenset({"softmax_lse", "d_sinks"}),
)


def sparse_mla_cases(seed: int = 0) -> list[SparseMlaCase]:
    """What `compare_sparse_mla` tries: windows, compressed rows, lists with holes, queries that see nothing."""
    rng = np.random.default_rng(seed)

    def picks(B: int, S1: int, rows: int, K: int, holes: float = 0.2) -> np.ndarray:
        """Lists of different rows that end early in some places; that of the last query is empty."""
        order = np.argsort(rng.random((B, S1, 1, max(rows, K))), -1)[..., :K].astype(np.int32)
        order[rng.random(order.shape) < holes] = -1
        order[:, -1] = -1
        return order

    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    def case(name: str, *q: int, ori=0, cmp=0, backward=True, magnitude=1.0, **options) -> SparseMlaCase:
        return SparseMlaCase(name=name, q=q, ori=ori, cmp=cmp, backward=backward, magnitude=magnitude, options=options)

    def sinks(n: int) -> np.ndarray:
        return rng.standard_normal(n).astype(np.float32)

    def window(left: int, right: int = 0) -> dict[str, int]:
        return {"ori_mask_mode": 4, "ori_win_left": left, "ori_win_right": right}

    causal = {"cmp_mask_mode": 3, "cmp_ratio": 4}
    full = {"ori_topk_length": np.full((1, 40, 1), 12, np.int32)}
    twice = np.tile(ints(5, 2, 5, 7), (1, 9, 1, 1))
    packed = {"layout_q": "TND", "layout_kv": "TND", "cu_seqlens_q": ints(0, 9, 9, 30)}
    rows = {"cu_seqlens_ori_kv": ints(0, 9, 14, 40)}
    return [
        case("one query, one row", 1, 1, 1, 8, ori=1),
        case("every row", 1, 9, 4, 16, ori=21),
        case("causal", 2, 33, 4, 32, ori=33, ori_mask_mode=3),
        case("causal, more rows", 1, 20, 4, 32, ori=50, ori_mask_mode=3),
        case("causal, more queries: the first see nothing", 1, 30, 2, 16, ori=11, ori_mask_mode=3),
        case("a window", 1, 50, 4, 32, ori=50, **window(7)),
        case("a window to both sides", 1, 50, 4, 32, ori=50, **window(3, 2)),
        case("a window without left bound", 1, 20, 2, 16, ori=33, **window(-1, 2)),
        case("many heads", 1, 17, 64, 64, ori=40, ori_mask_mode=3),
        case("d = 576", 1, 5, 16, 576, ori=40, ori_mask_mode=3),
        case("scale", 1, 17, 2, 16, ori=17, ori_mask_mode=3, softmax_scale=0.7),
        case("sinks", 1, 33, 4, 16, ori=33, **window(5), sinks=sinks(4)),
        case("sinks: large, small, none", 1, 9, 3, 8, ori=9, ori_mask_mode=3,
             sinks=np.array([30, -30, -np.inf], np.float32)),
        case("a list", 1, 40, 4, 32, ori=64, ori_sparse_indices=picks(1, 40, 64, 12), **full),
        case("a list, causal", 2, 40, 4, 32, ori=40, ori_sparse_indices=picks(2, 40, 40, 12), ori_mask_mode=3),
        case("a list with rows twice", 1, 9, 2, 16, ori=9, ori_sparse_indices=twice, ori_mask_mode=3),
        case("a list with lengths", 1, 9, 2, 16, ori=20, ori_sparse_indices=picks(1, 9, 20, 8, 0),
             ori_topk_length=ints(0, 1, 2, 8, 8, 3, 4, 5, 6).reshape(1, 9, 1)),
        case("compressed rows, causal", 1, 34, 4, 16, cmp=8, **causal, cmp_residual_kv=ints(2)),
        case("compressed rows and a window", 1, 34, 4, 16, ori=34, cmp=8, **window(7), **causal,
             cmp_residual_kv=ints(2), sinks=sinks(4)),
        case("a list of compressed rows and a window", 2, 34, 4, 16, ori=34, cmp=8, **window(7), **causal,
             cmp_residual_kv=ints(2, 2), cmp_sparse_indices=picks(2, 34, 8, 5), sinks=sinks(4)),
        case("ratio 1", 1, 12, 2, 8, ori=12, cmp=12, **window(3), cmp_mask_mode=3, cmp_ratio=1),
        case("packed", 30, 4, 16, ori=40, ori_mask_mode=3, **packed, **rows),
        case("packed, compressed rows, sinks", 30, 4, 16, ori=40, cmp=8, **window(3), **packed, **rows, **causal,
             cu_seqlens_cmp_kv=ints(0, 2, 3, 8), cmp_residual_kv=ints(1, 1, 3), sinks=sinks(4)),
        case("not all in use", 2, 9, 2, 16, ori=12, ori_mask_mode=3, seqused_q=ints(7, 3), seqused_ori_kv=ints(12, 5)),
        case("scores of 50", 1, 33, 2, 16, ori=33, ori_mask_mode=3, magnitude=12.0),
        case("forward only", 1, 33, 4, 16, ori=33, ori_mask_mode=3, backward=False),
    ]  # fmt: skip
