"""The ops, by family.  Importing this package fills the registry.

A family's module lists what it offers in its `__all__`; a new one adds its line here.
"""

# ruff: noqa: F403
from .attention import *
from .collective import *
from .constant import *
from .conv import *
from .custom import *
from .dropout import *
from .elementwise import *
from .experts import *
from .extremes import *
from .glu import *
from .hyper import *
from .image import *
from .indexer import *
from .kda import *
from .layout import *
from .linear_loss import *
from .loss import *
from .matmul import *
from .norm import *
from .optim import *
from .pool import *
from .reduce import *
from .rope import *
from .rows import *
from .scan import *
from .select import *
from .softmax import *
from .solve import *
from .sort import *
from .sparse_mla import *
from .triangle import *
from .unary import *

__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]

# Ops that others are made of.  They are here, and not among the names that `dir(ggrad)` offers.
INTERNAL = frozenset(name for name in __all__ if name.endswith("_back")) | {
    "accumulate", "after", "behind", "clip_factor", "conv_dw", "cross_entropy_class", "cross_entropy_soft",
    "delta_scan", "global_norm", "indexed", "kda_recurrent_pool", "kda_state_map", "known_gradients", "mul_mat_onto",
    "opt_step_adamw", "opt_step_sgd", "reduce_to", "replicated", "selective_scan", "shift", "slice_add", "slice_of",
    "slice_view", "sparse_flash_mla_grad", "sparse_flash_mla_grad_metadata", "sparse_flash_mla_metadata", "strided_add",
    "strided_set", "strided_view", "triangle", "view_as", "write_rows",
}  # fmt: skip
