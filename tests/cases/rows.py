"""Rows picked by index."""

import ggrad as gg

CASES = {
    "get_rows": {
        "a sequence": lambda m: gg.get_rows(m(9, 6), m.ints(5, below=9)),
        "many duplicates": lambda m: gg.get_rows(m(3, 33), m.ints(4, 17, below=3)),
        "three axes of ids": lambda m: gg.get_rows(m(7, 5), m.ints(2, 3, 4, below=7)),
        "one id": lambda m: gg.get_rows(m(7, 5), m.ints(below=7)),
        "f16 rows": lambda m: gg.get_rows(m(7, 19, dtype=gg.F16), m.ints(5, below=7)),
        "bf16 rows": lambda m: gg.get_rows(m(7, 19, dtype=gg.BF16), m.ints(5, below=7)),
        "no ids": lambda m: gg.get_rows(m(7, 5), m.ints(0, below=7)),
        "rows of nothing": lambda m: gg.get_rows(m(7, 0), m.ints(3, below=7)),
    },
    "get_rows_back": {
        "few rows, many ids": lambda m: gg.get_rows_back(m(300, 150), m.ints(300, below=5), rows=7),
        "many rows, few ids": lambda m: gg.get_rows_back(m(2, 3, 83), m.ints(2, 3, below=901), rows=901),
        "one id": lambda m: gg.get_rows_back(m(5), m.ints(below=7), rows=7),
        "no ids": lambda m: gg.get_rows_back(m(0, 5), m.ints(0, below=7), rows=7),
        "rows of nothing": lambda m: gg.get_rows_back(m(3, 0), m.ints(3, below=7), rows=7),
        "no rows": lambda m: gg.get_rows_back(m(0, 4), m.ints(0, below=1), rows=0),
    },
}
