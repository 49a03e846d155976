"""An op's tuple is its schema, and its kernels are given it whole."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import decode_attention, decode_attention_lse
from compiled_llm_ops.library import schema

pytestmark = pytest.mark.core


class Everything(NamedTuple):
    states: Tensor
    parts: list[Tensor]
    count: int
    weight: Tensor | None = None
    shift: int = -1
    factor: float = 0.5
    gated: bool = False


class Unknown(NamedTuple):
    name: complex


def test_fields_order_types_and_defaults_are_the_schema() -> None:
    text = schema("mix", Everything, writes=("weight", "states"), returns="(Tensor, Tensor)")
    assert text == (
        "mix(Tensor(b!) states, Tensor[] parts, int count, Tensor(a!)? weight=None, int shift=-1, float factor=0.5, "
        "bool gated=False) -> (Tensor, Tensor)"
    )
    parsed = torch._C.parse_schema(text)
    assert [argument.default_value for argument in parsed.arguments[3:]] == [None, -1, 0.5, False]
    assert [argument.name for argument in parsed.arguments if argument.is_write] == ["states", "weight"]


@pytest.mark.parametrize("name", ["count", "missing"])
def test_only_tensors_can_be_written(name: str) -> None:
    with pytest.raises(ValueError, match=f"mix: {name} is not a tensor"):
        schema("mix", Everything, writes=(name,))


def test_a_type_without_a_schema_is_refused() -> None:
    with pytest.raises(KeyError, match="complex"):
        schema("mix", Unknown)


def test_a_second_function_of_the_same_arguments_has_their_signature_and_its_own_result() -> None:
    first, second = (inspect.signature(function) for function in (decode_attention, decode_attention_lse))
    assert list(first.parameters.values()) == list(second.parameters.values())
    assert (first.return_annotation, second.return_annotation) == ("Tensor", "tuple[Tensor, Tensor]")
