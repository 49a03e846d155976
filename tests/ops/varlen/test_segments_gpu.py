"""Attention inside segments on a GPU: the results of the CPU, captured, in all dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import segment_attention
from support.gpu import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]

STARTS = {"images": ([0, 300, 512, 512, 700], 0), "windows": ([0, 64, 128, 160, 224, 256, 256], 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64, 72, 80])
@pytest.mark.parametrize("mix", STARTS)
def test_results_are_those_of_the_cpu(mix: str, size: int, dtype: torch.dtype, seed: int) -> None:
    (begins, longest), tokens = STARTS[mix], STARTS[mix][0][-1]
    packed = torch.randn(tokens, 3, 4, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    starts, scale = torch.tensor(begins, dtype=torch.int32), size**-0.5

    def attended(states: Tensor, begins: Tensor) -> Tensor:
        query, key, value = states.unbind(1)  # of any strides
        return segment_attention(query, key, value, begins, scale, longest)

    exact = attended(packed.float(), starts)
    given = packed.cuda(), starts.cuda()
    out = attended(*given)
    assert out.is_contiguous()
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.float().cpu(), exact, rtol=tolerance, atol=tolerance)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attended(*given)
    given[0].neg_()  # of all three: the results are those of other queries and keys with the same logits, negated
    graph.replay()
    torch.testing.assert_close(captured, -out)
