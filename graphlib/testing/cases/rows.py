"""Rows picked by index."""

import ggrad as gg


def written(m, shape, rows, ids):
    return gg.assign_rows(m.leaf(*shape, param=False), m(*shape[:-2], rows, shape[-1]), ids)


CASES = {
    "get_rows": {
        "a sequence": lambda m: gg.get_rows(m(9, 6), m.ints(5, below=9)),
        "many duplicates": lambda m: gg.get_rows(m(3, 33), m.ints(4, 17, below=3)),
        "three axes of ids": lambda m: gg.get_rows(m(7, 5), m.ints(2, 3, 4, below=7)),
        "one id": lambda m: gg.get_rows(m(7, 5), m.ints(below=7)),
        "a batch": lambda m: gg.get_rows(m(3, 2, 6, 5), m.ints(3, 2, 4, below=6)),
        "a batch of f16": lambda m: gg.get_rows(m(3, 6, 19, dtype=gg.F16), m.ints(3, 8, below=6)),
        "a batch of one": lambda m: gg.get_rows(m(1, 6, 5), m.ints(1, 4, below=6)),
        "f16 rows": lambda m: gg.get_rows(m(7, 19, dtype=gg.F16), m.ints(5, below=7)),
        "bf16 rows": lambda m: gg.get_rows(m(7, 19, dtype=gg.BF16), m.ints(5, below=7)),
        "no ids": lambda m: gg.get_rows(m(7, 5), m.ints(0, below=7)),
        "rows of nothing": lambda m: gg.get_rows(m(7, 0), m.ints(3, below=7)),
    },
    "get_rows_back": {
        "few rows, many ids": lambda m: gg.get_rows_back(m(300, 150), m.ints(300, below=5), rows=7),
        "many rows, few ids": lambda m: gg.get_rows_back(m(2, 3, 83), m.ints(2, 3, below=901), rows=901),
        "a batch, many rows": lambda m: gg.get_rows_back(
            m(3, 2, 4, 83), m.ints(3, 2, 4, below=400), rows=400, batched=True
        ),
        "a batch, few rows": lambda m: gg.get_rows_back(m(3, 70, 150), m.ints(3, 70, below=5), rows=7, batched=True),
        "one id": lambda m: gg.get_rows_back(m(5), m.ints(below=7), rows=7),
        "no ids": lambda m: gg.get_rows_back(m(0, 5), m.ints(0, below=7), rows=7),
        "rows of nothing": lambda m: gg.get_rows_back(m(3, 0), m.ints(3, below=7), rows=7),
        "no rows": lambda m: gg.get_rows_back(m(0, 4), m.ints(0, below=1), rows=0),
    },
    "set_rows": {
        "some": lambda m: gg.set_rows(m(8, 5), m(3, 5), m.of([6, 0, 3], dtype=gg.I32, param=False)),
        "many duplicates": lambda m: gg.set_rows(m(8, 5), m(17, 5), m.ints(17, below=4)),
        "one list for a batch": lambda m: gg.set_rows(m(3, 2, 8, 5), m(3, 2, 6, 5), m.ints(6, below=8)),
        "lists tiled over a batch": lambda m: gg.set_rows(m(2, 4, 8, 5), m(2, 4, 6, 5), m.ints(2, 6, below=8)),
        "a list for each of a batch": lambda m: gg.set_rows(m(3, 2, 8, 5), m(3, 2, 6, 5), m.ints(3, 2, 6, below=8)),
        "f16": lambda m: gg.set_rows(m(8, 19, dtype=gg.F16), m(5, 19), m.ints(5, below=8)),
        "bf16, long rows": lambda m: gg.set_rows(m(3, 519, dtype=gg.BF16), m(2, 519), m.ints(2, below=3)),
        "large": lambda m: gg.set_rows(m(401, 123), m(150, 123), m.ints(150, below=401)),
        "no ids": lambda m: gg.set_rows(m(8, 5), m(0, 5), m.ints(0, below=8)),
        "no batch": lambda m: gg.set_rows(m(0, 8, 5), m(0, 2, 5), m.ints(2, below=8)),
        "rows of nothing": lambda m: gg.set_rows(m(8, 0), m(3, 0), m.ints(3, below=8)),
    },
    "assign": {
        "2d": lambda m: gg.assign(m.leaf(7, 33, param=False), m(7, 33)),
        "scalar": lambda m: gg.assign(m.leaf(param=False), m()),
        "empty": lambda m: gg.assign(m.leaf(0, param=False), m(0)),
        "large": lambda m: gg.assign(m.leaf(70, 301, param=False), m(70, 301)),
        "rounded to f16": lambda m: gg.assign(m.leaf(5, 70, dtype=gg.F16, param=False), m(5, 70)),
        "rounded to bf16": lambda m: gg.assign(m.leaf(5, 70, dtype=gg.BF16, param=False), m(5, 70)),
        "integers": lambda m: gg.assign(m.leaf(5, 7, dtype=gg.I32, param=False), m.ints(5, 7, below=9)),
        "from f16": lambda m: gg.assign(m.leaf(5, 70, param=False), m(5, 70, dtype=gg.F16)),
    },
    "assign_rows": {
        "some": lambda m: written(m, (8, 5), 3, m.of([6, 0, 3], dtype=gg.I32, param=False)),
        "a cache": lambda m: written(m, (1, 3, 17, 33), 4, m.ints(4, below=17)),
        "many duplicates": lambda m: written(m, (8, 5), 17, m.ints(17, below=4)),
        "lists tiled over a batch": lambda m: written(m, (2, 4, 8, 5), 6, m.ints(2, 6, below=8)),
        "no ids": lambda m: written(m, (8, 5), 0, m.ints(0, below=8)),
        "rows of nothing": lambda m: written(m, (8, 0), 3, m.ints(3, below=8)),
    },
    "set_rows_back": {
        "many duplicates": lambda m: gg.set_rows_back(m(8, 5), m.ints(17, below=6)),
        "lists tiled over a batch": lambda m: gg.set_rows_back(m(2, 4, 8, 5), m.ints(2, 6, below=8)),
        "large": lambda m: gg.set_rows_back(m(401, 123), m.ints(150, below=401)),
        "no ids": lambda m: gg.set_rows_back(m(8, 5), m.ints(0, below=8)),
        "rows of nothing": lambda m: gg.set_rows_back(m(8, 0), m.ints(3, below=8)),
    },
}
