"""What a trial run writes into a model's tensors is taken back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiled_llm.model.restore import restored

pytestmark = pytest.mark.core


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_in_attributes_containers_and_buffers_are_restored(inference):
    model = nn.Module()
    with torch.inference_mode(inference):
        model.register_buffer("buffer", torch.ones(2))
        model.kept, model.listed, model.named = torch.ones(2), [torch.ones(2)], {"a": torch.ones(2)}
    tensors = [model.buffer, model.kept, model.listed[0], model.named["a"]]
    with restored(model):
        for tensor in tensors:
            with torch.inference_mode(inference):
                tensor.zero_()
        model.kept = torch.zeros(3)
        model.listed.append(torch.zeros(3))
    found = [model.buffer, model.kept, *model.listed, model.named["a"]]
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in tensors]
    assert all(tensor.tolist() == [1.0, 1.0] for tensor in tensors)
