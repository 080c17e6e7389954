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

# What most programs call: `dir(ggrad)` holds these.  All others are here, and are found by completion in `ggrad.ops`:
# gradients of ops, those that others are made of, and what one kind of model asks for.
COMMON = frozenset({
    "abs", "add", "arange", "argmax", "argmin", "argsort", "broadcast_to", "cast", "Causal", "ceil", "clamp", "concat",
    "cont", "conv_1d", "conv_2d", "conv_transpose_2d", "cos", "cross_entropy_loss", "cumsum", "custom", "div",
    "dropout", "equal", "exp", "eye", "flash_attn_ext", "flip", "floor", "full", "gather", "geglu", "gelu", "get_rows",
    "greater", "greater_equal", "group_norm", "interpolate", "isfinite", "isnan", "kda", "kda_recurrent", "leaky_relu",
    "less", "less_equal", "linear_cross_entropy", "linspace", "log", "log1p", "log_softmax", "logical_and",
    "logical_not", "logical_or", "logsumexp", "masked_fill", "matmul", "max", "maximum", "mean", "min", "minimum",
    "mul", "mul_mat", "mul_mat_id", "neg", "norm", "not_equal", "one_hot", "ones", "pad", "permute", "pool_2d", "pow",
    "relu", "repeat", "reshape", "rms_norm", "roll", "rope", "round", "rsqrt", "scale", "scatter_add", "set_rows",
    "sgn", "sigmoid", "silu", "sin", "soft_max", "softmax", "softplus", "sort", "sparse_flash_mla", "sqr", "sqrt",
    "stack", "std", "stop_gradient", "sub", "sum", "swiglu", "take_along_axis", "tanh", "top_k", "transpose", "tri",
    "var", "where", "zeros",
})  # fmt: skip
