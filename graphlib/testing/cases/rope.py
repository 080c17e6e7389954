"""Rotary position embedding."""

import ggrad as gg

YARN = {"n_ctx_orig": 64, "freq_scale": 0.25, "ext_factor": 0.8, "attn_factor": 1.1, "beta_fast": 8.0}

SECTIONS = {"mode": "mrope", "sections": (3, 2, 4)}

TURNS = {
    "normal": lambda op: lambda m: op(m(5, 3, 38), m.ints(5, below=100)),
    "neox": lambda op: lambda m: op(m(5, 3, 38), m.ints(5, below=100), mode="neox"),
    "a part of each row": lambda op: lambda m: op(m(5, 3, 11), m.ints(5, below=100), n_dims=6),
    "a part of each row, neox": lambda op: lambda m: op(m(2, 5, 3, 11), m.ints(5, below=100), n_dims=6, mode="neox"),
    "yarn": lambda op: lambda m: op(m(2, 4, 2, 32), m.ints(4, below=100), **YARN),
    "yarn, neox, with factors": lambda op: (
        lambda m: op(m(4, 2, 34), m.ints(4, below=100), m(17, low=0.5), mode="neox", **YARN)
    ),
    "factors in a batch": lambda op: lambda m: op(m(2, 3, 2, 12), m.ints(3, below=9), m(4, low=0.5), n_dims=8),
    "from an offset on": lambda op: lambda m: op(m(5, 3, 21), m.ints(5, below=100), n_dims=12, offset=5),
    "from an offset on, neox": lambda op: lambda m: op(m(5, 3, 38), m.ints(5, below=100), mode="neox", offset=6),
    "mrope": lambda op: lambda m: op(m(5, 3, 46), m.ints(20, below=100), n_dims=44, **SECTIONS),
    "mrope, with factors": lambda op: lambda m: op(m(5, 3, 18), m.ints(20, below=9), m(9, low=0.5), **SECTIONS),
    "imrope": lambda op: lambda m: op(m(2, 5, 3, 40), m.ints(20, below=100), mode="imrope", sections=(7, 5, 4, 2)),
    "imrope, yarn": lambda op: (
        lambda m: op(m(4, 2, 32), m.ints(16, below=100), mode="imrope", sections=(6, 5, 5), **YARN)
    ),
    "vision": lambda op: lambda m: op(m(5, 3, 38), m.ints(20, below=100), mode="vision", sections=(4, 4)),
    "vision, yarn": lambda op: (
        lambda m: op(m(5, 3, 18), m.ints(20, below=9), mode="vision", sections=(0, 4, 5), **YARN)
    ),
    "backwards from position 0": lambda op: lambda m: op(m(3, 2, 4), m.ints(3, low=-5, below=1), freq_base=500.0),
    "one pair": lambda op: lambda m: op(m(1, 1, 2), m.ints(1, below=9)),
    "no heads": lambda op: lambda m: op(m(3, 0, 4), m.ints(3, below=9)),
    "no places": lambda op: lambda m: op(m(2, 0, 3, 4), m.ints(0, below=9)),
    "rows of nothing": lambda op: lambda m: op(m(3, 2, 0), m.ints(3, below=9)),
}

CASES = {name: {case: make(getattr(gg, name)) for case, make in TURNS.items()} for name in ("rope", "rope_back")}
