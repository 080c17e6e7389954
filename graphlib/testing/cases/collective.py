"""Ops over a group of ranks.  Here it has one rank; tests/test_distributed.py has more."""

import ggrad as gg
from ggrad.ops.collective import all_gather_into, all_reduce_bucket, reduce_scatter_bucket

ONE = gg.distributed.Comm()

CASES = {
    "all_reduce": {"one rank": lambda m: gg.all_reduce(m(3, 5), ONE), "empty": lambda m: gg.all_reduce(m(0, 3), ONE)},
    "replicated": {"one rank": lambda m: gg.replicated(m(3, 5), ONE), "empty": lambda m: gg.replicated(m(0, 3), ONE)},
    "all_gather": {
        "one rank": lambda m: gg.all_gather(m(3, 5), axis=1, comm=ONE),
        "empty": lambda m: gg.all_gather(m(0, 3), axis=0, comm=ONE),
    },
    "reduce_scatter": {
        "one rank": lambda m: gg.reduce_scatter(m(3, 5), axis=1, comm=ONE),
        "empty": lambda m: gg.reduce_scatter(m(0, 3), axis=0, comm=ONE),
    },
    "all_to_all": {
        "one rank": lambda m: gg.all_to_all(m(3, 5), split=0, join=1, comm=ONE),
        "empty": lambda m: gg.all_to_all(m(0, 3), split=0, join=1, comm=ONE),
    },
    "shift": {"one rank": lambda m: gg.shift(m(3, 5), comm=ONE), "empty": lambda m: gg.shift(m(0, 3), comm=ONE)},
    "broadcast": {
        "one rank": lambda m: gg.broadcast(m(3, 5), comm=ONE),
        "empty": lambda m: gg.broadcast(m(0, 3), comm=ONE),
    },
    "reduce_to": {
        "one rank": lambda m: gg.reduce_to(m(3, 5), comm=ONE),
        "empty": lambda m: gg.reduce_to(m(0, 3), comm=ONE),
    },
    "counted_once": {
        "one rank": lambda m: gg.counted_once(m(3, 5), ONE),
        "empty": lambda m: gg.counted_once(m(0, 3), ONE),
    },
    "after": {
        "two others": lambda m: gg.after(m(3, 5), m(2), m(3)),
        "empty": lambda m: gg.after(m(0, 3), m(2)),
    },
    "all_reduce_bucket": {
        "one rank": lambda m: all_reduce_bucket(m(3, 5), m(2), comm=ONE),
        "in order": lambda m: all_reduce_bucket(m(3, 5), comm=ONE, ordered=True),
        "empty": lambda m: all_reduce_bucket(m(0, 3), m(2), comm=ONE),
    },
    "reduce_scatter_bucket": {
        "one rank": lambda m: reduce_scatter_bucket(m(3, 5), m(2), comm=ONE),
        "in order": lambda m: reduce_scatter_bucket(m(3, 5), m(2), comm=ONE, ordered=True),
        "empty": lambda m: reduce_scatter_bucket(m(0, 3), m(2), comm=ONE),
    },
    "all_gather_into": {
        "pieces of two": lambda m: all_gather_into(
            m(7), m(2), m.leaf(3, 2, param=False), m.leaf(3, param=False), comm=ONE, own=2
        ),
        "empty": lambda m: all_gather_into(m(0), m.leaf(0, 2, param=False), comm=ONE, own=1),
    },
}
NO_GRADIENT = {"all_gather_into", "all_reduce_bucket", "reduce_scatter_bucket"}
NO_TASKS = set(CASES)
