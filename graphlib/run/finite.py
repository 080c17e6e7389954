"""Where the first NaN or infinity of a run comes from: for `compute(check_finite=True)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..core.errors import NotFiniteError
from ..core.tensor import Tensor


def check_finite(nodes: Iterable[Tensor], value_of: Callable[[Tensor], np.ndarray]) -> None:
    """Look at the results of nodes, in the order of the graph.

    Args:
        value_of: of a result, a part of one, or a leaf.

    Raises:
        NotFiniteError: names the first node with a NaN or an infinity, and what its inputs hold.
    """
    for t in nodes:
        for result in t.updates or t.outputs:
            if found := _not_finite(result, value_of):
                inputs = [
                    f"{input} = {s.label()}: {_not_finite(s, value_of) or 'finite'}"
                    for input, s in zip(_names(t), t.src, strict=True)
                    if s is not None
                ]
                name, made_of = t.op.name, "; ".join(inputs)  # type: ignore[union-attr]
                raise NotFiniteError(
                    f"{name} gave {t.label()}, the first that is not finite: {found}. Its inputs: {made_of}"
                )


def _not_finite(t: Tensor, value_of: Callable[[Tensor], np.ndarray]) -> str:
    """How many NaN and infinities it holds, in words; empty if none."""
    if not t.dtype.is_float:
        return ""
    value = value_of(t)
    nans, infinities = int(np.isnan(value).sum()), int(np.isinf(value).sum())
    counts = [f"{n} {what}" for n, what in ((nans, "NaN"), (infinities, "infinite")) if n]
    return f"{' and '.join(counts)} of {value.size}" if counts else ""


def _names(t: Tensor) -> list[str]:
    inputs = t.op.inputs  # type: ignore[union-attr]
    return [f"{inputs[-1]}{i}" for i in range(len(t.src))] if t.op.variadic else inputs  # type: ignore[union-attr]
