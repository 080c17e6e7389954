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
from .glu import *
from .hyper import *
from .image import *
from .indexer import *
from .kda import *
from .layout import *
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
