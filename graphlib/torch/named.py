"""ggrad's own kernels as functions of torch's, under torch's names of arguments where torch has them.

A function is named by its inputs and options, as one string that compilers hand to the operator; from that it can be
made again.
"""

from __future__ import annotations

import ast
from functools import cache

import torch

from ..call.kinds import KINDS, MLA_INPUTS
from ..core.errors import ShapeError
from .functions import Function, called, makes_functions


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    causal: str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention as `torch.nn.functional.scaled_dot_product_attention` computes it, and with what that lacks.

    Time and memory follow what is seen: masks are read, and hidden tiles skipped; scores are never whole.

    Args:
        query, key, value: [batch, heads, queries or keys, d], f32, f16 or bf16, of any strides.
        attn_mask: [N, M], [heads, N, M] or [batch, heads, N, M], each of which may be 1: booleans that say which keys
            are seen, or numbers that are added to the scores, with a gradient.
        dropout_p: the chance that a weight is dropped.
        is_causal: query i sees the keys up to i, as torch counts.
        scale: default 1 / sqrt(d).
        enable_gqa: there may be fewer heads of keys than of queries, and the former's number divides the latter's.
        window: (left, right): a query sees so many keys before and behind its own; -1 for no bound.
        sinks: [heads], f32: one more score for each head, of a key without a value.
        softcap: c > 0 makes scores s into c * tanh(s / c).
        causal: "top-left" as `is_causal`, or "bottom-right": the last query sees the last key.
        cu_seqlens_q, cu_seqlens_k: i32 [n + 1], of one batch: where sequences that are packed begin and end.
        seed: i32 scalar of the dropout; default is drawn from torch's generator.

    Returns:
        [batch, heads, queries, d of the values], of the query's dtype.

    Raises:
        ShapeError: shapes, dtypes, devices or options do not fit.
        IndexRangeError: cu_seqlens that do not rise from 0 to the number of queries or keys.

    Sources: see `ggrad.flash_attn_ext`.
    """
    if not enable_gqa and query.dim() == 4 == key.dim() and query.shape[1] != key.shape[1]:
        raise ShapeError(
            f"attention(): {query.shape[1]} heads of queries read {key.shape[1]} of keys: enable_gqa=True allows it"
        )
    if is_causal and causal not in (None, "top-left"):
        raise ShapeError(f"attention(): is_causal is causal='top-left', and causal={causal!r} says otherwise")
    causal = "top-left" if is_causal else causal
    tensors = [query, key, value]
    given = "qkv"
    if attn_mask is not None:
        tensors.append(_additive(attn_mask))
        given += "m"
    if sinks is not None:
        tensors.append(sinks)
        given += "s"
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ShapeError("attention(): packed sequences need both cu_seqlens_q and cu_seqlens_k")
        tensors += [cu_seqlens_q, cu_seqlens_k]
        given += "c"
    if dropout_p > 0.0:
        tensors.append(torch.randint(2**31 - 1, (), dtype=torch.int32) if seed is None else seed)
        given += "d"
    left, right = (-1, -1) if window is None else window
    # Under torch.compile(dynamic=True) defaults are numbers not known yet; a zero that is written here is known.
    options = (given, causal, left, right, scale, softcap or 0.0, dropout_p or 0.0)
    return _named("attention", tensors, options)[0]


def _additive(mask: torch.Tensor) -> torch.Tensor:
    """A boolean mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.float16).masked_fill_(mask.logical_not(), float("-inf"))


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention in chunks: `ggrad.kda`, whose formulas, shapes, options and errors these are.

    Args:
        q, k: [B, T, H, K].  v: [B, T, HV, V].  g: [B, T, HV, K].  beta: [B, T, HV].
        initial_state: [N, HV, K, V].
        cu_seqlens: i32 [N + 1], of packed sequences.

    Returns:
        o: [B, T, HV, V], of v's dtype; with output_final_state also the states, f32 [N, HV, K, V].

    Raises:
        ShapeError: shapes, dtypes, devices or options do not fit.
        IndexRangeError: cu_seqlens that do not rise from 0 to T.

    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    tensors, given = [q, k, v, g, beta], ""
    for letter, x in (("s", initial_state), ("c", cu_seqlens)):
        if x is not None:
            tensors.append(x)
            given += letter
    options = (given, scale, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, chunk_size)
    made = _named("kda", tensors, options)
    return (made[0], made[1]) if output_final_state else made[0]


