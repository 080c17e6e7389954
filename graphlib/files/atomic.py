"""Files that are there whole or not at all, and files that are read from one opening."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from ..core.errors import FormatError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_UNFINISHED = ".unfinished"
_TRIES = 100  # names that happen to be taken


def write_whole(
    path: str | os.PathLike[str], content: bytes | Iterable[bytes | memoryview], *, mode: int = 0o666
) -> None:
    """Replace the file: written beside it under a name that nobody else has, then moved into place.

    Whoever reads meanwhile, or after a crash, finds the old file or the new one.  Of several writers the last one
    wins.  A link stays, and what it points to is replaced; a file keeps its mode, a new one gets that of the umask.

    Args:
        path: of the file.
        content: its bytes, or pieces of them in order.
        mode: of a new file, before the umask.

    Raises:
        OSError: the folder cannot be written to, the disk is full, or the path is no regular file's; what was there
            is as it was, and nothing new is.
    """
    target = Path(os.path.realpath(path))
    if not os.fspath(path) or not target.name:
        raise FileNotFoundError(f"{os.fspath(path)!r} is no name of a file")
    try:
        before = os.stat(target)
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        what = "a folder" if stat.S_ISDIR(before.st_mode) else "no regular file"
        kind = IsADirectoryError if stat.S_ISDIR(before.st_mode) else OSError
        raise kind(f"{target} is {what}, and is not replaced")
    descriptor, unfinished = _new_file_beside(target, mode)
    try:
        with open(descriptor, "wb") as file:
            if before is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            for piece in [content] if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(descriptor)
            if fcntl is not None:  # before the lock ends with the opening, or it would be taken for a dead writer's
                os.replace(unfinished, target)
        if fcntl is None:
            os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    _sweep(target)


def open_regular(path: str | os.PathLike[str]) -> tuple[BinaryIO, int]:
    """A file opened for reading, and its length: all that is read of it comes from this one opening.

    Raises:
        FormatError: it is a folder, a device or a pipe.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)  # O_NONBLOCK: a pipe without a writer would be waited for
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{os.fspath(path)} is no regular file")
        return open(descriptor, "rb"), status.st_size
    except BaseException:
        os.close(descriptor)
        raise


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """All bytes of one state of the file.  Raises as `open_regular`."""
    file, _ = open_regular(path)
    with file:
        return file.read()


def _new_file_beside(target: Path, mode: int) -> tuple[int, Path]:
    """A new file that is open for writing, and locked.  A link that somebody has put there is never followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    for extra in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, extra, 0)
    for _ in range(_TRIES):
        path = target.parent / f"{_beginning(target)}{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            descriptor = os.open(path, flags, mode)
        except FileExistsError:
            continue
        except OSError as error:
            error.filename = os.fspath(target)  # what was asked for, and not the new file beside it
            raise
        _lock(descriptor, wait=True)  # only for somebody who is about to remove it
        if os.fstat(descriptor).st_nlink or os.name == "nt":
            return descriptor, path
        os.close(descriptor)  # another writer found it before it was locked, and took it for a dead one's
    raise FileExistsError(f"{target.parent}: {_TRIES} names for a new file were all taken")


def _beginning(target: Path) -> str:
    """Of the names of the target's unfinished files; its length does not depend on the target's."""
    return f".{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Whether the file is now locked by this opening; the lock ends with the process."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _sweep(target: Path) -> None:
    """Remove what writers of this file that died have left."""
    if fcntl is None:
        return
    beginning = _beginning(target)
    try:
        left = [n for n in os.listdir(target.parent) if n.startswith(beginning) and n.endswith(_UNFINISHED)]
    except OSError:  # one may write in a folder that one may not list
        return
    for name in left:
        try:
            descriptor = os.open(target.parent / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if _lock(descriptor, wait=False):
                os.unlink(target.parent / name)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Have the disk remember the new name too, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one may write in a folder that one may not list
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot; the file itself is safe
        pass
    finally:
        os.close(descriptor)
