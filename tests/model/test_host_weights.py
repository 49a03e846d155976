"""Weights that went to host memory lie as before when they come back; on a CPU both are host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiled_llm.model.weights import host_weights
from compiled_llm.model.weights.fused_weights import FusedWeights, is_one
from compiled_llm.model.weights.host_weights import HostWeights
from support.fused_heads import Heads, fuse, storages

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_what_lies_side_by_side_does_so_again(seed):
    model = Heads(bias=True)
    weights: FusedWeights = fuse(model)
    groups = list(weights.groups)
    assert groups
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = storages(model)
    for _ in range(2):
        away = HostWeights(model, CPU)
        away.come_back(model)
    assert set(before).isdisjoint(storages(model))
    assert all(is_one(stack) for group in groups for stack in weights.stacks(group))
    assert weights.restore()
    assert weights.groups == groups
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, values[name], rtol=0, atol=0)


def test_views_ties_and_types_stay(seed):
    model = nn.Module()
    model.whole = nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    model.tied = model.whole
    model.register_buffer("part", model.whole.detach()[2:4].t())
    model.empty = nn.Parameter(torch.zeros(0), requires_grad=False)
    HostWeights(model, CPU).come_back(model)
    assert model.tied is model.whole
    assert model.part.untyped_storage().data_ptr() == model.whole.untyped_storage().data_ptr()
    torch.testing.assert_close(model.part, model.whole.detach()[2:4].t())
    assert (model.whole.dtype, model.whole.requires_grad, model.empty.requires_grad) == (torch.bfloat16, True, False)


def test_without_memory_nothing_moves(monkeypatch):
    model, copied, left = Heads(), host_weights._copied, [2]

    def copy(*args):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("planted")
        return copied(*args)

    before = storages(model)
    monkeypatch.setattr(host_weights, "_copied", copy)
    with pytest.raises(torch.OutOfMemoryError):
        HostWeights(model, CPU)
    assert storages(model) == before


def test_what_was_made_in_inference_mode_is_named():
    model = nn.Module()
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(3))
    with pytest.raises(ValueError, match="scale is a tensor of inference mode"):
        HostWeights(model, CPU)
