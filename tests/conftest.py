"""How long an example takes is no question that these tests ask: the machine may be busy with something else."""

import signal

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a script has put behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from ggrad._native import ffi, lib
except ImportError:  # it could not be built
    lib = None

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def instruction_sets():
    """All there are, by name, weakest first; those that this CPU lacks are skipped."""
    before, names = ffi.string(lib.gg_isa()), []
    while (name := lib.gg_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name))
    lacking = [name for name in names if lib.gg_isa_select(name) != 0]
    lib.gg_isa_select(before)
    for name in map(bytes.decode, names):
        skip = pytest.mark.skipif(name.encode() in lacking, reason=f"this CPU has no {name}")
        yield pytest.param(name, marks=skip, id=name)


@pytest.fixture(params=[] if lib is None else [*instruction_sets()])
def isa(request):
    """Kernels of each instruction set in turn."""
    before = ffi.string(lib.gg_isa())
    assert lib.gg_isa_select(request.param.encode()) == 0
    yield request.param
    assert lib.gg_isa_select(before) == 0
