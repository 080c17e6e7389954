"""Modules of torch's as graphs of ggrad's, on the modules' own weights."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import ops
from ..core.dtype import F32, I32
from ..core.errors import GraphError, ShapeError
from ..core.rng import Rng
from ..core.tensor import Tensor, bind, tensor
from ..graph import Graph
from .aten import TABLE

KEPT = 8  # graphs of other shapes


class Converted:
    """A module as nodes.  `from_torch` makes it.

    Attributes:
        inputs: leaves for the module's arguments, in order.
        outputs: its results.
        params: name -> leaf, of parameters that require gradients: they lie in the module's own memory.
        updates: nodes that write running statistics; they belong to the roots of a graph that trains.
    """

    def __init__(self, module: torch.nn.Module, examples: Sequence[torch.Tensor]) -> None:
        self._module = module
        self._leaves: dict[int, Tensor] = {}  # by the addresses of weights
        self._others: OrderedDict[tuple, Converted] = OrderedDict()
        self._graph: Graph | None = None
        self.params: dict[str, Tensor] = {}
        self.inputs, self.outputs, self.updates = self._nodes(examples)

    def __call__(self, *arguments: Any) -> list[np.ndarray]:
        """The results for arguments of any shape that the module takes: a graph for each, of which the latest are kept.

        Raises:
            GraphError: the module cannot be converted for these shapes.
        """
        given = [torch.as_tensor(x) for x in arguments]
        same = [tuple(x.shape) for x in given] == [t.shape for t in self.inputs]
        return (self if same else self._of(given))._run(given)

    def _of(self, given: list[torch.Tensor]) -> Converted:
        key = tuple(tuple(x.shape) for x in given)
        if key not in self._others:
            self._others[key] = Converted(self._module, given)
            while len(self._others) > KEPT:
                self._others.popitem(last=False)
        self._others.move_to_end(key)
        return self._others[key]

    def _run(self, given: list[torch.Tensor]) -> list[np.ndarray]:
        if self._graph is None:
            self._graph = Graph().build_forward_expand(*self.outputs)
        for leaf, x in zip(self.inputs, given, strict=True):
            leaf.set(x)
        self._graph.compute(update=False)
        return [t.numpy().copy() for t in self.outputs]

    def _nodes(self, examples: Sequence[torch.Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        exported = torch.export.export(self._module, tuple(examples))
        nodes = list(exported.graph.nodes)
        _require_known(nodes)
        signature = exported.graph_signature
        env: dict[Any, Any] = {}
        inputs = []
        for node in (n for n in nodes if n.op == "placeholder"):
            weight = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
            if weight is not None:
                env[node] = self._weight(weight)
            elif node.name in signature.inputs_to_lifted_tensor_constants:
                constant = exported.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
                env[node] = tensor(constant.detach().numpy())
            else:
                value = node.meta["val"]
                dtype = F32 if value.is_floating_point() else I32
                env[node] = tensor(shape=tuple(value.shape), dtype=dtype, name=node.name)
                inputs.append(env[node])
        call = _Call(env)
        for node in (n for n in nodes if n.op == "call_function"):
            env[node] = call.made(node)
        written = {**signature.buffers_to_mutate}
        (output,) = (n for n in nodes if n.op == "output")
        updates, outputs = list(call.updates), []
        for node in output.args[0]:
            if node is None or node.name in written:
                continue
            outputs.append(env[node])
        return inputs, outputs, updates

    def _weight(self, name: str) -> Tensor:
        """The leaf that lies in a parameter or buffer, one for all that share its memory."""
        owner, _, last = name.rpartition(".")
        weight = getattr(self._module.get_submodule(owner), last)
        if not weight.is_floating_point():
            return tensor(weight.detach().numpy())
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            raise ShapeError(
                f"from_torch(): {name} is {weight.dtype}, and must be float32 without gaps: module.float()"
            )
        leaf = self._leaves.get(weight.data_ptr())
        if leaf is None:
            leaf = tensor(shape=tuple(weight.shape), name=name, param=weight.requires_grad)
            self._leaves[weight.data_ptr()] = bind(leaf, weight.detach().numpy())
            if weight.requires_grad:
                self.params[name] = leaf
        return leaf


def from_torch(module: torch.nn.Module, example_inputs: Sequence[torch.Tensor]) -> Converted:
    """A module of torch's as nodes, for the modes (train or eval) that it is in, by `torch.export`.

        converted = ggrad.torch.from_torch(net, (x,))
        loss = gg.cross_entropy_loss(converted.outputs[0], targets)
        graph = gg.Graph().build_forward_expand(loss, *converted.updates).build_backward_expand(loss)
        gg.AdamW(converted.params.values(), lr=1e-3).build(graph)

    Parameters and buffers are not copied: what trains here trains the module, and the other way round.

    Args:
        module: on the CPU, its floats float32.
        example_inputs: of the shapes that the graph will have.

    Raises:
        GraphError: the module calls what has no counterpart here: everything is listed, with its line.
        ShapeError: a weight that is no float32 on the CPU, or a shape with more axes than there are.
    """
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        if weight.device.type != "cpu":
            raise ShapeError(f"from_torch(): {name} is on {weight.device}, and must be on the CPU: module.cpu()")
    wrong = [type(x).__name__ for x in example_inputs if not isinstance(x, torch.Tensor)]
    if wrong:
        raise ShapeError(f"from_torch(): example_inputs must be tensors of torch's, not {', '.join(wrong)}")
    return Converted(module, example_inputs)


class _Call:
    """Makes the node of each call."""

    def __init__(self, env: dict[Any, Any]) -> None:
        self._env = env
        self._rng: Rng | None = None
        self.updates: list[Tensor] = []

    def made(self, node: Any) -> Any:
        """What it gives, in the shape that torch says."""
        args = torch.fx.node.map_arg(node.args, self._env.__getitem__)
        kwargs = torch.fx.node.map_arg(node.kwargs, self._env.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        try:
            found = TABLE[_name(node)](self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            raise GraphError(f"from_torch(): {node.target} {_where(node)}: {error}") from error
        wanted = getattr(node.meta.get("val"), "shape", None)
        if isinstance(found, Tensor) and wanted is not None and found.shape != tuple(wanted):
            found = ops.reshape(found, tuple(wanted))
        return found

    @property
    def rng(self) -> Rng:
        """For what drops."""
        self._rng = self._rng or Rng(int(torch.initial_seed() % 2**31))
        return self._rng


def _name(node: Any) -> str:
    """ "linear" of aten.linear.default."""
    return str(node.target).removeprefix("aten.").split(".")[0].rstrip("_")


def _where(node: Any) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return f"at {lines[-2]} {lines[-1]}" if len(lines) > 1 else "at an unknown line"


def _require_known(nodes: Sequence[Any]) -> None:
    unknown = OrderedDict(
        (str(n.target), _where(n))
        for n in reversed(nodes)
        if n.op == "call_function" and n.target is not operator.getitem and _name(n) not in TABLE
    )
    if unknown:
        listed = "\n".join(f"  {target} {where}" for target, where in reversed(unknown.items()))
        raise GraphError(f"from_torch(): {len(unknown)} ops have no counterpart here:\n{listed}")
