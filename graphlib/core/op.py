"""What an op is: one declaration that holds everything known about it.

    @op(layout="any", inplace=("x",))
    def scale(x, *, factor: float, bias: float = 0.0):
        \"""factor * x + bias\"""
        return x.spec

    @scale.grad
    def _(t, dout):
        return (scale(dout, factor=t.attrs["factor"]),)

    @scale.reference
    def _(x, *, factor, bias):
        return factor * x + bias

The decorated function is the shape rule.  Its positional parameters are the inputs (one with the
default None may be left out; `*xs` takes any number), its keyword-only ones the attributes, its
docstring the documentation, its name the kernel's name.  Annotations say which dtypes an input may
have (`Float` if it has none: f32, and halves are cast to it) and what reaches the kernel: attributes
that are float, int, bool, an IntEnum, a tuple of ints or a `Record` of these.  Where programs give other
arguments than a node has, `.call` declares theirs.  What the rule returns says where the result lives: a
`Spec` (a new buffer), a `Pack` (several results in one new buffer), a `View` (no buffer, no kernel)
or an `Update` (written into leaves that exist).

The kernel of an op of the library is the C function of its name, or the Python function given to `.kernel`; that
of any other op is always the latter.  Ops of the library have one name each; an op of one's own may share its name
with one of them, and both can be nodes of one graph.
"""

from __future__ import annotations

import enum
import inspect
import typing
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Protocol

import numpy as np

from .builtin import builtin
from .dtype import ALL, BF16, F16, F32, I32, QUANTIZED, DType
from .errors import GradientError, KernelError, ShapeError
from .tensor import MAX_DIMS, Pack, Spec, Tensor, Update, View, check_shape, contiguous_strides, tensor, whole_sizes

Float = Annotated[Tensor, (F32,)]  # halves are cast on the way in
Half = Annotated[Tensor, (F32, F16, BF16)]  # read as they are
Int = Annotated[Tensor, (I32,)]
Number = Annotated[Tensor, (F32, I32)]  # computed with in either; halves are cast
Counted = tuple[Tensor, Callable[[np.ndarray], int], Callable[[np.ndarray], float] | None]  # see `Op.counted`
Any4 = Annotated[Tensor, ALL]  # elements of any dtype, moved but not computed with
Weight = Annotated[Tensor, (F32, F16, BF16, *QUANTIZED)]  # read as they are, decoded on the way
Blocks = Annotated[Tensor, QUANTIZED]
AnyRows = Annotated[Tensor, (*ALL, *QUANTIZED)]  # of any dtype; rows of quantized ones stay whole

registry: dict[str, Op] = {}  # the library's, by name
own: dict[str, Op] = {}  # users', by name: the last that was declared under it

_LIBRARY = __name__.partition(".")[0]  # the package whose ops have kernels in C
_RECORD_TYPES = {float: np.dtype("f4"), int: np.dtype("i8"), bool: np.dtype("i4")}


class Record:
    """Attributes that belong together, one struct in C: the base of a dataclass of them."""


class PythonKernel(Protocol):
    """A kernel that is no C function of the library's."""

    language: str  # "numba", or "Python" if it runs under the GIL

    def address_for(self, t: Tensor) -> int:
        """The address of the gg_kernel that computes this node."""


