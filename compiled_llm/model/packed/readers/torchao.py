"""Reads linear layers with weights of torchao, if these alone are packed: int4, plain or tile-packed, int8, float8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.reading import Found, ReadWeight, Stays, bias_of, inputs_of_a_scale
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight

PLAIN = LibraryClasses("torch.nn.Linear")


def read(module: nn.Module) -> Found:
    """Read a module; nothing of its weight is copied."""
    weight: Any = module._parameters.get("weight")
    if not (isinstance(module, nn.Linear) and type(weight).__module__.startswith("torchao.")):
        return None
    reader = next((reader for classes, reader in READERS if type(weight) in classes.found()), None)
    if reader is None:
        return Stays(type(weight).__name__, "has no reader")
    if getattr(weight, "act_pre_scale", None) is not None:
        return Stays(type(weight).__name__, "activations are scaled before the product")
    packed = reader(weight)
    return packed if isinstance(packed, Stays) else ReadWeight(packed, bias_of(module))


def _int4(weight: Any) -> PackedWeight | Stays:
    if weight.activation_dtype != torch.bfloat16:
        return Stays("int4", f"activations are rounded to {weight.activation_dtype}")
    format = PackedFormat("int4", inputs=weight.block_size[-1])
    return PackedWeight(format, weight.qdata, weight.scale.t(), weight.zero_point.t(), _shape(weight))


def _int4_tiles(weight: Any) -> PackedWeight | Stays:
    if weight.qdata.shape[2:] != (32, 4):
        return Stays("int4 tiles", f"tiles of {tuple(weight.qdata.shape[2:])} have no reader")
    (outputs, inputs), group = _shape(weight), weight.block_size[-1]
    tables = weight.scale_and_zero[: -(-inputs // group), :outputs]
    format = PackedFormat("uint4", "tiles", inputs=group)
    return PackedWeight(format, weight.qdata, tables[..., 0].t(), tables[..., 1].t(), (outputs, inputs))


def _int8(weight: Any) -> PackedWeight | Stays:
    if weight.act_quant_kwargs is not None:
        return Stays("int8", "activations are rounded to int8")
    zeros = weight.zero_point
    if zeros is not None and bool(zeros.any()):
        return Stays("int8", "its zeros are others than 0")
    return _in_rows("int8", weight)


def _float8(weight: Any) -> PackedWeight | Stays:
    if weight.act_quant_kwargs is not None:
        return Stays("fp8", "activations are rounded to float8")
    if weight.qdata.dtype != torch.float8_e4m3fn:
        return Stays(str(weight.qdata.dtype), "has no reader")
    return _in_rows("e4m3", weight)


def _in_rows(code: str, weight: Any) -> PackedWeight | Stays:
    shape, table = _shape(weight), _table(weight.scale)
    if table.shape[0] not in (1, shape[0]) or (table.shape[0] == 1 and table.shape[1] > 1):
        return Stays(code, f"scales of shape {tuple(table.shape)} have no reader")
    inputs = inputs_of_a_scale(shape[1], table.shape[1])
    format = PackedFormat(code, outputs=0 if table.numel() == 1 else 1, inputs=inputs)
    return PackedWeight(format, weight.qdata, table, None, shape)


def _table(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 1) if scales.dim() < 2 else scales


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


READERS: list[tuple[LibraryClasses, Callable[[Any], PackedWeight | Stays]]] = [
    (LibraryClasses("torchao.quantization.Int4Tensor"), _int4),
    (LibraryClasses("torchao.quantization.Int4TilePackedTo4dTensor"), _int4_tiles),
    (LibraryClasses("torchao.quantization.Int8Tensor"), _int8),
    (LibraryClasses("torchao.quantization.Float8Tensor"), _float8),
]
"""By the class of a weight."""
