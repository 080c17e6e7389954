"""Arrays of other libraries: read by DLPack or as NumPy reads them, and given away by DLPack, bf16 included.

DLPack's struct is written to in one place: its dtype, since NumPy has no bfloat16 and takes and gives its bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .dtype import BF16, DType
from .errors import ShapeError

CPU = (1, 0)  # DLPack's device
_PINNED = 3  # the CPU's memory too, locked for a GPU
_UNSIGNED, _BFLOAT = 1, 4  # DLPack's kinds of elements
_KNOWS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
# In DLPack's managed tensor, by the capsule's name, how many bytes stand before the dtype: a pointer, the device and
# the number of axes; from version 1 on also a version, two pointers and flags.
_DTYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Elements(ctypes.Structure):
    """DLPack's dtype."""

    _fields_ = (("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


def _elements_of(capsule: object) -> _Elements:
    name = _name_of(capsule)
    return _Elements.from_address(_pointer_of(capsule, name) + _DTYPE_AT[name])


def array_of(value: Any, where: str = "tensor()") -> tuple[np.ndarray, DType | None]:
    """A value of any library as a NumPy array, without a copy where it lies on the CPU, and BF16 if that holds the bits
    of such; else None.

    Takes what NumPy takes, and by DLPack tensors that require a gradient or are bf16.

    Raises:
        ShapeError: it lies on another device, or is neither array nor numbers.
    """
    if isinstance(value, np.ndarray):
        return (value.view(np.uint16), BF16) if value.dtype.name == "bfloat16" else (value, None)
    if hasattr(value, "__dlpack_device__") and not hasattr(value, "__array_interface__"):
        return _through_dlpack(value, where)
    try:
        return np.asarray(value), None
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{where}: {type(value).__name__} is no array of numbers: {error}") from None


def _through_dlpack(value: Any, where: str) -> tuple[np.ndarray, DType | None]:
    if not _in_reach(value):
        device = getattr(value, "device", "that DLPack names")
        raise ShapeError(f"{where}: the {type(value).__name__} lies on the device {device}; bring it to the CPU first")
    if getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        capsule = value.__dlpack__()
        elements = _elements_of(capsule)
        is_bf16 = elements.kind == _BFLOAT and elements.bits == 16
        if is_bf16:
            elements.kind = _UNSIGNED
        return np.from_dlpack(_Given(capsule)), BF16 if is_bf16 else None
    except (BufferError, RuntimeError, TypeError, ValueError):  # conjugated, sparse, read-only: as NumPy gets it
        try:
            return array_of(np.asarray(value), where)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ShapeError(f"{where}: {type(value).__name__} cannot be read as an array: {error}") from None


def _in_reach(value: Any) -> bool:
    try:
        return int(value.__dlpack_device__()[0]) in (CPU[0], _PINNED)
    except (ValueError, BufferError):  # one that DLPack has no number for
        return False


class _Given:
    """A capsule, as NumPy wants to be given it."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **asked: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


def dlpack_of(array: np.ndarray, dtype: DType, max_version: tuple[int, int] | None) -> object:
    """A capsule of a writable array in the storage type of `dtype`, which it keeps alive."""
    versions = {} if max_version is None or not _KNOWS_VERSIONS else {"max_version": max_version}
    capsule = array.__dlpack__(**versions)  # type: ignore[arg-type]
    if dtype is BF16:
        _elements_of(capsule).kind = _BFLOAT
    return capsule
