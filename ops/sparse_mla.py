"""Sparse latent attention: one row for each token is its key and its value, and all heads share it.

A query sees rows of two kinds, in one softmax: some of `ori_kv`, one row for each token (most often a sliding
window), and some of `cmp_kv`, one row for each `cmp_ratio` tokens.  Of either kind it sees a range, or what a list
says.  N1 heads; D elements a row; S1 queries, S2 and S3 rows of the two kinds, K1 and K2 entries of a list.

              "BSND"                "TND": sequences one after another
    q         [B, S1, N1, D]        [T1, N1, D]
    ori_kv    [B, S2, 1, D]         [T2, 1, D]        "PA_BBND": [blocks, block size, 1, D]
    cmp_kv    [B, S3, 1, D]         [T3, 1, D]
    a list    [B, S1, 1, K]         [T1, 1, K]
    lse       [B, 1, S1, N1]        [1, T1, N1]
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import GradientError, IndexRangeError, ShapeError
from ..core.op import Int, Record, Wanted, ensure, op, results, without_choice
from ..core.tensor import Pack, Spec, Tensor, tensor
from .layout import broadcast_to, permute
from .reduce import sum_rows
from .softmax import soft_max

__all__ = [
    "compress_kv", "sparse_flash_mla", "sparse_flash_mla_grad",
]  # fmt: skip


class Layout(enum.IntEnum):
    """How sequences lie; see the module."""

    BSND = 0
    TND = 1
    PA_BBND = 2


ALL, CAUSAL, BAND = 0, 3, 4  # mask modes: every row, those up to the query's own token, a window round it
FURTHEST = 2**31 - 1  # as far as a window may reach
LARGEST_RATIO = 128


@dataclass(frozen=True)
class Rules(Record):
    """Who sees whom, and how tensors lie; see `sparse_flash_mla`.  In C it is gg_sparse_flash_mla_attrs."""

    softmax_scale: float
    cmp_ratio: int
    ori_mask_mode: int
    cmp_mask_mode: int
    ori_win_left: int
    ori_win_right: int
    layout_q: Layout
    layout_kv: Layout

    @classmethod
    def of(cls, q: Tensor, softmax_scale, cmp_ratio, *others) -> Rules:
        """Of what callers give, with defaults that depend on `q`."""
        scale = max(1, *q.shape[-1:]) ** -0.5 if softmax_scale is None else softmax_scale
        return cls(scale, 1 if cmp_ratio is None else cmp_ratio, *others)


class SparseFlashMlaGrad(NamedTuple):
    """What `sparse_flash_mla_grad` gives: gradients, and how much attention each entry of a list got.

    None is what is not there for want of its input.
    """

    dq: Tensor
    d_ori_kv: Tensor | None
    d_cmp_kv: Tensor | None
    d_sinks: Tensor | None
    ori_softmax_l1norm: Tensor | None
    cmp_softmax_l1norm: Tensor | None


# -- as graphs hold them ------------------------------------------------------------------------------------


@op
def sparse_flash_mla(
    q, ori_kv=None, cmp_kv=None,
    ori_sparse_indices: Int | None = None, cmp_sparse_indices: Int | None = None,
    ori_block_table: Int | None = None, cmp_block_table: Int | None = None,
    cu_seqlens_q: Int | None = None, cu_seqlens_ori_kv: Int | None = None, cu_seqlens_cmp_kv: Int | None = None,
    seqused_q: Int | None = None, seqused_ori_kv: Int | None = None, seqused_cmp_kv: Int | None = None,
    cmp_residual_kv: Int | None = None, ori_topk_length: Int | None = None, cmp_topk_length: Int | None = None,
    sinks=None,
    *, rules: Rules,
):  # fmt: skip
    # softmax_lse is top + log(total), where top is the largest score and total the sum of exp(score - top): of scores
    # of 1e8 lse alone, rounded to f32, would know the count of rows no more.
    call = _Call(**locals())
    call.check()
    row = Spec(call.lse_shape)
    return Pack(attn_out=q.spec, softmax_lse=row, top=row, total=row)


@sparse_flash_mla.grad
def _(t, dout, dlse, dtop, dtotal, *, needs):
    given = dict(zip(t.op.inputs, t.src, strict=True))
    if t.attrs["rules"].layout_kv is Layout.PA_BBND:
        raise GradientError(
            "sparse_flash_mla has no gradient in the layout 'PA_BBND': lay the rows of each sequence out one after "
            "another and use 'BSND' or 'TND'"
        )
    out, _, top, total = t.parts
    if dout is None:  # only lse is used
        dout = broadcast_to(tensor(np.zeros(out.shape[-1])), shape=out.shape)
    rest = {name: s for name, s in given.items() if name != "q" and not name.endswith("block_table")}
    needed = dict(zip(t.op.inputs, needs, strict=True))
    wanted = [*(needed[name] for name in DIFFERENTIABLE), False, False]
    made = sparse_flash_mla_grad.node(
        given["q"], dout, out, top, dlse=dlse, total=total, **rest, **t.attrs, wanted=wanted
    )
    gradients = dict(zip(DIFFERENTIABLE, made, strict=False))
    return tuple(gradients.get(name) for name in t.op.inputs)


@sparse_flash_mla.flops
def _(t):
    call = _Call(**dict(zip(t.op.inputs, t.src, strict=True)), **t.attrs)
    return 4 * call.q.shape[-1] * call.most_pairs()


@sparse_flash_mla.reference
def _(*src, **attrs):
    call = _Call(**dict(zip(sparse_flash_mla.inputs, src, strict=True)), **attrs)
    q = call.tokens(call.q)
    out, lse, tops = np.zeros(q.shape, q.dtype), np.zeros(q.shape[:2], q.dtype), np.zeros(q.shape[:2], q.dtype)
    totals = np.ones(q.shape[:2], q.dtype)
    for t, x, _ in call.visible("sparse_flash_mla"):
        s = call.rules.softmax_scale * (q[t] @ x.T)
        sinks = np.full(len(s), -np.inf) if call.sinks is None else call.sinks
        largest = np.maximum(s.max(-1, initial=-np.inf), sinks)
        base = np.where(largest == -np.inf, 0, largest)
        weights = np.exp(s - base[:, None])
        total = weights.sum(-1) + np.where(sinks == largest, sinks != -np.inf, np.exp(sinks - base))
        out[t] = weights / np.where(total == 0, 1, total)[:, None] @ x
        tops[t], totals[t] = np.where(np.isnan(total), np.nan, largest), total
        lse[t] = tops[t] + np.log(total)
    return out.reshape(call.q.shape), *(x.reshape(call.lse_shape) for x in (lse, tops, totals))


@op
def sparse_flash_mla_grad(
    q, dout, attn_out, softmax_lse, ori_kv=None, cmp_kv=None,
    ori_sparse_indices: Int | None = None, cmp_sparse_indices: Int | None = None,
    cu_seqlens_q: Int | None = None, cu_seqlens_ori_kv: Int | None = None, cu_seqlens_cmp_kv: Int | None = None,
    seqused_q: Int | None = None, seqused_ori_kv: Int | None = None, seqused_cmp_kv: Int | None = None,
    cmp_residual_kv: Int | None = None, ori_topk_length: Int | None = None, cmp_topk_length: Int | None = None,
    sinks=None, dlse=None, total=None,
    *, rules: Rules, wanted: Wanted = (),
):  # fmt: skip
    # dlse is the gradient of the log of the sums, where it is used too.  With total the softmax is
    # exp(score - softmax_lse) / total, and softmax_lse is the forward's top.
    call = _Call(**without_choice(locals()))
    call.check()
    fields = {"dq": q, "d_ori_kv": ori_kv, "d_cmp_kv": cmp_kv, "d_sinks": sinks}
    fields |= {"ori_softmax_l1norm": ori_sparse_indices, "cmp_softmax_l1norm": cmp_sparse_indices}
    return results(wanted, **{name: None if like is None else Spec(like.shape) for name, like in fields.items()})


@sparse_flash_mla_grad.flops
def _(t):
    call = _Call(**dict(zip(t.op.inputs, t.src, strict=True)), **without_choice(t.attrs))
    return 10 * call.q.shape[-1] * call.most_pairs()


@sparse_flash_mla_grad.reference
def _(*src, **attrs):
    call = _Call(**dict(zip(sparse_flash_mla_grad.inputs, src, strict=True)), **attrs)
    q, dout, out = (call.tokens(x) for x in (call.q, call.dout, call.attn_out))
    N1 = q.shape[1]
    lse = _rows(call.softmax_lse)
    total = np.ones_like(lse) if call.total is None else np.where(call.total == 0, 1, call.total).reshape(lse.shape)
    dlse = np.zeros_like(lse) if call.dlse is None else _rows(call.dlse)
    dq, d_sinks = np.zeros(q.shape, q.dtype), np.zeros(N1, q.dtype)
    d_rows = {
        side: np.zeros((call.rows(side), q.shape[2]), q.dtype) for side in SIDES if call.of(side, "kv") is not None
    }
    l1norm = {
        side: np.zeros((len(q), indices.shape[-1]), q.dtype)
        for side in SIDES
        if (indices := call.of(side, "sparse_indices")) is not None
    }
    for t, x, seen in call.visible("sparse_flash_mla_grad"):
        base = np.where(lse[t] == -np.inf, 0, lse[t])[:, None]
        weights = np.exp(call.rules.softmax_scale * (q[t] @ x.T) - base) / total[t][:, None]
        delta = (dout[t] * out[t]).sum(-1) - dlse[t]
        ds = call.rules.softmax_scale * weights * (dout[t] @ x.T - delta[:, None])
        dq[t] = ds @ x
        dx = ds.T @ q[t] + weights.T @ dout[t]
        if call.sinks is not None:
            share = np.where(call.sinks == lse[t], call.sinks != -np.inf, np.exp(call.sinks - base[:, 0])) / total[t]
            d_sinks -= share * delta
        at = 0
        for side, rows, slots in seen:
            here = slice(at, at + len(rows))
            np.add.at(d_rows[side], rows, dx[here])
            if slots is not None:
                l1norm[side][t, slots] = weights[:, here].sum(0) / max(1, N1)
            at += len(rows)
    by_rows = [d_rows[side].reshape(call.of(side, "kv").shape) if side in d_rows else None for side in SIDES]
    norms = [l1norm[side].reshape(call.of(side, "sparse_indices").shape) if side in l1norm else None for side in SIDES]
    return dq.reshape(call.q.shape), *by_rows, d_sinks, *norms


# -- what the arguments mean --------------------------------------------------------------------------------

SIDES = ("ori", "cmp")
DIFFERENTIABLE = ("q", "ori_kv", "cmp_kv", "sinks")  # inputs, in the order of their gradients


class _Sequence(NamedTuple):
    """Where one sequence lies: its first token among those of q, its first rows, how many of each are in use."""

    b: int
    token: int
    L1: int
    start: dict[str, int]
    length: dict[str, int]
    residual: int


@dataclass(frozen=True)
class _Call:
    """The arguments of one of the two ops: tensors while the graph is built, arrays in its reference."""

    q: Any
    ori_kv: Any
    cmp_kv: Any
    ori_sparse_indices: Any
    cmp_sparse_indices: Any
    cu_seqlens_q: Any
    cu_seqlens_ori_kv: Any
    cu_seqlens_cmp_kv: Any
    seqused_q: Any
    seqused_ori_kv: Any
    seqused_cmp_kv: Any
    cmp_residual_kv: Any
    ori_topk_length: Any
    cmp_topk_length: Any
    sinks: Any
    rules: Rules
    ori_block_table: Any = None
    cmp_block_table: Any = None
    dout: Any = None
    attn_out: Any = None
    softmax_lse: Any = None
    dlse: Any = None
    total: Any = None

    def of(self, side: str, what: str):
        """An argument of a side: of("cmp", "kv") is cmp_kv."""
        return getattr(self, f"{side}_{what}")

    @property
    def packed(self) -> bool:
        return self.rules.layout_q is Layout.TND

    @property
    def paged(self) -> bool:
        return self.rules.layout_kv is Layout.PA_BBND

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.packed else self.q.shape[0]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *tokens, N1, _ = self.q.shape
        return (1, *tokens, N1) if self.packed else (tokens[0], 1, tokens[1], N1)

    def most_pairs(self) -> int:
        """How many pairs of query and row count, of all heads, where sequences are as long as there is room and lists
        of rows are full."""
        rules = self.rules
        queries = self.q.shape[0] // max(1, self.sequences) if self.packed else self.q.shape[1]
        each = 0
        for side in SIDES:
            kv, indices = self.of(side, "kv"), self.of(side, "sparse_indices")
            if kv is None:
                continue
            rows = kv.shape[0] // max(1, self.sequences) if self.packed else kv.shape[1]
            rows = self.of(side, "block_table").shape[1] * kv.shape[1] if self.paged else rows
            seen = queries * rows
            if indices is not None:
                seen = queries * indices.shape[-1]
            elif side == "ori" and rules.ori_mask_mode == BAND and min(rules.ori_win_left, rules.ori_win_right) >= 0:
                seen = queries * min(rows, rules.ori_win_left + rules.ori_win_right + 1)
            elif getattr(rules, f"{side}_mask_mode") == CAUSAL:
                seen -= queries * (queries - 1) // 2 // (1 if side == "ori" else rules.cmp_ratio)
            each += max(0, seen)
        return each * self.sequences * self.q.shape[-2]

    # -- checks, while the graph is built -------------------------------------------------------

    def check(self) -> None:
        """Everything fits, or `ShapeError` with the rule."""
        rules = self.rules
        axes = "[T1, N1, D]" if self.packed else "[B, S1, N1, D]"
        ensure(rules.layout_q is not Layout.PA_BBND, "layout_q is 'BSND' or 'TND'; only layout_kv can be 'PA_BBND'")
        ensure(
            self.paged or rules.layout_kv is rules.layout_q,
            f"layout_kv={rules.layout_kv.name!r} must be layout_q={rules.layout_q.name!r}, or 'PA_BBND'",
        )
        ensure(self.q.ndim == 3 + (not self.packed), f"q must have the axes {axes} in the layout {rules.layout_q.name}")
        ensure(self.ori_kv is not None or self.cmp_kv is not None, "there is neither ori_kv nor cmp_kv to attend to")
        ensure(1 <= rules.cmp_ratio <= LARGEST_RATIO, f"cmp_ratio={rules.cmp_ratio} must be from 1 to {LARGEST_RATIO}")
        ensure(rules.ori_mask_mode in (ALL, CAUSAL, BAND), f"ori_mask_mode={rules.ori_mask_mode} must be 0, 3 or 4")
        ensure(rules.cmp_mask_mode in (ALL, CAUSAL), f"cmp_mask_mode={rules.cmp_mask_mode} must be 0 or 3")
        for name in ("ori_win_left", "ori_win_right"):
            reach = getattr(rules, name)
            ensure(-1 <= reach <= FURTHEST, f"{name}={reach} must be -1 (no bound) or from 0 to {FURTHEST}")
        if self.packed:
            ensure(self.cu_seqlens_q is not None, "the layout TND needs cu_seqlens_q")
            ensure(
                self.cu_seqlens_q.ndim == 1 and self.cu_seqlens_q.shape[0] > 0,
                "cu_seqlens_q must have the shape (B + 1,)",
            )
        else:
            ensure(
                self.cu_seqlens_q is None, "cu_seqlens_q is for the layout TND; seqused_q shortens sequences of BSND"
            )
        self._check_shape("seqused_q", self.seqused_q, (self.sequences,))
        self._check_shape("sinks", self.sinks, self.q.shape[-2:-1])
        for name in ("dout", "attn_out"):
            self._check_shape(name, getattr(self, name), self.q.shape)
        for name in ("softmax_lse", "dlse", "total"):
            self._check_shape(name, getattr(self, name), self.lse_shape)
        for side in SIDES:
            self._check_side(side)
        residual = self.cmp_residual_kv
        self._check_shape("cmp_residual_kv", residual, (self.sequences,))
        ensure(
            residual is None or (self.cmp_kv is not None and rules.cmp_mask_mode == CAUSAL and rules.cmp_ratio != 1),
            "cmp_residual_kv says where the mask of cmp_kv is: it needs cmp_kv, cmp_mask_mode 3 and cmp_ratio > 1",
        )

    def _check_side(self, side: str) -> None:
        kv, indices, table = self.of(side, "kv"), self.of(side, "sparse_indices"), self.of(side, "block_table")
        length, cu, used = (
            self.of(side, "topk_length"),
            *(getattr(self, f"{n}_{side}_kv") for n in ("cu_seqlens", "seqused")),
        )
        if kv is None:
            others = {"sparse_indices": indices, "topk_length": length, "block_table": table}
            named = {f"{side}_{n}": t for n, t in others.items()}
            named |= {f"cu_seqlens_{side}_kv": cu, f"seqused_{side}_kv": used}
            for name, t in named.items():
                ensure(t is None, f"{name} belongs to {side}_kv, which is not given")
            return
        D, B = self.q.shape[-1], self.sequences
        packed = self.packed and not self.paged
        axes = "[T, 1, D]" if packed else "[blocks, block size, 1, D]" if self.paged else "[B, S, 1, D]"
        ensure(
            kv.ndim == 3 + (not packed),
            f"{side}_kv must have the axes {axes} in the layout {self.rules.layout_kv.name}",
        )
        ensure(kv.shape[-2] == 1, f"{side}_kv must have one head, which all heads of q share, not {kv.shape[-2]}")
        ensure(kv.shape[-1] == D, f"rows of q have {D} elements, rows of {side}_kv {kv.shape[-1]}")
        ensure(packed or self.paged or kv.shape[0] == B, f"q has {B} sequences, {side}_kv {kv.shape[0]}")
        if packed:
            ensure(cu is not None, f"the layout TND needs cu_seqlens_{side}_kv")
        else:
            ensure(cu is None, f"cu_seqlens_{side}_kv is for the layout TND")
        self._check_shape(f"cu_seqlens_{side}_kv", cu, (B + 1,))
        self._check_shape(f"seqused_{side}_kv", used, (B,))
        if self.paged:
            ensure(table is not None and used is not None, f"PA_BBND needs {side}_block_table and seqused_{side}_kv")
            ensure(table.ndim == 2 and table.shape[0] == B, f"{side}_block_table must have the axes [{B}, blocks]")
        else:
            ensure(table is None, f"{side}_block_table is for layout_kv='PA_BBND'")
        if indices is None:
            ensure(length is None, f"{side}_topk_length is the length of a list, and there is no {side}_sparse_indices")
            return
        rows = self.q.shape[:-2]
        ensure(
            indices.shape[:-1] == (*rows, 1),
            f"{side}_sparse_indices must have the shape {(*rows, 1)} and an axis of entries",
        )
        self._check_shape(f"{side}_topk_length", length, (*rows, 1))
        ensure(
            length is not None or getattr(self.rules, f"{side}_mask_mode") != ALL,
            f"{side}_sparse_indices with {side}_mask_mode 0 needs {side}_topk_length",
        )

    @staticmethod
    def _check_shape(name: str, t, shape: tuple[int, ...]) -> None:
        ensure(t is None or t.shape == shape, f"{name} must have the shape {shape}")

    # -- in NumPy -------------------------------------------------------------------------------

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """[tokens, N1, D]"""
        return x.reshape(prod(x.shape[:-2]), *x.shape[-2:])

    def rows(self, side: str) -> int:
        return prod(self.of(side, "kv").shape[:-2])

    def located(self, name: str) -> list[_Sequence]:
        """Every sequence, once all that says where it is has been found to be true."""
        B = self.sequences
        starts, rooms = {}, {}
        for what, x in (("q", self.q), ("ori_kv", self.ori_kv), ("cmp_kv", self.cmp_kv)):
            cu = getattr(self, f"cu_seqlens_{what}")
            if x is None:
                starts[what] = rooms[what] = [0] * B
            elif cu is not None:
                for b in range(B + 1):
                    _within(name, f"cu_seqlens_{what}", cu[b], cu[b - 1] if b else 0, x.shape[0] if b else 0)
                starts[what], rooms[what] = cu[:-1].tolist(), np.diff(cu).tolist()
            elif what != "q" and self.paged:
                rooms[what] = [getattr(self, f"{what[:3]}_block_table").shape[1] * x.shape[1]] * B
                starts[what] = [0] * B
            else:
                rooms[what], starts[what] = [x.shape[1]] * B, [b * x.shape[1] for b in range(B)]
        lengths = {}
        for what in ("q", "ori_kv", "cmp_kv"):
            used = getattr(self, f"seqused_{what}")
            for b in range(B if used is not None else 0):
                _within(name, f"seqused_{what}", used[b], 0, rooms[what][b])
            lengths[what] = rooms[what] if used is None else used.tolist()
        residual = [0] * B if self.cmp_residual_kv is None else self.cmp_residual_kv.tolist()
        for r in residual:
            _within(name, "cmp_residual_kv", r, 0, self.rules.cmp_ratio - 1)
        for side in SIDES:
            table = self.of(side, "block_table")
            blocks, size = self.of(side, "kv").shape[:2] if table is not None else (0, 0)
            for b in range(B if table is not None else 0):
                for entry in table[b, : -(-lengths[f"{side}_kv"][b] // max(1, size))]:
                    _within(name, f"{side}_block_table", entry, 0, blocks - 1)
        return [
            _Sequence(
                b, starts["q"][b], lengths["q"][b],
                {side: starts[f"{side}_kv"][b] for side in SIDES}, {side: lengths[f"{side}_kv"][b] for side in SIDES},
                residual[b],
            )
            for b in range(B)
        ]  # fmt: skip

    def range_of(self, side: str, s: _Sequence, i: int) -> tuple[int, int]:
        """The rows of a side, first and end, that query i may see."""
        L = s.length[side]
        if side == "cmp":
            end = (L * self.rules.cmp_ratio + s.residual - s.L1 + i + 1) // self.rules.cmp_ratio
            return 0, L if self.rules.cmp_mask_mode == ALL else min(max(end, 0), L)
        p = i + L - s.L1  # the last query is the last token
        left, right = {ALL: (-1, -1), CAUSAL: (-1, 0), BAND: (self.rules.ori_win_left, self.rules.ori_win_right)}[
            self.rules.ori_mask_mode
        ]
        return max(p - left, 0) if left >= 0 else 0, min(max(p + right + 1, 0), L) if right >= 0 else L

    def visible(self, name: str) -> Iterator[tuple[int, np.ndarray, list]]:
        """Of every token in use that sees something: its number, the rows it sees, and for each side there is
        its name, their numbers among all of its rows, and their places in the list, if there is one."""
        flat = {side: _rows(self.of(side, "kv")) for side in SIDES if self.of(side, "kv") is not None}
        for s in self.located(name):
            for i in range(s.L1):
                seen = [(side, *self._seen(side, s, i)) for side in flat]
                if any(len(rows) for _, rows, _ in seen):
                    yield s.token + i, np.concatenate([flat[side][rows] for side, rows, _ in seen]), seen

    def _seen(self, side: str, s: _Sequence, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        lo, hi = self.range_of(side, s, i)
        indices, slots = self.of(side, "sparse_indices"), None
        if indices is None:
            rows = np.arange(lo, max(lo, hi))
        else:
            t = s.token + i
            entries, length = _rows(indices)[t], self.of(side, "topk_length")
            if length is not None:
                entries = entries[: max(0, length.reshape(-1)[t])]
            ends = np.flatnonzero(entries < 0)
            entries = entries[: ends[0]] if len(ends) else entries
            slots = np.flatnonzero((entries >= lo) & (entries < hi))
            rows = entries[slots]
        if self.paged:
            size = max(1, self.of(side, "kv").shape[1])
            return self.of(side, "block_table")[s.b, rows // size] * size + rows % size, slots
        return rows + s.start[side], slots


def _rows(x: np.ndarray) -> np.ndarray:
    """As a matrix."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _within(op_name: str, name: str, value, least, most) -> None:
    if not least <= value <= most:
        raise IndexRangeError(f"{op_name}: {name} holds {value}, and must be from {least} to {most}")


