"""MiniMax-M3: queries read blocks of keys that an indexer chooses for each kv head, by index keys with their own pages.

HuggingFace counts blocks from the first column, padding included, and our rows have no padding; so its tokens are those
of each prompt by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.kinds.indexers.blocks import visible_pages
from compiled_llm.kinds.indexers.index_keys import IndexedRows
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm_ops.reference.backend import Reference
from support.compilation.passes_on_a_cpu import let_passes_run_on_a_cpu
from support.engine.random_requests import CAPTURES
from support.indexed_models import BLOCK, BLOCKS, block_model, needs_blocks
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts

pytestmark = needs_blocks

READ = BLOCKS["index_topk_blocks"] * BLOCK
"""Tokens that a query reads."""
LENGTHS = [5, 3 * READ + 5, BLOCK, BLOCK + 1, 1, 40]


def pair(seed: int, mode: Any = "eager", **options: Any) -> tuple[PreTrainedModel, Any]:
    return block_model(seed), compiled_llm.wrap(block_model(seed), mode=mode, **{**FEW_PAGES, **options})


def answer(plain: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    out: list[int] = greedy(plain, {"input_ids": torch.tensor([prompt]), "pad_token_id": 0}, new)[0].tolist()
    return out[len(prompt) :]


def check_tokens(plain: PreTrainedModel, model: Any, seed: int) -> None:
    inputs = {**mixed_prompts(LENGTHS, 128, seed), "pad_token_id": 0}
    shown = inputs["attention_mask"].bool()
    found = greedy(model, inputs, 12)[:, max(LENGTHS) :].tolist()
    assert found == [answer(plain, ids[own].tolist(), 12) for ids, own in zip(inputs["input_ids"], shown, strict=True)]
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.recompiles) == ({"fast loop": 1}, 0)
    assert_account_is_empty(model)


# ---- lists of pages


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_blocks_become_pages_of_the_row() -> None:
    rows = IndexedRows(int32(0, 0), int32(0, 1), int32(0, 1), int32(3), 4, 0, 16, block_size=8)
    blocks = torch.tensor([[[[0, -1], [1, 0]], [[2, 1], [-1, -1]]]])  # [1, K, T, n]
    assert visible_pages(blocks, rows).tolist() == [[[0, 1, -1, -1], [4, 5, 2, 3]], [[2, 3, 0, 1], [-1, -1, -1, -1]]]
    of_rows = visible_pages(blocks.transpose(0, 2), rows)  # [B, K, 1, n]
    assert torch.equal(of_rows, visible_pages(blocks, rows))


@pytest.mark.parametrize("pages", [1, 2, 3, 6])
def test_keys_fill_whole_blocks_and_as_many_as_are_chosen(pages: int) -> None:
    numbers = torch.arange(1, pages + 1, dtype=torch.int32)
    rows = IndexedRows(int32(0), int32(0), int32(0, pages), numbers, 4, 0, 24, block_size=12)
    keys = rows.extended(torch.ones(1, 1, 6), torch.zeros(8, 4, 6))
    assert keys.shape[1] % 12 == 0
    assert 4 * pages + 24 <= keys.shape[1] < 4 * pages + 24 + 12
    assert keys[0].nonzero()[:, 0].unique().tolist() == [0]


# ---- the same tokens


@pytest.mark.whole
def test_prefills_in_chunks_and_decode_by_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tokens(*pair(seed, prefill_tokens=11), seed)
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    check_tokens(*pair(seed), seed)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", CAPTURES)
def test_captured_steps_give_the_same_tokens(mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the passes for a GPU, which leave lists as they are."""
    CAPTURES[mode](monkeypatch)
    let_passes_run_on_a_cpu(monkeypatch)
    check_tokens(*pair(seed, mode), seed)


# ---- what is refused


@pytest.mark.parametrize("overrides", [{"index_n_heads": 1}, {"index_local_blocks": 0}], ids=str)
def test_other_lists_of_blocks_are_refused(overrides: dict[str, Any], seed: int) -> None:
    with pytest.raises(UnsupportedModelError, match=r"list for each kv head, with the block of the query's own token"):
        compiled_llm.wrap(block_model(seed, **overrides), mode="eager", **FEW_PAGES)


@torch.no_grad()
def test_pages_take_only_positions_that_count_a_row_s_tokens(seed: int) -> None:
    model, ids = pair(seed)[1], torch.tensor([[0] * 20 + [*range(5, 33)]])
    mask, cache = (ids > 0).long(), model.compiled.new_cache()
    with pytest.raises(ValueError, match="position_ids: those of row 0 do not count its own tokens"):
        model(ids, attention_mask=mask, past_key_values=cache)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    text, last = ids[:, :-1], ids[:, -1:]
    model(text, attention_mask=mask[:, :-1], position_ids=counted[:, :-1], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids: those of row 0 do not count its own tokens"):
        model(last, attention_mask=mask, past_key_values=cache)
    found = model(last, attention_mask=mask, position_ids=counted[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(found[0, -1], model(ids[:, 20:]).logits[0, -1], rtol=1e-4, atol=1e-4)
    model(ids, attention_mask=mask)
    assert model.compiled.stats().slow_paths == {"forward: padded_blocks": 1}
    cache.close()
    assert_account_is_empty(model)


def test_a_pool_holds_what_a_query_reads(seed: int) -> None:
    _, model = pair(seed, kv_memory="20 tokens")
    with pytest.raises(ValueError, match="kv_memory: 5 pages hold 20 tokens, and a query reads 24 in blocks of 8"):
        greedy(model, {"input_ids": torch.tensor([[5, 6]])}, 2)
    plain, least = pair(seed, kv_memory="24 tokens")
    assert greedy(least, {"input_ids": torch.tensor([[5, 6]])}, 20)[0, 2:].tolist() == answer(plain, [5, 6], 20)
