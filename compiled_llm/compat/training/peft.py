"""Undocumented parts of PEFT: where its LoRA layers keep adapters, and which layers call their base alone.

This imports no PEFT.
"""

# A LoRA layer has a dictionary for each thing that adapters have (matrices, scales, dropout), whose keys are names; the
# layer's class lists most of these dictionaries. Its forward reads of them what the active adapters have, in their
# order. If one moves, tests/compat/test_peft.py tells; until then a switch to another adapter compiles again, or PEFT's
# forward finds no adapter in a layer. Ends when PEFT runs adapters by number.

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from compiled_llm.compat.known_functions import has_its_own_forward

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


def bases_read(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield layers below adapters whose forward may do more with them than call them, each with the adapter."""
    kind: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    for module in model.modules():
        if isinstance(module, kind) and not _calls_its_base_alone(module):
            yield _base_of(module), module


def _base_of(adapter: Any) -> nn.Module:
    base: nn.Module = adapter.get_base_layer()
    return base


def _calls_its_base_alone(adapter: Any) -> bool:
    """Whether an adapter's forward is known to read no weight of the layer below, and to write none."""
    # DoRA, a variant, reads it, and a merged adapter is taken out of it by the first call after it was disabled.
    known = (getattr(sys.modules.get(f"peft.tuners.{tuner}.layer"), name, None) for tuner, name in _CALL_THEIR_BASE)
    kind, writes = type(adapter), adapter.disable_adapters and adapter.merged
    own = kind.__module__.startswith("peft.") and has_its_own_forward(kind) and "forward" not in vars(adapter)
    if writes or not own or not isinstance(adapter, tuple(filter(None, known))):
        return False
    reads_dtype = getattr(adapter, "is_feedforward", False) and kind.__module__ == "peft.tuners.ia3.layer"
    return not (getattr(adapter, "lora_variant", None) or reads_dtype)


# Ends when PEFT's layers say whether they read the weight below. Until then a kind that is missing here costs speed.
_CALL_THEIR_BASE = (
    *(("lora", "LoraLayer"), ("ia3", "IA3Layer"), ("randlora", "RandLoraLayer")),
    *(("vera", "VeraLayer"), ("road", "RoadLayer")),
)

ACTIVE, ADAPTED = "_active_adapter", "base_layer"
"""The attribute of a LoRA layer with the names of active adapters, and the one with the layer below."""
