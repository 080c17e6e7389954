"""Attention: sizes round the edges of tiles, grouped heads, masks, causality, rows that see nothing."""

import numpy as np

import ggrad as gg

from .blocks import random_blocks

INF, NAN = np.inf, np.nan


def qkv(m, B=1, H=2, N=5, D=4, *, HK=None, M=None, DV=None):
    HK, M, DV = HK or H, N if M is None else M, D if DV is None else DV
    return m(B, H, N, D), m(B, HK, M, D), m(B, HK, M, DV)


def constants(m, **sizes):
    return (m(*t.shape, param=False) for t in qkv(m, **sizes))


def hole(m, *shape, p=0.4, dtype=gg.F32):
    """A mask of random values, -inf in some places."""
    values = m.rng.uniform(-2, 2, shape)
    values[m.rng.uniform(size=shape) < p] = -INF
    return m.of(values, dtype=dtype, param=False)


def lower(m, N, M):
    return m.of(np.where(np.tri(N, M, dtype=bool), 0, -INF), dtype=gg.F16, param=False)


def learnt(m, *shape, dtype=gg.F32):
    """A mask of random values that is a parameter."""
    return m(*shape, dtype=dtype)


def packed(m, queries, keys):
    return {
        f"cu_seqlens_{x}": m.of(np.array(ends), dtype=gg.I32, param=False) for x, ends in (("q", queries), ("k", keys))
    }


def attend(*args, **options):
    return gg.flash_attn_ext(*args, return_lse=True, **options)


def garbage_in_masked_keys(m):
    """NaN and infinities in keys and values that the mask hides from every query."""
    q, k, v = (m.rng.uniform(-2, 2, shape) for shape in ((1, 2, 5, 4), (1, 1, 7, 4), (1, 1, 7, 3)))
    mask = np.zeros((5, 7))
    mask[:, [1, 4]] = -INF
    k[..., 1, :], v[..., 1, :], k[..., 4, 1], v[..., 4, 0] = NAN, INF, -INF, NAN
    return m.of(q), m.of(k, param=False), m.of(v, param=False), m.of(mask, param=False)


def garbage_ahead(m):
    """NaN and infinities in the last key, which only the last query sees."""
    q, k, v = (m.rng.uniform(-2, 2, (1, 1, 6, 4)) for _ in range(3))
    k[..., 5, 2], v[..., 5, 1] = NAN, INF
    return m.of(q, param=False), m.of(k, param=False), m.of(v, param=False)


