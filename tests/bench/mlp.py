"""One network of two linear layers, three engines: the same parameters, data and optimizer in ggrad, torch and JAX."""

import numpy as np
from jax_adamw import training_step

SIZES, BATCH = (784, 500, 10), 500
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
FLOPS = 2.0 * BATCH * (2 * SIZES[0] * SIZES[1] + 3 * SIZES[1] * SIZES[2])  # the data need no gradient


def parameters() -> dict[str, np.ndarray]:
    """Matrices are [out, in]."""
    rng = np.random.default_rng(0)
    into, hidden, out = SIZES
    return {
        "w1": (rng.standard_normal((hidden, into)) / np.sqrt(into)).astype(np.float32),
        "b1": np.zeros(hidden, np.float32),
        "w2": (rng.standard_normal((out, hidden)) / np.sqrt(hidden)).astype(np.float32),
        "b2": np.zeros(out, np.float32),
    }


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((BATCH, SIZES[0]), dtype=np.float32), rng.integers(0, SIZES[2], BATCH).astype(np.int32)


def ggrad_step(threads: int):
    """A function that makes one training step and returns the loss."""
    import ggrad as gg

    p = {name: gg.tensor(value, name=name, param=True) for name, value in parameters().items()}
    x, y = (gg.tensor(array) for array in data())
    hidden = gg.relu(gg.mul_mat(p["w1"], x) + p["b1"])
    loss = gg.cross_entropy_loss(gg.mul_mat(p["w2"], hidden) + p["b2"], y)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(keep=False)
    optimizer = gg.AdamW(list(p.values()), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer.build(graph)

    def step() -> float:
        graph.compute(threads=threads)
        optimizer.step()
        return loss.item()

    return step


def torch_step(threads: int):
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    p = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in parameters().items()}
    x, y = data()
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
    optimizer = torch.optim.AdamW(p.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(F.linear(F.relu(F.linear(inputs, p["w1"], p["b1"])), p["w2"], p["b2"]), targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def jax_step():
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(array) for array in data())

    def loss_of(p):
        hidden = jax.nn.relu(x @ p["w1"].T + p["b1"])
        logp = jax.nn.log_softmax(hidden @ p["w2"].T + p["b2"])
        return -jnp.mean(jnp.take_along_axis(logp, y[:, None], -1))

    return training_step(loss_of, parameters(), lr=LR, betas=BETAS, eps=EPS, decay=DECAY)
