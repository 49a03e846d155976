"""Models with random weights of 4 and 8 bits: laid out as libraries do, or packed by a library itself."""

# Readers take the classes here for the libraries', and they have no products of their own. Codes are drawn
# on the device, so that a model of 8B is made in seconds; what they stand for is about as large as trained weights are.

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch
from models import SHAPES, build
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Linear

from compiled_llm.model.packed.readers import bitsandbytes, gptqmodel
from compiled_llm_ops.packed.formats import NESTED_BLOCK, NESTED_CODES, NF4

_DEVIATION = 0.02  # of what weights stand for
_BLOCK, _GROUP, _NF4_BLOCK = 128, 128, 64


class Linear4bit(nn.Linear):
    """As that of bitsandbytes."""


class PackedGroupedQuantLinear(nn.Linear):
    """As GPTQModel's, with words of 4 bits."""

    bits, pack_dtype = 4, torch.int32

    def qzero_format(self) -> int:
        """Say that zeros are what they are, and not one less."""
        return 2


class TorchLinear(PackedGroupedQuantLinear):
    """As GPTQModel's for GPTQ, with words along the inputs."""


class AWQuantLinear(PackedGroupedQuantLinear):
    """As GPTQModel's for AWQ."""


class AwqTorchLinear(AWQuantLinear):
    """With words along the outputs."""


for _classes, _kind in (
    *((_classes, Linear4bit) for _classes in (bitsandbytes.FOUR_BITS, bitsandbytes.PLAIN)),
    *((gptqmodel.PACKED, PackedGroupedQuantLinear), (gptqmodel.AWQ, AWQuantLinear)),
    *((gptqmodel.PLAIN, _kind) for _kind in (TorchLinear, AwqTorchLinear)),
):
    _classes.add(_kind)


class Params4bit(nn.Parameter):
    """As that of bitsandbytes."""

    quant_state: Any = None


@dataclass(eq=False)
class QuantState:
    """As that of bitsandbytes, its scales in float32 or in 8 bits."""

    absmax: Tensor
    code: Tensor
    shape: tuple[int, int]
    blocksize: int = _NF4_BLOCK
    quant_type: str = "nf4"
    nested: bool = False
    offset: Tensor | None = None
    state2: QuantState | None = None


