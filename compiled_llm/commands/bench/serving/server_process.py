"""A server that is started, waited for and ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from compiled_llm.commands.bench.contender import Log
from compiled_llm.commands.bench.peer import last_words

_LOOKING = 0.1
"""Seconds between two looks whether it is ready."""
_PATIENCE = 30.0
"""Seconds that it has to end before it is killed."""
_LAST_LINES = 30
"""Lines of a server that has ended, that the log gets."""


@contextmanager
def running(command: Sequence[str], ready_url: str, name: str, log: Log) -> Iterator[None]:
    """Run a server for the block, which begins when it is ready.

    Args:
        command: starts it.
        ready_url: answers with status 200 once it is ready; what it is ``doing`` before, if it says so.
        name: of the server, for the log.
        log: is told what the server does.

    Raises:
        RuntimeError: it has ended before it was ready.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output, _sigterm_unwinds():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait(process, output, ready_url, lambda doing: log(f"{name}: {doing}"))
            yield
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and those that it has started
        process.wait()


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM end the block as Ctrl-C does: a server would outlive this process, and keep its memory."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: subprocess.Popen[bytes], output: IO[str], url: str, say: Log) -> None:
    said = ""
    while (doing := _doing(url)) is not None:
        if process.poll() is not None:
            why = last_words(output)
            for line in _tail(output):
                say(line)
            raise RuntimeError(f"the server ended with exit code {process.returncode}: {why}")
        if doing != said:
            said = doing
            say(doing)
        time.sleep(_LOOKING)


def _tail(output: IO[str]) -> list[str]:
    """Return the last lines: the one that says why may only say that another process has ended."""
    output.seek(0)
    return [line.rstrip() for line in output.readlines()[-_LAST_LINES:]]


def _doing(url: str) -> str | None:
    """Return what the server does; None if it is ready."""
    try:
        fetch(url)
    except urllib.error.HTTPError as error:
        with suppress(ValueError, AttributeError):
            return str(json.loads(error.read()).get("doing") or "starting")
    except OSError:
        pass
    else:
        return None
    return "starting"


def fetch(url: str) -> Any:
    """Return what a server answers, read as JSON; None for nothing.

    Raises:
        OSError: it does not answer, or with an error.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=10) as response:
        body = response.read()
    return json.loads(body) if body else None


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
