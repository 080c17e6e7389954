"""Maps the folders to packages and builds the native module, where a C compiler and Python's headers are."""

import hashlib
import os
import platform
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

WITHOUT_NATIVE = """
********************************************************************************
ggrad: the C kernels could not be built, so every op will run through its slow
NumPy reference.  Install a C compiler (gcc or clang) and Python's headers, then
install ggrad again.
The reason: {reason}
********************************************************************************"""

# Kernels are compiled once for each instruction set of this architecture; the module chooses when it is loaded.
ISAS = Path("csrc/abi/isas.h")
KERNEL_FLAGS = ["-ffp-contract=fast", "-fno-trapping-math"]
MACHINES = {"amd64": "x86_64"}  # names that mean the same


def instruction_sets(machine: str) -> dict[str, list[str]]:
    """The flags of each line of isas.h that belongs to this architecture."""
    lines = re.findall(r'X\((\w+), (\w+), .*?"([^"]*)"\)', ISAS.read_text().replace("\\\n", ""))
    machine = MACHINES.get(machine.lower(), machine)
    return {name: flags.split() for name, architecture, flags in lines if architecture in ("any", machine)}


@cache
def content(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


class Object:
    """One file to be compiled, for one instruction set; its stamp says what it was made from."""

    def __init__(self, source: str, path: Path, flags: list[str]) -> None:
        self.source = source
        self.path = path
        self.flags = flags  # the compiler's name first
        self.headers = path.with_suffix(".d")  # as the compiler found them
        self.stamp = path.with_suffix(".stamp")

    def made_from(self, compiler: str) -> str:
        """A digest of the compiler, the flags, the source and all headers of ours that it includes."""
        digest = hashlib.sha256("\0".join([compiler, *self.flags]).encode())
        _, *headers = self.headers.read_text().replace("\\\n", " ").partition(": ")[2].split()
        for name in (self.source, *headers):
            digest.update(content(name))
        return digest.hexdigest()

    def is_current(self, compiler: str) -> bool:
        try:
            return self.path.exists() and self.stamp.read_text() == self.made_from(compiler)
        except OSError:  # a header is gone, or it was never compiled
            return False

    def compile(self, compiler: str) -> float:
        """Seconds that it took."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.unlink(missing_ok=True)
        start = time.monotonic()
        done = subprocess.run(
            [*self.flags, "-MMD", "-MF", str(self.headers), "-c", self.source, "-o", str(self.path)],
            capture_output=True,
            text=True,
        )
        if done.stderr:
            print(done.stderr, end="")
        if done.returncode != 0:
            raise CompileError(f"{self.source}: {done.stderr.strip().partition(chr(10))[0]}")
        self.stamp.write_text(self.made_from(compiler))
        return time.monotonic() - start


class BuildNative(build_ext):
    """Compiles what has changed, files at the same time; without a compiler it warns and goes on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # of what was made from the same, objects are kept; see Object

    def build_extension(self, ext) -> None:
        compile_all = self.compiler.compile
        self.compiler.compile = self.compile
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            self.warn(WITHOUT_NATIVE.format(reason=error))
            self.forget(ext)
        finally:
            self.compiler.compile = compile_all

    def compile(
        self, sources, output_dir=None, macros=None, include_dirs=None, extra_postargs=None, **kwargs
    ) -> list[str]:
        """In place of the compiler's own; the objects' names."""
        if self.compiler.compiler_type != "unix":
            raise CompileError(f"the kernels are written for gcc and clang, not {self.compiler.compiler_type}")
        start = time.monotonic()
        machine = platform.machine() if self.plat_name.startswith("macosx") else self.plat_name.partition("-")[2]
        levels = instruction_sets(machine)
        include = [f"-I{folder}" for folder in [*(include_dirs or []), *self.compiler.include_dirs]]
        defined = ["-D" + (name if value is None else f"{name}={value}") for name, value in macros or []]
        common = [*self.compiler.compiler_so, *defined, *include, *(extra_postargs or [])]
        # Objects stay where the next build finds them, be it editable or not; other flags have another place.
        folder = Path("build", "objects-" + hashlib.sha256("\0".join(common).encode()).hexdigest()[:12])
        objects = []
        for source in sources:
            name = Path(source).with_suffix(".o").name
            if Path(source).parent.name != "kernels":
                objects.append(Object(source, folder / name, common))
                continue
            for level, flags in levels.items():
                command = [*common, *KERNEL_FLAGS, *flags, f"-DGG_ISA={level}"]
                objects.append(Object(source, folder / level / name, command))
        try:
            asked = subprocess.run([common[0], "--version"], capture_output=True, text=True)
        except OSError as error:
            raise CompileError(str(error)) from error
        compiler = asked.stdout.partition("\n")[0]
        for file in Path("csrc").rglob("*.[ch]"):
            content(file.as_posix())  # as it is now: whoever edits it while it is compiled gets it compiled again
        todo = [o for o in objects if not o.is_current(compiler)]
        # The longest first, so that all cores end at about the same time.
        todo.sort(key=lambda o: os.path.getsize(o.source), reverse=True)
        names = ", ".join(levels)
        print(f"ggrad: compiling {len(todo)} of {len(objects)} objects for {names} with {compiler}", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {pool.submit(o.compile, compiler): o for o in todo}
            for i, done in enumerate(as_completed(running), 1):
                print(f"ggrad: [{i}/{len(todo)}] {running[done].path} {done.result():.1f} s", flush=True)
        print(f"ggrad: compiled in {time.monotonic() - start:.0f} s, linking", flush=True)
        return [str(o.path) for o in objects]

    def forget(self, ext) -> None:
        """Remove what an earlier build left: its interface may be another one."""
        built = self.get_ext_fullpath(ext.name)
        in_place = os.path.join("graphlib", os.path.basename(built))
        for stale in [built, in_place] if self.editable_mode else [built]:
            if os.path.exists(stale):
                os.remove(stale)


setup(
    package_dir={"ggrad": "graphlib", "ggrad.ops": "ops"},
    package_data={"ggrad": ["py.typed"], "ggrad.ops": ["*.pyi"]},
    packages=["ggrad", "ggrad.ops", *(f"ggrad.{name}" for name in find_packages("graphlib"))],
    cffi_modules=["csrc/build.py:ffibuilder"],
    cmdclass={"build_ext": BuildNative},
)
