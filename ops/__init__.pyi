"""The ops, by family: made from their declarations by `python -m ggrad.testing.stubs --write`."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..core.dtype import F32, DType
from ..core.tensor import Tensor
from .attention import Causal as Causal
from .constant import arange as arange
from .constant import fill as fill
from .conv import col2im_1d as col2im_1d
from .conv import conv_1d as conv_1d
from .conv import conv_1d_dw as conv_1d_dw
from .conv import conv_2d as conv_2d
from .conv import conv_2d_dw as conv_2d_dw
from .conv import conv_transpose_1d as conv_transpose_1d
from .conv import conv_transpose_2d as conv_transpose_2d
from .conv import im2col as im2col
from .conv import im2col_back as im2col_back
from .conv import ssm_conv as ssm_conv
from .custom import map_custom1 as map_custom1
from .custom import map_custom2 as map_custom2
from .custom import map_custom3 as map_custom3
from .elementwise import add1 as add1
from .experts import add_id as add_id
from .extremes import amax as amax
from .extremes import amin as amin
from .extremes import argmin as argmin
from .extremes import eye as eye
from .extremes import flip as flip
from .extremes import full as full
from .extremes import gather as gather
from .extremes import index_add as index_add
from .extremes import linspace as linspace
from .extremes import log_softmax as log_softmax
from .extremes import logsumexp as logsumexp
from .extremes import max as max
from .extremes import min as min
from .extremes import one_hot as one_hot
from .extremes import ones as ones
from .extremes import ones_like as ones_like
from .extremes import scatter_add as scatter_add
from .extremes import softmax as softmax
from .extremes import sort as sort
from .extremes import stack as stack
from .extremes import std as std
from .extremes import take_along_axis as take_along_axis
from .extremes import var as var
from .extremes import zeros as zeros
from .extremes import zeros_like as zeros_like
from .hyper import dsv4_hc_comb as dsv4_hc_comb
from .hyper import dsv4_hc_post as dsv4_hc_post
from .hyper import dsv4_hc_pre as dsv4_hc_pre
from .image import InterpolationMode as InterpolationMode
from .image import add_rel_pos as add_rel_pos
from .image import get_rel_pos as get_rel_pos
from .image import timestep_embedding as timestep_embedding
from .image import upscale as upscale
from .image import win_part as win_part
from .image import win_unpart as win_unpart
from .kda import Form
from .kda import kda_state_map as kda_state_map
from .kda import kda_state_map_back as kda_state_map_back
from .layout import cpy as cpy
from .layout import dup as dup
from .layout import pad as pad
from .layout import pad_circular as pad_circular
from .layout import pad_ext as pad_ext
from .layout import pad_reflect_1d as pad_reflect_1d
from .layout import repeat_4d as repeat_4d
from .layout import roll as roll
from .layout import set_1d as set_1d
from .layout import set_2d as set_2d
from .layout import slice_of as slice_of
from .layout import transpose as transpose
from .linear_loss import linear_cross_entropy as linear_cross_entropy
from .loss import Reduction as Reduction
from .loss import cross_entropy_loss as cross_entropy_loss
from .loss import cross_entropy_loss_back as cross_entropy_loss_back
from .matmul import matmul as matmul
from .matmul import out_prod as out_prod
from .norm import group_norm as group_norm
from .pool import PoolMode as PoolMode
from .pool import pool_1d as pool_1d
from .rope import RopeMode as RopeMode
from .rope import rope_multi as rope_multi
from .rows import indexed as indexed
from .scan import gated_delta_net as gated_delta_net
from .scan import gated_linear_attn as gated_linear_attn
from .scan import rwkv_wkv6 as rwkv_wkv6
from .scan import rwkv_wkv7 as rwkv_wkv7
from .scan import ssm_scan as ssm_scan
from .select import atan2 as atan2
from .select import fmod as fmod
from .select import greater as greater
from .select import greater_equal as greater_equal
from .select import hypot as hypot
from .select import isfinite as isfinite
from .select import isinf as isinf
from .select import isnan as isnan
from .select import lerp as lerp
from .select import logaddexp as logaddexp
from .select import logical_not as logical_not
from .select import masked_fill as masked_fill
from .select import xlogy as xlogy
from .sort import SortOrder as SortOrder
from .sparse_mla import Layout
from .sparse_mla import SparseFlashMlaGrad
from .sparse_mla import compress_kv as compress_kv
from .triangle import TriType as TriType
from .triangle import diag as diag
from .triangle import diag_mask_inf as diag_mask_inf
from .triangle import diag_mask_zero as diag_mask_zero
from .triangle import tri as tri
from .unary import celu as celu
from .unary import hardtanh as hardtanh
from .unary import log10 as log10
from .unary import logsigmoid as logsigmoid
from .unary import mish as mish
from .unary import reciprocal as reciprocal
from .unary import relu6 as relu6
from .unary import rsqrt as rsqrt
from .unary import selu as selu
from .unary import softsign as softsign
from .unary import tanhshrink as tanhshrink

COMMON: frozenset[str]
__all__ = [
    'Causal',
    'InterpolationMode',
    'PoolMode',
    'Reduction',
    'RopeMode',
    'SortOrder',
    'TriType',
    'abs',
    'abs_back',
    'acc',
    'accumulate',
    'acos',
    'acosh',
    'add',
    'add1',
    'add_id',
    'add_rel_pos',
    'after',
    'all_gather',
    'all_reduce',
    'all_to_all',
    'amax',
    'amin',
    'arange',
    'argmax',
    'argmin',
    'argsort',
    'asin',
    'asinh',
    'atan',
    'atan2',
    'atanh',
    'broadcast',
    'broadcast_to',
    'cast',
    'ceil',
    'celu',
    'clamp',
    'clamp_back',
    'clip_factor',
    'col2im_1d',
    'compress_kv',
    'concat',
    'cont',
    'conv_1d',
    'conv_1d_dw',
    'conv_2d',
    'conv_2d_dw',
    'conv_3d',
    'conv_3d_back_k',
    'conv_3d_back_x',
    'conv_dw',
    'conv_dw_back_k',
    'conv_dw_back_x',
    'conv_transpose_1d',
    'conv_transpose_2d',
    'cos',
    'cos_back',
    'cosh',
    'count_equal',
    'counted_once',
    'cpy',
    'cross_entropy_class',
    'cross_entropy_class_back',
    'cross_entropy_loss',
    'cross_entropy_loss_back',
    'cross_entropy_soft',
    'cross_entropy_soft_back',
    'cumsum',
    'custom',
    'custom_back',
    'delta_scan',
    'delta_scan_back',
    'diag',
    'diag_mask_inf',
    'diag_mask_zero',
    'div',
    'dropout',
    'dsv4_hc_comb',
    'dsv4_hc_post',
    'dsv4_hc_pre',
    'dup',
    'elu',
    'elu_back',
    'equal',
    'erf',
    'exp',
    'exp2',
    'expm1',
    'expm1_back',
    'eye',
    'fill',
    'flash_attn_back',
    'flash_attn_ext',
    'flip',
    'floor',
    'floor_divide',
    'fmod',
    'full',
    'gated_delta_net',
    'gated_linear_attn',
    'gather',
    'geglu',
    'geglu_back',
    'geglu_erf',
    'geglu_erf_back',
    'geglu_quick',
    'geglu_quick_back',
    'gelu',
    'gelu_back',
    'gelu_erf',
    'gelu_erf_back',
    'gelu_quick',
    'gelu_quick_back',
    'get_rel_pos',
    'get_rows',
    'get_rows_back',
    'global_norm',
    'greater',
    'greater_equal',
    'group_norm',
    'hardsigmoid',
    'hardsigmoid_back',
    'hardswish',
    'hardswish_back',
    'hardtanh',
    'hypot',
    'im2col',
    'im2col_3d',
    'im2col_3d_back',
    'im2col_back',
    'index_add',
    'indexed',
    'interpolate',
    'interpolate_back',
    'isfinite',
    'isinf',
    'isnan',
    'kda',
    'kda_back',
    'kda_gate',
    'kda_gate_back',
    'kda_recurrent',
    'kda_recurrent_pool',
    'kda_state_map',
    'kda_state_map_back',
    'known_gradients',
    'l2_norm',
    'l2_norm_back',
    'larger_back',
    'leaky_relu',
    'leaky_relu_back',
    'lerp',
    'less',
    'less_equal',
    'lightning_indexer',
    'lightning_indexer_back',
    'linear_cross_entropy',
    'linspace',
    'log',
    'log10',
    'log1p',
    'log2',
    'log_softmax',
    'logaddexp',
    'logical_and',
    'logical_not',
    'logical_or',
    'logical_xor',
    'logsigmoid',
    'logsumexp',
    'map_custom1',
    'map_custom2',
    'map_custom3',
    'masked_fill',
    'matmul',
    'max',
    'maximum',
    'mean',
    'min',
    'minimum',
    'mish',
    'mul',
    'mul_mat',
    'mul_mat_id',
    'mul_mat_id_back',
    'mul_mat_id_quantized_back',
    'mul_mat_onto',
    'mul_mat_quantized_back',
    'neg',
    'norm',
    'norm_back',
    'not_equal',
    'one_hot',
    'ones',
    'ones_like',
    'opt_step_adamw',
    'opt_step_sgd',
    'out_prod',
    'pad',
    'pad_circular',
    'pad_ext',
    'pad_reflect_1d',
    'permute',
    'pool_1d',
    'pool_2d',
    'pool_2d_back',
    'pow',
    'reciprocal',
    'reduce_scatter',
    'reduce_to',
    'reglu',
    'reglu_back',
    'relu',
    'relu6',
    'relu_back',
    'remainder',
    'repeat',
    'repeat_4d',
    'repeat_back',
    'replicated',
    'reshape',
    'rms_norm',
    'rms_norm_back',
    'roll',
    'rope',
    'rope_back',
    'rope_multi',
    'round',
    'rsqrt',
    'rwkv_wkv6',
    'rwkv_wkv7',
    'scale',
    'scatter_add',
    'selective_scan',
    'selective_scan_back',
    'selu',
    'set',
    'set_1d',
    'set_2d',
    'set_rows',
    'set_rows_back',
    'sgn',
    'shift',
    'sigmoid',
    'sigmoid_back',
    'silu',
    'silu_back',
    'sin',
    'sin_back',
    'sinh',
    'sinkhorn',
    'sinkhorn_back',
    'slice_add',
    'slice_back',
    'slice_of',
    'slice_view',
    'soft_max',
    'soft_max_back',
    'soft_max_sinks_back',
    'softmax',
    'softplus',
    'softplus_back',
    'softsign',
    'solve_tri',
    'sort',
    'sparse_flash_mla',
    'sparse_flash_mla_grad',
    'sqr',
    'sqr_back',
    'sqrt',
    'sqrt_back',
    'ssm_conv',
    'ssm_scan',
    'stack',
    'std',
    'step',
    'stop_gradient',
    'strided_back',
    'sub',
    'sum',
    'sum_rows',
    'swiglu',
    'swiglu_back',
    'swiglu_oai',
    'swiglu_oai_back',
    'take_along_axis',
    'tan',
    'tanh',
    'tanh_back',
    'tanhshrink',
    'timestep_embedding',
    'top_k',
    'transpose',
    'tri',
    'triangle',
    'trunc',
    'upscale',
    'var',
    'view',
    'wait_for',
    'where',
    'win_part',
    'win_unpart',
    'write_rows',
    'xielu',
    'xielu_back',
    'xlogy',
    'zeros',
    'zeros_like',
]

def abs(x: Tensor | ArrayLike) -> Tensor:
    """|x|; its gradient at 0 is 0.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def abs_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout where x > 0, -dout where x < 0, 0 where x is 0, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def acc(a: Tensor, b: Tensor, strides: Sequence[int] | None = None, offset: int = 0) -> Tensor:
    """A copy of `a` with `b` added to a window of it.

    Args:
        a: f32, or halves, which are cast.
        b: what is added.
        strides: bytes from one element of the window to the next along each axis of `b`, outermost first, as `view`
            takes them; if left out, those of `a`.  Elements that the window meets twice get both.
        offset: bytes to the window's first element.

    Raises:
        ShapeError: the window does not lie in `a`, or does not begin or go on at elements.
    """