# -- as users call them -------------------------------------------------------------------------------------


@sparse_flash_mla.call
def _(
    q: Tensor | ArrayLike,
    *,
    ori_kv: Tensor | ArrayLike | None = None,
    cmp_kv: Tensor | ArrayLike | None = None,
    ori_sparse_indices: Tensor | ArrayLike | None = None,
    cmp_sparse_indices: Tensor | ArrayLike | None = None,
    ori_block_table: Tensor | ArrayLike | None = None,
    cmp_block_table: Tensor | ArrayLike | None = None,
    cu_seqlens_q: Tensor | ArrayLike | None = None,
    cu_seqlens_ori_kv: Tensor | ArrayLike | None = None,
    cu_seqlens_cmp_kv: Tensor | ArrayLike | None = None,
    seqused_q: Tensor | ArrayLike | None = None,
    seqused_ori_kv: Tensor | ArrayLike | None = None,
    seqused_cmp_kv: Tensor | ArrayLike | None = None,
    cmp_residual_kv: Tensor | ArrayLike | None = None,
    ori_topk_length: Tensor | ArrayLike | None = None,
    cmp_topk_length: Tensor | ArrayLike | None = None,
    sinks: Tensor | ArrayLike | None = None,
    softmax_scale: float | None = None,
    cmp_ratio: int | None = None,
    ori_mask_mode: int = ALL,
    cmp_mask_mode: int = ALL,
    ori_win_left: int = -1,
    ori_win_right: int = -1,
    layout_q: str | Layout = "BSND",
    layout_kv: str | Layout = "BSND",
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a window, to compressed rows, or to a choice of them, whose rows are both keys and values.

    What is given decides: `ori_kv` alone is a sliding window; with `cmp_kv` all compressed rows are seen too; with
    `cmp_sparse_indices` those of a list.  All that a token sees is one softmax, and what both kinds cover counts twice.
    Shapes are said at the top of the module.  Index tensors are i32 and read at each run.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556.

    Args:
        ori_sparse_indices, cmp_sparse_indices: the rows each token sees, counted from its sequence's first.  A list
            ends at its first negative entry; an entry that the masks do not let the token see is passed over; one that
            comes twice counts twice.
        ori_block_table, cmp_block_table: [B, n], for layout_kv="PA_BBND": row j of a sequence lies in its block
            table[j // block size], at j % block size.
        cu_seqlens_q, cu_seqlens_ori_kv, cu_seqlens_cmp_kv: [B + 1], for TND: where each sequence begins; the last is
            where the last one ends.
        seqused_q, seqused_ori_kv, seqused_cmp_kv: [B], how many tokens and rows of each sequence are in use, from its
            first; default all.  What is not in use is not read, and its results and gradients are 0.
        cmp_residual_kv: [B], tokens after the last whole group of cmp_ratio; default 0.
        ori_topk_length, cmp_topk_length: [B, S1, 1] or [T1, 1], entries of each list that count; default all.
        sinks: [N1], a logit for each head that takes its share of the softmax and has no value.  -inf is none; +inf
            takes all.
        softmax_scale: of q . k; default 1 / sqrt(D).  Sinks are not scaled.
        cmp_ratio: 1 to 128 tokens for each row of cmp_kv; default 1.
        ori_mask_mode: which rows of ori_kv the query at position p of its sequence sees: 0 all, 3 those up to p,
            4 those from p - ori_win_left to p + ori_win_right (-1: no bound).  The last query is at the last row.
        cmp_mask_mode: 0 all rows of cmp_kv, 3 those whose tokens are all at or before p.
        layout_q, layout_kv: "BSND" or "TND", the same; layout_kv may be "PA_BBND".
        return_softmax_lse: also give the log of the sum of exp(scores) and exp(sinks).

    Returns:
        attn_out, of q's shape.  A token that sees nothing has 0 there, and 0 as its lse.

    Raises:
        ShapeError: arguments do not fit or contradict each other.
        GradientError: when gradients are built, for pages.
        IndexRangeError: at a run, for lengths or pages outside of their tensors; nothing has been written then.
    """
    given = {name: t for name, t in locals().items() if name in sparse_flash_mla.inputs and t is not None}
    q = given["q"] = q if isinstance(q, Tensor) else tensor(q)
    rules = Rules.of(
        q, softmax_scale, cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right, layout_q, layout_kv
    )
    out, lse, *_ = sparse_flash_mla.node(**given, rules=rules)
    return (out, lse) if return_softmax_lse else out


@sparse_flash_mla_grad.call
def _(
    q: Tensor | ArrayLike,
    dout: Tensor | ArrayLike,
    attn_out: Tensor | ArrayLike,
    softmax_lse: Tensor | ArrayLike,
    *,
    ori_kv: Tensor | ArrayLike | None = None,
    cmp_kv: Tensor | ArrayLike | None = None,
    ori_sparse_indices: Tensor | ArrayLike | None = None,
    cmp_sparse_indices: Tensor | ArrayLike | None = None,
    cu_seqlens_q: Tensor | ArrayLike | None = None,
    cu_seqlens_ori_kv: Tensor | ArrayLike | None = None,
    cu_seqlens_cmp_kv: Tensor | ArrayLike | None = None,
    seqused_q: Tensor | ArrayLike | None = None,
    seqused_ori_kv: Tensor | ArrayLike | None = None,
    seqused_cmp_kv: Tensor | ArrayLike | None = None,
    cmp_residual_kv: Tensor | ArrayLike | None = None,
    ori_topk_length: Tensor | ArrayLike | None = None,
    cmp_topk_length: Tensor | ArrayLike | None = None,
    sinks: Tensor | ArrayLike | None = None,
    softmax_scale: float | None = None,
    cmp_ratio: int | None = None,
    ori_mask_mode: int = ALL,
    cmp_mask_mode: int = ALL,
    ori_win_left: int = -1,
    ori_win_right: int = -1,
    layout_q: str | Layout = "BSND",
    layout_kv: str | Layout = "BSND",
) -> SparseFlashMlaGrad:
    """The gradients of `sparse_flash_mla`, whose arguments these are, for the gradient `dout` of its result.

    With lse the forward's, x_k the rows that token t sees, and c the scale:

        P_k = exp(c q . x_k - lse)    dP_k = dout . x_k    dS_k = P_k (dP_k - dout . attn_out)
        dq = c sum_k dS_k x_k         dx_k = sum over tokens and heads of c dS_k q + P_k dout
        d_sinks = - sum over tokens of exp(sinks - lse) (dout . attn_out)

    Source: DeepSeek-AI 2025, arXiv:2512.02556.

    Args:
        dout, attn_out: of q's shape.
        softmax_lse: the forward's second result.

    Returns:
        dq, d_ori_kv, d_cmp_kv, d_sinks, and for each list the mean over heads of P at its entries (0 at those that do
        not count): ori_softmax_l1norm, cmp_softmax_l1norm.  Those whose input is left out are None.

    Raises:
        ShapeError: arguments do not fit or contradict each other; a mask of cmp_kv needs cmp_residual_kv here.
        IndexRangeError: at a run, for lengths outside of their tensors; nothing has been written then.
    """
    given = {name: t for name, t in locals().items() if name in sparse_flash_mla_grad.inputs and t is not None}
    q = given["q"] = q if isinstance(q, Tensor) else tensor(q)
    rules = Rules.of(
        q, softmax_scale, cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right, layout_q, layout_kv
    )
    if cmp_kv is not None and cmp_mask_mode == CAUSAL and rules.cmp_ratio != 1 and cmp_residual_kv is None:
        raise ShapeError("sparse_flash_mla_grad(): cmp_mask_mode 3 with a cmp_ratio above 1 needs cmp_residual_kv")
    return SparseFlashMlaGrad(*sparse_flash_mla_grad.node(**given, rules=rules))


def compress_kv(kv: Tensor, weights: Tensor | ArrayLike, *, cmp_ratio: int) -> Tensor:
    """Each row the weighted mean of `cmp_ratio` rows of kv, as `cmp_kv` of `sparse_flash_mla` is meant to be.

    Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089.

    Args:
        kv: [B, S, 1, D]; or [T, 1, D], one sequence.
        weights: [cmp_ratio], or [cmp_ratio, D] for each column its own: the softmax over the rows of a group is what
            each counts.  Zeros give the plain mean.
        cmp_ratio: tokens for each row.

    Returns:
        [B, S // cmp_ratio, 1, D] or [T // cmp_ratio, 1, D]; the S % cmp_ratio tokens after the last whole group are in
        none.

    Raises:
        ShapeError: shapes do not fit.
    """
    weights = weights if isinstance(weights, Tensor) else tensor(weights)
    where = f"compress_kv(kv={kv.spec}, weights={weights.spec}): "
    if kv.ndim not in (3, 4) or kv.shape[-2] != 1:
        raise ShapeError(f"{where}kv must have the axes [B, S, 1, D] or [T, 1, D]")
    if cmp_ratio < 1:
        raise ShapeError(f"{where}cmp_ratio={cmp_ratio} must be 1 or more")
    *batch, S, _, D = kv.shape
    if weights.shape not in ((cmp_ratio,), (cmp_ratio, D)):
        raise ShapeError(f"{where}weights must have the shape {(cmp_ratio,)} or {(cmp_ratio, D)}")
    groups = S // cmp_ratio
    whole = kv[..., : groups * cmp_ratio, :, :].reshape(*batch, groups, cmp_ratio, D)
    share = soft_max(weights if weights.ndim == 1 else weights.T)  # [cmp_ratio] or [D, cmp_ratio]
    columns = permute(whole, axes=(*range(whole.ndim - 2), whole.ndim - 1, whole.ndim - 2))
    return sum_rows(columns * share).reshape(*batch, groups, 1, D)
