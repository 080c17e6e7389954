"""ggrad's own kernels as functions of tensors alone: options, and which inputs are left out, are fixed.

Results have the dtypes of what they belong to.  Bridges name a function by its kind and options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import ops
from ..core.tensor import Tensor

MLA_INPUTS = (
    "ori_kv", "cmp_kv", "ori_sparse_indices", "cmp_sparse_indices", "cu_seqlens_q", "cu_seqlens_ori_kv",
    "cu_seqlens_cmp_kv", "seqused_q", "seqused_ori_kv", "seqused_cmp_kv", "cmp_residual_kv", "ori_topk_length",
    "cmp_topk_length", "sinks",
)  # fmt: skip


def _attention(given: str, causal, left, right, scale, softcap, dropout_p) -> Callable:
    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        more = iter(rest)
        mask = next(more) if "m" in given else None
        out = ops.flash_attn_ext(
            q, k, v, mask,
            sinks=next(more) if "s" in given else None,
            cu_seqlens_q=next(more) if "c" in given else None,
            cu_seqlens_k=next(more) if "c" in given else None,
            seed=next(more) if "d" in given else None,
            scale=scale, causal=causal, window=(left, right), logit_softcap=softcap, dropout_p=dropout_p,
        )  # fmt: skip
        return _in(q, ops.permute(out, axes=(0, 2, 1, 3)))

    return attention


def _kda(given: str, scale, output_final_state, l2norm, sigmoid, chunk_size) -> Callable:
    def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        more = iter(rest)
        made = ops.kda(
            q, k, v, g, beta,
            initial_state=next(more) if "s" in given else None,
            cu_seqlens=next(more) if "c" in given else None,
            scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=l2norm,
            use_beta_sigmoid_in_kernel=sigmoid, chunk_size=chunk_size,
        )  # fmt: skip
        o, *states = made if isinstance(made, tuple) else (made,)
        return _in(v, o), *states

    return kda


def _sparse_flash_mla(names, options) -> Callable:
    def sparse_flash_mla(q: Tensor, *rest: Tensor) -> Tensor:
        return _in(q, ops.sparse_flash_mla(q, **dict(zip(names, rest, strict=True)), **dict(options)))

    return sparse_flash_mla


def _delta_scan() -> Callable:
    return lambda *tensors: tuple(ops.delta_scan(*tensors))


def _selective_scan() -> Callable:
    return lambda *tensors: tuple(ops.selective_scan(*tensors))


def _cross_entropy(ignore_index) -> Callable:
    return lambda logits, targets: ops.cross_entropy_loss(logits, targets, ignore_index=ignore_index)


def _linear_cross_entropy(ignore_index) -> Callable:
    return lambda hidden, head, targets: ops.linear_cross_entropy(hidden, head, targets, ignore_index=ignore_index)


KINDS: dict[str, Callable[..., Callable]] = {
    "attention": _attention,
    "kda": _kda,
    "sparse_flash_mla": _sparse_flash_mla,
    "delta_scan": _delta_scan,
    "selective_scan": _selective_scan,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}


def _in(x: Tensor, made: Any) -> Tensor:
    """A result in the dtype of an input."""
    return made if x.dtype is made.dtype else ops.cast(made, dtype=x.dtype)
