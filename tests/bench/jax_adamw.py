"""AdamW with decoupled weight decay in JAX, which has no optimizer of its own."""

from collections.abc import Callable

import numpy as np


def training_step(
    loss_of: Callable,
    parameters: dict[str, np.ndarray],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> Callable[[], float]:
    """A function that makes one compiled step and returns the loss; `loss_of` takes the parameters."""
    import functools

    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(p, m, v, t):
        loss, g = jax.value_and_grad(loss_of)(p)
        first, second = 1 - betas[0] ** t, 1 - betas[1] ** t
        m = jax.tree.map(lambda m, g: betas[0] * m + (1 - betas[0]) * g, m, g)
        v = jax.tree.map(lambda v, g: betas[1] * v + (1 - betas[1]) * g * g, v, g)
        p = jax.tree.map(lambda p, m, v: p - lr * ((m / first) / (jnp.sqrt(v / second) + eps) + decay * p), p, m, v)
        return p, m, v, loss

    start = {name: jnp.asarray(value) for name, value in parameters.items()}
    state = [start, jax.tree.map(jnp.zeros_like, start), jax.tree.map(jnp.zeros_like, start)]
    count = [0]

    def step() -> float:
        count[0] += 1
        *state[:], loss = update(*state, jnp.float32(count[0]))
        return float(loss)

    return step
