"""Kernels that begin while the previous one ends: PDL, programmatic dependent launch."""

# If a caller allows ``overlap``, and the device can (``has_pdl``), launchers are given ``pdl``: our kernels then do
# what they can before the previous kernel has ended: they load weights, or read the page table. These rules make that
# safe:
# - Before it waits (``gdc_wait``), a kernel writes nothing, and it reads only what no earlier kernel writes that may
#   still run: weights, and the page table, which a step advances at its end.
# - All kernels on the stream wait, or do not overlap at all. When ``gdc_wait`` returns, the previous kernel has
#   finished. It had itself waited, so all earlier kernels have finished too.
# - A kernel triggers the next one (``gdc_launch_dependents``) after it has waited, so that two run at a time. A matmul
#   that is called with ``ahead`` does so before, and three do: weights are being loaded while two earlier matmuls still
#   run. After attention that costs more than it gains, since weights delay the keys that attention reads.
# - A kernel that neither reads nor writes what the previous one writes, nor writes what that one reads, may begin
#   without waiting: the previous one has waited before it triggered, so all that came before has finished. It waits at
#   its end, so that who comes next finds both finished.
# The second rule is the caller's to keep: ``compiled_llm.compat`` makes Inductor's kernels wait. Without ``overlap``
# each kernel begins after the previous one, as kernels do.

from __future__ import annotations

import functools

import torch


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Return whether a kernel on the device can begin before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device has Hopper's own tensor core instructions, which other generations lack."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
