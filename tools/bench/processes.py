"""Processes that scripts measure or ask: workers at the end of a pipe, and servers.

A worker gets one line of JSON for each request, and answers with one. Those of contenders say `{"mark": "imported"}`
and `{"mark": "loaded"}` first (with `versions`, if they like), and answer `{"prompts": [...], "new": [...], "sampling":
{...}}` with `{"seconds": 5.0, "lengths": [...]}`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx


class Worker:
    """A running worker; `mark` is told what it marks, `name` is what errors call it."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], mark: Callable[[str], object], name: str) -> None:
        self._process, self._log, self._mark, self._name = process, log, mark, name
        self.versions: dict[str, str] = {}

    def wait_for(self, mark: str) -> None:
        while self.receive().get("mark") != mark:
            pass

    def ask(self, prompts: Sequence[Sequence[int]], new: Sequence[int], **more: Any) -> dict[str, Any]:
        """Have requests answered, each with as many tokens as it asks for."""
        self.send({"prompts": prompts, "new": new, **more})
        answer = self.receive()
        if answer["lengths"] != list(new):
            raise RuntimeError(f"{answer['lengths']} tokens came instead of {list(new)}")
        return answer

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        if "mark" in message:
            self._mark(message["mark"])
        self.versions.update(message.get("versions", {}))
        return message

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self._name} ended with exit code {self._process.wait()}: {last_words(self._log)}")


@contextmanager
def started(
    command: Sequence[str],
    mark: Callable[[str], object] = lambda _: None,
    environ: Mapping[str, str] | None = None,
    log_file: Path | None = None,
    name: str = "the worker",
) -> Iterator[Worker]:
    """Start a worker for the block; closing its stdin asks it to end; if it does not, it is killed."""
    pipe = subprocess.PIPE
    with log_at(log_file) as log:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environ)
        try:
            yield Worker(process, log, mark, name)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


class ServerProcess:
    """A server, from its start on; `wait` before it is asked."""

    def __init__(self, name: str, command: Sequence[str], ready: str, log: IO[str], **options: Any) -> None:
        """`ready` is a URL, which answers with status 200 then; `options` are those of `Popen`."""
        self._name, self._ready, self._log = name, ready, log
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **options
        )

    def wait(self, say: Callable[[str], object]) -> None:
        """Return once it is ready; raises RuntimeError if it ends instead."""
        while (doing := doing_at(self._ready)) is not None:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"{self._name}: the server has ended with exit code {code}: {last_words(self._log)}")
            say(f"{self._name}: {doing}")
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # and those that it has started
            self._process.wait()


def log_at(path: Path | None) -> IO[str]:
    """Open a log for a process; it is gone at its end if it has no path."""
    return tempfile.TemporaryFile("w+", errors="replace") if path is None else path.open("w+", errors="replace")


def last_words(log: IO[str]) -> str:
    """Return the line of a log that says best why its process has ended."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if re.search(r"(Error|Exception|error:)", line)]  # more may follow
    return (errors or lines)[-1]


def doing_at(url: str) -> str | None:
    """Return what a server does, if it says so; None if it is ready."""
    try:
        response = httpx.get(url, timeout=10, trust_env=False)
        return None if response.status_code == 200 else str(json.loads(response.text).get("doing") or "starting")
    except (httpx.HTTPError, ValueError, AttributeError):
        return "starting"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
