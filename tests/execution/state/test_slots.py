"""More rows than slots: those that nobody steps give theirs up, and go on where they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm.compilation.sampling.bias import ALWAYS, Bias, packed
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.slots import Slots
from compiled_llm.execution.state.staging import Staging
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.execution.failing_calls import fail_once
from support.noting import note_calls
from support.ops.sampling_cases import EVERYTHING, tables_of
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "max_batch_size": 2, "kv_memory": "2000 tokens"}
SLOTS = 4


@pytest.fixture
def model() -> Any:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, progress=False)


def begun(model: Any, seed: int, count: int, sampling: Sampling | None = None) -> list[tuple[GenerateLoop, Alone]]:
    pairs = []
    for number in range(count):
        prompt = np.random.default_rng([seed, number]).integers(3, 128, 3 + number % 5)
        generate_loop = model.compiled.generate_loop()
        generate_loop.admit(prompt, 60, sampling)
        generate_loop.step()
        pairs.append((generate_loop, Alone(tiny_qwen3(**OVERRIDES), prompt.tolist())))
    return pairs


def step(generate_loop: GenerateLoop, twin: Alone) -> None:
    generate_loop.step()
    twin.feed([twin.next])
    torch.testing.assert_close(generate_loop.logits()[0], twin.logits, rtol=1e-3, atol=1e-3)


def test_a_row_on_its_seat_whose_slot_was_taken_goes_on_with_its_own_token(model, seed):
    ((generate_loop, twin),) = begun(model, seed, 1)
    for _ in range(2):
        step(generate_loop, twin)
    others = begun(model, seed + 1, SLOTS)  # prompts alone: nobody else takes the batch indices
    for _ in range(6):
        step(generate_loop, twin)
    for other in others:
        step(*other)
        other[0].close()
    generate_loop.close()
    assert_account_is_empty(model)


@pytest.mark.whole
def test_many_more_rows_than_slots_take_turns(model, seed):
    pairs = begun(model, seed, 5 * SLOTS)
    for turn in range(12):
        for pair in pairs[turn % 3 :: 1 + turn % 2]:
            step(*pair)
    for generate_loop, _ in pairs:
        generate_loop.close()
    slots = model.compiled.model_runner().state.slots
    assert len(slots._free) == slots.padding == SLOTS
    assert_account_is_empty(model)


def test_rows_whose_slots_say_what_they_have_seen_keep_them(model, seed):
    pairs = begun(model, seed, SLOTS, Sampling(temperature=0.0, repetition_penalty=1.3))
    with pytest.raises(RuntimeError, match="1 more rows cannot run: calls in progress take 4 of 4 slots"):
        begun(model, seed, 1)
    pairs[0][0].close()
    step(*begun(model, seed, 1)[0])


def slots_for(rows: int, vocabulary: int) -> tuple[Slots, Arena]:
    cpu = torch.device("cpu")
    staging = Staging(cpu)
    arena = Arena(Slots.columns(rows, 1), cpu, staging)
    return Slots(arena, staging, vocabulary), arena


def rows_of(count: int) -> list[Row]:
    return [Row(PagePool(2, 4), 0) for _ in range(count)]


def test_what_many_rows_bring_is_one_copy_and_rows_that_bring_nothing_write_nothing(monkeypatch):
    """Staging waits for the device once it is some copies ahead."""
    slots, _ = slots_for(16, 300)
    copied = note_calls(monkeypatch, Staging, "to_device", lambda *_: 1)
    plain = rows_of(12)
    slots.admit(plain, [Sampling(seed=seed) for seed in range(12)])
    assert copied == []
    processed = rows_of(12)
    slots.admit(processed, [Sampling(**EVERYTHING, seed=seed) for seed in range(12)])
    assert copied == [1]
    tables = slots.tables
    for row in plain:
        assert not any(table[row.slot].any() for table in (tables.counts, tables.allowed, tables.biases))
    alone = tables_of([Sampling(**EVERYTHING)], 300)
    for name in ("counts", "allowed", "biases"):
        for row in processed:
            assert torch.equal(getattr(tables, name)[row.slot], getattr(alone, name)[0]), name


def test_a_row_that_comes_back_counts_anew(seed):
    slots, _ = slots_for(2, 10)
    counting = Sampling(
        presence_penalty=1.0, repetition_penalty=1.1, seen=np.array([3]), output_ids=np.array([4, 4, 3])
    )
    (row,) = rows_of(1)
    for _ in range(2):
        slots.admit([row], [counting])
        assert slots.tables.counts[row.slot].tolist() == [0, 0, 0, 3, 4, 0, 0, 0, 0, 0]
        slots.tables.counts[row.slot] += 2  # the device has chosen
        row.leave_slot()


def test_rows_that_share_biases_count_their_own_tokens():
    slots, _ = slots_for(4, 10)
    biases = packed([Bias(3, 1.0, first=1, end=4), Bias(5, -1.0)])
    tokens = [([7, 7, 2], [2, 12]), ([], []), ([9], [0, 0]), ([2], [])]
    settings = [
        Sampling(
            presence_penalty=1.0, seen=np.array(seen, int), output_ids=np.array(chosen, int), biases=biases, start=at
        )
        for at, (seen, chosen) in enumerate(tokens)
    ]
    settings[2] = replace(settings[2], biases=packed([Bias(1, 2.0, after=(8,))]))
    rows = rows_of(4)
    slots.admit(rows, settings)
    for row, own, (seen, chosen) in zip(rows, settings, tokens, strict=True):
        counts = [2 * chosen.count(token) + (token in seen) for token in range(10)]
        assert slots.tables.counts[row.slot].tolist() == counts
        height, width = own.biases.shape
        expected = own.biases.copy()
        expected[2:4] = np.minimum(expected[2:4].astype(np.int64) + own.start, ALWAYS)
        assert slots.tables.biases[row.slot, :height, :width].tolist() == expected.tolist()
        assert (slots.tables.biases[row.slot, :5, width:2] == -1).all()


def test_tables_follow_the_vocabulary():
    slots, _ = slots_for(2, 10)
    (row,) = rows_of(1)
    slots.admit([row], [Sampling(presence_penalty=1.0, output_ids=np.array([9]), mask=mask_of(10, banned=[1]))])
    before = slots.nbytes
    slots.fit(70)
    assert slots.tables.counts[row.slot].tolist() == [0] * 9 + [2] + [0] * 60
    assert slots.tables.allowed[row.slot].tolist() == [~2, 0, 0]
    assert slots.nbytes > before


def test_settings_whose_writing_failed_are_written_again(monkeypatch):
    slots, arena = slots_for(2, 10)
    first, second, third = rows_of(3)
    masked = Sampling(mask=mask_of(10, banned=[1]))
    fail_once(monkeypatch, Staging, "to_device", RuntimeError("out of memory"), after=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        slots.admit([first], [masked])
    first.leave_slot()
    slots.admit([second], [masked])
    arena.flush()
    assert slots.tables.allowed[second.slot].tolist() == [~2]
    assert arena["adjustments"][second.slot] == masked.adjustments
    second.leave_slot()
    slots.admit([third], [None])
    arena.flush()
    assert arena["adjustments"][third.slot] == 0
