"""API servers to talk to over HTTP: in a thread of this process, or as the command starts them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from compiled_llm.server.http_server import HttpServer
from compiled_llm.server.serving import listen
from compiled_llm.server.settings import ApiServerSettings
from support.engine.text_tokenizers import byte_level
from support.server.engine_processes import COMMAND, PATIENCE

TEMPLATE = (
    "{% for message in messages %}{% if loop.index0 % 2 and message.role == 'system' %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request(body: object) -> bytes:
    """A whole request for a completion, as it is sent."""
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


class RunningServer:
    """An API server in a thread."""

    def __init__(self, settings: ApiServerSettings, path: Path) -> None:
        self.path = path
        self.server = HttpServer(settings, path)
        self.api_server = self.server.api_server
        self._socket = listen(settings)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # Without TLS; to read the certificates that it would take costs 35 ms of a core.
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)
        self.loop = asyncio.new_event_loop()
        serve = self.server.serve([self._socket])
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(serve,), daemon=True)
        self._thread.start()

    def post(self, path: str, **body: Any) -> Any:
        """What is answered, with status 200."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream, which ends as it has to."""
        line = ""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in filter(None, response.iter_lines()):
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))
        assert path == "/v1/responses" or line == "data: [DONE]"

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        self.loop.close()
        self._socket.close()
        self.http.close()


@contextmanager
def running_server(socket: Path, wait: bool = True, **options: Any) -> Iterator[RunningServer]:
    """An API server in a thread of this process."""
    running = RunningServer(ApiServerSettings(**{"names": ("tiny", "other"), "port": 0, **options}), socket)
    try:
        while wait and not running.api_server.link.is_ready:
            assert running._thread.is_alive()
        yield running
    finally:
        running.close()


@contextmanager
def serving(
    folder: Path | str, *options: str, command: Sequence[str] = (COMMAND,)
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``compiled-llm serve`` over HTTP, and its address; it is killed in the end, and its engine process with it."""
    arguments = [*command, "serve", str(folder), "--port", "0", *options]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = ""
            while " at http" not in line:
                line = process.stderr.readline()
                assert line or process.poll() is None
            threading.Thread(target=process.stderr.read, daemon=True).start()  # else it waits for a reader
            yield process, line.split()[-1].removesuffix("/v1")
        finally:
            process.kill()


def is_refused(url: str) -> bool:
    """Whether connections are refused there."""
    try:
        httpx.get(f"{url}/health", verify=False)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it was being accepted
        return False
    return False
