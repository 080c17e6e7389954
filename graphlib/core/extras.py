"""Packages that only parts of ggrad use, imported when they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import MissingExtraError


def need(module: str, purpose: str, extra: str = "examples") -> ModuleType:
    """Import `module`.

    Raises:
        MissingExtraError: it is not installed; says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{purpose} needs {package}: pip install 'ggrad[{extra}]', or {package} alone"
        ) from error
