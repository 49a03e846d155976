"""Rows with penalties keep their slots until they end: a request that finds none waits, and no other fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.thread import starvation
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, wrapped
from support.in_threads import start
from support.parity import alone, assert_account_is_empty

ROWS = 2
"""That one loop has at most; there are twice as many slots."""
PENALTY = 1.3
TOKENS = 100


@pytest.fixture
def model(one_thread: None) -> Iterator[PreTrainedModel]:
    model = wrapped(4000, max_batch_size=ROWS)
    yield model
    assert_account_is_empty(model)
    slots = model.compiled.model_runner().state.slots
    assert len(slots._free) == slots.padding == 2 * ROWS


@pytest.fixture
def engines(model: PreTrainedModel) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(model, max_num_seqs=ROWS)) for _ in range(3)]


def params(penalty: float, tokens: int = TOKENS) -> SamplingParams:
    return greedy(tokens, repetition_penalty=penalty)


def begun(engine: Engine, penalty: float = PENALTY) -> list[RequestHandle]:
    """As many requests as run at once; each has got a token."""
    handles = [engine.submit([5, 6, number], params(penalty)) for number in range(ROWS)]
    for handle in handles:
        next(iter(handle.tokens()))
    return handles


def assert_right(handles: list[RequestHandle], penalty: float = PENALTY) -> None:
    for number, handle in enumerate(handles):
        assert handle.result(PATIENCE).token_ids == huggingfaces([5, 6, number], TOKENS, penalty=penalty)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("penalty", [PENALTY, 1.0])
def test_the_third_of_three_busy_engines_waits(penalty, engines):
    handles = [begun(engine) for engine in engines[:2]]
    late = [engines[2].submit([5, 6, number], params(penalty)) for number in range(ROWS)]
    assert_right(late, penalty)
    for each in handles:
        assert_right(each)
    assert [engine.stats().preemptions for engine in engines] == [0, 0, 0]


@pytest.mark.whole
def test_a_request_that_waits_for_paused_engines_is_reported(engines, monkeypatch, caplog):
    monkeypatch.setattr(starvation, "_LONG", 0.05)
    said = threading.Event()
    monkeypatch.setattr(starvation.Starvation, "_say", _then(starvation.Starvation._say, said))
    handles = [begun(engine) for engine in engines[:2]]
    with engines[0].paused(weights_stay=True), engines[1].paused(weights_stay=True):
        late = [engines[2].submit([5, 6, number], params(PENALTY)) for number in range(ROWS)]
        assert said.wait(PATIENCE)
        assert not any(handle.requests[0].tokens for handle in late)
    for each in (*handles, late):
        assert_right(each)
    (message,) = [message for message in caplog.messages if "next request has waited" in message]
    assert "because of penalties or grammars" in message


def _then(say: Any, event: threading.Event) -> Any:
    def said(*arguments: Any) -> None:
        say(*arguments)
        event.set()

    return said


@pytest.mark.whole
@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.whole)])
def test_many_loops_of_all_kinds(rounds, model, engines, seed):
    expected = {
        (number, penalty): huggingfaces([5, 6, number], 60, penalty=penalty)
        for number in range(4)
        for penalty in (1.0, PENALTY)
    }
    cases = list(expected)

    def ask(asker: int) -> None:
        draws = random.Random(f"{seed} {asker}")
        for _ in range(rounds):
            number, penalty = draws.choice(cases)
            tokens = draws.randrange(1, 61)
            if asker == 0:
                found = alone(model, [5, 6, number], tokens, repetition_penalty=penalty)
            else:
                handle = draws.choice(engines).submit([5, 6, number], params(penalty, tokens))
                found = handle.result(PATIENCE).token_ids
            assert found == expected[number, penalty][:tokens]

    for call in [start(lambda asker=asker: ask(asker)) for asker in range(9)]:
        call.result(PATIENCE * 5)
