"""What ATen's ops are in ggrad: a function of the same arguments for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import ops
from ..core.dtype import F32, I32
from ..core.errors import ShapeError
from ..core.tensor import Tensor, tensor

TABLE: dict[str, Callable[..., Any]] = {}


def aten(*names: str) -> Callable[[Callable], Callable]:
    """Enter a function under the names of ATen's ops; its first argument is who asks."""

    def entered(function: Callable) -> Callable:
        TABLE.update((name, function) for name in names)
        return function

    return entered


def _axis(x: Tensor, axis: int) -> int:
    return axis % max(1, x.ndim)


def _pair(x: int | Sequence[int]) -> tuple[int, int]:
    given = (x, x) if isinstance(x, int) else tuple(x)
    return (given[0], given[-1]) if given else (1, 1)


# -- elementwise ----------------------------------------------------------------------------------------------

for _name, _op in {
    "relu": ops.relu, "silu": ops.silu, "sigmoid": ops.sigmoid, "tanh": ops.tanh, "exp": ops.exp, "log": ops.log,
    "neg": ops.neg, "sqrt": ops.sqrt, "rsqrt": ops.rsqrt, "abs": ops.abs, "sin": ops.sin, "cos": ops.cos,
    "log1p": ops.log1p, "erf": ops.erf,
}.items():  # fmt: skip
    TABLE[_name] = lambda call, x, op=_op: op(x)

for _name, _two in {
    "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "pow": ops.pow, "maximum": ops.maximum,
    "minimum": ops.minimum, "matmul": ops.matmul, "bmm": ops.matmul, "mm": ops.matmul,
}.items():  # fmt: skip
    TABLE[_name] = lambda call, a, b, op=_two: op(a, b)

for _name in ("contiguous", "clone", "detach", "alias", "lift_fresh_copy"):
    TABLE[_name] = lambda call, x, **_: x

for _name, _compare in {
    "eq": ops.equal, "ne": ops.not_equal, "lt": ops.less, "le": ops.less_equal, "gt": ops.greater,
    "ge": ops.greater_equal, "logical_and": ops.logical_and, "logical_or": ops.logical_or,
}.items():  # fmt: skip
    TABLE[_name] = lambda call, a, b, op=_compare: op(a, b)


@aten("add")
def _(call, a, b, alpha=1):
    return a + (b if alpha == 1 else b * alpha)


@aten("sub")
def _(call, a, b, alpha=1):
    return a - (b if alpha == 1 else b * alpha)


@aten("rsub")
def _(call, a, b, alpha=1):
    return b - (a if alpha == 1 else a * alpha)


@aten("gelu")
def _(call, x, approximate="none"):
    return ops.gelu_erf(x) if approximate == "none" else ops.gelu(x)


@aten("softplus")
def _(call, x, beta=1.0, threshold=20.0):  # from where on torch takes x itself, which is the same in f32
    return ops.softplus(x) if beta == 1 else ops.softplus(x * beta) / beta


@aten("leaky_relu")
def _(call, x, slope=0.01):
    return ops.leaky_relu(x, negative_slope=slope)


@aten("clamp", "hardtanh")
def _(call, x, low=-1.0, high=1.0):
    return ops.clamp(x, min=-math.inf if low is None else low, max=math.inf if high is None else high)


@aten("clamp_min")
def _(call, x, low):
    return ops.clamp(x, min=low, max=math.inf)


@aten("relu6")
def _(call, x):
    return ops.clamp(x, min=0.0, max=6.0)


@aten("dropout", "native_dropout")
def _(call, x, p, train=True):
    return ops.dropout(x, call.rng, p=p) if train and p > 0 else x


@aten("where")
def _(call, condition, a, b):
    return ops.where(condition, a, b)


@aten("masked_fill")
def _(call, x, mask, value):
    return ops.masked_fill(x, mask, value)


@aten("to", "_to_copy", "type_as")
def _(call, x, *args, dtype=None, **_):
    given = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    if given is None:
        return x
    if given not in (torch.float32, torch.int64, torch.int32, torch.bool):
        raise ShapeError(f"from_torch(): a cast to {given}; f32 and integers are known")
    return ops.cast(x, dtype=F32 if given == torch.float32 else I32)


# -- shapes ---------------------------------------------------------------------------------------------------


@aten("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as")
def _(call, x, *args, **kwargs):
    return x  # whose shape becomes that which torch says


@aten("t")
def _(call, x):
    return ops.permute(x, axes=(1, 0)) if x.ndim == 2 else x