FORWARD = {
    "plain": lambda m: attend(*qkv(m)),
    "causal": lambda m: attend(*qkv(m, N=9), causal="bottom-right"),
    "more keys": lambda m: attend(*qkv(m, N=3, M=8), causal=True),
    "more keys, top-left": lambda m: attend(*qkv(m, N=3, M=8), causal="top-left"),
    "more queries: the first see nothing": lambda m: gg.flash_attn_ext(*qkv(m, N=9, M=4), causal="bottom-right"),
    "more queries, top-left": lambda m: attend(*qkv(m, N=9, M=4), causal="top-left"),
    "grouped heads": lambda m: attend(*qkv(m, B=2, H=6, HK=2, N=7, D=5), causal="bottom-right"),
    "one kv head": lambda m: attend(*qkv(m, H=8, HK=1, N=4, M=6)),
    "d of v differs": lambda m: attend(*qkv(m, N=6, D=7, DV=11), scale=0.2),
    "one element": lambda m: attend(*qkv(m, H=1, N=1, D=1)),
    "one query": lambda m: attend(*qkv(m, N=1, M=37, D=8), causal="bottom-right"),
    "one key": lambda m: attend(m(1, 2, 7, 8, param=False), m(1, 2, 1, 8, param=False), m(1, 2, 1, 8)),
    "few queries, keys in splits": lambda m: attend(*qkv(m, H=2, HK=1, N=2, M=1100, D=4), causal=True),
    "several tiles of queries and keys": lambda m: attend(*qkv(m, H=1, N=101, M=131, D=16), causal="bottom-right"),
    "a long row of keys": lambda m: attend(*qkv(m, H=2, HK=1, N=35, M=530, D=8, DV=12)),
    "many keys in chunks": lambda m: attend(*qkv(m, H=1, N=40, M=600, D=8), causal="top-left"),
    "large d": lambda m: attend(*qkv(m, H=1, N=5, M=6, D=200, DV=80)),
    "softcap": lambda m: attend(*qkv(m, N=6), logit_softcap=1.5, causal="bottom-right"),
    "softcap and mask": lambda m: attend(*qkv(m, N=6), hole(m, 6, 6), logit_softcap=2.0),
    "ALiBi": lambda m: gg.flash_attn_ext(*constants(m, H=6), hole(m, 5, 5, p=0.2), max_bias=8.0),
    "mask": lambda m: attend(*qkv(m, B=2, N=5, M=7), hole(m, 5, 7)),
    "mask with more rows": lambda m: attend(*qkv(m, N=5, M=7), hole(m, 1, 1, 8, 7)),
    "mask of each head": lambda m: attend(*qkv(m, B=2, H=4, HK=2), hole(m, 2, 5, 5)),
    "mask of each batch": lambda m: attend(*qkv(m, B=4, H=2), hole(m, 2, 1, 5, 5)),
    "f16 mask, causal": lambda m: attend(*qkv(m, N=67, H=1, D=8), lower(m, 67, 67)),
    "bf16 mask": lambda m: attend(*qkv(m), hole(m, 5, 5, dtype=gg.BF16)),
    "mask and causality": lambda m: attend(*qkv(m, N=33, M=40), hole(m, 33, 40), causal="bottom-right"),
    "all masked out, with lse": lambda m: attend(*constants(m), m.of(np.full((5, 5), -INF), param=False)),
    "all masked out": lambda m: gg.flash_attn_ext(*qkv(m), m.of(np.full((5, 5), -INF), param=False)),
    "a row of large negatives is not empty": lambda m: attend(
        *constants(m), m.of(np.full((5, 5), -3.4e38), param=False)
    ),
    "boolean mask": lambda m: attend(*qkv(m, N=4), np.tri(4, dtype=bool)),
    "garbage in masked keys": lambda m: attend(*garbage_in_masked_keys(m), logit_softcap=3.0),
    "garbage ahead": lambda m: attend(*garbage_ahead(m), causal="top-left"),
    "large scores": lambda m: attend(*constants(m, N=6), scale=1e30),
    "window": lambda m: attend(*qkv(m, N=9, M=11), window=(2, 1)),
    "window to the left, causal, with a prefix": lambda m: attend(*qkv(m, N=40), causal=True, window=(3, 0), prefix=2),
    "window over several tiles": lambda m: attend(
        *qkv(m, H=2, HK=1, N=150, M=290, D=8), causal="top-left", window=(40, -1), prefix=5
    ),
    "window to the right, with a prefix": lambda m: attend(*qkv(m, N=30, M=37), window=(-1, 2), prefix=20),
    "sinks": lambda m: attend(*qkv(m, H=3, HK=1, N=6, M=9), sinks=m(3), causal="top-left"),
    "sinks of which one is -inf, rows that see nothing": lambda m: gg.flash_attn_ext(
        *qkv(m, H=3, N=9, M=4), sinks=m.of(np.array([0.5, -INF, -1])), causal=True
    ),
    "packed": lambda m: attend(*qkv(m, H=4, HK=2, N=20, M=30), **packed(m, [0, 3, 3, 20], [0, 9, 12, 30])),
    "packed, causal, with rows to spare": lambda m: gg.flash_attn_ext(
        *qkv(m, N=50, M=40), hole(m, 50, 40), causal=True, **packed(m, [0, 17, 19, 44], [0, 20, 20, 38])
    ),
    "packed, no sequence": lambda m: gg.flash_attn_ext(*qkv(m, N=3, M=4), **packed(m, [0], [0])),
    "dropout": lambda m: attend(*qkv(m, H=4, HK=2, N=19, M=21), dropout_p=0.3, seed=m.ints(below=1000)),
    "dropout of all": lambda m: attend(*qkv(m), dropout_p=1.0, seed=1),
    "dropout, mask, window, packed": lambda m: gg.flash_attn_ext(
        *qkv(m, N=40, M=40),
        learnt(m, 2, 40, 40),
        window=(9, 3),
        dropout_p=0.5,
        seed=2,
        dropout_key=7,
        **packed(m, [0, 13, 40], [0, 21, 33]),
    ),
    "mask that learns": lambda m: attend(*qkv(m, B=2, H=4, HK=2, N=5, M=7), learnt(m, 5, 7)),
    "mask of heads that learns, with rows to spare": lambda m: attend(
        *qkv(m, B=2, H=6, HK=3, N=99, M=130), learnt(m, 3, 101, 130), logit_softcap=1.5, causal=True
    ),
    "f16 mask that learns alone": lambda m: gg.flash_attn_ext(
        *constants(m, B=4, N=5, M=7), learnt(m, 2, 1, 5, 7, dtype=gg.F16)
    ),
    "f16 keys, bf16 values": lambda m: attend(
        m(1, 4, 20, 12), m(1, 2, 30, 12, dtype=gg.F16), m(1, 2, 30, 9, dtype=gg.BF16), causal=True
    ),
    "q8_0 keys, q4_0 values": lambda m: attend(
        m(1, 4, 9, 64), random_blocks(m.rng, (1, 2, 20, 64), gg.Q8_0), random_blocks(m.rng, (1, 2, 20, 32), gg.Q4_0)
    ),
    "no queries": lambda m: attend(*qkv(m, N=0, M=3)),
    "no keys": lambda m: gg.flash_attn_ext(*qkv(m, N=3, M=0), causal="bottom-right"),
    "no heads": lambda m: attend(m(2, 0, 3, 4), m(2, 0, 5, 4), m(2, 0, 5, 4)),
    "no batches, no d": lambda m: attend(*qkv(m, B=1, D=0, DV=3)),
    "no d of v": lambda m: attend(*qkv(m, DV=0)),
}


