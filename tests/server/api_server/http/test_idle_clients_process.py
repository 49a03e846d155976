"""Real processes: clients that send half a request, or do not read, lose their pages, and others do not wait."""

from __future__ import annotations

import json
import math
import resource
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.running_servers import serving

OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "20000 tokens", "--client-seconds", "1")
TEXT = "/v1/completions"
WORDY = {"prompt": "a", "max_tokens": 900, "n": 16, "ignore_eos": True, "logprobs": 20, "stream": True}
"""An answer of more megabytes than the kernel takes for a client that does not read."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

pytestmark = pytest.mark.whole


def figure(url: str, name: str) -> float:
    """Of /metrics; nan if there is no room for a connection."""
    try:
        text = httpx.get(f"{url}/metrics").text
    except httpx.TransportError:
        return math.nan
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return float({name: value for name, _, value in lines}.get(name, "nan"))


def is_answered(url: str) -> bool:
    try:
        return httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 1}, timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


def connected(url: str, sent: bytes) -> socket.socket:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    peer.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    with suppress(OSError):  # it may have been refused by now
        peer.sendall(sent)
    return peer


def test_a_client_that_does_not_read_has_its_pages_taken(model_folder: Path) -> None:
    body = json.dumps(WORDY).encode()
    with serving(model_folder, *OPTIONS) as (_, url):
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        with connected(url, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body):
            until(lambda: figure(url, "compiled_llm_running") == 16)
            while figure(url, "compiled_llm_http_open") > 1:
                assert is_answered(url)
        until(lambda: figure(url, "compiled_llm_running") == 0)
        assert figure(url, 'compiled_llm_pages{state="used"}') == 0
        assert figure(url, "compiled_llm_new_tokens_total") < 16 * 900


def test_half_requests_leave_room_for_others(model_folder: Path) -> None:
    limited = ("prlimit", "--nofile=64:120", COMMAND)  # room for 20 connections
    with serving(model_folder, *OPTIONS, command=limited) as (process, url), ExitStack() as peers:
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (120, 120)
        for _ in range(15):
            for sent in (b"", b"G", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{"):
                peers.enter_context(connected(url, sent))
        until(lambda: is_answered(url))
        until(lambda: figure(url, "compiled_llm_http_open") == 1)
