"""Linear layers as other libraries pack them, with the attributes and layouts of these, but made here.

Each computes what its library does, in PyTorch, from the values that are written down in `STANDS_FOR`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product, pad
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Linear

from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.readers import bitsandbytes, compressed_tensors, gptqmodel, torchao
from compiled_llm_ops.packed.formats import NF4

GROUP, BLOCK = 32, 64


def _in_groups(weight: Tensor, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return groups of a weight [N, G, size], and the largest number of each, [N, G, 1]."""
    groups = weight.detach().float().unflatten(1, (-1, size))
    return groups, groups.abs().amax(-1, keepdim=True)


def _stands_for(module: nn.Module, values: Tensor) -> nn.Module:
    module.register_buffer("stands_for", values.contiguous(), persistent=False)
    return module


# ---- transformers


def fp8_blocks(linear: nn.Linear, blocks: tuple[int, int] | None = (GROUP, GROUP), scale_fmt: str = "float") -> Any:
    outputs, inputs = linear.weight.shape
    layer: Any = FP8Linear(inputs, outputs, blocks, scale_fmt=scale_fmt, has_bias=linear.bias is not None)
    high, wide = blocks or (outputs, inputs)
    padded = pad(linear.weight.detach(), (0, -inputs % wide, 0, -outputs % high))
    tiles = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide))  # [N / high, high, K / wide, wide]
    scales = tiles.abs().amax((1, 3)) / 448
    if scale_fmt == "ue8m0":
        scales = scales.log2().ceil().exp2()
    codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)[:outputs, :inputs]
    layer.weight.data = codes.flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()
    layer.weight_scale_inv.data = scales.to(layer.weight_scale_inv.dtype) if blocks else scales.view(())
    if linear.bias is not None:
        layer.bias.data = linear.bias.detach().clone()
    return _stands_for(layer, values)


# ---- torchao: tensors that wrap others


