"""How many states of recurrent layers there are, what they bound, and that descriptions say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.kvcache.errors import OutOfStatesError
from support.engine.tiny_engines import greedy
from support.huggingface.recurrent_families import recurrent_model
from support.huggingface.recurrent_pairs import of_rows_alone, prompts_of, wrapped_family
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

FAMILY = "Qwen3_5"
ROWS = 8
ALL = 2 + 4 * ROWS + 2 * ROWS


@pytest.fixture(scope="module")
def one() -> int:
    """Bytes of a state."""
    model = wrapped_family(FAMILY)
    state = model.compiled.model_runner().state
    assert state.state_bytes == ALL * state.bytes_of_a_state
    return int(state.bytes_of_a_state)


def with_states(count: int, one: int, **options: Any) -> Any:
    """A model whose ``kv_memory`` holds as many, which are half of it."""
    return wrapped_family(FAMILY, kv_memory=2 * count * one, max_batch_size=ROWS, **options)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("count", [4, 5, 11, ALL, ALL + 40])
def test_states_bound_how_many_requests_run(count: int, one: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, most = with_states(count, one), list[int]()
    launched = Scheduler.launched

    def noted(scheduler: Scheduler, plan: Any) -> Any:
        most.append(len(scheduler.running))
        return launched(scheduler, plan)

    monkeypatch.setattr(Scheduler, "launched", noted)
    prompts = prompts_of([9] * (ROWS + 3), seed)
    with Engine(model, max_num_seqs=ROWS) as engine:
        room = engine.describe()
        expected = min(ROWS, (count - 2) // 2)
        assert (room.requests(20), room.bound(20)) == (expected, "states" if expected < ROWS else "max_num_seqs")
        answers = [output.token_ids for output in engine.generate(prompts, greedy(6))]
        assert answers == of_rows_alone(FAMILY, prompts, 6)
        assert (max(most), engine.stats().preemptions) == (expected, 0)
        said, states = str(room).splitlines(), min(count, ALL)
        assert said[-1].endswith(f"at once, bound by {room.bound(room.max_tokens)}")
        assert f"states of recurrent layers  {states - 2} of 0.0 MiB, 2 a request" in said
        account = engine.stats().states
        assert account == model.compiled.stats().states
        assert account is not None
        assert account.used + account.free + account.cached == account.total == states
    assert_account_is_empty(model)


@pytest.mark.whole
def test_the_prefix_cache_takes_the_share_of_memory_that_is_described(one: int, seed: int) -> None:
    model, prompts = with_states(20, one), prompts_of([24] * 30, seed)
    with Engine(model, max_num_seqs=4) as engine:
        room = engine.describe()
        least, most = room.prefix_cache_states
        assert (least, most) == (10 * one, 18 * one)
        assert most <= (room.memory["pages"] + room.memory["states"]) / 2
        assert f"{10 * one / 2**20:,.1f} to {18 * one / 2**20:,.1f} MiB, 2" in str(room)
        engine.generate(prompts, greedy(2))
        states = engine.stats().states
        assert states is not None
        assert least < states.cached * one <= most
        handles = [engine.submit(prompt, greedy(60)) for prompt in prompts[:4]]
        for handle in handles:
            next(iter(handle))
        running = engine.stats()
        assert running.states is not None
        assert (running.running, running.states.used) == (4, 2 + 2 * 4)
        assert running.states.cached * one <= least
        for handle in handles:
            handle.cancel()
    assert "states: 2 used, of 20" in " ".join(str(model.compiled.stats()).replace("states ", "states: ").split())


def test_models_without_recurrent_layers_say_nothing_of_states() -> None:
    model = compiled_llm.wrap(tiny_qwen3(), mode="eager", progress=False, kv_memory="400 tokens")
    with Engine(model, max_num_seqs=4) as engine:
        room = engine.describe()
        assert (room.states, room.prefix_cache_states, engine.stats().states) == (0, (0, 0), None)
        assert "state" not in str(room)
        assert "state" not in str(model.compiled.stats())


def test_as_many_states_come_back_after_sleep(one: int, seed: int) -> None:
    model, prompts = with_states(11, one), prompts_of([9, 20], seed)
    with Engine(model, max_num_seqs=ROWS) as engine:
        before = engine.describe()
        engine.generate(prompts, greedy(6))
        engine.sleep()
        engine.wake()
        after = engine.describe()
        assert (before.states, before.pages.total) == (after.states, after.pages.total) == (9, before.pages.total)
        answers = [output.token_ids for output in engine.generate(prompts, greedy(6))]
        assert answers == of_rows_alone(FAMILY, prompts, 6)


def test_a_call_of_more_rows_than_states_is_refused(one: int, seed: int) -> None:
    model, prompts = with_states(11, one), prompts_of([9] * 5, seed)
    for rows in (5, 4):
        call = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        ids = torch.tensor(prompts[:rows])
        if rows == 5:
            with pytest.raises(OutOfStatesError, match=r"2 states of rows are needed and 1 of 11.*or kv_memory"):
                model.generate(ids, **call)
        else:
            assert model.generate(ids, **call)[:, 9:].tolist() == of_rows_alone(FAMILY, prompts[:rows], 6)
    assert_account_is_empty(model)


def test_memory_that_holds_no_row_is_refused_before_anything_is_allocated(one: int) -> None:
    model = compiled_llm.wrap(recurrent_model(FAMILY), mode="eager", progress=False, kv_memory=4 * one)
    with pytest.raises(ValueError, match=r"holds no page.*, states of recurrent layers .* KiB, and"):
        model.compiled.warmup()
    assert model.compiled.stats().pages is None
