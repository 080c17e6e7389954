"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file: written beside it under another name, then moved into place.

    Raises:
        OSError: the folder cannot be written to; the old file is as it was.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
