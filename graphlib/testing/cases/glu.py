"""Gated units and their gradients, in split and in single form."""

import ggrad as gg

UNITS = ("swiglu", "geglu", "geglu_erf", "geglu_quick", "reglu", "swiglu_oai")

FORWARD = {
    "split": lambda op: lambda m: op(m(2, 3, 4, 5), m(2, 3, 4, 5)),
    "split, odd rows": lambda op: lambda m: op(m(7, 33), m(7, 33)),
    "split, large": lambda op: lambda m: op(m(67, 130), m(67, 130)),
    "split, scalars": lambda op: lambda m: op(m(), m()),
    "single": lambda op: lambda m: op(m(5, 66)),
    "single, swapped": lambda op: lambda m: op(m(2, 3, 4, 10), swapped=True),
    "single, large": lambda op: lambda m: op(m(67, 260)),
    "single, of two elements": lambda op: lambda m: op(m(7, 2)),
    "a vector": lambda op: lambda m: op(m(34)),
    "empty": lambda op: lambda m: op(m(0, 3), m(0, 3)),
    "empty, single": lambda op: lambda m: op(m(0, 4)),
    "no elements to gate": lambda op: lambda m: op(m(3, 0)),
}

BACK = {
    "split": lambda op: lambda m: op(m(2, 3, 4, 5), m(2, 3, 4, 5), m(2, 3, 4, 5)),
    "split, odd rows": lambda op: lambda m: op(m(7, 33), m(7, 33), m(7, 33)),
    "single": lambda op: lambda m: op(m(5, 33), m(5, 66)),
    "single, swapped": lambda op: lambda m: op(m(2, 3, 4, 5), m(2, 3, 4, 10), swapped=True),
    "single, large": lambda op: lambda m: op(m(67, 130), m(67, 260)),
    "single, of two elements": lambda op: lambda m: op(m(7, 1), m(7, 2)),
    "empty": lambda op: lambda m: op(m(0, 3), m(0, 3), m(0, 3)),
    "empty, single": lambda op: lambda m: op(m(0, 2), m(0, 4)),
}

CASES = {name: {case: make(getattr(gg, name)) for case, make in FORWARD.items()} for name in UNITS} | {
    f"{name}_back": {case: make(getattr(gg, f"{name}_back")) for case, make in BACK.items()} for name in UNITS
}
CASES["swiglu_oai"] |= {
    "beyond the limit": lambda m: gg.swiglu_oai(m(7, 33), m(7, 33), limit=1.25, alpha=0.9),
    "beyond the limit, swapped": lambda m: gg.swiglu_oai(m(7, 34), limit=0.5, swapped=True),
}
CASES["swiglu_oai_back"] |= {
    "beyond the limit": lambda m: gg.swiglu_oai_back(m(7, 33), m(7, 33), m(7, 33), limit=1.25, alpha=0.9),
}
