"""The generate loop: rows come and go, and each gets HuggingFace's logits and tokens as if it were alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import OutOfPagesError
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.prefill.launches import PrefillLaunches
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.execution.failing_calls import fail_once
from support.execution.schedule import TOLERANCE, Schedule, assert_logits, prompt_of
from support.noting import note_decode_steps
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 3, "kv_memory": "1500 tokens", "max_batch_size": 9}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}


@pytest.fixture
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, progress=False)


@pytest.fixture
def generate_loop(model: PreTrainedModel) -> GenerateLoop:
    return model.compiled.generate_loop()


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(("make", "loops"), [(tiny_qwen3, 2), (tiny_llama, 1)])
def test_random_schedule_gives_every_row_huggingfaces_logits(
    make: Callable[..., PreTrainedModel], loops: int, seed, whole
):
    """Of several loops, which take turns in the decode buffers with calls of `generate`."""
    options, plain = OPTIONS | {"kv_memory": "5000 tokens"}, make(**OVERRIDES)
    model = compiled_llm.wrap(make(**OVERRIDES), **options, progress=False)
    rng, sizes = np.random.default_rng(seed), set()
    schedules = [Schedule(model.compiled.generate_loop(), plain, rng) for _ in range(loops)]
    steps = 200 if whole else 120
    for number in range(steps):
        for schedule in schedules:
            schedule.anything()
            sizes.add(len(schedule.generate_loop.rows))
        if number % 10 == 7:
            model.generate(torch.tensor([prompt_of(5, rng)] * (1 + number % 4)), max_new_tokens=3, do_sample=False)
        rows = [row for schedule in schedules for loop in schedule.all_loops for row in loop.rows]
        account = model.compiled.stats().pages
        assert account.used == len({page for row in rows for page in row.pages + row.ahead})
        assert account.used + account.free + account.cached == account.total
    assert sizes >= {1, 2, 4, 9}
    for schedule in schedules:
        assert schedule.generate_loop.steps == steps + schedule.drafted
        schedule.close()
    assert_account_is_empty(model)


def test_tokens_arrive_one_step_late_and_drain_gives_the_rest(generate_loop):
    first = generate_loop.admit([3, 4, 5], 10)
    assert generate_loop.step() == {}
    assert list(generate_loop.step()) == [first]
    second = generate_loop.admit([6, 7], 10)
    assert list(generate_loop.step()) == [first], "of the decode step before the prefill"
    assert list(generate_loop.step()) == [second], "of the prefill"
    assert list(generate_loop.drain()) == [first, second]
    assert generate_loop.drain() == {}


def test_a_rewind_within_a_page_between_steps_is_seen(model, generate_loop, seed):
    """The token that comes next stays the same, whatever is forgotten before it."""
    prompt = prompt_of(4, np.random.default_rng(seed))
    row, twin = generate_loop.admit(prompt, 30), Alone(tiny_qwen3(**OVERRIDES), prompt)
    generate_loop.step()
    for _ in range(3):  # the last one enters a page and stays in it
        generate_loop.step()
        twin.feed([twin.next])
    following = twin.next
    row.rewind(row.exact_length - 1)
    generate_loop.step()
    again = Alone(tiny_qwen3(**OVERRIDES), [*twin.fed[:-1], following])
    assert_logits(generate_loop, again)


# ---- pages


def test_a_row_released_before_its_prefill_leaves_no_trace(model, generate_loop):
    kept, dropped = generate_loop.admit([3, 4], 5), generate_loop.admit([5, 6], 5)
    generate_loop.release(dropped)
    generate_loop.step()
    assert list(generate_loop.drain()) == [kept]
    generate_loop.close()
    assert_account_is_empty(model)


def test_close_gives_everything_back_and_the_loop_goes_on(model, generate_loop):
    for length in (3, 9):
        generate_loop.admit([5] * length, 9)
    generate_loop.step()
    generate_loop.step()
    generate_loop.admit([4], 3)
    generate_loop.close()
    generate_loop.close()
    assert_account_is_empty(model)
    row = generate_loop.admit([3, 4], 2)
    assert generate_loop.step() == {}
    assert list(generate_loop.drain()) == [row]


def test_dropping_a_loop_gives_its_pages_back(model):
    generate_loop = model.compiled.generate_loop()
    generate_loop.admit([3, 4, 5], 30)
    generate_loop.step()
    assert model.compiled.stats().pages.used == 1
    del generate_loop
    gc.collect()
    assert_account_is_empty(model)


def test_a_row_may_outgrow_its_promise_while_pages_are_free(model, generate_loop):
    row = generate_loop.admit([3, 4, 5], 1)
    for _ in range(10):
        generate_loop.step()
    assert row.exact_length == 12


# ---- errors leave everything as it was


def works(generate_loop: GenerateLoop, model: PreTrainedModel) -> None:
    """A row on this loop gets HuggingFace's logits, with those that are in."""
    others = list(generate_loop.rows)
    row = generate_loop.admit([9, 8, 7, 6], 3)
    generate_loop.step()
    twin = Alone(tiny_qwen3(**OVERRIDES), [9, 8, 7, 6])
    torch.testing.assert_close(generate_loop.logits()[-1], twin.logits, **TOLERANCE)
    generate_loop.release(row)
    assert generate_loop.rows == others


