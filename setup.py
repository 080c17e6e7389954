"""Maps the folders to packages and builds the native module, where a C compiler and Python's headers are."""

import os
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WITHOUT_NATIVE = """
********************************************************************************
ggrad: the C kernels could not be built, so every op will run through its slow
NumPy reference.  Install a C compiler (gcc or clang) and Python's headers, then
install ggrad again.
The reason: {reason}
********************************************************************************"""


class BuildNative(build_ext):
    """Compiles the source files at the same time; without a compiler it warns and goes on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # flags come from the environment too, so an existing file says nothing

    def build_extension(self, ext) -> None:
        compile_all = self.compiler.compile

        def compile_in_parallel(sources, *args, **kwargs):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], *args, **kwargs), sources)
                return [name for group in objects for name in group]

        self.compiler.compile = compile_in_parallel
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            self.warn(WITHOUT_NATIVE.format(reason=error))
            self.forget(ext)
        finally:
            self.compiler.compile = compile_all

    def forget(self, ext) -> None:
        """Remove what an earlier build left: its interface may be another one."""
        built = self.get_ext_fullpath(ext.name)
        in_place = os.path.join("graphlib", os.path.basename(built))
        for stale in [built, in_place] if self.editable_mode else [built]:
            if os.path.exists(stale):
                os.remove(stale)


setup(
    package_dir={"ggrad": "graphlib", "ggrad.ops": "ops"},
    packages=["ggrad", "ggrad.ops"],
    cffi_modules=["csrc/build.py:ffibuilder"],
    cmdclass={"build_ext": BuildNative},
)
