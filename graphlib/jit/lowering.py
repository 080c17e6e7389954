"""From a Python body to machine code: what numba must know about ggrad.h, and what it must be kept from.

Importing this module imports numba, so only `objects` does, when nothing compiled is on disk.
"""

from __future__ import annotations

import dis
import re
import types as python_types
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import cfunc, config, njit, types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from ..core.errors import KernelError
from ..core.native import ffi
from .source import Array, source_of

if TYPE_CHECKING:
    from .kernel import Kernel

BYTE, I32, I64, F32 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _struct(name: str, **pointers) -> ir.LiteralStructType:
    """A struct of ggrad.h for LLVM; what a field points to is said for those that are followed."""
    return ir.LiteralStructType([pointers.get(field) or _type(at.type) for field, at in ffi.typeof(name).fields])


def _type(ctype):
    if ctype.kind == "struct":
        return ir.LiteralStructType([_type(at.type) for _, at in ctype.fields])
    if ctype.kind == "array":
        return ir.ArrayType(_type(ctype.item), ctype.length)
    return BYTE if ctype.kind in ("pointer", "function") else ir.IntType(8 * ffi.sizeof(ctype))


def _places(name: str, *fields: str) -> list[int]:
    names = [field for field, _ in ffi.typeof(name).fields]
    return [names.index(field) for field in fields]


TENSOR = _struct("gg_tensor")
KERNEL = _struct("gg_fitted_kernel", tasks=I64.as_pointer())
CALL = _struct("gg_call", kernel=KERNEL.as_pointer(), src=TENSOR.as_pointer(), dst=TENSOR.as_pointer())
DATA, NE, NB = _places("gg_tensor", "data", "ne", "nb")
GRAIN, WORK_BYTES, SCRATCH_BYTES, TASKS = _places("gg_fitted_kernel", "grain", "work", "scratch", "tasks")
CALL_KERNEL, SRC, DST, ATTRS, WORK = _places("gg_call", "kernel", "src", "dst", "attrs", "work")

RUN = types.void(types.voidptr, types.int32, types.int64, types.int64, types.voidptr)

# The words of `Array`, and how attributes are stored and seen.
FLOAT32, INT32 = range(2)
ANY, ROWS, CONTIGUOUS = range(3)
FLOAT, INT, BOOL, ENUM, TUPLE = range(5)
ELEMENTS = (types.float32, types.int32)
STORED = (F32, I64, I32, I32, I64)
SEEN = (types.float32, types.int64, types.boolean, types.int64, types.UniTuple(types.int64, 4))
WORDS = {
    "DST": DST, "SRC": SRC, "FLOAT32": FLOAT32, "INT32": INT32, "ANY": ANY, "ROWS": ROWS, "CONTIGUOUS": CONTIGUOUS,
    "FLOAT": FLOAT, "INT": INT, "BOOL": BOOL, "ENUM": ENUM, "TUPLE": TUPLE,
}  # fmt: skip

# What a kernel may call: pure functions of the C library.  All else raises, allocates, or asks for the GIL.
HARMLESS = re.compile(
    r"llvm\.|mem(set|cpy|move)$|"
    r"(a?(sin|cos|tan)h?|exp|exp2|expm1|log|log2|log10|log1p|sqrt|cbrt|pow|erf|erfc|tgamma|lgamma|fmod|hypot|atan2|floor|ceil|trunc|round|rint|"
    r"nearbyint|fabs|fmax|fmin|copysign|ldexp)f?$"
)


def compile_kernel(kernel: Kernel, arrays: tuple[Array, ...]) -> tuple[str, bytes]:
    """The name of the machine code's entry, and the object file that holds it.

    Raises:
        KernelError: numba cannot compile the body, or it might raise or allocate.
    """
    name = kernel.op.name
    for setting in ("DISABLE_JIT", "BOUNDSCHECK"):
        if getattr(config, setting):
            raise KernelError(f"{name}: cannot compile a kernel while the environment sets NUMBA_{setting}")
    options = {"error_model": "numpy", "boundscheck": False, "fastmath": _flags(kernel.fastmath)}
    scope = {
        "__name__": __name__, "body": njit(inline="always", **options)(plain(kernel.body, options)),
        "block": block, "blocks": blocks, "grain": grain, "task_count": task_count, "work_of": work_of,
        "scratch_of": scratch_of, "attribute": attribute, "smaller": smaller, "larger": larger,
        **WORDS,
    }  # fmt: skip
    exec(compile(source_of(kernel, arrays), f"<kernel of {name}>", "exec"), scope)
    _refuse_statements(kernel)
    try:
        made = cfunc(RUN, **options)(scope["run"])
    except NumbaError as error:
        raise KernelError(f"{name}: numba cannot compile the kernel: {_essence(error)}") from error
    foreign = sorted(s for s in _called(made.inspect_llvm()) if not HARMLESS.match(s))
    if foreign:
        raise KernelError(f"{name}: {_why(foreign)}")
    _, _, (code, _) = made._library.serialize_using_object_code()  # type: ignore[attr-defined]
    return made.native_name, code


