"""An API server's link says whether there is an engine process, whether it hangs, and why it has failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from compiled_llm.client import AsyncClient, EngineProcessError
from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process import engine_server
from compiled_llm.server.openai.common import engine_link
from compiled_llm.server.openai.common.engine_link import EngineLink
from compiled_llm.server.openai.tokenizer import vocabulary
from support.server.engine_processes import PATIENCE, Loop, engine_that_names_its_tokenizer, until
from support.server.passing_time import Clock
from support.server.running_servers import running_server


async def soon(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def linking(path: Path, see: Callable[[EngineLink, list[object]], Awaitable[None]]) -> list[object]:
    """What a link says while a test sees to it."""
    said: list[object] = []

    async def run() -> None:
        link = EngineLink(lambda tokenizer: AsyncClient(path, tokenizer=tokenizer), said.append, said.append)
        running = asyncio.create_task(link.run())
        await see(link, said)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    return said


def test_it_says_what_has_changed(engine_process: Loop) -> None:
    async def see(link: EngineLink, said: list[object]) -> None:
        await soon(lambda: link.is_ready)
        assert said == [True]
        link.model.client.close()
        await soon(lambda: not link.is_ready)
        await soon(lambda: link.is_ready)

    assert linking(engine_process.server._path, see) == [True, False, True, False]


# ---- a tokenizer that cannot be loaded


class Panic(BaseException):
    """As that of Rust, which is no Exception."""


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), OSError("no file"), EngineProcessError("x"), Panic("index"), StopIteration(1)]
)
def test_it_ends_as_its_tokenizer_does(
    engine_process: Loop, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(vocabulary, "tokenizer_of", Mock(side_effect=error))

    async def see(link: EngineLink, said: list[object]) -> None:
        await soon(lambda: said)
        assert link.doing == "failed; the log says why"

    assert linking(engine_process.server._path, see) == [
        f"the tokenizer cannot be loaded: {type(error).__name__}: {error}"
    ]


def test_it_ends_with_what_nobody_has_expected(
    engine_process: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_link, "TokenBytes", Mock(side_effect=Panic("its bytes")))
    assert linking(engine_process.server._path, lambda link, said: soon(lambda: said)) == ["its bytes"]
    assert "Panic" in caplog.text


def test_the_server_ends_with_the_reason(engine_process: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "tokenizer_of", lambda *_: {}["model"])
    with running_server(engine_process.server._path, wait=False) as api_server:
        until(lambda: not api_server._thread.is_alive())
        assert api_server.server.why == "the tokenizer cannot be loaded: KeyError: 'model'"


# ---- an engine process that hangs


class Hanging:
    """An engine process whose process says nothing while it is told to."""

    def __init__(self, loop: Loop, engine: Engine) -> None:
        self.loop = loop
        self._engine = engine
        self._paused = ExitStack()
        self._goes_on = threading.Event()
        self._goes_on.set()

    def hang(self) -> None:
        """Stop its threads: the engine's, the event loop's, and the heartbeat."""
        self._paused.enter_context(self._engine.paused())
        self._goes_on.clear()
        self.loop.server._over.set()
        self.loop._loop.call_soon_threadsafe(self._goes_on.wait)

    def go_on(self) -> None:
        self._paused.close()
        self.loop.server._over.clear()
        self._goes_on.set()
        threading.Thread(target=self.loop.server._beat, daemon=True).start()


@pytest.fixture
def hanging(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(engine_server, "_BEAT_SECONDS", 0.05)
    with engine_that_names_its_tokenizer(engine) as loop:
        hanging = Hanging(loop, engine)
        yield hanging
        hanging.go_on()


LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


def test_a_process_that_hangs_is_not_ready_and_its_requests_are_told(hanging: Hanging, engine: Engine) -> None:
    message = "the process that runs the model has said nothing for 30 s: it is stopped or blocked"
    before = engine.stats().finished
    with running_server(hanging.loop.server._path) as api_server:
        clock = Clock(api_server)
        with api_server.http.stream("POST", "/v1/completions", json={**LONG, "n": 16, "stream": True}) as response:
            events = (line for line in response.iter_lines() if line)
            next(events)
            hanging.hang()
            clock.until(lambda: not api_server.api_server.is_ready)
            *_, last = events
        assert message in last
        assert api_server.http.get("/ready").json()["doing"] == message
        refused = api_server.http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert api_server.http.get("/health").status_code == 200
        hanging.go_on()
        clock.until(lambda: api_server.http.get("/ready").status_code == 200)
        assert api_server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        until(lambda: engine.stats().finished >= before + 17)  # what was given up has ended, too


def test_a_process_that_is_busy_does_not_hang(hanging: Hanging) -> None:
    """Neither its event loop nor its engine's thread has to have a turn."""
    with running_server(hanging.loop.server._path) as api_server:
        clock, link = Clock(api_server), api_server.api_server.link
        busy = threading.Event()
        hanging.loop._loop.call_soon_threadsafe(busy.wait)
        for _ in range(15):  # each is a sixth of the time after which it would hang
            heard = link.model.client.heard
            until(lambda heard=heard: link.model.client.heard > heard)  # type: ignore[misc]
            clock.add()
            assert api_server.http.get("/ready").status_code == 200
        busy.set()
        assert api_server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
