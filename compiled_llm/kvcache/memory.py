"""Memory for pages: how many fit, and tensors at addresses that graphs may rely on."""

# Shapes: P pages.

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compiled_llm.config import KVMemory, WrapConfig, parse_kv_memory
from compiled_llm.kvcache.cuda_virtual_memory import mapped_bytes

_CUDA_FRACTION = 0.8
_CPU_FRACTION = 0.25
_SHARE_OF_STATES = 0.5
"""Of ``kv_memory`` that states of recurrent layers take at most, unless that is too little for one row."""


def pages_to_allocate(
    config: WrapConfig,
    one: int,
    device: torch.device,
    max_positions: int,
    beside: Callable[[int], int] | None = None,
    states: int = 0,
) -> int:
    """Return P, with the null page, by ``config.kv_memory`` and the free memory; ValueError if no page fits.

    Args:
        one: bytes of a page over all layers; 0 if none has any. Pages then only count tokens.
        max_positions: tokens that a row may have.
        beside: the bytes that steps over P pages need beside them, never less with more pages; None if they need none
            that depend on them. A fraction of the free memory has to hold both.
        states: bytes of the states of recurrent layers, which are part of ``kv_memory`` unless it counts tokens.
    """
    longest = config.max_batch_size * -(-max_positions // config.page_size)
    memory = _kv_memory(config, device)
    if memory.tokens is not None:
        pages = -(-memory.tokens // config.page_size)
    elif memory.nbytes is not None:
        left = memory.nbytes - states
        pages = (left // one if one else longest) if left > 0 else 0
    else:
        budget = int(free_bytes(device) * (memory.fraction or 0.0)) - states
        pages = (min(budget // one, longest) if one else longest) if budget > 0 else 0
        if beside is not None:
            counts, needed = range(1, pages + 1), beside
            pages = bisect.bisect_right(counts, budget, key=lambda count: count * one + needed(count + 1))
    if pages < 1:
        unit = " (an int is bytes: 1 is one byte, 1.0 is all that is free)" if memory.nbytes is not None else ""
        also = "" if beside is None else f", an indexer's scores {_in_units(beside(2))} beside it,"
        also += f", states of recurrent layers {_in_units(states)}," if states else ""
        raise ValueError(
            f"kv_memory={config.kv_memory!r} holds no page{unit}: one page of {config.page_size} tokens takes "
            f"{_in_units(one)}{also} and {_in_units(free_bytes(device))} are free on {device}; give more "
            f"memory or a smaller page_size{', or a smaller max_batch_size' if also else ''}"
        )
    pages += 1
    if states and memory.tokens is not None and pages * one + states > free_bytes(device):
        raise ValueError(
            f"kv_memory={config.kv_memory!r}: pages of {_in_units(pages * one)} leave no room for states of recurrent "
            f"layers, which take {_in_units(states)} with max_batch_size={config.max_batch_size}; "
            f"{_in_units(free_bytes(device))} are free on {device}; give fewer tokens or a smaller max_batch_size"
        )
    if beside is not None and memory.fraction is None and pages * one + beside(pages) > free_bytes(device):
        raise ValueError(
            f"kv_memory={config.kv_memory!r}: pages of {_in_units(pages * one)} leave no room for an indexer's scores, "
            f"which take {_in_units(beside(pages))} with max_batch_size={config.max_batch_size}; "
            f"{_in_units(free_bytes(device))} are free on {device}; give less kv_memory or a smaller max_batch_size"
        )
    return pages


def states_to_allocate(config: WrapConfig, one: int, device: torch.device, wanted: int, least: int) -> int:
    """Return how many states of recurrent layers there are: ``wanted``, as far as half of ``kv_memory`` holds them."""
    # A ``kv_memory`` in tokens says nothing of states, and there are all. ``one`` is bytes of a state over all layers;
    # a row needs ``least`` to run.
    memory = _kv_memory(config, device)
    if memory.tokens is not None:
        return wanted
    budget = free_bytes(device) * (memory.fraction or 0.0) if memory.nbytes is None else memory.nbytes
    return max(least, min(wanted, int(budget * _SHARE_OF_STATES) // one))


def room_of(config: WrapConfig, device: torch.device, max_positions: int) -> tuple[int, int]:
    """Return how many tokens a row may have in pages that are not there yet, and bytes that they leave free, at least.

    Pages that are counted in tokens are taken for nothing.
    """
    memory, left = _kv_memory(config, device), free_bytes(device)
    if memory.tokens is not None:
        return min(max_positions, -(-memory.tokens // config.page_size) * config.page_size), left
    return max_positions, left - (memory.nbytes or int(left * (memory.fraction or 0.0)))


def _kv_memory(config: WrapConfig, device: torch.device) -> KVMemory:
    default = KVMemory(fraction=_CPU_FRACTION if device.type == "cpu" else _CUDA_FRACTION)
    return parse_kv_memory(config.kv_memory) or default


def _in_units(nbytes: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def free_bytes(device: torch.device) -> int:
    """Return how many bytes are free on the device now; on a CPU, available without swapping."""
    if device.type == "cuda":
        # What PyTorch's allocator has reserved and does not use is free to us too.
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reusable
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch's allocator and pages hold on a CUDA device; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) + mapped_bytes(device) if device.type == "cuda" else 0


def wait_for(device: torch.device) -> None:
    """Wait until all work has ended that was launched so far on the current stream of a CUDA device."""
    if device.type == "cuda":  # not for the whole device: another thread may be capturing a graph
        torch.cuda.current_stream(device).synchronize()


def ended_marker(device: torch.device) -> Callable[[], bool]:
    """Return a function that tells whether all work launched on the current stream up to now has ended."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def free(tensor: Tensor) -> None:
    """Free a tensor's device memory at once, although references to it remain; none of them may be used any more."""
    if tensor.is_cuda:
        tensor.untyped_storage().resize_(0)


def mark_static(tensor: Tensor) -> Tensor:
    """Tell Dynamo that the tensor stays where it is, so that a graph reads it in place instead of copying it in."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def mark_for_any_room(tensor: Tensor) -> Tensor:
    """As ``mark_static``; on a CPU the code does not depend on the first size, the room for rows, either."""
    # So processes with room for few rows and for many, such as a command that answers one question and a server, find
    # each other's code in the cache. On CUDA the code that was measured has the size built in.
    if tensor.device.type == "cpu":
        torch._dynamo.mark_dynamic(tensor, 0)
    return mark_static(tensor)


def mark_columns(columns: Sequence[Tensor], rows: int) -> None:
    """Have columns of a bucket read in place, with lengths that are symbolic sizes for more than one row."""
    for column in columns:
        mark_static(column)
        if rows > 1:
            torch._dynamo.mark_dynamic(column, 0)
