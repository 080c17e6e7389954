"""The lightning indexer: sizes round the edges of tiles, masks, keys that nobody sees."""

import numpy as np

import ggrad as gg

INF, NAN = np.inf, np.nan


def inputs(m, B=1, N=5, H=3, M=7, E=4, param=True, low=-2.0):
    """With a `low` above 0 no product of many is at relu's kink."""
    return m(B, N, H, E, param=param, low=low), m(B, M, 1, E, param=param, low=low), m(B, 1, N, H, param=param)


def constants(m, **sizes):
    """With a mask of -inf the sum of all scores has no difference quotient."""
    return inputs(m, param=False, **sizes)


def hole(m, *shape, dtype=gg.F32):
    """A mask of random values, -inf in some places."""
    values = m.rng.uniform(-1, 1, shape)
    values[m.rng.random(shape) < 0.4] = -INF
    return m.of(values, dtype=dtype, param=False)


def garbage(m):
    """A NaN key that the mask hides from all queries, and one that it hides from some; a NaN query that sees some."""
    q, k, w = (m.rng.uniform(-2, 2, shape) for shape in ((1, 5, 2, 4), (1, 6, 1, 4), (1, 1, 5, 2)))
    mask = np.zeros((1, 1, 5, 6))
    mask[..., 1], mask[..., :3, 4], mask[..., 2, :2] = -INF, -INF, -INF
    k[0, 1, 0, 0], k[0, 4, 0, 2], q[0, 2, 1, 1] = NAN, INF, NAN
    return *(m.of(x, param=False) for x in (q, k, w)), m.of(mask, param=False)


FORWARD = {
    "plain": lambda m: gg.lightning_indexer(*inputs(m)),
    "a finite mask": lambda m: gg.lightning_indexer(*inputs(m), m(1, 1, 5, 7, param=False)),
    "batches and a mask": lambda m: gg.lightning_indexer(*constants(m, B=2), hole(m, 2, 1, 5, 7)),
    "one mask for all": lambda m: gg.lightning_indexer(*constants(m, B=3), hole(m, 1, 1, 5, 7)),
    "f16 mask": lambda m: gg.lightning_indexer(*constants(m, N=3, M=9), hole(m, 1, 1, 3, 9, dtype=gg.F16)),
    "several tiles": lambda m: gg.lightning_indexer(*inputs(m, N=19, H=15, M=35, E=37, low=0.1)),
    "several tasks": lambda m: gg.lightning_indexer(*constants(m, B=2, N=67, H=8, M=85, E=24), hole(m, 1, 1, 67, 85)),
    "garbage that is hidden": lambda m: gg.lightning_indexer(*garbage(m)),
    "one of each": lambda m: gg.lightning_indexer(*inputs(m, N=1, H=1, M=1, E=1)),
    "no keys": lambda m: gg.lightning_indexer(*inputs(m, M=0)),
    "no queries": lambda m: gg.lightning_indexer(*inputs(m, N=0)),
    "no heads": lambda m: gg.lightning_indexer(*inputs(m, H=0)),
    "no elements": lambda m: gg.lightning_indexer(*inputs(m, E=0)),
}


def back(m, q, k, weights, mask=None):
    return gg.lightning_indexer_back(m(q.shape[0], 1, q.shape[1], k.shape[1]), q, k, weights, mask)


BACK = {
    "plain": lambda m: back(m, *inputs(m)),
    "a mask": lambda m: back(m, *inputs(m, B=2, H=7), hole(m, 1, 1, 5, 7)),
    "several tasks": lambda m: back(m, *inputs(m, N=70, H=9, M=90, E=20)),
    "garbage that is hidden": lambda m: back(m, *garbage(m)),
    "no keys": lambda m: back(m, *inputs(m, M=0)),
}

CASES = {"lightning_indexer": FORWARD, "lightning_indexer_back": BACK}
NO_GRADIENT = {"lightning_indexer_back"}
