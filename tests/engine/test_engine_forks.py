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
from compiled_llm.requests.handle import RequestHandle
from support.engine.text_tokenizers import byte_level, decode
from support.engine.tiny_engines import greedy, tiny, wrapped
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
    return wrapped(700, tiny(vocab_size=380))


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level()) as engine:
        yield engine


async def read(handle: RequestHandle) -> None:
    await handle


def uses(engine: Engine, handle: RequestHandle, stream: Iterator[str]) -> dict[str, Callable[[], Any]]:
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
        "stream": lambda: list(stream),
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


def check_child(engine: Engine, handle: RequestHandle, stream: Iterator[str], expected: list[int]) -> None:
    told_elsewhere(uses(engine, handle, stream))
    assert repr(engine)
    handle.cancel()
    engine.close()
    del engine, handle, stream
    gc.collect()
    with Engine(wrapped(500, tiny(vocab_size=380))) as own:
        assert own.submit(PROMPT, greedy(20)).result(timeout=20).token_ids == expected[:20]


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("meanwhile", [running, paused_with_every_lock_held])
def test_an_engine_belongs_to_its_process(meanwhile, model, engine):
    expected = alone(model, PROMPT, 200)
    handle = engine.submit(PROMPT, LONG)
    texts = [iter(engine.submit(PROMPT, greedy(200, stop=stop)).text()) for stop in (None, "\0\0")]
    begun = [next(iter(handle)), *map(next, texts)][1:]
    with meanwhile(engine, handle):
        for stream in texts:
            forked(lambda stream=stream: check_child(engine, handle, stream, expected))
    assert handle.result(timeout=60).token_ids == expected
    for piece, stream in zip(begun, texts, strict=True):
        assert piece + "".join(stream) == decode(expected)
