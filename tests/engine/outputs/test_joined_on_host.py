"""Tensors of the host are put together byte by byte, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from compiled_llm.engine.emitted import joined_on_host


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_are_joined_as_torch_joins_them(dtype, shape, seed):
    torch.manual_seed(seed)
    for keys, lengths in ((1, [2, 1]), (3, [4, 0, 1]), (2, [1] * 7)):
        tensors = [torch.randint(0, 2, (keys, length, *shape)).to(dtype) for length in lengths]
        joined = joined_on_host(tensors)
        assert joined.is_contiguous()
        torch.testing.assert_close(joined, torch.cat(tensors, dim=1), rtol=0, atol=0)


def test_one_is_not_copied():
    alone = torch.ones(3, 2)
    assert joined_on_host([alone]) is alone