class _Wrapping(Tensor):
    """A weight as torchao's: the tensors in it lie in attributes."""

    names: tuple[str, ...] = ()

    @staticmethod
    def __new__(kind: Any, values: Tensor, **parts: Any) -> Any:
        made = Tensor._make_wrapper_subclass(kind, values.shape, dtype=values.dtype, device=values.device)  # type: ignore[attr-defined]
        vars(made).update(parts, values=values)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in (*self.names, "values") if getattr(self, name, None) is not None], vars(self)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Any:
        others = {name: value for name, value in meta.items() if name not in inner and name != "values"}
        return cls(inner["values"], **{**others, **{name: inner[name] for name in inner if name != "values"}})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is product:
            input, weight, *bias = args
            return product(input, weight.values, *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(whole.values, **{name: value for name, value in vars(whole).items() if name != "values"})
        if func is torch.ops.aten.clone.default:
            copied = {name: copy.deepcopy(value) for name, value in vars(whole).items() if name != "values"}
            return cls(whole.values.clone(), **copied)
        raise NotImplementedError(f"{func} of {cls.__name__}")


def _ao(name: str, *names: str) -> Any:
    return type(name, (_Wrapping,), {"names": names, "__module__": "torchao.by_hand"})


Int4Tensor = _ao("Int4Tensor", "qdata", "scale", "zero_point")
Int4TilePackedTo4dTensor = _ao("Int4TilePackedTo4dTensor", "qdata", "scale_and_zero")
Int8Tensor = _ao("Int8Tensor", "qdata", "scale", "zero_point")
Float8Tensor = _ao("Float8Tensor", "qdata", "scale")
IntxUnpackedToInt8Tensor = _ao("IntxUnpackedToInt8Tensor", "qdata", "scale", "zero_point")


def _with_weight(linear: nn.Linear, weight: Any) -> nn.Module:
    layer = copy.deepcopy(linear)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def ao_int4(linear: nn.Linear) -> nn.Module:
    groups, _ = _in_groups(linear.weight)
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (highest - lowest) / 15
    zero = lowest + 8 * scale
    codes = ((groups - lowest) / scale).round().clamp(0, 15) - 8
    values, flat = (codes * scale + zero).flatten(1), codes.flatten(1).long() & 15
    packed = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    tables = [table[..., 0].t().contiguous() for table in (scale, zero)]
    parts = {"block_size": [1, GROUP], "activation_dtype": torch.bfloat16, "act_pre_scale": None}
    return _with_weight(linear, Int4Tensor(values, qdata=packed, scale=tables[0], zero_point=tables[1], **parts))


def ao_int4_tiles(linear: nn.Linear, group: int = GROUP) -> nn.Module:
    outputs, inputs = linear.weight.shape
    padded = pad(linear.weight.detach(), (0, -inputs % 1024, 0, -outputs % 8))
    groups, _ = _in_groups(padded, group)
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((highest - lowest) / 15).clamp(min=1e-6).bfloat16().float()
    zero = (lowest + 8 * scale).bfloat16().float()
    codes = ((groups - zero) / scale + 8).round().clamp(0, 15)
    values, flat = ((codes - 8) * scale + zero).flatten(1)[:outputs, :inputs], codes.flatten(1).long()
    words = torch.zeros(len(padded) // 8, padded.shape[1] // 128, 32, 4, dtype=torch.long)
    for lane in range(32):
        for word in range(4):
            first = 32 * word + lane % 4 * 2
            for place, column in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                words[:, :, lane, word] |= flat[lane // 4 :: 8, first + column :: 128] << 4 * place
    tables = torch.stack([scale[..., 0].t(), zero[..., 0].t()], -1).bfloat16().contiguous()
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    parts = {"block_size": [1, group], "act_pre_scale": None}
    return _with_weight(linear, Int4TilePackedTo4dTensor(values, qdata=packed, scale_and_zero=tables, **parts))


def ao_int8(linear: nn.Linear, group: int | None = None) -> nn.Module:
    groups, largest = _in_groups(linear.weight, group or linear.in_features)
    scale = largest / 127
    codes = (groups / scale).round()
    parts = {"block_size": [1, groups.shape[2]], "act_quant_kwargs": None, "act_pre_scale": None}
    tables = {"scale": scale[..., 0].clone(), "zero_point": torch.zeros_like(scale[..., 0], dtype=torch.int8)}
    packed = codes.flatten(1).to(torch.int8)
    return _with_weight(linear, Int8Tensor((codes * scale).flatten(1), qdata=packed, **tables, **parts))


def ao_float8(linear: nn.Linear, by_row: bool = True) -> nn.Module:
    weight = linear.weight.detach()
    scale = (weight.abs().amax(1, keepdim=True) if by_row else weight.abs().amax().view(1, 1)) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return _with_weight(linear, Float8Tensor(codes.float() * scale, qdata=codes, scale=scale, act_quant_kwargs=None))


# ---- bitsandbytes


class Params4bit(nn.Parameter):
    quant_state: Any = None

    def __deepcopy__(self, memo: Any) -> Any:
        made = Params4bit(self.data.clone(), requires_grad=False)
        made.quant_state = copy.deepcopy(self.quant_state)
        return made


class QuantState:
    def __init__(self, **parts: Any) -> None:
        self.state2: Any = None
        self.offset: Any = None
        vars(self).update(parts)


class Linear4bit(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.stands_for.to(input.dtype), self.bias)


def bnb_nf4(linear: nn.Linear, nested: bool = False, block: int = BLOCK) -> nn.Module:
    groups, largest = _in_groups(linear.weight, block)
    code, absmax, table = torch.tensor(NF4), largest.flatten().clone(), {}
    if nested:
        steps, offset = torch.linspace(-1, 1, 256), absmax.mean()
        blocks = pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        factors = blocks.abs().amax(1)
        codes = (blocks / factors[:, None] - steps[:, None, None]).abs().argmin(0).flatten()[: len(absmax)]
        absmax = steps[codes] * factors.repeat_interleave(256)[: len(absmax)] + offset
        inner = QuantState(absmax=factors, code=steps, blocksize=256)
        table = {"absmax": codes.to(torch.uint8), "state2": inner, "offset": offset}
    chosen = (groups / largest - code[:, None, None, None]).abs().argmin(0)
    flat = chosen.flatten()
    layer: Any = Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None)
    layer.bias = copy.deepcopy(linear.bias)
    layer.weight = Params4bit((flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None].clone(), requires_grad=False)
    layer.weight.quant_state = QuantState(
        **{"absmax": absmax, **table}, code=code, blocksize=block, shape=linear.weight.shape, quant_type="nf4",
        nested=nested,
    )  # fmt: skip
    return _stands_for(layer, (code[chosen] * absmax.view(*largest.shape)).flatten(1))


class Int8Params(nn.Parameter):
    CB: Any = None
    SCB: Any = None


@dataclass
class MatmulLtState:
    CB: Any = None
    SCB: Any = None
    has_fp16_weights: bool = False
    threshold: float = 0.0


class Linear8bitLt(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if (weight := self._weight()).CB is not None:  # the first call
            self.state.CB, self.state.SCB, weight.CB, weight.SCB = weight.CB, weight.SCB, None, None
        return product(input, self.stands_for, self.bias)

    def _weight(self) -> Any:
        return self.weight


def bnb_int8(linear: nn.Linear) -> nn.Module:
    largest = linear.weight.detach().abs().amax(1)
    codes = (linear.weight.detach() * 127 / largest[:, None]).round().to(torch.int8)
    layer: Any = Linear8bitLt(linear.in_features, linear.out_features, bias=linear.bias is not None)
    layer.bias = copy.deepcopy(linear.bias)
    layer.weight, layer.state = Int8Params(codes, requires_grad=False), MatmulLtState()
    layer.weight.CB, layer.weight.SCB = layer.weight.data, largest
    return _stands_for(layer, codes.float() * largest[:, None] / 127)


# ---- compressed-tensors


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers along the last dimension, the first in the lowest bits; a last word may have room."""
    each = 32 // bits
    numbers = pad(numbers.long(), (0, -numbers.shape[-1] % each)).unflatten(-1, (-1, each))
    words = sum(numbers[..., place] << bits * place for place in range(each))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class CompressedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.stands_for, self.bias)


def _compressed(linear: nn.Linear, values: Tensor, arguments: dict[str, Any], **tensors: Tensor) -> nn.Module:
    layer: Any = CompressedLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    layer.bias = copy.deepcopy(linear.bias)
    del layer._parameters["weight"]
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    weights = SimpleNamespace(**{"type": "int", "symmetric": True, "strategy": "group", "actorder": None, **arguments})
    layer.quantization_scheme = SimpleNamespace(weights=weights, input_activations=None, output_activations=None)
    return _stands_for(layer, values)


def ct_packed(linear: nn.Linear, bits: int = 4, symmetric: bool = True, group: int | None = GROUP) -> nn.Module:
    groups, largest = _in_groups(linear.weight, group or linear.in_features)
    half, zero = 1 << bits - 1, torch.zeros_like(largest)
    scale = largest / (half - 1)
    if not symmetric:
        lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (highest - lowest) / (2 * half - 1)
        zero = (-half - lowest / scale).round().clamp(-half, half - 1)
    codes = (groups / scale + zero).round().clamp(-half, half - 1)
    values = ((codes - zero) * scale).flatten(1)
    tensors = {
        "weight_packed": _words(codes.flatten(1) + half, bits),
        "weight_scale": scale[..., 0],
        "weight_shape": torch.tensor(linear.weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zero[..., 0].t() + half, bits).t().contiguous()
    arguments = {"num_bits": bits, "symmetric": symmetric, "strategy": "group" if group else "channel"}
    return _compressed(linear, values, arguments, **tensors)


def ct_typed(linear: nn.Linear, dtype: torch.dtype = torch.int8, strategy: str = "channel") -> nn.Module:
    groups, largest = _in_groups(linear.weight, GROUP if strategy == "group" else linear.in_features)
    scale = (largest.amax().view(1, 1, 1) if strategy == "tensor" else largest) / (127 if dtype == torch.int8 else 448)
    codes = groups / scale
    codes = codes.round().to(dtype) if dtype == torch.int8 else codes.to(dtype)
    table = scale.view(1) if strategy == "tensor" else scale[..., 0]
    arguments = {"num_bits": 8, "type": "int" if dtype == torch.int8 else "float", "strategy": strategy}
    values = (codes.float() * scale).flatten(1)
    return _compressed(linear, values, arguments, weight=codes.flatten(1), weight_scale=table)


# ---- GPTQModel


class PackedGroupedQuantLinear(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self
        return product(input, own.stands_for, own.bias)

    def qzero_format(self) -> int:
        return self._qzeros_format  # type: ignore[no-any-return, has-type]

    def _zeros_of_first_format(self) -> None:
        self._qzeros_format = 1


class TorchLinear(PackedGroupedQuantLinear):
    pass


class MarlinLinear(PackedGroupedQuantLinear):
    pass


class AWQuantLinear(PackedGroupedQuantLinear):
    pass


class AwqTorchLinear(AWQuantLinear):
    pass


def _gptqmodel(kind: Any, linear: nn.Linear, bits: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return a layer, codes [N, K], scales [N, G], and zeros [N, G]."""
    groups, _ = _in_groups(linear.weight)
    lowest, highest, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), (1 << bits) - 1
    scale = ((highest - lowest) / most).half().float()
    zero = (-lowest / scale).round().clamp(0, most)
    codes = (groups / scale + zero).round().clamp(0, most)
    layer: Any = kind()
    layer.bits, layer.group_size, layer.pack_dtype, layer.adapter = bits, GROUP, torch.int32, None
    layer.in_features, layer.out_features, layer._qzeros_format = linear.in_features, linear.out_features, 2
    layer.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
    layer.register_buffer("scales", scale[..., 0].t().half().contiguous())
    _stands_for(layer, ((codes - zero) * scale).flatten(1))
    return layer, codes.flatten(1), scale[..., 0], zero[..., 0]


def gptq(linear: nn.Linear, bits: int = 4, kind: Any = TorchLinear) -> nn.Module:
    layer, codes, _, zeros = _gptqmodel(kind, linear, bits)
    layer.register_buffer("qweight", _words(codes, bits).t().contiguous())
    layer.register_buffer("qzeros", _words(zeros.t(), bits).contiguous())
    layer.register_buffer("g_idx", (torch.arange(linear.in_features) // GROUP).int())
    return layer  # type: ignore[no-any-return]


def awq(linear: nn.Linear) -> nn.Module:
    layer, codes, _, zeros = _gptqmodel(AwqTorchLinear, linear, 4)

    def along_outputs(numbers: Tensor) -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # place p of a word has output order[p]
        return _words(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4).contiguous()

    layer.register_buffer("qweight", along_outputs(codes))
    layer.register_buffer("qzeros", along_outputs(zeros))
    return layer  # type: ignore[no-any-return]


# ---- readers take these classes as their libraries'

_CLASSES: list[tuple[LibraryClasses, type]] = [
    *((classes, Linear4bit) for classes in (bitsandbytes.FOUR_BITS, bitsandbytes.PLAIN)),
    *((classes, Linear8bitLt) for classes in (bitsandbytes.EIGHT_BITS, bitsandbytes.PLAIN)),
    (compressed_tensors.PLAIN, CompressedLinear),
    (gptqmodel.PACKED, PackedGroupedQuantLinear),
    (gptqmodel.AWQ, AWQuantLinear),
    *((gptqmodel.PLAIN, kind) for kind in (TorchLinear, AwqTorchLinear)),
    *zip(
        (classes for classes, _ in torchao.READERS),
        (Int4Tensor, Int4TilePackedTo4dTensor, Int8Tensor, Float8Tensor),
        strict=True,
    ),
]
for _classes, _kind in _CLASSES:
    _classes.add(_kind)


PACK: dict[str, tuple[str, Callable[[nn.Linear], nn.Module]]] = {
    "transformers, blocks": ("fp8-block32", fp8_blocks),
    "transformers, blocks, e8m0": ("fp8-block32", lambda linear: fp8_blocks(linear, scale_fmt="ue8m0")),
    "transformers, one scale": ("fp8-tensor", lambda linear: fp8_blocks(linear, blocks=None)),
    "torchao, int4": ("int4-g32", ao_int4),
    "torchao, int4 in tiles": ("int4-g32", ao_int4_tiles),
    "torchao, int8": ("int8-row", ao_int8),
    "torchao, int8 in groups": ("int8-g32", lambda linear: ao_int8(linear, GROUP)),
    "torchao, float8": ("fp8-row", ao_float8),
    "torchao, float8, one scale": ("fp8-tensor", lambda linear: ao_float8(linear, by_row=False)),
    "bitsandbytes, NF4": ("nf4-g64", bnb_nf4),
    "bitsandbytes, NF4, nested": ("nf4-g64", lambda linear: bnb_nf4(linear, nested=True)),
    "bitsandbytes, int8": ("int8-row", bnb_int8),
    "compressed-tensors, 4 bits": ("int4-g32", ct_packed),
    "compressed-tensors, 4 bits with zeros": ("int4-g32", lambda linear: ct_packed(linear, symmetric=False)),
    "compressed-tensors, 4 bits by channel": ("int4-row", lambda linear: ct_packed(linear, group=None)),
    "compressed-tensors, 8 bits": ("int8-g32", lambda linear: ct_packed(linear, 8)),
    "compressed-tensors, int8": ("int8-row", ct_typed),
    "compressed-tensors, int8 by group": ("int8-g32", lambda linear: ct_typed(linear, strategy="group")),
    "compressed-tensors, float8": ("fp8-row", lambda linear: ct_typed(linear, torch.float8_e4m3fn)),
    "compressed-tensors, float8 by tensor": (
        "fp8-tensor",
        lambda linear: ct_typed(linear, torch.float8_e4m3fn, "tensor"),
    ),
    "GPTQ": ("int4-g32", gptq),
    "GPTQ, 8 bits": ("int8-g32", lambda linear: gptq(linear, 8)),
    "AWQ": ("int4-g32", awq),
}
"""The name of the format, and what packs a layer, by library."""


def values_of(module: Any) -> Tensor:
    """Return what a module's weight stands for, [N, K], by its library's formula."""
    weight = getattr(module, "weight", None)
    found: Tensor = weight.values if isinstance(weight, _Wrapping) else module.stands_for
    return found


def packed_model(model: PreTrainedModel, pack: Callable[[nn.Linear], nn.Module], head: bool = False) -> Any:
    """Pack the linear layers of a model's layers, in place."""
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and (head or "layers" in name):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, pack(module))
    return model


def unpacked_model(model: PreTrainedModel) -> Any:
    """Return a copy of a packed model with plain linear layers of the same values."""
    copied = copy.deepcopy(model)
    for name, module in [*model.named_modules()]:
        if hasattr(module, "stands_for") or isinstance(getattr(module, "weight", None), _Wrapping):
            values, bias = values_of(module), getattr(module, "bias", None)
            plain = nn.Linear(values.shape[1], values.shape[0], bias=bias is not None)
            plain.weight.data = values.clone()
            if bias is not None:
                plain.bias.data = bias.detach().clone()
            owner, _, leaf = name.rpartition(".")
            setattr(copied.get_submodule(owner), leaf, plain)
    return copied
