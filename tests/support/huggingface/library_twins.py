"""A model whose linear layers other libraries have packed themselves, beside what its codes stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import compiled_llm
from compiled_llm.model.packed.readers import bitsandbytes, torchao
from compiled_llm.model.packed.reading import ReadWeight
from compiled_llm_ops.packed.unpack import unpack
from support.execution import twins
from support.execution.twins import Twins, in_float32, small_qwen3
from support.packed_layers import packed_model


class Library(NamedTuple):
    """A way in which a library packs a layer."""

    package: str
    pack: Callable[[nn.Linear], nn.Module]
    kernels: str  # the format and whose they are, as `Stats.weights` has them


def _torchao(config: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    def pack(linear: nn.Linear) -> nn.Module:
        quantization = import_module("torchao.quantization")
        # Inductor's settings are those of the process, which other tests share.
        quantization.quantize_(linear, getattr(quantization, config)(**options, set_inductor_config=False))
        return linear

    return pack


def _four_bits(**options: Any) -> Callable[[nn.Linear], nn.Module]:
    def pack(linear: nn.Linear) -> nn.Module:
        layers, weight = import_module("bitsandbytes.nn"), linear.weight.detach()
        with torch.device("meta"):
            layer = layers.Linear4bit(*reversed(weight.shape), bias=False, compute_dtype=weight.dtype, **options)
        # A CPU with such a kernel would pack weights anew in the first call, and round to 16 bits.
        layer.support_avx512bf16_for_cpu = False
        layer.weight = layers.Params4bit(weight, module=layer, **options).to(weight.device)  # which packs it
        return layer  # type: ignore[no-any-return]

    return pack


def _eight_bits(linear: nn.Linear) -> nn.Module:
    """Without outliers."""
    layers, weight = import_module("bitsandbytes.nn"), linear.weight.detach()
    codes, scales, _ = import_module("bitsandbytes.functional").int8_vectorwise_quant(weight.half())
    with torch.device("meta"):
        layer = layers.Linear8bitLt(*reversed(weight.shape), bias=False, has_fp16_weights=False)
    layer.weight = layers.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
    return layer  # type: ignore[no-any-return]


_TILES = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}

LIBRARIES = {
    "torchao, int4 in tiles": Library("torchao", _torchao("Int4WeightOnlyConfig", **_TILES), "int4-g128: compiled_llm"),
    "torchao, int8": Library("torchao", _torchao("Int8WeightOnlyConfig"), "int8-row: compiled_llm"),
    "bitsandbytes, NF4": Library(
        "bitsandbytes", _four_bits(quant_type="nf4", compress_statistics=False), "nf4-g64: compiled_llm"
    ),
    "bitsandbytes, NF4, nested": Library(
        "bitsandbytes", _four_bits(quant_type="nf4", compress_statistics=True), "nf4-g64: compiled_llm"
    ),
    "bitsandbytes, FP4": Library("bitsandbytes", _four_bits(), "fp4: its library (has no reader)"),
    "bitsandbytes, int8": Library("bitsandbytes", _eight_bits, "int8-row: compiled_llm"),
}


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """Those of the decoder's layers, by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def values_of(layer: Any) -> Tensor:
    """What the codes of a layer stand for, [N, K] in float32: by our readers, or by its library's function."""
    for reader in (torchao, bitsandbytes):
        if isinstance(read := reader.read(layer), ReadWeight):
            return unpack(read.weight)
    state = copy.copy(layer.weight.quant_state)
    state.dtype = torch.float32
    values: Tensor = import_module("bitsandbytes.functional").dequantize_4bit(layer.weight.data, state)
    return values


def unpacked_model(model: Any) -> Any:
    """A copy with plain linear layers of the same values, in float32."""
    copied = copy.deepcopy(model)
    for name, layer in packed_layers(model).items():
        values = values_of(layer)
        with torch.device("meta"):
            plain = nn.Linear(values.shape[1], values.shape[0], bias=False)
        plain.weight = nn.Parameter(values, requires_grad=False)
        copied.set_submodule(name, plain)
    return in_float32(copied)


def library_twins(name: str, seed: int, sizes: dict[str, Any], **options: Any) -> Twins:
    """By its library's kernels, exactly, and wrapped; a small Qwen3 of these sizes, where `twins.DEVICE` says."""
    with torch.no_grad():
        own = packed_model(small_qwen3(seed, **sizes), LIBRARIES[name].pack).eval()
        exact = unpacked_model(own)
    return Twins(copy.deepcopy(own), exact, compiled_llm.wrap(own, **{**twins.OPTIONS, **options}))
