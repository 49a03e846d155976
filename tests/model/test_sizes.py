"""Sizes that are read of a model: nothing of it runs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from compiled_llm.model.sizes import logits_width
from support.packed_layers import PACK, bnb_nf4
from support.tiny_models import tiny_llama

VOCABULARY = 128


def with_head(change: Callable[[nn.Linear], nn.Module]) -> Any:
    model: Any = tiny_llama(num_hidden_layers=1)
    model.set_output_embeddings(change(model.lm_head))
    return model


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: nn.Module, *args: Any, **options: Any) -> None:
        raise AssertionError(f"a {type(self).__name__} was called")

    monkeypatch.setattr(nn.Module, "__call__", refuse)


@pytest.mark.parametrize("pack", [pack for _, pack in PACK.values()], ids=[*PACK])
def test_a_packed_head_says_how_many_logits_there_are(pack: Callable[[nn.Linear], nn.Module]) -> None:
    assert logits_width(with_head(pack)) == VOCABULARY


def test_a_weight_with_more_rows_than_the_config_says_counts() -> None:
    def longer(head: nn.Linear) -> nn.Module:
        head.weight = nn.Parameter(torch.zeros(VOCABULARY + 8, head.in_features))
        return head

    assert logits_width(with_head(longer)) == VOCABULARY + 8


@pytest.mark.parametrize("pack", [lambda head: head, bnb_nf4], ids=["plain", "packed"])
def test_a_head_under_an_adapter_has_as_many(pack: Callable[[nn.Linear], nn.Module]) -> None:
    model = with_head(pack)
    get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
    assert logits_width(model) == VOCABULARY


class Head(nn.Module):
    """Has neither a weight nor sizes of its own."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Any:
        return self.inner(states)


def test_of_a_head_that_does_not_tell_the_config_does() -> None:
    assert logits_width(with_head(Head)) == VOCABULARY
