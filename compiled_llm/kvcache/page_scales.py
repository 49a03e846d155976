"""Scales of pages of fp8, on the device at addresses that graphs may rely on, and counts of what had to be clamped.

They are inputs of programs, so that new scales need neither compiling nor capturing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_llm.config import KVScales
from compiled_llm.kvcache.memory import mark_static
from compiled_llm.model.attention import PageScales
from compiled_llm.model.layer_probe import Layer


def allocate_scales(layers: Sequence[Layer], scales: KVScales | None, device: torch.device) -> tuple[PageScales, ...]:
    """Return each layer's scales, 1 if there are none, and a count of its own: equal layers are then equal code."""
    allocated = []
    for layer in layers:
        key, value = (torch.ones(layer.kv_heads, dtype=torch.float32, device=device) for _ in range(2))
        saturated = torch.zeros(1, dtype=torch.int64, device=device)
        allocated.append(PageScales(*map(mark_static, (key, value, saturated))))
    if scales is not None:
        write_scales(allocated, scales)
    return tuple(allocated)


def write_scales(allocated: Sequence[PageScales], scales: KVScales) -> None:
    """Write scales, which fit the layers, in place."""
    for own, keys, values in zip(allocated, scales.keys, scales.values, strict=True):
        for tensor, numbers in ((own.key, keys), (own.value, values)):
            assert tensor is not None
            tensor.copy_(torch.tensor(numbers, dtype=torch.float32, device="cpu"))


def count_saturated(allocated: Sequence[PageScales]) -> int:
    """Return how many numbers were clamped, over all layers; waits for the device."""
    counts = [own.saturated for own in allocated if own.saturated is not None]
    return int(torch.cat(counts).sum()) if counts else 0
