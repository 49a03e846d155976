"""Attention of new rows over their own tokens: on the CPU against dense attention, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_ops import ragged_attention, ragged_attention_lse
from support.ops.latent_rows import RAGGED, RaggedRows

pytestmark = pytest.mark.core


@pytest.mark.parametrize("mix", RAGGED)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_rows_attend_to_their_own_tokens(mix: str, key_heads: int, seed: int) -> None:
    rows = RaggedRows(RAGGED[mix], key_heads=key_heads, seed=seed)
    out, lse = ragged_attention_lse(*rows.arguments())
    torch.testing.assert_close((out, lse), rows.expected(), rtol=1e-4, atol=1e-5)
    assert torch.equal(out, ragged_attention(*rows.arguments()))


def test_it_compiles_whole_and_once_for_all_shapes(seed: int) -> None:
    compiled = torch.compile(
        lambda *args: ragged_attention(*args) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    no_guards_on_equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(error_on_recompile=True), no_guards_on_equal_sizes:
        for counts in ([3, 5, 2], [7, 9]):
            rows = RaggedRows(counts, seed=seed)
            torch.testing.assert_close(compiled(*rows.arguments()), ragged_attention(*rows.arguments()) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4)}, "must be"),
        ({"key": torch.zeros(5, 4, 48).half()}, r"torch\.float16"),
        ({"key": torch.zeros(4, 4, 48)}, r"\(4, 4, 48\)"),
        ({"key": torch.zeros(5, 3, 48), "value": torch.zeros(5, 3, 32)}, "4 query heads of size 48 do not fit 3 key"),
        ({"key": torch.zeros(5, 4, 40)}, "heads of size 40"),
        ({"value": torch.zeros(5, 2, 32)}, "2 value heads"),
        ({"qo_indptr": torch.zeros(2)}, "qo_indptr must be int32"),
        ({"qo_indptr": torch.zeros(0, dtype=torch.int32)}, r"\[B \+ 1\]"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, Any], message: str) -> None:
    names = ("query", "key", "value", "qo_indptr", "scale")
    arguments = dict(zip(names, RaggedRows([5]).arguments(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        ragged_attention(**arguments)
