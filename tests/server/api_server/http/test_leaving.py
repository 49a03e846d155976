"""Clients leave, send half a request or take nothing, queues are full, engine processes die: all requests that wait are
told, nothing is left over, and others do not wait.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop as EngineLoop
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.server.openai.common import engine_link
from support.server.engine_processes import PATIENCE, Loop, until
from support.server.passing_time import Clock
from support.server.running_servers import HEAD, RunningServer, chat_tokenizer, request, running_server
from support.server.scripted import Script

TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


def until_idle(engine: Engine) -> None:
    until(lambda: not (engine.stats().running or engine.stats().waiting))


class Leaving:
    """A client that leaves in the engine's third step from now on, which goes on once the engine has been told so."""

    def __init__(self, peer: socket.socket, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.steps, step = 0, EngineLoop.step

        def counted(loop: EngineLoop, look: bool) -> Any:
            self.steps += 1
            if self.steps == 3:
                peer.close()
                until(lambda: engine._engine_thread._arrivals)
            return step(loop, look)

        patch.setattr(EngineLoop, "step", counted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    api_server: RunningServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    before = engine.stats()
    with socket.create_connection(("127.0.0.1", api_server.port)) as peer:
        leaving = Leaving(peer, engine, monkeypatch)
        peer.sendall(request({**LONG, "stream": stream, "n": 2}))
        until(lambda: leaving.steps >= 3)
        until_idle(engine)
    assert engine.stats().new_tokens < before.new_tokens + 20  # of 1,800
    assert engine.stats().finished == before.finished + 2


@pytest.fixture
def mortal(model: Any, path: Path) -> Iterator[tuple[Loop, Engine]]:
    """An engine process that a test may end, which runs one request and has one wait."""
    chat_tokenizer().save_pretrained(path.parent / "tokenizer")
    with Engine(model, tokenizer=chat_tokenizer(), max_num_seqs=1, max_queue=1) as engine:
        yield opened(engine, path), engine


def opened(engine: Engine, path: Path) -> Loop:
    loop = Loop(path)
    loop.open(engine, path.parent / "tokenizer")
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


def test_a_stream_ends_with_its_text_and_not_with_its_last_token(script: Script, speaker: RunningServer) -> None:
    script.text, script.at_once, script.reason = "one two " * 3000, 1000, "stop"  # tokens come faster than their text
    choices = [event["choices"][0] for event in speaker.events(TEXT, prompt="a")]
    assert "".join(choice["text"] for choice in choices) == script.text
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"echo": True, "logprobs": 0, "max_tokens": 0}])
def test_a_prefill_whose_client_has_left_ends_at_its_next_chunk(
    api_server: RunningServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    add_chunk = Scheduler._add_chunk
    monkeypatch.setattr(Scheduler, "_add_chunk", lambda *arguments: add_chunk(*arguments[:3], 4))
    with socket.create_connection(("127.0.0.1", api_server.port)) as peer:
        leaving = Leaving(peer, engine, monkeypatch)
        peer.sendall(request({"prompt": [[5 + 7 * place % 90 for place in range(300)]], "max_tokens": 3, **more}))
        until(lambda: leaving.steps >= 3)
        until_idle(engine)
    assert leaving.steps <= 4  # of seventy-five
    engine.reset_prefix_cache()


# ---- clients that send half a request, or take nothing


BODY = {"prompt": "a", "max_tokens": 1}
WORDY = {"prompt": "a", "max_tokens": 100, "n": 16, "ignore_eos": True, "logprobs": 20}
"""An answer of megabytes."""


@pytest.fixture(scope="module")
def timed(engine_process: Loop) -> Iterator[RunningServer]:
    """An API server whose time passes as a test says; its engine process, whose time does not, never hangs for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_link, "_SILENT_SECONDS", 1e9)
        with running_server(engine_process.server._path, client_seconds=30.0) as api_server:
            # Else the kernel would take megabytes for a client that takes nothing.
            api_server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)
            yield api_server


@pytest.fixture(scope="module")
def clock(timed: RunningServer) -> Clock:
    return Clock(timed)


def connected(api_server: RunningServer) -> socket.socket:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    peer.settimeout(PATIENCE)
    peer.connect(("127.0.0.1", api_server.port))
    return peer


def rest(peer: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    received = b""
    while data := peer.recv(2**16):
        received += data
    return received


def send_until_closed(peer: socket.socket, data: bytes, clock: Clock | None = None) -> int:
    """How often it could be sent, with a moment between, or with a while of a clock."""
    for count in range(2000):
        try:
            peer.sendall(data)
        except OSError:
            return count
        time.sleep(0.01)
        if clock is not None:
            clock.add()
    raise AssertionError("the connection is still open")


def has_come(api_server: RunningServer, peer: socket.socket, count: int) -> bool:
    """Whether the API server has a connection, and so many bytes of a head."""
    connections: Any = tuple(api_server.server.server_state.connections)
    return any((talks.client, talks._head_bytes) == (peer.getsockname(), count) for talks in connections)


def is_answered(api_server: RunningServer) -> bool:
    return api_server.http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("sent", [HEAD, b"P", b""])
def test_half_a_head_is_waited_for_until_its_time_is_over(timed: RunningServer, clock: Clock, sent: bytes) -> None:
    with connected(timed) as peer:
        peer.sendall(sent)
        until(lambda: has_come(timed, peer, len(sent)))
        clock.add(20.0)
        assert is_answered(timed)
        assert has_come(timed, peer, len(sent))
        received = clock.rest(peer)
    assert received.startswith(b"HTTP/1.1 400 " if sent else b"")
    assert received.endswith(b"The head of the request has not come in time." if sent else b"")
    assert received or not sent
    with connected(timed) as peer:  # nor longer, if it comes byte by byte
        peer.sendall(HEAD)
        send_until_closed(peer, b"X-A: b\r\n", clock)


@pytest.mark.parametrize("trickle", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_the_next_head_has_its_time_as_well(timed: RunningServer, clock: Clock, trickle: bytes) -> None:
    with connected(timed) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peer.recv(2**16).startswith(b"HTTP/1.1 200 ")
        peer.sendall(trickle)
        clock.rest(peer)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 120_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 17_000 + b"\r\n",
        b"GET /health?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"X-A: " + b"a" * 2**16,
        HEAD + b"X-A: b\r\n" * 2**14,
    ],
)
def test_a_head_that_is_too_long_is_refused_whole_or_without_end(api_server: RunningServer, head: bytes) -> None:
    with connected(api_server) as peer:
        received = b"HTTP/1.1 400 The head of the request is too long."
        with suppress(OSError):  # if the rest was on its way when it was closed, the kernel says no more
            peer.sendall(head)
            received = rest(peer)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.endswith(b"The head of the request is too long.")
    assert received.count(b"HTTP/1.1") == 1
    assert is_answered(api_server)


def test_a_long_head_is_answered(api_server: RunningServer) -> None:
    with connected(api_server) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 60_000 + b"\r\n\r\n")
        assert peer.recv(2**16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("begun", "more"),
    [(b"2\r\n{}\r\n0\r\n", b"X: " + b"x" * 9_000 + b"\r\n")]
    + [(begun, b"x" * 9_000) for begun in (b"2\r\n{}\r\n0\r\nX: ", b"2;x=")],
    ids=["lines", "a line", "a chunk"],
)
def test_a_trailer_without_end_is_left(api_server: RunningServer, begun: bytes, more: bytes) -> None:
    with connected(api_server) as peer:
        peer.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + begun)
        assert send_until_closed(peer, more) < 500, "long before its time is over"
    assert is_answered(api_server)


def test_half_a_body_is_refused_and_its_rest_is_not_waited_for(timed: RunningServer, clock: Clock) -> None:
    with connected(timed) as peer:
        peer.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        until(lambda: timed.server.server_state.tasks)
        clock.add(40.0)
        received = b""
        while b'"code"' not in received:
            received += peer.recv(2**16)
            assert received
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"the body has not come within 30 s" in received
        send_until_closed(peer, b" ", clock)
    assert is_answered(timed)


def test_a_request_that_comes_in_pieces_is_answered(timed: RunningServer, clock: Clock) -> None:
    whole, head = request(BODY), len(HEAD)
    with connected(timed) as peer:
        for piece in (whole[:20], whole[20:head], whole[head:-20], whole[-20:-5], whole[-5:]):
            peer.sendall(piece)
            clock.add()
        assert peer.recv(2**16).startswith(b"HTTP/1.1 200 ")


def test_a_head_may_wait_for_the_answer_before_it(timed: RunningServer, clock: Clock, engine: Engine) -> None:
    with connected(timed) as peer:
        with engine.paused():
            peer.sendall(request({"prompt": "a", "max_tokens": 20, "ignore_eos": True}) + b"GET /hea")
            until(lambda: engine._engine_thread.waiting)
            for _ in range(10):
                clock.add()
        received = b""
        while b"}}}" not in received:
            received += peer.recv(2**16)
            assert received, "its answer takes longer than a head may"
        assert received.startswith(b"HTTP/1.1 200 ")
        peer.sendall(b"lth HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200 " in peer.recv(2**16)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_is_cut_off(
    timed: RunningServer, clock: Clock, engine: Engine, stream: bool
) -> None:
    with connected(timed) as peer:
        peer.sendall(request({**WORDY, "stream": stream}))
        state = timed.server.server_state
        until(lambda: state.tasks)
        clock.until(
            lambda: not state.tasks and all(each.client != peer.getsockname() for each in tuple(state.connections))
        )
        assert is_answered(timed)
        received = rest(peer)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert len(received) < 2**20, "and the answer has more"
    assert b"[DONE]" not in received
    until(lambda: not engine.stats().running)


@pytest.mark.whole
def test_a_stream_that_is_not_read_ends_at_a_limit_and_no_other_waits(engine_process: Loop, engine: Engine) -> None:
    before = engine.stats()
    with running_server(engine_process.server._path, max_unsent=100) as api_server:
        api_server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)
        with connected(api_server) as peer:
            peer.sendall(request({**WORDY, "stream": True, "max_tokens": 900}))
            others = 0
            while engine.stats().finished < before.finished + 16 + others:
                assert is_answered(api_server)
                others += 1
            assert engine.stats().new_tokens < before.new_tokens + 16 * 900
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += peer.recv(2**16)
        last = received.rstrip(b"0\r\n").rpartition(b"data: ")[2]
        assert json.loads(last)["error"]["message"] == "the client has not read, and more than 100 tokens wait for it"
        with api_server.http.stream("POST", "/v1/completions", json={**WORDY, "stream": True}) as quick:
            assert list(quick.iter_lines())[-2] == "data: [DONE]"


def test_there_are_so_many_connections_and_the_next_is_told(engine_process: Loop) -> None:
    with running_server(engine_process.server._path, max_connections=2) as api_server:
        with connected(api_server) as first, connected(api_server):
            with connected(api_server) as third:
                received = rest(third)
            assert received.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: " in received
            assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert first.recv(2**16).startswith(b"HTTP/1.1 200 ")
        until(lambda: not api_server.server.server_state.connections)
        assert is_answered(api_server)
