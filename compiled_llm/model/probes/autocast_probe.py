"""Learns whether ``torch.autocast`` changes a model's operations; mostly not if its weights have the same type."""

# Of HuggingFace's models in bfloat16, on a CPU under autocast to bfloat16, those alone compute something else that
# choose experts in float32 (DeepSeek's): that product reads rounded numbers. On CUDA also those with layer norms, which
# autocast makes float32.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from compiled_llm.compat.torch.modes import OperationsNoted
from compiled_llm.model.version.model_version import ModelVersion


class AutocastProbe:
    """A probe that finds out, and remembers for as long as the model has the same tensors and code."""

    def __init__(self, version: ModelVersion) -> None:
        self._version = version
        self._known: tuple[object, bool] = None, True

    def matters(self, forward: Callable[..., Any], model: PreTrainedModel) -> bool:
        """Return whether ``forward`` computes something else under the autocast that this thread is in."""
        if (dtype := torch.get_autocast_dtype(model.device.type)) != model.dtype:
            return True
        self._version.begin_check()
        state = dtype, self._version.tensors, self._version.layers, self._version.code
        if self._known[0] != state:
            self._known = state, _operations(forward, model, True) != _operations(forward, model, False)
        return self._known[1]


def _operations(forward: Callable[..., Any], model: PreTrainedModel, casts: bool) -> list[Any]:
    """Return what a forward of two tokens calls, with the types of its results."""
    device = model.device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    casting = torch.autocast(device.type, torch.get_autocast_dtype(device.type), enabled=casts)
    noted = OperationsNoted()
    with torch.no_grad(), casting, noted:
        forward(model, input_ids=ids, use_cache=False)
    return noted.operations
