"""Readers of other libraries' weights, on modules that are laid out as these do, made by hand."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.model.packed import readers
from compiled_llm.model.packed.part import _read
from compiled_llm.model.packed.reading import ReadWeight, Stays
from compiled_llm_ops.packed.unpack import unpack
from support.packed_layers import (
    PACK,
    IntxUnpackedToInt8Tensor,
    MarlinLinear,
    ao_float8,
    ao_int4,
    ao_int8,
    bnb_int8,
    bnb_nf4,
    ct_packed,
    ct_typed,
    fp8_blocks,
    gptq,
    values_of,
)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48)


def read(module: nn.Module) -> Any:
    return _read(module, torch.float32)


@pytest.mark.parametrize("name", PACK)
def test_what_is_read_is_what_the_library_multiplies_by(name: str, linear: nn.Linear) -> None:
    format, pack = PACK[name]
    module = pack(linear)
    found = read(module)
    assert isinstance(found, ReadWeight), found
    torch.testing.assert_close(unpack(found.weight), values_of(module), rtol=1e-6, atol=1e-6)
    assert str(found.weight.format) == format
    torch.testing.assert_close(found.bias, linear.bias.detach())


@pytest.mark.parametrize("name", PACK)
def test_codes_are_the_library_s_own_memory(name: str, linear: nn.Linear) -> None:
    module: Any = PACK[name][1](linear)
    inside = vars(getattr(module, "weight", SimpleNamespace())).values()
    held = [tensor for tensor in (*module.parameters(), *module.buffers(), *inside) if isinstance(tensor, Tensor)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in held if not is_wrapper(tensor)}
    assert read(module).weight.codes.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("name", ["torchao, int4", "bitsandbytes, NF4", "compressed-tensors, 4 bits", "GPTQ", "AWQ"])
def test_a_transposed_half_of_a_byte_would_be_seen(name: str, linear: nn.Linear) -> None:
    module = PACK[name][1](linear)
    weight = read(module).weight
    swapped = (weight.codes.view(torch.uint8) >> 4 | weight.codes.view(torch.uint8) << 4).view(weight.codes.dtype)
    other = unpack(weight._replace(codes=swapped))
    assert (other != values_of(module)).float().mean() > 0.5


def static(linear: nn.Linear) -> Any:
    module = fp8_blocks(linear)
    module.activation_scheme = "static"
    return module


def with_part(module: Any, **parts: Any) -> Any:
    vars(module.weight).update(parts)
    return module


def with_state(module: Any, **parts: Any) -> Any:
    vars(module.weight.quant_state).update(parts)
    return module


def out_of_order(module: Any) -> Any:
    module.g_idx = module.g_idx.flip(0)
    return module


def of_first_format(module: Any) -> Any:
    module._zeros_of_first_format()
    return module


def activations(module: Any) -> Any:
    module.quantization_scheme.input_activations = SimpleNamespace(num_bits=8)
    return module


def outliers(module: Any) -> Any:
    module.state.threshold = 6.0
    return module


def of_three_bits(linear: nn.Linear) -> Any:
    module: Any = ct_packed(linear)
    module.quantization_scheme.weights.num_bits = 3
    return module


def intx(linear: nn.Linear) -> Any:
    module = copy.deepcopy(linear)
    packed = IntxUnpackedToInt8Tensor(linear.weight.detach(), qdata=linear.weight.detach().to(torch.int8))
    module.weight = nn.Parameter(packed, requires_grad=False)
    return module


def with_odd_blocks(linear: nn.Linear) -> Any:
    odd = nn.Linear(96, 48)
    module: Any = bnb_nf4(odd, block=32)
    module.weight.quant_state.blocksize = 64
    return module


def other_forward(module: Any) -> Any:
    module.forward = lambda input: input
    return module


STAYS: dict[str, tuple[str, Callable[[nn.Linear], nn.Module]]] = {
    "static scales of activations": ("activations are static", static),
    "torchao, rounded activations": (
        "activations are rounded to int8",
        lambda linear: with_part(ao_int8(linear), act_quant_kwargs=object()),
    ),
    "torchao, float8 activations": (
        "activations are rounded to float8",
        lambda linear: with_part(ao_float8(linear), act_quant_kwargs=object()),
    ),
    "torchao, int4 with float8": (
        "activations are rounded to torch.float8",
        lambda linear: with_part(ao_int4(linear), activation_dtype=torch.float8_e4m3fn),
    ),
    "torchao, scaled activations": (
        "activations are scaled",
        lambda linear: with_part(ao_int4(linear), act_pre_scale=torch.ones(1)),
    ),
    "torchao, zeros": (
        "its zeros are others than 0",
        lambda linear: with_part(ao_int8(linear), zero_point=torch.ones(48, 1, dtype=torch.int8)),
    ),
    "torchao, another class": ("has no reader", intx),
    "bitsandbytes, FP4": ("has no reader", lambda linear: with_state(bnb_nf4(linear), quant_type="fp4")),
    "bitsandbytes, packed for a processor": (
        "packed it anew",
        lambda linear: with_state(bnb_nf4(linear), packing_format_for_cpu=True),
    ),
    "bitsandbytes, another table": (
        "its table is another",
        lambda linear: with_state(bnb_nf4(linear), code=torch.linspace(-1, 1, 16)),
    ),
    "bitsandbytes, blocks over rows": ("go on in the next row", with_odd_blocks),
    "bitsandbytes, outliers": ("looks for outliers", lambda linear: outliers(bnb_int8(linear))),
    "compressed-tensors, activations": ("activations are rounded", lambda linear: activations(ct_typed(linear))),
    "compressed-tensors, 3 bits": ("has no reader", of_three_bits),
    "GPTQ, groups out of order": ("out of order", lambda linear: out_of_order(gptq(linear))),
    "GPTQ, zeros of the first format": ("first format", lambda linear: of_first_format(gptq(linear))),
    "GPTQ, Marlin": ("a way of its own", lambda linear: gptq(linear, kind=MarlinLinear)),
    "attributes of another version": (
        "not as its reader knows it",
        lambda linear: with_part(ao_int8(linear), scale=None),
    ),
    "another forward": ("its forward was replaced", lambda linear: other_forward(ao_int8(linear))),
    "eight bits of an unknown library": (
        "has no reader",
        lambda linear: with_weight(linear, linear.weight.detach().to(torch.float8_e5m2)),
    ),
}


@pytest.mark.parametrize("name", PACK)
def test_a_layer_of_its_own_class_or_with_another_forward_stays_with_its_library(
    name: str, linear: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards that call the library's, and have its name: they may do anything besides."""
    module = PACK[name][1](linear)
    kind = type(module)
    original = kind.forward

    @functools.wraps(original)
    def doubled(self: nn.Module, input: Tensor) -> Tensor:
        twice: Tensor = 2 * original(self, input)
        return twice

    def stays() -> bool:
        return isinstance(read(module), Stays)

    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    assert stays()
    module.__class__ = kind
    module.forward = doubled.__get__(module)
    assert stays()
    del module.forward
    monkeypatch.setattr(kind, "forward", doubled)
    assert stays()
    monkeypatch.undo()
    assert isinstance(read(module), ReadWeight)