def back(m, q, k, v, mask=None, **options):
    B, H, N, _ = q.shape
    return gg.flash_attn_back(q, k, v, mask, m(B, N, H, v.shape[3]), **options).parts


BACK = {
    "plain": lambda m: back(m, *qkv(m)),
    "causal": lambda m: back(m, *qkv(m, B=2, H=4, HK=2, N=9, M=13), causal="bottom-right"),
    "mask and softcap": lambda m: back(m, *qkv(m, N=6, M=5), hole(m, 6, 5), logit_softcap=2.0),
    "keys in chunks": lambda m: back(m, *qkv(m, H=2, HK=1, N=20, M=600, D=8), causal=True),
    "many heads": lambda m: back(m, *qkv(m, H=17, N=20, M=530, D=4), causal=True),
    "window, keys in chunks": lambda m: back(m, *qkv(m, H=2, HK=1, N=600, D=4), causal=True, window=(70, 0), prefix=9),
    "all gradients": lambda m: back(
        m,
        *qkv(m, H=4, HK=2, N=9, M=13),
        learnt(m, 1, 2, 9, 13),
        sinks=m(4),
        dropout_p=0.2,
        seed=5,
        logit_softcap=2.0,
        d_lse=m(1, 4, 9),
        sinks_gradient=True,
        mask_gradient=True,
    ),
    "packed": lambda m: back(
        m, *qkv(m, H=2, HK=1, N=90, M=700, D=4), causal=True, **packed(m, [0, 30, 30, 80], [0, 10, 40, 690])
    ),
    "no keys": lambda m: back(m, *qkv(m, N=3, M=0)),
}

CASES = {"flash_attn_ext": FORWARD, "flash_attn_back": BACK}
NO_GRADIENT = {"flash_attn_back"}
