"""Pooling, interpolation, Sinkhorn's method and triangular systems."""

import numpy as np

import ggrad as gg


def pool(m, mode, shape, kernel, stride, padding=(0, 0), **options):
    return gg.pool_2d(distinct(m, *shape), mode=mode, kernel=kernel, stride=stride, padding=padding, **options)


def pool_at(m, shape, kernel, stride, padding=(0, 0)):
    places = distinct(m, *shape)
    return gg.pool_2d(m(*shape), places, mode="max", kernel=kernel, stride=stride, padding=padding)


def distinct(m, *shape):
    """Values apart from each other, so that a step of a difference quotient does not change which is the largest."""
    return m.of(m.rng.permutation(np.prod(shape, dtype=int)).reshape(shape) / 8.0)


POOLS = {
    "two by two": ((2, 3, 6, 8), (2, 2), (2, 2)),
    "overlapping, padded": ((2, 7, 7), (3, 3), (2, 2), (1, 1)),
    "unequal along the axes": ((9, 11), (2, 3), (1, 2), (0, 2)),
    "a rest that no window reaches": ((3, 5, 9), (2, 4), (3, 3)),
    "large": ((7, 5, 37, 33), (2, 2), (2, 2)),
    "no planes": ((0, 3, 4), (2, 2), (2, 2)),
}


def pool_back(m, mode, shape, kernel, stride, padding=(0, 0), **more):
    options = dict(mode=mode, kernel=kernel, stride=stride, padding=padding, **more)
    out = gg.pool_2d(gg.tensor(shape=shape), **options).shape
    x = distinct(m, *shape) if mode == "max" else None
    return gg.pool_2d_back(m(*out), x, **options, size=shape[-2:])


def ties(m):
    """Small whole numbers: the first of equal ones has the gradient."""
    return gg.pool_2d_back(m(3, 4, 4), m.of(m.rng.integers(0, 2, (3, 8, 8)), param=False), mode="max", kernel=(2, 2),
                           stride=(2, 2), size=(8, 8))  # fmt: skip


def both(build):
    cases = [(mode, name) for mode in ("max", "avg") for name in POOLS]
    made = {f"{mode}, {name}": lambda m, mode=mode, s=POOLS[name]: build(m, mode, *s) for mode, name in cases}
    inside = {
        f"avg of what is inside, {name}": lambda m, s=s: build(m, "avg", *s, count_padding=False)
        for name, s in POOLS.items()
    }
    return made | inside


SIZES = {
    "nearest up": ((2, 4, 5), (3, 7), dict(mode="nearest")),
    "nearest down": ((7, 9), (3, 4), dict(mode="nearest")),
    "nearest, aligned": ((4, 5), (7, 3), dict(mode="nearest", align_corners=True)),
    "bilinear": ((2, 3, 4, 5), (12, 15), dict(mode="bilinear")),
    "bilinear down": ((9, 8), (4, 3), dict(mode="bilinear")),
    "bilinear, aligned": ((2, 4, 5), (7, 11), dict(mode="bilinear", align_corners=True)),
    "to one element": ((2, 4, 5), (1, 1), dict(mode="bilinear", align_corners=True)),
    "from one element": ((2, 1, 1), (3, 2), dict(mode="bicubic")),
    "bicubic": ((2, 4, 5), (9, 10), dict(mode="bicubic")),
    "bicubic down, aligned": ((9, 8), (5, 4), dict(mode="bicubic", align_corners=True)),
    "antialias down": ((2, 8, 9), (3, 4), dict(mode="bilinear", antialias=True)),
    "antialias far down": ((31, 40), (2, 3), dict(mode="bilinear", antialias=True)),
    "antialias up": ((3, 4), (5, 9), dict(mode="bilinear", antialias=True)),
    "large": ((3, 5, 31, 33), (40, 51), dict(mode="bicubic")),
    "no planes": ((0, 4, 5), (3, 7), dict(mode="bilinear")),
}


def lower(m, *shape):
    """Below the diagonal small, on it large, above it what nobody may read."""
    a = m.rng.uniform(-0.5, 0.5, shape)
    n = shape[-1]
    a[..., np.arange(n), np.arange(n)] = m.rng.uniform(1, 2, shape[:-1])
    return m.of(a)


SYSTEMS = {
    "batches": lambda m, t: gg.solve_tri(lower(m, 2, 3, 5, 5), m(2, 3, 5, 4), transposed=t),
    "one system": lambda m, t: gg.solve_tri(lower(m, 7, 7), m(7, 1), transposed=t),
    "one unknown": lambda m, t: gg.solve_tri(lower(m, 1, 1), m(1, 3), transposed=t),
    "large": lambda m, t: gg.solve_tri(lower(m, 9, 17, 17), m(9, 17, 19), transposed=t),
    "nothing": lambda m, t: gg.solve_tri(m(2, 0, 0), m(2, 0, 3), transposed=t),
}

CASES = {
    "pool_2d": both(pool)
    | {f"at a maximum, {name}": lambda m, s=s: pool_at(m, *s) for name, s in POOLS.items()},
    "pool_2d_back": both(pool_back) | {"max, of equal elements": ties},
    "interpolate": {name: lambda m, s=s: gg.interpolate(m(*s[0]), size=s[1], **s[2]) for name, s in SIZES.items()},
    "interpolate_back": {
        name: lambda m, s=s: gg.interpolate_back(m(*s[0][:-2], *s[1]), size=s[1], **s[2], shape=s[0][-2:])
        for name, s in SIZES.items()
    },
    "sinkhorn": {
        "four streams": lambda m: gg.sinkhorn(m(5, 4, 4), n_iter=3),
        "one round, large eps": lambda m: gg.sinkhorn(m(3, 2, 2), eps=0.1, n_iter=1),
        "softmax alone": lambda m: gg.sinkhorn(m(3, 4, 4), eps=0.0, n_iter=0),
        "many tokens": lambda m: gg.sinkhorn(m(150, 4, 4), n_iter=20),
        "no tokens": lambda m: gg.sinkhorn(m(0, 4, 4), n_iter=2),
    },
    "sinkhorn_back": {
        "four streams": lambda m: gg.sinkhorn_back(m(5, 4, 4), m(5, 4, 4), n_iter=3),
        "one round, large eps": lambda m: gg.sinkhorn_back(m(3, 2, 2), m(3, 2, 2), eps=0.1, n_iter=1),
        "softmax alone": lambda m: gg.sinkhorn_back(m(3, 4, 4), m(3, 4, 4), eps=0.0, n_iter=0),
        "many tokens": lambda m: gg.sinkhorn_back(m(150, 4, 4), m(150, 4, 4), n_iter=20),
        "no tokens": lambda m: gg.sinkhorn_back(m(0, 4, 4), m(0, 4, 4), n_iter=2),
    },
    "solve_tri": {name: lambda m, s=s: s(m, False) for name, s in SYSTEMS.items()}
    | {f"{name}, transposed": lambda m, s=s: s(m, True) for name, s in SYSTEMS.items()},
}  # fmt: skip
