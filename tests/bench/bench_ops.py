"""Ops with a known peer, forward and with their gradients, beside torch's and, where it is installed, ggml's.

    python tests/bench/bench_ops.py [--seconds 1] [--threads 2] [--only conv_2d,pool_2d,...] [--cpu]
                                     [--save FILE]

Needs the `bench` extra.  One process, interleaved calls, medians, ratios; everything in f32.  Torch has no scan of its
own: its contestant runs the recurrence token by token.  ggml is that of the package libggml-python, by ctypes.
Where other programs run, --cpu tells more: processor time, everybody on one thread.
"""

import ctypes
import os
import time
from collections.abc import Callable

# isort: off
import harness  # before NumPy: it mends the environment
import numpy as np
import torch
from ggml_peer import Ggml, ggml_or_none

import ggrad as gg
# isort: on

F = torch.nn.functional
RNG = np.random.default_rng(0)
Contestants = dict[str, Callable[[], object]]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ours(build, inputs: list[np.ndarray], constants=(), threads: int = 2) -> tuple[Callable, Callable]:
    """Two calls: forward, and with the gradients by all inputs of a weighted sum of the first result."""
    leaves = [gg.tensor(x) for x in inputs]
    first = build(*leaves, *constants)
    forward = gg.Graph().build_forward_expand(*(first if isinstance(first, tuple) else (first,)))
    params = [gg.tensor(x, param=True) for x in inputs]
    made = build(*params, *constants)
    out = made[0] if isinstance(made, tuple) else made
    both = gg.Graph().build_backward_expand(gg.sum(out * gg.tensor(np.ones(out.shape, np.float32))))
    return lambda: forward.compute(threads=threads), lambda: both.compute(threads=threads)


def torchs(build, inputs: list[np.ndarray]) -> tuple[Callable, Callable]:
    leaves = [torch.from_numpy(x) for x in inputs]
    params = [torch.from_numpy(x).requires_grad_() for x in inputs]

    def forward():
        with torch.no_grad():
            return build(*leaves)

    weights = torch.ones_like(forward())

    def both():
        for p in params:
            p.grad = None
        (build(*params) * weights).sum().backward()

    return forward, both


def contest(ours, torchs, ggml_forward: Callable | None = None) -> list[tuple[str, Contestants]]:
    """Both calls of each; ggml has no gradients of most ops."""
    forward: Contestants = {"ggrad": ours[0], "torch": torchs[0]} | ({"ggml": ggml_forward} if ggml_forward else {})
    return [("forward", forward), ("and gradients", {"ggrad": ours[1], "torch": torchs[1]})]


def simple(build, torch_build, *shapes, in_ggml: tuple = ()):
    """`in_ggml`: the name of its function, and the arguments behind the inputs."""

    def contestants(threads: int, ggml: Ggml | None) -> list[tuple[str, Contestants]]:
        inputs = [normal(*shape) for shape in shapes]
        name, *more = in_ggml or (None,)
        peer = ggml.forward(name, threads, *inputs, more=tuple(more)) if ggml is not None and name else None
        return contest(ours(build, inputs, threads=threads), torchs(torch_build, inputs), peer)

    return contestants


def mul_mat(threads: int, ggml: Ggml | None):
    """A weight of f32, 1024 x 1024, and 512 rows; the peer's gradients are two outer products."""
    w, x = normal(1024, 1024), normal(512, 1024)
    a = ours(gg.mul_mat, [w, x], threads=threads)
    b = torchs(lambda w, x: x @ w.T, [w, x])
    both: Contestants = {"ggrad": a[1], "torch": b[1]}
    forward: Contestants = {"ggrad": a[0], "torch": b[0]}
    if ggml is not None:
        tw, tx = ggml.tensor(1024, 1024, 0, w), ggml.tensor(512, 1024, 0, x)
        forward["ggml"] = ggml.graph(ggml.pointer("mul_mat", ggml.context, tw, tx), threads)
        for t in (tw, tx):
            ggml.call("set_param", None, t)
        loss = ggml.pointer("sum", ggml.context, ggml.pointer("mul_mat", ggml.context, tw, tx))
        both["ggml"] = ggml.graph(loss, threads, backward=True)
    return [("forward", forward), ("and gradients", both)]


