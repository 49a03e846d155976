"""Kernels that begin while the one in front of them ends (programmatic dependent launch).

Where a caller allows ``overlap``, a kernel of ours has done what it can by the time the one in front has ended: it has
asked for weights, or read the page table. Two rules make that safe:

- Before it waits (``gdc_wait``), a kernel touches nothing that the kernel directly in front may write, and it lets the
  next one go (``gdc_launch_dependents``) only afterwards. So at most two kernels ever run at a time.
- All other kernels on the stream do the same, or do not overlap at all. What has waited then knows that everything in
  front has ended.

The second rule is the caller's to keep: Inductor's kernels are made to wait in ``compiled_llm.compat``. Without
``overlap`` a kernel begins after the one in front, and the next one after it, as kernels do.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def possible(device: torch.device) -> bool:
    """Return whether the device can begin a kernel before the one in front has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
