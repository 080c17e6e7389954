"""Maps the folders to packages and builds the native module, where a C compiler and Python's headers are."""

import os
from concurrent.futures import ThreadPoolExecutor

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WITHOUT_NATIVE = """
********************************************************************************
ggrad: the C kernels could not be built, so every op will run through its slow
NumPy reference.  Install a C compiler (gcc or clang) and Python's headers, then
install ggrad again.
The reason: {reason}
********************************************************************************"""


# The kernels are compiled once for each of these; the module chooses among them when it is loaded.
KERNEL_FLAGS = ["-ffp-contract=fast", "-fno-trapping-math"]
X86_LEVELS = {
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}


class BuildNative(build_ext):
    """Compiles kernels once for each instruction set, and files at the same time; without a compiler it warns and
    goes on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # flags come from the environment too, so an existing file says nothing

    def build_extension(self, ext) -> None:
        compile_all = self.compiler.compile
        x86 = self.plat_name.endswith(("x86_64", "amd64"))
        levels = {"base": [], **(X86_LEVELS if x86 else {})}

        def compile_in_parallel(sources, output_dir=None, macros=None, extra_postargs=None, **kwargs):
            macros = [*(macros or []), *([("GG_X86_LEVELS", None)] if x86 else [])]
            jobs = []  # (source, folder of its object, macros, flags)
            for source in sources:
                if os.path.basename(os.path.dirname(source)) != "kernels":
                    jobs.append((source, output_dir, macros, extra_postargs))
                    continue
                for level, flags in levels.items():
                    flags = [*(extra_postargs or []), *KERNEL_FLAGS, *flags]
                    jobs.append((source, os.path.join(output_dir, level), [*macros, ("GG_ISA", level)], flags))

            def compile_one(job):
                source, folder, macros, flags = job
                return compile_all([source], output_dir=folder, macros=macros, extra_postargs=flags, **kwargs)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [name for objects in pool.map(compile_one, jobs) for name in objects]

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
    package_data={"ggrad": ["py.typed"], "ggrad.ops": ["*.pyi"]},
    packages=["ggrad", "ggrad.ops", *(f"ggrad.{name}" for name in find_packages("graphlib"))],
    cffi_modules=["csrc/build.py:ffibuilder"],
    cmdclass={"build_ext": BuildNative},
)
