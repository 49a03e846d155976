"""Clients of servers: each a process of its own, which ``workers/client_worker.py`` runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.peer import WORKERS, started, vocabulary_of
from compiled_llm.commands.bench.serving.contender import ServingSession
from compiled_llm.commands.bench.serving.vllm import PeerServingSession


@contextmanager
def http_client(setup: Setup, url: str, model: str) -> Iterator[ServingSession]:
    """Yield what asks a server of OpenAI's API.

    Args:
        setup: the run's.
        url: up to and with ``/v1``.
        model: how the server calls it.
    """
    with _client(setup, url=url, model=model) as session:
        yield session


@contextmanager
def socket_client(setup: Setup, path: Path, busy_poll: float = 0.0) -> Iterator[ServingSession]:
    """Yield what asks a generator at its socket; ``busy_poll`` is that of ``AsyncClient``."""
    with _client(setup, socket=os.fspath(path), busy_poll=busy_poll) as session:
        yield session


@contextmanager
def _client(setup: Setup, **server: str | float) -> Iterator[ServingSession]:
    job = {**server, "patience": setup.patience}
    command = [sys.executable, os.fspath(WORKERS / "client_worker.py"), json.dumps(job)]
    with started(command, lambda mark: None) as peer:
        peer.wait_for("loaded")
        yield PeerServingSession(peer, vocabulary_of(setup.name))
