"""Optimizers: they add the nodes of their step to a graph, so that one run computes loss, gradients and step.

    optimizer = gg.optim.AdamW(graph.params, lr=gg.schedule.cosine(1e-3, steps=1000, warmup=50))
    optimizer.build(graph, clip=1.0)
    for batch in batches:
        x.set(batch)
        graph.compute()

A run that makes the step counts it too, and the next one begins with its learning rate: nothing is left to be done in
between. `graph.compute(update=False)` and `graph.evaluate(loss)` make no step.

Gradients that accumulate over several runs are read by a graph of the step alone, which `build` then returns:

    update = optimizer.build(graph, clip=1.0)
    ...
    for part in parts:
        x.set(part)
        graph.compute()
    update.compute()
    graph.reset()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from ..core.errors import GradientError, GraphError, NotComputedError
from ..core.tensor import Tensor, set_output, tensor
from ..graph import Graph
from ..ops.layout import accumulate
from ..ops.optim import clip_factor, global_norm, opt_step_adamw, opt_step_count, opt_step_sgd
from .schedule import Schedule
from .shards import Piece, Shards, summed

NO_LIMIT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that are stepped alike.  What is None is as the optimizer has it.

    Attributes:
        lr: a number, or a schedule of this group's own.
        lr_multiplier: of the learning rate, wherever it comes from.
    """

    params: Sequence[Tensor]
    lr: float | Schedule | None = None
    lr_multiplier: float = 1.0
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None


