"""Requests from several threads at random times, too few pages, and calls of the model beside them; twice.

Pages are NaN on the device as soon as they are free.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps import scheduler
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.thread.handle import RequestHandle
from compiled_llm.execution.state.staging import Readback
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine import tiny_engines
from support.in_threads import start
from support.parity import alone, assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

ENDS = [2, 5, 31, 77]


def tiny(windows: bool) -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=ENDS, **(WINDOWS if windows else {}))


def wrapped(windows: bool, tokens: int) -> PreTrainedModel:
    return tiny_engines.wrapped(tokens, tiny(windows), max_batch_size=8, page_size=16, prefill_tokens=48)


def poison_free_pages(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model_runner = model.compiled.model_runner()
    pool = model_runner.pool

    def then_poison(name: str) -> None:
        original = getattr(pool, name)

        def changes(pages: Iterable[int]) -> Any:
            result = original(pages := list(pages))
            free = [page for page in pages if pool._owners[page] == 0]
            for layer in model_runner.state.pages if free else ():
                layer[free] = torch.nan
            return result

        monkeypatch.setattr(pool, name, changes)

    then_poison("_disown")
    then_poison("uncache")


def some_requests(draw: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    stems = [[draw.randrange(3, 128) for _ in range(length)] for length in (0, 0, 16, 33, 48)]
    requests = []
    for number in range(count):
        prompt = draw.choice(stems) + [draw.randrange(3, 128) for _ in range(draw.randint(1, 60))]
        sampled = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": number}
        if number % 2:  # once they have been preempted, rows count, and know how long they are, as before
            sampled |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {3: 2.0}, "min_tokens": 1}
        how: dict[str, Any] = sampled if draw.random() < 0.3 else {"temperature": 0.0}
        requests.append((prompt, SamplingParams(max_tokens=draw.randint(1, 40), n=draw.choice([1, 1, 1, 3]), **how)))
    return requests


def expected_answers(windows: bool, requests: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    """What HuggingFace's generate gives to each alone if it is greedy, and the engine if it is sampled."""
    plain, answers = tiny(windows), []
    with Engine(wrapped(windows, 4000), prefix_cache=False) as engine:
        for prompt, params in requests:
            if params.temperature == 0:
                answers.append([alone(plain, prompt, params.max_tokens or 1)] * params.n)
            else:
                answers.append([answer.token_ids for answer in engine.generate(prompt, params)[0].outputs])
    return answers


@pytest.mark.either("windows")
@pytest.mark.parametrize("windows", [False, True], ids=["whole attention", "sliding windows"])
@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.whole)])
def test_a_crowd_gets_what_each_gets_alone(monkeypatch, one_thread, seed, count, windows):
    monkeypatch.setattr(Loop, "asynchronous", True)
    monkeypatch.setattr(scheduler, "_FIRST_GUESS", 1)  # answers are longer than that: requests are preempted
    early = random.Random(seed)
    monkeypatch.setattr(Readback, "arrived", property(lambda _: early.random() < 0.5))
    draw, model = random.Random(seed), wrapped(windows, 320)
    requests = some_requests(draw, count)
    expected = expected_answers(windows, requests)
    poison_free_pages(model, monkeypatch)

    def compare(handle: RequestHandle, wanted: list[list[int]]) -> None:
        output = handle.result(timeout=120)
        for answer, tokens in zip(output.outputs, wanted, strict=True):
            if answer.finish_reason in ("stop", "length"):
                assert answer.token_ids == tokens
            else:
                assert answer.finish_reason in ("cancelled", "timeout")
                assert answer.token_ids == tokens[: len(answer.token_ids)]

    def come_and_go(engine: Engine, numbers: list[int], draw: random.Random) -> None:
        handles = []
        for number in numbers:
            prompt, params = requests[number]
            timeout = 0.05 if draw.random() < 0.1 else None
            handles.append((engine.submit(prompt, params, priority=draw.randrange(2), timeout=timeout), number))
            threading.Event().wait(draw.random() * 0.01)
            if draw.random() < 0.1:
                draw.choice(handles)[0].cancel()
        for handle, number in handles:
            compare(handle, expected[number])

    def call_the_model(numbers: list[int]) -> None:
        for number in numbers:
            prompt, params = requests[number]
            assert alone(model, prompt, params.max_tokens or 1) == expected[number][0]

    with Engine(model, max_num_seqs=12) as engine:
        for _ in range(2):
            numbers = draw.sample(range(count), count)
            greedy = [number for number in numbers if requests[number][1].temperature == 0][: count // 8]
            parts = [(numbers[part::3], random.Random(part)) for part in range(3)]
            calls = [start(partial(come_and_go, engine, *part)) for part in parts]
            for call in [*calls, start(partial(call_the_model, greedy))]:
                call.result()
        stats = engine.stats()
        if count == 200:  # of a few requests, how many meet depends on how fast the machine is
            assert stats.preemptions > 0
            assert stats.cached_tokens > 0
        assert (stats.running, stats.waiting) == (0, 0)
    assert_account_is_empty(model)
