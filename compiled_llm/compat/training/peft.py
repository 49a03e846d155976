"""Undocumented parts of PEFT: where its LoRA layers keep adapters, each by name; this imports no PEFT."""

# A LoRA layer has a dictionary for each thing that adapters have (matrices, scales, dropout), whose keys are names; the
# layer's class lists most of these dictionaries. Its forward reads of them what the active adapters have, in their
# order. If one moves, tests/compat/test_peft.py tells; until then a switch to another adapter compiles again, or PEFT's
# forward finds no adapter in a layer. Ends when PEFT runs adapters by number.

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

_LAYERS = "peft.tuners.lora.layer"
_NOT_LISTED = ("lora_variant",)
_CHANGE_WHAT_THEY_ADAPT = ("ParamWrapper", "MultiheadAttention")


def is_lora_layer(module: nn.Module) -> bool:
    """Whether a module is a layer with adapters, that adds what they give to what the layer below gives."""
    layers: Any = sys.modules.get(_LAYERS)  # it is imported if there is such a layer
    if layers is None or not isinstance(module, layers.LoraLayer) or "forward" in vars(module):
        return False
    return type(module).__name__ not in _CHANGE_WHAT_THEY_ADAPT and all(hasattr(module, name) for name in _NOT_LISTED)


def acting_adapters(layer: Any) -> list[str] | None:
    """Return the adapters whose results a LoRA layer's forward adds, in order; None if it does something else."""
    # It takes merged ones out of the weight once they are disabled, and the code of variants, such as DoRA, may read
    # anything.
    if layer.disable_adapters or layer.merged:
        return None if layer.disable_adapters and layer.merged else []
    active: list[str] = [*layer.active_adapters]
    if any(name in layer.lora_variant for name in active):
        return None
    return [name for name in active if any(name in getattr(layer, held) for held in layer.adapter_layer_names)]


def by_adapter(layer: Any) -> dict[str, Mapping[str, Any]]:
    """Return the attributes of a LoRA layer that have an entry for an adapter, by name."""
    names = (*layer.adapter_layer_names, *layer.other_param_names, *_NOT_LISTED)
    return {name: getattr(layer, name) for name in names}


ACTIVE, ADAPTED = "_active_adapter", "base_layer"
"""The attribute of a LoRA layer with the names of active adapters, and the one with the layer below."""
