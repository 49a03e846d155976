"""Log-probabilities of tokens that a request names are HuggingFace's, whatever is drawn and whatever runs beside it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.logprobs.score_tokens import ScoredTokens, score_tokens
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.requests.outputs import Completion
from compiled_llm.requests.sampling_params import SamplingParams
from engine.test_engine import GREEDY, some_prompts, tiny, wrapped

ROUNDING = 5e-5


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def model(reading: None) -> PreTrainedModel:
    return wrapped(prefill_tokens=64)


def named_by(draw: random.Random) -> list[int]:
    return draw.sample(range(128), draw.choice([1, 2, 7, 128]))


def check(plain: PreTrainedModel, prompt: list[int], answer: Completion, named: Sequence[int]) -> None:
    """Check an answer's entries: its own token's, then those that are named, in their order."""
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1].float()
    assert answer.logprobs is not None
    for token, entries, scores in zip(answer.token_ids, answer.logprobs, logits.log_softmax(dim=-1), strict=True):
        assert list(entries) == [token, *(other for other in named if other != token)]
        for other, (logprob, rank) in entries.items():
            assert logprob == pytest.approx(float(scores[other]), abs=ROUNDING)
            above, below = ((scores > scores[other] + margin).sum().item() for margin in (ROUNDING, -ROUNDING))
            assert 1 + above <= rank <= below


def test_named_tokens_beside_others_in_any_batch(plain, model, seed, monkeypatch):
    """Greedy and drawn, with barred tokens, with cached prefixes and after lost pages; others want the likeliest."""
    plans, decoding, draw = itertools.count(), Scheduler._decoding_within_pages, random.Random(seed)

    def out_of_pages(scheduler: Scheduler) -> list[Request]:
        if next(plans) in (3, 8, 15) and scheduler.running:
            scheduler.preempt()
        return decoding(scheduler)

    monkeypatch.setattr(Scheduler, "_decoding_within_pages", out_of_pages)
    prompts = some_prompts(9, seed)
    kinds: list[dict[str, Any]] = [GREEDY, {"seed": seed, "n": 2}, {"seed": seed, "allowed_token_ids": [5, 9, 70]}]
    settings = [{**kinds[n % 3], "max_tokens": n % 4 + 1, "ignore_eos": True} for n in range(9)]
    named = [None if n == 4 else named_by(draw) for n in range(9)]
    params = [
        SamplingParams(**own, logprob_token_ids=names, logprobs=3 if names is None else None)
        for own, names in zip(settings, named, strict=True)
    ]
    without = [SamplingParams(**own) for own in settings]
    with Engine(model) as engine:
        expected = engine.generate(prompts, without)
        for _ in range(2):  # whatever the prefix cache has
            outputs = engine.generate(prompts, params)
            for output, other, names in zip(outputs, expected, named, strict=True):
                assert [each.token_ids for each in output.outputs] == [each.token_ids for each in other.outputs]
                for answer in output.outputs if names is not None else ():
                    check(plain, output.prompt_token_ids, answer, names)
            assert outputs[4].outputs[0].logprobs is not None
            assert {len(entries) for entries in outputs[4].outputs[0].logprobs} <= {3, 4}
        assert engine.stats().preemptions > 1
        assert any(output.cached_tokens for output in outputs)


def test_of_what_tokens_are_drawn_from(plain, model, seed):
    """With ``processed_logprobs``, a named token that is barred has none, and temperatures count."""
    (prompt,) = some_prompts(1, seed)
    settings = {"temperature": 0.5, "seed": seed, "allowed_token_ids": [5, 9, 70], "max_tokens": 1}
    with Engine(model, logprobs_mode="processed_logprobs") as engine:
        (output,) = engine.generate([prompt], SamplingParams(**settings, logprob_token_ids=[9, 8, 5]))
    (entries,) = output.outputs[0].logprobs or ()
    with torch.no_grad():
        logits = plain(torch.tensor([prompt])).logits[0, -1].float()
    expected = (logits[[5, 9, 70]] / 0.5).log_softmax(dim=-1)
    assert entries[8].logprob == -math.inf
    assert [entries[5].logprob, entries[9].logprob] == pytest.approx(expected[:2].tolist(), abs=ROUNDING)


def test_tokens_that_are_as_likely_have_one_rank() -> None:
    logits, named = torch.tensor([[0.0, 1.0, 1.0, -1.0]]), torch.tensor([[3, 2, 1, -1]])
    scored = ScoredTokens.unpacked(score_tokens(logits, torch.tensor([0]), named).numpy(), 1)
    assert scored.ranks.tolist() == [3]
    assert scored.others.tolist() == [[4, 1, 1, 3]]
    assert scored.values[0].tolist() == pytest.approx(logits.log_softmax(-1)[0, [3, 2, 1, 0]].tolist())
