"""Describes the native module to setup.py: every .c file below, and the headers that Python may see.

GGRAD_SANITIZE=address,undefined builds it with those sanitizers of the compiler.
"""

import os
from pathlib import Path

import cffi

HERE = Path(__file__).parent
SANITIZE = os.environ.get("GGRAD_SANITIZE")

# No -march: setup.py adds each instruction set's flags to the kernels.  Never -ffast-math or -Ofast:
# linking with either makes every thread of the process flush denormals to zero.
# -g1, not Python's -g: lines for profilers; where each variable lies would cost a third of the compiler's time.
compile_args = ["-std=gnu11", "-O3", "-g1", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
link_args = ["-pthread"]
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover", "-fno-omit-frame-pointer", "-g", "-O1"]
    # Checks as calls, and no warnings: both take minutes over the unrolled tiles of the products.
    compile_args += ["--param=asan-instrumentation-with-call-threshold=0", "-fno-var-tracking", "-w"]
    compile_args += ["-fno-wrapv"]  # Python asks for wrapping, which hides overflows and takes minutes too
    link_args += [f"-fsanitize={SANITIZE}"]


def from_root(pattern: str) -> list[str]:
    return sorted(path.relative_to(HERE.parent).as_posix() for path in HERE.glob(pattern))


public = ["csrc/abi/ggrad.h", *from_root("abi/attrs/*.h")]
ffibuilder = cffi.FFI()
for header in public:
    lines = (HERE.parent / header).read_text().splitlines()
    ffibuilder.cdef("\n".join(line for line in lines if not line.startswith("#")))
# what runs the kernels that are Python functions; graphlib/callback.py defines it
ffibuilder.cdef('extern "Python" void gg_python_run(const gg_call *, int, int64_t, int64_t, void *);')
# what calls the handlers of signals while a graph runs; graphlib/signals.py defines it
ffibuilder.cdef('extern "Python" int gg_python_stops(void);')
ffibuilder.set_source(
    "ggrad._native",
    "".join(f'#include "{header.removeprefix("csrc/")}"\n' for header in public),
    sources=from_root("*/*.c"),
    depends=from_root("**/*.h"),
    include_dirs=["csrc"],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
    optional=True,  # without it, Python runs the references
)
