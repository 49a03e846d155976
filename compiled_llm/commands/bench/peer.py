"""Contenders in other processes: a worker reads requests from stdin and answers on stdout, one line of JSON each.

A worker says ``{"mark": "imported"}`` and ``{"mark": "loaded"}`` (with ``versions``, if it likes). To each request,
``{"batch": 8, "prompt": 128, "new": 16, "sampled": {...} or null, "number": 3}``, it says ``{"mark": "first token"}``
and in the end ``{"first": seconds, "total": seconds, "tokens": count}``. It makes up the prompts, different ones for
each number.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from transformers import AutoConfig

from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.timing import Timing
from compiled_llm.commands.bench.workload import SAMPLING, Workload
from compiled_llm.commands.loading.load import fetched
from compiled_llm.commands.loading.source import locate

WORKERS = Path(__file__).parent / "workers"
GPU_SHARE = 0.6
"""How much of the GPU's memory an engine may take; this process's CUDA context needs some, too."""
LEAST_LENGTH = 4096

Mark = Callable[[str], object]


class Peer:
    """A running worker."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], mark: Mark) -> None:
        """Talk to the process.

        Args:
            process: with pipes for stdin and stdout.
            log: where its stderr goes.
            mark: called with the name of each stage as soon as the worker has reached it.
        """
        self._process = process
        self._log = log
        self._mark = mark
        self.versions: dict[str, str] = {}

    def wait_for(self, mark: str) -> None:
        """Wait until the worker has reached a stage."""
        while self._receive().get("mark") != mark:
            pass

    def ask(self, workload: Workload, number: int) -> dict[str, Any]:
        """Let the worker run a workload with prompts that depend on ``number``; returns what it measured."""
        request = {
            "batch": workload.batch,
            "prompt": workload.prompt,
            "new": workload.new,
            "sampled": SAMPLING if workload.sampled else None,
            "number": number,
        }
        answer = self.request(request)
        if answer["tokens"] != workload.batch * workload.new:
            raise RuntimeError(f"{answer['tokens']} tokens came instead of {workload.batch * workload.new}")
        return answer

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for the answer to it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        answer = self._receive()
        while "mark" in answer:
            answer = self._receive()
        return answer

    def _receive(self) -> dict[str, Any]:
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
        code = self._process.wait()
        return RuntimeError(f"the worker ended with exit code {code}: {last_words(self._log)}")


def last_words(log: IO[str]) -> str:
    """Return the line of a log that says best why its process has ended."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if re.search(r"(Error|Exception|error:)", line)]  # more may follow
    return (errors or lines)[-1]


@contextmanager
def started(command: list[str], mark: Mark, environ: Mapping[str, str] | None = None) -> Iterator[Peer]:
    """Start a worker for the block; closing its stdin asks it to end; if it does not, it is killed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environ
        )
        try:
            yield Peer(process, log, mark)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


class PeerSession:
    """A worker as a session."""

    def __init__(self, peer: Peer) -> None:
        """Remember the worker."""
        self._peer = peer
        self._numbers = itertools.count()
        self.versions = peer.versions

    def prepare(self, workload: Workload) -> None:
        """Run twice: an engine may still compile something in the first runs."""
        for _ in range(2):
            self._peer.ask(workload, next(self._numbers))

    def run(self, workload: Workload) -> Timing:
        """Run once, with new prompts."""
        answer = self._peer.ask(workload, next(self._numbers))
        return Timing(answer["first"], answer["total"])

    def memory(self) -> dict[str, int]:
        """Nothing: an engine takes what it is given, so there is nothing to compare."""
        return {}


class PeerProcess:
    """An engine that a program in ``workers/`` knows how to load and to ask.

    Attributes:
        name: also the engine's package.
        summary: what it is, in one line.
        program: the name of the file.
    """

    name: str
    summary: str
    program: str

    def obstacle(self, setup: Setup) -> str | None:
        """Return why it cannot take part, or None."""
        if setup.name == "demo" or setup.name.lower().endswith(".gguf"):
            return "reads no GGUF file; name a folder, a hub id or random weights"
        if self.name in setup.commands:
            return None
        if importlib.util.find_spec(self.name) is None:
            return f"not installed here; --{self.name} names the Python of another environment"
        return None if setup.device.type == "cuda" else "runs on CUDA only"

    def details(self) -> dict[str, Any]:
        """Return what else the program is told."""
        return {}

    @contextmanager
    def peer(self, setup: Setup) -> Iterator[Peer]:
        """Start the engine and wait until it has its model; this process gives up its own for that."""
        setup.drop_model()
        with self.worker(setup) as command, started(command, lambda name: setup.log(f"{self.name}: {name}")) as peer:
            peer.wait_for("loaded")
            yield peer

    @contextmanager
    def worker(self, setup: Setup) -> Iterator[list[str]]:
        """Yield the command that starts the engine."""
        with tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as folder:
            if models.is_random(setup.name):
                models.write_config(setup.name, setup.dtype, Path(folder))
            longest = max(work.prompt + work.new for work in setup.workloads)
            job = {
                "engine": self.name,
                "model": folder if models.is_random(setup.name) else setup.name,
                "random": models.is_random(setup.name),
                "dtype": str(setup.dtype).removeprefix("torch."),
                "vocabulary": vocabulary_of(setup.name),
                "length": max(LEAST_LENGTH, longest + 16),
                "gpu_share": GPU_SHARE,
                **self.details(),
            }
            python = shlex.split(setup.commands.get(self.name, "")) or [sys.executable]
            yield [*python, os.fspath(WORKERS / self.program), json.dumps(job)]


class PeerContender(PeerProcess):
    """An engine that ``workers/engine_worker.py`` runs."""

    program = "engine_worker.py"

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[PeerSession]:
        """Start the engine; this process gives up its model for that."""
        with self.peer(setup) as peer:
            yield PeerSession(peer)


def vocabulary_of(name: str) -> int:
    """Return how many token ids the model has, without building it."""
    if models.is_random(name):
        return int(models.SHAPES[name]["vocab_size"])
    source = fetched(locate(name, progress=False), progress=False)
    file = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    config = AutoConfig.from_pretrained(source.location, trust_remote_code=False, **file)
    return int(config.get_text_config(decoder=True).vocab_size)
