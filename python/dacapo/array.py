"""Numbers that numpy, torch and others take without knowing this package: sequences with DLPack."""

from __future__ import annotations

import array
import ctypes
from typing import Any, Iterable, Iterator, Optional, Sequence, Tuple, Union, overload

__all__ = ["Array"]


class Array(Sequence[float]):
    """A vector of 32-bit floats: a sequence, and an array for libraries that know DLPack or the array interface.

    >>> vector = Array([1.0, 0.5])
    >>> vector
    Array([1.0, 0.5])
    >>> len(vector), vector[1], vector == [1.0, 0.5]
    (2, 0.5, True)

    `numpy.asarray(vector)` and `numpy.from_dlpack(vector)` make arrays of it, `torch.from_dlpack(vector)` a tensor.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Iterable[float] = ()) -> None:
        self._numbers = array.array("f", numbers)

    @property
    def shape(self) -> Tuple[int]:
        """The length, as a tuple."""
        return (len(self._numbers),)

    def tolist(self) -> list[float]:
        """The numbers as a list.

        >>> Array([2.0]).tolist()
        [2.0]
        """
        return self._numbers.tolist()

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Array: ...
    def __getitem__(self, index: Union[int, slice]) -> Union[float, Array]:
        return Array(self._numbers[index]) if isinstance(index, slice) else self._numbers[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self._numbers)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(repr(number) for number in self._numbers[:6])
        return f"Array([{shown}{', …' if len(self) > 6 else ''}])"

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The memory itself, for numpy."""
        address, length = self._numbers.buffer_info()
        return {"version": 3, "typestr": "<f4", "shape": (length,), "data": (address, False)}

    def __dlpack_device__(self) -> Tuple[int, int]:
        """The processor's memory."""
        return (_CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """A copy of the numbers as a capsule, which its consumer frees."""
        if dl_device not in (None, (_CPU, 0)):
            raise BufferError("an Array is in the memory of the processor")
        if copy is False:
            raise BufferError("an Array is handed over as a copy; numpy.asarray shares its memory")
        return _capsule(self._numbers)


# DLPack 0.8, the version that every consumer takes: https://dmlc.github.io/dlpack/latest/c_api.html

_CPU = 1
_FLOAT = 2
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


# The struct, the shape and the numbers are one block of C memory, and its deleter is C's `free`: a consumer may
# free it at any time, on any thread, also while the interpreter ends.
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_free = ctypes.cast(_libc.free, ctypes.c_void_p).value
_ALIGNED = 64

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_unused = ctypes.pythonapi.PyCapsule_IsValid
_is_unused.restype = ctypes.c_int
_is_unused.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def _free_unused(capsule: int) -> None:
    # A capsule that was used has another name, and its consumer frees the memory.
    if _is_unused(capsule, _NAME):
        _libc.free(_pointer_of(capsule, _NAME))


_drop_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_free_unused)


def _capsule(numbers: array.array[float]) -> Any:
    address, length = numbers.buffer_info()
    size = length * numbers.itemsize
    header = ctypes.sizeof(_Managed) + ctypes.sizeof(ctypes.c_int64) * 2
    block = _libc.malloc(header + _ALIGNED + size)
    if not block:
        raise MemoryError
    data = -(-(block + header) // _ALIGNED) * _ALIGNED
    ctypes.memmove(data, address, size)
    dims = (ctypes.c_int64 * 2).from_address(block + ctypes.sizeof(_Managed))
    dims[0], dims[1] = length, 1
    managed = _Managed.from_address(block)
    shape = ctypes.cast(ctypes.addressof(dims), ctypes.POINTER(ctypes.c_int64))
    strides = ctypes.cast(ctypes.addressof(dims) + 8, ctypes.POINTER(ctypes.c_int64))
    managed.tensor = _Tensor(data, _CPU, 0, 1, _FLOAT, 32, 1, shape, strides, 0)
    managed.context = None
    managed.deleter = _free
    return _new_capsule(block, _NAME, ctypes.cast(_drop_capsule, ctypes.c_void_p))
