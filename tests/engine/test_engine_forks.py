"""In a forked process an engine does not exist: its users are told so, and it goes on where it was made."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.thread.handle import RequestHandle
from support.engine.tiny_engines import greedy, wrapped
from support.execution.forking import another_thread, forked, told_elsewhere
from support.parity import alone

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
]

PROMPT = list(range(3, 23))
LONG = greedy(200)


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(500)


async def read(handle: RequestHandle) -> None:
    await handle


def uses(engine: Engine, handle: RequestHandle) -> dict[str, Callable[[], Any]]:
    return {
        "submit": lambda: engine.submit(PROMPT),
        "generate": lambda: engine.generate(PROMPT),
        "warmup": engine.warmup,
        "describe": engine.describe,
        "stats": engine.stats,
        "paused": lambda: engine.paused().__enter__(),
        "reset_prefix_cache": engine.reset_prefix_cache,
        "update_weights": lambda: engine.update_weights("folder"),
        "sleep": engine.sleep,
        "wake": engine.wake,
        "result": lambda: handle.result(timeout=5),
        "iter": lambda: list(handle),
        "tokens": lambda: list(handle.tokens()),
        "text": handle.text,
        "await": lambda: asyncio.run(read(handle)),
        "when_changed": lambda: handle.when_changed(gc.collect),
    }


@contextmanager
def running(engine: Engine, handle: RequestHandle) -> Iterator[None]:
    yield  # its thread runs a step, mostly


@contextmanager
def paused_with_every_lock_held(engine: Engine, handle: RequestHandle) -> Iterator[None]:
    """While requests have pages."""
    engine_thread = engine._engine_thread

    def hold(stay: Callable[[], None]) -> None:
        with (
            engine_thread._arrivals.changed,
            engine_thread.request_table.output._work.changed,
            handle.listeners._changed,
            handle._reading,
        ):
            stay()

    with engine.paused(weights_stay=True), another_thread(hold):
        yield


def check_child(engine: Engine, handle: RequestHandle, expected: list[int]) -> None:
    told_elsewhere(uses(engine, handle))
    assert repr(engine)
    handle.cancel()
    engine.close()
    del engine, handle
    gc.collect()
    with Engine(wrapped(500)) as own:
        assert own.submit(PROMPT, greedy(20)).result(timeout=20).token_ids == expected[:20]


@pytest.mark.parametrize("meanwhile", [running, paused_with_every_lock_held])
def test_an_engine_belongs_to_its_process(meanwhile, model, engine):
    expected = alone(model, PROMPT, 200)
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    with meanwhile(engine, handle):
        forked(lambda: check_child(engine, handle, expected))
    assert handle.result(timeout=60).token_ids == expected
