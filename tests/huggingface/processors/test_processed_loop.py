"""Processors between steps: what they are shown, when tokens are read, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    Cache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)

from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.state.staging import Readback
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.kvcache.row import Row
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy, mixed_prompts, next_turn

pytestmark = pytest.mark.core

EARLY = {"eos_token_id": list(range(3, 120, 4)), "pad_token_id": 1}


class Noted(LogitsProcessor):
    """Changes scores in place, and notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.is_contiguous()
        self.shown.append((input_ids.clone(), scores.clone()))
        scores[:, ::2] -= 3
        return scores


class SecondRowEnds(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([False, input_ids.shape[1] > 12, False])


CALLS: dict[str, dict[str, Any]] = {
    "to the end": {},
    "rows that end early": EARLY,
    "a criterion of one's own": {**EARLY, "stopping_criteria": [SecondRowEnds()]},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_processors_are_shown_what_huggingfaces_loop_shows_them(options, plain, model, reading, seed):
    """Exactly these steps, and none after the end."""
    inputs, shown, answers = mixed_prompts([4, 9, 6], 128, seed), [], []
    for own in (plain, model):
        noted = Noted()
        answers.append(greedy(own, inputs, 20, logits_processor=LogitsProcessorList([noted]), **options))
        shown.append(noted.shown)
    assert torch.equal(*answers)
    assert len(shown[0]) == len(shown[1])
    for (ids, scores), (our_ids, ours) in zip(*shown, strict=True):
        assert torch.equal(our_ids, ids)
        torch.testing.assert_close(ours, scores, atol=1e-4, rtol=0)
    assert_account_is_empty(model)


def test_tokens_are_read_while_the_next_forward_runs(model, monkeypatch, seed):
    happened = note_calls(monkeypatch, GenerateLoop, "decode", lambda *_, **__: "launch")
    note_calls(monkeypatch, Readback, "result", lambda *_: happened.append("read"))
    for late in (False, True):
        monkeypatch.setattr(GenerateLoop, "asynchronous", property(lambda _, late=late: late))
        happened.clear()
        greedy(model, mixed_prompts([4, 9, 6], 128, seed), 4, logits_processor=[Noted()])
        steps = ["launch", "read"] * 3 + ["read"] if late else ["read"] + ["launch", "read"] * 3
        assert happened == steps


def test_a_conversation_goes_on_from_what_a_step_too_many_left(plain, model, reading, seed):
    """The next forward is launched before it is known that all rows have ended."""
    texts = []
    for own in (plain, model):
        given: dict[str, Any] = dict(mixed_prompts([4, 9, 6], 128, seed))
        for _ in range(3):
            out = greedy(own, given, 20, logits_processor=[Noted()], return_dict_in_generate=True, **EARLY)
            assert all(row.exact_length == stored.sum() for row, stored in _rows(out.past_key_values))
            assert out.sequences.shape[1] < given["input_ids"].shape[1] + 20
            given = next_turn(given, out, torch.tensor([[7, 8]] * 3))
            del out
        texts.append(given["input_ids"])
        del given
    assert torch.equal(*texts)
    assert_account_is_empty(model)


def _rows(cache: Cache) -> Iterator[tuple[Row, NDArray[np.bool_]]]:
    return zip(cache.generate_loop.rows, cache.stored, strict=True) if isinstance(cache, PagedCache) else iter(())


def test_a_processor_may_call_the_model(plain, model, reading, seed):
    """Whatever it runs, the step that was launched goes on."""

    class Asking(LogitsProcessor):
        def __init__(self, asked: PreTrainedModel) -> None:
            self.model = asked

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            next_but_one = greedy(self.model, {"input_ids": input_ids[:, -2:]}, 2)[:, -1:]
            with torch.no_grad():
                return scores.scatter_add(1, next_but_one, self.model(input_ids).logits[:, -1].amax(1, keepdim=True))

    ids = mixed_prompts([5, 5, 5], 128, seed)["input_ids"]
    answers = [greedy(own, {"input_ids": ids}, 9, logits_processor=[Asking(own)]) for own in (plain, model)]
    assert torch.equal(*answers)
    assert_account_is_empty(model)


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_watermarks_are_huggingfaces(scheme, plain, model, reading, seed, monkeypatch):
    """Whichever the host can seed, it does: its texts lie in one buffer, those of the device in a new one a step."""
    inputs = mixed_prompts([4, 9, 6], 128, seed)
    config = WatermarkingConfig(seeding_scheme=scheme, greenlist_ratio=0.5, bias=3.0)
    expected = greedy(plain, inputs, 8, watermarking_config=config, **EARLY)
    of_text = lambda self, text: text.untyped_storage().data_ptr()  # noqa: E731
    buffers = note_calls(monkeypatch, WatermarkLogitsProcessor, "set_seed", of_text)
    assert torch.equal(greedy(model, inputs, 8, watermarking_config=config, **EARLY), expected)
    assert len(buffers) > 3
    assert (len(set(buffers)) == 1) == (scheme == "lefthash")