@aten("transpose")
def _(call, x, a, b):
    axes = list(range(x.ndim))
    axes[a], axes[b] = axes[b], axes[a]
    return ops.permute(x, axes=tuple(axes))


@aten("permute")
def _(call, x, axes):
    return ops.permute(x, axes=tuple(a % x.ndim for a in axes))


@aten("expand")
def _(call, x, shape, **_):
    wide = (1,) * (len(shape) - x.ndim) + x.shape
    sizes = tuple(have if want == -1 else want for have, want in zip(wide, shape, strict=True))
    return ops.broadcast_to(ops.reshape(x, wide), shape=sizes)


@aten("slice")
def _(call, x, axis=0, start=None, end=None, step=1):
    end = None if end is None or end >= x.shape[axis] else end
    return x[(slice(None),) * _axis(x, axis) + (slice(start, end, step),)]


@aten("select")
def _(call, x, axis, index):
    return x[(slice(None),) * _axis(x, axis) + (index,)]


@aten("split", "split_with_sizes")
def _(call, x, size, axis=0):
    axis = _axis(x, axis)
    n = x.shape[axis]
    sizes = [min(size, n - at) for at in range(0, n, size)] if isinstance(size, int) else list(size)
    ends = np.cumsum(sizes).tolist()
    return [x[(slice(None),) * axis + (slice(e - s, e),)] for s, e in zip(sizes, ends, strict=True)]


