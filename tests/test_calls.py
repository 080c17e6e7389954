"""Errors are of the op that was called, and name the leaves that it was given: also where it is made of other ops."""

import contextlib

import numpy as np
import pytest

import ggrad as gg
from ggrad import ops
from ggrad.core import calls, op
from ggrad.core.errors import GgradError, IndexRangeError, ShapeError
from ggrad.core.op import all_of, registry
from ggrad.core.tensor import Tensor
from ggrad.testing.cases import CASES, COMPOSED
from ggrad.testing.maker import Maker

MADE_OF_OPS = sorted(name for name in {*CASES, *COMPOSED} if name in COMPOSED or registry[name].called is not None)

# What takes any dtype, since it moves elements or looks at a shape; and what takes every shape.
ANY_DTYPE = {
    "get_rel_pos",
    "cpy",
    "dup",
    "flip",
    "ones_like",
    "reshape",
    "roll",
    "stack",
    "zeros_like",
    "view",
    "transpose",
    "slice_of",
}


@pytest.fixture
def arguments(monkeypatch):
    """A function from an op's name to (function, arguments, keyword arguments) of its first call in its cases."""

    def of(name):
        found = []

        def answered(called, names, function, args, kwargs):
            if called == name and not found:
                found.append((args, kwargs))
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(calls, "answered", answered)
            patch.setattr(op, "answered", answered)
            for build in {**CASES, **COMPOSED}[name].values():
                with contextlib.suppress(GgradError):
                    build(Maker())
                if found:
                    return found[0]
        return None

    return of


def with_each_replaced(args, kwargs, kinds, make):
    """The arguments again and again, each time with another tensor of these dtypes replaced."""
    for i, t in enumerate(args):
        if isinstance(t, Tensor) and t.dtype in kinds and (new := make(t)) is not None:
            yield (*args[:i], new, *args[i + 1 :]), kwargs
    for name, t in kwargs.items():
        if isinstance(t, Tensor) and t.dtype in kinds and (new := make(t)) is not None:
            yield args, {**kwargs, name: new}


def refused(name, variants):
    """How many calls were refused, each in the op's name and with the leaf's."""
    count = 0
    for args, kwargs in variants:
        try:
            getattr(ops, name)(*args, **kwargs)
        except ShapeError as error:
            assert str(error).startswith(f"{name}("), error
            assert "wrong: " in str(error), error
            count += 1
        except (TypeError, ValueError, IndexError, GgradError):
            pass  # of a number, not of a tensor
    return count


def leaf(shape, dtype=gg.F32):
    return gg.tensor(shape=shape, dtype=dtype, name="wrong")


@pytest.mark.parametrize("name", MADE_OF_OPS)
def test_a_wrong_dtype_is_refused_in_the_name_of_the_op(name, arguments):
    if (call := arguments(name)) is None:
        return
    tensors = [t for t in (*call[0], *call[1].values()) if isinstance(t, Tensor)]
    found = refused(name, with_each_replaced(*call, (gg.F32, gg.I32), lambda t: leaf((*t.shape[:-1], 32), gg.Q8_0)))
    assert found or not tensors or name in ANY_DTYPE


@pytest.mark.parametrize("name", MADE_OF_OPS)
def test_a_wrong_shape_is_refused_in_the_name_of_the_op(name, arguments):
    if (call := arguments(name)) is None:
        return
    for shape in ((), (7,), (5, 7), (3, 5, 7), (2, 3, 5, 7)):
        refused(name, with_each_replaced(*call, (gg.F32, gg.I32), lambda t, shape=shape: leaf(shape, t.dtype)))


@pytest.mark.native
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", MADE_OF_OPS)
def test_an_index_out_of_range_is_found_in_the_name_of_the_op(name, arguments, backend):
    if (call := arguments(name)) is None:
        return
    for args, kwargs in with_each_replaced(
        *call, (gg.I32,), lambda t: gg.tensor(np.full(t.shape, 1 << 20, np.int32), name="wrong")
    ):
        results = [t for t in all_of(getattr(ops, name)(*args, **kwargs)) if isinstance(t, Tensor) and not t.is_leaf]
        try:
            gg.Graph().build_forward_expand(*results).compute(backend=backend)
        except IndexRangeError as error:
            assert str(error).startswith(f"{name}("), error
            assert "wrong: " in str(error), error


def test_what_is_checked_by_a_part_is_said_of_the_whole():
    x, ids = gg.tensor(np.ones((3, 4)), name="scores"), gg.tensor(np.full((3, 4), 9, np.int32), name="picked")
    picked = gg.take_along_axis(x, ids, 1)
    with pytest.raises(IndexRangeError, match=r"^take_along_axis\(x=scores: f32\[3,4\], ids=picked: i32\["):
        gg.Graph().build_forward_expand(picked).compute()


def test_an_op_names_the_leaves_it_was_given():
    with pytest.raises(ShapeError, match=r"^mul_mat\(a=w: f32\[3,4\], b=f32\[2,5\]\)"):
        gg.mul_mat(gg.tensor(np.ones((3, 4)), name="w"), gg.tensor(np.ones((2, 5))))


def test_outside_of_any_call_nodes_are_of_none():
    with pytest.raises(ShapeError):
        gg.group_norm(gg.tensor(np.ones(3)), 1)
    assert calls.call_at_hand() is None
    assert gg.relu(gg.tensor(np.ones(3))).call is None
