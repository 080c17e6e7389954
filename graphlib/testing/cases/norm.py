"""Normalisation along the last axis."""

import ggrad as gg

CASES = {
    "norm": {
        "alone": lambda m: gg.norm(m(3, 17)),
        "weight and bias": lambda m: gg.norm(m(2, 3, 4, 33), m(33), m(33), eps=1e-3),
        "weight": lambda m: gg.norm(m(5, 8), m(8)),
        "bias": lambda m: gg.norm(m(2, 5, 7), None, m(7)),
        "many rows": lambda m: gg.norm(m(301, 67), m(67), m(67)),
        "a far mean": lambda m: gg.norm(m(3, 40, low=1000.0, high=1001.0), m(40)),
        "one row": lambda m: gg.norm(m(19, param=False), m(19), m(19)),
        "rows of one": lambda m: gg.norm(m(4, 1), m(1), m(1), eps=0.5),
        "no rows": lambda m: gg.norm(m(0, 5), m(5), m(5)),
        "empty rows": lambda m: gg.norm(m(3, 0), m(0), m(0)),
    },
    "rms_norm": {
        "alone": lambda m: gg.rms_norm(m(3, 17)),
        "weight": lambda m: gg.rms_norm(m(2, 3, 4, 33), m(33), eps=1e-3),
        "many rows": lambda m: gg.rms_norm(m(301, 67), m(67)),
        "squares beyond f32": lambda m: gg.rms_norm(m(3, 9, low=1e24, high=1e25, param=False), m(9)),
        "squares below f32": lambda m: gg.rms_norm(m(3, 9, low=1e-24, high=1e-23, param=False), m(9), eps=0.0),
        "one row": lambda m: gg.rms_norm(m(19, param=False), m(19)),
        "rows of one": lambda m: gg.rms_norm(m(4, 1), m(1), eps=0.5),
        "no rows": lambda m: gg.rms_norm(m(0, 5), m(5)),
        "empty rows": lambda m: gg.rms_norm(m(3, 0), m(0)),
    },
    "l2_norm": {
        "4d": lambda m: gg.l2_norm(m(2, 3, 4, 33)),
        "shorter than eps": lambda m: gg.l2_norm(m(5, 8, low=-0.1, high=0.1), eps=2.0),
        "some shorter than eps": lambda m: gg.l2_norm(m(9, 7), eps=3.0),
        "a row of zeros": lambda m: gg.l2_norm(m.of([[0.0, 0.0, 0.0], [3.0, 0.0, -4.0]]), eps=0.5),
        "many rows": lambda m: gg.l2_norm(m(301, 67)),
        "squares beyond f32": lambda m: gg.l2_norm(m(3, 9, low=1e24, high=1e25, param=False)),
        "squares below f32": lambda m: gg.l2_norm(m(3, 9, low=1e-24, high=1e-23, param=False), eps=0.0),
        "one row": lambda m: gg.l2_norm(m(19, param=False)),
        "rows of one": lambda m: gg.l2_norm(m(4, 1, low=0.5)),
        "no rows": lambda m: gg.l2_norm(m(0, 5)),
        "empty rows": lambda m: gg.l2_norm(m(3, 0)),
    },
    "l2_norm_back": {
        "4d": lambda m: gg.l2_norm_back(m(2, 3, 4, 33), m(2, 3, 4, 33)),
        "some shorter than eps": lambda m: gg.l2_norm_back(m(9, 7), m(9, 7), eps=3.0),
        "many rows": lambda m: gg.l2_norm_back(m(301, 67), m(301, 67)),
        "squares beyond f32": lambda m: gg.l2_norm_back(m(3, 9), m(3, 9, low=1e24, high=1e25, param=False)),
        "squares below f32": lambda m: gg.l2_norm_back(m(3, 9), m(3, 9, low=1e-24, high=1e-23, param=False), eps=0.0),
        "no rows": lambda m: gg.l2_norm_back(m(0, 5), m(0, 5)),
        "empty rows": lambda m: gg.l2_norm_back(m(3, 0), m(3, 0)),
    },
    "norm_back": {
        "alone": lambda m: gg.norm_back(m(3, 17), m(3, 17)),
        "weight": lambda m: gg.norm_back(m(2, 3, 4, 33), m(2, 3, 4, 33), m(33), eps=1e-3),
        "many rows": lambda m: gg.norm_back(m(301, 67), m(301, 67), m(67)),
        "no gradient by the weight": lambda m: gg.norm_back(
            m(2, 3, 4, 33), m(2, 3, 4, 33), m(33), weight_gradient=False
        ),
        "rows of one": lambda m: gg.norm_back(m(4, 1), m(4, 1), m(1), eps=0.5),
        "no rows": lambda m: gg.norm_back(m(0, 5), m(0, 5), m(5)),
        "empty rows": lambda m: gg.norm_back(m(3, 0), m(3, 0), m(0)),
    },
    "rms_norm_back": {
        "alone": lambda m: gg.rms_norm_back(m(3, 17), m(3, 17)),
        "weight": lambda m: gg.rms_norm_back(m(2, 3, 4, 33), m(2, 3, 4, 33), m(33), eps=1e-3),
        "many rows": lambda m: gg.rms_norm_back(m(301, 67), m(301, 67), m(67)),
        "no gradient by the weight": lambda m: gg.rms_norm_back(
            m(2, 3, 4, 33), m(2, 3, 4, 33), m(33), weight_gradient=False
        ),
        "rows of one": lambda m: gg.rms_norm_back(m(4, 1), m(4, 1), m(1), eps=0.5),
        "no rows": lambda m: gg.rms_norm_back(m(0, 5), m(0, 5), m(5)),
        "empty rows": lambda m: gg.rms_norm_back(m(3, 0), m(3, 0), m(0)),
    },
}
