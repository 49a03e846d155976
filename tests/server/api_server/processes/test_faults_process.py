"""An engine process is killed under load again and again, and a client reads nothing: the others are answered."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from compiled_llm.client import Client, EngineProcessError
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.engine_processes import PATIENCE, until
from support.server.processes import children, files_of, threads_of
from support.server.running_servers import serving
from support.server.under_load import OPTIONS, TEXT, assert_nothing_is_left, figures, is_ready, served

ROUNDS, AT_ONCE = 20, 12
# The command, with more restarts an hour than it has.
MANY_RESTARTS = """
from compiled_llm.__main__ import main
from compiled_llm.server.engine_process.starter import EngineProcess
EngineProcess.__init__.__defaults__ = (1000,)
main()
"""

pytestmark = pytest.mark.whole


def ask(http: httpx.Client, draw: random.Random) -> str:
    """Ask for an answer, and return how that went; anything but an answer or a sentence with 503 is an error."""
    body = {"prompt": "fox", "max_tokens": draw.choice([3, 60, 900]), "ignore_eos": True, "n": draw.randint(1, 2)}
    if draw.random() < 0.5:
        answer = http.post(TEXT, json=body)
        assert answer.status_code in (200, 503), answer.text
        assert "choices" in answer.json() or answer.json()["error"]["message"]
        return str(answer.status_code)
    with http.stream("POST", TEXT, json={**body, "stream": True}) as response:
        *_, last = [line for line in response.iter_lines() if line]
    if response.status_code == 200:
        return "whole" if last == "data: [DONE]" else json.loads(last.removeprefix("data: "))["error"]["code"]
    assert response.status_code == 503
    return "503"


def ask_the_socket(client: Client, stop: threading.Event) -> set[str]:
    """Ask by the socket until told to stop, by one client through all engine processes; return what was said."""
    said = set()
    while not stop.is_set():
        try:
            said.add(client.generate([[3, 4]], SamplingParams(max_tokens=40, ignore_eos=True))[0].finish_reason or "")
        except EngineProcessError as error:
            said.add(type(error).__name__)
    return said


def calling(url: str) -> httpx.Client:
    """One for all: to make another takes longer than an answer does."""
    return httpx.Client(base_url=url, timeout=PATIENCE, verify=False)


@contextmanager
def asking(url: str, path: Path) -> Iterator[Callable[[int], list[Future[str]]]]:
    """Somebody who asks by the socket all the time, and a function that has many ask by HTTP."""
    stop = threading.Event()
    with ThreadPoolExecutor(AT_ONCE + 1) as pool, Client(path) as client, calling(url) as http:
        by_socket = pool.submit(ask_the_socket, client, stop)
        yield lambda seed: [pool.submit(ask, http, random.Random(seed + number)) for number in range(AT_ONCE)]
        stop.set()
        assert by_socket.result(PATIENCE) >= {"length", "EngineDeadError"}


def test_an_engine_process_that_is_killed_twenty_times(model_folder: Path, path: Path, seed: int) -> None:
    draw, said, before = random.Random(seed), set(), ([""], 0)
    command = (sys.executable, "-c", MANY_RESTARTS)
    with served(model_folder, path, 1, command=command) as server:
        process, url = server.process, server.url
        with asking(url, path) as ask_many:
            for number in range(ROUNDS):
                answers = ask_many(1000 * number + seed)
                time.sleep(draw.uniform(0, 0.8))
                os.kill(server.engine_process, signal.SIGKILL)
                said |= {answer.result(PATIENCE) for answer in answers}
                until(lambda: children(process.pid))
                if number == 1:
                    until(lambda: is_ready(url))
                    before = files_of(process.pid), threads_of(process.pid)
                if draw.random() < 0.8:  # else the next one is killed while it loads
                    until(lambda: is_ready(url))
            until(lambda: is_ready(url))
        assert {"engine_dead", "whole", "200", "503"} <= said
        assert httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 3}).status_code == 200
        assert_nothing_is_left(url)
        until(lambda: len(files_of(process.pid)) <= len(before[0]) + 2)  # connections that clients keep for a while
        assert threads_of(process.pid) <= before[1] + 2
        assert len(children(process.pid)) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert not path.exists()


def test_a_reader_of_http_that_stops_keeps_nobody_waiting(model_folder: Path) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 5, "n": 8})
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with serving(model_folder, *OPTIONS) as (_, url):
        until(lambda: is_ready(url))
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            peer.sendall(f"{head}\r\n\r\n{body}".encode())
            until(lambda: figures(url)["compiled_llm_new_tokens_total"] > 100)
            for _ in range(3):
                beside = httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 30}, timeout=PATIENCE)
                assert beside.status_code == 200
            until(lambda: figures(url)["compiled_llm_running"] == 0.0)  # it has all tokens; nobody waits for the reader
            received = bytearray()
            while b"[DONE]" not in received:
                data = peer.recv(2**16)
                assert data
                received += data
        assert received.count(b'"finish_reason":"length"') == 8
        assert_nothing_is_left(url)
