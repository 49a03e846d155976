"""Memory that is given back while a model sleeps, at addresses that stay: CUDA graphs remain valid."""

from __future__ import annotations

import logging
import math
import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from compiled_llm.kvcache.cuda_virtual_memory import MappedMemory, unsupported
from compiled_llm.kvcache.memory import free

logger = logging.getLogger("compiled_llm.pages")


class _Part(Protocol):
    """Memory of one tensor."""

    def give_back(self) -> None:
        """Give the memory back; it may not be read or written until ``take_again``."""
        ...

    def take_again(self) -> None:
        """Have as much memory at the same address; what it holds is unknown."""
        ...


class _HostMemory:
    """Memory of a CPU, which the operating system backs with pages once they are written."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            self.buffer.madvise(mmap.MADV_HUGEPAGE)

    def give_back(self) -> None:
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def take_again(self) -> None:
        """Nothing is to be done: it reads as zeros, and is backed again once it is written."""


class ReleasableMemory:
    """Tensors of one device whose memory can be given back and taken again, all at once."""

    # On CUDA their addresses are ranges that the driver reserves, and memory is mapped there. PyTorch's allocator knows
    # nothing of it: ``torch.cuda.memory_allocated`` does not count it.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[_Part] = []
        self._tensors: list[Tensor] = []
        self.given_back = False  # whether the tensors have no memory now
        reason = unsupported(device) if device.type == "cuda" else None
        if reason is not None:
            logger.warning(
                "compiled_llm: %s has no virtual memory management (%s); sleep() gives CUDA graphs back, too, and "
                "wake() captures them again",
                device,
                reason,
            )
        # whether memory can be taken again. A driver without virtual memory management cannot do that: PyTorch
        # allocates, and what is given back is gone
        self.keeps_addresses = device.type == "cpu" or (device.type == "cuda" and reason is None)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros that are no view: Dynamo would trace their base as well, with a symbolic size."""
        device, nbytes = self._device, math.prod(shape) * dtype.itemsize
        if not self.keeps_addresses or nbytes == 0:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        elif device.type == "cpu":
            host = _HostMemory(nbytes)
            self._parts.append(host)
            tensor = torch.frombuffer(host.buffer, dtype=dtype).resize_(shape)
        else:
            mapped = MappedMemory(nbytes, device)
            self._parts.append(mapped)
            storage = torch.as_tensor(mapped, device=device).untyped_storage()
            strides = torch.empty(shape, device="meta").stride()
            tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides).zero_()
        self._tensors.append(tensor)
        return tensor

    def give_back(self) -> None:
        """Give the memory back; nothing may run that reads or writes the tensors until ``take_again``."""
        for part in self._parts:
            part.give_back()
        self.given_back = True

    def take_again(self) -> None:
        """Have the memory again, as zeros, or none of it: torch.OutOfMemoryError if there is too little."""
        try:
            for part in self._parts:
                part.take_again()
        except BaseException:
            self.give_back()
            raise
        if self._device.type == "cuda":
            for tensor in self._tensors:
                tensor.zero_()
        self.given_back = False

    def free(self) -> None:
        """Give the memory back for good, although references to the tensors may remain."""
        self.give_back()
        if not self._parts:
            for tensor in self._tensors:
                free(tensor)
        self._parts.clear()
        self._tensors.clear()
