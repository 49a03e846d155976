"""A front's link to its generator says when there is one, when there is none, when it hangs, and why it has failed."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compiled_llm.client import AsyncClient, GeneratorError
from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process import engine_server as generators
from compiled_llm.server.openai.common import engine_link
from compiled_llm.server.openai.common.engine_link import GeneratorLink
from compiled_llm.server.openai.tokenizer import vocabulary
from support.server.fronts import chat_tokenizer, fronting
from support.server.generators import PATIENCE, Loop, generating, until


async def soon(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def linking(path: Path, see: Callable[[GeneratorLink, list[object]], Awaitable[None]]) -> list[object]:
    """What a link says while a test sees to it."""
    said: list[object] = []

    async def run() -> None:
        link = GeneratorLink(lambda tokenizer: AsyncClient(path, tokenizer=tokenizer), said.append, said.append)
        running = asyncio.create_task(link.run())
        await see(link, said)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    return said


def test_it_says_what_has_changed(generator: Loop) -> None:
    async def see(link: GeneratorLink, said: list[object]) -> None:
        await soon(lambda: link.is_ready)
        assert said == [True]
        link.model.client.close()
        await soon(lambda: not link.is_ready)
        await soon(lambda: link.is_ready)

    assert linking(generator.generator._path, see) == [True, False, True, False]


# ---- a tokenizer that cannot be loaded


class Panic(BaseException):
    """As that of Rust, which is no Exception."""


@pytest.mark.parametrize(
    "error",
    [ValueError("wrong"), KeyError("model"), OSError("no file"), GeneratorError("x"), Panic("index"), StopIteration(1)],
)
def test_it_ends_with_what_a_tokenizer_raises(
    generator: Loop, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(vocabulary, "tokenizer_of", fails)

    async def see(link: GeneratorLink, said: list[object]) -> None:
        await soon(lambda: said)
        assert link.doing == "failed; the log says why"

    assert linking(generator.generator._path, see) == [
        f"the tokenizer cannot be loaded: {type(error).__name__}: {error}"
    ]


def test_it_ends_with_what_nobody_has_expected(
    generator: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise Panic("its bytes")

    monkeypatch.setattr(engine_link, "TokenBytes", fails)
    assert linking(generator.generator._path, lambda link, said: soon(lambda: said)) == ["its bytes"]
    assert "Panic" in caplog.text


def test_the_server_ends_with_the_reason(generator: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "tokenizer_of", lambda *_: {}["model"])
    with fronting(generator.generator._path, wait=False) as front:
        until(lambda: not front._thread.is_alive())
        assert front.server.why == "the tokenizer cannot be loaded: KeyError: 'model'"


# ---- a generator that hangs


class Hanging:
    """A generator whose process says nothing while it is told to."""

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
        self.loop.generator._over.set()
        self.loop._loop.call_soon_threadsafe(self._goes_on.wait)

    def go_on(self) -> None:
        self._paused.close()
        self.loop.generator._over.clear()
        self._goes_on.set()
        threading.Thread(target=self.loop.generator._beat, daemon=True).start()


@pytest.fixture
def hanging(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(generators, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(engine_link, "_SILENT_SECONDS", 1.0)
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        tokenizer = Path(folder) / "tokenizer"
        chat_tokenizer().save_pretrained(tokenizer)
        with generating(engine, Path(folder) / "socket", tokenizer) as loop:
            hanging = Hanging(loop, engine)
            yield hanging
            hanging.go_on()


LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


def test_a_process_that_hangs_is_not_ready_and_its_requests_are_told(hanging: Hanging, engine: Engine) -> None:
    message = "the process that runs the model has said nothing for 1 s: it is stopped or blocked"
    before = engine.stats().finished
    with fronting(hanging.loop.generator._path) as front:
        with front.http.stream("POST", "/v1/completions", json={**LONG, "n": 16, "stream": True}) as response:
            events = (line for line in response.iter_lines() if line)
            next(events)
            hanging.hang()
            *_, last = events
        assert message in last
        assert front.http.get("/ready").json() == {"ready": False, "doing": message}
        refused = front.http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert front.http.get("/health").status_code == 200
        hanging.go_on()
        until(lambda: front.http.get("/ready").status_code == 200)
        assert front.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        until(lambda: engine.stats().finished >= before + 17)  # what was given up has ended, too


def test_a_process_that_is_busy_does_not_hang(hanging: Hanging) -> None:
    """Neither its event loop nor its engine's thread has to have a turn."""
    with fronting(hanging.loop.generator._path) as front:
        busy = threading.Event()
        hanging.loop._loop.call_soon_threadsafe(busy.wait)
        waiting = threading.Event()
        threading.Timer(2.5, waiting.set).start()
        while not waiting.is_set():
            assert front.http.get("/ready").status_code == 200
        busy.set()
        assert front.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
