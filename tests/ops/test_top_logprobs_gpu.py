"""The kernels of log-probabilities on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops import top_logprobs
from support.gpu import needs_cuda
from support.ops.logprob_cases import check_packed, logits_of

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize("kind", ["normal", "ties", "filtered", "strided"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 49_152, 151_936, 262_145])
def test_kernels(vocabulary: int, dtype: torch.dtype, kind: str) -> None:
    logits = logits_of(kind, 64, vocabulary, dtype, "cuda")
    tokens = torch.randint(-1, vocabulary, (64,), device="cuda")
    for most in (0, 1, 5, min(20, vocabulary)):
        check_packed(top_logprobs(logits, tokens, most), logits, tokens, most)
        check_packed(top_logprobs(logits[:1], tokens[:1], most), logits[:1], tokens[:1], most)
