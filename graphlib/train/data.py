"""Training data: iterators whose position can be saved, so that a resumed run sees what it would have seen."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..core.errors import ShapeError

MOST = np.iinfo(np.int32).max


class Data(Protocol):
    """What `Trainer` takes its batches from.

    Attributes:
        position: where the next batch comes from; anything that JSON can hold.
    """

    position: Any

    def __next__(self) -> tuple[np.ndarray, ...]:
        """The next batch: one array for each input of the graph."""
        ...

    def seek(self, position: Any) -> None:
        """Go to a position that was read from `position` before."""
        ...


class Windows:
    """Batches of random windows of one long sequence: (inputs, targets), targets being one place further.

    A batch follows from the seed and its number alone, so its number is the position.

    Args:
        tokens: 1-D integers.
        batch: windows in a batch.
        context: tokens in a window.
        seed: of the choice of windows.
    """

    def __init__(self, tokens: np.ndarray, *, batch: int, context: int, seed: int = 0) -> None:
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ShapeError(f"Windows(): tokens must be integers, not {tokens.dtype}")
        if batch < 1 or context < 1:
            raise ShapeError(f"Windows(): batch and context must be at least 1, not {batch} and {context}")
        if tokens.ndim != 1 or len(tokens) <= context:
            raise ShapeError(
                f"Windows(): tokens of shape {tokens.shape} hold no window of {context} and one token after it"
            )
        self.tokens, self.batch, self.context, self.seed = tokens, batch, context, seed
        self.position = 0

    def __iter__(self) -> Windows:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, self.position])
        self.position += 1
        starts = rng.integers(0, len(self.tokens) - self.context, self.batch)
        windows = self.tokens[starts[:, None] + np.arange(self.context + 1)]
        if windows.dtype != np.int32:
            if windows.max() > MOST or windows.min() < -MOST - 1:
                raise ShapeError(
                    f"Windows: tokens must fit into i32, and range from {windows.min()} to {windows.max()}"
                )
            windows = windows.astype(np.int32)
        return windows[:, :-1], windows[:, 1:]

    def seek(self, position: int) -> None:
        """Let batch number `position` be the next one.

        Raises:
            ShapeError: it is no number of a batch.
        """
        if not isinstance(position, int | np.integer) or position < 0:
            raise ShapeError(f"Windows.seek(): a position is the number of a batch, not {position!r}")
        self.position = int(position)


class Share:
    """A rank's rows of batches that all ranks make alike: rows one after another, as equal in number as can be.

    Args:
        data: gives the same batches on all ranks; their arrays have one row for each example, at least one a rank.
        comm: the group of ranks.
    """

    def __init__(self, data: Data, comm: Any) -> None:
        self.data, self.comm = data, comm

    @property
    def position(self) -> Any:
        """Of the data that all share."""
        return self.data.position

    def __iter__(self) -> Share:
        return self

    def __next__(self) -> tuple[np.ndarray, ...]:
        batch = next(self.data)
        begin, end = self.rows(len(batch[0]), self.comm)
        return tuple(array[begin:end] for array in batch)

    def seek(self, position: Any) -> None:
        """Go to a position that was read from `position` before."""
        self.data.seek(position)

    @staticmethod
    def rows(count: int, comm: Any) -> tuple[int, int]:
        """Which of so many rows belong to this rank: the first, and the one after the last.

        Raises:
            ShapeError: there are fewer rows than ranks.
        """
        if count < comm.size:
            raise ShapeError(f"Share(): {count} rows for {comm.size} ranks")
        return count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size
