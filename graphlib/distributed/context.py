"""Sequences that are cut over ranks: each has some of the tokens, and attention sees those of all.

A sequence of N tokens lies on R ranks in one of two layouts:

    "rows"     rank r has the tokens r N / R up to (r + 1) N / R
    "zigzag"   of 2 R chunks rank r has number r and, behind it, number 2 R - 1 - r: so that under causality all
               ranks see as many keys

`positions` says which tokens those are.  All gradients are those of the whole: a rank's dk and dv have what the
queries of all ranks bring.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtype import I32
from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor
from ..ops import concat, flash_attn_ext, kda_state_map, matmul, permute, soft_max
from ..ops import kda as kda_of_one
from ..ops.collective import after, all_gather, shift
from ..ops.custom import custom
from .comm import Comm

LAYOUTS = ("rows", "zigzag")


def positions(tokens: int, comm: Comm, layout: str = "rows") -> np.ndarray:
    """Which of so many tokens this rank has, in their order: i64 [tokens / ranks].

    Raises:
        ShapeError: they are no multiple of the ranks, or in zigzag of twice as many.
    """
    chunks = _chunks(comm, layout)
    n, over = divmod(tokens, comm.size * len(chunks))
    if over:
        raise ShapeError(f"{tokens} tokens cannot be cut into {comm.size * len(chunks)} equal chunks ({layout})")
    return np.concatenate([np.arange(c * n, (c + 1) * n) for c in chunks])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: Comm,
    *,
    layout: str = "rows",
    ring: bool = False,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    prefix: int = 0,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    logit_softcap: float = 0.0,
) -> Tensor:
    """What `flash_attn_ext` gives for this rank's queries and the keys of all ranks.

    Gathered, each rank holds all keys and values for a while: 2 HK (DK + DV) N numbers less than a layer's
    activations from some number of heads on.  In a ring they go round, and what the queries make of each rank's keys
    is merged by its lse: a rank never holds more than two ranks' keys.

    Args:
        q, k, v: this rank's tokens, as of `flash_attn_ext`: [B, H, n, DK], [B, HK, n, DK] and [B, HK, n, DV].
        comm: the ranks that share the sequence, each with as many tokens.
        layout: "rows" or "zigzag", see this module.
        ring: send keys and values round instead of gathering them.  Without windows and packed sequences.
        causal: a token sees itself and those before.
        window, prefix: in tokens of the whole sequence.
        cu_seqlens: i32, of the whole sequence: several are packed into it; B = 1, the same on all ranks, and it may
            change from run to run.  Causal, or without a window.
        sinks, scale, logit_softcap: as of `flash_attn_ext`.  For the whole gradient of sinks that all ranks have
            alike, give `replicated(sinks, comm)`.

    Returns:
        [B, n, H, DV].

    Raises:
        ShapeError: shapes or arguments do not fit.
    """
    chunks = _chunks(comm, layout)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ShapeError(f"attention(): q {q.spec}, k {k.spec} and v {v.spec} must have four axes and as many tokens")
    if q.shape[2] % len(chunks):
        raise ShapeError(f"attention(): {q.shape[2]} tokens on a rank cannot be halved, as zigzag wants")
    if cu_seqlens is not None and window is not None and not causal:
        raise ShapeError("attention(): packed sequences with a window are causal")
    options = {"scale": scale, "logit_softcap": logit_softcap, "sinks": sinks}
    if ring:
        if window is not None or prefix or cu_seqlens is not None:
            raise ShapeError("attention(ring=True) knows no window, prefix or packed sequences: gather the keys")
        return _ring(q, k, v, comm, layout, causal, options)
    size = q.shape[2] // len(chunks)
    every_k, every_v = (_in_order(all_gather(x, axis=2, comm=comm), comm, layout) for x in (k, v))
    outs = []
    for i, chunk in enumerate(chunks):
        rows = _cut(q, 2, i * size, (i + 1) * size)
        outs.append(
            _of_rows(rows, every_k, every_v, chunk * size, causal, window or (-1, -1), prefix, cu_seqlens, options)
        )
    return outs[0] if len(outs) == 1 else concat(*outs, axis=1)


def _of_rows(q, k, v, first, causal, window, prefix, cu_seqlens, options: dict[str, Any]) -> Tensor:
    """Queries that begin at some place among the keys of the whole sequence."""
    n, tokens = q.shape[2], k.shape[2]
    left, right = window
    if causal:
        right = 0
    begin = max(0, first - left) if left >= 0 and not prefix and cu_seqlens is None else 0
    end = min(tokens, first + n + right) if right >= 0 else tokens
    k, v = (_cut(x, 2, begin, end) for x in (k, v))
    # A query's place among the keys counts from the last query, which sees the last key: so queries are added at the
    # end whose results nobody uses.
    windowed = window != (-1, -1)
    added = end - first - n if windowed else 0
    if added:
        q = concat(q, tensor(np.zeros((*q.shape[:2], added, q.shape[3]))), axis=2)
    here: dict[str, Any] = {}
    if cu_seqlens is not None:
        here = {
            "cu_seqlens_q": _clipped(cu_seqlens, first, first + n),
            "cu_seqlens_k": _clipped(cu_seqlens, 0, end),
        }
    out: Tensor = flash_attn_ext(  # type: ignore[assignment]
        q, k, v, causal=causal or None, window=(left, -1 if causal else right) if windowed else None, prefix=prefix,
        **here, **options,
    )  # fmt: skip
    return _cut(out, 1, 0, n) if added else out


def _ring(q, k, v, comm: Comm, layout: str, causal: bool, options: dict[str, Any]) -> Tensor:
    """Step s has the keys of rank - s.  All ranks send as often, whatever they see of what comes."""
    mine, size = _chunks(comm, layout), q.shape[2] // len(_chunks(comm, layout))
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in mine]
    sinks = options.pop("sinks")
    unseen = []
    for step in range(comm.size):
        if step:
            k, v = shift(k, by=1, comm=comm), shift(v, by=1, comm=comm)
        theirs = _chunks(comm, layout, (comm.rank - step) % comm.size)
        seen = False
        for i, chunk in enumerate(mine):
            rows = _cut(q, 2, i * size, (i + 1) * size)
            for j, other in enumerate(theirs):
                if causal and other > chunk:
                    continue
                seen = True
                keys, values = (_cut(x, 2, j * size, (j + 1) * size) for x in (k, v))
                itself = other == chunk
                made = flash_attn_ext(
                    rows, keys, values, causal=True if causal and itself else None, return_lse=True,
                    sinks=sinks if itself else None, **options,
                )  # fmt: skip
                found[i].append(made)  # type: ignore[arg-type]
        if not seen:
            unseen += [k, v]
    out = [_merged(parts) for parts in found]
    whole = out[0] if len(out) == 1 else concat(*out, axis=1)
    return after(whole, *unseen) if unseen else whole


def _merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention to several sets of keys from that to each: a mean with the weights softmax(lse)."""
    if len(parts) == 1:
        return parts[0][0]
    B, H, n = parts[0][1].shape
    weights = permute(soft_max(concat(*(lse.reshape(B, H, n, 1) for _, lse in parts), axis=3)), axes=(0, 2, 1, 3))
    total: Tensor | None = None
    for i, (out, _) in enumerate(parts):
        term = out * weights[:, :, :, i : i + 1]
        total = term if total is None else total + term
    return total  # type: ignore[return-value]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    comm: Comm,
    *,
    cu_seqlens: np.ndarray | None = None,
    **options: Any,
) -> Tensor:
    """What `kda` gives for this rank's tokens, its states carried over from the ranks before.

    Every rank computes what its last sequence adds to a state and the map of a state that comes to it, all are
    gathered, and each composes those before it: R K (V + K) numbers a head are sent, whatever the length.

    Args:
        q, k, v, g, beta: this rank's tokens in "rows" layout, as of `kda`: [1, n, H, K] and so on; B sequences if
            none are packed.
        comm: the ranks that share the sequence.
        cu_seqlens: integers, of the whole sequence: several are packed into it.  It belongs to the graph.
        options: as of `kda`, without states.

    Returns:
        [B, n, HV, V].

    Raises:
        ShapeError: shapes or arguments do not fit.
    """
    n = v.shape[1]
    whole = np.array([0, n * comm.size]) if cu_seqlens is None else np.asarray(cu_seqlens)
    if whole[0] != 0 or whole[-1] != n * comm.size or np.any(np.diff(whole) < 0):
        raise ShapeError(f"kda(): cu_seqlens must rise from 0 to {n * comm.size}, all tokens, and are {whole.tolist()}")
    here = np.unique(np.clip(whole - comm.rank * n, 0, n))  # without empty sequences
    packed = cu_seqlens is not None
    begin = int(whole[whole <= comm.rank * n].max())  # of the sequence that this rank's first token is of
    before = comm.rank - begin // n  # ranks that have some of it

    last = int(here[-2])
    mine = kda_state_map(*(_cut(x, 1, last, n) for x in (k, v, g, beta)), **options)
    every = all_gather(mine.reshape(1, *mine.shape) if mine.ndim == 3 else mine, axis=0, comm=comm)
    B, V = mine.shape[0], v.shape[3]
    state: Tensor | None = None
    for r in range(comm.rank - before, comm.rank):
        theirs = _cut(every, 0, r * B, (r + 1) * B)
        added, maps = theirs[:, :, :, :V], theirs[:, :, :, V:]
        state = added if state is None else matmul(maps, state) + added
    shape = (B, v.shape[2], k.shape[3], V)
    if state is None:
        state = after(tensor(np.zeros(shape)), every)
    if packed and len(here) > 2:
        state = concat(state, tensor(np.zeros((len(here) - 2, *shape[1:]))), axis=0)
    inner: dict[str, Any] = {"cu_seqlens": tensor(here.astype(np.int32))} if packed else {}
    out = kda_of_one(q, k, v, g, beta, initial_state=state, **inner, **options)
    return out[0] if isinstance(out, tuple) else out


