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


SELECTIVE = {  # N, T, H, D, G, S, columns of A, snapshots
    "Mamba 1": (2, 5, 6, 1, 1, 4, 4, 1),
    "Mamba 2": (2, 5, 4, 3, 2, 5, 1, 1),
    "heads that fill no vector": (1, 7, 21, 1, 1, 19, 19, 2),
    "elements that fill no vector": (1, 10, 3, 21, 3, 4, 1, 1),
    "a pace of each column, heads of several": (2, 3, 2, 3, 1, 6, 6, 3),
    "large": (2, 17, 34, 2, 2, 9, 9, 1),
    "one column": (1, 4, 3, 2, 1, 1, 1, 1),
    "no tokens": (2, 0, 2, 3, 1, 4, 4, 1),
    "no elements": (1, 3, 2, 0, 1, 4, 1, 1),
}


def selective(m, N, T, H, D, G, S, width):
    s, x, dt = m(N, H, D, S), m(N, T, H, D), m(N, T, H, low=0.1, high=1.0)
    return s, x, dt, m(H, width, low=-1.5, high=-0.1), m(N, T, G, S), m(N, T, G, S)


def selective_forward(m, N, T, H, D, G, S, width, snapshots):
    return gg.selective_scan(*selective(m, N, T, H, D, G, S, width), snapshots=snapshots)


def selective_back(m, N, T, H, D, G, S, width, snapshots, dy=True, dstates=True):
    dy = m(N, T, H, D) if dy else None
    dstates = m(snapshots * N, H, D, S) if dstates else None
    return gg.selective_scan_back(*selective(m, N, T, H, D, G, S, width), dy, dstates)


CASES = {
    "selective_scan": {name: lambda m, s=s: selective_forward(m, *s) for name, s in SELECTIVE.items()},
    "selective_scan_back": {name: lambda m, s=s: selective_back(m, *s) for name, s in SELECTIVE.items()}
    | {
        "of the outputs alone": lambda m: selective_back(m, *SELECTIVE["Mamba 1"], dstates=False),
        "of the states alone": lambda m: selective_back(m, *SELECTIVE["Mamba 2"], dy=False),
    },
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
