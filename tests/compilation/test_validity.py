"""What the program in a CUDA graph assumes is checked: its guards hold as long as a call would run the same code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from compiled_llm.compat.torch.dynamo import own_copy
from compiled_llm.compilation.graphs.validity import Guards

pytestmark = pytest.mark.core


def scaled(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return inputs[0] * model.factor + (1.0 if model.training else 0.0)


@pytest.fixture
def guarded() -> tuple[nn.Module, Guards, Callable[..., torch.Tensor]]:
    model = nn.Module()
    model.factor = 2.0
    model.eval()
    function = own_copy(scaled)
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    inputs = (torch.ones(3),)
    with torch.no_grad():
        compiled(model, inputs)
        guards = Guards(function, {"model": model, "inputs": inputs})
        guards.find()
        return model, guards, compiled


def test_guards_hold_until_an_attribute_or_the_grad_mode_changes(guarded) -> None:
    model, guards, compiled = guarded
    with torch.no_grad():
        assert guards.valid()
        model.factor = 3.0
        assert not guards.valid()
        model.factor = 2.0
        assert guards.valid()
        model.train()
        assert not guards.valid()
        model.eval()
    assert not guards.valid()
    with torch.no_grad():
        model.factor = 3.0
        compiled(model, (torch.ones(3),))  # those of the recording stay when another graph is compiled
        assert not guards.valid()
        model.factor = 2.0
        assert guards.valid()


def test_arguments_that_nothing_was_compiled_for_are_named() -> None:
    function = own_copy(scaled)
    guards = Guards(function, {"model": nn.Module(), "inputs": ()})
    with pytest.raises(RuntimeError, match="scaled was not compiled for these arguments"):
        guards.find()
