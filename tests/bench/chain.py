"""A chain of elementwise functions with two parameters and its gradient, three engines: what fusing them is worth."""

import numpy as np

SHAPE = (1024, 1024)


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal(SHAPE, dtype=np.float32),
        "w": rng.standard_normal(SHAPE[1], dtype=np.float32),
        "b": rng.standard_normal(SHAPE[1], dtype=np.float32),
    }


def ggrad_step(threads: int):
    """A function that computes the loss and both gradients, and returns the loss."""
    import ggrad as gg

    x, w, b = (gg.tensor(value, name=name, param=name != "x") for name, value in data().items())
    y = gg.tanh(x * w + b) * x + x * 0.5
    loss = gg.mean(gg.sqr(y))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()

    def step() -> float:
        graph.compute(threads=threads)
        return loss.item()

    step.graph = graph
    return step


def torch_step(threads: int, *, compiled: bool = False):
    import torch

    torch.set_num_threads(threads)
    x, w, b = (torch.from_numpy(value) for value in data().values())
    w, b = w.requires_grad_(), b.requires_grad_()

    def forward():
        y = torch.tanh(x * w + b) * x + x * 0.5
        return (y * y).mean()

    run = torch.compile(forward) if compiled else forward

    def step() -> float:
        w.grad = b.grad = None
        loss = run()
        loss.backward()
        return float(loss.detach())

    return step


def jax_step():
    import jax
    import jax.numpy as jnp

    x, w, b = (jnp.asarray(value) for value in data().values())

    def loss_of(w, b):
        y = jnp.tanh(x * w + b) * x + x * 0.5
        return jnp.mean(y * y)

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))

    def step() -> float:
        loss, gradients = run(w, b)
        jax.block_until_ready(gradients)
        return float(loss)

    return step
