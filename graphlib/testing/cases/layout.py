"""Copies, views, windows and tiles."""

import ggrad as gg


def accumulated(m, *shape):
    return gg.ops.accumulate(m.leaf(*shape, param=False, role="accumulator"), m(*shape, param=False))


CASES = {
    "wait_for": {
        "another": lambda m: gg.wait_for(m(3, 4), others=(m(5),)),
        "a packed result": lambda m: gg.wait_for(m(3, 4), others=gg.cross_entropy_class(m(2, 3), m.ints(2, below=3))),
        "integers": lambda m: gg.wait_for(m.ints(3, below=9), others=()),
        "empty": lambda m: gg.wait_for(m(0, 3), others=()),
    },
    "stop_gradient": {
        "plain": lambda m: gg.stop_gradient(m(3, 4, param=False)),
        "integers": lambda m: gg.stop_gradient(m.ints(3, below=9)),
        "empty": lambda m: gg.stop_gradient(m(0, 3, param=False)),
    },
    "cont": {
        "4d": lambda m: gg.cont(m(2, 3, 4, 5)),
        "heads before positions": lambda m: gg.cont(gg.permute(m(2, 9, 3, 8), axes=(0, 2, 1, 3))),
        "large and transposed": lambda m: gg.cont(gg.transpose(m(131, 150))),
        "all axes reversed": lambda m: gg.cont(gg.permute(m(19, 2, 18, 17), axes=(3, 2, 1, 0))),
        "i32": lambda m: gg.cont(m.ints(5, 7, below=100)),
        "f16": lambda m: gg.cont(gg.transpose(m(21, 33, dtype=gg.F16))),
        "scalar": lambda m: gg.cont(m()),
        "empty": lambda m: gg.cont(m(2, 0, 3)),
    },
    "cast": {
        f"{a} to {b}": lambda m, a=a, b=b: gg.cast(
            m.ints(7, 41, below=1000)
            if a is gg.I32
            else m(7, 41, low=-99.0, high=99.0, dtype=a, param=b is not gg.I32),
            dtype=b,
        )
        for a in (gg.F32, gg.F16, gg.BF16, gg.I32)
        for b in (gg.F32, gg.F16, gg.BF16, gg.I32)
    }
    | {
        "to the ends of i32": lambda m: gg.cast(
            m.of([[-(2.0**31), 2.0**31, 2.0**31 - 128], [-3e9, 3e9, -0.9]], param=False), dtype=gg.I32
        ),
        "large integers": lambda m: gg.cast(m.ints(5, 33, low=-(2**31), below=2**31), dtype=gg.BF16),
        "empty": lambda m: gg.cast(m(0, 3), dtype=gg.F16),
    },
    "reshape": {
        "merge": lambda m: gg.reshape(gg.cont(m(2, 3, 4)), (6, 4)),
        "split": lambda m: gg.reshape(gg.cont(m(6, 4)), 2, 3, 2, -1),
        "flat": lambda m: gg.reshape(m(3, 4), -1),
        "empty": lambda m: gg.reshape(m(0, 4), (2, 0)),
    },
    "permute": {
        "4d": lambda m: gg.permute(m(2, 3, 4, 5), axes=(2, 0, 3, 1)),
        "negative axes": lambda m: gg.permute(m(2, 3, 4), axes=(-1, 0, -2)),
        "empty": lambda m: gg.permute(m(2, 0), axes=(1, 0)),
    },
    "broadcast_to": {
        "a row": lambda m: gg.broadcast_to(m(7), shape=(3, 5, 7)),
        "a column": lambda m: gg.broadcast_to(m(3, 1), shape=(3, 7)),
        "a scalar": lambda m: gg.broadcast_to(m(), shape=(2, 3)),
        "empty": lambda m: gg.broadcast_to(m(1, 0), shape=(3, 0)),
    },
    "slice_view": {
        "steps": lambda m: gg.slice_view(m(7, 9), starts=(1, 8), steps=(2, -3), shape=(3, 3)),
        "nothing": lambda m: gg.slice_view(m(7, 9), starts=(0, 0), steps=(1, 1), shape=(0, 9)),
        "empty": lambda m: gg.slice_view(m(0, 9), starts=(0, 2), steps=(1, 1), shape=(0, 3)),
    },
    "slice_back": {
        "steps": lambda m: gg.ops.slice_back(m(3, 3), shape=(7, 9), starts=(1, 8), steps=(2, -3)),
        "some columns": lambda m: gg.ops.slice_back(m(3, 35), shape=(3, 77), starts=(0, 11), steps=(1, 1)),
        "one row of 4d": lambda m: gg.ops.slice_back(
            m(2, 1, 4, 5), shape=(2, 3, 4, 5), starts=(0, 2, 0, 0), steps=(1,) * 4
        ),
        "padding": lambda m: gg.pad(m(2, 3, 5), left=(1, 0, 2), right=(0, 3, 1)),
        "nothing": lambda m: gg.ops.slice_back(m(0, 9), shape=(7, 9), starts=(0, 0), steps=(1, 1)),
        "f16": lambda m: gg.ops.slice_back(m(3, 3, dtype=gg.F16), shape=(7, 9), starts=(1, 8), steps=(2, -3)),
    },
    "slice_add": {
        "steps": lambda m: gg.ops.slice_add(m(7, 9), m(3, 3), starts=(1, 8), steps=(2, -3)),
        "some columns": lambda m: gg.ops.slice_add(m(3, 77), m(3, 35), starts=(0, 11), steps=(1, 1)),
        "one row of 4d": lambda m: gg.ops.slice_add(m(2, 3, 4, 5), m(2, 1, 4, 5), starts=(0, 2, 0, 0), steps=(1,) * 4),
        "nothing": lambda m: gg.ops.slice_add(m(7, 9), m(0, 9), starts=(0, 0), steps=(1, 1)),
    },
    "view": {
        "columns": lambda m: gg.view(m(7, 12), shape=(7, 5), strides=(48, 4), offset=8),
        "overlapping": lambda m: gg.view(m(40), shape=(9, 8), strides=(16, 4)),
        "backwards": lambda m: gg.view(m(5, 8), shape=(4, 3), strides=(-32, 8), offset=96),
        "all of it in 4d": lambda m: gg.view(m(120), shape=(2, 3, 4, 5), strides=(240, 80, 20, 4)),
        "f16": lambda m: gg.view(m(5, 8, dtype=gg.F16), shape=(4, 3), strides=(16, 2), offset=2),
        "a scalar": lambda m: gg.view(m(5, 8), shape=(), strides=(), offset=16),
        "nothing": lambda m: gg.view(m(5, 8), shape=(0, 3), strides=(32, 4)),
        "empty": lambda m: gg.view(m(0, 8), shape=(0, 3), strides=(32, 4)),
    },
    "strided_back": {
        "columns": lambda m: gg.strided_back(m(7, 5), shape=(7, 12), strides=(12, 1), offset=2),
        "overlapping": lambda m: gg.strided_back(m(9, 8), shape=(40,), strides=(4, 1)),
        "overlapping in each of a batch": lambda m: gg.strided_back(m(50, 60, 8), shape=(50, 67), strides=(67, 1, 1)),
        "one element": lambda m: gg.strided_back(m(9, 8), shape=(5,), strides=(0, 0), offset=3),
        "backwards": lambda m: gg.strided_back(m(4, 3), shape=(5, 8), strides=(-8, 2), offset=24),
        "a scalar": lambda m: gg.strided_back(m(), shape=(5,), strides=(), offset=3),
        "empty": lambda m: gg.strided_back(m(0, 3), shape=(5,), strides=(1, 1)),
    },
    "acc": {
        "a window": lambda m: gg.acc(m(2, 5, 6), m(2, 2, 3), strides=(120, 24, 4), offset=28),
        "a vector": lambda m: gg.acc(m(4, 6), m(5), offset=12),
        "overlapping": lambda m: gg.acc(m(40), m(9, 8), strides=(16, 4)),
        "overlapping in each of a batch": lambda m: gg.acc(m(50, 67), m(50, 60, 8), strides=(268, 4, 4)),
        "one element": lambda m: gg.acc(m(5), m(9, 8), strides=(0, 0), offset=12),
        "backwards": lambda m: gg.acc(m(5, 8), m(4, 3), strides=(-32, 8), offset=96),
        "the whole of it": lambda m: gg.acc(m(5, 8), m(5, 8)),
        "nothing": lambda m: gg.acc(m(5, 8), m(0, 3)),
        "empty": lambda m: gg.acc(m(0, 8), m(0, 8)),
    },
    "set": {
        "a window": lambda m: gg.set(m(2, 5, 6), m(2, 2, 3), strides=(120, 24, 4), offset=28),
        "a vector": lambda m: gg.set_1d(m(4, 6), m(5), offset=12),
        "large": lambda m: gg.set_2d(m(150, 203), m(120, 101), stride=812, offset=812 * 7 + 16),
        "columns of a transposed window": lambda m: gg.set(m(7, 9), m(4, 5), strides=(4, 36), offset=8),
        "interleaved": lambda m: gg.set(m(13), m(3, 2), strides=(8, 12)),
        "backwards": lambda m: gg.set(m(5, 8), m(4, 3), strides=(-32, 8), offset=96),
        "f16": lambda m: gg.set(m(5, 8, dtype=gg.F16), m(4, 3, dtype=gg.F16), strides=(16, 2), offset=2),
        "the whole of it": lambda m: gg.set(m(5, 8), m(5, 8)),
        "nothing": lambda m: gg.set(m(5, 8), m(0, 3)),
        "empty": lambda m: gg.set(m(0, 8), m(0, 8)),
    },
    "concat": {
        "rows": lambda m: gg.concat(m(2, 7), m(3, 7), m(1, 7), axis=0),
        "columns": lambda m: gg.concat(m(5, 7), m(5, 33)),
        "large": lambda m: gg.concat(m(130, 71), m(130, 133)),
        "a middle axis": lambda m: gg.concat(m(2, 3, 4, 5), m(2, 1, 4, 5), axis=-3),
        "one alone": lambda m: gg.concat(m(3, 4)),
        "with itself": lambda m: (lambda x: gg.concat(x, x))(m(3, 4)),
        "i32": lambda m: gg.concat(m.ints(3, 4, below=9), m.ints(3, 2, below=9)),
        "bf16": lambda m: gg.concat(m(3, 4, dtype=gg.BF16), m(3, 2, dtype=gg.BF16)),
        "rolled": lambda m: gg.roll(m(2, 3, 4, 5), (1, 0, -1, 7)),
        "going around": lambda m: gg.pad_circular(m(2, 3, 4), (0, 2, 1), (0, 1, 11)),
        "mirrored": lambda m: gg.pad_reflect_1d(m(2, 3, 6), 3, 5),
        "with nothing": lambda m: gg.concat(m(3, 4), m(3, 0), m(3, 2)),
        "empty": lambda m: gg.concat(m(0, 4), m(0, 2)),
    },
    "repeat": {
        "rows": lambda m: gg.repeat(m(33), shape=(7, 33)),
        "tiles": lambda m: gg.repeat(m(2, 3), shape=(4, 6)),
        "4d": lambda m: gg.repeat(m(1, 3, 1, 5), shape=(2, 6, 4, 5)),
        "f16": lambda m: gg.repeat(m(3, 1, dtype=gg.F16), shape=(2, 3, 5)),
        "nothing": lambda m: gg.repeat(m(3), shape=(0, 3)),
        "empty": lambda m: gg.repeat(m(0, 3), shape=(0, 6)),
    },
    "repeat_back": {
        "to a row": lambda m: gg.repeat_back(m(7, 33), shape=(33,)),
        "to a row, many": lambda m: gg.repeat_back(m(523, 71), shape=(71,)),
        "to a column": lambda m: gg.repeat_back(m(7, 33), shape=(7, 1)),
        "to a long row": lambda m: gg.repeat_back(m(3, 17003), shape=(17003,)),
        "to few columns": lambda m: gg.repeat_back(m(2, 9001, 3), shape=(3,)),
        "tiles": lambda m: gg.repeat_back(m(6, 8), shape=(2, 4)),
        "inner and outer axes": lambda m: gg.repeat_back(m(3, 4, 5, 6), shape=(4, 1, 6)),
        "middle axes": lambda m: gg.repeat_back(m(5, 31, 9, 7), shape=(5, 1, 1, 7)),
        "to a scalar": lambda m: gg.repeat_back(m(3, 5), shape=()),
        "nothing to repeat": lambda m: gg.repeat_back(m(3, 5), shape=(3, 5)),
        "of nothing": lambda m: gg.repeat_back(m(0, 5), shape=(5,)),
        "empty": lambda m: gg.repeat_back(m(4, 0), shape=(2, 0)),
    },
    "accumulate": {
        "2d": lambda m: accumulated(m, 7, 33),
        "scalar": lambda m: accumulated(m),
        "empty": lambda m: accumulated(m, 0),
    },
}
