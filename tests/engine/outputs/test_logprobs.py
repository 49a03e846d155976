"""The engine's log-probabilities are those of HuggingFace's forward over the whole text, whatever runs beside it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.input_processing.input_processor import end_tokens
from compiled_llm.engine.logprobs.score_tokens import SampledDraws, processed, score_tokens
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Completion, Logprob, RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.streams import Token
from compiled_llm_ops import sample_tokens
from compiled_llm_ops.sampling.adjustments import Noted
from compiled_llm_ops.sampling.sampling import SampleTokens
from engine.test_engine import GREEDY, some_prompts, tiny, wrapped
from support.ops.sampling_cases import BRANCHES, EDITED, arguments, distribution, warped

MOST_COUNTED = 2**14 - 1
SATURATED = Sampling(frequency_penalty=-20 / MOST_COUNTED, output_ids=np.arange(3).repeat(MOST_COUNTED))
"""It has the tokens that it is all but sure to draw as often as any is counted: once more, and no count changes."""

ROUNDING = 5e-5
"""How far sums of float32 in other orders move single ones of the likeliest tokens; chosen ones stay within 1e-5."""


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def model(reading: None) -> PreTrainedModel:
    return wrapped(prefill_tokens=64)


def table(plain: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """``[T, V]``, how likely each token would be after each place of a text, in one forward of HuggingFace's."""
    with torch.no_grad():
        return torch.log_softmax(plain(torch.tensor([text])).logits[0].float(), dim=-1)


def check(plain: PreTrainedModel, prompt: list[int], answer: Completion, most: int) -> None:
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    expected = table(plain, prompt + answer.token_ids)[len(prompt) - 1 : -1]
    for token, entries, values in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        check_entries(entries, token, values, most)
    chosen = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    own = torch.tensor([next(iter(entries.values())).logprob for entries in answer.logprobs])
    assert float((own - chosen).square().mean().sqrt()) < 1e-5
    assert answer.cumulative_logprob == pytest.approx(float(chosen.sum()), abs=ROUNDING * len(chosen))


def check_entries(entries: dict[int, Logprob], token: int, values: torch.Tensor, most: int) -> None:
    assert next(iter(entries)) == token
    assert len(entries) - most in (0, 1)
    best = sorted((logprob for logprob, _ in entries.values()), reverse=True)[:most]
    assert best == pytest.approx(values.topk(most).values.tolist(), abs=ROUNDING)
    for other, (logprob, rank) in entries.items():
        assert logprob == pytest.approx(float(values[other]), abs=ROUNDING)
        above, below = ((values > values[other] + margin).sum().item() for margin in (ROUNDING, -ROUNDING))
        assert 1 + above <= rank <= below


def test_answers_that_are_drawn(plain, engine, seed):
    prompts = some_prompts(3, seed)
    settings = {"temperature": 1.5, "repetition_penalty": 1.3, "n": 2, "seed": seed, "max_tokens": 12}
    expected = engine.generate(prompts, SamplingParams(**settings))
    outputs = engine.generate(prompts, SamplingParams(**settings, logprobs=2, prompt_logprobs=2))
    for output, other in zip(outputs, expected, strict=True):
        check_prompt(plain, output, 2)
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in other.outputs]
        for answer in output.outputs:
            check(plain, output.prompt_token_ids, answer, 2)
            assert any(next(iter(entries.values())).rank > 1 for entries in answer.logprobs or [])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scores_that_are_drawn_from(temperature, plain, model, seed):
    """Greedy rows and drawn ones, with prompts that are computed beside them and pages that are lost meanwhile."""
    ends, prompts = [2, 5, 9, *end_tokens(plain)], some_prompts(5, seed)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3},
        {"logit_bias": {token: 3.0 - token % 5 for token in range(0, 60, 2)}, "stop_token_ids": ends, "min_tokens": 7},
        {"allowed_token_ids": list(range(3, 64)), "repetition_penalty": 1.2, "top_k": 11, "top_p": 0.9, "min_p": 0.05},
        {"logits_processors": [lambda _, logits: logits / 2], "seed": seed + 1},
        {},
    ]
    params = [
        SamplingParams(
            temperature=temperature, **{"max_tokens": 12, "seed": seed, "logprobs": 20, "ignore_eos": True, **each}
        )
        for each in settings
    ]
    with Engine(model, logprobs_mode="processed_logprobs", max_num_seqs=3) as engine:
        outputs = engine.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        raw = plain(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1].detach()
        assert len(output.token_ids) > 5
        for step, (token, entries) in enumerate(zip(output.token_ids, output.outputs[0].logprobs or [], strict=True)):
            values = huggingfaces_scores(raw[step], prompt, output.token_ids[:step], own, ends).log_softmax(dim=-1)
            assert values[token] > -math.inf
            assert next(iter(entries)) == token
            assert entries[token].logprob == pytest.approx(float(values[token]), abs=2e-5)
            for other, (logprob, _) in entries.items():
                assert logprob == pytest.approx(float(values[other]), abs=ROUNDING)


