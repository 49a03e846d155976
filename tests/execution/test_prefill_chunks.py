"""Long prompts are computed in pieces: same tokens, same graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.prefill.packing import chunks
from compiled_llm.kvcache.table import Span
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


@pytest.mark.usefixtures("without_inductor")
def test_pieces_do_not_recompile(seed):
    wrapped = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), page_size=4, prefill_tokens=9, progress=False)
    wrapped.compiled.warmup([1, 4])
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([9], [10], [1], [27, 4], [30, 1, 1]):
            greedy(wrapped, mixed_prompts(lengths, 128, seed), 4)
    assert wrapped.compiled.graphs["prefill"] == 1


def test_pieces_hold_every_token_once_and_no_more_than_the_budget(seed):
    lengths = [5, 1, 12, 3]
    batch = []
    for number, length in enumerate(lengths):
        ids = np.arange(length) + 100 * number
        batch.append(Extension(Span(list(range(1, 9)), 10 + length), ids, ids))
    pieces = list(chunks(batch, 6, 4))
    assert [sum(len(part.ids) for part in chunk) for chunk in pieces] == [6, 6, 6, 3]
    assert np.array_equal(
        np.concatenate([part.ids for chunk in pieces for part in chunk]), np.concatenate([row.ids for row in batch])
    )
    for chunk in pieces:
        for part in chunk:
            whole = batch[part.ids[0] // 100]
            assert part.row.length == whole.row.length - whole.ids[-1] + part.ids[-1]
            assert len(part.row.pages) == -(-part.row.length // 4) or part.row is whole.row
