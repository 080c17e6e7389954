"""The ops, by family.  Importing this package fills the registry."""

from .elementwise import add, div, mul, neg, scale, sub
from .layout import (
    accumulate,
    broadcast_to,
    cast,
    cont,
    permute,
    repeat,
    repeat_back,
    reshape,
    slice_add,
    slice_back,
    slice_of,
    slice_view,
    transpose,
    view_as,
)
from .reduce import sum

__all__ = [
    "accumulate", "add", "broadcast_to", "cast", "cont", "div", "mul", "neg", "permute", "repeat", "repeat_back",
    "reshape", "scale", "slice_add", "slice_back", "slice_of", "slice_view", "sub", "sum", "transpose", "view_as",
]  # fmt: skip
