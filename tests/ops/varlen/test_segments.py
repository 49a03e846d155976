"""Attention inside segments: on the CPU against dense attention, and PyTorch's private ops by which CUDA attends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import segment_attention

pytestmark = pytest.mark.core


def states(tokens: int, seed: int, heads: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, tokens, heads, size, generator=torch.Generator().manual_seed(seed))
    return query, key, value


def of(starts: list[int]) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def dense(query: Tensor, key: Tensor, value: Tensor, starts: list[int], scale: float) -> Tensor:
    segment = torch.bucketize(torch.arange(len(query)), torch.tensor(starts[1:]), right=True)
    seen = segment[:, None] == segment
    logits = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), value)


@pytest.mark.parametrize("starts", [[0, 9], [0, 3, 6, 6, 8, 9], [0, 0, 4, 9, 9], [0, 1, 2, 3, 9]])
def test_tokens_attend_to_their_own_segment(starts: list[int], seed: int) -> None:
    given = states(9, seed)
    torch.testing.assert_close(segment_attention(*given, of(starts), 0.3), dense(*given, starts, 0.3))


def test_it_compiles_whole_and_once_for_all_shapes(seed: int) -> None:
    compiled = torch.compile(
        lambda *args: segment_attention(*args) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    no_guards_on_equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(error_on_recompile=True), no_guards_on_equal_sizes:
        for starts in ([0, 3, 8, 9], [0, 5, 7], [0, 4, 4, 6, 11]):
            given = (*states(starts[-1], seed), of(starts), 0.3)
            torch.testing.assert_close(compiled(*given), segment_attention(*given) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4)}, "must be"),
        ({"key": torch.zeros(5, 2, 8).half()}, r"torch\.float16"),
        ({"value": torch.zeros(4, 2, 8)}, r"\(4, 2, 8\)"),
        ({"starts": torch.zeros(2)}, "starts must be int32"),
        ({"starts": torch.zeros(0, dtype=torch.int32)}, r"\[N \+ 1\]"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, Any], message: str) -> None:
    names = ("query", "key", "value", "starts", "scale")
    arguments = dict(zip(names, (*states(5, 0), of([0, 5]), 0.3), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        segment_attention(**arguments)


def test_pytorch_has_the_private_ops_by_which_cuda_attends() -> None:
    """Without one, images cannot be encoded in steps on CUDA; ends when ``varlen_attn`` takes float32, too."""
    flash = torch.ops.aten._flash_attention_forward.default._schema
    efficient = torch.ops.aten._efficient_attention_forward.default._schema
    assert [own.name for own in flash.arguments][:11] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask", "scale"),
    ]
    assert [own.name for own in efficient.arguments][:12] == [
        *("query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("dropout_p", "custom_mask_type", "compute_log_sumexp", "scale"),
    ]