def _codes(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw any bits, as a tensor that is no view: others of the layer's are laid beside it."""
    bounds = torch.iinfo(dtype)
    return torch.randint(bounds.min, bounds.max, (outputs, inputs), device=device, dtype=dtype)


def _compressed(layer: nn.Linear, bits: int, strategy: str, **tensors: Tensor) -> nn.Module:
    del layer._parameters["weight"]
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    weights = SimpleNamespace(num_bits=bits, type="int", symmetric=True, strategy=strategy, actorder=None)
    scheme: Any = SimpleNamespace(weights=weights, input_activations=None, output_activations=None)
    layer.quantization_scheme = scheme
    return layer


def _int4(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make what compressed-tensors leaves of a layer of ``pack-quantized``."""
    group = min(_GROUP, inputs)
    scales = torch.full((outputs, inputs // group), _DEVIATION / 4.6, dtype=dtype, device=device)
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=False)
    shape = torch.tensor([outputs, inputs], device=device)
    packed = _codes(outputs, inputs // 8, torch.int32, device)
    return _compressed(layer, 4, "group", weight_packed=packed, weight_scale=scales, weight_shape=shape)


def _gptq(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    group = min(_GROUP, inputs)
    order = torch.arange(inputs, dtype=torch.int32, device=device) // group
    words = _codes(inputs // 8, outputs, torch.int32, device)
    return _grouped(TorchLinear, outputs, inputs, dtype, qweight=words, g_idx=order)


def _awq(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return _grouped(AwqTorchLinear, outputs, inputs, dtype, qweight=_codes(inputs, outputs // 8, torch.int32, device))


def _grouped(kind: Any, outputs: int, inputs: int, dtype: torch.dtype, **tensors: Tensor) -> nn.Module:
    device, groups = tensors["qweight"].device, inputs // min(_GROUP, inputs)
    with torch.device("meta"):
        layer: Any = kind(inputs, outputs, bias=False)
    del layer._parameters["weight"]
    eights = torch.full((groups, outputs // 8), 0x88888888 - 2**32, dtype=torch.int32, device=device)
    scales = torch.full((groups, outputs), _DEVIATION / 4.6, dtype=dtype, device=device)
    for name, tensor in {**tensors, "qzeros": eights, "scales": scales}.items():
        layer.register_buffer(name, tensor)
    return cast(nn.Module, layer)


def _int8(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make what compressed-tensors leaves of a layer of ``int-quantized``, with weights alone."""
    scales = torch.full((outputs, 1), _DEVIATION / 74, dtype=dtype, device=device)
    codes = _codes(outputs, inputs, torch.int8, device)
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=False)
    return _compressed(layer, 8, "channel", weight=codes, weight_scale=scales)


def _fp8(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        layer: Any = FP8Linear(inputs, outputs, block_size=(_BLOCK, _BLOCK))
    layer.bias = None
    codes = (torch.randn(outputs, inputs, dtype=dtype, device=device) * 32).to(torch.float8_e4m3fn)
    scales = torch.full((-(-outputs // _BLOCK), -(-inputs // _BLOCK)), _DEVIATION / 32, device=device)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    return cast(nn.Module, layer)


def _nf4(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        layer: Any = Linear4bit(inputs, outputs, bias=False)
    codes = _codes(outputs * inputs // 2, 1, torch.uint8, device)
    layer.weight = Params4bit(codes, requires_grad=False)
    absmax = torch.full((outputs * inputs // _NF4_BLOCK,), _DEVIATION / 0.58, device=device)
    layer.weight.quant_state = QuantState(absmax, torch.tensor(NF4, device=device), (outputs, inputs))
    return cast(nn.Module, layer)


def _nested_nf4(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """As `bnb_4bit_use_double_quant` leaves a layer: scales of 8 bits."""
    layer: Any = _nf4(outputs, inputs, dtype, device)
    state = layer.weight.quant_state
    scales = state.absmax.numel()
    factors = torch.full((-(-scales // NESTED_BLOCK),), _DEVIATION / 4, device=device)
    table = torch.linspace(-1, 1, NESTED_CODES, device=device)
    state.nested, state.offset = True, torch.full((), _DEVIATION / 0.58, device=device)
    state.absmax = _codes(scales, 1, torch.uint8, device).flatten()
    state.state2 = QuantState(factors, table, (scales, 1), NESTED_BLOCK)
    return cast(nn.Module, layer)


def _plain(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """Draw a layer that is not packed yet."""
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=False)
    drawn = torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(std=_DEVIATION)
    layer.weight = nn.Parameter(drawn, requires_grad=False)
    return layer


def _torchao_int4(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """In the tiles of torch's own kernel; torchao's other layouts take kernels of one more package."""
    options = {"group_size": min(_GROUP, inputs), "int4_packing_format": "tile_packed_to_4d"}
    return _torchao(_plain(outputs, inputs, dtype, device), "Int4WeightOnlyConfig", **options)


def _torchao_int8(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return _torchao(_plain(outputs, inputs, dtype, device), "Int8WeightOnlyConfig")


def _torchao(layer: nn.Module, config: str, **options: Any) -> nn.Module:
    """Pack a layer; Inductor's settings become those that torchao wants for its kernels, as with any user's model."""
    torchao = import_module("torchao.quantization")
    torchao.quantize_(layer, getattr(torchao, config)(**options))
    return layer


def _bitsandbytes_nf4(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    layers, drawn = import_module("bitsandbytes.nn"), _plain(outputs, inputs, dtype, device).weight.data
    options: dict[str, Any] = {"compress_statistics": False, "quant_type": "nf4"}
    with torch.device("meta"):
        layer = layers.Linear4bit(inputs, outputs, bias=False, compute_dtype=dtype, **options)
    layer.weight = layers.Params4bit(drawn, requires_grad=False, module=layer, **options).to(device)  # which packs it
    return cast(nn.Module, layer)


def _bitsandbytes_int8(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Without outliers."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # each call would say that it rounds to float16
    layers, drawn = import_module("bitsandbytes.nn"), _plain(outputs, inputs, dtype, device).weight.data
    codes, scales, _ = import_module("bitsandbytes.functional").int8_vectorwise_quant(drawn.half())
    with torch.device("meta"):
        layer = layers.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
    layer.weight = layers.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
    return cast(nn.Module, layer)


_Maker = Callable[[int, int, torch.dtype, torch.device], nn.Module]
FORMATS: dict[str, _Maker] = {
    "int4-g128": _int4,
    "nf4": _nf4,
    "nf4-nested": _nested_nf4,
    "fp8-block": _fp8,
    "int8": _int8,
    "gptq": _gptq,
    "awq": _awq,
}
"""Without the libraries."""

LIBRARIES: dict[str, _Maker] = {
    "torchao-int4": _torchao_int4,
    "torchao-int8": _torchao_int8,
    "bitsandbytes-nf4": _bitsandbytes_nf4,
    "bitsandbytes-int8": _bitsandbytes_int8,
}
"""By the libraries, a layer after the other."""


def random_model(name: str, format: str, layers: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of a known shape, or of some of its layers, with weights of a format; ``"bfloat16"`` is plain."""
    makers = {"bfloat16": _plain, **FORMATS, **LIBRARIES}
    if layers is None and format == "bfloat16":
        return build(name, dtype, device)
    torch.manual_seed(0)
    config = SHAPES[name].config()
    if layers is not None:
        config.num_hidden_layers = layers
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))
    for path, module in [*model.named_modules()]:
        if type(module) is nn.Linear and "layers" in path:
            owner, _, leaf = path.rpartition(".")
            made = makers[format](module.out_features, module.in_features, dtype, device)
            setattr(model.get_submodule(owner), leaf, made)
    _fill(model, device)
    return model.eval()


def _fill(model: PreTrainedModel, device: torch.device) -> None:
    """Draw all parameters that have no memory yet, and make rotary embeddings anew."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                drawn = torch.ones_like(parameter, device=device)
                if drawn.dim() > 1:
                    drawn.normal_(std=_DEVIATION)
                module._parameters[name] = nn.Parameter(drawn, requires_grad=False)
    inner: Any = model.base_model
    with device:
        inner.rotary_emb = type(inner.rotary_emb)(config=model.config)
    model.tie_weights()
