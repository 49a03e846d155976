"""Passes over compiled graphs: applied where they should be, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from compiled_llm.passes import SkinnyProducts

pytestmark = pytest.mark.core


def code_of(function: object, *args: Tensor) -> tuple[Tensor, str]:
    torch._dynamo.reset()
    compiled = torch.compile(function, options={"post_grad_custom_pre_pass": SkinnyProducts()})  # type: ignore[call-overload]
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, *args)
    return out, code


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_with_weights_become_skinny_linear(rows, seed):
    x, weight, bias = torch.randn(rows, 24), torch.randn(16, 24), torch.randn(16)
    for function, arguments in (
        (torch.nn.functional.linear, (x, weight)),
        (torch.nn.functional.linear, (x[None], weight)),
        (torch.nn.functional.linear, (x, weight, bias)),
    ):
        out, code = code_of(function, *arguments)
        assert "compiled_llm.skinny_linear" in code
        torch.testing.assert_close(out, function(*arguments), rtol=1e-5, atol=1e-5)


def test_a_product_with_several_weights_in_one_storage_becomes_skinny_linear(seed):
    x, storage = torch.randn(3, 24), torch.randn(16, 24)

    def product(x: Tensor, first: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, torch.ops.aten.as_strided.default(first, [16, 24], [24, 1]))

    out, code = code_of(product, x, storage[:6])
    assert "compiled_llm.skinny_linear" in code
    torch.testing.assert_close(out, x @ storage.T, rtol=1e-5, atol=1e-5)


def test_other_products_are_left_alone(seed):
    x, weight = torch.randn(3, 24), torch.randn(16, 24)
    for function, arguments in (
        (torch.mm, (x, weight.T.contiguous())),
        (lambda x, y: torch.mm(x, (y * 2).T), (x, weight)),
        (torch.nn.functional.linear, (x.bfloat16(), weight.bfloat16())),
    ):
        out, code = code_of(function, *arguments)
        assert "compiled_llm.skinny_linear" not in code
        torch.testing.assert_close(out, function(*arguments))