def huggingfaces_scores(
    logits: torch.Tensor, prompt: list[int], answer: list[int], params: SamplingParams, ends: list[int]
) -> torch.Tensor:
    """`[V]` scores as HuggingFace's processors make them; OpenAI's penalties follow HuggingFace's."""
    scores, text = logits[None].clone(), torch.tensor([prompt + answer])
    for processor in params.logits_processors or ():
        scores = processor(answer, scores[0])[None]
    for token, bias in (params.logit_bias or {}).items():
        scores[0, token] += bias
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(text, scores)
    times = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=scores.shape[1])
    scores = scores - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    if len(answer) < params.min_tokens:
        scores[0, ends] = -math.inf
    if params.allowed_token_ids is not None:
        barred = [token for token in range(scores.shape[1]) if token not in params.allowed_token_ids]
        scores[0, barred] = -math.inf
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)] if params.temperature else []
    warpers += [TopKLogitsWarper(params.top_k)] if params.temperature and params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.temperature and params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.temperature and params.min_p else []
    for warper in warpers:
        scores = warper(text, scores)
    return scores[0]


@pytest.mark.parametrize("settings", [BRANCHES, EDITED, [SATURATED]], ids=["filters", "adjustments", "saturated"])
def test_scores_are_those_that_tokens_were_drawn_from(settings, seed):
    """Of tables that the choice has already counted its tokens in, though some counts go no further."""
    logits = torch.randn(len(settings), 901) * 2
    given = arguments(logits, torch.randint(2**62, (len(settings),)), settings)
    draws = draws_of(given)
    sample_tokens(*given)
    for own, setting, scores in zip(logits, settings, processed(logits, draws), strict=True):
        torch.testing.assert_close(scores.double().softmax(dim=0), sampled_from(own, setting))


def draws_of(given: SampleTokens) -> SampledDraws:
    def arguments_of(logits: torch.Tensor, seeds: torch.Tensor, *places: torch.Tensor) -> SampleTokens:
        return SampleTokens(logits, seeds, *places, *given[4:])

    tables: Any = SimpleNamespace(seed=given.seeds, arguments=arguments_of)
    kinds = int(np.bitwise_or.reduce(given.adjustments.numpy()))
    return SampledDraws(given.slots, given.positions, tables, kinds, Noted.of(given, given.slots))


def sampled_from(logits: torch.Tensor, setting: Sampling) -> torch.Tensor:
    return distribution(logits, setting) if setting.temperature else warped(logits, setting).double().softmax(dim=0)


@pytest.mark.parametrize("drawn", [False, True])
def test_many_rows_are_computed_some_at_a_time(drawn, monkeypatch, seed):
    logits = torch.randn(len(EDITED), 500)
    given = arguments(logits, torch.randint(2**62, (len(EDITED),)), EDITED)
    draws = draws_of(given) if drawn else None
    tokens = sample_tokens(*given)
    whole = score_tokens(logits, tokens, 3, draws)
    for module in ("compiled_llm.engine.logprobs.score_tokens", "compiled_llm_ops.sampling.logprobs"):
        monkeypatch.setattr(f"{module}._AT_ONCE", 1000)
    assert torch.equal(score_tokens(logits, tokens, 3, draws), whole)


@pytest.mark.whole
def test_tokens_leave_nothing_for_the_garbage_collector():
    """A full collection stops the loop for tenths of a second: whatever it looks at is not made token by token."""
    prompts = [list(range(3, 103))] * 8
    with Engine(wrapped()) as engine:
        _, few, many = (tracked_after(engine, prompts, tokens) for tokens in (2, 2, 18))
    assert few < 100 * len(prompts) / 2  # some for each prompt
    assert many - few < 16 * len(prompts) / 2  # and for each step


