"""More rows than slots: those that nobody steps give theirs up, and go on where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm.compilation.sampling import Sampling
from compiled_llm.execution.runner import Runner
from support.alone import Alone
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "max_batch_size": 2, "kv_memory": "2000 tokens"}
SLOTS = 4


@pytest.fixture
def model() -> Any:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, progress=False)


def begun(model: Any, seed: int, count: int, sampling: Sampling | None = None) -> list[tuple[Runner, Alone]]:
    pairs = []
    for number in range(count):
        prompt = np.random.default_rng([seed, number]).integers(3, 128, 3 + number % 5)
        runner = model.compiled.runner()
        runner.admit(prompt, 60, sampling)
        runner.step()
        pairs.append((runner, Alone(tiny_qwen3(**OVERRIDES), prompt.tolist())))
    return pairs


def step(runner: Runner, twin: Alone) -> None:
    runner.step(unchanged=True)
    twin.feed([twin.next])
    torch.testing.assert_close(runner.logits()[0], twin.logits, rtol=1e-3, atol=1e-3)


def test_a_row_on_its_seat_whose_slot_was_taken_goes_on_with_its_own_token(model, seed):
    ((runner, twin),) = begun(model, seed, 1)
    for _ in range(2):
        step(runner, twin)
    others = begun(model, seed + 1, SLOTS)  # prompts alone: nobody else takes the seats
    for _ in range(6):
        step(runner, twin)
    for other in others:
        step(*other)
        other[0].close()
    runner.close()
    assert_account_is_empty(model)


def test_many_more_rows_than_slots_take_turns(model, seed):
    pairs = begun(model, seed, 5 * SLOTS)
    for turn in range(12):
        for pair in pairs[turn % 3 :: 1 + turn % 2]:
            step(*pair)
    for runner, _ in pairs:
        runner.close()
    slots = model.compiled.device_model().state.slots
    assert len(slots._free) == slots.padding == SLOTS
    assert_account_is_empty(model)


def test_rows_whose_slots_say_what_they_have_seen_keep_them(model, seed):
    pairs = begun(model, seed, SLOTS, Sampling(temperature=0.0, repetition_penalty=1.3))
    with pytest.raises(RuntimeError, match="1 more rows cannot run: calls in progress take 4 of 4 slots"):
        begun(model, seed, 1)
    pairs[0][0].close()
    step(*begun(model, seed, 1)[0])
