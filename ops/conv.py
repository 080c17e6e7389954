"""Convolutions over one, two and three axes, their transposes, depthwise ones, and the unfolding that defines them.

Kernels are laid out as in ggml: [out channels, in channels, ...] (of transposed ones [in, out, ...]), images as
[batch, channels, ...].  A padding is zeros.  `stride`, `padding` and `dilation` are one number, or one for each axis.

Each form is bilinear, and its gradients are the other forms of the same three:

    conv_3d         out = k * x
    conv_3d_back_x  what goes back to x, which is a transposed convolution
    conv_3d_back_k  what goes back to k
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from ..core.errors import ShapeError
from ..core.op import ensure, op
from ..core.tensor import Spec, Tensor
from .layout import permute, reshape

__all__ = [
    "col2im_1d", "conv_1d", "conv_1d_dw", "conv_2d", "conv_2d_dw", "conv_3d", "conv_3d_back_k", "conv_3d_back_x",
    "conv_dw", "conv_dw_back_k", "conv_dw_back_x", "conv_transpose_1d", "conv_transpose_2d", "im2col", "im2col_3d",
    "im2col_3d_back", "im2col_back", "ssm_conv",
]  # fmt: skip

Three = tuple[int, ...]
ONES, ZEROS = (1, 1, 1), (0, 0, 0)

# -- the three forms ------------------------------------------------------------------------------------------


@op(layout="contiguous")
def conv_3d(k, x, *, channels: int, stride: Three = ONES, padding: Three = ZEROS, dilation: Three = ONES):
    """out[n, oc] = sum over ic of k[oc, ic] * x[n, ic], a correlation over three axes: [N OC, OD, OH, OW].

    Batch and channels share an axis, as in ggml: k is [OC IC, KD, KH, KW] and x [N IC, D, H, W], with IC = `channels`.
    """
    _check_channels(channels, k=k, x=x)
    out = _out_sizes(x.shape[1:], k.shape[1:], stride, padding, dilation)
    return Spec((x.shape[0] // channels * (k.shape[0] // channels), *out))


@conv_3d.grad
def _(t, dout, *, needs):
    k, x = t.src
    dk = conv_3d_back_k(x, dout, **t.attrs, shape=k.shape) if needs[0] else None
    dx = conv_3d_back_x(k, dout, **t.attrs, size=x.shape[1:]) if needs[1] and k.shape[0] else None
    return dk, dx


@conv_3d.flops
def _(t):
    k = t.src[0]
    return 2 * t.size * t.attrs["channels"] * prod(k.shape[1:])


@conv_3d.reference
def _(k, x, *, channels, stride, padding, dilation):
    k, x = _split(k, channels), _split(x, channels)
    out = _out_sizes(x.shape[2:], k.shape[2:], stride, padding, dilation)
    result = np.zeros((len(x), len(k), *out))
    padded = _padded(x, padding)
    for tap, window in _taps(k.shape[2:], out, stride, dilation):
        result += np.einsum("oi,nidhw->nodhw", k[:, :, *tap], padded[:, :, *window])
    return _joined(result)


@op(layout="contiguous")
def conv_3d_back_x(
    k, dout, *, channels: int, stride: Three = ONES, padding: Three = ZEROS, dilation: Three = ONES, size: Three
):
    """The gradient of `conv_3d` by x, whose axes have `size`; also the convolution transposed: [N IC, D, H, W]."""
    _check_channels(channels, k=k)
    outs = k.shape[0] // channels
    ensure(dout.ndim == 4, "dout must have four axes, [N OC, OD, OH, OW]")
    ensure(dout.shape[0] % outs == 0 if outs else dout.shape[0] == 0, f"dout has {dout.shape[0]} planes, k {outs} each")
    _check_out(dout, _out_sizes(size, k.shape[1:], stride, padding, dilation))
    return Spec((dout.shape[0] // outs * channels if outs else 0, *size))


@conv_3d_back_x.grad
def _(t, g, *, needs):
    k, dout = t.src
    attrs = {name: value for name, value in t.attrs.items() if name != "size"}
    dk = conv_3d_back_k(g, dout, **attrs, shape=k.shape) if needs[0] else None
    return dk, reshape(conv_3d(k, g, **attrs), dout.shape) if needs[1] else None


@conv_3d_back_x.flops
def _(t):
    k, dout = t.src
    return 2 * dout.size * t.attrs["channels"] * prod(k.shape[1:])


@conv_3d_back_x.reference
def _(k, dout, *, channels, stride, padding, dilation, size):
    k = _split(k, channels)
    dout = dout.reshape(-1, len(k), *dout.shape[1:]) if len(k) else np.zeros((0, 0, *dout.shape[1:]))
    padded = np.zeros((len(dout), channels, *_padded_sizes(size, padding)))
    for tap, window in _taps(k.shape[2:], dout.shape[2:], stride, dilation):
        padded[:, :, *window] += np.einsum("oi,nodhw->nidhw", k[:, :, *tap], dout)
    return _joined(padded[:, :, *_inner(size, padding)])


@op(layout="contiguous")
def conv_3d_back_k(
    x, dout, *, channels: int, stride: Three = ONES, padding: Three = ZEROS, dilation: Three = ONES, shape: Three
):
    """The gradient of `conv_3d` by k, which has `shape`: [OC IC, KD, KH, KW]."""
    _check_channels(channels, x=x)
    ensure(len(shape) == 4 and shape[0] % channels == 0, f"shape={shape} must be (OC {channels}, KD, KH, KW)")
    ensure(dout.ndim == 4, "dout must have four axes, [N OC, OD, OH, OW]")
    planes = x.shape[0] // channels * (shape[0] // channels)
    ensure(dout.shape[0] == planes, f"dout has {dout.shape[0]} planes, not {planes}")
    _check_out(dout, _out_sizes(x.shape[1:], shape[1:], stride, padding, dilation))
    return Spec(shape)


@conv_3d_back_k.grad
def _(t, g, *, needs):
    x, dout = t.src
    attrs = {name: value for name, value in t.attrs.items() if name != "shape"}
    dx = conv_3d_back_x(g, dout, **attrs, size=x.shape[1:]) if needs[0] and g.shape[0] else None
    return dx, conv_3d(g, x, **attrs) if needs[1] else None


@conv_3d_back_k.flops
def _(t):
    return 2 * t.src[1].size * t.attrs["channels"] * prod(t.shape[1:])


@conv_3d_back_k.reference
def _(x, dout, *, channels, stride, padding, dilation, shape):
    x, outs = _split(x, channels), shape[0] // channels
    dout = dout.reshape(len(x), outs, *dout.shape[1:])
    padded, dk = _padded(x, padding), np.zeros((outs, channels, *shape[1:]))
    for tap, window in _taps(shape[1:], dout.shape[2:], stride, dilation):
        dk[:, :, *tap] = np.einsum("nodhw,nidhw->oi", dout, padded[:, :, *window])
    return _joined(dk)


# -- unfolding ------------------------------------------------------------------------------------------------


@op(layout="contiguous")
def im2col_3d(x, *, channels: int, stride: Three = ONES, padding: Three = ZEROS, dilation: Three = ONES, kernel: Three):
    """What a kernel sees at each position: of x[N IC, D, H, W] the [N OD, OH, OW, IC KD KH KW], IC = `channels`."""
    _check_channels(channels, x=x)
    out = _out_sizes(x.shape[1:], kernel, stride, padding, dilation)
    return Spec((x.shape[0] // channels * out[0], *out[1:], channels * prod(kernel)))


@im2col_3d.grad
def _(t, dout):
    return (im2col_3d_back(dout, **t.attrs, size=t.src[0].shape[1:]),)


@im2col_3d.reference
def _(x, *, channels, stride, padding, dilation, kernel):
    x = _split(x, channels)
    out = _out_sizes(x.shape[2:], kernel, stride, padding, dilation)
    rows, padded = np.zeros((len(x), *out, channels, *kernel)), _padded(x, padding)
    for tap, window in _taps(kernel, out, stride, dilation):
        rows[..., *tap] = np.moveaxis(padded[:, :, *window], 1, -1)
    return rows.reshape(len(x) * out[0], *out[1:], channels * prod(kernel))


@op(layout="contiguous")
def im2col_3d_back(
    dout,
    *,
    channels: int,
    stride: Three = ONES,
    padding: Three = ZEROS,
    dilation: Three = ONES,
    kernel: Three,
    size: Three,
):
    """The transpose of `im2col_3d`: each element added to where it came from, [N IC, D, H, W], (D, H, W) = `size`."""
    ensure(channels >= 1, f"channels={channels} must be 1 or more")
    out = _out_sizes(size, kernel, stride, padding, dilation)
    row = channels * prod(kernel)
    ensure(
        dout.ndim == 4 and dout.shape[1:] == (*out[1:], row) and dout.shape[0] % max(1, out[0]) == 0,
        f"dout must be [N {out[0]}, {out[1]}, {out[2]}, {row}]",
    )
    return Spec((dout.shape[0] // max(1, out[0]) * channels, *size))


@im2col_3d_back.grad
def _(t, g):
    attrs = {name: value for name, value in t.attrs.items() if name != "size"}
    return (im2col_3d(g, **attrs),)


@im2col_3d_back.reference
def _(dout, *, channels, stride, padding, dilation, kernel, size):
    out = _out_sizes(size, kernel, stride, padding, dilation)
    n = dout.shape[0] // max(1, out[0])
    rows = dout.reshape(n, *out, channels, *kernel)
    padded = np.zeros((n, channels, *_padded_sizes(size, padding)))
    for tap, window in _taps(kernel, out, stride, dilation):
        padded[:, :, *window] += np.moveaxis(rows[..., *tap], -1, 1)
    return _joined(padded[:, :, *_inner(size, padding)])


# -- depthwise ------------------------------------------------------------------------------------------------


@op(layout="contiguous")
def conv_dw(k, x, *, stride: Three = (1, 1), padding: Three = (0, 0), dilation: Three = (1, 1)):
    """Each channel with its own kernel: of k[C, 1, KH, KW] and x[N, C, H, W] the [N, C, OH, OW]."""
    ensure(k.ndim == 4 and k.shape[1] == 1, "k must be [C, 1, KH, KW]")
    ensure(x.ndim == 4 and x.shape[1] == k.shape[0], f"x must be [N, {k.shape[0]}, H, W], a plane for each kernel")
    return Spec((*x.shape[:2], *_out_sizes(x.shape[2:], k.shape[2:], stride, padding, dilation)))


@conv_dw.grad
def _(t, dout, *, needs):
    k, x = t.src
    dk = conv_dw_back_k(x, dout, **t.attrs, kernel=k.shape[2:]) if needs[0] else None
    return dk, conv_dw_back_x(k, dout, **t.attrs, size=x.shape[2:]) if needs[1] else None


@conv_dw.flops
def _(t):
    return 2 * t.size * prod(t.src[0].shape[2:])


@conv_dw.reference
def _(k, x, *, stride, padding, dilation):
    out = _out_sizes(x.shape[2:], k.shape[2:], stride, padding, dilation)
    result, padded = np.zeros((*x.shape[:2], *out)), _padded(x, padding)
    for tap, window in _taps(k.shape[2:], out, stride, dilation):
        result += k[:, 0, *tap, None, None] * padded[:, :, *window]
    return result


@op(layout="contiguous")
def conv_dw_back_x(k, dout, *, stride: Three = (1, 1), padding: Three = (0, 0), dilation: Three = (1, 1), size: Three):
    """The gradient of `conv_dw` by x, whose planes have `size`: [N, C, H, W]."""
    ensure(k.ndim == 4 and k.shape[1] == 1, "k must be [C, 1, KH, KW]")
    ensure(dout.ndim == 4 and dout.shape[1] == k.shape[0], f"dout must be [N, {k.shape[0]}, OH, OW]")
    _check_out(dout, _out_sizes(size, k.shape[2:], stride, padding, dilation), axes=2)
    return Spec((*dout.shape[:2], *size))


@conv_dw_back_x.grad
def _(t, g, *, needs):
    k, dout = t.src
    attrs = {name: value for name, value in t.attrs.items() if name != "size"}
    dk = conv_dw_back_k(g, dout, **attrs, kernel=k.shape[2:]) if needs[0] else None
    return dk, conv_dw(k, g, **attrs) if needs[1] else None


@conv_dw_back_x.flops
def _(t):
    k, dout = t.src
    return 2 * dout.size * prod(k.shape[2:])


@conv_dw_back_x.reference
def _(k, dout, *, stride, padding, dilation, size):
    padded = np.zeros((*dout.shape[:2], *_padded_sizes(size, padding)))
    for tap, window in _taps(k.shape[2:], dout.shape[2:], stride, dilation):
        padded[:, :, *window] += k[:, 0, *tap, None, None] * dout
    return padded[:, :, *_inner(size, padding)]


@op(layout="contiguous")
def conv_dw_back_k(
    x, dout, *, stride: Three = (1, 1), padding: Three = (0, 0), dilation: Three = (1, 1), kernel: Three
):
    """The gradient of `conv_dw` by k, whose last axes are `kernel`: [C, 1, KH, KW]."""
    ensure(x.ndim == 4 and dout.ndim == 4 and x.shape[:2] == dout.shape[:2], "x and dout must be [N, C, ...] alike")
    _check_out(dout, _out_sizes(x.shape[2:], kernel, stride, padding, dilation), axes=2)
    return Spec((x.shape[1], 1, *kernel))


@conv_dw_back_k.grad
def _(t, g, *, needs):
    x, dout = t.src
    attrs = {name: value for name, value in t.attrs.items() if name != "kernel"}
    dx = conv_dw_back_x(g, dout, **attrs, size=x.shape[2:]) if needs[0] else None
    return dx, conv_dw(g, x, **attrs) if needs[1] else None


@conv_dw_back_k.flops
def _(t):
    return 2 * t.src[1].size * prod(t.attrs["kernel"])


@conv_dw_back_k.reference
def _(x, dout, *, stride, padding, dilation, kernel):
    dk, padded = np.zeros((x.shape[1], 1, *kernel)), _padded(x, padding)
    for tap, window in _taps(kernel, dout.shape[2:], stride, dilation):
        dk[:, 0, *tap] = (dout * padded[:, :, *window]).sum((0, 2, 3))
    return dk


# -- what they are made of for the user -----------------------------------------------------------------------

Sizes = int | Sequence[int]


def conv_2d(k: Tensor, x: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """Correlation of x[N, IC, H, W] with k[OC, IC, KH, KW]: [N, OC, OH, OW], OH = (H + 2 p - d (KH - 1) - 1) // s + 1.

    Raises:
        ShapeError: other axes, channels that differ, or a kernel larger than the padded image.
    """
    return _conv("conv_2d", 2, k, x, stride, padding, dilation)


def conv_1d(k: Tensor, x: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """Correlation of x[N, IC, W] with k[OC, IC, KW]: [N, OC, OW].

    Raises:
        ShapeError: as `conv_2d`.
    """
    return _conv("conv_1d", 1, k, x, stride, padding, dilation)


def conv_2d_dw(k: Tensor, x: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """Depthwise: of x[N, C, H, W] each channel with its own of k[C, 1, KH, KW]: [N, C, OH, OW].

    Raises:
        ShapeError: other axes, or not one kernel for each channel.
    """
    where, (s, p, d) = _options("conv_2d_dw", 2, k, x, stride, padding, dilation)
    _named(
        where,
        x.ndim == 4 and k.ndim == 4 and k.shape[:2] == (x.shape[1], 1),
        "x must be [N, C, H, W], k [C, 1, KH, KW]",
    )
    return conv_dw(k, x, stride=s, padding=p, dilation=d)


def conv_1d_dw(k: Tensor, x: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """Depthwise: of x[N, C, W] (or [C, W]) each channel with its own of k[C, 1, KW]: [N, C, OW] (or [C, OW]).

    Raises:
        ShapeError: other axes, or not one kernel for each channel.
    """
    where, (s, p, d) = _options("conv_1d_dw", 1, k, x, stride, padding, dilation)
    _named(
        where, x.ndim in (2, 3) and k.ndim == 3 and k.shape[:2] == (x.shape[-2], 1), "x must be [N, C, W], k [C, 1, KW]"
    )
    planes = reshape(x, (*((1,) if x.ndim == 2 else x.shape[:1]), x.shape[-2], 1, x.shape[-1]))
    out = conv_dw(reshape(k, (k.shape[0], 1, 1, k.shape[2])), planes, stride=(1, *s), padding=(0, *p), dilation=(1, *d))
    return reshape(out, (*x.shape[:-1], out.shape[-1]))


def ssm_conv(sx: Tensor, c: Tensor) -> Tensor:
    """The causal depthwise convolution of state-space models: of sx[S, I, K - 1 + T] and c[I, K] the [S, T, I].

    out[s, t, i] = sum over k of sx[s, i, t + k] c[i, k]; the first K - 1 elements of sx are what came before.

    Source: Gu and Dao 2023, "Mamba", arXiv:2312.00752.

    Raises:
        ShapeError: other axes, or fewer elements than a kernel has.
    """
    _named(f"ssm_conv(sx={sx.spec}, c={c.spec})", sx.ndim == 3 and c.ndim == 2 and sx.shape[1] == c.shape[0],
           "sx must be [S, I, K - 1 + T] and c [I, K]")  # fmt: skip
    return permute(conv_1d_dw(reshape(c, (c.shape[0], 1, c.shape[1])), sx), axes=(0, 2, 1))


def conv_transpose_2d(k: Tensor, x: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """The transpose of `conv_2d`: of x[N, IC, H, W] and k[IC, OC, KH, KW] the [N, OC, OH, OW].

    OH = (H - 1) stride - 2 padding + dilation (KH - 1) + 1.

    Raises:
        ShapeError: other axes, channels that differ, or a padding that leaves nothing.
    """
    return _conv_transpose("conv_transpose_2d", 2, k, x, stride, padding, dilation)


def conv_transpose_1d(k: Tensor, x: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """The transpose of `conv_1d`: of x[N, IC, W] and k[IC, OC, KW] the [N, OC, OW]; of x[IC, W] the [OC, OW].

    Raises:
        ShapeError: as `conv_transpose_2d`.
    """
    if x.ndim == 2:
        out = _conv_transpose("conv_transpose_1d", 1, k, reshape(x, (1, *x.shape)), stride, padding, dilation)
        return reshape(out, out.shape[1:])
    return _conv_transpose("conv_transpose_1d", 1, k, x, stride, padding, dilation)


def im2col(x: Tensor, kernel: Sizes, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1) -> Tensor:
    """What a kernel of these sizes sees at each position: of x[N, IC, H, W] the rows [N, OH, OW, IC KH KW], in f32.

    Of x[N, IC, W], with one size: [N, OW, IC KW].

    Raises:
        ShapeError: other axes, or a kernel larger than the padded image.
    """
    axes = x.ndim - 2
    where = f"im2col(x={x.spec}, kernel={kernel})"
    _named(where, axes in (1, 2), "x must be [N, IC, H, W] or [N, IC, W]")
    sizes = [_each(where, name, v, axes) for name, v in
             (("kernel", kernel), ("stride", stride), ("padding", padding), ("dilation", dilation))]  # fmt: skip
    k, s, p, d = (_in_three(v, fill) for v, fill in zip(sizes, (1, 1, 0, 1), strict=True))
    N, IC = x.shape[:2]
    planes = reshape(x, (N * IC, *_in_three(x.shape[2:], 1)))
    out = im2col_3d(planes, channels=IC, stride=s, padding=p, dilation=d, kernel=k)
    return reshape(out, (N, *out.shape[3 - axes : 3], out.shape[3]))


def im2col_back(
    dout: Tensor, kernel: Sizes, size: Sequence[int], stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1
) -> Tensor:
    """The transpose of `im2col`: of rows [N, OH, OW, IC KH KW] the [N, IC, H, W], `size` = (H, W); or of one axis.

    Raises:
        ShapeError: rows that `im2col` does not make of such an image.
    """
    axes = dout.ndim - 2
    where = f"im2col_back(dout={dout.spec}, kernel={kernel}, size={size})"
    _named(where, axes in (1, 2), "dout must be [N, OH, OW, IC KH KW] or [N, OW, IC KW]")
    sizes = [_each(where, name, v, axes) for name, v in
             (("kernel", kernel), ("size", size), ("stride", stride), ("padding", padding),
              ("dilation", dilation))]  # fmt: skip
    k, whole, s, p, d = (_in_three(v, fill) for v, fill in zip(sizes, (1, 1, 1, 0, 1), strict=True))
    _named(where, dout.shape[-1] % max(1, prod(k)) == 0 and dout.shape[-1], f"a row is a multiple of {prod(k)}")
    channels = dout.shape[-1] // prod(k)
    rows = reshape(dout, (dout.shape[0], *_in_three(dout.shape[1:-1], 1)[1:], dout.shape[-1]))
    out = im2col_3d_back(rows, channels=channels, stride=s, padding=p, dilation=d, kernel=k, size=whole)
    return reshape(out, (dout.shape[0], channels, *whole[3 - axes :]))


def col2im_1d(x: Tensor, channels: int, stride: int = 1, padding: int = 0) -> Tensor:
    """Columns back to a signal, overlaps added up: of x[T, OC K] the [OC, (T - 1) stride + K - 2 padding].

    OC = `channels`.

    Raises:
        ShapeError: rows that are no multiple of `channels`, or a padding that leaves nothing.
    """
    where = f"col2im_1d(x={x.spec}, channels={channels}, stride={stride}, padding={padding})"
    _named(where, x.ndim == 2 and channels >= 1 and x.shape[1] % channels == 0 and x.shape[1], "x must be [T, OC K]")
    taps = x.shape[1] // channels
    size = (x.shape[0] - 1) * stride + taps - 2 * padding
    _named(where, x.shape[0] >= 1 and size >= 1, "nothing is left")
    out = im2col_back(reshape(x, (1, *x.shape)), (taps,), (size,), stride, padding)
    return reshape(out, (channels, size))


def _conv(name: str, axes: int, k: Tensor, x: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    where, options = _options(name, axes, k, x, stride, padding, dilation)
    _named(where, x.ndim == k.ndim == axes + 2, f"k and x must have {axes + 2} axes")
    _named(where, x.shape[1] == k.shape[1] and k.shape[1], f"x has {x.shape[1]} channels, k takes {k.shape[1]}")
    s, p, d = (_in_three(v, fill) for v, fill in zip(options, (1, 0, 1), strict=True))
    N, OC, IC = x.shape[0], k.shape[0], k.shape[1]
    planes = reshape(x, (N * IC, *_in_three(x.shape[2:], 1)))
    kernels = reshape(k, (OC * IC, *_in_three(k.shape[2:], 1)))
    try:
        out = conv_3d(kernels, planes, channels=IC, stride=s, padding=p, dilation=d)
    except ShapeError as error:
        raise ShapeError(f"{where}: {str(error).partition('): ')[2]}") from None
    return reshape(out, (N, OC, *out.shape[4 - axes :]))


def _conv_transpose(
    name: str, axes: int, k: Tensor, x: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor:
    where, options = _options(name, axes, k, x, stride, padding, dilation)
    _named(where, x.ndim == k.ndim == axes + 2, f"k and x must have {axes + 2} axes")
    _named(where, x.shape[1] == k.shape[0] and k.shape[1], f"x has {x.shape[1]} channels, k takes {k.shape[0]}")
    size = tuple(
        (n - 1) * s - 2 * p + d * (taps - 1) + 1
        for n, taps, s, p, d in zip(x.shape[2:], k.shape[2:], *options, strict=True)
    )
    _named(where, min(x.shape[2:]) >= 1 and min(size) >= 1, f"the result would have the sizes {size}")
    s, p, d = (_in_three(v, fill) for v, fill in zip(options, (1, 0, 1), strict=True))
    N, IC, OC = x.shape[0], k.shape[0], k.shape[1]
    planes = reshape(x, (N * IC, *_in_three(x.shape[2:], 1)))
    kernels = reshape(k, (IC * OC, *_in_three(k.shape[2:], 1)))
    out = conv_3d_back_x(kernels, planes, channels=OC, stride=s, padding=p, dilation=d, size=_in_three(size, 1))
    return reshape(out, (N, OC, *size))


# -- helpers --------------------------------------------------------------------------------------------------


def _options(name: str, axes: int, k: Tensor, x: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes):
    where = f"{name}(k={k.spec}, x={x.spec}, stride={stride}, padding={padding}, dilation={dilation})"
    pairs = (("stride", stride), ("padding", padding), ("dilation", dilation))
    return where, [_each(where, what, value, axes) for what, value in pairs]


def _named(where: str, condition, message: str) -> None:
    if not condition:
        raise ShapeError(f"{where}: {message}")


def _each(where: str, name: str, value: Sizes, axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    sizes = (value,) * axes if isinstance(value, (int, np.integer)) else tuple(value)
    _named(where, len(sizes) == axes, f"{name} takes one number, or {axes}")
    return tuple(int(n) for n in sizes)


def _in_three(sizes: Sequence[int], fill: int) -> tuple[int, ...]:
    return (fill,) * (3 - len(sizes)) + tuple(sizes)


def _check_channels(channels: int, **tensors: Tensor) -> None:
    ensure(channels >= 1, f"channels={channels} must be 1 or more")
    for name, t in tensors.items():
        ensure(t.ndim == 4, f"{name} must have four axes; gg.conv_1d and gg.conv_2d take fewer")
        ensure(t.shape[0] % channels == 0, f"{name} has {t.shape[0]} planes, no multiple of {channels} channels")


def _check_out(dout: Tensor, out: tuple[int, ...], axes: int = 3) -> None:
    ensure(dout.shape[-axes:] == out, f"the last axes of dout must be {out}")


def _out_sizes(size, kernel, stride, padding, dilation) -> tuple[int, ...]:
    axes = len(size)
    given = (("kernel", kernel, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    for name, values, least in given:
        ensure(
            len(values) == axes and min(values) >= least, f"{name}={tuple(values)} must be {axes} numbers from {least}"
        )
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    whole = [n + 2 * p for n, p in zip(size, padding, strict=True)]
    ensure(
        all(n >= span for n, span in zip(whole, spans, strict=True)),
        f"the kernel spans {tuple(spans)}, more than the padded {tuple(whole)}",
    )
    return tuple((n - span) // s + 1 for n, span, s in zip(whole, spans, stride, strict=True))


def _split(x: np.ndarray, channels: int) -> np.ndarray:
    return x.reshape(x.shape[0] // channels, channels, *x.shape[1:])


def _joined(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _padded_sizes(size, padding) -> tuple[int, ...]:
    return tuple(n + 2 * p for n, p in zip(size, padding, strict=True))


def _inner(size, padding) -> tuple[slice, ...]:
    return tuple(slice(p, p + n) for n, p in zip(size, padding, strict=True))


def _padded(x: np.ndarray, padding) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])


def _taps(kernel, out, stride, dilation):
    """Each element of a kernel, and the window of the padded image that it sees."""
    for tap in np.ndindex(*kernel):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s) if n else slice(0, 0)
                for t, n, s, d in zip(tap, out, stride, dilation, strict=True)
            ),
        )
