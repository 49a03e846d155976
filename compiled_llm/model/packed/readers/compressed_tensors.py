"""Reads linear layers that compressed-tensors has compressed: ``pack-quantized``, and int8 and float8 by their type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.reading import Found, ReadWeight, Stays, bias_of, inputs_of_a_scale, numbers_in
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight

PLAIN = LibraryClasses("torch.nn.Linear", forwards=["compressed_tensors.quantization.lifecycle.forward"])
_BITS = (4, 8)


def read(module: nn.Module) -> Found:
    """Read a module; zeros of its groups are copied, a byte for each."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    if scheme is None or scheme.weights is None or not isinstance(module, nn.Linear):
        return None
    layer: Any = module
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    packed, plain = tensors.get("weight_packed"), tensors.get("weight")
    weights, name = scheme.weights, f"{scheme.weights.num_bits} bits of compressed-tensors"
    if packed is None and (plain is None or plain.element_size() > 1):
        return None  # it is unpacked
    if scheme.input_activations is not None or getattr(scheme, "output_activations", None) is not None:
        return Stays(name, "activations are rounded, too")
    if getattr(weights, "actorder", None) is not None and getattr(layer, "weight_g_idx", None) is not None:
        return Stays(name, "its groups are out of order (g_idx)")
    if str(getattr(weights.strategy, "value", weights.strategy)) not in ("tensor", "channel", "group"):
        return Stays(name, f"strategy {weights.strategy} has no reader")
    found = _by_type(layer, weights, layer.weight) if packed is None else _packed(layer, weights, packed)
    return found if isinstance(found, Stays) else ReadWeight(found, bias_of(module), _copied(found))


def _packed(layer: Any, weights: Any, packed: Tensor) -> PackedWeight | Stays:
    bits, outputs = weights.num_bits, packed.shape[0]
    if bits not in _BITS or str(getattr(weights.type, "value", weights.type)) != "int":
        return Stays(f"{bits} bits", "has no reader")
    inputs = packed.shape[1] * 32 // bits
    if [outputs, inputs] != layer.weight_shape.tolist():
        return Stays(f"int{bits}", f"{inputs} inputs that no words divide have no reader")
    table = _table(layer.weight_scale)
    zeros: Tensor | None = None
    if not weights.symmetric:
        zeros = numbers_in(layer.weight_zero_point.detach().t(), bits).t()[:outputs].contiguous()
    format = PackedFormat(f"uint{bits}", outputs=_outputs(table), inputs=inputs_of_a_scale(inputs, table.shape[1]))
    return PackedWeight(format, packed.detach().view(torch.uint8), table, zeros, (outputs, inputs))


def _by_type(layer: Any, weights: Any, weight: Tensor) -> PackedWeight | Stays:
    code = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}.get(weight.dtype)
    if code is None or not weights.symmetric:
        return Stays(str(weight.dtype), "has no reader" if code is None else "its zeros are others than 0")
    table = _table(layer.weight_scale)
    format = PackedFormat(code, outputs=_outputs(table), inputs=inputs_of_a_scale(weight.shape[1], table.shape[1]))
    return PackedWeight(format, weight.detach(), table, None, (weight.shape[0], weight.shape[1]))


def _table(scales: Tensor) -> Tensor:
    return scales.detach().reshape(-1, 1) if scales.dim() < 2 else scales.detach()


def _outputs(table: Tensor) -> int:
    return 0 if table.numel() == 1 else 1


def _copied(weight: PackedWeight) -> int:
    return 0 if weight.zeros is None else weight.zeros.nbytes
