"""How many classes and calls of ours a token takes from the read of its step to its chunk of HTTP, in both processes.

Engine process and API server run in threads of this process. The engine launches a step only once the chunk of the
token before has come, so each token is counted alone: that of one stream among none, which shares no call with others.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import compiled_llm
from compiled_llm import Engine
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.engine.thread.request_table import RequestTable
from compiled_llm.server.engine_process import engine_server
from support.noting import note_calls
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import RunningServer, chat_tokenizer, running_server
from support.tiny_models import tiny_qwen3

PACKAGE = Path(compiled_llm.__file__).parent
BACK = {Loop._read.__code__, RequestTable.notify.__code__}
"""With these the engine's thread reads a step, and tells of it; what else it does is the way in."""
WAY_IN = (
    "openai/chat/request.py",
    "fields/",
    "chat/prompt.py",
    "chat/message.py",
    "sampling_params.py",
    "openai/tokenizer/",
)
"""Modules whose objects are made before there is an answer."""
ROOMS = (
    "client/",
    "engine/steps/",
    "engine/thread/",
    "engine/answer.py",
    "protocol/",
    "requests/",
    "server/engine_process",
    "server/openai",
)


class WayBack:
    """A note of our classes and calls on the way back, in all threads, while it is ``open``."""

    def __init__(self) -> None:
        self.open = False
        self.calls: list[str] = []
        self.entered: set[str] = set()
        self.made: set[type] = set()
        self._inside = threading.local()

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code in BACK:
            self._inside.depth = getattr(self._inside, "depth", 0) + {"call": 1, "return": -1}.get(event, 0)
        if event != "call" or not self.open:
            return
        if code.co_name in ("__init__", "__new__"):
            kind = frame.f_locals.get("_cls", type(frame.f_locals.get("self")))
            if _is_ours(kind):
                self.made.add(kind)
        if not (file := _file(code.co_filename)):
            return
        if threading.current_thread().name == "compiled_llm engine" and not self._inside.__dict__.get("depth"):
            return
        self.calls.append(f"{file}:{code.co_name}")
        if (owner := frame.f_locals.get("self")) is not None and _is_ours(type(owner)):
            self.entered.add(type(owner).__name__)


@cache
def _file(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(PACKAGE)) if PACKAGE in path.parents else ""


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == "compiled_llm"


@contextmanager
def noted() -> Iterator[WayBack]:
    """Note calls of threads that begin from now on."""
    way = WayBack()
    threading.setprofile(way.note)
    try:
        yield way
    finally:
        threading.setprofile(None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, WayBack, threading.Semaphore]]:
    steps = threading.Semaphore()
    step = EngineThread._step

    def after_a_chunk(own: EngineThread, loop: Loop, done: Any) -> bool:
        if not loop.idle:
            assert steps.acquire(timeout=60)
        return step(own, loop, done)

    monkeypatch.setattr(EngineThread, "_step", after_a_chunk)
    monkeypatch.setattr(engine_server, "_BEAT_SECONDS", 600.0)  # heartbeats come between tokens as they like
    plain = tiny_qwen3(eos_token_id=None, num_hidden_layers=1, vocab_size=380)
    model = compiled_llm.wrap(plain, mode="eager", kv_memory="2000 tokens", max_batch_size=4, progress=False)
    with (
        noted() as way,
        Engine(model, tokenizer=chat_tokenizer()) as engine,
        engine_that_names_its_tokenizer(engine) as process,
        running_server(process.server._path) as running,
    ):
        yield running, way, steps


def stream(server: RunningServer, steps: threading.Semaphore) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an answer, of which a step follows each."""
    while steps.acquire(blocking=False):  # what the last answer has left
        pass
    steps.release()
    messages = [{"role": "user", "content": "Hi"}]
    # Letters alone: the text of bytes that are no whole character comes with a later token.
    letters = chat_tokenizer()("abcdefgh", add_special_tokens=False)["input_ids"]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "logit_bias": dict.fromkeys(letters, 100)}
    for chunk in server.events("/v1/chat/completions", **body):
        yield chunk
        steps.release()


def test_a_streamed_token_takes_few_calls(server) -> None:
    running, way, steps = server
    counts: list[int] = []
    for _ in stream(running, steps):  # what a first answer makes
        pass
    for number, _ in enumerate(stream(running, steps)):
        way.open = False
        counts.append(len(way.calls))
        if number == 8:
            way.calls.clear(), way.entered.clear()
            counts.clear()
        way.open = 8 <= number < 18
    tokens = 10
    calls = Counter(way.calls)
    for call, count in calls.most_common():
        print(f"{count / tokens:6.1f} {call}")
    print(f"calls per token: {len(way.calls) / tokens}, classes entered: {len(way.entered)}: {sorted(way.entered)}")
    assert len(way.calls) / tokens <= 56
    assert len(way.entered) <= 31


def test_an_answer_is_few_objects(server, monkeypatch) -> None:
    """Of classes on the way back: what lives while an answer is streamed, and what its messages are made of."""
    running, way, steps = server
    taken = note_calls(monkeypatch, ClientSession, "_take_step", lambda own, step, changed: [step])
    for _ in stream(running, steps):
        pass
    gc.collect()
    before = gc.get_objects()  # and no id of these is one of another object's meanwhile
    found: set[str] = set()
    for number, _ in enumerate(stream(running, steps)):
        way.open = True
        if number == 8:
            found = classes_of_others(before)
    made = found | messages_of(taken) | {kind.__name__ for kind in way.made if _on_the_way_back(kind)}
    print(f"classes of objects that are made for an answer: {len(made)}: {sorted(made)}")
    assert len(made) <= 30


def classes_of_others(before: list[object]) -> set[str]:
    """The classes on the way back of objects that were not there before."""
    known = set(map(id, before))
    kinds = {type(each) for each in gc.get_objects() if id(each) not in known}
    return {kind.__name__ for kind in kinds if _is_ours(kind) and _on_the_way_back(kind)}


@cache
def _on_the_way_back(kind: type) -> bool:
    file = _file(sys.modules[kind.__module__].__file__ or "")
    return file.startswith(ROOMS) and not any(part in file for part in WAY_IN)


def messages_of(taken: list[Any]) -> set[str]:
    """The classes of messages of steps, and of what they have."""
    found: set[str] = set()
    left = [message for messages in taken for message in messages]
    while left:
        each = left.pop()
        if isinstance(each, msgspec.Struct) and type(each).__name__ not in ("Beat", "Ready", "Preparing"):
            found.add(type(each).__name__)
            left += msgspec.structs.astuple(each)
        elif isinstance(each, list):
            left += each
    return found
