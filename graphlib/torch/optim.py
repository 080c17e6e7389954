"""AdamW for parameters of torch's: the step of all of them is one graph, which writes where they lie."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from ..call.compiled import Layout
from ..core.dtype import F32
from ..core.errors import ShapeError
from ..core.program import Program
from ..core.tensor import tensor
from ..ops.optim import opt_step_adamw
from ..run.bound import Bound
from .memory import check


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with its state and its arithmetic, in one pass over memory.

    Args:
        params: dense f32 parameters on the CPU, or groups of them, as torch takes them.
        lr: learning rate; schedulers of torch's may change it.
        betas: of the moments.
        eps: added to the root.
        weight_decay: times the learning rate, of each parameter before its step.

    Raises:
        ShapeError: an option is negative or not finite, or a parameter lies elsewhere or has another dtype.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ShapeError(f"AdamW(): {name} must be 0 or more, not {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ShapeError(f"AdamW(): betas must be from 0 to less than 1, not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient.

        Args:
            closure: computes the loss anew, with gradients.

        Returns:
            What the closure gives.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[int, list[torch.Tensor]] = defaultdict(list)  # by the number of steps that they have made
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] or self._begin(p)
                    state["step"] += 1
                    alike[int(state["step"])].append(p)
            for t, params in alike.items():
                self._step(group, t, params)
        return loss

    def _begin(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        check(p, "AdamW: a parameter")
        if p.dtype != torch.float32 or Layout.of(p.shape, F32, p.stride()) is None:
            raise ShapeError(
                f"AdamW: a parameter of shape {tuple(p.shape)} is {p.dtype}, or has gaps; those that are stepped are "
                "f32, so that small steps are not rounded away: let autocast make halves of them"
            )
        self.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
        return self.state[p]

    def _step(self, group: dict[str, Any], t: int, params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        values = [float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"]]
        hyper = torch.tensor([*values, 1 / (1 - beta1**t), 1 / (1 - beta2**t)], dtype=torch.float32)
        grads = [_as_gradient(p) for p in params]
        moments = [(self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]) for p in params]
        step = _program(tuple(p.numel() for p in params))
        addresses = [hyper.data_ptr()]
        for p, grad, (m, v) in zip(params, grads, moments, strict=True):
            addresses += [x.data_ptr() or 1 for x in (p, grad, m, v)]
        step(addresses)
        for p in params:
            torch.autograd.graph.increment_version(p)


def _as_gradient(p: torch.Tensor) -> torch.Tensor:
    """The gradient, f32, lying as its parameter does."""
    grad = p.grad
    assert grad is not None
    check(grad, "AdamW: a gradient")
    if grad.dtype == torch.float32 and grad.stride() == p.stride():
        return grad
    return torch.empty_strided(p.shape, p.stride(), dtype=torch.float32).copy_(grad)


@cache
def _program(sizes: tuple[int, ...]) -> Bound:
    """The step of parameters of these sizes."""
    hyper = tensor(shape=7)
    leaves, program = [hyper], Program()
    for size in sizes:
        x, grad, m, v = (tensor(shape=size) for _ in range(4))
        leaves += [x, grad, m, v]
        made = opt_step_adamw(x, grad, m, v, hyper)
        program.expand([made])
        program.roots.append(made)
    return Bound(program, leaves)
