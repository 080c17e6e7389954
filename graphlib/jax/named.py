"""ggrad's own kernels as functions of JAX's, under its names of arguments where it has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from .. import ops
from ..call.kinds import KINDS, MLA_INPUTS
from ..core.errors import ShapeError
from ..core.tensor import Tensor
from .functions import function_named


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: jax.Array | None = None,
    softcap: float = 0.0,
    causal: str | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_k: jax.Array | None = None,
) -> jax.Array:
    """Attention as `jax.nn.dot_product_attention` computes it, and with what that lacks.

    Args:
        query, key, value: [batch, queries or keys, heads, d], f32, f16 or bf16; the number of heads of keys divides
            that of queries.
        bias: [batch, heads, N, M], each of the first two may be 1: added to the scores, with a gradient.
        mask: booleans of such a shape: which keys are seen.
        scale: default 1 / sqrt(d).
        is_causal: query i sees the keys up to i.
        local_window_size: (left, right), or one number for both: a query sees so many keys before and behind its own.
        sinks: [heads], f32: one more score for each head, of a key without a value.
        softcap: c > 0 makes scores s into c * tanh(s / c).
        causal: "top-left" as `is_causal`, or "bottom-right": the last query sees the last key.
        cu_seqlens_q, cu_seqlens_k: i32 [n + 1], of one batch: where sequences that are packed begin and end.

    Returns:
        [batch, queries, heads, d of the values], of the query's dtype.

    Raises:
        ShapeError: shapes, dtypes or options do not fit.
        JaxRuntimeError: during a run, cu_seqlens that do not rise from 0 to the number of queries or keys.

    Sources: see `ggrad.flash_attn_ext`.
    """
    if is_causal and causal not in (None, "top-left"):
        raise ShapeError(f"attention(): is_causal is causal='top-left', and causal={causal!r} says otherwise")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ShapeError("attention(): packed sequences need both cu_seqlens_q and cu_seqlens_k")
    added = _added(bias, mask)
    more = {"m": (added,), "s": (sinks,), "c": (cu_seqlens_q, cu_seqlens_k)}
    given = "".join(letter for letter, arrays in more.items() if arrays[0] is not None)
    arrays = [query, key, value, *(x for letter in given for x in more[letter])]
    window = local_window_size if local_window_size is not None else (-1, -1)
    left, right = (window, window) if isinstance(window, int) else window
    options = ("qkv" + given, "top-left" if is_causal else causal, left, right, scale, softcap, 0.0)
    return _named("attention", options)(*arrays)


def _added(bias: jax.Array | None, mask: jax.Array | None) -> jax.Array | None:
    """What bias and mask add to the scores."""
    if mask is None:
        return bias
    if mask.dtype != jnp.bool_:
        raise ShapeError(f"attention(): the mask must be boolean, not {mask.dtype}; bias is added")
    return jnp.where(mask, 0.0 if bias is None else bias, -jnp.inf).astype(jnp.float32)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention in chunks: `ggrad.kda`, whose formulas, shapes, options and errors these are.

    Args:
        q, k: [B, T, H, K].  v: [B, T, HV, V].  g: [B, T, HV, K].  beta: [B, T, HV].
        initial_state: [N, HV, K, V].
        cu_seqlens: i32 [N + 1], of packed sequences.

    Returns:
        o: [B, T, HV, V], of v's dtype; with output_final_state also the states, f32 [N, HV, K, V].

    Raises:
        ShapeError: shapes, dtypes or options do not fit.

    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    more = {"s": initial_state, "c": cu_seqlens}
    given = "".join(letter for letter, x in more.items() if x is not None)
    options = (given, scale, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, chunk_size)
    return _named("kda", options)(q, k, v, g, beta, *(more[letter] for letter in given))


def sparse_flash_mla(q: jax.Array, **arguments: Any) -> jax.Array:
    """Attention to a window, to compressed rows, or to a choice of them: `ggrad.sparse_flash_mla`, whose arguments,
    shapes and errors these are; gradients by q, ori_kv, cmp_kv and sinks.

    Args:
        q: [B, S, heads, d], or as layout_q says.
        arguments: arrays, and options.

    Returns:
        Of q's shape and dtype.

    Raises:
        ShapeError: shapes, dtypes or options do not fit.

    Source: DeepSeek-AI 2025, arXiv:2512.02556.
    """
    names = tuple(name for name in MLA_INPUTS if arguments.get(name) is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in MLA_INPUTS)
    return _named("sparse_flash_mla", (names, options))(q, *(arguments[name] for name in names))


def delta_scan(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: jax.Array,
    a: jax.Array | None = None,
    b: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The linear recurrence of RWKV-7 and its like: `ggrad.ops.delta_scan`, whose shapes and errors these are.

    Args:
        r, w, k, v, a, b: f32 [N, T, H, channels], as there.
        state: f32, of each sequence and head.

    Returns:
        What the tokens read, and the last states.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Peng et al. 2025, arXiv:2503.14456.
    """
    return _named("delta_scan", ())(r, w, k, v, state, *(x for x in (a, b) if x is not None))


def selective_scan(
    s: jax.Array, x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The selective state space scan of Mamba: `ggrad.ops.selective_scan`, whose shapes and errors these are.

    Args:
        s: f32 states.  x, dt, A, B, C: f32, as there.

    Returns:
        What the tokens read, and the last states.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Gu and Dao 2023, arXiv:2312.00752.
    """
    return _named("selective_scan", ())(s, x, dt, A, B, C)


def cross_entropy(logits: jax.Array, targets: jax.Array, *, ignore_index: int = -100) -> jax.Array:
    """The mean of the cross entropies of rows.

    Args:
        logits: [rows, classes].
        targets: i32 [rows]; those that are ignore_index do not count.

    Returns:
        f32 scalar.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        JaxRuntimeError: during a run, a target that is no class.
    """
    return _named("cross_entropy", (ignore_index,))(logits, targets)


def linear_cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, *, ignore_index: int = -100
) -> jax.Array:
    """The loss of a language model's last layer: the cross entropy of `hidden @ head.T`, whose logits never exist at
    once.

    Args:
        hidden: [rows, d].
        head: [classes, d].
        targets: i32 [rows]; those that are ignore_index do not count.

    Returns:
        f32 scalar, the mean of the rows that count.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        JaxRuntimeError: during a run, a target that is no class.
    """
    return _named("linear_cross_entropy", (ignore_index,))(hidden, head, targets)


@cache
def _named(kind: str, options: tuple) -> Callable[..., Any]:
    made = KINDS[kind](*options)
    return function_named(_by_token(made) if kind == "attention" else made, kind)


def _by_token(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """[batch, tokens, heads, d] in and out."""

    def turned(*tensors: Tensor) -> Tensor:
        q, k, v = (ops.permute(x, axes=(0, 2, 1, 3)) if x.ndim == 4 else x for x in tensors[:3])
        return ops.permute(attention(q, k, v, *tensors[3:]), axes=(0, 2, 1, 3))

    return turned
