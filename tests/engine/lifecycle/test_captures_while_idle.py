"""Captures that steps have missed run while nothing else does, until a request comes or a call needs the model."""

from __future__ import annotations

import threading
from collections.abc import Callable

from compiled_llm.execution.model_runner import ModelRunner
from support.engine.tiny_engines import PATIENCE, greedy
from support.in_threads import start

PARAMS = greedy(4)


def test_an_idle_engine_captures_until_a_request_comes_or_it_is_paused(engine, monkeypatch):
    idle, let_go = threading.Event(), threading.Event()

    def catch_up(self: ModelRunner, wanted: Callable[[], object]) -> None:
        while not (wanted() or let_go.is_set()):
            idle.set()
        idle.clear()

    monkeypatch.setattr(ModelRunner, "catch_up", catch_up)
    for interrupt in (lambda: engine.submit([5, 6], PARAMS).result(PATIENCE), engine.sleep):
        try:
            engine.submit([5, 6, 7], PARAMS).result(PATIENCE)
            assert idle.wait(PATIENCE)
            start(interrupt).result(PATIENCE)  # or captures have not let go
        finally:
            let_go.set()
        let_go.clear()
    engine.wake()