@pytest.mark.parametrize("name", ["Linear4bit", "Linear8bitLt", "FP8Linear", "PackedGroupedQuantLinear", "Linear"])
def test_a_class_is_no_library_s_for_its_name(name: str, linear: nn.Linear) -> None:
    """As those of PEFT's adapters, whose weight is that of the layer below."""
    kind: Any = type(name, (nn.Module,), {"weight": property(lambda self: self.base_layer.weight), "bias": None})
    for pack in (bnb_nf4, bnb_int8, fp8_blocks, gptq, ao_int8):
        adapter = kind()
        adapter.base_layer = pack(linear)
        assert read(adapter) is None


class AdapterOfLinear(nn.Linear):
    """As that of PEFT's RandLora."""

    def __init__(self, base_layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.base_layer = base_layer

    weight = property(lambda self: self.base_layer.weight)  # type: ignore[assignment]


def test_a_weight_counts_where_it_is_owned(linear: nn.Linear) -> None:
    for pack in (ao_int8, ao_int4, intx):
        assert read(AdapterOfLinear(pack(linear))) is None


def with_weight(linear: nn.Linear, weight: Tensor) -> nn.Module:
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


@pytest.mark.parametrize("case", STAYS)
def test_what_is_not_read_stays_with_its_library_and_says_why(case: str, linear: nn.Linear) -> None:
    reason, make = STAYS[case]
    found = read(make(linear))
    assert isinstance(found, Stays)
    assert reason in found.reason


def test_plain_layers_are_nobody_s(linear: nn.Linear) -> None:
    assert read(linear) is None
    assert read(nn.Embedding(4, 4)) is None
    assert read(nn.LayerNorm(4)) is None


def test_no_reader_imports_its_library() -> None:
    libraries = {"torchao", "bitsandbytes", "compressed_tensors", "gptqmodel", "transformers"}
    for file in Path(readers.__path__[0]).glob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert not {name.partition(".")[0] for name in names} & libraries, file.name