# -- helpers ----------------------------------------------------------------------------------------------------


def _chunks(comm: Comm, layout: str, rank: int | None = None) -> list[int]:
    """The numbers of a rank's chunks, this one's by default."""
    if layout not in LAYOUTS:
        raise ShapeError(f"layout must be 'rows' or 'zigzag', not {layout!r}")
    r = comm.rank if rank is None else rank
    return [r] if layout == "rows" else [r, 2 * comm.size - 1 - r]


def _in_order(gathered: Tensor, comm: Comm, layout: str) -> Tensor:
    """Keys or values of all ranks, which lie one rank after another, in the order of their tokens."""
    if layout == "rows" or comm.size == 1:
        return gathered
    place = {c: i for i, c in enumerate(c for r in range(comm.size) for c in _chunks(comm, layout, r))}
    size = gathered.shape[2] // len(place)
    return concat(*(_cut(gathered, 2, place[c] * size, (place[c] + 1) * size) for c in range(len(place))), axis=2)


def _cut(x: Tensor, axis: int, begin: int, end: int) -> Tensor:
    if (begin, end) == (0, x.shape[axis]):
        return x
    return x[(slice(None),) * axis + (slice(begin, end),)]


def _clipped(cu_seqlens: Tensor, begin: int, end: int) -> Tensor:
    """Where the sequences lie among the tokens from begin up to end, counted from there."""
    return custom(cu_seqlens, function=lambda cu: np.clip(cu, begin, end) - begin, shape=cu_seqlens.shape, dtype=I32)