def _flags(fastmath):
    return fastmath if isinstance(fastmath, bool) else set(fastmath)


# -- what is refused ----------------------------------------------------------------------------------------


def _refuse_statements(kernel: Kernel) -> None:
    """The plainest case, named with its line."""
    for instruction in dis.get_instructions(kernel.body):
        if instruction.opname == "RAISE_VARARGS":
            code, positions = kernel.body.__code__, instruction.positions
            line = positions.lineno if positions else code.co_firstlineno
            raise KernelError(f"{kernel.op.name}: a kernel must not raise; line {line} of {code.co_filename} does")


def _called(text: str) -> set[str]:
    return set(re.findall(r'^declare .*?@"?([^"(]+)"?\(', text, re.M))


def _why(foreign: list[str]) -> str:
    calls = ", ".join(foreign[:4])
    if any(s.startswith("NRT_") for s in foreign):
        return (
            "a kernel must not allocate, and this one does: new arrays, whole-array arithmetic, lists and strings need "
            f"memory. Loop over elements, and declare `scratch` for what must be kept (it calls {calls})"
        )
    return (
        "a kernel must not raise, and something in this one may: x ** 2 (write x * x), np.sum, np.max, np.where, "
        f"round and int() of a float are of that kind (it calls {calls})"
    )


def _essence(error: Exception) -> str:
    """numba's message without its advice and colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line for line in text.splitlines() if line.strip()]
    noise = re.compile(r"\s*(File \"<kernel|During: |Failed in |This error|To see)")
    return " ".join([line.strip() for line in lines if not noise.match(line)][:12])


# -- the body as numba should read it -----------------------------------------------------------------------


def plain(function: Callable, options: dict, seen: dict | None = None) -> Callable:
    """The function with keyword-only parameters made positional, float literals f32, and the functions it
    names compiled too.  (numba binds no keyword-only parameters in compiled calls, and takes 0.5 for a double.)
    """
    seen = {} if seen is None else seen
    code = function.__code__
    code = code.replace(
        co_argcount=code.co_argcount + code.co_kwonlyargcount,
        co_kwonlyargcount=0,
        co_consts=tuple(np.float32(c) if type(c) is float else c for c in code.co_consts),
    )

    def seen_by_numba(value):
        if type(value) is float:
            return np.float32(value)
        if isinstance(value, python_types.FunctionType) and not hasattr(value, "py_func"):
            if value in seen:
                return seen[value]
            seen[value] = None  # a function that calls itself is left to numba to refuse
            seen[value] = njit(forceinline=True, **options)(plain(value, options, seen))
            return seen[value]
        return value

    names = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    scope = {"__name__": function.__globals__.get("__name__", __name__), "max": larger, "min": smaller}
    scope |= {name: seen_by_numba(value) for name, value in names.items()}
    closure = tuple(python_types.CellType(seen_by_numba(cell.cell_contents)) for cell in function.__closure__ or ())
    return python_types.FunctionType(code, scope, function.__name__, function.__defaults__, closure or None)


@njit(forceinline=True)
def larger(a, b):
    """max(a, b), which numba's own may raise in."""
    return a if a > b or a != a else b


@njit(forceinline=True)
def smaller(a, b):
    return a if a < b or a != a else b


# -- reading a gg_call --------------------------------------------------------------------------------------


def _load(builder, pointer, *path):
    return builder.load(cgutils.gep_inbounds(builder, pointer, 0, *path))


def _call(builder, call):
    return builder.bitcast(call, CALL.as_pointer())


def _tensor(builder, call, side, index):
    return cgutils.gep_inbounds(builder, _load(builder, _call(builder, call), side), index)


def _of_kernel(field: int):
    """An intrinsic f(call): a number that the kernel was fitted with."""

    @intrinsic
    def read(context, call):
        def emit(cg, builder, signature, args):
            return _load(builder, _load(builder, _call(builder, args[0]), CALL_KERNEL), field)

        return types.int64(call), emit

    return read


grain = _of_kernel(GRAIN)


@intrinsic
def task_count(context, call, stage):
    def emit(cg, builder, signature, args):
        counts = _load(builder, _load(builder, _call(builder, args[0]), CALL_KERNEL), TASKS)
        return builder.load(builder.gep(counts, [args[1]]))

    return types.int64(call, stage), emit