class Optimizer:
    """What all optimizers share.  `AdamW` and `SGD` are the ones to use.

    Attributes:
        steps: how many steps were taken, which `Graph.reset` sets to 0 as it does the moments.  Set it to where a
            resumed run goes on.
        moments: state tensors by name, "<parameter>/m" and "<parameter>/v" of AdamW.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[Group], lr: float | Schedule, **defaults) -> None:
        given = list(params)
        groups = [g for g in given if isinstance(g, Group)]
        self.groups = groups if given and len(groups) == len(given) else [Group(given)]  # type: ignore[arg-type]
        self.moments: dict[str, Tensor] = {}
        self._moments: dict[tuple[Tensor, str], Tensor] = {}  # the same by parameter
        self._lr, self._defaults = lr, defaults
        self._count = tensor(np.zeros((), np.int32), name="steps", role="counter")
        self._agreed = -1  # the number of steps for which rank 0 has said the learning rates
        self._norm: Tensor | None = None  # of the gradients of the last run
        self._graphs: WeakSet[Graph] = WeakSet()  # those that it steps in
        self._shards: Shards | None = None
        self._pieces: dict[Tensor, Piece] = {}  # by their leaves
        self._owners: dict[str, Piece] = {}  # by the names of moments
        self._check()
        self._hypers = [tensor(self._hyper(g), name=f"hyper {i}") for i, g in enumerate(self.groups)]

    def build(
        self,
        graph: Graph,
        *,
        clip: float | None = None,
        comm: Any = None,
        ordered: bool = False,
        shard: bool = False,
    ) -> Graph:
        """Add the step to a graph that has its gradients.  Returns the graph that makes the step when it runs.

        It can be given several graphs, as of batches of several shapes: a run of any of them makes the next step.

        A gradient whose norm is not finite makes no step: parameters and moments stay as they are.

        Args:
            graph: after `build_backward_expand`.  Where its gradients accumulate, the step goes into a graph of
                its own, which is returned; else it goes into this one.
            clip: the largest norm of all gradients together; larger ones are scaled down to it.
            comm: a group of ranks, see `ggrad.distributed`, over which the gradients are summed before; they must
                accumulate.
            ordered: have the bits of these sums depend on their terms alone, not on which rank has which.
            shard: keep on each rank only the moments of an equal part of all parameters.

        Raises:
            GradientError: no parameter of this optimizer has a gradient.
            GraphError: build was called before with this graph, or with any if there are several ranks.
        """
        if graph in self._graphs or (self.built and comm is not None and comm.size > 1):
            raise GraphError("build(): this optimizer makes its step in this graph already")
        if clip is not None and not clip > 0:
            raise GraphError(f"build(): clip must be a positive number, not {clip!r}")
        found = [
            (i, p, g) for i, group in enumerate(self.groups) for p in group.params if (g := graph.grad(p)) is not None
        ]
        if not found:
            raise GradientError("no parameter of this optimizer has a gradient: build_backward_expand comes first")
        target = graph
        if any(g.op is accumulate for _, _, g in found):
            target = Graph()
            found = [(i, p, g.src[0]) for i, p, g in found]  # type: ignore[misc]

        if comm is not None and comm.size > 1:
            if target is graph:
                raise GraphError("build(comm=...): gradients are summed over ranks where they accumulate")
            grads = [g for _, _, g in found]
            if shard:
                self._shards = Shards([p for _, p, _ in found], grads, comm, ordered=ordered)
                group = {p: i for i, p, _ in found}
                found = [(group[piece.param], piece.leaf, piece.grad) for piece in self._shards.pieces]
                self._pieces = {piece.leaf: piece for piece in self._shards.pieces}
            else:
                sums = summed(grads, comm, ordered=ordered)
                found = [(i, p, g) for (i, p, _), g in zip(found, sums, strict=True)]
        sharded = self._shards
        norm = sharded.norm() if sharded else global_norm(*(g for _, _, g in found))
        # NaN where the norm is not finite, at which steps are skipped
        factor = clip_factor(norm, max_norm=NO_LIMIT if clip is None else clip)
        updates = [self._update(p, g, self._hypers[i], factor) for i, p, g in found]
        target.expand([set_output(norm), *updates, opt_step_count(self._count, factor)])
        target.before_run.append(partial(self._begin, norm))
        self._graphs.add(graph)
        self._norm = norm
        if sharded:
            target.build_forward_expand(sharded.gather(updates))
        return target

    def whole_moments(self) -> dict[str, Tensor]:
        """The moments, also where ranks have parts of them: then copies, and all ranks must ask at the same time."""
        if self._shards is None:
            return self.moments
        return self._shards.whole(self.moments, self._owners)

    def agree(self, comm: Any) -> None:
        """Take the next step's learning rates and so on from rank 0: a schedule may look at a clock."""
        self._set_hypers()
        for hyper in self._hypers:
            hyper.set(comm.broadcast(hyper.memory()))
        self._agreed = self.steps

    def take_moments(self, whole: dict[str, Tensor]) -> None:
        """Set the moments to what `whole_moments` gave, or as much."""
        if self._shards is not None:
            self._shards.take(whole, self.moments, self._owners)

    def step(self) -> bool:
        """Whether the last run made a step: not if the gradient's norm is infinite or NaN.  There is no need to ask."""
        return math.isfinite(self.norm)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self._count.item()  # type: ignore[return-value]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._count.set(steps)
        self._agreed = -1

    def _begin(self, norm: Tensor) -> None:
        """Before each run that makes a step, whose gradients will have this norm."""
        self._norm = norm
        self._set_hypers()

    def _set_hypers(self) -> None:
        """What the kernels read in the next step."""
        if self._agreed != self.steps:
            for group, hyper in zip(self.groups, self._hypers, strict=True):
                hyper.set(self._hyper(group))

    @property
    def built(self) -> bool:
        """Whether `build` has given it a graph."""
        return self._norm is not None

    @property
    def norm(self) -> float:
        """The norm of all gradients together in the last run, before clipping."""
        if self._norm is None:
            raise NotComputedError("the norm of the gradients is known after build() and a run")
        return self._norm.item()

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of the first group.  Setting it, to a number or a schedule, is that of
        every group without one of its own, from the next run on."""
        return self._rate(self.groups[0])

    @lr.setter
    def lr(self, lr: float | Schedule) -> None:
        if all(group.lr is not None for group in self.groups):
            raise GraphError(f"{type(self).__name__}.lr: every group has a learning rate of its own")
        former, self._lr, self._agreed = self._lr, lr, -1
        try:
            for group in self.groups:
                self._rate(group)
        except GraphError:
            self._lr = former
            raise

    # -- what optimizers differ in ----------------------------------------------------------------

    def _hyper(self, group: Group) -> list[float]:
        """The numbers that the step's kernel reads, for the next step."""
        raise NotImplementedError

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        """The node that steps one parameter."""
        raise NotImplementedError

    # -- helpers ----------------------------------------------------------------------------------

    def _moment(self, p: Tensor, which: str) -> Tensor:
        if (known := self._moments.get((p, which))) is not None:
            return known
        name = f"{p.name or f'%{len(self.moments)}'}/{which}"
        if name in self.moments:
            raise GraphError(f"two parameters of the optimizer are called {p.name!r}")
        moment = tensor(shape=p.shape, name=name, role="moment")
        moment.memory()
        self.moments[name] = self._moments[p, which] = moment
        if p in self._pieces:
            self._owners[name] = self._pieces[p]
        return moment

    def _setting(self, group: Group, name: str):
        value = getattr(group, name)
        return self._defaults[name] if value is None else value

    def _rate(self, group: Group) -> float:
        lr = self._lr if group.lr is None else group.lr
        rate = lr(self.steps) if callable(lr) else lr
        if not (math.isfinite(rate) and rate >= 0):
            raise GraphError(f"the learning rate of step {self.steps + 1} must be a number of at least 0, not {rate!r}")
        return rate * group.lr_multiplier

    def _check(self) -> None:
        who = type(self).__name__
        seen: set[Tensor] = set()
        for group in self.groups:
            if not group.params:
                raise GraphError(f"{who}(): a group without parameters")
            for p in group.params:
                if not isinstance(p, Tensor) or not p.param:
                    raise GraphError(f"{who}(): {p!r} is no parameter; gg.tensor(..., param=True) makes one")
                if p in seen:
                    raise GraphError(f"{who}(): {p.label()} was given twice")
                seen.add(p)
            for name in ("weight_decay", "betas", "eps"):
                if getattr(group, name) is not None and name not in self._defaults:
                    raise GraphError(f"{who}(): a group sets {name}, which {who} does not have")
            numbers: dict[str, float] = {
                name: self._setting(group, name) for name in ("weight_decay", "eps") if name in self._defaults
            }
            numbers["lr_multiplier"] = group.lr_multiplier
            for name, number in numbers.items():
                if not (math.isfinite(number) and number >= 0):
                    raise GraphError(f"{who}(): {name} must be a number of at least 0, not {number!r}")
            self._rate(group)
            betas = self._setting(group, "betas") if "betas" in self._defaults else ()
            if not all(b >= 0 and np.float32(b) < 1 for b in betas):
                raise GraphError(f"{who}(): betas must lie in [0, 1), also as f32, not {betas}")


