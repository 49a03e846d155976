"""Servers that are asked by clients: ours over its socket and over HTTP, vLLM's, and any other by its URL."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from compiled_llm.commands.bench.contender import Participant, Setup
from compiled_llm.commands.bench.peer import GPU_SHARE, LEAST_LENGTH, PeerProcess
from compiled_llm.commands.bench.serving.clients import http_client, socket_client
from compiled_llm.commands.bench.serving.contender import ServingSession
from compiled_llm.commands.bench.serving.model_folder import ModelFolder
from compiled_llm.commands.bench.serving.our_engine import OURS, OurStreamingEngine
from compiled_llm.commands.bench.serving.server_process import fetch, free_port, running
from compiled_llm.config import Mode
from compiled_llm.server.own_process import own_command

SOCKET, BUSY, HTTP, VLLM = "compiled-llm:socket", "compiled-llm:socket-busy-poll", "compiled-llm:http", "vllm"
_BUSY_POLL = 0.01
"""Seconds: longer than a step, or than a first token takes."""
_MODEL = "bench"
"""What servers call the model."""

Ways = Mapping[str, ServingSession]
"""How one engine can be asked, by name."""


class Server(Participant, Protocol):
    """An engine that answers requests, in this process or behind a server."""

    def opened(self, setup: Setup) -> AbstractContextManager[Ways]:
        """Load the model for the block; what the engine compiles or records first is left to ``prepare``."""
        ...


class InProcess:
    """Our engine in this process, asked in an event loop: what the others are compared with."""

    name = OURS
    summary = "this package's engine, in process"

    def __init__(self, mode: Mode) -> None:
        """Take the ``mode`` of ``wrap``."""
        self._engine = OurStreamingEngine(mode, watch_model=False)  # as `compiled-llm serve` makes it

    def obstacle(self, setup: Setup) -> str | None:
        """It runs anywhere."""
        return None

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[Ways]:
        """Wrap the model, and unwrap it again."""
        with self._engine.opened(setup) as session:
            yield {self.name: session}


class OurServer:
    """``compiled-llm serve``, with clients at its socket and over HTTP."""

    name = "compiled-llm:serve"
    summary = "this package's server"

    def __init__(self, mode: Mode, folder: ModelFolder, ways: Sequence[str]) -> None:
        """Take the ``mode`` of ``wrap``, the model, and by which names the server is asked."""
        self._mode = mode
        self._folder = folder
        self._ways = ways

    def obstacle(self, setup: Setup) -> str | None:
        """It runs anywhere."""
        return None

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[Ways]:
        """Start the server, which compiles and records before it is ready; this process gives up its model for that."""
        location, port = self._folder.location(setup), free_port()
        setup.drop_model()
        with tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as folder, ExitStack() as clients:
            path, origin = Path(folder) / "generator", f"http://127.0.0.1:{port}"
            command = own_command("serve", location, f"--uds={path}", f"--port={port}")
            command += [f"--served-model-name={_MODEL}", f"--mode={self._mode}", f"--device={setup.device.type}"]
            clients.enter_context(running([*command, "--quiet"], f"{origin}/ready", self.name, setup.log))
            opened = {
                SOCKET: lambda: socket_client(setup, path),
                BUSY: lambda: socket_client(setup, path, _BUSY_POLL),
                HTTP: lambda: http_client(setup, f"{origin}/v1", _MODEL),
            }
            yield {name: clients.enter_context(opened[name]()) for name in self._ways}


class VllmServer(PeerProcess):
    """vLLM's server, with its defaults."""

    name = VLLM
    summary = "vLLM's server, over HTTP"

    def __init__(self, folder: ModelFolder) -> None:
        """Take the model."""
        self._folder = folder

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[Ways]:
        """Start the server; this process gives up its model for that."""
        location, port = self._folder.location(setup), free_port()
        setup.drop_model()
        origin = f"http://127.0.0.1:{port}"
        command = self._command(setup, location, port)
        with (
            running(command, f"{origin}/health", self.name, setup.log),
            http_client(setup, f"{origin}/v1", _MODEL) as session,
        ):
            session.versions["vllm"] = str(fetch(f"{origin}/version")["version"])
            yield {self.name: session}

    def _command(self, setup: Setup, location: str, port: int) -> list[str]:
        longest = max(work.prompt + work.new for work in setup.workloads)
        return [
            *(shlex.split(setup.commands.get(self.name, "")) or [sys.executable]),
            *("-m", "vllm.entrypoints.openai.api_server", f"--model={location}", f"--served-model-name={_MODEL}"),
            *("--host=127.0.0.1", f"--port={port}", f"--dtype={str(setup.dtype).removeprefix('torch.')}"),
            *(f"--max-model-len={max(LEAST_LENGTH, longest + 16)}", f"--gpu-memory-utilization={GPU_SHARE}"),
            *("--seed=0", "--disable-uvicorn-access-log"),
        ]


class ServerByUrl:
    """A server that somebody else runs, asked as the others are over HTTP."""

    summary = "a server by its URL"

    def __init__(self, name: str, url: str) -> None:
        """Take its name in tables, and its URL, up to and with ``/v1``."""
        self.name = name
        self._url = url

    def obstacle(self, setup: Setup) -> str | None:
        """Whether it answers."""
        try:
            fetch(f"{self._url}/models")
        except (OSError, ValueError) as error:
            return f"{self._url} does not answer: {error}"
        return None

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[Ways]:
        """Ask for the first of its models; this process gives up its own, whose memory the server may need."""
        setup.drop_model()
        model = fetch(f"{self._url}/models")["data"][0]["id"]
        with http_client(setup, self._url, model) as session:
            yield {self.name: session}


def choose(names: str, peers: Sequence[str], mode: Mode, device_type: str) -> list[Server]:
    """Return who takes part, in the order in which they run.

    Args:
        names: comma-separated; ``all``; or ``default``: all, but no vLLM on a CPU.
        peers: further servers, ``NAME=URL`` each.
        mode: of our engine.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        ValueError: there is none of that name, or a peer has no URL.
    """
    known = [OURS, SOCKET, BUSY, HTTP, VLLM]
    usual = known if names == "all" or device_type == "cuda" else known[:-1]
    wanted = usual if names in ("all", "default") else [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(known)}, all and default")
    folder, ways = ModelFolder(), [name for name in (SOCKET, BUSY, HTTP) if name in wanted]
    servers: list[Server] = [InProcess(mode)] if OURS in wanted else []
    servers += [OurServer(mode, folder, ways)] if ways else []
    servers += [VllmServer(folder)] if VLLM in wanted else []
    return [*servers, *map(_by_url, peers)]


def _by_url(peer: str) -> ServerByUrl:
    name, _, url = peer.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"--peer-url {peer!r}: give a name and a URL, such as vllm=http://127.0.0.1:8000/v1")
    return ServerByUrl(name, url.rstrip("/"))
