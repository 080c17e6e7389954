"""Scans: lengths round the chunks, rows and columns that fill no vector, snapshots, with and without a delta."""

import ggrad as gg

SIZES = {  # N, T, H, S, V, snapshots
    "small": (2, 5, 2, 4, 3, 1),
    "odd sizes": (1, 10, 2, 19, 21, 1),
    "a token": (2, 1, 1, 5, 4, 1),
    "snapshots": (2, 7, 1, 3, 5, 3),
    "large": (2, 17, 3, 33, 40, 2),
    "no tokens": (2, 0, 2, 3, 4, 1),
    "no rows": (1, 3, 2, 4, 0, 1),
}


def inputs(m, N, T, H, S, V):
    r, w, k = m(N, T, H, S), m(N, T, H, S, low=0.3, high=0.9), m(N, T, H, S)
    return r, w, k, m(N, T, H, V), m(N, H, V, S)


def delta(m, N, T, H, S):
    return m(N, T, H, S, low=-0.3, high=0.3), m(N, T, H, S, low=-0.3, high=0.3)


def forward(m, N, T, H, S, V, snapshots, corrected=True):
    extra = delta(m, N, T, H, S) if corrected else ()
    return gg.delta_scan(*inputs(m, N, T, H, S, V), *extra, snapshots=snapshots)


def back(m, N, T, H, S, V, snapshots, corrected=True, dy=True, dstates=True):
    extra = delta(m, N, T, H, S) if corrected else (None, None)
    dy = m(N, T, H, V) if dy else None
    dstates = m(snapshots * N, H, V, S) if dstates else None
    return gg.delta_scan_back(*inputs(m, N, T, H, S, V), dy, dstates, *extra)


CASES = {
    "delta_scan": {name: lambda m, s=s: forward(m, *s) for name, s in SIZES.items()}
    | {
        f"{name}, no delta": lambda m, s=SIZES[name]: forward(m, *s, corrected=False) for name in ("small", "odd sizes")
    },
    "delta_scan_back": {
        name: lambda m, s=SIZES[name]: back(m, *s) for name in ("small", "odd sizes", "large", "no tokens")
    }
    | {
        "no delta": lambda m: back(m, *SIZES["odd sizes"], corrected=False),
        "of the outputs alone": lambda m: back(m, *SIZES["small"], dstates=False),
        "of the states alone": lambda m: back(m, *SIZES["snapshots"], dy=False),
    },
}