class AdamW(Optimizer):
    """Adam with decoupled weight decay: x <- x (1 - lr wd) - lr m^ / (sqrt(v^) + eps).

    Sources: Kingma and Ba 2014, arXiv:1412.6980; Loshchilov and Hutter 2017, arXiv:1711.05101.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        betas: how much of the running means of the gradient and its square each step keeps, rounded to f32 (beside
            0.999999 lies 0.99999899); the corrections for the first steps are those of the rounded ones, so that means
            of a constant gradient are that gradient after any number of steps.
        eps: added to the root of the mean square.
        weight_decay: the part of a parameter that a step of lr 1 takes away.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _hyper(self, group: Group) -> list[float]:
        b1, b2 = self._setting(group, "betas")
        eps, decay = self._setting(group, "eps"), self._setting(group, "weight_decay")
        t = self.steps + 1
        return [self._rate(group), b1, b2, eps, decay, _correction(b1, t), _correction(b2, t)]

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        return opt_step_adamw(p, grad, self._moment(p, "m"), self._moment(p, "v"), hyper, factor)


def _correction(beta: float, t: int) -> float:
    """1 / (1 - beta^t) of the beta that the kernel has, the nearest f32."""
    rest = 1 - float(np.float32(beta))
    return 1.0 if rest == 1 else -1 / math.expm1(t * math.log1p(-rest))


class SGD(Optimizer):
    """Plain gradient descent: x <- x (1 - lr wd) - lr dx.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, for the decay.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        weight_decay: the part of a parameter that a step of lr 1 takes away.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Group], lr: float | Schedule, *, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)

    def _hyper(self, group: Group) -> list[float]:
        return [self._rate(group), self._setting(group, "weight_decay")]

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        return opt_step_sgd(p, grad, hyper, factor)
