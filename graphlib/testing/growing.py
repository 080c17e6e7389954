"""Grows random programs: cases of ops, in other sizes and with other attributes, fed with what was made before.

Every result is evaluated by its reference as it is made, so that inputs stay where their ops are defined, and nothing
grows beyond what f32 can hold.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from .. import ops
from ..core.dtype import BF16, F16, F32, I32, DType
from ..core.errors import GgradError
from ..core.op import Op, part, registry
from ..core.tensor import Tensor, tensor
from ..diff.autodiff import depend_on
from ..graph import Graph
from ..run.reference import as_promised, computed, leaf_value
from .maker import LAYOUTS, Maker
from .programs import Address, Call, GraphOf, Leaf, Program, pruned, weighted_sum

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 67)
SMALL, LARGE = 5_500, 60_000  # elements that a case may have, most of the time and sometimes
LIMIT = 1e3  # what a value may be to be used again
HEAVY = 2_000  # elements, of ops whose references loop in Python
SLOW = {"kda", "delta_scan", "selective_scan", "sparse", "flash", "lightning", "conv", "im2col"}
# Parts that ops keep for their own gradients, which functions give to nobody: no gradient of theirs alone is right.
OWN_PARTS = {
    "flash_attn_ext": (2, 3),
    "sparse_flash_mla": (2, 3),
    "cross_entropy_class": (1, 2, 3),
    "cross_entropy_soft": (1, 2),
}


class Growth(Maker):
    """A program that grows, and the maker of inputs that cases are given while it does.

    `m(...)` gives one of the values made before, where one fits, seen through views, or a new leaf.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.seed = seed
        self.steps: list[Leaf | Call] = []
        self.tensors: dict[Tensor, Address] = {}
        self.env: dict[Tensor, Any] = {}  # values by the references
        self.recipes: dict[Tensor, Leaf] = {}
        self.pool: list[Tensor] = []
        self.updated: set[Tensor] = set()
        self.sizes: dict[int, int] | None = None  # of the case that is being built: old to new
        self.reusing = True
        self.used: list[str] = []
        self.own: set[Tensor] = set()

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one_of(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    # -- the maker's part -------------------------------------------------------------------------

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0, dtype=F32, param: bool = True) -> Tensor:
        shape = self._sized(shape)
        if self.reusing and self.chance(0.6) and -100 <= low < high <= 100:
            t = self._from_pool(shape, low, high, dtype, param)
            if t is not None:
                return t
        if dtype is F32 and -100 <= low < high <= 100 and self.chance(0.08):
            dtype = self.one_of((F16, BF16))
        return self._random_leaf(shape, low, high, dtype, param)

    def of(self, values, *, dtype=F32, param: bool = True) -> Tensor:
        array = np.asarray(values)
        role = "param" if param and dtype.is_float else "constant"
        return self._made(
            Leaf(array.shape, dtype, role, values=array.astype(np.float64 if dtype.is_float else np.int64))
        )

    def ints(self, *shape: int, below: int, low: int = 0) -> Tensor:
        if self.sizes is not None and below in self.sizes:
            below = self.sizes[below]
        return self._made(Leaf(self._sized(shape), I32, seed=self._new_seed(), low=low, high=max(below, low + 1)))

    def leaf(
        self, *shape: int, low: float = -2.0, high: float = 2.0, param: bool = True, role: str = "constant"
    ) -> Tensor:
        role = "param" if param else role
        return self._made(Leaf(self._sized(shape), F32, role, seed=self._new_seed(), low=low, high=high))

    def _leaf(self, values, dtype, param, role="constant") -> Tensor:
        raise AssertionError("leaves are made from recipes")

    def _made(self, recipe: Leaf) -> Tensor:
        t = recipe.make()
        self.recipes[t] = recipe
        self.leaves.append(t)
        return t

    def _new_seed(self) -> int:
        return int(self.rng.integers(1 << 30))

    def _sized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.sizes is None:
            return shape
        for n in shape:
            if n > 1 and n not in self.sizes:
                self.sizes[n] = self.one_of(SIZES) if self.chance(0.7) else n
        return tuple(self.sizes.get(n, n) for n in shape)

    def _random_leaf(self, shape, low, high, dtype: DType, param: bool) -> Tensor:
        """In one of the layouts; a parameter or a constant, frozen or not."""
        role = "param" if param and self.chance(0.7) else "constant"
        frozen = role == "constant" and self.chance(0.3)
        n, layout = len(shape), self.one_of(LAYOUTS) if self.chance(0.4) else "plain"

        def made(inner: tuple[int, ...]) -> Tensor:
            return self._made(Leaf(inner, dtype, role, frozen, self._new_seed(), low, high))

        if layout == "transposed" and n >= 2:
            return ops.transpose(made((*shape[:-2], shape[-1], shape[-2])))
        if layout == "reversed" and n >= 1:
            return made(shape)[(slice(None, None, -1),) * n]
        if layout == "strided" and n >= 1 and all(shape):
            return made((*shape[:-1], shape[-1] * 2))[..., ::2]
        if layout == "stride0" and n >= 1 and all(shape):
            return ops.broadcast_to(made((1, *shape[1:])), shape=shape)
        return made(shape)

    def _from_pool(self, shape, low, high, dtype: DType, param: bool) -> Tensor | None:
        """A value that was made before, in this shape and range, or None."""
        size = int(np.prod(shape))
        fit = [t for t in self.pool if t.dtype.is_float and (t.size >= size > 0 or t.shape == shape)]
        fit = fit[-8:] if self.chance(0.5) else fit
        if not fit:
            return None
        same = [t for t in fit if t.shape == shape]
        t = self.one_of(same) if same and self.chance(0.7) else self.one_of(fit)
        values = self.env[t]
        if t.shape != shape:
            flat = t.reshape(t.size)
            start = int(self.rng.integers(t.size - size + 1))
            t = (flat if t.size == size else flat[start : start + size]).reshape(*shape)
        wide = (low, high) == (-2.0, 2.0)
        lowest, highest = (-8.0, 8.0) if wide else (low, high)
        if values.size and not (lowest <= values.min() and values.max() <= highest):
            t = ops.scale(ops.sigmoid(t), factor=high - low, bias=low)
        if dtype is not F32 or t.dtype is not F32:
            t = t if t.dtype is dtype else ops.cast(t, dtype=dtype)
        return t if param else ops.stop_gradient(t)

    # -- growing ------------------------------------------------------------------------------------

    def add_case(self, build: Callable[[Maker], Any]) -> bool:
        """Call a case with this maker; in other sizes, if they are allowed there.  Returns whether it was taken."""
        for varied in (True, False) if self.chance(0.5) else (False,):
            self.sizes = {} if varied else None
            self.leaves = []
            try:
                made = build(self)
                results = made if isinstance(made, tuple) else (made,)
                if self.chance(0.25):
                    results = self._with_other_attrs(results)
                if self.absorb(*results):
                    return True
            except (GgradError, ValueError, IndexError, TypeError, ZeroDivisionError):
                continue  # sizes or attributes that the op refuses
            finally:
                self.sizes = None
        return False

    def _with_other_attrs(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The last node once more, with one of its attributes another; the results as they were if that is refused."""
        node: Tensor = results[0].src[0] if results[0].op is part else results[0]  # type: ignore[assignment]
        op: Op = node.op  # type: ignore[assignment]
        if (
            op is None
            or node.updates
            or not node.attrs
            or op.name not in importlib.import_module("ggrad.testing.cases").CASES
        ):
            return results
        attrs = dict(node.attrs)
        name = self.one_of(sorted(attrs))
        value = attrs[name]
        if isinstance(value, bool):
            attrs[name] = not value
        elif isinstance(value, enum.Enum):
            attrs[name] = self.one_of(_seen_values(op.name, name))
        elif isinstance(value, float):
            attrs[name] = value * self.one_of((0.5, 2.0, 1.5))
        elif isinstance(value, int):
            attrs[name] = value + self.one_of((-1, 1))
        else:
            return results
        try:
            made = op(*node.src, **attrs)
            results_now = made if isinstance(made, tuple) else (made,)
            if self._evaluate(self._new_nodes(results_now)) is not None:
                return results_now
        except (GgradError, ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError):
            pass
        return results

    def _new_nodes(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        found: set[Tensor] = set()
        stack = [*results]
        while stack:
            t = stack.pop()
            if t not in found and t not in self.tensors:
                found.add(t)
                stack.extend(s for s in t.src if s is not None)
                stack.extend(t.parts)
        return sorted(found, key=lambda t: t.serial)

    def _evaluate(self, new: list[Tensor]) -> dict[Tensor, Any] | None:
        """Values of new tensors; None if they are too large, or read what is updated."""
        if sum(t.size for t in new) > (LARGE if self.large else SMALL):
            return None
        names = {t.op.name for t in new if t.op is not None}
        if any(name.startswith(slow) for name in names for slow in SLOW) and sum(t.size for t in new) > HEAVY:
            return None
        env: dict[Tensor, Any] = {}

        def value(t: Tensor) -> Any:
            return env[t] if t in env else self.env[t]

        with np.errstate(all="ignore"):
            for t in new:
                if any(s is not None and s.storage[0] in self.updated for s in t.src):
                    return None
                if t.is_leaf:
                    env[t] = leaf_value(t)
                elif t.op is part:
                    env[t] = value(t.src[0])[t.attrs["index"]]  # type: ignore[arg-type]
                else:
                    src = [None if s is None else value(s) for s in t.src]
                    made = computed(t, src)
                    env[t] = made[0] if t.updates else as_promised(t, made)
        return env

    def absorb(self, *results: Tensor) -> bool:
        """Take the results, and all that is new below them, as steps.  Returns whether they were taken."""
        new = self._new_nodes(results)
        env = self._evaluate(new)
        if env is None:
            return False
        self.env |= env
        for t in new:
            if t.op is part:
                i, _ = self.tensors[t.src[0]]  # type: ignore[index]
                self.tensors[t] = (i, t.attrs["index"])
                continue
            self.tensors[t] = (len(self.steps), 0)
            if t.is_leaf:
                self.steps.append(self.recipes.get(t) or self._explicit(t))
            else:
                src = tuple(None if s is None else self.tensors[s] for s in t.src)
                self.steps.append(Call(t.op.name, src, t.attrs))  # type: ignore[union-attr]
                self.used.append(t.op.name)  # type: ignore[union-attr]
                self.updated |= {*t.updates}
        for t in new:
            own = t.op is part and t.attrs["index"] in OWN_PARTS.get(t.src[0].op.name, ())  # type: ignore[union-attr]
            if own:
                self.own.add(t)
            elif not t.parts and not t.dtype.quantized and t.storage[0] not in self.updated and self._usable(env[t]):
                self.pool.append(t)
        return True

    @staticmethod
    def _usable(value: np.ndarray) -> bool:
        return bool(np.isfinite(value).all() and (np.abs(value) <= LIMIT).all())

    @staticmethod
    def _explicit(t: Tensor) -> Leaf:
        """A leaf that a case has made without its maker."""
        memory = t.memory()
        values = memory.copy() if t.dtype.quantized or t.dtype is not BF16 else t.numpy().astype(np.float64)
        return Leaf(t.shape, t.dtype, t.role, t.frozen, values=values)

    # -- what belongs to no op ------------------------------------------------------------------------

    def add_glue(self) -> bool:
        """One of `GLUE` on values that were made before."""
        floats = [t for t in self.pool if t.dtype is F32]
        if not floats:
            return self.absorb(self(self.one_of(SIZES), self.one_of(SIZES)))
        recent = floats[-6:] if self.chance(0.7) else floats
        a, b = self.one_of(recent), self.one_of(floats)
        alike = [t for t in floats if t.shape == a.shape]
        if self.chance(0.5):
            b = self.one_of(alike)
        name = self.one_of(sorted(GLUE))
        try:
            made = GLUE[name](self, a, b)
            return self.absorb(*(made if isinstance(made, tuple) else (made,)))
        except GgradError:
            return False

    # -- the whole ------------------------------------------------------------------------------------

    def program(self, first: str | None = None) -> Program:
        """Some cases and glue, the op `first` among them, and graphs of the results."""
        cases = importlib.import_module("ggrad.testing.cases").CASES
        names = sorted(name for name in cases if name in registry)
        self.large, self.first = self.chance(0.2), first
        shape = (self.one_of(SIZES), self.one_of(SIZES))
        for _ in range(2):
            self.absorb(self._made(Leaf(shape, role="param", seed=self._new_seed(), low=-2.0, high=2.0)))
        for i in range(int(self.rng.integers(2, 9))):
            if (i == 0 and first is not None) or self.chance(0.4):
                op = first if i == 0 and first is not None else self.one_of(names)
                self._add_op(cases[op])
            for _ in range(int(self.rng.integers(1, 5))):
                self.add_glue()
        graphs = [self._graph() for _ in range(2 if self.chance(0.25) else 1)]
        return pruned(Program(tuple(self.steps), tuple(graphs)))

    def _add_op(self, builds: dict[str, Callable]) -> None:
        """One of an op's cases, and if none is taken with values that were made before, one of them as it is."""
        for attempt in range(8):
            self.reusing = attempt < 4
            self.large = self.large or attempt == 7
            taken = self.add_case(builds[self.one_of(sorted(builds))])
            self.reusing = True
            if taken:
                return

    def _graph(self) -> GraphOf:
        results = [t for t in self.tensors if not t.is_leaf and not t.parts]
        ends = results[-1:] + [self.one_of(results) for _ in range(int(self.rng.integers(3)))]
        ends += [t for t in results if _node(t).op.name == self.first][:1]  # type: ignore[union-attr]
        calls = [t for t in results if t.updates]  # what is updated would else be no part of it
        roots = list(dict.fromkeys([*ends, *calls]))
        outputs = [self.one_of(results) for _ in range(int(self.rng.integers(3)))]
        address = self.tensors.__getitem__
        graph = GraphOf(tuple(map(address, roots)), outputs=tuple(dict.fromkeys(map(address, outputs))))
        if self.chance(0.25):
            return graph
        losses = self._losses([t for t in results if t not in calls and self._differentiable(t)])
        if not losses:
            return graph
        below = [t for t in Graph().build_forward_expand(*losses).nodes if not t.parts and not t.updates]
        points = [self.one_of(below) for _ in range(int(self.rng.integers(1, 4)))] if self.chance(0.3) else []
        return replace(
            graph,
            loss=tuple(map(address, losses)),
            checkpoints=tuple(dict.fromkeys(map(address, points))),
            accumulate=self.chance(0.3),
            keep=self.chance(0.7),
            seed=float(self.rng.uniform(0.5, 2)) if self.chance(0.3) else None,
            optimizer=self.one_of((None, "AdamW", "SGD")) if self.chance(0.5) and not calls else None,
            clip=float(self.rng.uniform(0.1, 3)) if self.chance(0.5) else None,
        )

    def _differentiable(self, t: Tensor) -> bool:
        return t.dtype.is_float and t not in self.own and self._usable(self.env[t])

    def _losses(self, candidates: list[Tensor]) -> list[Tensor]:
        """Some values that can be differentiated together."""
        order = self.rng.permutation(len(candidates))
        chosen: list[Tensor] = []
        wanted = int(self.rng.integers(1, 4))
        for k in order[:8]:
            t = candidates[int(k)]
            graph = Graph().build_forward_expand(t)
            if not graph.params or t not in depend_on(graph.nodes, graph.params):
                continue
            with np.errstate(all="ignore"):
                try:
                    graph.build_backward_expand(weighted_sum([*chosen, t]))
                except GgradError:
                    continue  # an op on the way has no gradient
            chosen.append(t)
            if len(chosen) == wanted:
                break
        return chosen


def _node(t: Tensor) -> Tensor:
    """The node that made it."""
    return t.src[0] if t.op is part else t  # type: ignore[return-value]


@cache
def _seen_values(op: str, attr: str) -> list:
    """What the op's cases give an attribute: not every member of an enumeration is for every op."""
    seen = []
    for build in importlib.import_module("ggrad.testing.cases").CASES[op].values():
        made = build(Maker())
        t = made[0] if isinstance(made, tuple) else made
        node = t.src[0] if t.op is part else t
        if node.op is not None and node.op.name == op:
            seen.append(node.attrs[attr])
    return list(dict.fromkeys(seen))


def _alike(function: Callable, other: Callable) -> Callable:
    return lambda g, a, b: function(a, b) if a.shape == b.shape else other(a)


def _window(g: Growth, a: Tensor, b: Tensor) -> Tensor:
    """a with what of b fits, added somewhere."""
    if a.ndim != b.ndim or not a.ndim:
        return ops.neg(a)
    shape = tuple(min(n, m) for n, m in zip(a.shape, b.shape, strict=True))
    starts = tuple(int(g.rng.integers(n - m + 1)) for n, m in zip(a.shape, shape, strict=True))
    return registry["slice_add"](a, b[tuple(slice(0, n) for n in shape)], starts=starts, steps=(1,) * a.ndim)


def _weight(g: Growth, n: int, role: str | None = None) -> Tensor:
    role = role or g.one_of(("param", "constant", "frozen"))
    return g._made(
        Leaf((n,), F32, "param" if role == "param" else "constant", role == "frozen", g._new_seed(), 0.5, 1.5)
    )


def _matrix(g: Growth, rows: int, columns: int) -> Tensor:
    """A weight: a parameter, frozen, half or quantized."""
    kind = g.one_of(("param", "constant", "frozen", "f16", "bf16", "q8_0", "q4_0"))
    if kind in ("q8_0", "q4_0"):
        from ..core.quant import quantize

        dtype = next(d for d in _quantized() if d.name == kind)
        if columns % dtype.block == 0 and rows:
            blocks = quantize(np.random.default_rng(g._new_seed()).uniform(-1, 1, (rows, columns)), dtype)
            return g._made(Leaf((rows, columns), dtype, frozen=g.chance(0.5), values=blocks))
    dtype = {"f16": F16, "bf16": BF16}.get(kind, F32)
    role = "param" if kind == "param" or (kind != "frozen" and g.chance(0.3)) else "constant"
    return g._made(Leaf((rows, columns), dtype, role, kind == "frozen", g._new_seed(), -0.5, 0.5))


def _quantized() -> tuple[DType, ...]:
    from ..core.dtype import QUANTIZED

    return QUANTIZED


def _product(g: Growth, a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == 2 and b.ndim == 2 and a.shape[1] == b.shape[1] and g.chance(0.5):
        return ops.mul_mat(a, b)
    if a.ndim < 1 or not a.size:
        return ops.neg(a)
    rows = a if a.ndim > 1 else a.reshape(1, a.size)
    return ops.mul_mat(_matrix(g, g.one_of(SIZES), a.shape[-1]), rows)


def _adapter(g: Growth, a: Tensor, b: Tensor) -> Tensor:
    """A frozen weight and two small factors beside it."""
    if a.ndim != 2 or not a.size:
        return ops.silu(a)
    n = a.shape[1]
    frozen = g._made(Leaf((n, n), frozen=True, seed=g._new_seed(), low=-0.5, high=0.5))
    down = g._made(Leaf((2, n), role="param", seed=g._new_seed(), low=-0.5, high=0.5))
    up = g._made(Leaf((n, 2), role="param", seed=g._new_seed(), low=-0.5, high=0.5))
    return ops.add(ops.mul_mat(frozen, a), ops.mul_mat(up, ops.mul_mat(down, a)))


def _head(t: Tensor, n: int) -> Tensor:
    return t[:n] if t.ndim and t.shape[0] > n else ops.neg(t)


GLUE: dict[str, Callable[[Growth, Tensor, Tensor], Any]] = {
    "add": _alike(ops.add, ops.neg),
    "sub": _alike(ops.sub, ops.neg),
    "mul": _alike(ops.mul, ops.sigmoid),
    "twice": lambda g, a, b: ops.add(a, a),
    "square": lambda g, a, b: ops.mul(a, a),
    "row": lambda g, a, b: ops.add(a, ops.slice_of(a, 0)) if a.ndim and a.shape[0] else ops.neg(a),
    "neg": lambda g, a, b: ops.neg(a),
    "scale": lambda g, a, b: ops.scale(a, factor=-0.5, bias=0.25),
    "silu": lambda g, a, b: ops.silu(a),
    "relu": lambda g, a, b: ops.relu(a),
    "exp": lambda g, a, b: ops.exp(ops.tanh(a)),
    "clamp": lambda g, a, b: ops.clamp(a, -1.0, 1.5),
    "cont": lambda g, a, b: ops.cont(a),
    "transpose": lambda g, a, b: ops.transpose(a) if a.ndim >= 2 else ops.reshape(a, (1, *a.shape)),
    "reverse": lambda g, a, b: a[::-1] if a.ndim else a.reshape(1),
    "tail": lambda g, a, b: a[1:] if a.ndim and a.shape[0] > 1 else ops.neg(a),
    "head": lambda g, a, b: _head(a, 2),
    "every other": lambda g, a, b: a[..., ::2] if a.ndim else ops.neg(a),
    "flat": lambda g, a, b: a.reshape(a.size),
    "column": lambda g, a, b: a.reshape(a.size, 1),
    "sum": lambda g, a, b: ops.sum(a),
    "mean": lambda g, a, b: ops.mean(a) if a.ndim and a.shape[-1] else ops.neg(a),
    "rows": lambda g, a, b: ops.sum_rows(a) if a.ndim else ops.neg(a),
    "spread": lambda g, a, b: ops.broadcast_to(ops.tanh(ops.sum(a)).reshape(1, 1), shape=(4, 6)),
    "spread row": lambda g, a, b: ops.mul(a, ops.broadcast_to(a[:1], shape=a.shape)) if a.ndim and a.size else a,
    "tile": lambda g, a, b: ops.repeat(a.reshape(1, a.size), shape=(3, a.size)) if 0 < a.size < 500 else ops.neg(a),
    "concat": lambda g, a, b: ops.concat(a, b) if a.ndim and a.shape[:-1] == b.shape[:-1] else ops.neg(a),
    "norm": lambda g, a, b: ops.rms_norm(a, _weight(g, a.shape[-1])) if a.ndim else ops.neg(a),
    "constant norm": lambda g, a, b: ops.rms_norm(a, _weight(g, a.shape[-1], "constant")) if a.ndim else ops.neg(a),
    "learned norm": lambda g, a, b: (
        ops.norm(a, _weight(g, a.shape[-1]), _weight(g, a.shape[-1])) if a.ndim else ops.neg(a)
    ),
    "soft_max": lambda g, a, b: ops.soft_max(a) if a.ndim and a.shape[-1] else ops.neg(a),
    "product": _product,
    "adapter": _adapter,
    "gate": lambda g, a, b: ops.swiglu(a, b) if a.shape == b.shape and a.ndim else ops.sigmoid(a),
    "window": _window,
    "stop": lambda g, a, b: ops.stop_gradient(a),
    "half": lambda g, a, b: ops.cast(ops.cast(a, dtype=g.one_of((F16, BF16))), dtype=F32),
    "constant": lambda g, a, b: ops.mul(a, g._made(Leaf(a.shape, frozen=g.chance(0.5), seed=g._new_seed()))),
    "drop": lambda g, a, b: ops.dropout(a, tensor(7), p=0.25),
}


def random_program(seed: int) -> Program:
    """The program of a seed.  Of as many seeds in a row as there are ops, each has another op in it."""
    cases = importlib.import_module("ggrad.testing.cases").CASES
    names = sorted(name for name in cases if name in registry)
    return Growth(seed).program(names[seed % len(names)])


__all__ = ["GLUE", "Growth", "random_program"]
