"""ggrad's kernels in programs of JAX's: functions of arrays with gradients, under jit, grad and vmap.

    import ggrad.jax as gj

    out = gj.attention(q, k, v, is_causal=True, local_window_size=(256, 0))

XLA calls the kernels itself, without Python.  All take and give arrays on the CPU, f32, f16 or bf16, and compute in
f32.  Results and gradients have the dtypes of what they belong to.
"""

from ..core.extras import need

need("jax", "ggrad.jax", "jax")

from .functions import function  # noqa: E402
from .named import (  # noqa: E402
    attention,
    cross_entropy,
    delta_scan,
    kda,
    linear_cross_entropy,
    selective_scan,
    sparse_flash_mla,
)

__all__ = [
    "attention",
    "cross_entropy",
    "delta_scan",
    "function",
    "kda",
    "linear_cross_entropy",
    "selective_scan",
    "sparse_flash_mla",
]
