"""Machine code of Python kernels, on disk: what was compiled once is loaded by llvmlite, without numba.

A file's name is a hash of all that its contents depend on: the body and what it calls, the types, the versions of
numba and llvmlite, the CPU, and our own compiler's source.  What is loaded runs as the user, so only files of the
user's own are, from a folder of the user's own that nobody else may enter.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import types
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CacheWarning, KernelError
from ..files.atomic import write_whole
from .source import Array, source_of

if TYPE_CHECKING:
    from .kernel import Kernel

_lock = threading.RLock()
_loaded: dict[str, tuple] = {}  # what keeps machine code in memory, by key


def folder() -> Path:
    """Where the files are: $GGRAD_CACHE, else ggrad in the user's cache folder."""
    if chosen := os.environ.get("GGRAD_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ggrad"


def machine_code(kernel: Kernel, arrays: tuple[Array, ...]) -> int:
    """The address of the kernel's `run` for these arrays: in memory already, from disk, or compiled now."""
    with _lock:
        key = _key(kernel, arrays)
        if key not in _loaded:
            name, code = _from_disk(key) or _compiled(kernel, arrays, key)
            _loaded[key] = _link(name, code)
        return _loaded[key][0]


def _compiled(kernel: Kernel, arrays: tuple[Array, ...], key: str) -> tuple[str, bytes]:
    try:
        from .lowering import compile_kernel
    except ImportError as error:
        raise KernelError(f"{kernel.op.name}: compiling a kernel in Python needs numba: {error}") from error
    name, code = compile_kernel(kernel, arrays)
    _to_disk(key, name, code)
    return name, code


def _renew_lock() -> None:
    """In a forked child: another thread may have held it when the process forked."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

# -- files: a checksum, the entry's name, the object --------------------------------------------------------

_UNSAFE: set[Path] = set()  # folders that were warned of


def _own_folder() -> Path:
    """In `folder()`, one for the user's own objects."""
    return folder() / (f"objects-{os.geteuid()}" if hasattr(os, "geteuid") else "objects")


def _from_disk(key: str) -> tuple[str, bytes] | None:
    try:
        if (found := _read_own(_own_folder(), f"{key}.o")) is None:
            return None
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return unpacked(found)


def _to_disk(key: str, name: str, code: bytes) -> None:
    """A folder that cannot be written, or is not safe, is fine: nothing is kept then."""
    try:
        own = _own_folder()
        own.parent.mkdir(parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)
        if not hasattr(os, "geteuid"):
            write_whole(own / f"{key}.o", packed(name, code))
        elif (opened := _open_safe(own)) is not None:
            os.close(opened)
            (own / f"{key}.o").unlink(missing_ok=True)  # it was not fit to be loaded: a link, or writable by others
            write_whole(own / f"{key}.o", packed(name, code), mode=0o600)
    except (OSError, RuntimeError):
        return


def _read_own(own: Path, name: str) -> bytes | None:
    """A file of the user's own in a safe folder; what is asked is asked of what is open, so it cannot be exchanged."""
    if not hasattr(os, "geteuid"):
        return (own / name).read_bytes()
    if (opened := _open_safe(own)) is None:
        return None
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened)
    finally:
        os.close(opened)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return file.read() if own_file else None


def _open_safe(own: Path) -> int | None:
    """A descriptor of the folder if it is the user's own and nobody else's; None, and one warning, if not."""
    opened = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(opened)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
        return opened
    os.close(opened)
    if own not in _UNSAFE:
        _UNSAFE.add(own)
        warnings.warn(
            f"{own} is not used for compiled kernels, since it must be of user {os.geteuid()} and mode 0700, and is of "
            f"user {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}; they are compiled in each process",
            CacheWarning,
            stacklevel=2,
        )
    return None


def packed(name: str, code: bytes) -> bytes:
    """What a file holds."""
    contents = name.encode() + b"\n" + code
    return _digest(contents) + b"\n" + contents


def unpacked(found: bytes) -> tuple[str, bytes] | None:
    """Name and code; None of a file that is damaged."""
    digest, _, rest = found.partition(b"\n")
    if digest != _digest(rest):
        return None
    name, _, code = rest.partition(b"\n")
    return name.decode(), code


def _digest(contents: bytes) -> bytes:
    return hashlib.sha256(contents).hexdigest().encode()


# -- what machine code depends on ---------------------------------------------------------------------------


def _key(kernel: Kernel, arrays: tuple[Array, ...]) -> str:
    fastmath = kernel.fastmath if isinstance(kernel.fastmath, bool) else sorted(kernel.fastmath)
    meaning = (
        kernel.op.name, source_of(kernel, arrays), arrays, fastmath, _meaning(kernel.body, set()), _surroundings(),
    )  # fmt: skip
    return hashlib.sha256(repr(meaning).encode()).hexdigest()[:32]


@cache
def _surroundings() -> tuple:
    import llvmlite.binding as llvm

    ours = [(Path(__file__).parent / file).read_bytes() for file in ("kernel.py", "source.py", "lowering.py")]
    return (
        version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(),
        sys.version_info[:2], hashlib.sha256(b"".join(ours)).hexdigest(),
    )  # fmt: skip


def _meaning(function, seen: set) -> tuple:
    """A function's code, and that of the functions and the values of everything else that it names."""
    function = getattr(function, "py_func", function)
    if function in seen:
        return ("again", function.__name__)
    seen.add(function)
    code = function.__code__
    scope = function.__globals__
    names = _names(code)
    named = [(name, _value(scope[name], seen)) for name in names if name in scope]
    for module in [scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)]:
        members = [(name, getattr(module, name, None)) for name in names]
        named += [(name, _value(member, seen)) for name, member in members if _is_own(member)]
    held = [_value(cell.cell_contents, seen) for cell in function.__closure__ or ()]
    return _code(code), named, held, function.__defaults__


def _is_own(member) -> bool:
    """Whether a module's member is a number or a compiled function, whose meaning its module's name does not tell."""
    return isinstance(member, (int, float)) or hasattr(member, "py_func")


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return names


def _code(code: types.CodeType) -> tuple:
    constants = tuple(
        _code(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount


def _value(value, seen: set):
    if isinstance(value, types.FunctionType) or hasattr(value, "py_func"):
        return _meaning(value, seen)
    if isinstance(value, types.ModuleType):
        return value.__name__
    return type(value).__name__, repr(value)


# -- loading ------------------------------------------------------------------------------------------------


def _link(name: str, code: bytes) -> tuple:
    """The entry's address; and the engine that holds the code, one for each object, for entries may share names."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(name)
    if not address:
        raise KernelError(f"the machine code has no entry {name}")
    return address, engine
