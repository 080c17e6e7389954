"""RWKV-7 (Peng et al., 2025, https://arxiv.org/abs/2503.14456) as GGUF files have it.

Its state of each head is a matrix that decays, is corrected along one direction and takes up one product a token;
tokens besides see the one just before.
"""

from __future__ import annotations

from .. import ops
from ..core.errors import FormatError
from ..core.tensor import Tensor
from .builder import Builder
from .recurrent import keep, state

_DECAY = -0.606531  # -exp(-1/2), as the files' own programs round it
_HEAD_EPS = 64e-5  # of the norm over each head


def rwkv7(b: Builder, x: Tensor) -> Tensor:
    """Blocks that mix tokens, and then channels."""
    x = b.norm("token_embd_norm", x, "layer")
    first: Tensor | None = None  # values of the first block, of which later ones take a part
    for i in range(b.config.layers):
        n = f"blk.{i}."
        mixed, first = _tokens_mixed(b, i, b.norm(n + "attn_norm", x, "layer"), first)
        x = x + mixed
        h = b.norm(n + "attn_norm_2", x, "layer")
        back = _before(b, f"channels {i}", h) - h
        k = h + back * b.vector(n + "channel_mix_lerp_k.weight", b.config.width)
        k = ops.sqr(ops.relu(b.product(n + "channel_mix_key", k)))
        x = x + b.product(n + "channel_mix_value", k, b.config.width)
        b.blocks.append(x)
    return b.norm("output_norm", x, "layer")


def _tokens_mixed(b: Builder, i: int, h: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    m, n, width = b.config.extra, f"blk.{i}.time_mix_", b.config.width
    assert m is not None
    size = m.count("wkv.head_size")
    if width % size:
        raise FormatError(f"{m.path}: a width of {width} has no heads of {size}")
    batch, length, _ = h.shape
    gated = b.has(n + "g1.weight")
    kinds = 6 if gated else 5
    back = _before(b, f"tokens {i}", h) - h
    shares = b.vector(n + "lerp_fused.weight", kinds * width).reshape(kinds, width)
    xs = [h + back * shares[j] for j in range(kinds)]

    def vector(name: str) -> Tensor:
        return b.vector(f"{n}{name}.weight", width)

    def narrow(name: str, x: Tensor) -> Tensor:
        """By way of a few channels, and shifted."""
        return b.product(n + name + "2", b.product(n + name + "1", x), width) + vector(name + "0")

    r = b.product(n + "receptance", xs[0], width)
    w = b.product(n + "w2", ops.tanh(b.product(n + "w1", xs[1])), width) + vector("w0")
    w = ops.exp(ops.sigmoid(w) * _DECAY)
    k, v = b.product(n + "key", xs[2], width), b.product(n + "value", xs[3], width)
    if first is None:
        first = v
    else:
        v = v + (first - v) * ops.sigmoid(narrow("v", xs[3]))
    a = ops.sigmoid(narrow("a", xs[4]))
    heads = (batch, length, width // size, size)
    kk = ops.l2_norm((k * vector("k_k")).reshape(heads), eps=1e-12)
    ka = k * vector("k_a")
    k = k + (a * ka - ka)
    r, w, k, v4, a = (t.reshape(heads) for t in (r, w, k, v, a))
    before = state(b, f"wkv {i}", (batch, width // size, size, size))
    y, after = ops.delta_scan(r, w, k, v4, before, -kk, kk * a)
    keep(b, f"wkv {i}", after)
    y = ops.norm(y, eps=_HEAD_EPS).reshape(batch, length, width) * vector("ln") + b.vector(n + "ln.bias", width)
    weight = ops.sum(k * r * vector("r_k").reshape(width // size, size), axis=3, keepdims=True)
    y = y + (v4 * weight).reshape(batch, length, width)
    if gated:
        y = y * b.product(n + "g2", ops.sigmoid(b.product(n + "g1", xs[5])), width)
    return b.product(n + "output", y, width), first


def _before(b: Builder, name: str, x: Tensor) -> Tensor:
    """x[batch, tokens, width] one token later."""
    last = state(b, name, (x.shape[0], 1, x.shape[2]))
    before = ops.cont(last) if x.shape[1] == 1 else ops.concat(last, x[:, :-1, :], axis=1)
    keep(b, name, x[:, x.shape[1] - 1 :, :])  # only now: what was kept before is read above
    return before
