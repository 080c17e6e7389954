"""One GPT, three engines: the same parameters, data and optimizer in ggrad, torch and JAX.

Token and position embeddings, blocks of RMSNorm, fused qkv, causal attention, output product, RMSNorm and SwiGLU
(gate and up in one matrix), a last RMSNorm and an untied head; AdamW with decoupled weight decay on everything.
"""

from dataclasses import dataclass

import numpy as np
from jax_adamw import training_step

EPS = 1e-6  # of RMSNorm
LR, BETAS, ADAM_EPS, DECAY = 3e-4, (0.9, 0.999), 1e-8, 0.1


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    hidden: int

    @property
    def flops(self) -> float:
        """Of a training step: three times the products, 3.5 times the causal attention."""
        tokens = self.batch * self.context
        linear = (
            2
            * tokens
            * (self.layers * (4 * self.width**2 + 3 * self.width * self.hidden) + self.width * self.vocabulary)
        )
        attention = self.layers * 4 * self.batch * self.context**2 * self.width * 0.5
        return 3 * linear + 3.5 * attention


TINY = Config(layers=2, width=64, heads=4, context=64, batch=8, vocabulary=96, hidden=176)
SMALL = Config(layers=4, width=256, heads=8, context=256, batch=4, vocabulary=256, hidden=688)


def parameters(c: Config) -> dict[str, np.ndarray]:
    """Matrices are [out, in], as torch's Linear and ggml's mul_mat have them."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (0.02 * rng.standard_normal(shape)).astype(np.float32)

    p = {"tokens": normal(c.vocabulary, c.width), "positions": normal(c.context, c.width)}
    for i in range(c.layers):
        p[f"{i}.norm1"] = np.ones(c.width, np.float32)
        p[f"{i}.qkv"] = normal(3 * c.width, c.width)
        p[f"{i}.out"] = normal(c.width, c.width)
        p[f"{i}.norm2"] = np.ones(c.width, np.float32)
        p[f"{i}.up"] = normal(2 * c.hidden, c.width)
        p[f"{i}.down"] = normal(c.width, c.hidden)
    p["norm"] = np.ones(c.width, np.float32)
    p["head"] = normal(c.vocabulary, c.width)
    return p


def data(c: Config) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    shape = (c.batch, c.context)
    return rng.integers(0, c.vocabulary, shape).astype(np.int32), rng.integers(0, c.vocabulary, shape).astype(np.int32)


def ggrad_step(c: Config, threads: int, *, gradient_checkpoints: bool = False, comm=None, shard: bool = False):
    """A function that makes one training step and returns the loss; with a checkpoint after each block, or none.

    With a group of ranks each has a batch, and the step is that of the mean loss.
    """
    import ggrad as gg

    p = {name: gg.tensor(value, name=name, param=True) for name, value in parameters(c).items()}
    ids, targets = (gg.tensor(x) for x in data(c))
    d = c.width // c.heads
    x = gg.get_rows(p["tokens"], ids) + p["positions"]
    blocks = []
    for i in range(c.layers):
        qkv = gg.mul_mat(p[f"{i}.qkv"], gg.rms_norm(x, p[f"{i}.norm1"], eps=EPS))
        q, k, v = (
            qkv[..., j * c.width : (j + 1) * c.width].reshape(c.batch, c.context, c.heads, d).permute(0, 2, 1, 3)
            for j in range(3)
        )
        seen = gg.flash_attn_ext(q, k, v, causal="top-left")
        x = x + gg.mul_mat(p[f"{i}.out"], seen.reshape(c.batch, c.context, c.width))
        gate_up = gg.mul_mat(p[f"{i}.up"], gg.rms_norm(x, p[f"{i}.norm2"], eps=EPS))
        x = x + gg.mul_mat(p[f"{i}.down"], gg.swiglu(gate_up))
        blocks.append(x)
    logits = gg.mul_mat(p["head"], gg.rms_norm(x, p["norm"], eps=EPS))
    loss = gg.cross_entropy_loss(logits, targets)

    graph = gg.Graph().build_forward_expand(loss)
    several = comm is not None and comm.size > 1
    graph.build_backward_expand(
        seed=gg.tensor(1 / comm.size) if several else None, accumulate=several,
        keep=False, gradient_checkpoints=blocks if gradient_checkpoints else (),
    )  # fmt: skip
    optimizer = gg.AdamW(list(p.values()), lr=LR, betas=BETAS, eps=ADAM_EPS, weight_decay=DECAY)
    update = optimizer.build(graph, comm=comm, shard=shard)

    def step() -> float:
        graph.compute(threads=threads)
        if update is not graph:
            update.compute(threads=threads)
            graph.reset()
        optimizer.step()
        return loss.item()

    step.graph, step.optimizer = graph, optimizer
    return step


def torch_step(c: Config, threads: int, *, compiled: bool = False, distributed: bool = False):
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    p = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in parameters(c).items()}
    ids, targets = (torch.from_numpy(x.astype(np.int64)) for x in data(c))
    optimizer = torch.optim.AdamW(p.values(), lr=LR, betas=BETAS, eps=ADAM_EPS, weight_decay=DECAY, fused=True)

    def forward():
        x = F.embedding(ids, p["tokens"]) + p["positions"]
        for i in range(c.layers):
            h = F.linear(F.rms_norm(x, (c.width,), p[f"{i}.norm1"], EPS), p[f"{i}.qkv"])
            q, k, v = h.view(c.batch, c.context, 3, c.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(seen.transpose(1, 2).reshape(c.batch, c.context, c.width), p[f"{i}.out"])
            gate, up = F.linear(F.rms_norm(x, (c.width,), p[f"{i}.norm2"], EPS), p[f"{i}.up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, p[f"{i}.down"])
        logits = F.linear(F.rms_norm(x, (c.width,), p["norm"], EPS), p["head"])
        return F.cross_entropy(logits.view(-1, c.vocabulary), targets.view(-1))

    run = torch.compile(forward) if compiled else forward
    if distributed:

        class Whole(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name, value in p.items():
                    self.register_parameter(name.replace(".", " "), value)

            def forward(self):
                return forward()

        run = torch.nn.parallel.DistributedDataParallel(Whole())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = run()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def jax_step(c: Config):
    import jax
    import jax.numpy as jnp

    ids, targets = (jnp.asarray(x) for x in data(c))
    mask = jnp.tril(jnp.ones((c.context, c.context), bool))

    def rms_norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weight

    def loss_of(p):
        x = p["tokens"][ids] + p["positions"]
        for i in range(c.layers):
            h = rms_norm(x, p[f"{i}.norm1"]) @ p[f"{i}.qkv"].T
            q, k, v = jnp.moveaxis(h.reshape(c.batch, c.context, 3, c.heads, -1), 2, 0)
            s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, s, -1e30), -1), v)
            x = x + seen.reshape(x.shape) @ p[f"{i}.out"].T
            gate, up = jnp.split(rms_norm(x, p[f"{i}.norm2"]) @ p[f"{i}.up"].T, 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ p[f"{i}.down"].T
        logp = jax.nn.log_softmax(rms_norm(x, p["norm"]) @ p["head"].T)
        return -jnp.mean(jnp.take_along_axis(logp, targets[..., None], -1))

    return training_step(loss_of, parameters(c), lr=LR, betas=BETAS, eps=ADAM_EPS, decay=DECAY)
