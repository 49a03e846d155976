"""`packed_linears` on the CPU: several weights beside each of them alone.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_ops import packed_linears
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight
from compiled_llm_ops.packed.linear import multiply_packed
from compiled_llm_ops.packed.tilings import can_be_together
from support.ops.packed_weights import ANYWHERE, arguments_together, make


def weights_of(name: str, outputs: tuple[int, ...] = (128, 256, 32), inputs: int = 256) -> list[PackedWeight]:
    return [make(name, count, inputs).weight for count in outputs]


@pytest.mark.core
@pytest.mark.parametrize("name", ANYWHERE)
def test_products_are_those_of_each_weight_one_after_the_other(name: str, seed: int) -> None:
    for outputs in ((24,), (40, 16), (8, 128, 48, 24)):
        weights, bias = weights_of(name, outputs), torch.randn(sum(outputs))
        for rows in (torch.randn(1, 256), torch.randn(256, 6).T, torch.randn(2, 3, 256)):
            out = packed_linears(*arguments_together(rows, weights, bias))
            check(out, rows, weights, bias)
            assert out.is_contiguous()


def test_weights_without_zeros(seed: int) -> None:
    weights, rows = [own._replace(zeros=None) for own in weights_of("GPTQ")], torch.randn(3, 256)
    out = packed_linears(*arguments_together(rows, weights))
    check(out, rows, weights, torch.zeros(416))


def check(out: torch.Tensor, rows: torch.Tensor, weights: list[PackedWeight], bias: torch.Tensor) -> None:
    expected = torch.cat([multiply_packed(rows, own) for own in weights], -1) + bias
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-5)


def refused(message: str, weights: list[PackedWeight], **changes: Any) -> None:
    names = ("rows", "codes", "scales", "zeros", "nested", "bias", "code", "layout", "group_inputs")
    given = dict(zip(names, arguments_together(torch.randn(1, 256), weights), strict=True))
    with pytest.raises(ValueError, match=f"^packed_linears: .*{message}"):
        packed_linears(**{**given, **changes})


def test_what_does_not_fit_is_refused() -> None:
    weights = weights_of("GPTQ", (16, 16))
    refused("of as many weights.*got 2, 1, 2, 0", weights, scales=[weights[0].scales])
    refused("of as many weights.*got 2, 2, 1, 0", weights, zeros=[weights[0].zeros])
    refused("of as many weights.*got 2, 2, 2, 1", weights, nested=[torch.zeros(258)])
    refused("one at least.*got 0, 0, 0, 0", weights, codes=[], scales=[], zeros=[])
    refused("words_by_output; got .*'tiles'", weights, layout="tiles")
    refused(r"bias must be \[32\]", weights, bias=torch.randn(16))
    refused("rows must be .*float64", weights, rows=torch.randn(1, 256).double())
    refused(r"codes .*\(40, 16\).*got \(32, 16\)", weights, rows=torch.randn(1, 320))
    refused(r"scales .*\(16, 2\)", weights, scales=[weights[0].scales, torch.ones(16, 3)])


def begun_later(codes: torch.Tensor) -> torch.Tensor:
    """Where no kernel can read them in blocks."""
    return torch.empty(codes.numel() + 1, dtype=codes.dtype)[1:].view_as(codes)


@pytest.mark.parametrize("name", ANYWHERE)
def test_who_can_be_one_launch(name: str) -> None:
    first, second, third = weights_of(name)
    assert can_be_together([first], torch.bfloat16)
    assert can_be_together([first, second, third], torch.bfloat16)
    assert not can_be_together([third, first], torch.bfloat16), "a tile would have outputs of both"
    assert not can_be_together([first, first, second, third], torch.bfloat16)
    assert not can_be_together([first, second], torch.float32)
    for other in (
        make(name, 128, 512).weight,
        second._replace(zeros=second.scales if second.zeros is None else None),
        second._replace(scales=second.scales.half()),
        second._replace(scales=second.scales.repeat_interleave(2, 0)[::2].repeat(1, 2)[:, ::2]),
        second._replace(nested=torch.zeros(1) if second.nested is None else None),
        second._replace(format=second.format._replace(inputs=0)),
        second._replace(codes=begun_later(second.codes)),
    ):
        assert not can_be_together([first, other], torch.bfloat16)
    tiled = first._replace(format=PackedFormat("uint4", "tiles", 1, 128))
    assert not can_be_together([tiled, tiled], torch.bfloat16)
