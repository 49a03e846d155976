"""Scales of pages that a codec writes: tensors of each layer, at addresses that graphs may rely on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_llm.config import KVScales
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.spec import PageScales

_WAY_OUT = "measure them with compiled_llm.kv_scales(model, prompts)"


def check_scales(call: str, scales: KVScales, layers: Sequence[Layer]) -> None:
    """Raise ValueError if scales do not have the shape of a model's layers; ``call`` begins the message."""
    expected = [layer.kv_heads for layer in layers]
    for name, found in zip(("keys", "values"), scales.kv_heads, strict=True):
        if len(found) != len(expected):
            wrong = f"scales of {name} for {len(found)} layers, and the model has {len(expected)}"
            raise ValueError(f"{call}: kv_scales has {wrong}; {_WAY_OUT}")
        for number, (heads, wanted) in enumerate(zip(found, expected, strict=True)):
            if heads != wanted:
                wrong = f"{heads} scales of {name} for layer {number}, which has {wanted} kv heads"
                raise ValueError(f"{call}: kv_scales has {wrong}; {_WAY_OUT}")


def allocate_scales(layers: Sequence[Layer], scales: KVScales | None, device: torch.device) -> tuple[PageScales, ...]:
    """Return each layer's scales, 1 if none are given, and a count of what is clamped."""
    allocated = []
    for layer in layers:
        key, value = (torch.ones(layer.kv_heads, dtype=torch.float32, device=device) for _ in range(2))
        # A count of its own for each layer: equal ones are then equal code.
        allocated.append(PageScales(key, value, torch.zeros(1, dtype=torch.int64, device=device)))
    if scales is not None:
        write_scales(allocated, scales)
    return tuple(allocated)


def write_scales(allocated: Sequence[PageScales], scales: KVScales) -> None:
    """Write scales, which fit the layers, in place."""
    for of_layer, *numbers in zip(allocated, scales.keys, scales.values, strict=True):
        for tensor, own in zip(of_layer[:2], numbers, strict=True):
            assert tensor is not None
            tensor.copy_(torch.tensor(own, dtype=torch.float32, device="cpu"))


def count_saturated(allocated: Sequence[PageScales]) -> int:
    """Return how many numbers were clamped, over all layers; waits for the device."""
    counts = [of_layer.saturated for of_layer in allocated if of_layer.saturated is not None]
    return int(torch.cat(counts).sum()) if counts else 0
