"""Servers as the command starts them, with requests under way over HTTP and over the socket."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from compiled_llm.client import Client, EngineProcessError
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.engine_processes import COMMAND, PATIENCE, started_engine_process, until
from support.server.processes import children
from support.server.running_servers import serving

OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "20000 tokens")
TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
DONE = "data: [DONE]"


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, verify=False, timeout=PATIENCE)  # without certificates, which take long to load


def is_ready(url: str) -> bool:
    return get(url, "/ready").status_code == 200


def figures(url: str) -> dict[str, float]:
    """The metrics, without comments."""
    lines = (line.rpartition(" ") for line in get(url, "/metrics").text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def answered(url: str) -> float:
    return figures(url).get('compiled_llm_http_requests_total{path="/v1/completions",status="200"}', 0.0)


def texts(url: str) -> list[str]:
    """Many answers at once, each over a connection of its own."""

    def text(number: int) -> str:
        body = {"prompt": [3 + number, 5, 3 + 2 * number], "max_tokens": 30, "temperature": 0}
        answer = httpx.post(url + TEXT, json=body, timeout=PATIENCE, verify=False)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    with ThreadPoolExecutor(24) as pool:
        return list(pool.map(text, range(24)))


def assert_nothing_is_left(url: str) -> None:
    """No request, no page of one, and no connection but this."""
    expected = {"compiled_llm_running": 0.0, "compiled_llm_waiting": 0.0, "compiled_llm_http_open": 1.0}
    until(lambda: {**expected, 'compiled_llm_pages{state="used"}': 0.0}.items() <= figures(url).items())


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def api_servers_of(pid: int) -> list[int]:
    return [child for child in children(pid) if Path(f"/proc/{child}/cmdline").read_bytes().endswith(b"\0api-server\0")]


class Stream:
    """A stream that a thread reads to its end; it has begun once this is made."""

    def __init__(self, url: str, body: object = LONG) -> None:
        self._began, self._last = threading.Event(), ""
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()
        assert self._began.wait(PATIENCE)

    def _read(self, url: str, body: object) -> None:
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", url + TEXT, json=body, timeout=PATIENCE, verify=False) as response,
        ):
            for line in filter(None, response.iter_lines()):
                self._last = line
                self._began.set()

    def end(self) -> str:
        """Its last line."""
        self._thread.join(PATIENCE)
        return self._last


@dataclass
class Served:
    """A server under load with ``count`` API servers; with none, it is an engine process alone."""

    process: subprocess.Popen[str]
    path: Path
    count: int = 0
    url: str = ""
    streams: list[Stream] = field(default_factory=list)
    handles: list[RequestHandle] = field(default_factory=list)

    @property
    def api_servers(self) -> list[int]:
        """The processes that it has started for several."""
        return api_servers_of(self.process.pid)

    @property
    def engine_process(self) -> int:
        if not self.url:
            return self.process.pid
        (found,) = set(children(self.process.pid)) - set(self.api_servers)
        return found

    def begin(self, client: Client, count: int, body: object = LONG) -> None:
        """Have ``count`` streams and two requests of a client's run."""
        self.streams = [Stream(self.url, body) for _ in range(count if self.url else 0)]
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        self.handles = [client.submit([3, 4, number], params) for number in range(2)]
        for handle in self.handles:
            next(iter(handle))

    def ends(self) -> tuple[list[str], list[str]]:
        """How its streams and the requests have ended: their last lines, and finish reasons or errors."""

        def end(handle: RequestHandle) -> str:
            try:
                return handle.result(PATIENCE).finish_reason
            except EngineProcessError as error:
                return f"{type(error).__name__}: {error}"

        return [stream.end() for stream in self.streams], [end(handle) for handle in self.handles]


@contextmanager
def served(
    folder: Path | str, path: Path, api_servers: int, *options: str, command: Sequence[str] = (COMMAND,)
) -> Iterator[Served]:
    """A server that is ready, with so many API servers; it listens at a path, too."""
    with ExitStack() as stack:
        if not api_servers:
            process = stack.enter_context(started_engine_process(folder, path, *OPTIONS, *options, command=command))
            yield Served(process, path)
            return
        several = ("--uds", str(path), "--api-server-count", str(api_servers))
        process, url = stack.enter_context(serving(folder, *OPTIONS, *several, *options, command=command))
        until(lambda: is_ready(url))
        yield Served(process, path, api_servers, url)


def assert_is_free(url: str) -> None:
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass


SOCKET_CLIENT = """
import sys
from compiled_llm.client import Client
from compiled_llm.requests.sampling_params import SamplingParams
client = Client(sys.argv[1])
handles = [client.submit([3, 4, number], SamplingParams(max_tokens=900, ignore_eos=True)) for number in range(4)]
for handle in handles:
    next(iter(handle))
print("running", flush=True)
sys.stdin.read()
"""
HTTP_CLIENT = """
import sys, httpx
body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 2}
with httpx.stream("POST", sys.argv[1], json=body) as response:
    for line in response.iter_lines():
        print("running", flush=True)
        sys.stdin.read()
"""


def kill_client(code: str, address: str) -> None:
    """Kill a client, in a process of its own, once its requests run."""
    begin = [sys.executable, "-c", code, address]
    with subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        client.kill()
