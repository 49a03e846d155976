"""Results of attention merged on a GPU: as on a CPU, and as FlashInfer does it."""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops import merge_state, merge_state_in_place, merge_states
from support.gpu import needs_cuda, seeded
from support.ops.merge_parts import Parts
from support.ops.op_cases import merge_states_cases


@pytest.mark.gpu
@needs_cuda
@seeded
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_as_flashinfer_merges(dtype: torch.dtype, seed: int) -> None:
    import flashinfer

    parts = Parts([5, 3, 9, 1], seed, hidden=0.0, dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    v, s = parts.v.cuda(), parts.s.cuda()
    merged = merge_states(v, s)
    parts.check(*merged, tolerance)
    if dtype is not torch.float32:
        wide = torch.nn.functional.pad(v, (0, 56))  # FlashInfer takes heads of 64 and more
        theirs = flashinfer.merge_states(wide, s)
        torch.testing.assert_close(theirs[0][..., :8], merged[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(theirs[1], merged[1], rtol=1e-3, atol=1e-3)
    first = v[:, 0].contiguous(), s[:, 0].contiguous()
    expected = merge_state(*first, v[:, 1], s[:, 1])
    merge_state_in_place(*first, v[:, 1], s[:, 1], torch.tensor([True, True, False], device="cuda"))
    for written, whole, old in zip(first, expected, (v[:, 0], s[:, 0]), strict=True):
        assert torch.equal(written[:2], whole[:2])
        assert torch.equal(written[2], old[2])
    for case in merge_states_cases():
        on_a_cpu, on_the_gpu = merge_states(*case), merge_states(*(tensor.cuda() for tensor in case))
        torch.testing.assert_close([part.cpu() for part in on_the_gpu], [*on_a_cpu])