def sparse_flash_mla(q: torch.Tensor, **arguments) -> torch.Tensor:
    """Attention to a window, to compressed rows, or to a choice of them: `ggrad.sparse_flash_mla`, whose arguments,
    shapes and errors these are; gradients by q, ori_kv, cmp_kv and sinks.

    Args:
        q: [B, S, heads, d], or as layout_q says.
        arguments: tensors of torch's, and options.

    Returns:
        Of q's shape and dtype.

    Raises:
        ShapeError: shapes, dtypes, devices or options do not fit.
        IndexRangeError: an index is out of range.

    Source: DeepSeek-AI 2025, arXiv:2512.02556.
    """
    names = tuple(name for name in MLA_INPUTS if arguments.get(name) is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in MLA_INPUTS)
    return _named("sparse_flash_mla", [q, *(arguments[name] for name in names)], (names, options))[0]


def delta_scan(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The linear recurrence of RWKV-7 and its like: `ggrad.ops.delta_scan`, whose shapes and errors these are.

    Args:
        r, w, k, v, a, b: [N, T, H, channels], f32, as there.
        state: f32, of each sequence and head.

    Returns:
        What the tokens read, and the last states.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit.

    Source: Peng et al. 2025, arXiv:2503.14456.
    """
    tensors = [r, w, k, v, state, *(x for x in (a, b) if x is not None)]
    y, last = _named("delta_scan", tensors, ())
    return y, last


def selective_scan(
    s: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selective state space scan of Mamba: `ggrad.ops.selective_scan`, whose shapes and errors these are.

    Args:
        s: f32 states.  x, dt, A, B, C: f32, as there.

    Returns:
        What the tokens read, and the last states.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit.

    Source: Gu and Dao 2023, arXiv:2312.00752.
    """
    y, last = _named("selective_scan", [s, x, dt, A, B, C], ())
    return y, last


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """The mean of the cross entropies of rows, as `torch.nn.functional.cross_entropy` computes it of classes.

    Args:
        logits: [rows, classes].
        targets: integers [rows]; those that are ignore_index do not count.

    Returns:
        f32 scalar.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
        IndexRangeError: a target is no class.
    """
    return _named("cross_entropy", [logits, targets], (ignore_index,))[0]


def linear_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """The loss of a language model's last layer: the cross entropy of `hidden @ head.T`, whose logits never exist at
    once.

    Args:
        hidden: [rows, d].
        head: [classes, d].
        targets: integers [rows]; those that are ignore_index do not count.

    Returns:
        f32 scalar, the mean of the rows that count.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
        IndexRangeError: a target is no class.
    """
    return _named("linear_cross_entropy", [hidden, head, targets], (ignore_index,))[0]


def _named(kind: str, tensors: list[torch.Tensor], options: tuple):
    """The results of the function of this kind with these options."""
    if torch.compiler.is_compiling():
        return called(None, f"{kind}{options!r}", tensors)
    function = _with(kind, options)
    return called(function, function.name, tensors)


@cache
def _with(kind: str, options: tuple) -> Function:
    return Function(KINDS[kind](*options), f"{kind}{options!r}")


def _from_name(name: str) -> Function | None:
    kind, _, options = name.partition("(")
    return _with(kind, ast.literal_eval(f"({options}")) if kind in KINDS else None


makes_functions(_from_name)