def accumulate(total: Tensor | ArrayLike, gradient: Tensor | ArrayLike) -> Tensor:
    """total += gradient, written into the leaf `total`.

    Takes total, gradient: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def acos(x: Tensor | ArrayLike) -> Tensor:
    """The angle, 0 to pi, whose cosine is x; NaN beyond 1.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def acosh(x: Tensor | ArrayLike) -> Tensor:
    """The inverse of `cosh` for x from 1 on; NaN below.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def add(a: Tensor | ArrayLike, b: Tensor | ArrayLike, tile: Any = False) -> Tensor:
    """a + b, of f32 or of i32, which wrap around, broadcast as NumPy does; with `tile` as ggml does, see the module.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def after(*xs: Tensor | ArrayLike) -> Tensor:
    """The first one.  The others are computed too, though nothing else may need them: a collective that one rank does
    not use, and the others do.  Their gradients are zero.

    Takes xs: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def all_gather(x: Tensor | ArrayLike, axis: int, comm: Any) -> Tensor:
    """The arrays of all ranks one after another along an axis, in the order of ranks.

    Args:
        x: of the same shape on all ranks.
        axis: which grows by the number of ranks.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def all_reduce(x: Tensor | ArrayLike, comm: Any) -> Tensor:
    """The sum of x over all ranks, the same bits on each.

    Args:
        x: of the same shape on all ranks.
        comm: the group, a `ggrad.distributed.Comm`.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def all_to_all(x: Tensor | ArrayLike, split: int, join: int, comm: Any) -> Tensor:
    """Cut along one axis, each rank gets its part of every rank's array, and has them one after another along another.

    Args:
        x: of the same shape on all ranks, its axis `split` a multiple of their number.
        split: the axis that is cut.
        join: the axis along which what comes is put together, in the order of ranks; it may be the same.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def argmax(x: Tensor | ArrayLike) -> Tensor:
    """Where along the last axis the largest value stands, the first of equals; NaN counts as larger than all.

    The last axis is dropped.  Indices are i32, and no gradient goes through them.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def argsort(x: Tensor | ArrayLike, order: enum.IntEnum | str | int = ...) -> Tensor:
    """Where each row's elements stand in order, i32 of the shape of `x`.  Of equal ones the first comes first; NaN
    comes last in either order.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def asin(x: Tensor | ArrayLike) -> Tensor:
    """The angle, -pi/2 to pi/2, whose sine is x; NaN beyond 1.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def asinh(x: Tensor | ArrayLike) -> Tensor:
    """The inverse of `sinh`.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def atan(x: Tensor | ArrayLike) -> Tensor:
    """The angle, -pi/2 to pi/2, whose tangent is x.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def atanh(x: Tensor | ArrayLike) -> Tensor:
    """The inverse of `tanh`: infinite at 1 and -1, NaN beyond.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def broadcast(x: Tensor | ArrayLike, root: int = 0, *, comm: Any) -> Tensor:
    """What rank `root` has, on all ranks.

    Args:
        x: of the same shape on all ranks; only the root's values are used.
        root: a rank of the group.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def broadcast_to(x: Tensor | ArrayLike, shape: Sequence[int]) -> Tensor:
    """`x` seen in a larger shape, a view with strides of 0: sizes of 1 grow, leading axes are added.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cast(x: Tensor | ArrayLike, dtype: DType) -> Tensor:
    """`x` in another dtype: to the nearest value, ties to even; to i32 by truncation.  Quantized values are expanded.

    NaN and what i32 cannot hold become its least value, -2**31.
    Its gradient passes unchanged: gradients are f32 whatever the dtype of what they belong to.
    References compute in double precision, and so do not round.

    Takes x: f32 or f16 or bf16 or i32 or quantized.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def ceil(x: Tensor | ArrayLike) -> Tensor:
    """The smallest whole number that is not below x.  No gradient goes through it.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def clamp(x: Tensor | ArrayLike, min: float, max: float) -> Tensor:
    """x, but not below `min` nor above `max`.  The gradient passes where min <= x <= max.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def clamp_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike, min: float, max: float) -> Tensor:
    """dout, but 0 where x is outside of min ... max, and NaN where it is NaN, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def clip_factor(norm: Tensor | ArrayLike, max_norm: float) -> Tensor:
    """What gradients of that norm are multiplied with so that it is at most `max_norm`; 1 if it is.

    A norm that is not finite gives NaN, at which optimizer steps are skipped.

    Source: Pascanu, Mikolov and Bengio 2012, arXiv:1211.5063.

    Takes norm: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def concat(*xs: Tensor | ArrayLike, axis: int = -1) -> Tensor:
    """The arrays one after another along an axis.

    Takes xs: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cont(x: Tensor | ArrayLike) -> Tensor:
    """A contiguous copy of `x`, of any strides and dtype.  Ops that need whole rows insert it by themselves.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def conv_3d(k: Tensor | ArrayLike, x: Tensor | ArrayLike, channels: int, stride: Sequence[int] = (1, 1, 1), padding: Sequence[int] = (0, 0, 0), dilation: Sequence[int] = (1, 1, 1)) -> Tensor:
    """out[n, oc] = sum over ic of k[oc, ic] * x[n, ic], a correlation over three axes: [N OC, OD, OH, OW].

    Batch and channels share an axis, as in ggml: k is [OC IC, KD, KH, KW] and x [N IC, D, H, W], with IC = `channels`.

    Takes k, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def conv_3d_back_k(x: Tensor | ArrayLike, dout: Tensor | ArrayLike, channels: int, stride: Sequence[int] = (1, 1, 1), padding: Sequence[int] = (0, 0, 0), dilation: Sequence[int] = (1, 1, 1), *, shape: Sequence[int]) -> Tensor:
    """The gradient of `conv_3d` by k, which has `shape`: [OC IC, KD, KH, KW].

    Takes x, dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def conv_3d_back_x(k: Tensor | ArrayLike, dout: Tensor | ArrayLike, channels: int, stride: Sequence[int] = (1, 1, 1), padding: Sequence[int] = (0, 0, 0), dilation: Sequence[int] = (1, 1, 1), *, size: Sequence[int]) -> Tensor:
    """The gradient of `conv_3d` by x, whose axes have `size`; also the convolution transposed: [N IC, D, H, W].

    Takes k, dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def conv_dw(k: Tensor | ArrayLike, x: Tensor | ArrayLike, stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1)) -> Tensor:
    """Each channel with its own kernel: of k[C, 1, KH, KW] and x[N, C, H, W] the [N, C, OH, OW].

    Takes k, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def conv_dw_back_k(x: Tensor | ArrayLike, dout: Tensor | ArrayLike, stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), *, kernel: Sequence[int]) -> Tensor:
    """The gradient of `conv_dw` by k, whose last axes are `kernel`: [C, 1, KH, KW].

    Takes x, dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def conv_dw_back_x(k: Tensor | ArrayLike, dout: Tensor | ArrayLike, stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), *, size: Sequence[int]) -> Tensor:
    """The gradient of `conv_dw` by x, whose planes have `size`: [N, C, H, W].

    Takes k, dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cos(x: Tensor | ArrayLike) -> Tensor:
    """The cosine, for x of any size.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cos_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """-dout * sin(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cosh(x: Tensor | ArrayLike) -> Tensor:
    """The hyperbolic cosine, (exp(x) + exp(-x)) / 2.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def count_equal(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """At how many places two i32 tensors hold the same value: an i32 scalar, of shape ().

    Takes a, b: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def counted_once(x: Tensor | ArrayLike, comm: Any) -> Tensor:
    """x, which all ranks have alike, as their shares of it: a loss that each of them makes as a whole, say.

    The sum over the ranks, which is what gradients are of, then has it once: its gradient is divided by their number.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cross_entropy_class(logits: Tensor | ArrayLike, targets: Tensor | ArrayLike, class_weights: Tensor | ArrayLike | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: enum.IntEnum | str | int = ...) -> tuple[Tensor, ...]:
    """Cross entropy with classes; see `cross_entropy_loss`.

    Returns, packed: the loss; for each row its largest logit `top` and the sum `total` of exp(logits - top), 0 and 1 if
    it is ignored; and what a row weighs in the loss: of a mean 1 / what the rows that count weigh together, else 1.
    Of logits of 1e8 the log of the sum alone, rounded to f32, would not know how many they are.

    Takes logits, class_weights: f32 (f16 and bf16 are cast); targets: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cross_entropy_class_back(dloss: Tensor | ArrayLike, logits: Tensor | ArrayLike, targets: Tensor | ArrayLike, top: Tensor | ArrayLike, total: Tensor | ArrayLike, weight: Tensor | ArrayLike, dlse: Tensor | ArrayLike | None = None, class_weights: Tensor | ArrayLike | None = None, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """The gradient of `cross_entropy_class`, 0 in ignored rows:

    dloss * weight * (p * sum of the labels - labels) + dlse * p, where p is softmax(logits) = exp(logits - top) /
    total, the labels are (1 - label_smoothing) * class weight at the target and label_smoothing / classes * class
    weight everywhere, and `dlse` is the gradient by the log of the sum of exp(logits).  dloss is a scalar, or one for
    each row.

    Takes dloss, logits, top, total, weight, dlse, class_weights: f32 (f16 and bf16 are cast); targets: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cross_entropy_soft(logits: Tensor | ArrayLike, labels: Tensor | ArrayLike, reduction: enum.IntEnum | str | int = ...) -> tuple[Tensor, ...]:
    """Cross entropy with probabilities: -sum(labels * log_softmax(logits)) of each row, their sum, or their mean.

    A label of 0 counts for nothing, also where the logit is -inf.

    Returns, packed: the loss; and for each row its largest logit `top` and the sum `total` of exp(logits - top).

    Takes logits, labels: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cross_entropy_soft_back(dloss: Tensor | ArrayLike, logits: Tensor | ArrayLike, labels: Tensor | ArrayLike, top: Tensor | ArrayLike, total: Tensor | ArrayLike, dlse: Tensor | ArrayLike | None = None, mean: bool = True) -> Tensor:
    """The gradient of `cross_entropy_soft` by the logits:

    dloss * (p * sum of labels - labels) / (number of rows if `mean`) + dlse * p, where p is softmax(logits) =
    exp(logits - top) / total and `dlse` the gradient by the log of the sum of exp(logits).  dloss is a scalar, or one
    for each row.

    Takes dloss, logits, labels, top, total, dlse: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def cumsum(x: Tensor | ArrayLike, axis: int = -1, reverse: bool = False) -> Tensor:
    """The running sum along an axis, each element included: from the first element on, or from the last in reverse.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def custom(*inputs: Tensor | ArrayLike, function: Callable[..., Any], shape: Sequence[int], dtype: DType = ..., grad: Callable[..., Any] | None = None) -> Tensor:
    """What function(*inputs) gives, computed in each run.

    Args:
        inputs: the function gets arrays that it must not write to, of f32 (halves are cast) or i32; and of float64
            and int64 in a run of the references, as for checks of its gradient.
        function: gives an array, or what can be made one; compiled functions of numba's are fine.  What it raises
            ends the run and comes out of `compute`.
        shape, dtype: of the result; a float result is rounded to the dtype.
        grad: grad(dout, *inputs) gives the gradients by the inputs: an array, or for several inputs a tuple, with None
            for those that have none.  Without it, no gradient can be had through this node.

    Takes inputs: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: when a run finds that the result has another shape, or no such values.
    """

def custom_back(*inputs: Tensor | ArrayLike, function: Callable[..., Any], wanted: Sequence[Any]) -> tuple[Tensor, ...]:
    """The gradients that function(dout, *inputs) gives of `custom`, those by the inputs `wanted` packed in order.

    Takes inputs: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def delta_scan(r: Tensor | ArrayLike, w: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, state: Tensor | ArrayLike, a: Tensor | ArrayLike | None = None, b: Tensor | ArrayLike | None = None, snapshots: Any = 1) -> tuple[Tensor, ...]:
    """y[N, T, H, V] and states[snapshots N, H, V, S] of a scan over tokens t, head by head:

        S_t = S_(t-1) diag(w_t) + v_t k_t^T + (S_(t-1) a_t) b_t^T        y_t = S_t r_t

    r, w, k, and both or neither of a and b, are [N, T, H, S], v [N, T, H, V] and the first state [N, H, V, S].
    `states` are the N states after the last token, then those after the one before, and so on.

    Takes r, w, k, v, state, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def delta_scan_back(r: Tensor | ArrayLike, w: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, state: Tensor | ArrayLike, dy: Tensor | ArrayLike | None = None, dstates: Tensor | ArrayLike | None = None, a: Tensor | ArrayLike | None = None, b: Tensor | ArrayLike | None = None) -> tuple[Tensor, ...]:
    """The gradients of `delta_scan` by r, w, k, v, state and, if there are any, a and b, in that order.

    Takes r, w, k, v, state, dy, dstates, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def div(a: Tensor | ArrayLike, b: Tensor | ArrayLike, tile: Any = False) -> Tensor:
    """a / b, broadcast as NumPy does; with `tile` as ggml does, see the module.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def dropout(x: Tensor | ArrayLike, seed: Tensor | ArrayLike, p: float, key: int = 0) -> Tensor:
    """Each element of `x` with probability 1 - p, multiplied with 1 / (1 - p), else zero.

    Training sets the leaf `seed` to a new value before each step.

    Sources: Srivastava et al. 2014; Salmon et al. 2011 (Philox).

    Args:
        seed: an i32 tensor of shape (), or an int.
        p: from 0 (`x` itself) to 1 (zeros).
        key: another number for each dropout that shares a seed, 0 to 2**32 - 1, so that their masks differ.

    Takes x: f32 (f16 and bf16 are cast); seed: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def elu(x: Tensor | ArrayLike) -> Tensor:
    """x where it is above 0, else exp(x) - 1.  Elementwise.

    Source: Clevert, Unterthiner and Hochreiter 2015, arXiv:1511.07289.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def elu_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout where x is above 0, else dout * exp(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def equal(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where a == b, else 0, i32: of f32 or of i32, broadcast.  NaN equals nothing.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def erf(x: Tensor | ArrayLike) -> Tensor:
    """The error function: twice the integral of exp(-t^2) from 0 to x, over the root of pi.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def exp(x: Tensor | ArrayLike) -> Tensor:
    """e to the power of x, elementwise

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def exp2(x: Tensor | ArrayLike) -> Tensor:
    """2 to the power of x, elementwise

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def expm1(x: Tensor | ArrayLike) -> Tensor:
    """exp(x) - 1, exact near 0 too, elementwise

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def expm1_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * exp(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def flash_attn_back(q: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, mask: Tensor | ArrayLike | None = None, d: Tensor | ArrayLike | None = None, *, d_lse: Tensor | ArrayLike | None = None, out: Tensor | ArrayLike | None = None, lse: Tensor | ArrayLike | None = None, sinks: Tensor | ArrayLike | None = None, cu_seqlens_q: Tensor | ArrayLike | None = None, cu_seqlens_k: Tensor | ArrayLike | None = None, scale: float | None = None, max_bias: float = 0.0, logit_softcap: float = 0.0, causal: str | bool | Causal | None = None, window: tuple[int, int] | None = None, prefix: int = 0, dropout_p: float = 0.0, seed: Tensor | int | None = None, dropout_key: int = 0, sinks_gradient: bool = False, mask_gradient: bool = False) -> Tensor:
    """The gradients of `flash_attn_ext` for the gradient `d` of its result, by the formulas

        D = rowsum(d * out) - d_lse,  dp = d.v (kept weights over 1 - dropout_p, dropped ones 0)
        ds = p (dp - D),  the gradient of the mask, summed over what the mask was tiled to
        dq = scale sum of ds (1 - tanh^2) k,  dk = scale sum of ds (1 - tanh^2) q,  dv = sum of p d
        d_sinks = -sum of exp(sink - lse) D

    Source: Dao 2023, arXiv:2307.08691.

    Args:
        d: [B, N, H, DV].
        d_lse: [B, H, N], of the gradient of lse.
        out, lse: results of `flash_attn_ext` for the same arguments; left out, they are computed first, and the sums
            with them.  Of scores of 1e5 and more lse alone, rounded to f32, has lost digits of those: leave them out.
        sinks_gradient, mask_gradient: whether the gradient of sinks and mask is wanted too.

    The others are those of `flash_attn_ext`.

    Returns:
        One f32 tensor of one axis that holds dq, dk, dv and then, where asked for, d_sinks and d_mask, each like its
        source and f32: `parts` are they, `offsets` their places in bytes, multiples of 16.  The padding is 0.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        GradientError: max_bias is not 0, or k or v is quantized.
        IndexRangeError: as in `flash_attn_ext`.
    """

def flash_attn_ext(q: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, mask: Tensor | ArrayLike | None = None, *, sinks: Tensor | ArrayLike | None = None, cu_seqlens_q: Tensor | ArrayLike | None = None, cu_seqlens_k: Tensor | ArrayLike | None = None, scale: float | None = None, max_bias: float = 0.0, logit_softcap: float = 0.0, causal: str | bool | Causal | None = None, window: tuple[int, int] | None = None, prefix: int = 0, dropout_p: float = 0.0, seed: Tensor | int | None = None, dropout_key: int = 0, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Attention: softmax(scale * q @ k.T + mask) @ v for every head, in memory that grows with N + M only.

        s = scale * q.k,  c tanh(s / c) if there is a softcap,  + mask
        p = exp(s - lse),  lse = log(sum of exp(s) over the keys that the query sees [+ exp(sink)])
        out = sum of p v, with dropout: of those p that are kept, over 1 - dropout_p

    A query sees a key unless the mask, causality or the window hides it, or it is of another sequence:

        N = 2, M = 4     causal="top-left"     "bottom-right"     causal=None, window=(1, 0)
        query 0          x . . .               x x x .            . x x .
        query 1          x x . .               x x x x            . . x x

    Sources: Dao et al. 2022, arXiv:2205.14135, and Dao 2023, arXiv:2307.08691, which compute it in tiles; Press et al.
    2021, arXiv:2108.12409 (ALiBi); Xiao et al. 2023, arXiv:2309.17453 (sinks); Salmon et al. 2011 (Philox).

    Args:
        q: [B, H, N, DK].
        k, v: [B, HK, M, DK] and [B, HK, M, DV]; query head h reads kv head h // (H // HK).  f16, bf16 and
            quantized ones are read as they are.
        mask: f32, f16 or bf16 [N or more, M], with [Hm] or [Bm, Hm] before that which tile heads and batches; it is
            added to the scores.  A boolean NumPy array says which keys to keep.
        sinks: [H], one more score for each head, of a key without a value.
        cu_seqlens_q, cu_seqlens_k: i32 [n + 1], with B = 1: n sequences lie one after another along N and M,
            number i from cu_seqlens[i] up to cu_seqlens[i + 1], and each is attended to by itself.  The numbers rise
            from 0 to N and M at most; rows beyond the last belong to no sequence and see nothing.
        scale: default 1 / sqrt(DK).
        max_bias: of ALiBi, as in ggml: the mask is multiplied with a slope for each head.  No gradient.
        logit_softcap: c > 0 makes scores s into c * tanh(s / c), before the mask.
        causal: "top-left": query i sees the keys up to i.  "bottom-right" or True: up to i + M - N, so that the
            last query sees the last key.
        window: (left, right): the keys from p - left up to p + right, -1 for no bound, where p is the query's
            position among the keys: i with causal="top-left", else i + M - N.
        prefix: so many of the first keys are in every window (causality still hides them).
        dropout_p: the chance that a weight is dropped; the others are divided by 1 - dropout_p.
        seed: of dropout: a scalar i32 tensor, set to another value before each step, or an int.  Whether query i of
            head h keeps key j of sequence b (a row of the batch, or a packed one) is decided by word j % 4
            of Philox4x32-10 of the counter (j // 4, i, h, b) and the key (seed, dropout_key).
        dropout_key: another number for each dropout that shares a seed.
        return_lse: also give lse, [B, H, N].

    Returns:
        [B, N, H, DV].  What is masked out (-inf) or hidden counts for nothing, whatever it holds; a row that sees
        no key gives 0, and the sink or -inf as its lse.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        GradientError: when gradients are built, with max_bias, or for k or v if they are quantized.
        IndexRangeError: during a run, cu_seqlens that do not rise from 0 to N and M at most.
    """

def floor(x: Tensor | ArrayLike) -> Tensor:
    """The largest whole number that is not above x.  No gradient goes through it.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def floor_divide(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """a / b of i32, rounded down, broadcast.  By 0 it is 0.

    Takes a, b: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def geglu(a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> Tensor:
    """gelu(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    `gelu` is that of the hyperbolic tangent.

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def geglu_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> tuple[Tensor, ...]:
    """The gradients of `geglu`.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def geglu_erf(a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> Tensor:
    """gelu_erf(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def geglu_erf_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> tuple[Tensor, ...]:
    """The gradients of `geglu_erf`.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def geglu_quick(a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> Tensor:
    """gelu_quick(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def geglu_quick_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> tuple[Tensor, ...]:
    """The gradients of `geglu_quick`.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def gelu(x: Tensor | ArrayLike) -> Tensor:
    """x * (1 + tanh(u)) / 2 with u = sqrt(2/pi) * (x + 0.044715 * x^3).

    It is computed as it stands here; ggml takes it from a table of f16, which is off by up to 0.002.  Elementwise.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def gelu_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * (s + x * s * (1 - s) * 2u') with s = sigmoid(2u) and `gelu`'s u, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def gelu_erf(x: Tensor | ArrayLike) -> Tensor:
    """x times the chance that a normal variable is below x: x * (1 + erf(x / sqrt(2))) / 2.  Elementwise.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def gelu_erf_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * (P(x) + x * P'(x)) with P(x) = (1 + erf(x / sqrt(2))) / 2, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def gelu_quick(x: Tensor | ArrayLike) -> Tensor:
    """x * sigmoid(1.702 * x), elementwise

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def gelu_quick_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * (s + 1.702 * x * s * (1 - s)) with s = sigmoid(1.702 * x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def get_rows(x: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """Row ids[...] of x[R, n] for each id, as f32: [..., n].  An id outside of 0 ... R-1 stops the run.

    Of a batch x[..., R, n] each matrix has ids of its own, ids[..., r]: [..., r, n].

    Takes x: f32 or f16 or bf16 or quantized; ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def get_rows_back(dout: Tensor | ArrayLike, ids: Tensor | ArrayLike, rows: int, batched: bool = False) -> Tensor:
    """For each of `rows` rows the sum of those rows of `dout` that have its id, in order; zeros for an id not there.

    If it is batched, for each list ids[..., :] by itself: [..., rows, n].

    Takes dout: f32 (f16 and bf16 are cast); ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def global_norm(*xs: Tensor | ArrayLike) -> Tensor:
    """The root of the sum of squares of all elements of all tensors: a scalar.  Squares and sums are double.

    Takes xs: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def hardsigmoid(x: Tensor | ArrayLike) -> Tensor:
    """(x + 3) / 6, but not below 0 nor above 1, elementwise

    Source: Howard et al. 2019, arXiv:1905.02244.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def hardsigmoid_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout / 6 where -3 < x < 3, else 0; NaN where x is NaN, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def hardswish(x: Tensor | ArrayLike) -> Tensor:
    """x * hardsigmoid(x): 0 up to -3, x from 3 on, elementwise

    Source: Howard et al. 2019, arXiv:1905.02244.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def hardswish_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * (2x + 3) / 6 where -3 < x < 3; below 0, above dout, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def im2col_3d(x: Tensor | ArrayLike, channels: int, stride: Sequence[int] = (1, 1, 1), padding: Sequence[int] = (0, 0, 0), dilation: Sequence[int] = (1, 1, 1), *, kernel: Sequence[int]) -> Tensor:
    """What a kernel sees at each position: of x[N IC, D, H, W] the [N OD, OH, OW, IC KD KH KW], IC = `channels`.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def im2col_3d_back(dout: Tensor | ArrayLike, channels: int, stride: Sequence[int] = (1, 1, 1), padding: Sequence[int] = (0, 0, 0), dilation: Sequence[int] = (1, 1, 1), *, kernel: Sequence[int], size: Sequence[int]) -> Tensor:
    """The transpose of `im2col_3d`: each element added to where it came from, [N IC, D, H, W], (D, H, W) = `size`.

    Takes dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def interpolate(x: Tensor | ArrayLike, size: Sequence[int], mode: enum.IntEnum | str | int, align_corners: bool = False, antialias: bool = False) -> Tensor:
    """The last two axes of x[..., H, W] resampled to `size`.

    mode: "nearest", "bilinear" or "bicubic" (a = -0.75; elements beyond the edge are those at the edge).
    align_corners: the first and last elements of both grids lie on each other, instead of the outer edges.
    antialias: bilinear only: where it shrinks, a window as wide as the step, weighted like a tent.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def interpolate_back(dout: Tensor | ArrayLike, size: Sequence[int], mode: enum.IntEnum | str | int, align_corners: bool = False, antialias: bool = False, *, shape: Sequence[int]) -> Tensor:
    """The transpose of `interpolate`, whose x had the last axes `shape`.

    Takes dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def kda(q: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, g: Tensor | ArrayLike, beta: Tensor | ArrayLike, *, scale: float | None = None, initial_state: Tensor | ArrayLike | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False, return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | ArrayLike | None = None, A_log: Tensor | ArrayLike | None = None, dt_bias: Tensor | ArrayLike | None = None, chunk_size: int = 64) -> Tensor | tuple:
    """Kimi Delta Attention, in chunks: time and memory grow with the number of tokens, not with its square.

    For every value head a state S, K x V, runs through the tokens of a sequence:

        S'_t = diag(exp g_t) S_(t-1),  d_t = beta_t (v_t - S'_t^T k_t),  S_t = S'_t + k_t d_t^T,  o_t = scale S_t^T q_t

    `ggrad.mimic.fla` has it under the names of flash-linear-attention.

    Source: Kimi Team 2025, "Kimi Linear", arXiv:2510.26692.

    Args:
        q, k: [B, T, H, K], K up to 256.  v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural logarithms of the decays, meant to be 0 or less; from one above 0.4 to the end of
            its chunk tokens are computed one by one.
        beta: [B, T, HV], how much of the error each token corrects.
        scale: default 1 / sqrt(K).
        initial_state: f32 [N, HV, K, V], zeros if left out.
        output_final_state: also give the states after the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6), in each head.
        use_gate_in_kernel: g holds x of `kda_gate`, which A_log [HV], dt_bias [HV * K] and lower_bound belong to.
        use_beta_sigmoid_in_kernel: beta is sigmoid of what is given; with allow_neg_eigval, twice that.
        safe_gate: promises -5 <= g.  It is checked, where it can be, and changes nothing else.
        disable_recompute: keep intermediate results for the gradient: faster, and takes memory until then.
        return_intermediate_states: also give the states at the starts of all chunks.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: i32 [N + 1], with B = 1: sequence n is the tokens cu_seqlens[n] ... cu_seqlens[n + 1] - 1.  They
            begin at 0, do not decrease and end at T.
        A_log, dt_bias: of any shape with so many elements.
        chunk_size: 32 or 64 tokens.

    Returns:
        o [B, T, HV, V]; with `output_final_state` (o, final_state); with `return_intermediate_states`
        (o, final_state or None, states), states [chunks, HV, K, V] where cu_seqlens make the number of chunks the most
        that N sequences of T tokens can have; those that are none hold 0.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        IndexRangeError: at run time, when cu_seqlens are no boundaries.
        GradientError: when gradients are built, through intermediate states.
    """

def kda_back(q: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, g: Tensor | ArrayLike, beta: Tensor | ArrayLike, initial_state: Tensor | ArrayLike | None = None, A_log: Tensor | ArrayLike | None = None, dt_bias: Tensor | ArrayLike | None = None, cu_seqlens: Tensor | ArrayLike | None = None, do: Tensor | ArrayLike | None = None, dht: Tensor | ArrayLike | None = None, states: Tensor | ArrayLike | None = None, scores: Tensor | ArrayLike | None = None, inverse: Tensor | ArrayLike | None = None, d: Tensor | ArrayLike | None = None, *, form: Form, chunk_size: int, needs: int) -> tuple[Tensor, ...]:
    """Gradients of `kda` by its inputs, packed: those of dq, dk, dv, dg, dbeta, dh0, dA_log and ddt_bias that
    the bits of `needs` name, in this order.

    Args:
        do: gradient of the result, [B, T, HV, V]; dht: of the final state.  Either may be left out.
        states, scores, inverse, d: what `kda` kept of its intermediate results, or none of them: they are then
            computed again.

    Takes q, k, v, g, beta, initial_state, A_log, dt_bias, do, dht, states, scores, inverse, d: f32 (f16 and bf16 are cast); cu_seqlens: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def kda_gate(g: Tensor | ArrayLike, A_log: Tensor | ArrayLike | None = None, dt_bias: Tensor | ArrayLike | None = None, *, lower_bound: float | None = None) -> Tensor:
    """Decays, as logarithms, from what a layer computes: with x = g + dt_bias and A = exp(A_log)

        -A softplus(x)                  where there is no lower_bound
        lower_bound * sigmoid(A x)      where there is; A = 1 if A_log is left out

    Source: Kimi Team 2025, arXiv:2510.26692.

    Args:
        g: [..., HV, K].
        A_log: HV elements; dt_bias: HV * K elements; of any shape.

    Returns:
        f32, of g's shape.

    Raises:
        ShapeError: there is neither A_log nor lower_bound, or shapes or dtypes do not fit.
    """

def kda_gate_back(dout: Tensor | ArrayLike, g: Tensor | ArrayLike, A_log: Tensor | ArrayLike | None = None, dt_bias: Tensor | ArrayLike | None = None, *, gate: enum.IntEnum | str | int, lower_bound: float) -> tuple[Tensor, ...]:
    """Gradients of `kda_gate`, packed: dg, and dA_log and ddt_bias where there are such inputs.

    Takes dout, g, A_log, dt_bias: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def kda_recurrent(q: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, g: Tensor | ArrayLike, beta: Tensor | ArrayLike, *, A_log: Tensor | ArrayLike | None = None, dt_bias: Tensor | ArrayLike | None = None, scale: float | None = None, initial_state: Tensor | ArrayLike | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | ArrayLike | None = None, ssm_state_indices: Tensor | ArrayLike | None = None, num_accepted_tokens: Tensor | ArrayLike | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Kimi Delta Attention token by token: for decoding, where a call goes on from the state of the one before.

    Arguments and result are those of `kda`, and these besides:

    Source: Kimi Team 2025, arXiv:2510.26692.

    Args:
        beta: [B, T, HV], or [B, T, HV, V] for one in every value channel (which has no gradient).
        ssm_state_indices: i32 [N], or [N, S] for up to S tokens a sequence.  initial_state is then a leaf, a pool
            [states, HV, K, V]: token t of sequence n leaves its state in place ssm_state_indices[n, t] of it.
            A place belongs to one sequence.  The pool is updated in place; o is the result.
        num_accepted_tokens: i32 [N], with the pool: sequence n begins with the state in place
            ssm_state_indices[n, num_accepted_tokens[n] - 1], default 1.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit.
        IndexRangeError: at run time, when cu_seqlens are no boundaries or a place is not in the pool.  Nothing has
            been written then.
    """

def kda_recurrent_pool(out: Tensor | ArrayLike, pool: Tensor | ArrayLike, q: Tensor | ArrayLike, k: Tensor | ArrayLike, v: Tensor | ArrayLike, g: Tensor | ArrayLike, beta: Tensor | ArrayLike, slots: Tensor | ArrayLike, accepted: Tensor | ArrayLike | None = None, A_log: Tensor | ArrayLike | None = None, dt_bias: Tensor | ArrayLike | None = None, cu_seqlens: Tensor | ArrayLike | None = None, *, form: Form) -> Tensor:
    """`kda_recurrent` on a pool of states, written into the leaves `out` and `pool`; gives `out`.

    Args:
        out: [B, T, HV, V].
        pool: [states, HV, K, V], or [states, HV, V, K].
        slots: [N, S], or [N] for sequences of one token: after token t sequence n leaves its state in the
            pool's state slots[n, t].  A state belongs to one sequence.
        accepted: [N]; the sequence begins with the state slots[n, accepted[n] - 1].  Left out, with slots[n, 0].

    Takes out, pool, q, k, v, g, beta, A_log, dt_bias: f32 (f16 and bf16 are cast); slots, accepted, cu_seqlens: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def known_gradients(*xs: Tensor | ArrayLike, known: Any, counts: Any = None) -> Tensor:
    """The first input, whose gradients by the others are known: `known(dout)` makes them, None of the last one.

    Args:
        xs: the value; what it depends on; targets that are classes.
        counts: ignore_index, class_weights and whether the value is a mean over the targets that count; None: the
            value does not say.

    Takes xs: f32 or f16 or bf16 or i32 or quantized.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def l2_norm(x: Tensor | ArrayLike, eps: float = 1e-12) -> Tensor:
    """x / max(|x|, eps) along the last axis, with the length |x| = sqrt(sum of x^2).

    Args:
        x: [..., n].
        eps: rows that are not longer are divided by it; their gradient is that of a constant divisor.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def l2_norm_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike, eps: float = 1e-12) -> Tensor:
    """The gradient of `l2_norm`: (dout - y * sum of y * dout) / |x| with y = x / |x|, or dout / eps if |x| <= eps.

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def larger_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """dout where a is larger than b, half of it where they are equal, else 0; NaN where either is.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def leaky_relu(x: Tensor | ArrayLike, negative_slope: float = 0.01) -> Tensor:
    """x where it is above 0, else negative_slope * x.  Elementwise.

    Source: Maas, Hannun and Ng 2013.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def leaky_relu_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike, negative_slope: float = 0.01) -> Tensor:
    """dout where x is above 0, else negative_slope * dout; NaN where it is NaN, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def less(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where a < b, else 0, i32: of f32 or of i32, broadcast.  At NaN it is 0.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def less_equal(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where a <= b, else 0, i32: of f32 or of i32, broadcast.  At NaN it is 0.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def lightning_indexer(q: Tensor | ArrayLike, k: Tensor | ArrayLike, weights: Tensor | ArrayLike, mask: Tensor | ArrayLike | None = None) -> Tensor:
    """sum over heads h of weights[h] * relu(q[h] . k), plus the mask: a score for each query and key, [B, 1, N, M].

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556.

    Args:
        q: [B, N, H, E], some heads for each of N queries.
        k: [B, M, 1, E], one for all heads.
        weights: [B, 1, N, H].
        mask: [B, 1, N, M], or of one batch for all.  Where it is -inf the score is, whatever q and k hold.

    Takes q, k, weights: f32 (f16 and bf16 are cast); mask: f32 or f16 or bf16.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def lightning_indexer_back(dout: Tensor | ArrayLike, q: Tensor | ArrayLike, k: Tensor | ArrayLike, weights: Tensor | ArrayLike, mask: Tensor | ArrayLike | None = None) -> tuple[Tensor, ...]:
    """The gradients of `lightning_indexer` by q, k and weights, packed.  relu has the slope 0 at 0, and NaN at NaN.

    Takes dout, q, k, weights: f32 (f16 and bf16 are cast); mask: f32 or f16 or bf16.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def log(x: Tensor | ArrayLike) -> Tensor:
    """The natural logarithm: -inf at 0, NaN below.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def log1p(x: Tensor | ArrayLike) -> Tensor:
    """log(1 + x), exact near 0 too: -inf at -1, NaN below.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def log2(x: Tensor | ArrayLike) -> Tensor:
    """The logarithm to base 2, exact of powers of 2: -inf at 0, NaN below.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def logical_and(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where neither a nor b is 0, else 0, broadcast.

    Takes a, b: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def logical_or(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where a or b is not 0, else 0, broadcast.

    Takes a, b: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def logical_xor(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where one of a and b is 0, and only one, else 0, broadcast.

    Takes a, b: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def maximum(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """The larger of a and b, broadcast.  Of equal ones each has half of the gradient.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mean(x: Tensor | ArrayLike) -> Tensor:
    """The mean along the last axis, which stays with size 1.  Of empty rows it is NaN.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def minimum(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """The smaller of a and b, broadcast.  Of equal ones each has half of the gradient.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul(a: Tensor | ArrayLike, b: Tensor | ArrayLike, tile: Any = False) -> Tensor:
    """a * b, of f32 or of i32, which wrap around, broadcast as NumPy does; with `tile` as ggml does, see the module.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul_mat(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """b @ a^T: of a[..., M, K] and b[..., N, K] the products of all rows, f32 [..., N, M].

    Batch sizes of b are multiples of a's; equal blocks of them share a batch of a.  A quantized `a` is decoded
    piece by piece on the way, and has no gradient; b stays f32, where ggml rounds its rows to 8 bits.

    Takes a: f32 or f16 or bf16 or quantized; b: f32 or f16 or bf16.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul_mat_id(a: Tensor | ArrayLike, b: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """Each row times the matrix of its expert: of a[E, M, K], b[T, U, K] and ids[T, U] the [T, U, M], f32.

    A b[T, 1, K] is one row for all U experts of a token.  An id outside of 0 ... E-1 stops the run.  A quantized `a`
    has no gradient.

    Source: Shazeer et al. 2017, arXiv:1701.06538.

    Takes a: f32 or f16 or bf16 or quantized; b: f32 or f16 or bf16; ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul_mat_id_back(b: Tensor | ArrayLike, dout: Tensor | ArrayLike, ids: Tensor | ArrayLike, experts: Any) -> Tensor:
    """The gradient of `mul_mat_id` by a, of so many experts: [E, M, K], the sum of dout^T b over each expert's rows.

    Takes b, dout: f32 or f16 or bf16; ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul_mat_id_quantized_back(a: Tensor | ArrayLike, dout: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """The gradient of `mul_mat_id` by b: of a[E, M, K] and dout[T, U, M] the [T, U, K], f32.

    Takes a: quantized; dout: f32 or f16 or bf16; ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul_mat_onto(a: Tensor | ArrayLike, b: Tensor | ArrayLike, total: Tensor | ArrayLike) -> Tensor:
    """total + b @ a^T: of matrices a[M, K], b[N, K] and total[N, M], in one pass over the total.

    Takes a, b: f32 or f16 or bf16; total: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def mul_mat_quantized_back(a: Tensor | ArrayLike, dout: Tensor | ArrayLike) -> Tensor:
    """dout @ a: of a[..., M, K] and dout[..., N, M] the gradient of `mul_mat` by b, f32 [..., N, K].

    Takes a: quantized; dout: f32 or f16 or bf16.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def neg(x: Tensor | ArrayLike) -> Tensor:
    """-x

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def norm(x: Tensor | ArrayLike, weight: Tensor | ArrayLike | None = None, bias: Tensor | ArrayLike | None = None, eps: float = 1e-05) -> Tensor:
    """(x - mean) / sqrt(variance + eps) along the last axis, times `weight`, plus `bias`: LayerNorm.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    Args:
        x: [..., n].
        weight, bias: [n]; either may be left out.
        eps: added to the variance, the mean of (x - mean)^2.

    Takes x, weight, bias: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def norm_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike, weight: Tensor | ArrayLike | None = None, eps: float = 1e-05, weight_gradient: Any = True) -> Tensor:
    """Gradients of `norm`: (dx, dweight, dbias) packed; dx alone without a weight, or if its gradient is not wanted.

    Takes dout, x, weight: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def not_equal(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """1 where a != b, else 0, i32: of f32 or of i32, broadcast.  NaN differs from everything.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def opt_step_adamw(x: Tensor | ArrayLike, grad: Tensor | ArrayLike, m: Tensor | ArrayLike, v: Tensor | ArrayLike, hyper: Tensor | ArrayLike, factor: Tensor | ArrayLike | None = None) -> Tensor:
    """A step of AdamW, written into the leaves `x`, `m` and `v`.

        g = grad * factor
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        x = x * (1 - alpha * decay) - alpha * m * beta1h / (sqrt(v * beta2h) + eps)

    Where the root and eps are 0, as of an element that never had a gradient, only the decay is taken.  If `factor` is
    not finite, as after a gradient with NaN, nothing is written: the step is skipped.

    Sources: Kingma and Ba 2014, arXiv:1412.6980; Loshchilov and Hutter 2017, arXiv:1711.05101.

    Args:
        x: the parameter, an f32 leaf; m and v: its moments, of the same shape.
        grad: of any layout.
        hyper: f32 [7], alpha, beta1, beta2, eps, decay, beta1h = 1 / (1 - beta1^t) and beta2h = 1 / (1 - beta2^t)
            for the step t = 1, 2, ...
        factor: a scalar, default 1; see `clip_factor`.

    Takes x, m, v: f32 or f16 or bf16; grad, hyper, factor: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def opt_step_sgd(x: Tensor | ArrayLike, grad: Tensor | ArrayLike, hyper: Tensor | ArrayLike, factor: Tensor | ArrayLike | None = None) -> Tensor:
    """A step of gradient descent, written into the leaf `x`: x * (1 - alpha * decay) - alpha * grad * factor.

    If `factor` is not finite, as after a gradient with NaN, nothing is written: the step is skipped.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, for the decay.

    Args:
        x: the parameter, an f32 leaf.
        grad: of any layout.
        hyper: f32 [2], alpha and decay.
        factor: a scalar, default 1; see `clip_factor`.

    Takes x: f32 or f16 or bf16; grad, hyper, factor: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def permute(x: Tensor | ArrayLike, axes: Sequence[int]) -> Tensor:
    """The axes of `x` in another order, a view: axis i of the result is axis `axes[i]` of `x` (NumPy's transpose).

    Takes x: f32 or f16 or bf16 or i32 or quantized.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def pool_2d(x: Tensor | ArrayLike, at: Tensor | ArrayLike | None = None, *, mode: enum.IntEnum | str | int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int] = (0, 0), count_padding: bool = True) -> Tensor:
    """Windows over the last two axes of x[..., H, W]: [..., (H + 2 padding - kernel) // stride + 1, ...].

    mode: "max", in which padding has no part, or "avg", in which it counts as zeros, as ggml's does, or with
    count_padding=False not at all: the sum is divided by how many elements of the window lie inside x.  `kernel`,
    `stride` and `padding` are pairs.  The gradient of a maximum goes to the first of equal elements.  With `at`, of the
    shape of x, the result is what x holds where `at` has its maximum; `at` has no gradient.

    Takes x, at: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def pool_2d_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike | None = None, *, mode: enum.IntEnum | str | int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int] = (0, 0), count_padding: bool = True, size: Sequence[int]) -> Tensor:
    """The gradient of `pool_2d` by x, whose last axes have `size`.  A maximum needs x itself.

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def pow(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a ** b, f32, broadcast, with the special cases of C's pow: of negative numbers only whole powers, NaN of others;
    anything to the power 0 is 1, and 1 to any power, NaN included.

    Powers that are small whole numbers or halves are products and roots.  The gradient by `b` is NaN where `a` is
    negative.

    Raises:
        ShapeError: shapes that do not broadcast.
    """

def reduce_scatter(x: Tensor | ArrayLike, axis: int, comm: Any) -> Tensor:
    """The sum of x over all ranks, cut along an axis: each rank has its part.

    Args:
        x: of the same shape on all ranks, its axis a multiple of their number.
        axis: which is cut.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def reduce_to(x: Tensor | ArrayLike, root: int = 0, *, comm: Any) -> Tensor:
    """The sum of x over all ranks, on rank `root`; zeros on the others.

    Args:
        x: of the same shape on all ranks.
        root: a rank of the group.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def reglu(a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> Tensor:
    """relu(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def reglu_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> tuple[Tensor, ...]:
    """The gradients of `reglu`.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def relu(x: Tensor | ArrayLike) -> Tensor:
    """x where it is above 0, else 0; its gradient at 0 is 0.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def relu_back(dout: Tensor | ArrayLike, y: Tensor | ArrayLike) -> Tensor:
    """dout where the result y is above 0, else 0; NaN where it is NaN, elementwise

    Takes dout, y: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def remainder(a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """What `floor_divide` leaves of i32: a - b * floor(a / b), with the sign of b.  By 0 it is a.

    Takes a, b: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def repeat(x: Tensor | ArrayLike, shape: Sequence[int]) -> Tensor:
    """`x` tiled until it fills `shape`; each size of `x` divides the new one's.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def repeat_back(x: Tensor | ArrayLike, shape: Sequence[int]) -> Tensor:
    """The sum of the tiles of that shape that `x` consists of: what a broadcast operand's gradient is.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def replicated(x: Tensor | ArrayLike, comm: Any) -> Tensor:
    """x, which all ranks have alike: a parameter, say.  Its gradient is the sum over all ranks; nothing is sent before.

    Args:
        x: of the same shape on all ranks.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def reshape(x: Tensor, shape: int | Sequence[int], *more: int) -> Tensor:
    """The elements of `x`, in order, in another shape: a view, or of strides that do not allow one a copy.

    Args:
        x: any dtype and strides.
        shape: the new sizes, also one by one; one of them may be -1.

    Raises:
        ShapeError: other number of elements, or rows of quantized blocks that would be cut.
    """

def rms_norm(x: Tensor | ArrayLike, weight: Tensor | ArrayLike | None = None, eps: float = 1e-05) -> Tensor:
    """x / sqrt(mean of x^2 + eps) along the last axis, times `weight`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        x: [..., n].
        weight: [n], may be left out.
        eps: added to the mean of the squares.

    Takes x, weight: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def rms_norm_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike, weight: Tensor | ArrayLike | None = None, eps: float = 1e-05, weight_gradient: Any = True) -> Tensor:
    """Gradients of `rms_norm`: (dx, dweight) packed; dx alone without a weight, or if its gradient is not wanted.

    Takes dout, x, weight: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def rope(x: Tensor | ArrayLike, pos: Tensor | ArrayLike, freq_factors: Tensor | ArrayLike | None = None, n_dims: int = 0, mode: enum.IntEnum | str | int = ..., n_ctx_orig: int = 0, freq_base: float = 10000.0, freq_scale: float = 1.0, ext_factor: float = 0.0, attn_factor: float = 1.0, beta_fast: float = 32.0, beta_slow: float = 1.0, sections: Sequence[int] = (), offset: int = 0) -> Tensor:
    """The pairs of elements of x[..., T, H, D] turned by the angles of their positions pos[T].

    Pair i turns by pos * freq_base ** (-2 i / n_dims), divided by freq_factors[i].

    Sources: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (YaRN: ext_factor,
    attn_factor, beta_fast and beta_slow).

    Args:
        n_dims: elements of a row that are turned, the others stay as they are; 0: all from `offset` on.
        mode: "normal" turns 2i with 2i + 1, "neox" i with i + n_dims / 2.  "mrope", "imrope" and "vision" have four
            positions for each place, pos[4 T]: all first ones, all second ones, ...; see `rope_multi`.
        freq_scale: every angle is multiplied with it: 1 / s for a context s times as long.
        ext_factor: YaRN: how much of that is taken back for pairs that turn often within n_ctx_orig positions:
            all of it above beta_fast turns, nothing below beta_slow; 0 switches it off.
        attn_factor: every turned element is multiplied with it, and with YaRN also with 1 + 0.1 ln(1 / freq_scale).
        sections: of the modes with four positions: how many pairs in turn use each of them.
        offset: the first element of a row that is turned.

    Takes x, freq_factors: f32 (f16 and bf16 are cast); pos: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def rope_back(dout: Tensor | ArrayLike, pos: Tensor | ArrayLike, freq_factors: Tensor | ArrayLike | None = None, n_dims: int = 0, mode: enum.IntEnum | str | int = ..., n_ctx_orig: int = 0, freq_base: float = 10000.0, freq_scale: float = 1.0, ext_factor: float = 0.0, attn_factor: float = 1.0, beta_fast: float = 32.0, beta_slow: float = 1.0, sections: Sequence[int] = (), offset: int = 0) -> Tensor:
    """The gradient of `rope`, its transpose: turned the other way, and multiplied with the same factor.

    Takes dout, freq_factors: f32 (f16 and bf16 are cast); pos: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def round(x: Tensor | ArrayLike) -> Tensor:
    """The nearest whole number, halves away from 0.  No gradient goes through it.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def scale(x: Tensor | ArrayLike, factor: float, bias: float = 0.0) -> Tensor:
    """factor * x + bias, with two numbers.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def selective_scan(s: Tensor | ArrayLike, x: Tensor | ArrayLike, dt: Tensor | ArrayLike, A: Tensor | ArrayLike, B: Tensor | ArrayLike, C: Tensor | ArrayLike, snapshots: Any = 1) -> tuple[Tensor, ...]:
    """y[N, T, H, D] and states[snapshots N, H, D, S] of a scan over tokens t, of heads that decay at their own paces:

        S_t = exp(dt_t A) S_(t-1) + (dt_t x_t) B_t^T        y_t = S_t C_t

    s: [N, H, D, S]; x: [N, T, H, D]; dt: [N, T, H]; A: [H, S] or [H, 1]; B, C: [N, T, G, S], shared by the H / G heads
    of a group.  `states` are the N states after the last token, then those after the one before, and so on.

    Takes s, x, dt, A, B, C: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def selective_scan_back(s: Tensor | ArrayLike, x: Tensor | ArrayLike, dt: Tensor | ArrayLike, A: Tensor | ArrayLike, B: Tensor | ArrayLike, C: Tensor | ArrayLike, dy: Tensor | ArrayLike | None = None, dstates: Tensor | ArrayLike | None = None) -> tuple[Tensor, ...]:
    """The gradients of `selective_scan` by its inputs, in their order.

    Takes s, x, dt, A, B, C, dy, dstates: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def set(a: Tensor, b: Tensor, strides: Sequence[int] | None = None, offset: int = 0) -> Tensor:
    """A copy of `a` with `b` instead of a window of it; arguments as those of `acc`.

    Raises:
        ShapeError: the window does not lie in `a`, or meets an element twice; or dtypes differ.
    """

def set_rows(a: Tensor | ArrayLike, b: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """A copy of a[..., R, n] with row ids[i] replaced by row i of b[..., r, n].  Of equal ids the last one counts.

    Args:
        a: f32, f16 or bf16; the result has its dtype.
        b: f32, rounded to that.
        ids: [..., r], tiled over the batch.  An id outside of 0 ... R-1 stops the run.

    Takes a: f32 or f16 or bf16; b: f32 (f16 and bf16 are cast); ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def set_rows_back(dout: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """The gradient of `set_rows` by b: row ids[i] of dout[..., R, n] for each i, zeros if a later one has its id.

    Takes dout: f32 (f16 and bf16 are cast); ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sgn(x: Tensor | ArrayLike) -> Tensor:
    """The sign of x: 1, -1, or 0 at 0.  No gradient goes through it.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def shift(x: Tensor | ArrayLike, by: int = 1, *, comm: Any) -> Tensor:
    """What rank - by has, in a ring: each rank's x goes to rank + by.

    Args:
        x: of the same shape on all ranks.
        by: how far.
        comm: the group.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sigmoid(x: Tensor | ArrayLike) -> Tensor:
    """1 / (1 + exp(-x)), elementwise

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sigmoid_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * s * (1 - s) with s = sigmoid(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def silu(x: Tensor | ArrayLike) -> Tensor:
    """x * sigmoid(x), also called swish, elementwise

    Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def silu_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * (s + x * s * (1 - s)) with s = sigmoid(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sin(x: Tensor | ArrayLike) -> Tensor:
    """The sine, for x of any size.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sin_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * cos(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sinh(x: Tensor | ArrayLike) -> Tensor:
    """The hyperbolic sine, (exp(x) - exp(-x)) / 2.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sinkhorn(logits: Tensor | ArrayLike, eps: float = 1e-06, *, n_iter: int) -> Tensor:
    """Of logits[T, n, n] matrices whose rows and columns sum to about 1.

    softmax along rows + eps; then `n_iter` times (the first time columns only) rows and columns divided by their
    sums + eps.

    Source: Sinkhorn and Knopp 1967.

    Takes logits: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sinkhorn_back(dout: Tensor | ArrayLike, logits: Tensor | ArrayLike, eps: float = 1e-06, *, n_iter: int) -> Tensor:
    """The gradient of `sinkhorn` by its logits: the rounds again, then backwards.

    Takes dout, logits: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def slice_add(a: Tensor | ArrayLike, b: Tensor | ArrayLike, starts: Sequence[int], steps: Sequence[int]) -> Tensor:
    """A copy of `a` with `b` added to the window that `slice_view` looks at.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def slice_back(dout: Tensor | ArrayLike, shape: Sequence[int], starts: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Zeros of a shape, with `dout` in the window that `slice_view` looks at.

    Takes dout: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def slice_view(x: Tensor | ArrayLike, starts: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Along each axis the elements start, start + step, ..., as many as `shape` says: a view.

    Steps may be negative.

    Takes x: f32 or f16 or bf16 or i32 or quantized.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def soft_max(x: Tensor | ArrayLike, mask: Tensor | ArrayLike | None = None, sinks: Tensor | ArrayLike | None = None, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
    """The softmax along the last axis of scale * x + slope * mask.

    Where the mask is -inf, `x` is not looked at.  A row in which all is masked out gives zeros.

    Args:
        x: [..., rows, n]; with max_bias or sinks [..., H, rows, n].
        mask: f32, f16 or bf16 [..., rows or more, n]; rows beyond those of `x` are not read.  Along the axes
            before the last it is tiled as the operands of `add` are: each size divides that of `x`.
        sinks: [H], a logit for each head that takes its share of every row's sum, and gives it to no place.
        scale: of `x`.
        max_bias: of ALiBi: the mask is multiplied with a slope for each head.  Without it, slopes are 1.

    Takes x, sinks: f32 (f16 and bf16 are cast); mask: f32 or f16 or bf16.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def soft_max_back(dout: Tensor | ArrayLike, y: Tensor | ArrayLike, scale: float = 1.0) -> Tensor:
    """The gradient of `soft_max` by x, from its result: scale * y * (dout - sum of dout * y along the row).

    Where `y` is 0, `dout` is not looked at.

    Takes dout, y: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def soft_max_sinks_back(dout: Tensor | ArrayLike, y: Tensor | ArrayLike, x: Tensor | ArrayLike, sinks: Tensor | ArrayLike, mask: Tensor | ArrayLike | None = None, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
    """What each row adds to the gradient of `soft_max` by its sink, from its result y: [..., H, rows, 1].

    It is -(the sink's share) * sum of dout * y along the row.

    Takes dout, y, x, sinks: f32 (f16 and bf16 are cast); mask: f32 or f16 or bf16.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def softplus(x: Tensor | ArrayLike) -> Tensor:
    """log(1 + exp(x)), elementwise

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def softplus_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * sigmoid(x), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def solve_tri(a: Tensor | ArrayLike, b: Tensor | ArrayLike, transposed: bool = False) -> Tensor:
    """x of a x = b, or of a^T x = b, for a[..., n, n], of which the lower triangle is read, and b[..., n, m].

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sparse_flash_mla(q: Tensor | ArrayLike, *, ori_kv: Tensor | ArrayLike | None = None, cmp_kv: Tensor | ArrayLike | None = None, ori_sparse_indices: Tensor | ArrayLike | None = None, cmp_sparse_indices: Tensor | ArrayLike | None = None, ori_block_table: Tensor | ArrayLike | None = None, cmp_block_table: Tensor | ArrayLike | None = None, cu_seqlens_q: Tensor | ArrayLike | None = None, cu_seqlens_ori_kv: Tensor | ArrayLike | None = None, cu_seqlens_cmp_kv: Tensor | ArrayLike | None = None, seqused_q: Tensor | ArrayLike | None = None, seqused_ori_kv: Tensor | ArrayLike | None = None, seqused_cmp_kv: Tensor | ArrayLike | None = None, cmp_residual_kv: Tensor | ArrayLike | None = None, ori_topk_length: Tensor | ArrayLike | None = None, cmp_topk_length: Tensor | ArrayLike | None = None, sinks: Tensor | ArrayLike | None = None, softmax_scale: float | None = None, cmp_ratio: int | None = None, ori_mask_mode: int = 0, cmp_mask_mode: int = 0, ori_win_left: int = -1, ori_win_right: int = -1, layout_q: str | Layout = 'BSND', layout_kv: str | Layout = 'BSND', return_softmax_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a window, to compressed rows, or to a choice of them, whose rows are both keys and values.

    What is given decides: `ori_kv` alone is a sliding window; with `cmp_kv` all compressed rows are seen too; with
    `cmp_sparse_indices` those of a list.  All that a token sees is one softmax, and what both kinds cover counts twice.
    Shapes are said at the top of the module.  Index tensors are i32 and read at each run.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556.

    Args:
        ori_sparse_indices, cmp_sparse_indices: the rows each token sees, counted from its sequence's first.  A list
            ends at its first negative entry; an entry that the masks do not let the token see is passed over; one that
            comes twice counts twice.
        ori_block_table, cmp_block_table: [B, n], for layout_kv="PA_BBND": row j of a sequence lies in its block
            table[j // block size], at j % block size.
        cu_seqlens_q, cu_seqlens_ori_kv, cu_seqlens_cmp_kv: [B + 1], for TND: where each sequence begins; the last is
            where the last one ends.
        seqused_q, seqused_ori_kv, seqused_cmp_kv: [B], how many tokens and rows of each sequence are in use, from its
            first; default all.  What is not in use is not read, and its results and gradients are 0.
        cmp_residual_kv: [B], tokens after the last whole group of cmp_ratio; default 0.
        ori_topk_length, cmp_topk_length: [B, S1, 1] or [T1, 1], entries of each list that count; default all.
        sinks: [N1], a logit for each head that takes its share of the softmax and has no value.  -inf is none; +inf
            takes all.
        softmax_scale: of q . k; default 1 / sqrt(D).  Sinks are not scaled.
        cmp_ratio: 1 to 128 tokens for each row of cmp_kv; default 1.
        ori_mask_mode: which rows of ori_kv the query at position p of its sequence sees: 0 all, 3 those up to p,
            4 those from p - ori_win_left to p + ori_win_right (-1: no bound).  The last query is at the last row.
        cmp_mask_mode: 0 all rows of cmp_kv, 3 those whose tokens are all at or before p.
        layout_q, layout_kv: "BSND" or "TND", the same; layout_kv may be "PA_BBND".
        return_softmax_lse: also give the log of the sum of exp(scores) and exp(sinks).

    Returns:
        attn_out, of q's shape.  A token that sees nothing has 0 there, and 0 as its lse.

    Raises:
        ShapeError: arguments do not fit or contradict each other.
        GradientError: when gradients are built, for pages.
        IndexRangeError: at a run, for lengths or pages outside of their tensors; nothing has been written then.
    """

def sparse_flash_mla_grad(q: Tensor | ArrayLike, dout: Tensor | ArrayLike, attn_out: Tensor | ArrayLike, softmax_lse: Tensor | ArrayLike, *, ori_kv: Tensor | ArrayLike | None = None, cmp_kv: Tensor | ArrayLike | None = None, ori_sparse_indices: Tensor | ArrayLike | None = None, cmp_sparse_indices: Tensor | ArrayLike | None = None, cu_seqlens_q: Tensor | ArrayLike | None = None, cu_seqlens_ori_kv: Tensor | ArrayLike | None = None, cu_seqlens_cmp_kv: Tensor | ArrayLike | None = None, seqused_q: Tensor | ArrayLike | None = None, seqused_ori_kv: Tensor | ArrayLike | None = None, seqused_cmp_kv: Tensor | ArrayLike | None = None, cmp_residual_kv: Tensor | ArrayLike | None = None, ori_topk_length: Tensor | ArrayLike | None = None, cmp_topk_length: Tensor | ArrayLike | None = None, sinks: Tensor | ArrayLike | None = None, softmax_scale: float | None = None, cmp_ratio: int | None = None, ori_mask_mode: int = 0, cmp_mask_mode: int = 0, ori_win_left: int = -1, ori_win_right: int = -1, layout_q: str | Layout = 'BSND', layout_kv: str | Layout = 'BSND') -> SparseFlashMlaGrad:
    """The gradients of `sparse_flash_mla`, whose arguments these are, for the gradient `dout` of its result.

    With lse the forward's, x_k the rows that token t sees, and c the scale:

        P_k = exp(c q . x_k - lse)    dP_k = dout . x_k    dS_k = P_k (dP_k - dout . attn_out)
        dq = c sum_k dS_k x_k         dx_k = sum over tokens and heads of c dS_k q + P_k dout
        d_sinks = - sum over tokens of exp(sinks - lse) (dout . attn_out)

    Source: DeepSeek-AI 2025, arXiv:2512.02556.

    Args:
        dout, attn_out: of q's shape.
        softmax_lse: the forward's second result.

    Returns:
        dq, d_ori_kv, d_cmp_kv, d_sinks, and for each list the mean over heads of P at its entries (0 at those that do
        not count): ori_softmax_l1norm, cmp_softmax_l1norm.  Those whose input is left out are None.

    Raises:
        ShapeError: arguments do not fit or contradict each other; a mask of cmp_kv needs cmp_residual_kv here.
        IndexRangeError: at a run, for lengths outside of their tensors; nothing has been written then.
    """

def sqr(x: Tensor | ArrayLike) -> Tensor:
    """x * x, elementwise

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sqr_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """2 * x * dout, elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sqrt(x: Tensor | ArrayLike) -> Tensor:
    """The square root; NaN below 0.  Its gradient is infinite at 0.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sqrt_back(dout: Tensor | ArrayLike, y: Tensor | ArrayLike) -> Tensor:
    """dout / (2 * y), of the result y, elementwise

    Takes dout, y: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def step(x: Tensor | ArrayLike) -> Tensor:
    """1 where x is above 0, else 0.  No gradient goes through it.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def stop_gradient(x: Tensor | ArrayLike) -> Tensor:
    """The same values, through which no gradient flows: a target that is computed, not learnt.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def strided_back(dout: Tensor | ArrayLike, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
    """Zeros of a shape, with `dout` added where `view` looks: what is seen more than once gets the sum.

    Takes dout: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sub(a: Tensor | ArrayLike, b: Tensor | ArrayLike, tile: Any = False) -> Tensor:
    """a - b, of f32 or of i32, which wrap around, broadcast as NumPy does; with `tile` as ggml does, see the module.

    Takes a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def sum(x: Tensor | ArrayLike, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
    """The sum of all elements, a scalar of shape (); or the sums along an axis, or along several.

    Args:
        x: f32; halves are cast.
        axis: None sums all.
        keepdims: whether what is summed stays as an axis of size 1.

    Raises:
        ShapeError: an axis that `x` does not have, or one twice.
    """

def sum_rows(x: Tensor | ArrayLike) -> Tensor:
    """The sum along the last axis, which stays with size 1.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def swiglu(a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> Tensor:
    """silu(a) * b, of two arrays of one shape; or without `b` of the halves of the rows of a[..., 2 n].

    Args:
        swapped: the second half goes through the function, and not the first.

    Source: Shazeer 2020, arXiv:2002.05202.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def swiglu_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, swapped: bool = False) -> tuple[Tensor, ...]:
    """The gradients of `swiglu`.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def swiglu_oai(a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, alpha: float = 1.702, limit: float = 7.0, swapped: bool = False) -> Tensor:
    """x * sigmoid(alpha * x) * (1 + gate), with x = min(a, limit) and the gate b held within -limit ... limit.

    Gradients pass where a <= limit, and where b lies within the limits.

    Source: OpenAI 2025, the model card of gpt-oss, arXiv:2508.10925.

    Takes a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def swiglu_oai_back(dout: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike | None = None, alpha: float = 1.702, limit: float = 7.0, swapped: bool = False) -> tuple[Tensor, ...]:
    """The gradients of `swiglu_oai`.

    Takes dout, a, b: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def tan(x: Tensor | ArrayLike) -> Tensor:
    """The tangent, for x of any size.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def tanh(x: Tensor | ArrayLike) -> Tensor:
    """The hyperbolic tangent.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def tanh_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike) -> Tensor:
    """dout * (1 - tanh(x)^2) = dout * 4 e / (1 + e)^2 with e = exp(-2 |x|), elementwise

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def top_k(x: Tensor | ArrayLike, k: int) -> Tensor:
    """Where each row's k largest elements stand, the largest first: i32 [..., k].  Of equal ones the first comes first;
    NaN is less than everything.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def triangle(x: Tensor | ArrayLike, diagonal: int = 0, upper: bool = False, fill: float = 0.0) -> Tensor:
    """x[..., i, j] up to the diagonal j - i = `diagonal`, or from it on if `upper`; all else is `fill`.

    What is filled is not looked at.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def trunc(x: Tensor | ArrayLike) -> Tensor:
    """x without what follows its point: towards 0.  No gradient goes through it.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def view(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
    """Any look into the memory of a contiguous `x` (another is copied first), as ggml's view_1d to view_4d.

    Args:
        shape, strides: sizes, and bytes from one element to the next, outermost axis first.
        offset: bytes to the first element.

    Elements may be seen more than once; their gradients add up.

    Raises:
        ShapeError: the look goes beyond `x`, or does not begin or go on at elements; or `x` is quantized.
    """

def wait_for(x: Tensor | ArrayLike, others: Any) -> Tensor:
    """`x`, which nothing reads before the other tensors are complete: so that their inputs' memory is free again.

    Takes x: f32 or f16 or bf16 or i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def where(condition: Tensor | ArrayLike, a: Tensor | ArrayLike, b: Tensor | ArrayLike) -> Tensor:
    """a where the condition is not 0, else b: of f32 or of i32, broadcast as NumPy does.

    What is not chosen is not looked at: a NaN there does no harm, and its gradient is 0.

    Takes condition: i32; a, b: f32 or i32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def write_rows(a: Tensor | ArrayLike, b: Tensor | ArrayLike, ids: Tensor | ArrayLike) -> Tensor:
    """`set_rows`, written into the leaf `a`; the rows that `ids` does not name are not touched.  No gradient.

    It is how a cache of keys and values grows.  Where an id stops the run, rows of the others may have been written.

    Args:
        a: a leaf [..., R, n], f32, f16 or bf16.
        b: f32 [..., r, n], rounded to that.
        ids: [..., r], tiled over the batch.  Of equal ids the last one counts.

    Takes a: f32 or f16 or bf16; b: f32 (f16 and bf16 are cast); ids: i32.

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def xielu(x: Tensor | ArrayLike, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-06) -> Tensor:
    """p * x^2 + beta * x where x is above 0, else n * (exp(min(x, eps)) - 1 - x) + beta * x.

    Args:
        alpha_p: p is softplus(alpha_p).
        alpha_n: n is beta + softplus(alpha_n).
        beta: the slope at 0.
        eps: a little below 0.

    Source: Huang and Schlag, "Deriving Activation Functions Using Integration", arXiv:2411.13010.  Elementwise.

    Takes x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

def xielu_back(dout: Tensor | ArrayLike, x: Tensor | ArrayLike, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-06) -> Tensor:
    """dout * (2 * p * x + beta) where x is above 0, else dout * (n * (exp(x) - 1) + beta), or where x is above eps
    dout * (beta - n), as the definition of `xielu` has it.  Elementwise.

    Takes dout, x: f32 (f16 and bf16 are cast).

    Raises:
        ShapeError: shapes, dtypes or attributes do not fit.
    """