@intrinsic(prefer_literal=True)
def blocks(context, call, axis):
    """The size of a leading axis of the first output."""
    at = axis.literal_value

    def emit(cg, builder, signature, args):
        return _load(builder, _tensor(builder, args[0], DST, 0), NE, at)

    return types.int64(call, axis), emit


@intrinsic(prefer_literal=True)
def attribute(context, call, offset, kind):
    """The attribute at that offset of the op's record."""
    at, kind_ = offset.literal_value, kind.literal_value

    def emit(cg, builder, signature, args):
        record = _load(builder, _call(builder, args[0]), ATTRS)
        field = builder.bitcast(cgutils.gep_inbounds(builder, record, at), STORED[kind_].as_pointer())
        if kind_ == TUPLE:
            members = [builder.load(cgutils.gep_inbounds(builder, field, i)) for i in range(4)]
            return cgutils.pack_array(builder, members)
        value = builder.load(field)
        if kind_ == BOOL:
            return builder.icmp_signed("!=", value, I32(0))
        return builder.sext(value, I64) if kind_ == ENUM else value

    return SEEN[kind_](call, offset, kind), emit


def _vector_of_floats(cg, builder, array, data, nbytes):
    made, size = make_array(array)(cg, builder), cg.get_constant(types.intp, 4)
    n, floats = builder.udiv(nbytes, I64(4)), builder.bitcast(data, F32.as_pointer())
    populate_array(made, data=floats, shape=[n], strides=[size], itemsize=size, meminfo=None)
    return made._getvalue()


FLOATS = types.Array(types.float32, 1, "C", aligned=True)


@intrinsic
def work_of(context, call):
    def emit(cg, builder, signature, args):
        call = _call(builder, args[0])
        nbytes = _load(builder, _load(builder, call, CALL_KERNEL), WORK_BYTES)
        return _vector_of_floats(cg, builder, FLOATS, _load(builder, call, WORK), nbytes)

    return FLOATS(call), emit


@intrinsic
def scratch_of(context, call, scratch):
    def emit(cg, builder, signature, args):
        nbytes = _load(builder, _load(builder, _call(builder, args[0]), CALL_KERNEL), SCRATCH_BYTES)
        return _vector_of_floats(cg, builder, FLOATS, args[1], nbytes)

    return FLOATS(call, scratch), emit


def _shared(builder, i, ours, whole):
    """i, or i * ours / whole where the sizes differ; a branch, for a division takes longer than a short block."""
    before = builder.block
    with builder.if_then(builder.icmp_signed("!=", ours, whole), likely=False):
        divided, inside = builder.udiv(builder.mul(i, ours), whole), builder.block
    chosen = builder.phi(i.type)
    chosen.add_incoming(i, before)
    chosen.add_incoming(divided, inside)
    return chosen


@intrinsic(prefer_literal=True)
def block(context, call, side, index, dims, dtype, layout, n, at):
    """The block of an array for the block at index `at` of the first output, whose leading axes are n."""
    side_, index_, dims_, layout_, n_ = (x.literal_value for x in (side, index, dims, layout, n))
    element = ELEMENTS[dtype.literal_value]
    contiguous = layout_ == CONTIGUOUS or (dims_ == 1 and layout_ == ROWS)
    array = types.Array(element, dims_, "C" if contiguous else "A", readonly=side_ == SRC, aligned=True)
    own = 4 - dims_

    def emit(cg, builder, signature, args):
        t, first = _tensor(builder, args[0], side_, index_), _tensor(builder, args[0], DST, 0)
        data, index_types = _load(builder, t, DATA), signature.args[-1]
        for axis in range(max(0, own - n_), own):
            i = cg.cast(builder, builder.extract_value(args[-1], axis), index_types[axis], types.int64)
            if (side_, index_) != (DST, 0):
                i = _shared(builder, i, _load(builder, t, NE, axis), _load(builder, first, NE, axis + n_ - own))
            data = builder.gep(data, [builder.mul(i, _load(builder, t, NB, axis))])
        made, size = make_array(array)(cg, builder), cg.get_constant(types.intp, 4)
        axes = range(own, 4)
        strides = [_load(builder, t, NB, a) for a in axes]
        if layout_ != ANY:
            strides[-1] = size  # a constant, so that loops along it vectorise
        populate_array(
            made,
            data=builder.bitcast(data, cg.get_data_type(element).as_pointer()),
            shape=[_load(builder, t, NE, a) for a in axes],
            strides=strides,
            itemsize=size,
            meminfo=None,
        )
        return made._getvalue()

    return array(call, side, index, dims, dtype, layout, n, at), emit
