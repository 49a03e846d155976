"""Properties of devices that decide how kernels are tiled."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class CudaDevice(NamedTuple):
    """A CUDA device."""

    processors: int
    shared_memory: int  # of each, in bytes


@functools.cache
def device_of(device: torch.device) -> CudaDevice:
    """Return the numbers of a device, read once."""
    properties = torch.cuda.get_device_properties(device)
    return CudaDevice(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, as kernels have tiles of."""
    return 1 << (number - 1).bit_length()
