"""The kernels that merge results of attention, under Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops import merge_states
from support.ops.interpreting import interpreted, needs_triton
from support.ops.merge_parts import Parts


@interpreted
@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("sizes", [[3], [2, 0], [0, 0], [4, 1, 0, 3]], ids=str)
def test_kernels_merge_as_the_oracle(sizes: list[int], seed: int) -> None:
    from compiled_llm_ops.kernels.attention.merge import merge_many, merge_two

    parts = Parts(sizes, seed)
    v, s = torch.full_like(parts.v[:, 0], 7.0), torch.full_like(parts.s[:, 0], 7.0)
    merge_many(parts.v, parts.s, v, s)
    parts.check(v, s)
    if len(sizes) != 2:
        return
    for mask in (None, torch.tensor([True, False, True])):
        v, s = torch.full_like(v, 7.0), torch.full_like(s, 7.0)
        merge_two(*(part[:, at].contiguous() for at in (0, 1) for part in (parts.v, parts.s)), mask, v, s)
        expected = merge_states(parts.v, parts.s)
        for written, merged in zip((v, s), expected, strict=True):
            merged = merged.clone()
            if mask is not None:
                merged[1] = 7.0
            torch.testing.assert_close(written, merged)