def mul_mat_q4_0(rows: int):
    def contestants(threads: int, ggml: Ggml | None):
        """A quantized weight, 2048 x 2048; torch has it as f32."""
        w, x = normal(2048, 2048), normal(rows, 2048)
        blocks = gg.quantize(w, gg.Q4_0)
        weight = gg.tensor(blocks, dtype=gg.Q4_0)
        a = ours(lambda x: gg.mul_mat(weight, x), [x], threads=threads)
        whole = torch.from_numpy(gg.dequantize(blocks, gg.Q4_0))
        b = torchs(lambda x: x @ whole.T, [x])
        forward: Contestants = {"ggrad": a[0], "torch, f32": b[0]}
        both: Contestants = {"ggrad": a[1], "torch, f32": b[1]}
        if ggml is not None:
            tw, tx = ggml.tensor(2048, 2048, 2, blocks), ggml.tensor(rows, 2048, 0, x)
            forward["ggml"] = ggml.graph(ggml.pointer("mul_mat", ggml.context, tw, tx), threads)
            ggml.call("set_param", None, tx)
            loss = ggml.pointer("sum", ggml.context, ggml.pointer("mul_mat", ggml.context, tw, tx))
            both["ggml"] = ggml.graph(loss, threads, backward=True)
        return [("forward", forward), ("and gradients", both)]

    return contestants


def mul_mat_id(threads: int, ggml: Ggml | None):
    """8 experts of 512 x 512, 2 of them for each of 512 tokens; torch goes from expert to expert."""
    experts, x, ids = normal(8, 512, 512), normal(512, 1, 512), RNG.integers(0, 8, (512, 2))
    a = ours(lambda w, x: gg.mul_mat_id(w, x, gg.tensor(ids)), [experts, x], threads=threads)
    chosen = [torch.from_numpy(np.argwhere(ids == e)) for e in range(8)]

    def build(w, x):
        out = torch.zeros(512, 2, 512)
        for e, at in enumerate(chosen):
            out = out.index_put((at[:, 0], at[:, 1]), x[at[:, 0], 0] @ w[e].T)
        return out

    peer = None
    if ggml is not None:
        peer = ggml.forward("mul_mat_id", threads, experts, x, ids.astype(np.int32))
    return contest(a, torchs(build, [experts, x]), peer)


