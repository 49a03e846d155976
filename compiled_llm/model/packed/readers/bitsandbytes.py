"""Reads ``Linear4bit`` with NF4 and ``Linear8bitLt`` without outliers of bitsandbytes."""

# The library rounds the activations of eight bits, too; a product with the weight's bits alone is closer to that of the
# model that was quantised.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.reading import Found, ReadWeight, Stays, bias_of
from compiled_llm_ops.packed.formats import NESTED_BLOCK, NESTED_CODES, NF4, PackedFormat, PackedWeight

FOUR_BITS = LibraryClasses("bitsandbytes.nn.Linear4bit")
EIGHT_BITS = LibraryClasses("bitsandbytes.nn.Linear8bitLt")
PLAIN = LibraryClasses(*FOUR_BITS.places, "bitsandbytes.nn.LinearNF4", *EIGHT_BITS.places)


def read(module: nn.Module) -> Found:
    """Read a module; the scales' own scales are copied, and those of eight bits, a number for each output."""
    if FOUR_BITS.have(module):
        return _four_bits(module)
    return _eight_bits(module) if EIGHT_BITS.have(module) else None


def _four_bits(module: Any) -> Found:
    weight = module._parameters["weight"]
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is None:
        return Stays("4 bits of bitsandbytes", "its weight is not packed yet")
    if state.quant_type != "nf4":
        return Stays(str(state.quant_type), "has no reader")
    if getattr(state, "packing_format_for_cpu", False):
        return Stays("nf4", "a call has packed it anew for this processor")
    outputs, inputs = state.shape
    if inputs % state.blocksize or weight.dtype != torch.uint8:
        return Stays(
            "nf4", f"blocks of {state.blocksize} that go on in the next row, and {weight.dtype}, have no reader"
        )
    if state.code.tolist() != list(NF4):
        return Stays("nf4", "its table is another")
    format = PackedFormat("nf4", "high_first", inputs=state.blocksize)
    nested = _nested(state) if state.nested else None
    codes, table = weight.detach().view(outputs, inputs // 2), state.absmax.view(outputs, inputs // state.blocksize)
    if isinstance(nested, str):
        return Stays("nf4", nested)
    packed = PackedWeight(format, codes, table, None, (outputs, inputs), nested)
    return ReadWeight(packed, bias_of(module), 0 if nested is None else nested.nbytes)


def _nested(state: Any) -> Tensor | str:
    inner = state.state2
    if inner.blocksize != NESTED_BLOCK or inner.code.numel() != NESTED_CODES:
        return f"scales of blocks of {inner.blocksize} have no reader"
    offset = torch.as_tensor(state.offset, dtype=torch.float32, device=inner.code.device)
    return torch.cat([inner.code.float(), offset.view(1), inner.absmax.float()])


def _eight_bits(module: Any) -> Found:
    weight, state = module._parameters["weight"], module.state
    if state.has_fp16_weights:
        return Stays("int8", "its weight is rounded in each call")
    if state.threshold:
        return Stays("int8", "looks for outliers among all tokens of a call")
    codes, scales = (weight.CB, weight.SCB) if weight.CB is not None else (state.CB, state.SCB)
    if codes is None or scales is None or codes.dtype != torch.int8:
        return Stays("int8", "its weight is not packed yet")
    table = (scales.float() / 127).view(-1, 1)
    packed = PackedWeight(PackedFormat("int8"), codes, table, None, (codes.shape[0], codes.shape[1]))
    return ReadWeight(packed, bias_of(module), table.nbytes)