def tracked_after(engine: Engine, prompts: list[list[int]], tokens: int) -> int:
    """Return how many objects more the collector looks at, while the answers are held."""
    params = SamplingParams(**GREEDY, max_tokens=tokens, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    gc.collect()
    gc.disable()  # or it takes part of them out of the count
    try:
        before = len(gc.get_objects())
        outputs = engine.generate(prompts, params)
        assert sum(len(output.outputs[0].logprobs or ()) for output in outputs) == tokens * len(prompts)
        return len(gc.get_objects()) - before
    finally:
        gc.enable()


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("beside", [0, 20])
def test_a_kept_answer_keeps_its_own_alone(beside):
    """Not what its steps have computed of all rows, with as many tokens as another one wants."""
    prompt = list(range(3, 9))
    own, other = (
        SamplingParams(**GREEDY, max_tokens=60, ignore_eos=True, logprobs=logprobs) for logprobs in (2, beside)
    )
    with Engine(wrapped()) as engine:
        alone = engine.generate(prompt, own)[0]
        kept = engine.generate([prompt] * 8, [other] * 3 + [own] + [other] * 4)[3]
    assert kept.token_ids == alone.token_ids
    assert held_bytes(kept) <= 1.1 * held_bytes(alone)


def held_bytes(kept: object) -> int:
    """Return how many bytes of numbers an object keeps alive."""
    found, left, nbytes = {id(kept)}, [kept], 0
    while left:
        each = left.pop()
        if isinstance(each, np.ndarray):
            nbytes += (each if each.base is None else each.base).nbytes
        elif isinstance(each, bytes | bytearray):
            nbytes += len(each)
        for inner in gc.get_referents(each):
            if id(inner) not in found and not isinstance(inner, type | ModuleType | FunctionType):
                found.add(id(inner))
                left.append(inner)
    return nbytes


# ---- as they come


def test_tokens_come_with_them(engine, seed):
    prompts = some_prompts(3, seed)
    settings = SamplingParams(temperature=1.0, seed=seed, n=2, max_tokens=9, ignore_eos=True, logprobs=3)

    def check_streamed(handle: RequestHandle, streamed: list[list[Token]]) -> None:
        for answer, tokens in zip(handle.result().outputs, streamed, strict=True):
            assert answer.token_ids == [token.id for token in tokens]
            assert list(answer.logprobs or []) == [token.logprobs for token in tokens]

    async def read(prompt: list[int]) -> None:
        handle = engine.submit(prompt, settings)
        first = [token async for token in handle.tokens(0)]
        check_streamed(handle, [first, [token async for token in handle.tokens(1)]])

    async def read_all() -> None:
        await asyncio.gather(*map(read, prompts))

    asyncio.run(read_all())
    handle = engine.submit(prompts[0], settings)
    check_streamed(handle, [list(handle.tokens(index)) for index in range(2)])
    with pytest.raises(ValueError, match=r"use tokens\(index\)"):
        handle.tokens()
    (plain_token,) = engine.submit(prompts[0], SamplingParams(**GREEDY, max_tokens=1)).tokens()
    assert plain_token.logprobs is None


# ---- of prompts


def check_prompt(plain: PreTrainedModel, output: RequestOutput, most: int) -> None:
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None
    assert (len(found), found[0]) == (len(prompt), None)
    for token, entries, values in zip(prompt[1:], found[1:], table(plain, prompt)[:-1], strict=True):
        assert entries is not None
        check_entries(entries, token, values, most)


def test_answers_and_prompts_are_scored_in_chunks(plain, engine, seed, monkeypatch):
    monkeypatch.setattr("compiled_llm.engine.steps.scheduler._APART", 20)
    prompts = [*some_prompts(11, seed, longest=150), [9]]  # chunks inside prompts, page boundaries
    wants = [((None, 0, 3, 20)[n % 4], (None, 0, 5)[n % 3]) for n in range(12)]
    params = [SamplingParams(**GREEDY, max_tokens=16, logprobs=most, prompt_logprobs=first) for most, first in wants]
    scored = [prompt for prompt, (_, first) in zip(prompts, wants, strict=True) if first is not None]
    plain_answers = engine.generate(prompts, SamplingParams(**GREEDY, max_tokens=16))
    for knows_scores in (False, True):  # whatever the prefix cache has of them
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain_answers]
        for (most, first), output in zip(wants, outputs, strict=True):
            (answer,) = output.outputs
            if most is None:
                assert answer.logprobs is answer.cumulative_logprob is None
            else:
                check(plain, output.prompt_token_ids, answer, most)
            if first is None:
                assert output.prompt_logprobs is None
            else:
                check_prompt(plain, output, first)
                # Those that begin later may take the scores of those before them.
                cached = output.prompt_token_ids[: output.cached_tokens]
                others = [other for other in scored if other != output.prompt_token_ids]
                assert knows_scores or any(other[: len(cached)] == cached for other in others)
    assert any(output.cached_tokens for output in outputs if output.prompt_logprobs is not None)


def test_prompts_that_lose_their_pages_while_they_are_scored(plain, model, seed, monkeypatch):
    plans, decoding = itertools.count(), Scheduler._decoding_within_pages

    def out_of_pages(scheduler: Scheduler) -> list[Request]:
        if next(plans) in (2, 5, 9, 14, 22) and scheduler.running:
            scheduler.preempt()
        return decoding(scheduler)

    monkeypatch.setattr("compiled_llm.engine.steps.scheduler._APART", 16)
    monkeypatch.setattr(Scheduler, "_decoding_within_pages", out_of_pages)
    prompts = [prompt * 3 for prompt in some_prompts(3, seed, longest=60)]
    with Engine(model) as engine:
        outputs = engine.generate(prompts, SamplingParams(**GREEDY, max_tokens=9, logprobs=2, prompt_logprobs=3))
        assert engine.stats().preemptions > 2
    for output in outputs:
        check_prompt(plain, output, 3)
        check(plain, output.prompt_token_ids, output.outputs[0], 2)