REFUSED: dict[str, tuple[list[tuple[int, int]], Callable[[GenerateLoop], Any], str]] = {
    "a step without rows": ([], lambda loop: loop.step(), "no rows; admit a prompt first"),
    "no token": ([], lambda loop: loop.admit([], 5), "prompt is empty"),
    "no token of an array": ([], lambda loop: loop.admit(np.array([], dtype=np.int64), 5), "prompt is empty"),
    "fewer than no new tokens": ([], lambda loop: loop.admit([3, 4], -1), "max_new_tokens=-1: must not be negative"),
    "floats": ([], lambda loop: loop.admit([3.5, 4.0], 5), "prompt: token ids are integers from 0 to 127"),
    "too large": ([], lambda loop: loop.admit([3, 128], 5), "prompt: token ids are integers from 0 to 127"),
    "negative": ([], lambda loop: loop.admit([-1], 5), "prompt: token ids are integers from 0 to 127"),
    "another's row": ([], lambda loop: loop.release(Row(loop.model_runner.pool, 0)), "row is not one of this runner's"),
    "too many rows": ([(2, 5)] * 9, lambda loop: loop.admit([3], 5), "10 rows are more than max_batch_size=9"),
    "too few pages": (
        [(30, 970)],
        lambda loop: loop.admit([3] * 30, 700),
        r"\d+ pages are needed and \d+ of \d+ are available",
    ),
    "fewer forced tokens": ([(2, 20), (5, 20)], lambda loop: loop.step(torch.tensor([1])), "forced"),
    "more forced tokens": ([(2, 20), (5, 20)], lambda loop: loop.step(torch.tensor([1, 2, 3])), "forced"),
    "forced floats": ([(2, 20), (5, 20)], lambda loop: loop.step(torch.tensor([1.0, 2.0])), "forced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused_change_nothing(name, model, generate_loop):
    admitted, call, message = REFUSED[name]
    for length, new in admitted:
        generate_loop.admit([4] * length, new)
    for _ in range(2 * bool(admitted)):
        generate_loop.step()
    pool, rows = model.compiled.model_runner().pool, list(generate_loop.rows)
    before = pool.available, [row.exact_length for row in rows]
    with pytest.raises((RuntimeError, ValueError), match=message):  # OutOfPagesError is one
        call(generate_loop)
    assert generate_loop.rows == rows
    assert (pool.available, [row.exact_length for row in rows]) == before
    if not admitted:
        assert_account_is_empty(model)
    if len(rows) == 9:
        generate_loop.release(rows[4])
    works(generate_loop, model)


def test_running_out_of_pages_in_a_step_keeps_rows_and_tokens(seed):
    model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), mode="eager", page_size=3, kv_memory="12 tokens", progress=False)
    generate_loop, twins = (
        model.compiled.generate_loop(),
        [Alone(tiny_qwen3(**OVERRIDES), [3, 4, token]) for token in (5, 6)],
    )
    rows = [generate_loop.admit([3, 4, token], 0) for token in (5, 6)]
    generate_loop.step()
    for _ in range(3):
        generate_loop.step()
        for twin in twins:
            twin.feed([twin.next])
    account = model.compiled.stats().pages
    with pytest.raises(OutOfPagesError, match="pages are needed"):
        generate_loop.step()
    assert [row.exact_length for row in rows] == [6, 6]
    assert model.compiled.stats().pages == account
    generate_loop.release(rows[0])
    for _ in range(2):
        generate_loop.step()
        twins[1].feed([twins[1].next])
        assert_logits(generate_loop, twins[1])


