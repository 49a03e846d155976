"""Memory of a GPU that is given back and comes back to the same addresses, under a CUDA graph."""

from __future__ import annotations

import gc

import pytest
import torch

from compiled_llm.kvcache.cuda_virtual_memory import unsupported
from compiled_llm.kvcache.releasable_memory import ReleasableMemory

pytestmark = [pytest.mark.gpu, pytest.mark.whole_device]

GIB = 2**30


def free() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    assert unsupported(device) is None
    return device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_a_cuda_graph_reads_and_writes_what_has_come_back(device: torch.device, dtype: torch.dtype) -> None:
    before = free()
    memory = ReleasableMemory(device)
    pages = memory.zeros((4, GIB // dtype.itemsize), dtype)
    assert (pages.device, pages.dtype, pages.is_contiguous(), pages._is_view()) == (device, dtype, True, False)
    seen, ones = torch.zeros(8, device=device), torch.ones(4, 8, dtype=torch.uint8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(pages.view(torch.uint8)[1, :8])
        pages.view(torch.uint8)[:, :8].copy_(ones)
    address = pages.data_ptr()
    for _ in range(3):
        for expected in (0, 1):
            graph.replay()
            assert seen.tolist() == [expected] * 8
        taken = free()
        memory.give_back()
        assert free() - taken == pytest.approx(4 * GIB, rel=0.01)
        memory.take_again()
        assert pages.data_ptr() == address
    del pages, memory, graph
    gc.collect()
    torch.cuda.empty_cache()
    assert before - free() < GIB / 2


def test_too_little_memory_leaves_it_given_back(device: torch.device) -> None:
    memory = ReleasableMemory(device)
    pages = [memory.zeros((GIB,), torch.uint8) for _ in range(3)]
    memory.give_back()
    rest = torch.empty(free() - 2 * GIB, dtype=torch.uint8, device=device)
    before = free()
    with pytest.raises(torch.OutOfMemoryError, match=r"pages take 1\.00 GiB more"):
        memory.take_again()
    assert memory.given_back
    assert free() == pytest.approx(before, abs=GIB // 100)
    del rest
    torch.cuda.empty_cache()
    memory.take_again()
    assert not any(page.any() for page in pages)


def test_freed_memory_goes_although_tensors_remain(device: torch.device) -> None:
    memory = ReleasableMemory(device)
    pages, taken = memory.zeros((2 * GIB,), torch.uint8), free()
    memory.free()
    assert free() - taken == pytest.approx(2 * GIB, rel=0.01)
    del pages
    gc.collect()
