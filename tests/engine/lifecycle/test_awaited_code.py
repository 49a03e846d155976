"""Code of the user's that waits for a call which waits for it: after a while it is said who waits for whom."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import Engine, SamplingParams
from compiled_llm.requests import awaited_code
from support.engine.tiny_engines import tiny, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE = 60.0
PROMPT = torch.tensor([[1, 2, 3]])
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
SHORT = SamplingParams(max_tokens=2)


def pause(engine: Engine) -> None:
    with engine.paused():
        pass


CALLS: dict[str, Callable[[Engine], object]] = {
    "generate in the engine's batch": lambda engine: engine._model.generate(PROMPT, **GREEDY),
    "generate beside the engine": lambda engine: engine._model.generate(PROMPT, num_beams=2, **GREEDY),
    "the engine's generate": lambda engine: engine.generate([[1, 2]], SHORT),
    "a result": lambda engine: engine.submit([1, 2], SHORT).result(),
    "a pause": pause,
}


class Said(logging.Handler):
    """Hears what is said of a thread that waits."""

    def __init__(self, thread: str) -> None:
        super().__init__()
        self.thread, self.heard, self.messages = thread, threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if f"thread {self.thread!r} waits for a step" in record.getMessage():
            self.messages.append(record.getMessage())
            self.heard.set()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(awaited_code, "LONG", 0.05)
    handler, logger = Said("caller"), logging.getLogger("compiled_llm.engine")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class Waiting:
    """Code of the user's that begins a call in another thread, and waits until it is said that nothing goes on."""

    def __init__(self, said: Said, call: Callable[[], object]) -> None:
        self.said, self.caller = said, threading.Thread(target=call, name="caller", daemon=True)
        self.was_said = False

    def wait(self) -> None:
        if self.caller.ident is None:
            self.caller.start()
            self.was_said = self.said.heard.wait(PATIENCE)

    def process(self, tokens: list[int], logits: Tensor) -> Tensor:
        self.wait()
        return logits


def check(waiting: Waiting, name: str) -> None:
    waiting.caller.join(PATIENCE)
    assert waiting.was_said
    assert not waiting.caller.is_alive()
    (message,) = waiting.said.messages  # once, however long it waits
    assert f"has waited 0 s for {name} to return: if this waits for thread 'caller', neither goes on" in message


@pytest.mark.parametrize("call", CALLS)
def test_a_logits_processor_that_waits_for_a_call_of_another_thread(call: str, said: Said) -> None:
    with Engine(wrapped(plain=tiny(eos_token_id=None))) as engine:
        waiting = Waiting(said, lambda: CALLS[call](engine))
        engine.submit([5, 6], SamplingParams(max_tokens=2, logits_processors=[waiting.process])).result(PATIENCE)
        check(waiting, "logits processor Waiting.process")


def test_a_listener_that_waits_for_one(said: Said) -> None:
    with Engine(wrapped(plain=tiny(eos_token_id=None))) as engine:
        waiting = Waiting(said, lambda: engine.generate([[1, 2]], SHORT))
        handle = engine.submit([5, 6], SHORT)
        handle.when_changed(waiting.wait)
        handle.result(PATIENCE)
        check(waiting, "listener Waiting.wait")


def test_code_that_takes_long_and_for_which_nobody_waits_is_not_spoken_of(said: Said) -> None:
    waited = threading.Event()

    def slow(tokens: list[int], logits: Tensor) -> Tensor:
        waited.wait(4 * awaited_code.LONG)
        return logits

    with Engine(wrapped(plain=tiny(eos_token_id=None))) as engine:
        engine.generate([[5, 6]], SamplingParams(max_tokens=2, logits_processors=[slow]))
    assert awaited_code._awaited == {}
    assert said.messages == []
