"""Beam search and assisted decoding over pages: shared, copied when written, given back, and never compiled anew."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.page_table import PageCopy, PagePool
from compiled_llm.paged_model import PagedModel
from conftest import tiny_qwen3
from parity import assert_account_is_empty, greedy, mixed_prompts

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "1000 tokens", "max_batch_size": 8, "progress": False}


def wrapped_in(mode: str, **overrides: Any) -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(**{"eos_token_id": None, **overrides}), mode=mode, **OPTIONS)


@pytest.fixture
def plain() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=None)


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped_in("eager")


class Watched:
    """What happens to pages while a call runs."""

    def __init__(self) -> None:
        self.most_used = 0
        self.copied = 0
        self.computed: list[int] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen = Watched()
    take, copy, prefill = PagePool.take_reserved, PagedModel.copy_pages, PagedModel.prefill

    def taking(self: PagePool) -> int:
        page = take(self)
        seen.most_used = max(seen.most_used, self.account().used)
        return page

    def copying(self: PagedModel, copies: list[PageCopy]) -> None:
        seen.copied += len(copies)
        copy(self, copies)

    def prefilling(self: PagedModel, batch: Any, *args: Any) -> Any:
        seen.computed.append(sum(len(extension.ids) for extension in batch))
        return prefill(self, batch, *args)

    monkeypatch.setattr(PagePool, "take_reserved", taking)
    monkeypatch.setattr(PagedModel, "copy_pages", copying)
    monkeypatch.setattr(PagedModel, "prefill", prefilling)
    return seen


# ---- beams


@pytest.mark.parametrize("lengths", [[7], [4, 9]])
@pytest.mark.parametrize("beams", [2, 4])
def test_beams_share_the_prompt_and_copy_no_more_than_the_page_they_write(beams, lengths, plain, model, watched, seed):
    inputs, new = mixed_prompts(lengths, 128, seed), 30
    options = {"num_beams": beams, "num_return_sequences": beams, "output_scores": True}
    theirs, ours = (greedy(own, inputs, new, return_dict_in_generate=True, **options) for own in (plain, model))
    torch.testing.assert_close(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.beam_indices, theirs.beam_indices)
    assert watched.computed == [sum(lengths)]  # once, not once a beam
    assert 0 < watched.copied < (new - 1) * beams * len(lengths)
    alone = sum(-(-(length + new) // 4) for length in lengths)
    assert watched.most_used < beams * alone
    del ours
    gc.collect()
    assert_account_is_empty(model)


def test_the_cache_of_a_beam_search_is_as_long_as_huggingfaces_and_goes_on(plain, model, seed):
    inputs = mixed_prompts([4, 9], 128, seed)
    results = []
    for own in (plain, model):
        out = greedy(own, inputs, 9, num_beams=2, num_return_sequences=2, return_dict_in_generate=True)
        cache = out.past_key_values
        length = cache.get_seq_length()
        with torch.no_grad():
            mask = torch.ones(4, length + 3, dtype=torch.long)
            mask[:, :9] = inputs["attention_mask"].repeat_interleave(2, 0)
            position = mask.cumsum(1)[:, -3:] - 1
            more = torch.tensor([[5, 6, 7]] * 4)
            results.append(own(more, mask, position, past_key_values=cache).logits)
        assert length == 9 + 8
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [3, 1])
def test_more_beams_than_rows_or_pages_are_refused_before_anything_is_computed(num_beams, model, seed, watched):
    new = 20 if num_beams > 1 else 400
    inputs = mixed_prompts([4] * 3, 128, seed)
    with pytest.raises(ValueError, match=r"9 rows are more than max_batch_size=8|need \d+ pages"):
        greedy(model, inputs, new, num_beams=num_beams)
    assert watched.computed == []
    assert_account_is_empty(model)


class StopError(Exception):
    pass


def test_a_beam_search_that_raises_gives_its_pages_back(model, seed):
    def raising(batch: int, ids: Tensor) -> list[int]:
        if len(ids) > 12:
            raise StopError
        return list(range(3, 128))

    with pytest.raises(StopError):
        greedy(model, mixed_prompts([4, 9], 128, seed), 20, num_beams=3, prefix_allowed_tokens_fn=raising)
    gc.collect()
    assert_account_is_empty(model)


# ---- drafts


def test_wrong_drafts_give_their_pages_back(plain, seed, watched):
    """A draft model of other weights is mostly wrong: each round is cropped by most of what it stored."""
    model, helper = wrapped_in("eager"), tiny_qwen3(seed=1, eos_token_id=None)
    helper.generation_config.num_assistant_tokens = 9
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    inputs, new = mixed_prompts([6], 128, seed), 40
    expected = greedy(plain, inputs, new)
    torch.testing.assert_close(greedy(model, inputs, new, assistant_model=helper), expected)
    assert len(watched.computed) > new // 2
    assert max(watched.computed[1:]) == 1 + 9
    assert watched.most_used <= -(-(6 + new + 9) // 4)
    assert_account_is_empty(model)


def test_right_drafts_are_taken_several_at_a_time(plain, seed, watched):
    model = wrapped_in("eager")
    helper = wrapped_in("eager")  # of the same weights
    inputs, new = mixed_prompts([6], 128, seed), 40
    expected = greedy(plain, inputs, new)
    torch.testing.assert_close(greedy(model, inputs, new, assistant_model=helper), expected)
    assert model.compiled.stats().generate_calls == {"compiled forward": 1}
    gc.collect()
    for own in (model, helper):
        assert_account_is_empty(own)


# ---- compiled


@pytest.fixture(scope="module")
def compiled() -> Iterator[PreTrainedModel]:
    model = wrapped_in("compile")
    model.compiled.warmup([1, 2, 4, 8])
    yield model
    compiled_llm.unwrap(model)


def chat(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
    for turn in range(4):
        out = greedy(
            model,
            {"input_ids": ids, "attention_mask": mask},
            5 + turn,
            past_key_values=cache,
            return_dict_in_generate=True,
        )
        cache = out.past_key_values
        ids = torch.cat([out.sequences, torch.tensor([[7, 8, 9]] * len(ids))], dim=1)
        mask = torch.cat([mask, torch.ones(len(ids), 8 + turn, dtype=torch.long)], dim=1)
    return ids


MODES = {
    "beams": lambda model, one, many: greedy(model, many, 12, num_beams=3),
    "beams of one row": lambda model, one, many: greedy(model, one, 12, num_beams=5, num_return_sequences=4),
    "sampled beams": lambda model, one, many: model.generate(**many, max_new_tokens=9, num_beams=2, do_sample=True),
    "prompt lookup": lambda model, one, many: greedy(model, one, 30, prompt_lookup_num_tokens=4),
    "draft model": lambda model, one, many: greedy(
        model, one, 30, assistant_model=tiny_qwen3(seed=1, eos_token_id=None)
    ),
    "guidance": lambda model, one, many: greedy(model, many, 8, guidance_scale=1.4),
    "chat": lambda model, one, many: chat(model, many),
    "chat of one": lambda model, one, many: chat(model, one),
    "scoring": lambda model, one, many: model(**many, use_cache=False).logits[many["attention_mask"] != 0],
    "no cache": lambda model, one, many: greedy(model, many, 6, use_cache=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_modes_compile_nothing_anew(mode, compiled, plain, seed):
    call = MODES[mode]
    before = compiled.compiled.graphs
    with torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        for lengths in ([3, 8], [5, 1]):
            one, many = mixed_prompts(lengths[:1], 128, seed), mixed_prompts(lengths, 128, seed)
            torch.manual_seed(seed)
            ours = call(compiled, one, many)
            torch.manual_seed(seed)
            theirs = call(plain, one, many)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert compiled.compiled.graphs == before
    stats = compiled.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    gc.collect()
    assert_account_is_empty(compiled)


@pytest.mark.slow
def test_a_compiled_draft_model_compiles_nothing_anew(compiled, plain, seed):
    helper = wrapped_in("compile", seed=1)
    expected = [greedy(plain, mixed_prompts([length], 128, seed), 25) for length in (6, 3)]
    inputs = mixed_prompts([6], 128, seed)
    torch.testing.assert_close(greedy(compiled, inputs, 25, assistant_model=helper), expected[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        inputs = mixed_prompts([3], 128, seed)
        torch.testing.assert_close(greedy(compiled, inputs, 25, assistant_model=helper), expected[1])
    assert helper.compiled.stats().generate_calls.keys() == {"processed loop"}
    assert helper.compiled.stats().recompiles == compiled.compiled.stats().recompiles == 0
    gc.collect()
    for own in (compiled, helper):
        assert_account_is_empty(own)
