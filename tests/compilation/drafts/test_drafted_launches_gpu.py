"""Steps that draft on a GPU, captured: a seed's tokens, nothing waits for the device, nothing is compiled anew."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.execution.batch import Batch
from compiled_llm.execution.drafts.part import DraftSettings
from compiled_llm.execution.drafts.rounds import Rounds
from compiled_llm.execution.generate_loop import GenerateLoop
from support.engine.judged_answers import Judged, missed
from support.execution.drafters import Turning, drafted_answers, plain_answers
from support.execution.schedule import prompt_of
from support.execution.twins import OPTIONS, in_float32, small_qwen3
from support.gpu import needs_cuda
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.gpu, needs_cuda]

SLEEP = 2_000_000_000
SIZES = [8, 8, 2, 1, 1, 2, 8]


# Each process that runs a test of this file compiles what a number of rows needs: so there is one test for each.


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    model = compiled_llm.wrap(small_qwen3(0), **OPTIONS)
    yield model
    compiled_llm.unwrap(model)


def prompts_of(seed: int, rows: int) -> list[list[int]]:
    """Prompts that repeat themselves."""
    rng = np.random.default_rng(seed)
    return [prompt_of(5 + number, rng) * 4 for number in range(rows)]


def rounds_of(
    model: PreTrainedModel, prompts: list[list[int]], new: int, sizes: list[int]
) -> tuple[GenerateLoop, Rounds]:
    loop = model.compiled.generate_loop()
    for prompt in prompts:
        loop.admit(prompt, new)
    texts = [np.array(prompt, dtype=np.int64) for prompt in prompts]
    return loop, Rounds(loop, DraftSettings(7), texts, new, Turning(sizes))


@pytest.mark.parametrize("rows", [1, 5])
def test_captured_steps_that_draft(model: PreTrainedModel, rows: int, seed: int) -> None:
    prompts = prompts_of(seed, rows)
    assert_launches_of_any_size_return_while_the_device_sleeps(model, prompts)
    assert_greedy_answers_are_those_of_plain_steps_as_far_as_rounding_lets_them(model, prompts)
    assert model.compiled.stats().recompiles == 0
    if rows == 1:
        assert_a_repeated_call_gives_the_same_tokens(model, prompts, seed)
    assert_account_is_empty(model)


def assert_launches_of_any_size_return_while_the_device_sleeps(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """Checks that are repeated, other numbers of tokens, plain steps, rows that leave, and pages that rows enter."""
    for number in range(2):  # what these launches need is captured in the first ones
        loop, rounds = rounds_of(model, prompts, 400, SIZES)
        while not rounds.next():
            pass
        for _ in range(60 if number == 0 else 3):
            rounds._round()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        asleep = torch.cuda.Event()
        try:
            torch.cuda._sleep(SLEEP)
            asleep.record()
            start, running = time.perf_counter(), list(loop.rows)
            for turn in range(12):
                if turn == 6 and len(prompts) > 1:
                    running = running[1:]
                size = SIZES[turn % len(SIZES)]
                drafting = rounds._drafts.drafting(size) if size > 1 else None
                loop.launch(Batch(decode=running, promise=loop.promise, drafting=drafting))
                if number == 0:
                    loop.model_runner.catch_up(lambda: False)
            took, over = time.perf_counter() - start, asleep.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert number == 0 or not over, f"twelve launches took {took:.3f} s, when the device had woken up"
        while loop.unread:
            loop.read()
        loop.close()


def assert_greedy_answers_are_those_of_plain_steps_as_far_as_rounding_lets_them(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """In bfloat16 a step of eight tokens rounds otherwise than one of one: float32 judges both."""
    new = 100
    expected = plain_answers(model, prompts, new, [None] * len(prompts))
    loop, rounds = rounds_of(model, prompts, new, SIZES)
    answers, exact = drafted_answers(loop, rounds, new), in_float32(small_qwen3(0))
    plain, drafted = (sum(missed(exact, *one) for one in zip(prompts, own, strict=True)) for own in (expected, answers))
    tokens = new * len(prompts)
    print(f"not the best in float32: {plain} of {tokens} tokens of plain steps, {drafted} of those that draft")
    assert not Judged(0, tokens, drafted).is_worse_than(Judged(0, tokens, plain))


def assert_a_repeated_call_gives_the_same_tokens(model: PreTrainedModel, prompts: list[list[int]], seed: int) -> None:
    inputs = torch.tensor(prompts, device="cuda")
    options = {"max_new_tokens": 100, "do_sample": True, "temperature": 0.7, "prompt_lookup_num_tokens": 7}
    results = []
    for _ in range(4):  # of the first ones, steps are captured
        torch.manual_seed(seed)
        results.append(model.generate(inputs, attention_mask=torch.ones_like(inputs), **options))
    assert torch.equal(results[2], results[3])
    assert model.compiled.stats().generate_calls["fast loop"] >= 4
