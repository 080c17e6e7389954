"""ggrad's kernels in programs of torch's: functions of tensors with gradients, and optimizers.

    import ggrad.torch as gt

    out = gt.attention(q, k, v, is_causal=True, window=(256, 0))
    loss = gt.linear_cross_entropy(hidden, head, targets)

All take and give tensors on the CPU, f32, f16 or bf16, compute in f32, and work under autograd, torch.compile, autocast
and checkpointing, from any thread.  Results and gradients have the dtypes of what they belong to.
"""

from ..core.extras import need

need("torch", "ggrad.torch", "torch")

from .convert import Converted, from_torch  # noqa: E402
from .functions import Function, function  # noqa: E402
from .models import replace_attention  # noqa: E402
from .named import (  # noqa: E402
    attention,
    cross_entropy,
    delta_scan,
    kda,
    linear_cross_entropy,
    selective_scan,
    sparse_flash_mla,
)
from .optim import AdamW  # noqa: E402

__all__ = [
    "AdamW",
    "Converted",
    "Function",
    "attention",
    "cross_entropy",
    "delta_scan",
    "from_torch",
    "function",
    "kda",
    "linear_cross_entropy",
    "replace_attention",
    "selective_scan",
    "sparse_flash_mla",
]
