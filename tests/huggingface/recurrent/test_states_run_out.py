"""Where kept caches hold the states of recurrent layers: requests are refused by name, never left waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.request import RequestError
from compiled_llm.engine.thread import starvation
from compiled_llm.kvcache.pool import ENTRIES_OF_A_ROW
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.recurrent_pairs import of_rows_alone, prompts_of, wrapped_family
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

FAMILY = "Qwen3_5"
WAY_OUT = r"close\(\) caches that you keep \(those of outputs\).* or wrap with a larger max_batch_size"


@pytest.fixture
def model() -> Any:
    """With few states: a row of a batch has room for ``states.total - 2`` of them."""
    return wrapped_family(FAMILY, max_batch_size=1)


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, max_num_seqs=1) as engine:
        engine.generate([[5]], greedy(1))
        yield engine
    assert_account_is_empty(model)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "_PATIENCE", 0.02)


def states_of(model: Any) -> Any:
    return model.compiled.model_runner().pool.states


def caches_that_leave(model: Any, entries: int) -> list[Any]:
    """Caches of a row each, which hold a state, until so few are left."""
    states, caches = states_of(model), list[Any]()
    with torch.no_grad():
        while states.available > entries:
            caches.append(model(torch.tensor([[5, 6, 7]])).past_key_values)
    return caches


def close(caches: list[Any]) -> None:
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("entries", [0, 1])
def test_a_request_that_only_kept_caches_leave_no_state_is_refused(
    model: Any, engine: Engine, entries: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    (prompt,) = prompts_of([21], seed)
    caches, states = caches_that_leave(model, 1), states_of(model)
    states.reserve(1 - entries)
    handles = [engine.submit(prompt, greedy(6, n=2)), engine.submit(prompt[::-1], greedy(6))]
    for handle in handles:
        with pytest.raises(RequestError, match=rf"2 states of rows are needed and {entries} of \d+.*{WAY_OUT}"):
            handle.result(PATIENCE)
        assert {answer.finish_reason for answer in handle.output().outputs} == {"error"}
    assert "requests are refused: 2 states" in caplog.text
    ((answer,),) = (output.outputs for output in engine.generate([prompt], greedy(6)))
    assert "2 states of rows are needed" in str(answer.error)
    states.give_back(reserved=1 - entries)
    close(caches[:1])
    assert engine.generate([prompt], greedy(6))[0].token_ids == of_rows_alone(FAMILY, [prompt], 6)[0]
    close(caches)


def test_states_that_the_prefix_tree_keeps_go_first(model: Any, engine: Engine, seed: int) -> None:
    prompts, states = prompts_of([50] * 20, seed), states_of(model)
    engine.generate(prompts, greedy(1))
    cached = states.account().cached
    assert cached >= states.total - 4, "all that no row has needed"
    caches = caches_that_leave(model, 2)
    assert states.account().cached < cached
    assert engine.generate(prompts[:1], greedy(6))[0].token_ids == of_rows_alone(FAMILY, prompts[:1], 6)[0]
    assert states.account().cached <= 1, "that of the last answer"
    close(caches)


@pytest.mark.whole
def test_a_request_waits_for_states_of_another_engine(
    model: Any, engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They come back once that one goes on."""
    monkeypatch.setattr(starvation, "_LONG", 0.05)
    first, second = prompts_of([21, 9], seed)
    with Engine(model, max_num_seqs=1) as other:
        beside = other.submit(first, greedy(60))
        next(iter(beside))
        caches = caches_that_leave(model, ENTRIES_OF_A_ROW)
        states_of(model).reserve(1)
        with other.paused(weights_stay=True):
            handle = engine.submit(second, greedy(6))
            while "other engines and calls have the states of recurrent layers" not in caplog.text:
                assert not handle.done
        assert handle.result(PATIENCE).token_ids == of_rows_alone(FAMILY, [second], 6)[0]
        assert beside.result(PATIENCE).token_ids == of_rows_alone(FAMILY, [first], 60)[0]
    states_of(model).give_back(reserved=1)
    close(caches)


def test_a_call_takes_the_states_of_a_paused_engine(model: Any, engine: Engine, seed: int) -> None:
    first, second = prompts_of([21, 9], seed)
    beside = engine.submit(first, greedy(60))
    next(iter(beside))
    with engine.paused(weights_stay=True):
        caches = caches_that_leave(model, ENTRIES_OF_A_ROW)
        states_of(model).reserve(1)
        out = model.generate(torch.tensor([second]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        states_of(model).give_back(reserved=1)
    assert out[0, len(second) :].tolist() == of_rows_alone(FAMILY, [second], 6)[0]
    assert beside.result(PATIENCE).token_ids == of_rows_alone(FAMILY, [first], 60)[0]
    assert engine.stats().preemptions == 1
    close(caches)


def test_a_call_that_kept_caches_leave_no_state_is_refused(model: Any, engine: Engine, caplog: Any) -> None:
    caplog.set_level(logging.ERROR)
    caches = caches_that_leave(model, 1)
    with pytest.raises(RuntimeError, match=WAY_OUT):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=6, do_sample=False)
    close(caches)
