"""Optimizers: they add the nodes of their step to a graph, so that one run computes loss, gradients and step.

    optimizer = gg.optim.AdamW(graph.params, lr=gg.schedule.cosine(1e-3, steps=1000, warmup=50))
    optimizer.build(graph, clip=1.0)
    for batch in batches:
        x.set(batch)
        graph.compute()

A run that makes the step counts it too, and the next one begins with its learning rate: nothing is left to be done in
between. `graph.compute(update=False)` and `graph.evaluate(loss)` make no step.

Gradients that accumulate over several runs are read by a graph of the step alone, which `build` then returns::

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from ..core.errors import GradientError, GraphError, NotComputedError
from ..core.scope import STEP, in_phase
from ..core.tensor import Tensor, set_output, tensor
from ..graph import Graph
from ..ops.elementwise import add, div, mul, scale, sub
from ..ops.layout import accumulate, transpose
from ..ops.matmul import mul_mat
from ..ops.optim import StepRule, clip_factor, global_norm, opt_step, opt_step_adamw, opt_step_count, opt_step_sgd
from ..ops.reduce import sum as sum_of
from ..ops.select import isfinite, maximum, where
from ..ops.state import assign
from ..ops.unary import clamp, rsqrt, sqr
from .schedule import Schedule
from .shards import Piece, Shards, summed

NO_LIMIT = float(np.finfo(np.float32).max)
OWN = 5  # numbers of a rule of `opt_step`'s own
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of an iteration that takes singular values near 1


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


Params = Iterable[Tensor] | Iterable[Group]


class Optimizer:
    """What all optimizers share.  `AdamW`, `SGD` and those after them are the ones to use.

    Attributes:
        steps: how many steps were taken, which `Graph.reset` sets to 0 as it does the moments.  Set it to where a
            resumed run goes on.
        moments: state tensors by name, "<parameter>/m" and "<parameter>/v" of AdamW, "<parameter>/average".
    """

    whole = False  # whether a step looks at the whole of a parameter

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
        self._average: float | None = None
        self._means: dict[Tensor, str] = {}  # the names of parameters' averages
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
        clip_value: float | None = None,
        average: float | None = None,
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
            clip_value: the largest size of an element of a gradient; larger ones are cut to it, before `clip`.
            average: how much of a running mean of the parameters each step keeps, as 0.999; see `averages`.
            comm: a group of ranks, see `ggrad.distributed`, over which the gradients are summed before; they must
                accumulate.
            ordered: have the bits of these sums depend on their terms alone, not on which rank has which.
            shard: keep on each rank only the moments of an equal part of all parameters.

        Raises:
            GradientError: no parameter of this optimizer has a gradient.
            GraphError: build was called before with this graph, or with any if there are several ranks; a number is
                out of range; or the optimizer's steps look at whole parameters and are to be cut over ranks.
        """
        if graph in self._graphs or (self.built and comm is not None and comm.size > 1):
            raise GraphError("build(): this optimizer makes its step in this graph already")
        if clip is not None and not clip > 0:
            raise GraphError(f"build(): clip must be a positive number, not {clip!r}")
        if clip_value is not None and not clip_value > 0:
            raise GraphError(f"build(): clip_value must be a positive number, not {clip_value!r}")
        if average is not None and not 0 <= average < 1:
            raise GraphError(f"build(): average must lie in [0, 1), not {average!r}")
        if shard and self.whole:
            raise GraphError(f"build(shard=True): a step of {type(self).__name__} looks at whole parameters")
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
        in_phase(STEP, self._build_step, graph, target, found, clip, clip_value, average)
        return target

    def _build_step(
        self,
        graph: Graph,
        target: Graph,
        found: list[tuple[int, Tensor, Tensor]],
        clip: float | None,
        clip_value: float | None,
        average: float | None,
    ) -> None:
        """Add the nodes that step each parameter by its gradient."""
        if clip_value is not None:
            found = [(i, p, clamp(g, min=-clip_value, max=clip_value)) for i, p, g in found]
        sharded = self._shards
        norm = sharded.norm() if sharded else global_norm(*(g for _, _, g in found))
        # NaN where the norm is not finite, at which steps are skipped
        factor = clip_factor(norm, max_norm=NO_LIMIT if clip is None else clip)
        updates = [self._update(p, g, self._hypers[i], factor) for i, p, g in found]
        if average is not None:
            self._average = average
            updates = [self._averaged(p, update, factor) for (_, p, _), update in zip(found, updates, strict=True)]
        target.expand([set_output(norm), *updates, opt_step_count(self._count, factor)])
        target.before_run.append(partial(self._begin, norm))
        self._graphs.add(graph)
        self._norm = norm
        if sharded:
            target.build_forward_expand(sharded.gather(updates))

    def averages(self) -> dict[Tensor, np.ndarray]:
        """The running mean of each parameter over the steps so far, of those that `build(average=...)` keeps: f32
        arrays in the parameter's shape, by the parameter.  Before the first step they are the parameters.

        Raises:
            NotComputedError: build was not asked for averages.
        """
        if self._average is None:
            raise NotComputedError("averages(): build(average=0.999) keeps running means of the parameters")
        kept = 1 - self._average**self.steps  # the mean began with zeros
        whole = self.whole_moments()
        return {
            p: np.array(whole[name].numpy() / np.float32(kept) if self.steps else p.numpy(), np.float32)
            for group in self.groups
            for p in group.params
            if (name := self._means.get(p, f"{p.name}/average")) in whole
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it parameters are their averages, to be evaluated or saved; afterwards what they were before."""
        averages = self.averages()
        before = {p: p.memory().copy() for p in averages}
        try:
            for p, value in averages.items():
                p.memory()[...] = value
            yield
        finally:
            for p, value in before.items():
                p.memory()[...] = value

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

    def _averaged(self, p: Tensor, update: Tensor, factor: Tensor) -> Tensor:
        """The node that has the stepped parameter in its mean."""
        mean = self._moment(p, "average")
        self._means[p] = mean.name
        hyper = tensor([0.0, 0.0, 0.0, 1 - self._average, 0.0, 0.0, 0.0, 0.0])  # type: ignore[operator]
        return opt_step(mean, update, hyper, factor, rule=StepRule.AVERAGE)

    def _moment(self, p: Tensor, which: str, shape: tuple[int, ...] | None = None) -> Tensor:
        if (known := self._moments.get((p, which))) is not None:
            return known
        name = f"{p.name or f'%{len(self.moments)}'}/{which}"
        if name in self.moments:
            raise GraphError(f"two parameters of the optimizer are called {p.name!r}")
        moment = tensor(shape=p.shape if shape is None else shape, name=name, role="moment")
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
        return [self._rate(group), b1, b2, eps, decay, correction(b1, t), correction(b2, t)]

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        return opt_step_adamw(p, grad, self._moment(p, "m"), self._moment(p, "v"), hyper, factor)


def correction(beta: float, t: int) -> float:
    """1 / (1 - beta^t) of the beta that the kernel has, the nearest f32."""
    rest = 1 - float(np.float32(beta))
    return 1.0 if rest == 1 else -1 / math.expm1(t * math.log1p(-rest))


class ByRule(Optimizer):
    """What steps by a rule of `opt_step`."""

    rule: StepRule
    coupled = True  # whether the decay is part of the gradient

    def _own(self, group: Group) -> list[float]:
        """The rule's own numbers."""
        raise NotImplementedError

    def _states(self) -> dict[str, str]:
        """The names of moments, by the kernel's names of its states."""
        raise NotImplementedError

    def _hyper(self, group: Group) -> list[float]:
        decay, own = self._setting(group, "weight_decay"), self._own(group)
        return [self._rate(group), decay * self.coupled, decay * (not self.coupled), *own, *[0.0] * (OWN - len(own))]

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        states = {state: self._moment(p, name) for state, name in self._states().items()}
        return opt_step(p, grad, hyper, factor, **states, rule=self.rule)


class SGD(ByRule):
    """Gradient descent: x <- x - lr g, where g has weight_decay x in it; with momentum x <- x - lr v, where v <-
    momentum v + (1 - dampening) g, v = g in the first step; or with Nesterov x - lr (g + momentum v).  torch's SGD.

    Sources: Sutskever et al. 2013, On the importance of initialization and momentum in deep learning; Loshchilov and
    Hutter 2017, arXiv:1711.05101, for the decay.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        momentum: how much of the velocity each step keeps, 0 to 1; 0: there is none.
        dampening: how much of the gradient does not come into it, 0 to 1.
        nesterov: whether the step looks one ahead; then with momentum, and without dampening.
        weight_decay: times x is added to the gradient: without momentum the part of a parameter that a step of lr 1
            takes away.

    Raises:
        GraphError: a number is out of range, or Nesterov's momentum is none or dampened.
    """

    rule = StepRule.MOMENTUM

    def __init__(
        self, params: Params, lr: float | Schedule, *, momentum: float = 0.0, dampening: float = 0.0,
        nesterov: bool = False, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        _require_parts("SGD", momentum=momentum, dampening=dampening)
        if nesterov and (dampening or not momentum):
            raise GraphError(f"SGD(): nesterov needs a momentum, not {momentum!r}, and no dampening, not {dampening!r}")
        self._momentum, self._dampening, self._nesterov = momentum, dampening, nesterov
        super().__init__(params, lr, weight_decay=weight_decay)

    def _hyper(self, group: Group) -> list[float]:
        return super()._hyper(group) if self._momentum else [self._rate(group), self._setting(group, "weight_decay")]

    def _own(self, group: Group) -> list[float]:
        return [self._momentum, 1 - self._dampening * (self.steps > 0), float(self._nesterov)]

    def _states(self) -> dict[str, str]:
        return {"a": "v"}

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        return super()._update(p, grad, hyper, factor) if self._momentum else opt_step_sgd(p, grad, hyper, factor)


class Adam(ByRule):
    """Adam: the mean of the gradient over the root of the mean of its square, both corrected for the first steps.

    Sources: Kingma and Ba 2014, arXiv:1412.6980; Reddi et al. 2018, On the Convergence of Adam and Beyond, for amsgrad.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        betas, eps: as AdamW has them.
        weight_decay: times x is added to the gradient; or, decoupled, the part of x that a step of lr 1 takes away.
        amsgrad: whether to divide by the root of the largest mean square that there was.
        decoupled: AdamW's decay.
    """

    rule = StepRule.ADAM

    def __init__(
        self, params: Params, lr: float | Schedule, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, decoupled: bool = False,
    ) -> None:  # fmt: skip
        self._amsgrad, self.coupled = amsgrad, not decoupled
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _own(self, group: Group) -> list[float]:
        b1, b2 = self._setting(group, "betas")
        t = self.steps + 1
        return [b1, b2, self._setting(group, "eps"), correction(b1, t), correction(b2, t)]

    def _states(self) -> dict[str, str]:
        return {"a": "m", "b": "v"} | ({"c": "v_max"} if self._amsgrad else {})


class RMSprop(ByRule):
    """The gradient over the root of the running mean of its square.

    Source: Hinton 2012, Neural Networks for Machine Learning, Lecture 6e; Graves 2013, arXiv:1308.0850, for centered.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        alpha: how much of the means each step keeps, 0 to 1.
        eps: added to the root.
        momentum: how much of the former steps each step keeps; 0: none.
        centered: whether the mean gradient's square is taken from the mean square.
        weight_decay: times x is added to the gradient.
    """

    rule = StepRule.RMSPROP

    def __init__(
        self, params: Params, lr: float | Schedule, *, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0,
        centered: bool = False, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        _require_parts("RMSprop", alpha=alpha, momentum=momentum)
        self._alpha, self._momentum, self._centered = alpha, momentum, centered
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay)

    def _own(self, group: Group) -> list[float]:
        return [self._alpha, self._setting(group, "eps"), self._momentum]

    def _states(self) -> dict[str, str]:
        return {"a": "v"} | ({"b": "mean"} if self._centered else {}) | ({"c": "step"} if self._momentum else {})


class Adagrad(ByRule):
    """The gradient over the root of the sum of all its squares so far.

    Source: Duchi, Hazan and Singer 2011, Adaptive Subgradient Methods for Online Learning.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        lr_decay: step t has the rate lr / (1 + (t - 1) lr_decay).
        eps: added to the root.
        weight_decay: times x is added to the gradient.
    """

    rule = StepRule.ADAGRAD

    def __init__(
        self, params: Params, lr: float | Schedule, *, lr_decay: float = 0.0, eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        if not (math.isfinite(lr_decay) and lr_decay >= 0):
            raise GraphError(f"Adagrad(): lr_decay must be a number of at least 0, not {lr_decay!r}")
        self._lr_decay = lr_decay
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay)

    def _rate(self, group: Group) -> float:
        return super()._rate(group) / (1 + self.steps * self._lr_decay)

    def _own(self, group: Group) -> list[float]:
        return [self._setting(group, "eps")]

    def _states(self) -> dict[str, str]:
        return {"a": "sum"}


class Lion(ByRule):
    """Steps of one size: the sign of a mean of the gradient that is nearer to the last one than what is remembered.
    Its learning rate is some 3 to 10 times smaller than AdamW's, its decay as much larger.

    Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        betas: how much of the mean the step takes, and how much of it is remembered.
        weight_decay: the part of a parameter that a step of lr 1 takes away.
    """

    rule, coupled = StepRule.LION, False

    def __init__(
        self, params: Params, lr: float | Schedule, *, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)

    def _own(self, group: Group) -> list[float]:
        return [*self._setting(group, "betas")]

    def _states(self) -> dict[str, str]:
        return {"a": "m"}


class Adafactor(Optimizer):
    """Adam without a mean of the gradient, whose mean squares of a matrix are a product of one of its rows and one of
    its columns: n + m numbers in place of 2 n m.  Its rate follows the size of the parameter.  torch's Adafactor.

    Source: Shazeer and Stern 2018, Adafactor, arXiv:1804.04235.

    Args:
        params: parameters, or groups of them; of more than two axes the last two are the matrix.
        lr: the largest rate, which at step t is min(lr, 1 / sqrt(t)) times the root mean square of the parameter.
        beta2_decay: the means keep 1 - t^beta2_decay at step t; below 0.
        eps: of mean squares, and the least size of a parameter.
        clip: the largest root mean square of an update before its rate.
        weight_decay: the part of a parameter that a step of lr 1 takes away.
    """

    whole = True

    def __init__(
        self, params: Params, lr: float | Schedule = 1e-2, *, beta2_decay: float = -0.8,
        eps: tuple[float, float] = (2.0**-23, 1e-3), clip: float = 1.0, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        if not beta2_decay < 0 or not clip > 0 or not all(e > 0 for e in eps):
            raise GraphError(
                f"Adafactor(): beta2_decay={beta2_decay!r} must be below 0, clip={clip!r} and eps={eps!r} above"
            )
        self._beta2_decay, self._eps, self._clip = beta2_decay, eps, clip
        super().__init__(params, lr, weight_decay=weight_decay)

    def _hyper(self, group: Group) -> list[float]:
        t, rate = self.steps + 1, self._rate(group)
        return [rate * self._setting(group, "weight_decay"), min(rate, t**-0.5), t**self._beta2_decay]

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        decay, rate, take = (hyper[i] for i in range(3))
        kept = _Kept(factor)
        grad = mul(grad, factor)
        square, (least_square, least) = sqr(grad), self._eps
        if p.ndim > 1:
            rows = kept.towards(self._moment(p, "rows", (*p.shape[:-1], 1)), _mean(square, -1), take)
            columns = kept.towards(self._moment(p, "columns", (*p.shape[:-2], 1, p.shape[-1])), _mean(square, -2), take)
            mean = div(mul(rows, columns), maximum(_mean(rows, -2), least_square))
        else:
            mean = kept.towards(self._moment(p, "v"), square, take)
        update = mul(rsqrt(maximum(mean, least_square * least_square)), grad)
        size, n = maximum(scale(global_norm(p), factor=p.size**-0.5), least), update.size**0.5
        smaller = maximum(scale(global_norm(update), factor=1 / (n * self._clip)), 1.0)
        step = mul(update, div(mul(size, rate), smaller))
        return kept.written(p, sub(sub(p, mul(p, decay)), step))


class Muon(Optimizer):
    """Momentum whose step of a matrix is made orthogonal: all its directions are taken alike.  What is no matrix, and
    what is named in `adamw` (embeddings and heads, as a rule), is stepped by AdamW.

        v <- momentum v + (1 - momentum) g; u = (1 - momentum) g + momentum v, or v without Nesterov
        x <- x (1 - lr wd) - lr sqrt(max(1, rows / columns)) O(u)

    where O takes the singular values of u near 1, by five Newton-Schulz iterations.

    Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a schedule: a function from the steps taken so far.
        momentum: how much of the mean gradient each step keeps.
        nesterov: whether the step looks one ahead.
        weight_decay: the part of a parameter that a step of lr 1 takes away.
        iterations: of Newton and Schulz.
        adamw: matrices that are stepped by AdamW.
        adamw_lr: what AdamW's rate is of lr.
        betas, eps: AdamW's.
    """

    whole = True

    def __init__(
        self, params: Params, lr: float | Schedule = 2e-2, *, momentum: float = 0.95, nesterov: bool = True,
        weight_decay: float = 0.1, iterations: int = 5, adamw: Iterable[Tensor] = (), adamw_lr: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
    ) -> None:  # fmt: skip
        _require_parts("Muon", momentum=momentum)
        self._momentum, self._nesterov, self._iterations = momentum, nesterov, iterations
        self._adamw, self._adamw_lr = {*adamw}, adamw_lr
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _hyper(self, group: Group) -> list[float]:
        rate, decay, (b1, b2) = self._rate(group), self._setting(group, "weight_decay"), self._setting(group, "betas")
        t, eps = self.steps + 1, self._setting(group, "eps")
        adamw = [rate * self._adamw_lr, b1, b2, eps, decay, correction(b1, t), correction(b2, t)]
        return [*adamw, rate, rate * decay]

    def _update(self, p: Tensor, grad: Tensor, hyper: Tensor, factor: Tensor) -> Tensor:
        if p.ndim != 2 or p in self._adamw:
            return opt_step_adamw(p, grad, self._moment(p, "m"), self._moment(p, "v"), hyper[:7], factor)
        kept = _Kept(factor)
        grad = scale(mul(grad, factor), factor=1 - self._momentum)
        v = kept.written(moment := self._moment(p, "v"), add(scale(moment, factor=self._momentum), grad))
        u = add(grad, scale(v, factor=self._momentum)) if self._nesterov else v
        step = scale(_orthogonal(u, self._iterations), factor=max(1, p.shape[0] / p.shape[1]) ** 0.5)
        return kept.written(p, sub(sub(p, mul(p, hyper[8])), mul(step, hyper[7])))


class _Kept:
    """Writes into leaves; not if the factor of gradients is not finite, at which a step is skipped."""

    def __init__(self, factor: Tensor) -> None:
        self._ok = isfinite(factor)

    def written(self, leaf: Tensor, value: Tensor) -> Tensor:
        return assign(leaf, where(self._ok, value, leaf))

    def towards(self, leaf: Tensor, value: Tensor, part: Tensor) -> Tensor:
        return self.written(leaf, add(leaf, mul(sub(value, leaf), part)))


def _mean(x: Tensor, axis: int) -> Tensor:
    """Along an axis that stays."""
    return scale(sum_of(x, axis, keepdims=True), factor=1 / max(1, x.shape[axis]))


def _orthogonal(u: Tensor, iterations: int) -> Tensor:
    """`u` with singular values near 1: x <- a x + (b x x^T + c (x x^T)^2) x, in the shape that is wide."""
    a, b, c = NEWTON_SCHULZ
    x = div(u, clamp(global_norm(u), min=1e-7, max=float(np.finfo(np.float32).max)))
    tall = u.shape[0] > u.shape[1]
    x = transpose(x) if tall else x
    for _ in range(iterations):
        square = mul_mat(x, x)
        mixed = add(scale(square, factor=b), scale(mul_mat(square, square), factor=c))
        x = add(scale(x, factor=a), mul_mat(transpose(x), mixed))
    return transpose(x) if tall else x


def _require_parts(who: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise GraphError(f"{who}(): {name} must be from 0 to 1, not {number!r}")
