"""What a backend is: it prepares a program, and what it prepared runs it, keeps its values, tells its plan and profile.

    class Mine:
        name = "mine"

        def refuses(self): return None
        def prepare(self, program, *, reuse): return MyRun(program)

    graph.compute(backend=Mine())

A value is read by way of its tensor: after a run, the owners of what the program keeps have `t.values`, an object whose
`read(t)` gives the array of any tensor with that storage.
"""

from __future__ import annotations

from typing import Protocol

from ..compile.plan import Plan
from ..core import native
from ..core.errors import GraphError, KernelError
from ..core.program import Program
from ..core.tensor import Tensor
from .profile import Profile
from .reference import ReferenceRun
from .session import Session


class Prepared(Protocol):
    """A program as it stood, ready to be run any number of times.

    Attributes:
        kept: the results whose values can be read after a run.
        reuse: whether values share memory.
    """

    kept: set[Tensor]
    reuse: bool

    @property
    def plan(self) -> Plan:
        """Where each value lies."""

    def run(self, threads: int) -> None:
        """Run every node, on at most so many threads; write updated leaves, hand out the values kept."""

    def run_checked(self, threads: int) -> None:
        """The same, looking at every result; prepared without reuse.

        Raises:
            NotFiniteError: a result holds a NaN or an infinity.
        """

    def profile(self, threads: int) -> Profile:
        """The same, noting how long each node takes.

        Raises:
            GraphError: the backend cannot tell.
        """


class Backend(Protocol):
    """A way to run programs.  `compute(backend=...)` takes one, or the name of one in BACKENDS."""

    name: str

    def refuses(self) -> str | None:
        """Why it cannot run anything here; None if it can."""

    def prepare(self, program: Program, *, reuse: bool) -> Prepared:
        """Make the program ready to run.

        Args:
            reuse: whether values that are not alive at the same time may share memory.

        Raises:
            KernelError: it has no way to compute some op.
        """


class Native:
    """The C kernels, and those compiled from Python."""

    name = "native"

    def refuses(self) -> str | None:
        return None if native.built() else "ggrad was installed without its C kernels"

    def prepare(self, program: Program, *, reuse: bool) -> Prepared:
        return Session(program, reuse=reuse)


class Reference:
    """NumPy, in double precision, from each op's reference."""

    name = "reference"

    def refuses(self) -> str | None:
        return None

    def prepare(self, program: Program, *, reuse: bool) -> Prepared:
        return ReferenceRun(program, reuse=reuse)


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Native(), Reference())}


def backend_of(asked: str | Backend | None) -> Backend:
    """The backend meant: by name, itself, or for None the default.

    Raises:
        GraphError: there is none of that name.
        KernelError: it cannot run here.
    """
    name = native.default_backend() if asked is None else asked
    backend = BACKENDS.get(name) if isinstance(name, str) else name
    if backend is None or not callable(getattr(backend, "prepare", None)):
        names = " or ".join(map(repr, BACKENDS))
        raise GraphError(f"compute(): backend must be {names}, or a backend itself, not {asked!r}")
    if (reason := backend.refuses()) is not None:
        raise KernelError(f"compute(backend={backend.name!r}): {reason}")
    return backend
