"""Sparse latent attention as its library for NPUs calls it: with arguments that only say how cores share the work.

What the functions compute is said at `ggrad.sparse_flash_mla`; here the kernel divides its work by itself.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from ..core.errors import ShapeError
from ..core.tensor import Tensor
from ..ops import sparse_mla

__all__ = [
    "sparse_flash_mla", "sparse_flash_mla_grad", "sparse_flash_mla_grad_metadata", "sparse_flash_mla_metadata",
]  # fmt: skip

SIZES = {
    "cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv", "seqused_q", "seqused_ori_kv", "seqused_cmp_kv",
    "cmp_residual_kv", "ori_topk_length", "cmp_topk_length", "batch_size", "max_seqlen_q", "max_seqlen_ori_kv",
    "max_seqlen_cmp_kv", "ori_topk", "cmp_topk", "cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left",
    "ori_win_right", "layout_q", "layout_kv", "has_ori_kv", "has_cmp_kv",
}  # fmt: skip


def sparse_flash_mla(
    q: Tensor | ArrayLike, *, metadata: Any = None, topk_value_mode: int = 1, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`ggrad.sparse_flash_mla`.

    Args:
        q: [B, S1, N1, D] or [T1, N1, D].
        options: as of `ggrad.sparse_flash_mla`.
        metadata: what `sparse_flash_mla_metadata` gave; not needed.
        topk_value_mode: only 1.

    Returns:
        As `ggrad.sparse_flash_mla`.

    Raises:
        ShapeError: another topk_value_mode; and as `ggrad.sparse_flash_mla`.
    """
    if topk_value_mode != 1:
        raise ShapeError(f"sparse_flash_mla(): topk_value_mode={topk_value_mode} must be 1")
    return sparse_mla.sparse_flash_mla(q, **options)


def sparse_flash_mla_grad(
    q: Tensor | ArrayLike,
    dout: Tensor | ArrayLike,
    attn_out: Tensor | ArrayLike,
    softmax_lse: Tensor | ArrayLike,
    *,
    metadata: Any = None,
    **options: Any,
) -> sparse_mla.SparseFlashMlaGrad:
    """`ggrad.sparse_flash_mla_grad`, of which all but `metadata`, which is not needed, are arguments.

    Args:
        q, dout, attn_out: [B, S1, N1, D] or [T1, N1, D].
        softmax_lse: [B, 1, S1, N1] or [1, T1, N1].

    Raises:
        ShapeError: as `ggrad.sparse_flash_mla_grad`.
    """
    return sparse_mla.sparse_flash_mla_grad(q, dout, attn_out, softmax_lse, **options)


def sparse_flash_mla_metadata(num_heads_q: int, num_heads_kv: int, head_dim: int, **sizes: Any) -> None:
    """How cores share the work of `sparse_flash_mla`: None, since here the kernel divides it.

    Raises:
        TypeError: an argument that the library does not have.
    """
    _known_sizes("sparse_flash_mla_metadata", sizes)


def sparse_flash_mla_grad_metadata(num_heads_q: int, num_heads_kv: int, head_dim: int, **sizes: Any) -> None:
    """How cores share the work of `sparse_flash_mla_grad`: None, since here the kernel divides it.

    Raises:
        TypeError: an argument that the library does not have.
    """
    _known_sizes("sparse_flash_mla_grad_metadata", sizes)


def _known_sizes(name: str, sizes: dict[str, Any]) -> None:
    if unknown := set(sizes) - SIZES:
        raise TypeError(f"{name}() has no argument {min(unknown)!r}")
