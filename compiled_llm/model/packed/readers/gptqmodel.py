"""Reads linear layers of GPTQ and AWQ as GPTQModel leaves them: words along the inputs, and along the outputs."""

# Kernels such as Marlin lay words out anew when a model is loaded; those stay with the library.

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.reading import Found, ReadWeight, Stays, bias_of, inputs_of_a_scale, numbers_in
from compiled_llm_ops.packed.formats import WORD_OUTPUTS, PackedFormat, PackedWeight

_LAYERS = "gptqmodel.nn_modules.qlinear"
PACKED = LibraryClasses(f"{_LAYERS}.PackedGroupedQuantLinear")
AWQ = LibraryClasses(f"{_LAYERS}.AWQuantLinear")
PLAIN = LibraryClasses(
    f"{_LAYERS}.torch.TorchLinear",
    f"{_LAYERS}.torch_fused.TorchFusedLinear",
    f"{_LAYERS}.tritonv2.TritonV2Linear",
    f"{_LAYERS}.torch_awq.AwqTorchLinear",
    f"{_LAYERS}.gemm_awq.AwqGEMMLinear",
    f"{_LAYERS}.gemm_awq_triton.AwqGEMMTritonLinear",
)


def read(module: nn.Module) -> Found:
    """Read a module; zeros of its groups are copied, a byte for each."""
    if not PACKED.have(module):
        return None
    layer: Any = module
    name, kind = f"{layer.bits} bits of {'AWQ' if AWQ.have(module) else 'GPTQ'}", type(module)
    if kind not in PLAIN.found():
        return Stays(name, f"{kind.__name__} lays its weight out in a way of its own")
    if layer.pack_dtype != torch.int32 or getattr(layer, "planar", False):
        return Stays(name, "words of this kind have no reader")
    if getattr(layer, "adapter", None) is not None:
        return Stays(name, "it has an adapter of GPTQModel")
    return _along_outputs(layer, name) if AWQ.have(module) else _along_inputs(layer, name)


def _along_inputs(layer: Any, name: str) -> Found:
    if layer.bits not in (4, 8):
        return Stays(name, "has no reader")
    if layer.qzero_format() != 2:
        return Stays(name, "zeros are those of its first format, one less")
    groups, outputs = layer.scales.shape
    inputs = layer.qweight.shape[0] * 32 // layer.bits
    size = inputs_of_a_scale(inputs, groups)
    order = torch.arange(inputs, device=layer.g_idx.device) // (size or inputs)
    if inputs != layer.in_features or not torch.equal(layer.g_idx.to(order.dtype), order):
        return Stays(name, "its groups are out of order (g_idx)")
    zeros = numbers_in(layer.qzeros, layer.bits)[:, :outputs].t()
    format = PackedFormat(f"uint{layer.bits}", "words_by_input", inputs=size)
    packed = PackedWeight(format, layer.qweight, layer.scales.t(), zeros, (outputs, inputs))
    return ReadWeight(packed, bias_of(layer), zeros.nbytes)


def _along_outputs(layer: Any, name: str) -> Found:
    if layer.bits != 4:
        return Stays(name, "has no reader")
    inputs, outputs = layer.qweight.shape[0], layer.qweight.shape[1] * 8
    zeros = numbers_in(layer.qzeros, 4, WORD_OUTPUTS).t()
    format = PackedFormat("uint4", "words_by_output", inputs=inputs_of_a_scale(inputs, layer.scales.shape[0]))
    packed = PackedWeight(format, layer.qweight, layer.scales.t(), zeros, (outputs, inputs))
    return ReadWeight(packed, bias_of(layer), zeros.nbytes)
