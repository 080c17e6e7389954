"""Dropout."""

import ggrad as gg

CASES = {
    "dropout": {
        "half": lambda m: gg.dropout(m(3, 67), m.ints(below=1000), p=0.5),
        "a tenth, with a key": lambda m: gg.dropout(m(2, 3, 5, 7), m.ints(below=1000), p=0.1, key=3),
        "none": lambda m: gg.dropout(m(3, 5), m.ints(below=1000), p=0.0),
        "all": lambda m: gg.dropout(m(3, 5), m.ints(below=1000), p=1.0),
        "many": lambda m: gg.dropout(m(300, 129), 7, p=0.25),
        "scalar": lambda m: gg.dropout(m(), 7, p=0.25),
        "empty": lambda m: gg.dropout(m(0, 3), 7, p=0.25),
    }
}
