"""A model with packed weights beside what its library computes in 16 bits, and its values in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import compiled_llm
from support.execution import twins
from support.execution.twins import Twins, in_float32, small_qwen3
from support.packed_layers import (
    ao_int4_tiles,
    awq,
    bnb_nf4,
    ct_packed,
    ct_typed,
    fp8_blocks,
    gptq,
    packed_model,
    unpacked_model as unpacked,
)

BLOCK = 128

PACKS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int4": lambda linear: ct_packed(linear, group=BLOCK),
    "FP8": lambda linear: fp8_blocks(linear, (BLOCK, BLOCK)),
    "NF4": bnb_nf4,
    "NF4, scales in 8 bits": lambda linear: bnb_nf4(linear, nested=True),
    "int8": ct_typed,
    "float8 by row": lambda linear: ct_typed(linear, torch.float8_e4m3fn),
    "GPTQ": gptq,
    "AWQ": awq,
    "torchao's tiles": lambda linear: ao_int4_tiles(linear, BLOCK),
    "torchao's tiles, groups of 32": ao_int4_tiles,
}
"""What the libraries compute without kernels of their own: unpacked to 16 bits, multiplied; FP8 rounds rows as well."""


class RoundingLinear(nn.Linear):
    """Multiplies rows that are rounded to e4m3, each by 128 inputs, in float32, by the formula of transformers."""

    def forward(self, input: Tensor) -> Tensor:
        groups = input.float().unflatten(-1, (-1, BLOCK))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        rounded = ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)
        return nn.functional.linear(rounded, self.weight.float(), self.bias).to(input.dtype)


def packed_twins(name: str, seed: int, sizes: dict[str, Any], **options: Any) -> Twins:
    """Its library's way, exactly, and wrapped; a small Qwen3 of these sizes, where `twins.DEVICE` says."""
    plain = small_qwen3(seed, **sizes)
    with torch.device(twins.DEVICE), torch.no_grad():
        own = packed_model(plain, PACKS[name])
        exact, theirs = in_float32(unpacked(own)), unpacked(own)
        if name == "FP8":
            for module in theirs.model.layers.modules():
                if type(module) is nn.Linear:
                    module.__class__ = RoundingLinear
        else:
            theirs.to(torch.bfloat16)
    return Twins(theirs, exact, compiled_llm.wrap(own, **{**twins.OPTIONS, **options}, packed=True))
