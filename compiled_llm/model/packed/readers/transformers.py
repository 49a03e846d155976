"""Reads ``FP8Linear`` of transformers: e4m3 with a scale for each block of a weight, or one for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.reading import Found, ReadWeight, Stays, bias_of
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight

PLAIN = LibraryClasses("transformers.integrations.finegrained_fp8.FP8Linear")


def read(module: nn.Module) -> Found:
    """Read a module; the scales of e8m0 become float32, a table of a number for each block."""
    if not PLAIN.have(module):
        return None
    layer: Any = module
    weight, scales, blocks = module._parameters["weight"], layer.weight_scale_inv, layer.block_size
    assert weight is not None, "the class always has one"
    if weight.element_size() > 1:
        return None  # it multiplies as any linear layer does
    if weight.dtype != torch.float8_e4m3fn:
        return Stays(f"fp8 {weight.dtype}", "weights of FP4 have no reader")
    if layer.activation_scheme != "dynamic":
        return Stays("fp8", "scales of activations are static")
    table = scales.detach()
    copied = 0 if table.dtype == torch.float32 else 4 * table.numel()
    if copied:
        table = table.float()
    if table.numel() == 1:
        format, table = PackedFormat("e4m3", outputs=0, inputs=0, may_round=True), table.view(1, 1)
    elif blocks is None:
        return Stays("fp8", f"scales of shape {tuple(table.shape)} without blocks have no reader")
    else:
        format = PackedFormat("e4m3", outputs=blocks[0], inputs=blocks[1], may_round=True)
    shape = weight.shape[0], weight.shape[1]
    return ReadWeight(PackedWeight(format, weight.detach(), table, None, shape), bias_of(module), copied)
