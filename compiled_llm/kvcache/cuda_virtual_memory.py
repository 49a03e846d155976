"""Memory of a CUDA device that is mapped to addresses of its own, by the driver's virtual memory management."""

# PyTorch has no such memory that Python can map and unmap, so the driver is called as its documentation says: CUDA
# Driver API, "Virtual Memory Management" (``cuMemAddressReserve`` and what belongs to it).

from __future__ import annotations

import ctypes
import functools
import weakref
from contextlib import suppress
from typing import Any

import torch

from compiled_llm.compat.torch.gate import GATE

_SUPPORTED = 102
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED``."""
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 3, 0
_mappings: dict[int, tuple[int, int]] = {}
"""What is mapped now: of each address, the number of the device and the bytes."""
_ended: list[tuple[Any, ...]] = []
"""Arguments of ``_end`` for what had no tensors left while somebody else captured a CUDA graph."""
_Address = ctypes.c_uint64
_Size = ctypes.c_size_t


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    """``CUmemAllocationProp.allocFlags``."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class MappedMemory:
    """Bytes at an address that stays until the last tensor over it is gone; ``torch.as_tensor`` makes one of them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Reserve addresses, and map memory there; torch.OutOfMemoryError if the device has too little."""
        torch.cuda.init()
        _end_others()
        self._device = device
        self._properties = _properties(device)
        granularity = _Size()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), _MINIMUM)
        self._nbytes, self._length = nbytes, -(-nbytes // granularity.value) * granularity.value
        address = _Address()
        _call("cuMemAddressReserve", ctypes.byref(address), _Size(self._length), _Size(0), _Address(0), _Size(0))
        self._address, self._mapped = address, _Mapped(address, self._length)
        self._finalizer = weakref.finalize(self, _end, device, address, self._length, self._mapped)
        self._finalizer.atexit = False  # the driver gives it back with the process
        self.take_again()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._address.value, False)
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}

    def give_back(self) -> None:
        """Unmap the memory, and give it back; no kernel may be running that uses it."""
        self._mapped.unmap()

    def take_again(self) -> None:
        """Map memory to the address again; torch.OutOfMemoryError if the device has too little."""
        if not self._mapped.map(self._properties):
            torch.cuda.empty_cache()
            if not self._mapped.map(self._properties):
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory: pages take {self._length / 2**30:.2f} GiB more on {self._device}, "
                    f"{torch.cuda.mem_get_info(self._device)[0] / 2**30:.2f} GiB are free"
                )


class _Mapped:
    """The memory that is mapped to a range of addresses: all of it, or nothing."""

    def __init__(self, address: _Address, length: int) -> None:
        self._address, self._length = address, _Size(length)

    def map(self, properties: _Properties) -> bool:
        """Map memory, unless there is some; False if the device has too little."""
        if self._address.value in _mappings:
            return True
        handle = ctypes.c_uint64()
        made = ctypes.byref(handle), self._length, ctypes.byref(properties), ctypes.c_uint64(0)
        if not _call("cuMemCreate", *made, accepted=_OUT_OF_MEMORY):
            return False
        try:
            _call("cuMemMap", self._address, self._length, _Size(0), handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # mapped, the memory stays until it is unmapped
        _mappings[self._address.value] = properties.location.id, self._length.value
        access = _Access(properties.location, _READ_AND_WRITE)
        _call("cuMemSetAccess", self._address, self._length, ctypes.byref(access), _Size(1))
        return True

    def unmap(self) -> None:
        if self._address.value in _mappings:
            _call("cuMemUnmap", self._address, self._length)
            del _mappings[self._address.value]


def mapped_bytes(device: torch.device) -> int:
    """Return the bytes that are mapped on a CUDA device; PyTorch's allocator knows nothing of them."""
    index = _index_of(device)
    return sum(length for at, length in list(_mappings.values()) if at == index)


def unsupported(device: torch.device) -> str | None:
    """Return why memory of a CUDA device cannot be mapped, or None."""
    try:
        supported = ctypes.c_int()
        _call("cuInit", ctypes.c_uint(0))
        _call("cuDeviceGetAttribute", ctypes.byref(supported), _SUPPORTED, _index_of(device))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None if supported.value else "its driver says so"


def _end(device: torch.device, address: _Address, length: int, mapped: _Mapped) -> None:
    """Give memory and addresses back, once no kernel can be using them."""
    # The garbage collector calls this in any thread, at any time.
    GATE.when_nothing_is_captured(functools.partial(_unmap, device, address, length, mapped))


def _unmap(device: torch.device, address: _Address, length: int, mapped: _Mapped) -> None:
    """Wait for the device, and give memory and addresses back; later if somebody else captures a CUDA graph."""
    # In a forked process, or on a lost device, the driver refuses: it has them until the process ends.
    if torch.cuda.is_current_stream_capturing():  # no capture survives a wait
        _ended.append((device, address, length, mapped))
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if "captur" in str(error):  # in another thread, by PyTorch or its user
            _ended.append((device, address, length, mapped))
        return
    with suppress(RuntimeError):
        mapped.unmap()
        _call("cuMemAddressFree", address, _Size(length))


def _end_others() -> None:
    """Give back what had no tensors left while somebody else captured a CUDA graph."""
    for _ in range(len(_ended)):
        _end(*_ended.pop(0))


def _properties(device: torch.device) -> _Properties:
    return _Properties(kind=_PINNED, location=_Location(_ON_DEVICE, _index_of(device)))


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any, accepted: int = 0) -> bool:
    """Call the driver; whether it succeeded, and not with the ``accepted`` error; others are a RuntimeError."""
    result: int = getattr(_driver(), function)(*arguments)
    if result not in (0, accepted):
        raise RuntimeError(f"{function}: error {result} of the CUDA driver")
    return result == 0
