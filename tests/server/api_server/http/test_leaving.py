"""Clients leave, queues are full, engine processes die: all requests that wait are told, and nothing is left over."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop as EngineLoop
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.server.engine_process.facts import ready_of
from support.server.engine_processes import Loop, until
from support.server.running_servers import RunningServer, chat_tokenizer, request, running_server
from support.server.scripted import Script

TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


def until_idle(engine: Engine) -> None:
    until(lambda: not (engine.stats().running or engine.stats().waiting))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(api_server: RunningServer, engine: Engine, stream: bool) -> None:
    before = engine.stats()
    with socket.create_connection(("127.0.0.1", api_server.port)) as peer:
        peer.sendall(request({**LONG, "stream": stream, "n": 2}))
        until(lambda: engine.stats().new_tokens >= before.new_tokens + 4)
    until_idle(engine)
    assert engine.stats().new_tokens < before.new_tokens + 1500
    assert engine.stats().finished == before.finished + 2


@pytest.fixture
def mortal(model: Any, path: Path) -> Iterator[tuple[Loop, Engine]]:
    """An engine process that a test may end, which runs one request and has one wait."""
    chat_tokenizer().save_pretrained(path.parent / "tokenizer")
    with Engine(model, tokenizer=chat_tokenizer(), max_rows=1, max_queue=1) as engine:
        yield opened(engine, path), engine


def opened(engine: Engine, path: Path) -> Loop:
    loop = Loop(path)
    ready = ready_of(engine._model, engine, "tiny", chat_tokenizer(), str(path.parent / "tokenizer"))
    loop.server.open(engine, ready)
    return loop


def test_a_full_queue_and_an_engine_process_that_is_replaced(mortal: tuple[Loop, Engine], path: Path) -> None:
    loop, engine = mortal
    with running_server(path) as api_server:
        with (
            api_server.http.stream("POST", TEXT, json={**LONG, "stream": True}) as running,
            ThreadPoolExecutor() as pool,
        ):
            events = (line for line in running.iter_lines() if line)
            assert next(events).startswith('data: {"id":"cmpl-')
            waiting = pool.submit(api_server.http.post, TEXT, json=LONG)
            until(lambda: engine.stats().waiting)
            busy = api_server.http.post(TEXT, json=LONG)
            assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
            assert busy.json()["error"]["code"] == "queue_full"
            loop.close()  # at once, as if it were killed
            *_, last = events
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
            lost = waiting.result()
            assert lost.status_code == 503
            assert lost.headers["retry-after"] == "5"
        while api_server.http.get("/ready").status_code == 200:  # the connection ends after its requests
            time.sleep(0.002)
        assert api_server.http.get("/health").status_code == 200
        again = opened(engine, path)
        until(lambda: api_server.http.get("/ready").status_code != 503)
        api_server.post(TEXT, prompt="a")
        again.close()


def test_time_and_salts_are_the_settings(engine: Engine, engine_process: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[dict[str, Any]] = []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda *args, **options: submitted.append(options) or submit(*args, **options)
    )
    with running_server(engine_process.server._path, request_seconds=0.05, salts_caches=True) as api_server:
        cut = api_server.post(TEXT, **LONG)
        assert cut["choices"][0]["finish_reason"] == "length"
        assert cut["usage"]["completion_tokens"] < 900
        for user in ("me", "you", "me"):
            api_server.post(TEXT, prompt="a", user=user)
        api_server.http.post(TEXT, json={"prompt": "a", "user": "me"}, headers={"authorization": "Bearer other"})
    assert all(options["timeout"] == 0.05 for options in submitted)
    _, mine, yours, again, other = (options["cache_salt"] for options in submitted)
    assert mine == again
    assert len({mine, yours, other}) == 3
    assert "me" not in mine.split()


def test_a_stream_ends_with_its_text_and_not_with_its_last_token(speaking: tuple[Script, RunningServer]) -> None:
    script, api_server = speaking
    script.text, script.at_once, script.reason = "one two " * 3000, 1000, "stop"  # tokens come faster than their text
    choices = [event["choices"][0] for event in api_server.events(TEXT, prompt="a")]
    assert "".join(choice["text"] for choice in choices) == script.text
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"echo": True, "logprobs": 0, "max_tokens": 0}])
def test_a_prefill_whose_client_has_left_ends_at_its_next_chunk(
    api_server: RunningServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    add_chunk = Scheduler._add_chunk
    monkeypatch.setattr(Scheduler, "_add_chunk", lambda *arguments: add_chunk(*arguments[:3], 4))
    step, steps = EngineLoop.step, 0
    with socket.create_connection(("127.0.0.1", api_server.port)) as peer:

        def leaving(loop: EngineLoop, unchanged: bool = False) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                peer.close()
                until(lambda: engine._engine_thread._arrivals)
            return step(loop, unchanged)

        monkeypatch.setattr(EngineLoop, "step", leaving)
        peer.sendall(request({"prompt": [[5 + 7 * place % 90 for place in range(300)]], "max_tokens": 3, **more}))
        while steps < 3:
            time.sleep(0.002)
        until_idle(engine)
    assert steps <= 4  # of seventy-five
    engine.reset_prefix_cache()
