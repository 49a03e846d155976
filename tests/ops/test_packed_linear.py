"""`packed_linear` on the CPU: each library's format against the values that its codes stand for, in float64."""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops import packed_linear
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight
from compiled_llm_ops.packed.linear import multiply_packed, scratch_bytes, why_no_kernel
from compiled_llm_ops.packed.unpack import unpack
from support.ops.packed_weights import FORMATS, IN_ROWS, LARGEST_E4M3, make, side_by_side

pytestmark = pytest.mark.core


def each_format() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", FORMATS)


def sizes_of(name: str) -> tuple[int, int]:
    """Sizes that divide by as little as the layout allows."""
    layout = FORMATS[name][0].layout
    return 48 if layout == "words_by_output" else 53, {"words_by_input": 200, "high_first": 198}.get(layout, 202)


def finite(name: str, codes: torch.Tensor) -> torch.Tensor:
    """Codes without those of e4m3 that are not numbers."""
    return codes.where(codes & 0x7F <= LARGEST_E4M3, 0x3C) if FORMATS[name][0].code == "e4m3" else codes


@each_format()
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_products_are_those_of_the_unpacked_weight(name: str, scale: float, seed: int) -> None:
    outputs, inputs = sizes_of(name)
    codes = finite(name, torch.randint(1 << FORMATS[name][0].bits, (outputs, inputs)))
    made = make(name, outputs, inputs, scale=scale, codes=codes)
    bias = torch.randn(outputs) * scale
    for count in (1, 2, 3, 17, 65):
        rows = torch.randn(count, inputs)
        out = packed_linear(*made.arguments(rows, bias))
        expected = rows.double() @ made.values.T + bias.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-5)
        assert out.is_contiguous()


@each_format()
def test_every_code_at_every_place(name: str, seed: int) -> None:
    """Each place has each code once; one that is read from another place, or as another code, is another value."""
    outputs, inputs = sizes_of(name)
    count = 1 << FORMATS[name][0].bits
    places = torch.arange(outputs * inputs).view(outputs, inputs) * 7
    for shift in range(0, count, 1 if count == 16 else 37):
        codes = finite(name, (places + shift) % count)
        made = make(name, outputs, inputs, codes=codes)
        torch.testing.assert_close(unpack(made.weight, torch.float64), made.values, rtol=1e-6, atol=1e-6)


@each_format()
def test_groups_of_zeros_are_zeros(name: str, seed: int) -> None:
    outputs, inputs = sizes_of(name)
    made = make(name, outputs, inputs, codes=finite(name, torch.randint(256, (outputs, inputs)) % 16))
    weight = made.weight
    if weight.nested is not None:
        weight = weight._replace(nested=torch.zeros_like(weight.nested))
    else:
        weight = weight._replace(scales=torch.zeros_like(weight.scales))
    if weight.zeros is not None:
        weight = weight._replace(zeros=torch.zeros_like(weight.zeros))
    assert not multiply_packed(torch.randn(3, inputs), weight).any()


@pytest.mark.parametrize("name", IN_ROWS)
def test_side_by_side_weights_are_those_apart(name: str, seed: int) -> None:
    both = [make(name, outputs, 256).weight for outputs in (128, 53)]
    apart = torch.cat([unpack(weight) for weight in both])
    torch.testing.assert_close(unpack(side_by_side(both)), apart, rtol=0, atol=0, equal_nan=True)


def test_codes_that_are_not_numbers_are_not() -> None:
    made = make("torchao float8 by row", 2, 8, codes=torch.full((2, 8), 0x7F))
    assert multiply_packed(torch.randn(1, 8), made.weight).isnan().all()


@each_format()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_other_types_and_strides(name: str, dtype: torch.dtype, seed: int) -> None:
    outputs, inputs = sizes_of(name)
    made = make(name, outputs, inputs, codes=finite(name, torch.randint(1 << FORMATS[name][0].bits, (outputs, inputs))))
    rows = torch.randn(inputs, 6).to(dtype).T
    flat = multiply_packed(rows, made.weight)
    shaped = multiply_packed(rows.reshape(2, 3, inputs), made.weight)
    assert flat.dtype == dtype
    assert torch.equal(shaped.flatten(0, 1), flat)
    expected = rows.double() @ made.values.T
    torch.testing.assert_close(flat.double(), expected, rtol=0.02, atol=float(expected.abs().max()) * 0.01)


def test_a_format_is_a_name_and_a_key() -> None:
    names = {name: str(format) for name, (format, _) in FORMATS.items()}
    assert names["FP8Linear"] == "fp8-block128"
    assert names["bitsandbytes NF4"] == "nf4-g64"
    assert names["torchao int8"] == "int8-row"
    assert names["torchao float8, one scale"] == "fp8-tensor"
    assert names["compressed-tensors int4"] == "int4-g128"
    assert {PackedFormat("int8"): 1}[FORMATS["torchao int8"][0]] == 1


def test_who_can_multiply_and_what_it_needs() -> None:
    weight = make("compressed-tensors int4", 16, 256).weight
    assert why_no_kernel(weight, torch.bfloat16, torch.device("cpu")) is None
    assert "float64" in str(why_no_kernel(weight, torch.float64, torch.device("cpu")))
    assert "meta" in str(why_no_kernel(weight, torch.float32, torch.device("meta")))
    assert scratch_bytes(weight, torch.bfloat16) == 16 * 256 * 2


def changed(**changes: object) -> PackedWeight:
    return make("GPTQ", 16, 256).weight._replace(**changes)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (changed(codes=torch.zeros(9, 16).int()), r"codes of int4-g128 .*\(32, 16\).*got \(9, 16\)"),
        (changed(codes=torch.zeros(32, 16)), r"codes .*int32.*float32"),
        (changed(codes=torch.zeros(16, 32).int().T), "contiguous"),
        (changed(scales=torch.ones(16, 3)), r"scales .*\(16, 2\)"),
        (changed(scales=torch.ones(16, 2).int()), "scales .*float16"),
        (changed(zeros=torch.zeros(16, 1).int()), r"zeros must be \(16, 2\)"),
        (changed(nested=torch.zeros(258)), "scales .*uint8"),
        (changed(format=PackedFormat("int3")), "code must be one of int4.*int3"),
        (changed(format=PackedFormat("int8", "tiles")), "layout one of"),
        (changed(format=PackedFormat("e4m3", "words_by_input")), "e4m3 lies in rows"),
    ],
)
def test_what_does_not_fit_is_refused(weight: PackedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=f"^packed_linear: .*{message}"):
        multiply_packed(torch.randn(1, 256), weight)


def test_rows_and_bias_that_do_not_fit_are_refused() -> None:
    weight = make("torchao int8", 4, 8).weight
    with pytest.raises(ValueError, match=r"rows must be .*float64"):
        multiply_packed(torch.randn(1, 8).double(), weight)
    with pytest.raises(ValueError, match=r"codes .*\(4, 9\)"):
        multiply_packed(torch.randn(1, 9), weight)
    with pytest.raises(ValueError, match=r"bias must be \[4\]"):
        multiply_packed(torch.randn(1, 8), weight, torch.randn(5))
