"""Random graphs for hypothesis: views, packs, fan-out, broadcasts and chains that may run in place.

A graph is grown from instructions (kind, i, j): small numbers, so that a failing graph shrinks to a small one.
"""

import numpy as np
from hypothesis import strategies as st
from python_kernels import PythonKernel

import ggrad as gg
from ggrad.core.op import all_of

SIZES = (4, 6)


@gg.op(layout="contiguous")
def halves_for_tests(x):
    """The first and the second half of the elements, and a part that nobody is likely to use."""
    half = gg.Spec((x.size // 2,))
    return gg.Pack(left=half, rest=gg.Spec((3,)), right=half)


@halves_for_tests.grad
def _(t, dleft, drest, dright):
    x, n = t.src[0], t.src[0].size // 2
    total = None
    for d, start in ((dleft, 0), (dright, n)):
        if d is not None:
            d = gg.slice_back(d, shape=(2 * n,), starts=(start,), steps=(1,))
            total = d if total is None else gg.add(total, d)
    return (None if total is None else total.reshape(x.shape),)


@halves_for_tests.reference
def _(x):
    left, right = np.split(x.reshape(-1), 2)
    return left, np.ones(3), right


def _run(dst, src, begin, end):
    dst[0][...], dst[2][...] = np.split(src[0], 2)
    dst[1][...] = 1


if gg.native.lib is not None:
    halves_for_tests.in_python = PythonKernel(_run)


def _binary(function):
    return lambda a, b: function(a, b if a.shape == b.shape or a.size != b.size else b.reshape(a.shape))


def _halves(a, b):
    return halves_for_tests(a) if a.size % 2 == 0 and a.size else gg.neg(a)


def _window(a, b):
    """a with b, or what of it fits, added to a corner."""
    shape = tuple(min(n, m) for n, m in zip(a.shape, b.shape, strict=False))
    if len(shape) != a.ndim or len(shape) != b.ndim:
        return gg.scale(a, factor=2.0)
    return gg.slice_add(a, b[tuple(slice(0, n) for n in shape)], starts=(0,) * a.ndim, steps=(1,) * a.ndim)


def _weight(a):
    """A constant: its gradient is wanted by nobody."""
    return gg.tensor(np.linspace(0.5, 1.5, a.shape[-1]))


def _learned(a):
    return (gg.tensor(np.linspace(0.5, 1.5, a.shape[-1]), param=True) for _ in range(2))


KINDS = {
    "add": _binary(lambda a, b: gg.add(a, b) if a.shape == b.shape else gg.neg(a)),
    "mul": _binary(lambda a, b: gg.mul(a, b) if a.shape == b.shape else gg.neg(a)),
    "sub": _binary(lambda a, b: gg.sub(a, b) if a.shape == b.shape else gg.neg(a)),
    "square": lambda a, b: gg.mul(a, a),
    "row": lambda a, b: gg.add(a, gg.slice_of(a, 0)) if a.ndim and a.shape[0] else gg.neg(a),
    "neg": lambda a, b: gg.neg(a),
    "scale": lambda a, b: gg.scale(a, factor=-0.5, bias=0.25),
    "cont": lambda a, b: gg.cont(a),
    "transpose": lambda a, b: gg.transpose(a) if a.ndim >= 2 else gg.reshape(a, (1, *a.shape)),
    "reverse": lambda a, b: a[::-1] if a.ndim else a.reshape(1),
    "tail": lambda a, b: a[1:] if a.ndim and a.shape[0] > 1 else gg.neg(a),
    "every other": lambda a, b: a[..., ::2] if a.ndim else gg.neg(a),
    "flat": lambda a, b: a.reshape(a.size),
    "sum": lambda a, b: gg.sum(a),
    "spread": lambda a, b: gg.broadcast_to(gg.sum(a).reshape(1, 1), shape=SIZES),
    "tile": lambda a, b: gg.repeat(gg.sum(a).reshape(1, 1), shape=SIZES),
    "halves": _halves,
    "norm": lambda a, b: gg.rms_norm(a, _weight(a), eps=1e-5) if a.ndim else gg.neg(a),
    "learned norm": lambda a, b: gg.norm(a, *_learned(a), eps=1e-5) if a.ndim else gg.neg(a),
    "product": lambda a, b: gg.mul_mat(a, b) if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1] else gg.silu(a),
    "gate": lambda a, b: gg.swiglu(a, b) if a.shape == b.shape and a.ndim else gg.sigmoid(a),
    "window": _window,
}

instructions = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25
)


def grow(steps) -> list[gg.Tensor]:
    """The tensors that the instructions make, in order; the first three are leaves, two of them parameters."""
    rng = np.random.default_rng(0)
    pool = [
        gg.tensor(rng.uniform(-1, 1, SIZES), name="w", param=True),
        gg.tensor(rng.uniform(-1, 1, SIZES), name="x"),
        gg.tensor(rng.uniform(-1, 1, SIZES[::-1]), name="v", param=True),
    ]
    for kind, i, j in steps:
        pool.extend(all_of(KINDS[kind](pool[i % len(pool)], pool[j % len(pool)])))
    return pool


@st.composite
def graphs(draw, backward: bool | None = None) -> gg.Graph:
    """A graph with some roots, some marked outputs, and gradients (always, never, or sometimes)."""
    steps = draw(instructions)
    pool = grow(steps)
    results = [t for t in pool if not t.is_leaf]
    roots = draw(st.lists(st.sampled_from(results), max_size=2, unique=True)) or [results[-1]]
    graph = gg.Graph().build_forward_expand(*roots)
    if draw(st.booleans()) if backward is None else backward:
        loss = gg.sum(pool[0])
        for t in results:
            if draw(st.booleans()):
                loss = loss + gg.sum(t)
        graph.build_backward_expand(loss, keep=draw(st.booleans()))
    for t in draw(st.lists(st.sampled_from(graph.nodes), max_size=3)):
        gg.set_output(t)
    return graph
