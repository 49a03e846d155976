"""What steps have missed is captured while nothing runs, until somebody wants something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.execution.model_runner import ModelRunner
from support.tiny_models import tiny_qwen3

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = compiled_llm.wrap(tiny_qwen3(), mode="eager", kv_memory="2000 tokens", progress=False)
    with Engine(model) as engine:
        yield engine
    compiled_llm.unwrap(model)


def test_an_idle_engine_captures_until_a_request_comes_or_it_is_paused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, let_go = threading.Event(), threading.Event()

    def catch_up(self: ModelRunner, wanted: Callable[[], object]) -> None:
        while not (wanted() or let_go.is_set()):
            idle.set()
        idle.clear()

    monkeypatch.setattr(ModelRunner, "catch_up", catch_up)
    for interrupt in (lambda: engine.submit([5, 6], PARAMS).result(60), engine.sleep):
        try:
            engine.submit([5, 6, 7], PARAMS).result(60)
            assert idle.wait(60)
            thread = threading.Thread(target=interrupt, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "whoever captures has not let go"
        finally:
            let_go.set()
        let_go.clear()
    engine.wake()
