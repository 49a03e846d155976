"""A listener is called once a step, for however many requests it listens to; or only when an answer has ended."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import Listeners, tell
from support.engine.no_source import NoSource
from support.engine.text_tokenizers import Numbers
from support.engine.tiny_engines import PATIENCE, greedy


def test_a_function_that_listens_to_several_is_called_once() -> None:
    several, calls = [Listeners() for _ in range(3)], []

    class Reader:
        def wake(self) -> None:
            calls.append("woken")

    reader = Reader()
    for listeners in several:
        listeners.add(reader.wake)
    tell(several[:2])
    assert calls == ["woken"]


def test_a_function_that_fails_is_called_no_more_for_any_of_them(caplog: pytest.LogCaptureFixture) -> None:
    several, calls = [Listeners() for _ in range(2)], []

    def fail() -> None:
        calls.append("failed")
        raise ValueError("no")

    for listeners in several:
        listeners.add(fail)
        listeners.add(lambda: calls.append("told"))
    tell(several)
    tell(several)
    assert sorted(calls) == ["failed", *["told"] * 4]
    assert caplog.text.count("a listener has failed, and hears no more: ValueError: no") == 1
    assert [listeners.count for listeners in several] == [1, 1]


def test_tasks_and_functions_are_told_together() -> None:
    async def main() -> list[str]:
        listeners, calls = Listeners(), []
        listeners.add(lambda: calls.append("function"))
        with listeners.listening() as wakeup:
            await asyncio.to_thread(tell, [listeners])
            await asyncio.wait_for(wakeup.wait(), 60)
        return calls

    assert asyncio.run(main()) == ["function"]


def test_a_task_that_begins_to_wait_is_woken_by_what_came_before_and_once_it_has_given_up_by_what_comes_later() -> None:
    async def main() -> None:
        listeners = Listeners()
        with listeners.listening() as wakeup:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wakeup.wait(), 0.001)
            tell([listeners])
            await asyncio.sleep(0)
            assert wakeup.is_set
            await asyncio.wait_for(wakeup.wait(), 60)
            wakeup.is_set = False
            waiting = asyncio.ensure_future(wakeup.wait())
            assert not waiting.done()
            await asyncio.to_thread(tell, [listeners, listeners])
            await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


@pytest.mark.parametrize("stop", [None, "never"])
def test_who_waits_for_an_end_is_not_woken_for_each_token(model: PreTrainedModel, stop: str | None) -> None:
    changes, ends = list[int](), list[bool]()
    with Engine(model, tokenizer=Numbers()) as engine:
        with engine.paused():
            handle, longer = (engine.submit([5, 6], greedy(tokens, stop=stop)) for tokens in (9, 30))
            handle.when_changed(lambda: changes.append(1))
            handle.when_ended(lambda: ends.append(handle.done))
            longer.when_ended(lambda: ends.append(longer.done))
        assert len(longer.result(PATIENCE).token_ids) == 30
        assert len(handle.result(PATIENCE).token_ids) == 9
    assert all(ends)
    assert 2 <= len(ends) <= (2 if stop is None else 4)  # text may be read to its end before its request is told of
    assert changes if stop else len(changes) == 9


@pytest.mark.parametrize("in_event_loop", [False, True])
def test_tokens_that_come_with_the_end_while_a_stream_reads_are_given(in_event_loop: bool) -> None:
    request = Request(prompt=np.array([5]), sampling=None, max_tokens=2, stop_token_ids=frozenset())
    request.add_run([7])
    handle = RequestHandle([request], [5], NoSource())
    (answer,) = handle.answers
    read = answer.tokens_after

    def reading(count: int) -> list[int]:
        found = read(count)
        if not request.done:
            request.add_run([8])
            request.finish_reason = "length"
            tell([handle.listeners])
        return found

    answer.tokens_after = reading  # type: ignore[method-assign]

    async def in_loop() -> list[int]:
        return [token async for token in handle]

    assert (asyncio.run(asyncio.wait_for(in_loop(), PATIENCE)) if in_event_loop else list(handle)) == [7, 8]
