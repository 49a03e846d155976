"""`output_scores` and `output_logits` on the fast loop: HuggingFace's, of each step and each row, ended ones too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.huggingface.processors import output_room
from support.huggingface.pairs import pair
from support.parity import assert_account_is_empty, greedy, mixed_prompts, next_turn

BOTH = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
EARLY = list(range(30))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows that end": {"eos_token_id": EARLY},
    "penalty": {"eos_token_id": EARLY, "repetition_penalty": 1.4},
    "biases": {"eos_token_id": EARLY, "min_new_tokens": 4, "suppress_tokens": [40, 41], "sequence_bias": [[[9], 4.0]]},
}


@pytest.fixture(params=["read at once", "read a step late"])
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    late = request.param == "read a step late"
    monkeypatch.setattr(GenerateLoop, "asynchronous", property(lambda _: late))
    return pair(eos_token_id=None)


def assert_fast(model: Any, calls: int) -> None:
    assert (model.compiled.stats().generate_calls, model.compiled.stats().slow_paths) == ({"fast loop": calls}, {})


def assert_close(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_those_of_huggingface(models, name, seed):
    plain, wrapped = models
    inputs = mixed_prompts([4, 9, 1, 6], 128, seed)
    ours, theirs = (greedy(model, inputs, 25, **BOTH, **OPTIONS[name]) for model in (wrapped, plain))
    assert_fast(wrapped, 1)
    assert torch.equal(ours.sequences, theirs.sequences)
    if name != "plain":
        lengths = {(row == 0).sum().item() for row in ours.sequences[:, 9:]}
        assert len(lengths) > 1, "rows end at different steps"
    assert_close(ours.scores, theirs.scores)
    assert_close(ours.logits, theirs.logits)
    assert [value.dtype for value in ours.scores] == [torch.float32] * len(ours.scores)
    follow = [  # what ended rows have left in the cache is HuggingFace's, too
        model.generate(**next_turn(inputs, out, torch.full((4, 1), 77)), max_new_tokens=3)
        for model, out in ((wrapped, ours), (plain, theirs))
    ]
    assert torch.equal(*follow)


def test_those_of_rows_that_are_drawn(models, seed):
    plain, wrapped = models
    inputs = mixed_prompts([9, 9, 9], 128, seed)  # newer penalties ignore pads
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "do_sample": True}
    out = wrapped.generate(**inputs, **settings, **BOTH, max_new_tokens=12)
    assert_fast(wrapped, 1)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ]
    )
    ids, mask = out.sequences, torch.cat([inputs["attention_mask"], torch.ones(3, 12, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask, position_ids=positions).logits[:, 8:-1]
    for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        torch.testing.assert_close(logits, expected[:, step], atol=1e-4, rtol=0)
        torch.testing.assert_close(scores, processors(ids[:, : 9 + step], logits))
        assert bool((scores.gather(1, ids[:, 9 + step, None]) > -torch.inf).all())


class Seen:
    """A criterion that looks at the scores."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **_: Any) -> Tensor:
        assert len(scores) == len(self.scores) + 1
        self.scores.append(scores[-1].clone())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_see_those_so_far(models, seed):
    _, wrapped = models
    seen = Seen()
    options = {"stopping_criteria": StoppingCriteriaList([seen]), "repetition_penalty": 1.3}
    out = greedy(wrapped, mixed_prompts([4, 6], 128, seed), 8, **options, **BOTH)
    assert_close(out.scores, seen.scores)


def test_memory_that_is_not_there(models, seed, monkeypatch):
    """Only calls that keep scores ask for it: on a GPU the question takes longer than all else before a first token."""
    plain, wrapped = models
    monkeypatch.setattr(output_room, "free_bytes", lambda _: pytest.fail("nothing is kept"))
    inputs = mixed_prompts([4, 6], 128, seed)
    greedy(wrapped, inputs, 3)
    monkeypatch.setattr(output_room, "free_bytes", lambda _: 4 * 9 * 2 * 128 - 1)
    with pytest.raises(ValueError, match=r"9 steps of 2 rows and 128 tokens take .* give fewer rows or max_new_tokens"):
        greedy(wrapped, inputs, 9, **BOTH)
    assert len(greedy(wrapped, inputs, 8, **BOTH).scores) == 8
    ours, theirs = (greedy(model, inputs, 9, eos_token_id=EARLY, **BOTH) for model in (wrapped, plain))
    assert len(ours.scores) == len(theirs.scores)  # it may end early, and HuggingFace's loop takes memory as it goes
    del ours
    assert_account_is_empty(wrapped)