@pytest.mark.parametrize("error", [MemoryError("in the step"), KeyboardInterrupt()], ids=repr)
def test_an_exception_inside_a_decode_step_leaves_lengths_and_account(error, model, generate_loop, monkeypatch):
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    twins = [Alone(tiny_qwen3(**OVERRIDES), prompt) for prompt in prompts]
    rows = [generate_loop.admit(prompt, 30) for prompt in prompts]
    forced = torch.tensor([11, 12])

    def state() -> list[Any]:
        return [model.compiled.model_runner().pool.available, *[(row.exact_length, row.exact_position) for row in rows]]

    def feed() -> None:
        for twin, token in zip(twins, (11, 12), strict=True):
            twin.feed([token])

    generate_loop.step()
    generate_loop.step(forced)
    feed()
    before = state()
    fail_once(monkeypatch, Launch, "__call__", error, after=1)
    with pytest.raises(type(error)):
        generate_loop.step(forced)
    assert state() == before
    assert model.compiled.stats().pages.used == sum(len(row.pages) + len(row.ahead) for row in rows)
    for _ in range(5):  # over page boundaries
        generate_loop.step(forced)
        feed()
        assert_logits(generate_loop, *twins)


def test_an_exception_inside_a_prefill_leaves_the_prompt_waiting(model, generate_loop, monkeypatch):
    row = generate_loop.admit([3, 4, 5], 9)
    available = model.compiled.model_runner().pool.available
    fail_once(monkeypatch, PrefillLaunches, "_launch", MemoryError("in the prefill"), after=1)
    with pytest.raises(MemoryError):
        generate_loop.step()
    assert (row.exact_length, row.exact_position, row.pages) == (0, 0, [])
    assert model.compiled.model_runner().pool.available == available
    generate_loop.step()
    assert_logits(generate_loop, Alone(tiny_qwen3(**OVERRIDES), [3, 4, 5]))


@pytest.mark.parametrize(
    ("prepared", "used"),
    [([8], [8, 8, 8, 1]), ([8, 2], [8, 2, 2, 1]), ([8, 4, 2, 1], [8, 2, 1, 1]), ([], [8, 8, 8, 1])],
)
def test_no_row_waits_for_a_smaller_bucket_because_others_have_ended(model, monkeypatch, prepared, used):
    model.compiled.warmup(prepared)
    generate_loop, seen = model.compiled.generate_loop(), note_decode_steps(monkeypatch)
    twin = Alone(tiny_qwen3(**OVERRIDES), [3, 4, 5])
    rows = [generate_loop.admit([3, 4, 5], 9) for _ in range(5)]
    generate_loop.step()
    for leaving in (0, 3, 1):
        for row in rows[:leaving]:
            generate_loop.release(row)
        rows = rows[leaving:]
        generate_loop.step()
        twin.feed([twin.next])
        assert_logits(generate_loop, *[twin] * len(rows))
    generate_loop.close()
    generate_loop.admit([3, 4, 5], 9)
    generate_loop.step()
    generate_loop.step()
    assert seen == used
