"""Names linear layers with weights of fewer bits that no other reader knows: their library goes on multiplying them."""

from __future__ import annotations

import torch
from torch import nn

from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.reading import Found, Stays

PLAIN = LibraryClasses()


def read(module: nn.Module) -> Found:
    """Name what a module has."""
    kind = type(module)
    if kind.__module__.startswith("torch.ao.") and hasattr(module, "in_features"):
        return Stays(torch.typename(module), "has no reader")
    weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
    if weight is None or (not is_wrapper(weight) and weight.element_size() > 1):
        return None
    return Stays(torch.typename(weight) if is_wrapper(weight) else str(weight.dtype), "has no reader")
