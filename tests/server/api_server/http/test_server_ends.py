"""Requests that have not ended when the server stops waiting for them are told so, as any error is; nothing that still
runs in a thread holds the end.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from compiled_llm.server.openai import tokenize
from support.server.engine_processes import PATIENCE, until
from support.server.running_servers import RunningServer
from support.server.scripted import Script, speaking_server, tool_tokenizer

CHAT, RESPONSES, TEXT = "/v1/chat/completions", "/v1/responses", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {CHAT: MESSAGES, RESPONSES: {"input": "hi"}, TEXT: {"prompt": "hi"}}


@pytest.fixture
def saying() -> Iterator[tuple[Script, RunningServer]]:
    """A server of answers that never end, which waits for none of them once it is told to end."""
    with speaking_server(tool_tokenizer(), drain_seconds=0.0) as (script, api_server):
        script.text, script.allowed = "a long answer " * 8, threading.Semaphore(0)
        yield script, api_server
        for _ in range(1000):
            script.allowed.release()


def end(api_server: RunningServer, at_once: bool) -> None:
    api_server.server.force_exit = at_once
    api_server.server.should_exit = True
    api_server._thread.join(PATIENCE)
    assert not api_server._thread.is_alive()


def streamed(api_server: RunningServer, path: str, begun: threading.Semaphore) -> list[str]:
    """The lines of a stream, to its end."""
    lines: list[str] = []
    with api_server.http.stream("POST", path, json={**BODIES[path], "stream": True}, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 1:
                begun.release()
    return list(filter(None, lines))


def assert_ends(error: dict[str, Any]) -> None:
    assert (error["type"], error["code"], error["param"]) == ("server_error", "server_ends", None)
    assert error["message"].startswith("the server ends")


@pytest.mark.parametrize(("path", "at_once"), [(CHAT, False), (RESPONSES, True), (TEXT, False)])
def test_whole_answers_and_streams_are_told_that_the_server_ends(
    saying: tuple[Script, RunningServer], path: str, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script, api_server = saying
    assert script.allowed is not None
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(4) as clients:
        stream = clients.submit(streamed, api_server, path, begun)
        script.allowed.release()
        assert begun.acquire(timeout=PATIENCE)
        whole = [clients.submit(api_server.http.post, path, json=body) for path, body in BODIES.items()]
        until(lambda: len(api_server.server.server_state.tasks) == 1 + len(whole))
        end(api_server, at_once)
        for answer in whole:
            assert answer.result().status_code == 503
            assert_ends(answer.result().json()["error"])
        *_, name, data = stream.result()
        assert name == "event: error"
        assert_ends(json.loads(data.removeprefix("data: "))["error"])
    assert [record for record in caplog.records if record.exc_info] == []


def test_the_client_of_openai_raises_its_own_error(saying: tuple[Script, RunningServer]) -> None:
    script, api_server = saying
    assert script.allowed is not None
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "tiny", **MESSAGES}
        script.allowed.release()
        chunks = client.chat.completions.create(stream=True, **ask)
        next(chunks)
        with ThreadPoolExecutor(1) as clients:
            whole = clients.submit(client.chat.completions.create, **ask)
            until(lambda: len(api_server.server.server_state.tasks) == 2)
            end(api_server, at_once=False)
            with pytest.raises(openai.InternalServerError, match="the server ends"):
                whole.result()
        with pytest.raises(openai.APIError, match="the server ends"):
            list(chunks)


@pytest.mark.parametrize("at_once", [False, True])
def test_work_in_a_thread_is_left(
    saying: tuple[Script, RunningServer],
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, api_server = saying
    begun, gate = threading.Event(), threading.Event()

    def tokens(body: object, vocabulary: object) -> list[int]:
        begun.set()
        gate.wait(PATIENCE)
        return []

    monkeypatch.setattr(tokenize, "_tokens", tokens)
    caplog.set_level(logging.ERROR)
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(api_server.http.post, "/tokenize", json={"prompt": "long " * 5000})
        assert begun.wait(PATIENCE)
        end(api_server, at_once)
        assert answer.result().status_code == 503
        assert_ends(answer.result().json()["error"])
    gate.set()
    assert [record for record in caplog.records if record.exc_info] == []


LEAVES = """
import asyncio, threading
from compiled_llm.server.http.worker_thread import in_thread_if_long
async def main():
    begun = threading.Event()
    asyncio.ensure_future(in_thread_if_long(lambda: (begun.set(), threading.Event().wait()), 10**6))
    while not begun.is_set():
        await asyncio.sleep(0)
asyncio.run(main())
"""


def test_a_process_ends_though_long_work_goes_on() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVES], timeout=PATIENCE, check=False).returncode == 0
