"""Kernels that begin while the one in front of them ends (programmatic dependent launch).

Where a caller allows ``overlap``, a kernel of ours has done what it can by the time the one in front has ended: it has
asked for weights, or read the page table. These rules make that safe:

- Before it waits (``gdc_wait``), a kernel writes nothing, and it reads only what no kernel in front writes that may
  still run: weights, and the page table, which a step advances at its end.
- All kernels on the stream wait, or do not overlap at all. What has waited knows that the one directly in front has
  ended, which had waited itself: everything in front has ended.
- A kernel lets the next one go (``gdc_launch_dependents``) when it has waited, so that two run at a time. A product
  that is called with ``ahead`` does so before, and three do: weights are on their way while two products in front of
  them still run. Behind attention that costs more than it gains, since weights delay the keys that attention reads.

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
