"""Kimi Delta Attention as flash-linear-attention calls it: the arguments of its `chunk_kda` and others, by their names.

What they do is said at `ggrad.kda`; arguments that only speak of GPUs are taken, and change nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

from numpy.typing import ArrayLike

from ..core.errors import ShapeError
from ..core.tensor import Tensor
from ..ops.kda import kda, kda_gate, kda_recurrent

__all__ = ["chunk_kda", "fused_kda_gate", "fused_recurrent_kda"]


def chunk_kda(
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    g: Tensor | ArrayLike,
    beta: Tensor | ArrayLike,
    scale: float | None = None,
    initial_state: Tensor | ArrayLike | None = None,
    output_final_state: bool = False,
    *,
    transpose_state_layout: bool | None = None,
    cu_seqlens_cpu: ArrayLike | None = None,
    cp_context: object = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """`ggrad.kda`, always as a tuple.

    Args:
        q, k, v, g, beta, scale, initial_state, output_final_state, options: as of `ggrad.kda`.
        transpose_state_layout: the old name of state_v_first.
        cu_seqlens_cpu: not needed.
        cp_context: must be None; `ggrad.distributed.kda` is attention over ranks.

    Returns:
        (o, final_state or None), and with return_intermediate_states a third, the states; shapes as of `ggrad.kda`.

    Raises:
        ShapeError: as `ggrad.kda`; a cp_context; state_v_first by both of its names.
    """
    if cp_context is not None:
        raise ShapeError("chunk_kda(): cp_context is not understood; ggrad.distributed.kda is attention over ranks")
    options |= _renamed("chunk_kda", transpose_state_layout, options)
    made = kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, **options
    )
    return made if isinstance(made, tuple) else (made, None)


def fused_recurrent_kda(
    q: Tensor | ArrayLike,
    k: Tensor | ArrayLike,
    v: Tensor | ArrayLike,
    g: Tensor | ArrayLike,
    beta: Tensor | ArrayLike,
    A_log: Tensor | ArrayLike | None = None,
    dt_bias: Tensor | ArrayLike | None = None,
    scale: float | None = None,
    initial_state: Tensor | ArrayLike | None = None,
    output_final_state: bool = False,
    *,
    transpose_state_layout: bool | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """`ggrad.kda_recurrent`, always as a tuple.

    Args:
        transpose_state_layout: the old name of state_v_first.  The others are those of `ggrad.kda_recurrent`.

    Returns:
        (o, final_state or None), shapes as of `ggrad.kda_recurrent`.

    Raises:
        ShapeError: as `ggrad.kda_recurrent`; state_v_first by both of its names.
    """
    options |= _renamed("fused_recurrent_kda", transpose_state_layout, options)
    made = kda_recurrent(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, **options,
    )  # fmt: skip
    return made if isinstance(made, tuple) else (made, None)


def fused_kda_gate(
    g: Tensor | ArrayLike,
    A_log: Tensor | ArrayLike | None = None,
    dt_bias: Tensor | ArrayLike | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """`ggrad.kda_gate`: g [..., HV, K], f32 of g's shape.

    Raises:
        ShapeError: as `ggrad.kda_gate`.
    """
    return kda_gate(g, A_log, dt_bias, lower_bound=lower_bound)


def _renamed(function: str, transpose_state_layout: bool | None, options: dict[str, Any]) -> dict[str, bool]:
    if transpose_state_layout is None:
        return {}
    if options.get("state_v_first"):
        raise ShapeError(f"{function}(): state_v_first and transpose_state_layout, its old name, were both given")
    warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3)
    return {"state_v_first": transpose_state_layout}
