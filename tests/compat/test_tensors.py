"""Fake tensors take real parameters, and say what they share."""

from __future__ import annotations

import pytest
import torch

from compiled_llm.compat.torch import tensors

pytestmark = pytest.mark.core


def test_fake_tensors_take_parameters_that_are_real():
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    with tensors.fake_tensors():
        out = torch.zeros(2, 3) @ weight.T
    assert out.shape == (2, 5)
    with pytest.raises(RuntimeError):
        out.tolist()


def test_fake_tensors_say_whether_they_share_memory():
    with tensors.fake_tensors():
        whole, other = torch.empty(4), torch.empty(4)
        assert tensors.storage_number(whole) == tensors.storage_number(whole[2:]) != tensors.storage_number(other)
