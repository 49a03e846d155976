"""The kernels of log-probabilities, under Triton's interpreter; `test_top_logprobs_gpu.py` runs them on a GPU."""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops import top_logprobs
from compiled_llm_ops.contracts import TopLogprobs
from support.ops.compiling import compiled
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.logprob_cases import check_packed, logits_of

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

KINDS = ["normal", "ties", "filtered", "strided"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_pytorch(kind: str, dtype: torch.dtype, seed: int) -> None:
    logits, tokens = logits_of(kind, 5, 700, dtype), torch.tensor([0, 699, 5, -1, 44])
    for num_logprobs in (0, 1, 20, 700):
        check_packed(top_logprobs(logits, tokens, num_logprobs), logits, tokens, num_logprobs)


@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("dtype", "tiles"), [("bf16", 2048), ("fp32", 1)])
def test_kernels_compile_without_a_gpu(dtype: str, tiles: int) -> None:
    from compiled_llm_ops.kernels import logprobs as kernels

    numbers = dict.fromkeys(("stride", "vocabulary", "tiles", "spans", "num_logprobs"), "i32")
    types = {"logits": f"*{dtype}", "tokens": "*i64", "likelier": "*i32", "packed": "*i32", **numbers}
    for kernel, constants in (
        (kernels._summarise_for_logprobs, {}),
        (kernels._take_likeliest, {"padded_tiles": tiles, "padded_spans": max(1, tiles // 32)}),
    ):
        compiled(kernel, constants, {**dict.fromkeys(kernel.arg_names, "*fp32"), **types})


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4225, *(pytest.param(one, marks=pytest.mark.whole) for one in (128, 9001))])
def test_kernels(vocabulary: int, dtype: torch.dtype, kind: str, seed: int) -> None:
    from compiled_llm_ops.kernels import logprobs as kernels

    logits, tokens = logits_of(kind, 3, vocabulary, dtype), torch.tensor([0, vocabulary - 1, -1])
    for num_logprobs in (0, min(7, vocabulary)):
        check_packed(kernels.top_logprobs(TopLogprobs(logits, tokens, num_logprobs)), logits, tokens, num_logprobs)