def rope(threads: int, ggml: Ggml | None):
    x, positions = normal(512, 16, 64), np.arange(512)
    a = ours(lambda x: gg.rope(x, gg.tensor(positions), mode="neox"), [x], threads=threads)
    angle = torch.from_numpy(positions[:, None] * 10000.0 ** (-np.arange(32) / 32)).float()[:, None]
    cos, sin = angle.cos(), angle.sin()

    def build(x):
        first, second = x[..., :32], x[..., 32:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    peer = None
    if ggml is not None:
        neox = (ctypes.c_int(64), ctypes.c_int(2))
        peer = ggml.forward("rope", threads, x, positions.astype(np.int32), more=neox)
    return contest(a, torchs(build, [x]), peer)


def cross_entropy(threads: int, ggml: Ggml | None):
    logits, classes = normal(1024, 8192), RNG.integers(0, 8192, 1024)
    a = ours(lambda x: gg.cross_entropy_loss(x, gg.tensor(classes)), [logits], threads=threads)
    wanted = torch.from_numpy(classes)
    return contest(a, torchs(lambda x: F.cross_entropy(x, wanted), [logits]))


def wkv7(threads: int, ggml: Ggml | None):
    """128 tokens, 8 heads of 64."""
    inputs = [normal(128, 8, 64) / 8 for _ in range(6)]
    inputs[1] = RNG.uniform(0.8, 1, (128, 8, 64)).astype(np.float32)
    state = normal(1, 8, 64, 64)
    a = ours(lambda *args: gg.rwkv_wkv7(*args)[0], [*inputs, state], threads=threads)

    def build(r, w, k, v, a, b, s):
        s, ys = s[0], []
        for t in range(128):
            sa = (s @ a[t, :, :, None]) * b[t, :, None]
            s = s * w[t, :, None] + v[t, :, :, None] * k[t, :, None] + sa
            ys.append((s @ r[t, :, :, None])[..., 0])
        return torch.stack(ys)

    peer = ggml and ggml.forward("rwkv_wkv7", threads, *inputs, state.reshape(1, -1))
    return contest(a, torchs(build, [*inputs, state]), peer)


def ssm_scan(heads: int, elements: int, state: int, columns: int):
    def contestants(threads: int, ggml: Ggml | None):
        """128 tokens, one group."""
        shapes = [
            (1, heads, elements, state), (1, 128, heads, elements), (1, 128, heads), (heads, columns),
            (1, 128, 1, state), (1, 128, 1, state),
        ]  # fmt: skip
        inputs = [normal(*shape) for shape in shapes]
        inputs[3] = -np.abs(inputs[3])
        a = ours(lambda *args: gg.ssm_scan(*args)[0], inputs, threads=threads)

        def build(s, x, dt, A, B, C):
            s, ys, step = s[0], [], F.softplus(dt[0])
            for t in range(128):
                decay = torch.exp(step[t, :, None] * A)[:, None]
                s = s * decay + (x[0, t] * step[t, :, None])[..., None] * B[0, t, 0]
                ys.append(s @ C[0, t, 0])
            return torch.stack(ys)

        peer = ggml and ggml.forward("ssm_scan", threads, *inputs, np.zeros(1, np.int32), more=(ctypes.c_int64(1),))
        return contest(a, torchs(build, inputs), peer)

    return contestants


CASES = {
    "mul_mat": mul_mat,
    "mul_mat q4_0 with 512 rows": mul_mat_q4_0(512),
    "mul_mat q4_0 with 1 row": mul_mat_q4_0(1),
    "mul_mat_id": mul_mat_id,
    "conv_2d 3x3, 64 to 64 channels, 8 images of 28 x 28": simple(
        lambda k, x: gg.conv_2d(k, x, padding=1), lambda k, x: F.conv2d(x, k, padding=1),
        (64, 64, 3, 3), (8, 64, 28, 28),
    ),
    "conv_2d 3x3 stride 2, 3 to 32 channels, 8 images of 112 x 112": simple(
        lambda k, x: gg.conv_2d(k, x, stride=2, padding=1), lambda k, x: F.conv2d(x, k, stride=2, padding=1),
        (32, 3, 3, 3), (8, 3, 112, 112),
    ),
    "conv_2d_dw 3x3, 64 channels, 8 images of 28 x 28": simple(
        lambda k, x: gg.conv_2d_dw(k, x, padding=1), lambda k, x: F.conv2d(x, k, padding=1, groups=64),
        (64, 1, 3, 3), (8, 64, 28, 28),
    ),
    "im2col 3x3, 64 channels, 8 images of 28 x 28": simple(
        lambda x: gg.im2col(x, (3, 3), padding=1), lambda x: F.unfold(x, 3, padding=1), (8, 64, 28, 28)
    ),
    "pool_2d max 2x2": simple(
        lambda x: gg.pool_2d(x, mode="max", kernel=(2, 2), stride=(2, 2)), lambda x: F.max_pool2d(x, 2),
        (8, 64, 56, 56),
        in_ggml=("pool_2d", *map(ctypes.c_int, (0, 2, 2, 2, 2)), ctypes.c_float(0), ctypes.c_float(0)),
    ),
    "pool_2d avg 2x2": simple(
        lambda x: gg.pool_2d(x, mode="avg", kernel=(2, 2), stride=(2, 2)), lambda x: F.avg_pool2d(x, 2),
        (8, 64, 56, 56),
        in_ggml=("pool_2d", *map(ctypes.c_int, (1, 2, 2, 2, 2)), ctypes.c_float(0), ctypes.c_float(0)),
    ),
    "interpolate, bilinear": simple(
        lambda x: gg.interpolate(x, size=(56, 56), mode="bilinear"),
        lambda x: F.interpolate(x, size=(56, 56), mode="bilinear"), (8, 64, 28, 28),
    ),
    "norm": simple(
        lambda x: gg.norm(x, eps=1e-5), lambda x: F.layer_norm(x, (768,)), (2048, 768),
        in_ggml=("norm", ctypes.c_float(1e-5)),
    ),
    "rms_norm": simple(
        lambda x: gg.rms_norm(x, eps=1e-5), lambda x: F.rms_norm(x, (768,), eps=1e-5), (2048, 768),
        in_ggml=("rms_norm", ctypes.c_float(1e-5)),
    ),
    "soft_max": simple(gg.soft_max, lambda x: x.softmax(-1), (4096, 512), in_ggml=("soft_max",)),
    "rope": rope,
    "cross_entropy_loss": cross_entropy,
    "ssm_scan, Mamba 1, 512 channels, states of 16": ssm_scan(512, 1, 16, 16),
    "ssm_scan, Mamba 2, 8 heads of 64, states of 64": ssm_scan(8, 64, 64, 1),
    "rwkv_wkv7": wkv7,
}  # fmt: skip


def main() -> None:
    arguments = harness.parser(__doc__, seconds=1, only="")
    arguments.add_argument("--cpu", action="store_true", help="processor time on one thread")
    options = arguments.parse_args()
    options.threads = 1 if options.cpu else options.threads
    clock = time.process_time if options.cpu else time.perf_counter
    torch.set_num_threads(options.threads)
    ggml, wanted = ggml_or_none(), tuple(options.only.split(","))
    print(f"{gg.show_config()}\ntorch {torch.__version__}, {options.threads} threads, {os.cpu_count()} cores")
    for name, contestants in CASES.items():
        if name.startswith(wanted):
            for what, calls in contestants(options.threads, ggml):
                harness.table(f"{name}: {what}", harness.interleave(calls, seconds=options.seconds, clock=clock))
    harness.save(options.save)


if __name__ == "__main__":
    main()
