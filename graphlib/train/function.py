"""Functions of arrays: a graph for each combination of shapes they are called with, built when it is first met.

step = gg.function(loss_of, optimizer=gg.AdamW(params, lr=1e-3), clip=1.0)
for x, y in batches:  # of any lengths
    loss = step(x, y)

evaluate = gg.function(loss_of)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.arena import Arena
from ..core.dtype import I32
from ..core.errors import GraphError
from ..core.op import writes_noted
from ..core.tensor import Tensor, natural_dtype, tensor
from ..core.turns import Turn
from ..graph import Graph
from .optim import Optimizer

STATIC = (str, bytes, bool, type(None), Tensor)


@dataclass(frozen=True)
class Built:
    """The graph of one combination of shapes.

    Attributes:
        inputs: its leaves, in the order of the arrays.
        results: what the function made of them: a tensor, or tuples, lists and dicts of tensors.
    """

    graph: Graph
    inputs: list[Tensor]
    results: Any


class Function:
    """See `function`, which makes it.

    Attributes:
        optimizer: the one that each call lets make a step, or None.
        graphs: the graphs that are kept, by shapes, the latest last.
    """

    def __init__(
        self,
        made_of: Callable[..., Any],
        *,
        optimizer: Optimizer | None,
        clip: float | None,
        keep: int,
        threads: int | None,
    ) -> None:
        if not callable(made_of):
            raise GraphError(f"function(): {made_of!r} cannot be called")
        if keep < 1:
            raise GraphError(f"function(): keep must be at least 1, not {keep}")
        if clip is not None and optimizer is None:
            raise GraphError("function(): clip is of gradients, and without an optimizer there are none")
        self._made_of, self.optimizer = made_of, optimizer
        self._clip, self._keep, self._threads = clip, keep, threads
        self._arena, self._turn = Arena(), Turn()
        self._built: OrderedDict[Hashable, Built] = OrderedDict()

    @property
    def graphs(self) -> list[Graph]:
        return [built.graph for built in self._built.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the graph of these shapes if there is none, set its inputs, run it.

        Args:
            args, kwargs: arrays and numbers are inputs of the graph, as are those in tuples, lists and dicts.  Bools,
                strings, None and tensors are given to the function as they are; others of these are another graph.

        Returns:
            What the function gave, with the value of each tensor in its place: a number of a scalar, else an array of
            the caller's own.

        Raises:
            GraphError: a loss that is to be trained is no scalar; or this is called from inside of its own run.
            Whatever the function itself raises, and `Graph.compute`.
        """
        arrays: list[np.ndarray] = []
        key = _key((args, kwargs), arrays)
        return self._turn.take("a call of this function", lambda: self._call(key, args, kwargs, arrays))

    def _call(self, key: Hashable, args: tuple, kwargs: dict[str, Any], arrays: list[np.ndarray]) -> Any:
        built = self._built.get(key)
        if built is None:
            built = self._built[key] = self._build(args, kwargs)
            while len(self._built) > self._keep:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        for leaf, array in zip(built.inputs, arrays, strict=True):
            leaf.set(array)
        built.graph.compute(threads=self._threads)
        return _each(_value, built.results)

    def _build(self, args: tuple, kwargs: dict[str, Any]) -> Built:
        inputs: list[Tensor] = []

        def leaf(array: np.ndarray) -> Tensor:
            dtype = I32 if array.dtype == bool else natural_dtype(array)
            inputs.append(tensor(shape=array.shape, dtype=dtype, name=f"input {len(inputs)}"))
            return inputs[-1]

        def given(x: Any) -> Any:
            return x if isinstance(x, STATIC) else leaf(np.asarray(x))

        leaves = _each(given, args), _each(given, kwargs)
        with writes_noted() as writes:
            results = self._made_of(*leaves[0], **leaves[1])
            tensors = [t for t in _leaves_of(results) if isinstance(t, Tensor)]
            if not tensors:
                raise GraphError(f"function(): {self._made_of!r} gave no tensor, but {results!r}")
            graph = Graph(self._arena).build_forward_expand(*tensors, *writes)
            if self.optimizer is not None:
                self._train(graph, tensors[0])
        return Built(graph, inputs, results)

    def _train(self, graph: Graph, loss: Tensor) -> None:
        optimizer: Optimizer = self.optimizer  # type: ignore[assignment]
        if loss.size != 1:
            raise GraphError(
                f"function(optimizer=...): the loss, the first result, must be a scalar, not {loss.label()}"
            )
        params = [p for group in optimizer.groups for p in group.params if p in graph]
        graph.build_backward_expand(loss, params=params, keep=False)
        optimizer.build(graph, clip=self._clip)


def function(
    made_of: Callable[..., Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    clip: float | None = None,
    keep: int = 8,
    threads: int | None = None,
) -> Any:
    """A function of arrays from one of tensors; also as a decorator.

    It builds a graph when it is called with shapes that are new, keeps the latest of them, and runs them in one arena,
    as large as the largest needs.  With an optimizer each call makes a step: then the first result is the loss.
    Several functions may share an optimizer, as those of several losses, and threads may share a function.

    Args:
        made_of: takes tensors, and gives one, or tuples, lists or dicts of them.  What it assigns to leaves is part
            of the graph.  It is called once for each combination of shapes, so what it does beside is not repeated.
        optimizer: makes a step of its parameters, of those that the loss depends on.
        clip: the largest norm of all gradients together; see `Optimizer.build`.
        keep: how many graphs are kept; of more the one whose last call is longest ago is dropped.
        threads: as of `Graph.compute`.

    Returns:
        A `Function`.

    Raises:
        GraphError: what it is given fits together in no way.
    """

    def made(f: Callable[..., Any]) -> Function:
        return Function(f, optimizer=optimizer, clip=clip, keep=keep, threads=threads)

    return made if made_of is None else made(made_of)


def _each(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tuples, lists and dicts with everything in them changed."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(_each(change, x) for x in tree)
    if isinstance(tree, dict):
        return {name: _each(change, x) for name, x in tree.items()}
    return change(tree)


def _leaves_of(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        yield tree
        return
    for x in tree:
        yield from _leaves_of(x)


def _key(tree: Any, arrays: list[np.ndarray]) -> Hashable:
    """What a graph follows from: shapes and dtypes of arrays, which are gathered, and what is static itself."""
    if isinstance(tree, (tuple, list)):
        return (type(tree), *(_key(x, arrays) for x in tree))
    if isinstance(tree, dict):
        return (dict, *((name, _key(x, arrays)) for name, x in tree.items()))
    if isinstance(tree, STATIC):
        return (type(tree), tree)
    array = np.asarray(tree)
    arrays.append(array.astype(np.int32) if array.dtype == bool else array)
    return (array.shape, array.dtype)


def _value(t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    return t.item() if not t.shape else np.array(t.numpy())