@aten("chunk")
def _(call, x, count, axis=0):
    return TABLE["split"](call, x, -(-x.shape[axis] // count), axis)


@aten("cat")
def _(call, xs, axis=0):
    return ops.concat(*xs, axis=_axis(xs[0], axis))


@aten("stack")
def _(call, xs, axis=0):
    axis %= xs[0].ndim + 1
    return ops.concat(*(ops.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in xs), axis=axis)


@aten("repeat")
def _(call, x, counts):
    wide = ops.reshape(x, (1,) * (len(counts) - x.ndim) + x.shape)
    return ops.repeat(wide, shape=tuple(n * c for n, c in zip(wide.shape, counts, strict=True)))


@aten("arange")
def _(call, *args, dtype=None, **_):
    return tensor(np.arange(*[a for a in args if isinstance(a, (int, float))]).astype(np.int32))


# -- sums -----------------------------------------------------------------------------------------------------


def _axes(axis: Any) -> Any:
    return None if axis is None or axis == [] else tuple(axis) if isinstance(axis, (list, tuple)) else axis


@aten("mean")
def _(call, x, axis=None, keepdim=False, **_):
    return ops.mean(x, _axes(axis), keepdims=keepdim)


@aten("sum")
def _(call, x, axis=None, keepdim=False, **_):
    return ops.sum(x, _axes(axis), keepdims=keepdim)


@aten("var")
def _(call, x, axis=None, correction=1, keepdim=False, **_):
    return ops.var(x, _axes(axis), correction=correction, keepdims=keepdim)


@aten("softmax", "_softmax")
def _(call, x, axis=-1, *_):
    return ops.softmax(x, axis=axis)


@aten("log_softmax", "_log_softmax")
def _(call, x, axis=-1, *_):
    return ops.log_softmax(x, axis=axis)


@aten("cumsum")
def _(call, x, axis, **_):
    return ops.cumsum(x, axis=axis)


# -- layers ---------------------------------------------------------------------------------------------------


@aten("linear")
def _(call, x, weight, bias=None):
    y = ops.mul_mat(weight, x)
    return y if bias is None else y + bias


@aten("addmm")
def _(call, bias, a, b):
    return ops.matmul(a, b) + bias


@aten("embedding")
def _(call, weight, ids, *_):
    rows = ops.get_rows(weight, ops.reshape(ids, (ids.size,)))
    return ops.reshape(rows, (*ids.shape, weight.shape[1]))


@aten("layer_norm")
def _(call, x, shape, weight=None, bias=None, eps=1e-5, *_):
    size = math.prod(shape)
    flat = ops.reshape(x, (-1, size)) if len(shape) > 1 else x
    w, b = (None if t is None else ops.reshape(t, (size,)) for t in (weight, bias))
    return ops.norm(flat, w, b, eps=eps)


@aten("rms_norm")
def _(call, x, shape, weight=None, eps=None):
    return ops.rms_norm(x, weight, eps=float(np.finfo(np.float32).eps) if eps is None else eps)


def _for_channels(t: Tensor, x: Tensor) -> Tensor:
    return ops.reshape(t, (t.size, *(1,) * (x.ndim - 2)))


@aten("group_norm")
def _(call, x, groups, weight=None, bias=None, eps=1e-5, *_):
    y = ops.group_norm(x, groups, eps=eps)
    y = y if weight is None else y * _for_channels(weight, x)
    return y if bias is None else y + _for_channels(bias, x)


@aten("batch_norm")
def _(call, x, weight, bias, running_mean, running_var, training, momentum, eps, *_):
    if training:
        axes = tuple(i for i in range(x.ndim) if i != 1)
        count = x.size // x.shape[1]
        mean, var = ops.mean(x, axes), ops.var(x, axes, correction=0)
        if running_mean is not None:
            fresh = (mean, var * (count / max(1, count - 1)))
            call.updates += [
                ops.assign(held, held * (1 - momentum) + new * momentum)
                for held, new in zip((running_mean, running_var), fresh, strict=True)
            ]
    else:
        mean, var = running_mean, running_var
    y = (x - _for_channels(mean, x)) * _for_channels(ops.rsqrt(var + eps), x)
    y = y if weight is None else y * _for_channels(weight, x)
    return y if bias is None else y + _for_channels(bias, x)


@aten("scaled_dot_product_attention")
def _(call, q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    options = {"dropout_p": dropout_p, "seed": call.rng} if dropout_p else {}
    out = ops.flash_attn_ext(q, k, v, mask, causal="top-left" if is_causal else None, scale=scale, **options)
    return ops.permute(out, axes=(0, 2, 1, 3))


@aten("conv2d")
def _(call, x, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    return _conv(ops.conv_2d, ops.conv_2d_dw, x, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups)


@aten("conv1d")
def _(call, x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
    s, p, d = (_pair(size)[0] for size in (stride, padding, dilation))
    return _conv(ops.conv_1d, ops.conv_1d_dw, x, weight, bias, s, p, d, groups)


def _conv(whole, depthwise, x, weight, bias, stride, padding, dilation, groups) -> Tensor:
    if isinstance(padding, str):
        raise ShapeError(f"from_torch(): a convolution with padding={padding!r}; give numbers")
    if groups == 1:
        y = whole(weight, x, stride, padding, dilation)
    elif groups == x.shape[1] == weight.shape[0]:
        y = depthwise(weight, x, stride, padding, dilation)
    else:
        n, m = x.shape[1] // groups, weight.shape[0] // groups
        parts = [
            whole(weight[g * m : (g + 1) * m], x[:, g * n : (g + 1) * n], stride, padding, dilation)
            for g in range(groups)
        ]
        y = ops.concat(*parts, axis=1)
    return y if bias is None else y + _for_channels(bias, y)


def _no(option: str, given: Any, usual: Any) -> None:
    if given != usual:
        raise ShapeError(f"from_torch(): pooling with {option}={given!r} has no counterpart here")


@aten("max_pool2d")
def _(call, x, kernel, stride=(), padding=(0, 0), dilation=(1, 1), ceil_mode=False):
    _no("dilation", _pair(dilation), (1, 1))
    _no("ceil_mode", ceil_mode, False)
    size = _pair(kernel)
    return ops.pool_2d(x, mode="max", kernel=size, stride=_pair(stride) if stride else size, padding=_pair(padding))


@aten("avg_pool2d")
def _(call, x, kernel, stride=(), padding=(0, 0), ceil_mode=False, count_include_pad=True, divisor=None):
    _no("ceil_mode", ceil_mode, False)
    _no("divisor_override", divisor, None)
    size = _pair(kernel)
    return ops.pool_2d(
        x, mode="avg", kernel=size, stride=_pair(stride) if stride else size, padding=_pair(padding),
        count_padding=count_include_pad,
    )  # fmt: skip


@aten("adaptive_avg_pool2d")
def _(call, x, size):
    out = _pair(size)
    if any(have % want for have, want in zip(x.shape[-2:], out, strict=True)):
        raise ShapeError(f"from_torch(): adaptive pooling of {list(x.shape)} to {out}, which does not divide it")
    kernel = tuple(have // want for have, want in zip(x.shape[-2:], out, strict=True))
    return ops.pool_2d(x, mode="avg", kernel=kernel, stride=kernel)


@aten("upsample_nearest2d")
def _(call, x, size, scales=None, *_):
    out = size if size is not None else [int(n * s) for n, s in zip(x.shape[-2:], _pair(scales), strict=True)]
    return ops.interpolate(x, size=tuple(out), mode="nearest")