class Op:
    """See the module.  Called with tensors it adds a node: returns the result, or the parts of a packed one."""

    def __init__(
        self, infer: Callable[..., Any], *, layout: str = "rows", inplace: tuple[str, ...] = (), name: str | None = None
    ) -> None:
        signature = inspect.signature(infer, eval_str=True).parameters.values()
        inputs = [p for p in signature if p.kind is not p.KEYWORD_ONLY]
        attrs = [p for p in signature if p.kind is p.KEYWORD_ONLY]
        self.infer = infer
        self.name = name or infer.__name__
        self.__name__ = self.name
        self.__module__ = infer.__module__
        self.__signature__ = inspect.signature(infer)
        self.layout = layout  # of the inputs its kernel takes: "any", "rows" (last axis contiguous), "contiguous"
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in inputs)
        self.inputs = [p.name for p in inputs]
        self.required = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in inputs)
        self.dtypes = [_accepted(p.annotation) for p in inputs]
        self.attrs = {p.name: p.default for p in attrs}
        self.attr_types = {p.name: p.annotation for p in attrs}
        self.inplace = tuple(self.inputs.index(name) for name in inplace)
        self.__doc__ = self._documented(infer.__doc__)
        self.record = np.dtype(
            [(p.name, *field) for p in attrs if (field := _record_field(p.annotation)) is not None], align=True
        )
        self.called: Callable[..., Any] | None = None
        self._grad: Callable[..., Any] | None = None
        self._grad_takes_needs = False
        self._reference: Callable[..., Any] | None = None
        self._flops: Callable[[Tensor], int] | None = None
        self._summed: Callable[[Tensor, Tensor], Tensor] | None = None
        self._counted: Callable[[Tensor], Counted | None] | None = None
        self.in_python: PythonKernel | None = None
        self.before_first_run: Callable[[list[Tensor]], None] | None = None  # is told of a graph's nodes of such ops
        ours = (infer.__module__ or "").partition(".")[0] == _LIBRARY
        self.in_c = self.name if ours else None  # the name of its kernel in C
        if ours and self.name in registry:
            raise TypeError(f"the library has an op {self.name} already, in {registry[self.name].__module__}")
        (registry if ours else own)[self.name] = self

    # -- declaring ------------------------------------------------------------------------------

    def call(self, function):
        """Declare how programs call the op, where it is not with the inputs and attributes of its node.

        `function` makes the node with `op.node`; its signature and docstring are those that users see.
        """
        function.__name__ = function.__qualname__ = self.name
        self.called, self.__doc__ = function, function.__doc__
        self.__signature__ = inspect.signature(function)
        return function

    def grad(self, rule):
        """Declare the gradient rule: `rule(t, *douts)` gives one gradient (or None) for each input.

        `t` is the node, `douts` are the gradients of its results (None for a part that nothing uses).
        A rule with a keyword-only parameter `needs` is told for each input whether its gradient is wanted.
        """
        self._grad = rule
        self._grad_takes_needs = "needs" in inspect.signature(rule).parameters
        return rule

    def reference(self, function):
        """Declare what the op means, in NumPy: arrays in (float64, int64; None for one left out), arrays out.

        A packed op gives a tuple of its parts, an update a tuple of its targets' new values.
        """
        self._reference = function
        return function

    def flops(self, count):
        """Declare how many floating-point operations a node takes: `count(t)`, an int; for profiles and benchmarks.

        Of ops whose time goes into reading and writing it is not asked.
        """
        self._flops = count
        return count

    def summed(self, rule):
        """Declare how the op's result is added to a sum of gradients: `rule(t, total)` gives the new sum.

        For results that are zero but for a part, which can be added without their zeros; others are added whole.
        """
        self._summed = rule
        return rule

    def counted(self, rule):
        """Declare of a loss which rows count: `rule(t)` gives the input that tells, a function from its value to how
        many do, and of a mean a function from it to what they weigh together, else None; or None where the node says
        nothing of it.  `Trainer` weighs accumulated batches so.
        """
        self._counted = rule
        return rule

    def kernel(self, function=None, **options):
        """Declare the kernel in Python, compiled by numba when a graph first needs it; see `ggrad.jit.kernel`.

        From then on the op takes inputs of f32 and i32, and of halves copies in f32.
        """

        def declare(body):
            self.in_python = builtin.python_kernel(self, body, **options)
            self.dtypes = [tuple(d for d in accepted if d in (F32, I32)) or accepted for accepted in self.dtypes]
            return body

        return declare(function) if function else declare

    # -- using ----------------------------------------------------------------------------------

    def __call__(self, *args, **kwargs):
        return (self.called or self.node)(*args, **kwargs)

    def node(self, *args, **kwargs):
        """Adds the node of these inputs and attributes: gives the result, or the parts of a packed one."""
        src, attrs = self._bind(args, kwargs)
        try:
            return self.apply(src, attrs)
        except ShapeError as error:
            raise ShapeError(f"{self.name}({self.given(src)}): {error}") from None

    def vjp(self, t: Tensor, douts: list[Tensor | None], needs: list[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of the node's inputs from those of its results, each of the shape of what it belongs to.

        Raises:
            GradientError: there is no rule, or it gave another number of gradients.
        """
        if self._grad is None:
            raise GradientError(f"{self.name} has no gradient rule")
        gradients = self._grad(t, *douts, needs=needs) if self._grad_takes_needs else self._grad(t, *douts)
        if len(gradients) != len(t.src):
            raise GradientError(f"{self.name}: the rule gave {len(gradients)} gradients for {len(t.src)} inputs")
        return gradients

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient rule was declared."""
        return self._grad is not None

    def rows_counted(self, t: Tensor) -> Counted | None:
        """What `counted` declares of the node; None if nothing was declared."""
        return self._counted(t) if self._counted is not None else None

    def add_to(self, t: Tensor, total: Tensor) -> Tensor | None:
        """The sum of gradients with the node's result added, in the op's own way; None if it has none."""
        return self._summed(t, total) if self._summed is not None else None

    def compute_reference(self, src: list[np.ndarray | None], attrs: dict[str, Any]):
        """What the op's reference gives for these arrays, float64 and int64.

        Raises:
            KernelError: the op has none.
        """
        if self._reference is None:
            raise KernelError(f"{self.name} has no reference: declare one with @{self.name}.reference")
        return self._reference(*src, **attrs)

    def count_flops(self, t: Tensor) -> int:
        """Floating-point operations of the node, as its op counts them; 0 where it does not."""
        return self._flops(t) if self._flops is not None else 0

    def pack_attrs(self, attrs: dict[str, Any]) -> np.ndarray:
        """The attributes as the kernel reads them: one C struct."""
        record = np.zeros((), self.record)
        _fill(record, attrs)
        return record

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __get__(self, instance: object, owner: type | None = None) -> Op:
        """An op is a routine to `inspect` and `help`, with signature and docstring; in a class it stays what it is."""
        return self

    def __reduce__(self):
        """Pickled and copied by name, as functions are."""
        return (_of_library, (self.name,)) if registry.get(self.name) is self else self.infer.__qualname__

    # -- helpers --------------------------------------------------------------------------------

    def _documented(self, written: str | None) -> str:
        """The docstring with what the declaration itself says: dtypes, and what is raised where they do not fit."""
        text, _, errors = inspect.cleandoc(written or "").partition("Raises:")
        errors = errors or "\n    ShapeError: shapes, dtypes or attributes do not fit."
        names: dict[str, list[str]] = {}
        for name, accepted in zip(self.inputs, self.dtypes, strict=True):
            names.setdefault(_listed(accepted), []).append(name)
        takes = "; ".join(f"{', '.join(given)}: {dtypes}" for dtypes, given in names.items())
        return f"{text.rstrip()}\n\nTakes {takes}.\n\nRaises:{errors}"

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Tensor | None], dict[str, Any]]:
        """Arguments to inputs and attributes.  Attributes may also follow the inputs by position, in order."""
        if self.variadic:
            src, rest = list(args), ()
        else:
            n = len(self.inputs)
            src, rest = list(args[:n]), args[n:]
            if len(rest) > len(self.attrs):
                most = n + len(self.attrs)
                raise TypeError(f"{self.name}() takes at most {most} arguments, and {len(args)} were given")
            src += [None] * (n - len(src))
            for i, name in enumerate(self.inputs):
                if name in kwargs:
                    if i < len(args):
                        raise TypeError(f"{self.name}() got {name} twice")
                    src[i] = kwargs.pop(name)
            for name in self.inputs[: self.required]:
                if src[self.inputs.index(name)] is None:
                    raise TypeError(f"{self.name}() needs the input {name}")
        attrs = dict(self.attrs)
        attrs.update(zip(self.attrs, rest, strict=False))
        for name, value in kwargs.items():
            if name not in attrs:
                raise TypeError(f"{self.name}() has no argument {name!r}; it takes {inspect.signature(self.infer)}")
            attrs[name] = value
        for name, value in attrs.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.name}() needs the argument {name}")
            attrs[name] = _attr(self.name, name, value, self.attr_types[name])
        return [t if t is None or isinstance(t, Tensor) else self._leaf(i, t, src) for i, t in enumerate(src)], attrs

    def _leaf(self, i: int, value: Any, src: list) -> Tensor:
        """What input `i` was given that is no tensor.  A number gets the dtype of the first tensor beside it."""
        beside = next((s.dtype for s in src if isinstance(s, Tensor)), None)
        if beside is None or not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
            return tensor(value)
        if isinstance(value, (bool, np.bool_)):
            value = int(value)
        whole = isinstance(value, (int, np.integer))
        accepted = self.dtypes[min(i, len(self.dtypes) - 1)]
        if beside in accepted and not beside.quantized and (beside.is_float or whole):
            return tensor(value, dtype=beside)
        return tensor(value, dtype=F32 if F32 in accepted and (beside.is_float or not whole) else None)

    def apply(self, src: list[Tensor | None], attrs: dict[str, Any]):
        """`node` of inputs and attributes that are bound already.

        Raises:
            ShapeError: shapes, dtypes or attributes do not fit.
        """
        for i, t in enumerate(src):
            accepted = self.dtypes[min(i, len(self.dtypes) - 1)]
            if t is not None and t.dtype not in accepted:
                name = self.inputs[min(i, len(self.inputs) - 1)]
                ensure(
                    t.dtype.is_float and F32 in accepted and not t.dtype.quantized,
                    f"{name} is {t.dtype}, and must be {' or '.join(d.name for d in accepted)}"
                    + ("; gg.cast expands it" if t.dtype.quantized and F32 in accepted else ""),
                )
                src[i] = builtin.cast(t, dtype=F32)
        made = self.infer(*src, **attrs)
        if not isinstance(made, View) and self.layout != "any":  # of an update too: its targets are leaves, contiguous
            for i, t in enumerate(src):
                if t is not None and not (t.has_whole_rows if self.layout == "rows" else t.is_contiguous):
                    src[i] = builtin.cont(t)
        sources = tuple(src)

        if isinstance(made, Spec):
            check_shape("the result", made.shape)
            return Tensor(made.shape, made.dtype, made.strides, self, sources, attrs)
        if isinstance(made, View):
            check_shape("the result", made.shape)
            base = made.base
            t = Tensor(made.shape, base.dtype, made.strides, self, sources, attrs, base=base, offset=made.offset)
            t.behind = made.behind
            return t
        if isinstance(made, Update):
            first = made.targets[0]
            for target in made.targets:
                ensure(target.is_leaf, f"{target.label()} is written to, so it must be a leaf")
            t = Tensor(first.shape, first.dtype, first.strides, self, sources, attrs, base=first)
            t.updates = tuple(made.targets)
            return t
        return self._packed(made, sources, attrs).parts

    def _packed(self, pack: Pack, src: tuple[Tensor | None, ...], attrs: dict[str, Any]) -> Tensor:
        dtypes = {spec.dtype for spec in pack.fields.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else F32
        shape = (pack.nbytes // dtype.nbytes,)
        return Tensor(shape, dtype, contiguous_strides(shape, dtype), self, src, attrs, pack=pack)

    def given(self, src: list[Tensor | None]) -> str:
        """The inputs with shapes and dtypes, as messages show them."""
        names = [f"{self.inputs[-1]}{i}" for i in range(len(src))] if self.variadic else self.inputs
        return ", ".join(f"{name}={t.spec}" for name, t in zip(names, src, strict=True) if t is not None)


def _of_library(name: str) -> Op:
    return registry[name]


def op(infer=None, *, layout: str = "rows", inplace: tuple[str, ...] = (), name: str | None = None):
    """Declare an op; see the module.

    Args:
        layout: what its kernel takes of its inputs: "any" strides, whole "rows", or "contiguous" arrays.
            Others are copied first, by a `cont` node.
        inplace: inputs whose memory the result may take over, if it has the same size and nobody needs it later:
            the kernel must then be right with its destination lying exactly on that input.
        name: the op's, where it is not the function's.
    """
    if infer is not None:
        return Op(infer)
    return lambda function: Op(function, layout=layout, inplace=inplace, name=name)


def ensure(condition: bool, message: str) -> None:
    """Raise `ShapeError` unless the condition holds.  The op's name and arguments are added by the caller."""
    if not condition:
        raise ShapeError(message)


def _accepted(annotation) -> tuple[DType, ...]:
    """The dtypes that an input's annotation allows."""
    if annotation is inspect.Parameter.empty:
        annotation = Float
    for choice in (annotation, *typing.get_args(annotation)):
        metadata = getattr(choice, "__metadata__", None)
        if metadata:
            return metadata[0]
    raise TypeError(f"an input is annotated Float, Half, Int, Number, Any4, Weight, Blocks or AnyRows: {annotation}")


def _listed(accepted: tuple[DType, ...]) -> str:
    """Dtypes in words."""
    given = [d.name for d in ALL if d in accepted] + ["quantized"] * any(d.quantized for d in accepted)
    cast = F32 in accepted and F16 not in accepted
    return " or ".join(given) + (" (f16 and bf16 are cast)" if cast else "")


def _fill(record: np.ndarray, values: dict[str, Any]) -> None:
    for name in record.dtype.names or ():
        value = values[name]
        if isinstance(value, tuple):
            record[name][: len(value)] = value
        elif isinstance(value, Record):
            _fill(record[name], vars(value))
        else:
            record[name] = value


def _record_field(annotation) -> tuple | None:
    """NumPy's field for an attribute in the kernel's record; None for one the kernel does not see."""
    if annotation in _RECORD_TYPES:
        return (_RECORD_TYPES[annotation],)
    if isinstance(annotation, type) and issubclass(annotation, enum.IntEnum):
        return (np.dtype("i4"),)
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[0] is int:
        return (np.dtype("i8"), (MAX_DIMS,))
    if _is_record(annotation):
        fields = [(name, *field) for name, kind in _fields(annotation).items() if (field := _record_field(kind))]
        return (np.dtype(fields, align=True),)
    return None


def _is_record(annotation) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Record)


@cache
def _fields(record: Any) -> dict[str, Any]:
    """Names and types of its attributes."""
    return typing.get_type_hints(record)


def _attr(op_name: str, name: str, value, annotation):
    """The value in its declared type, or an error that says what was expected."""
    if annotation is Any:
        return value
    if isinstance(value, Record) and type(value) is annotation:
        kinds = _fields(annotation)  # type: ignore[arg-type]  # mypy takes classes for unhashable
        return annotation(**{name: _attr(op_name, name, each, kinds[name]) for name, each in vars(value).items()})
    if isinstance(annotation, type) and isinstance(value, annotation) and annotation is not float:
        return value
    try:
        if annotation is float:
            return float(value)
        if annotation is int:
            return _whole(value)
        if annotation is bool and value in (0, 1):
            return bool(value)
        if isinstance(annotation, type) and issubclass(annotation, enum.IntEnum):
            return annotation[value.upper().replace("-", "_")] if isinstance(value, str) else annotation(value)
        if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[0] is int:
            return whole_sizes(op_name, value)
        if annotation in _RECORD_TYPES or annotation is DType or _is_record(annotation):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        wanted = getattr(annotation, "__name__", str(annotation))
        if isinstance(annotation, enum.EnumMeta):
            wanted = " or ".join(repr(choice.lower().replace("_", "-")) for choice in annotation.__members__)
        raise ShapeError(f"{op_name}(): {name} must be {wanted}, not {value!r}") from None
    return value


def _whole(value) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError
    return int(value)


@op(layout="any")
def part(packed: Any4, *, index: int):
    """One part of a packed result.  Made with the result itself; see `Pack`."""
    raise NotImplementedError


Pack.op_of_parts = part
