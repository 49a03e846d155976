"""Checks of weights in formats of other libraries, before ``wrap`` tries a model that has some."""

# A product with such a weight is left to the module that holds it. That takes a module which can be tried on tensors
# without memory, and which computes a token from that token alone.

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_llm.config import WrapConfig
from compiled_llm.kinds.refusals import UnsupportedModelError


def check_weights(model: PreTrainedModel, config: WrapConfig) -> None:
    """Check that foreign weights can be tried, compiled, and compute row by row, or raise UnsupportedModelError."""
    if (unpacks := _unpacks_all(model)) is not None:
        raise UnsupportedModelError(unpacks)
    for name, module in model.named_modules():
        if (refusal := _writes(name, module) or _mixes(name, module) or _packs(name, module, config)) is not None:
            raise UnsupportedModelError(refusal)


def changes_in_first_call(model: PreTrainedModel) -> bool:
    """Whether the first call converts weights (bitsandbytes' four bits on a CPU), and so must have real tensors."""
    return model.device.type == "cpu" and any(hasattr(weight, "quant_state") for weight in model.parameters())


def _unpacks_all(model: PreTrainedModel) -> str | None:
    """Say why a call would unpack a model of compressed-tensors as a whole."""
    if getattr(model, "ct_decompress_hook", None) is None:
        return None
    return (
        f"wrap: {type(model).__name__} has a hook of compressed-tensors, by which its first call unpacks all weights; "
        "load the model with quantization_config=CompressedTensorsConfig(dequantize=True); or, to leave them packed, "
        "take the hook away with model.ct_decompress_hook.remove() and del model.ct_decompress_hook"
    )


def _writes(name: str, module: nn.Module) -> str | None:
    """Say why trying a module of compressed-tensors would change it."""
    if getattr(module, "quantization_scheme", None) is None:
        return None
    return (
        f"wrap: {name} is a {torch.typename(module)}, whose weight compressed-tensors unpacks, and replaces while it "
        "multiplies; load the model with quantization_config=CompressedTensorsConfig(dequantize=True)"
    )


def _mixes(name: str, module: nn.Module) -> str | None:
    """Say why a token depends on the others of a call in eight bits of bitsandbytes: on their outliers."""
    state: Any = getattr(module, "state", None)
    threshold = getattr(state, "threshold", 0.0)
    if not hasattr(getattr(module, "weight", None), "CB") or not threshold:
        return None
    return (
        f"wrap: {name} is a {torch.typename(module)}, which looks for outliers above llm_int8_threshold={threshold} "
        "among all tokens of a call, so that rows would change each other; load the model with "
        "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
    )


def _packs(name: str, module: nn.Module, config: WrapConfig) -> str | None:
    """Say why torch cannot compile a module of ``torch.ao.quantization``: its weight is no tensor."""
    if config.mode == "eager" or not inspect.isfunction(getattr(type(module), "weight", None)):  # it unpacks a copy
        return None
    return (
        f"wrap: {name} is a {torch.typename(module)}, whose packed weight torch cannot compile; wrap with "
        "mode='eager', or quantise with torchao, whose weights are tensors"
    )
