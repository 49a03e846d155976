"""Requests of an engine whose log-probabilities are compared, bit for bit, with those of the model called alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE

Asked = tuple[list[int], SamplingParams]


def invariant(plain: PreTrainedModel, tokens: int = 4000, **options: Any) -> PreTrainedModel:
    """A model wrapped to be batch-invariant, whose prompts are computed in chunks."""
    options = {"mode": "compile", "page_size": 4, "max_batch_size": 8, "prefill_tokens": 32, **options}
    return compiled_llm.wrap(plain, kv_memory=f"{tokens} tokens", batch_invariant=True, progress=False, **options)


def some_requests(seed: int, count: int, vocabulary: int = 128, longest: int = 60, answers: int = 16) -> list[Asked]:
    """Prompts of one to several chunks, some of which begin alike, greedy or drawn, all with log-probabilities."""
    chance = random.Random(seed)
    shared = [chance.randrange(3, vocabulary) for _ in range(40)]
    found = []
    for number in range(count):
        ids = shared[: chance.choice([0, 0, 13, 32, 40])]
        ids = ids + [chance.randrange(3, vocabulary) for _ in range(chance.randint(1, longest))]
        drawn = {"temperature": 0.0} if chance.random() < 0.5 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
        scored = {"logprobs": 2, **chance.choice([{}, {"prompt_logprobs": 1}])}
        several = {"n": chance.choice([1, 1, 2])} if drawn["temperature"] else {}
        ends = {"max_tokens": chance.randint(1, answers), "ignore_eos": True}
        found.append((ids, SamplingParams(**ends, **drawn, **scored, **several)))
    return found


def answers_of(engine: Engine, asked: Sequence[Asked], seed: int, waits: float = 0.3) -> list[RequestOutput]:
    """Requests come while others run, a share ``waits`` after the first token of the one before.

    Some are cancelled; those are left out.
    """
    chance = random.Random(seed)
    handles = []
    for ids, params in asked:
        handles.append(engine.submit(ids, params, priority=chance.choice([0, 0, 1])))
        if chance.random() < waits:
            next(iter(handles[-1].tokens(0)))
        if chance.random() < 0.1:
            engine.submit(ids[::-1], params).cancel()
    return [handle.result(PATIENCE) for handle in handles]


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """`[L, V]` by a call of the model with nothing else."""
    logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def check_answers(model: PreTrainedModel, asked: Sequence[Asked], outputs: Sequence[RequestOutput]) -> int:
    """Each log-probability has the bits of the teacher-forced one; return how many there were."""
    checked = 0
    for (ids, _), output in zip(asked, outputs, strict=True):
        for answer in output.outputs:
            scores = logprobs_of(model, [*ids, *answer.token_ids])
            places = enumerate(answer.logprobs or (), len(ids) - 1)
            if output.prompt_logprobs is not None:
                places = enumerate([*output.prompt_logprobs[1:], *(answer.logprobs or ())])
            for place, given in places:
                for token, entry in given.items():
                    expected = scores[place, token].item()
                    assert entry.logprob == expected, (place, len(ids), entry.logprob - expected)
                    checked += 1
    return checked


@torch.no_grad()
def check_forwards(model: PreTrainedModel, seed: int, count: int, longest: int = 40) -> None:
    """Rows of random batches, padded on the left, have the logits of each row alone."""
    chance = random.Random(seed)
    for _ in range(count):
        rows = [
            [chance.randrange(3, model.config.vocab_size) for _ in range(chance.randint(1, longest))]
            for _ in range(chance.randint(1, model.compiled.config.max_batch_size))
        ]
        columns = max(map(len, rows))
        ids = torch.tensor([[0] * (columns - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows], device=model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for own, row in zip(logits, rows, strict=True):
            alone = model(torch.tensor([row], device=model.device), use_cache=False).logits[0]
            assert torch.equal(own[columns - len(row) :], alone), (len(rows), len(row))
