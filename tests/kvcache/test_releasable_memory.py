# ruff: noqa: N802  the functions of the stand-in have the names of the driver's
"""Memory that is given back at addresses that stay: on this machine, and the calls of the CUDA driver."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_llm.compat.torch.capturing import captured_into
from compiled_llm.kvcache import cuda_virtual_memory
from compiled_llm.kvcache.cuda_virtual_memory import MappedMemory, mapped_bytes, unsupported
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from support.in_threads import in_thread

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_tensors_are_zeros_of_their_own(dtype: torch.dtype) -> None:
    memory = ReleasableMemory(CPU)
    first, second, none = (memory.zeros(shape, dtype) for shape in ((3, 2, 5), (7,), (4, 0)))
    assert [tensor.shape for tensor in (first, second, none)] == [(3, 2, 5), (7,), (4, 0)]
    assert (first._is_view(), first.is_contiguous(), first.dtype) == (False, True, dtype)
    first.view(torch.uint8).fill_(7)
    assert not second.view(torch.uint8).any()


def test_memory_goes_and_comes_back_to_its_address() -> None:
    memory = ReleasableMemory(CPU)
    pages = memory.zeros((64, MIB), torch.uint8)
    other = memory.zeros((5,), torch.float32)
    for _ in range(2):
        pages.fill_(3)
        other.fill_(3)
        address, before = pages.data_ptr(), resident()
        memory.give_back()
        assert memory.given_back
        assert before - resident() > 60 * MIB
        memory.take_again()
        assert not memory.given_back
        assert pages.data_ptr() == address
        assert not pages.any()
        assert not other.any()


def test_memory_that_is_freed_goes_although_tensors_remain() -> None:
    memory = ReleasableMemory(CPU)
    pages = memory.zeros((64, MIB), torch.uint8).fill_(3)
    before = resident()
    memory.free()
    assert before - resident() > 60 * MIB
    del memory
    assert not pages.any(), "the addresses are its own until the tensor is gone"


def test_without_the_driver_a_gpu_keeps_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_virtual_memory._driver.cache_clear()
    assert unsupported(GPU) == "libcuda.so.1: cannot open shared object file"


# ---- the driver's calls, on a stand-in that keeps what the real one would


class Driver:
    """Has ``room`` bytes, and refuses what the CUDA driver does."""

    def __init__(self, room: int) -> None:
        self.room, self.reserved, self.handles, self.mapped = room, dict[int, int](), dict[int, int](), dict[int, int]()
        self.readable: set[int] = set()
        self.error = 0

    def _set(self, pointer: Any, value: int) -> None:
        pointer._obj.value = value

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (102, 0)
        self._set(value, 1)
        return 0

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        found = properties._obj
        assert (found.kind, found.location.kind, found.location.id, option) == (1, 1, 0, 0)
        self._set(size, 2 * MIB)
        return 0

    def cuMemAddressReserve(self, address: Any, length: Any, align: Any, wanted: Any, flags: Any) -> int:
        assert length.value % (2 * MIB) == 0
        at = 2**40 + sum(self.reserved.values())
        self.reserved[at] = length.value
        self._set(address, at)
        return 0

    def cuMemCreate(self, handle: Any, length: Any, properties: Any, flags: Any) -> int:
        if self.error:
            return self.error
        if length.value > self.room:
            return 2
        self.room -= length.value
        self._set(handle, 1 + len(self.handles))
        self.handles[1 + len(self.handles)] = length.value
        return 0

    def cuMemMap(self, address: Any, length: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert self.reserved[address.value] == length.value == self.handles[handle.value]
        assert address.value not in self.mapped
        self.mapped[address.value] = length.value
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.handles[handle.value] = 0
        return 0

    def cuMemSetAccess(self, address: Any, length: Any, access: Any, count: Any) -> int:
        assert (access._obj.location.id, access._obj.flags, count.value) == (0, 3, 1)
        assert self.mapped[address.value] == length.value
        self.readable.add(address.value)
        return 0

    def cuMemUnmap(self, address: Any, length: Any) -> int:
        assert self.mapped.pop(address.value) == length.value
        self.readable.discard(address.value)
        self.room += length.value
        return 0

    def cuMemAddressFree(self, address: Any, length: Any) -> int:
        assert address.value not in self.mapped
        assert self.reserved.pop(address.value) == length.value
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(10 * MIB)
    monkeypatch.setattr(cuda_virtual_memory, "_driver", lambda: driver)
    for name, answer in {"init": None, "synchronize": None, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver.room, 80 * MIB))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def test_memory_without_users_is_given_back_once_nothing_is_captured(driver: Driver) -> None:
    """The garbage collector finds it in any thread, and CUDA refuses to wait for the device during a capture."""
    graph = SimpleNamespace(capture_begin=lambda **_: None, capture_end=lambda: None, reset=lambda: None)
    memory = [MappedMemory(3 * MIB, GPU)]

    def launch() -> None:
        in_thread(memory.clear)
        gc.collect()
        assert driver.room == 6 * MIB

    captured_into(graph, (0, 1), GPU, launch)
    assert (driver.mapped, driver.reserved, driver.room) == ({}, {}, 10 * MIB)


@pytest.mark.parametrize("here", [True, False], ids=["in this thread", "in another one"])
def test_memory_without_users_outlives_captures_of_others(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    def refuse(device: torch.device) -> None:
        assert not here, "the capture would fail"
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    memory = MappedMemory(3 * MIB, GPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here)
        patch.setattr(torch.cuda, "synchronize", refuse)
        del memory
        gc.collect()
        assert driver.room == 6 * MIB
    other = MappedMemory(5 * MIB, GPU)
    assert (len(driver.mapped), driver.room) == (1, 4 * MIB)
    del other
    gc.collect()
    assert (driver.mapped, driver.reserved, driver.room) == ({}, {}, 10 * MIB)


def test_structures_are_as_large_as_the_drivers() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (cuda_virtual_memory._Properties, cuda_virtual_memory._Access)]
    assert sizes == [32, 12]


def test_memory_is_mapped_to_one_address_until_it_has_no_user(driver: Driver) -> None:
    assert unsupported(GPU) is None
    memory = MappedMemory(3 * MIB, GPU)
    (address,) = driver.mapped
    interface = memory.__cuda_array_interface__
    assert (interface["data"], interface["shape"]) == ((address, False), (3 * MIB,))
    assert driver.room == 6 * MIB
    for _ in range(2):
        memory.give_back()
        memory.give_back()
        assert (driver.mapped, driver.room, mapped_bytes(GPU)) == ({}, 10 * MIB, 0)
        memory.take_again()
        memory.take_again()
        assert (set(driver.mapped), driver.readable, driver.room) == ({address}, {address}, 6 * MIB)
        assert mapped_bytes(GPU) == 4 * MIB
    del memory
    gc.collect()
    assert (driver.mapped, driver.reserved, driver.room) == ({}, {}, 10 * MIB)
    assert not any(driver.handles.values()), "the driver keeps what is not released"


def test_too_little_memory_is_an_error_with_the_numbers_and_leaves_nothing(driver: Driver) -> None:
    first = MappedMemory(4 * MIB, GPU)
    first.give_back()
    second = MappedMemory(8 * MIB, GPU)
    with pytest.raises(torch.OutOfMemoryError, match=r"pages take 0.00 GiB more on cuda:0, 0.00 GiB are free"):
        first.take_again()
    with pytest.raises(torch.OutOfMemoryError):
        MappedMemory(4 * MIB, GPU)
    gc.collect()
    assert len(driver.reserved) == 2
    second.give_back()
    first.take_again()
    assert driver.room == 6 * MIB


def test_other_errors_are_named(driver: Driver) -> None:
    driver.error = 999
    with pytest.raises(RuntimeError, match="cuMemCreate: error 999 of the CUDA driver"):
        MappedMemory(MIB, GPU)


def test_what_ends_while_a_graph_is_captured_is_given_back_later(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        MappedMemory(4 * MIB, GPU)
        gc.collect()
        assert driver.room == 6 * MIB
    MappedMemory(10 * MIB, GPU)
    gc.collect()
    assert (driver.reserved, driver.room) == ({}, 10 * MIB)
