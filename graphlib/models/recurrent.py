"""State-space models: Mamba (Gu and Dao, 2023, https://arxiv.org/abs/2312.00752) and Mamba 2 (Dao and Gu, 2024,
https://arxiv.org/abs/2405.21060), as GGUF files have them.

They remember what a convolution and a scan carry from token to token.
"""

from __future__ import annotations

import numpy as np

from .. import ops
from ..core.errors import FormatError
from ..core.tensor import Tensor, tensor
from .builder import Builder


def mamba(b: Builder, x: Tensor) -> Tensor:
    """Blocks of a gated scan in which every channel is a head of its own."""
    for i in range(b.config.layers):
        x = x + _mamba_block(b, i, b.norm(f"blk.{i}.attn_norm", x))
        b.blocks.append(x)
    return b.norm("output_norm", x)


def mamba2(b: Builder, x: Tensor) -> Tensor:
    """Blocks of a gated scan with heads and groups, normalized after the gate."""
    for i in range(b.config.layers):
        x = x + _mamba2_block(b, i, b.norm(f"blk.{i}.attn_norm", x))
        b.blocks.append(x)
    return b.norm("output_norm", x)


def _mamba_block(b: Builder, i: int, h: Tensor) -> Tensor:
    m, n = b.config.extra, f"blk.{i}."
    assert m is not None
    inner, size, rank = m.count("ssm.inner_size"), m.count("ssm.state_size"), m.count("ssm.time_step_rank")
    batch, length, _ = h.shape
    both = b.product(n + "ssm_in", h, 2 * inner)
    u, gate = both[..., :inner], both[..., inner:]
    u = ops.silu(_convolved(b, i, u))
    parts = b.product(n + "ssm_x", u, rank + 2 * size)
    dt, B, C = parts[..., :rank], parts[..., rank : rank + size], parts[..., rank + size :]
    if m.flag("ssm.dt_b_c_rms"):
        dt, B, C = (ops.rms_norm(t, eps=b.config.eps) for t in (dt, B, C))
    dt = b.product(n + "ssm_dt", dt, inner)
    y = _scan(b, i, u.reshape(batch, length, inner, 1), dt, B, C, heads=inner, groups=1, size=size, columns=size)
    y = y.reshape(batch, length, inner) + u * b.vector(n + "ssm_d", inner)
    return b.product(n + "ssm_out", y * ops.silu(gate), b.config.width)


def _mamba2_block(b: Builder, i: int, h: Tensor) -> Tensor:
    m, n = b.config.extra, f"blk.{i}."
    assert m is not None
    inner, size = m.count("ssm.inner_size"), m.count("ssm.state_size")
    heads, groups = m.count("ssm.time_step_rank"), m.count("ssm.group_count")
    if inner % heads or inner % groups or heads % groups:
        raise FormatError(f"{m.path}: {inner} channels, {heads} heads and {groups} groups do not divide one another")
    batch, length, _ = h.shape
    mixed = inner + 2 * groups * size
    parts = b.product(n + "ssm_in", h, inner + mixed + heads)
    gate, xbc, dt = parts[..., :inner], parts[..., inner : inner + mixed], parts[..., inner + mixed :]
    dt = dt + b.vector(n + "ssm_dt.bias", heads)
    xbc = ops.silu(_convolved(b, i, xbc))
    u, B, C = xbc[..., :inner], xbc[..., inner : inner + groups * size], xbc[..., inner + groups * size :]
    u = u.reshape(batch, length, heads, inner // heads)
    y = _scan(b, i, u, dt, B, C, heads=heads, groups=groups, size=size, columns=1)
    y = (y + u * b.vector(n + "ssm_d", heads).reshape(heads, 1)).reshape(batch, length, inner) * ops.silu(gate)
    parted = ops.rms_norm(y.reshape(batch, length, groups, inner // groups), eps=b.config.eps)
    y = parted.reshape(batch, length, inner) * b.vector(n + "ssm_norm.weight", inner)
    return b.product(n + "ssm_out", y, b.config.width)


def _convolved(b: Builder, i: int, x: Tensor) -> Tensor:
    """Each channel of x[batch, tokens, channels] with the tokens just before, and a bias."""
    n = f"blk.{i}.ssm_conv1d"
    batch, _, channels = x.shape
    kernel = b.weights[n + ".weight"]
    if kernel.ndim != 2 or kernel.shape[0] != channels:
        raise FormatError(f"{b.weights.file.path}: tensor {kernel.name!r} is {kernel.shape}, not [{channels}, any]")
    before = kernel.shape[1] - 1
    columns = x.permute(0, 2, 1)
    if before:
        columns = ops.concat(state(b, f"conv {i}", (batch, channels, before)), columns, axis=2)
        keep(b, f"conv {i}", columns[:, :, columns.shape[2] - before :])
    return ops.ssm_conv(columns, kernel) + b.vector(n + ".bias", channels)


def _scan(b: Builder, i, u, dt, B, C, *, heads: int, groups: int, size: int, columns: int) -> Tensor:
    """[batch, tokens, heads, head_dim]"""
    batch, length, _, head_dim = u.shape
    A = b.weights[f"blk.{i}.ssm_a"]
    if A.size != heads * columns:
        raise FormatError(f"{b.weights.file.path}: tensor {A.name!r} is {A.shape}, and must be [{heads}, {columns}]")
    B, C = (t.reshape(batch, length, groups, size) for t in (B, C))
    before = state(b, f"scan {i}", (batch, heads, head_dim, size))
    y, last = ops.ssm_scan(before, u, dt, A.reshape(heads, columns), B, C)
    keep(b, f"scan {i}", last)
    return y


def state(b: Builder, name: str, shape: tuple[int, ...]) -> Tensor:
    """What was there after the tokens before: zeros without a memory."""
    if b.memory is None:
        return ops.broadcast_to(tensor(0.0), shape=shape)
    return b.memory.leaf(name, (1, int(np.prod(shape)))).reshape(shape)


def keep(b: Builder, name: str, value: Tensor) -> None:
    """Let it be what `state` gives to the run after this one."""
    if b.memory is not None:
        row = tensor(np.zeros(1, np.int32), name="the only row")
        b.updates.append(ops.assign_rows(b.memory.leaves[name], value.reshape(1, value.size), row))
