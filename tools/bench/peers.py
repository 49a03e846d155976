"""Contenders that users do not get by default: HuggingFace's own compile, and vLLM at the end of a pipe.

A worker says `{"mark": "imported"}` and `{"mark": "loaded"}` (with `versions`, if it likes), one line of JSON each. To
each request, `{"prompts": [...], "new": [...], "sampling": {...}}`, it answers `{"seconds": 5.0, "lengths": [...]}`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from shapes import SHAPES, vocabulary_of, write_config
from transformers import PreTrainedModel

from compiled_llm.commands.bench.contenders import BenchSession, Contender, Setup
from compiled_llm.commands.bench.timing import SAMPLING, CallTiming, TokenClock, Workload

HERE = Path(__file__).parent
GPU_SHARE = 0.6
"""How much of the GPU's memory an engine may take; this process's CUDA context needs some, too."""
LEAST_LENGTH = 4096


class Worker:
    """A running worker."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], mark: Callable[[str], object]) -> None:
        self._process, self._log, self._mark = process, log, mark
        self.versions: dict[str, str] = {}

    def wait_for(self, mark: str) -> None:
        while self._receive().get("mark") != mark:
            pass

    def ask(self, prompts: Sequence[Sequence[int]], new: Sequence[int], **more: Any) -> dict[str, Any]:
        """Have requests answered, each with as many tokens as it asks for."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new": new, **more}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        answer = self._receive()
        if answer["lengths"] != list(new):
            raise RuntimeError(f"{answer['lengths']} tokens came instead of {list(new)}")
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
        return RuntimeError(f"the worker ended with exit code {self._process.wait()}: {last_words(self._log)}")


def last_words(log: IO[str]) -> str:
    """The line of a log that says best why its process has ended."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if re.search(r"(Error|Exception|error:)", line)]  # more may follow
    return (errors or lines)[-1]


@contextmanager
def started(
    command: Sequence[str], mark: Callable[[str], object], environ: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """Start a worker for the block; closing its stdin asks it to end; if it does not, it is killed."""
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environ)
        try:
            yield Worker(process, log, mark)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


class Peer(Contender):
    """vLLM as it configures itself, in a process of `python`; see `peer_worker.py`."""

    name = "vllm"

    def __init__(self, python: str, streams: bool = False, cascade: bool = False, fp8: bool = False) -> None:
        self.python, self.streams, self.cascade, self.fp8 = python, streams, cascade, fp8

    def obstacle(self, setup: Setup) -> str | None:
        if setup.name == "demo" or setup.name.lower().endswith(".gguf"):
            return "reads no GGUF file; name a folder, a hub id or random weights"
        if self.python:
            return None
        if importlib.util.find_spec(self.name) is None:
            return f"not installed here; --{self.name} names the Python of another environment"
        return None if setup.device.type == "cuda" else "runs on CUDA only"

    @contextmanager
    def command(self, setup: Setup) -> Iterator[list[str]]:
        with tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as folder:
            if setup.name in SHAPES:
                write_config(setup.name, setup.dtype, Path(folder))
            job = {
                "streams": self.streams,
                "cascade": self.cascade,
                "fp8": self.fp8,
                "model": folder if setup.name in SHAPES else setup.name,
                "random": setup.name in SHAPES,
                "dtype": str(setup.dtype).removeprefix("torch."),
                "length": max(LEAST_LENGTH, 16 + max(work.prompt + work.new for work in setup.workloads)),
                "gpu_share": GPU_SHARE,
            }
            python = shlex.split(self.python) or [sys.executable]
            yield [*python, os.fspath(HERE / "peer_worker.py"), json.dumps(job)]

    @contextmanager
    def worker(self, setup: Setup) -> Iterator[Worker]:
        """Start the engine and wait until it has its model; this process gives up its own for that."""
        setup.drop_model()
        with self.command(setup) as command, started(command, lambda mark: setup.log(f"{self.name}: {mark}")) as worker:
            worker.wait_for("loaded")
            yield worker

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[BenchSession]:
        with self.worker(setup) as worker:
            yield PeerSession(setup, worker)


class PeerSession(BenchSession):
    """A worker as a session: it cannot stream, so the first token is a call of its own."""

    def __init__(self, setup: Setup, worker: Worker) -> None:
        self._worker, self.versions, self._numbers = worker, worker.versions, itertools.count()
        self.vocabulary = vocabulary_of(setup.name)

    def prepare(self, workload: Workload) -> None:
        for _ in range(2):  # an engine may still compile something in the first runs
            self.run(workload)

    def run(self, workload: Workload, clock: TokenClock | None = None) -> CallTiming:
        sampling = SAMPLING if workload.sampled else {"temperature": 0.0}
        seconds = [
            self._worker.ask(
                workload.prompts(self.vocabulary, next(self._numbers)), [new] * workload.batch, sampling=sampling
            )["seconds"]
            for new in (1, workload.new)
        ]
        return CallTiming(*seconds).checked()

    def memory(self) -> dict[str, int]:
        return {}  # an engine takes what it is given


class HFStatic(Contender):
    """A cache of fixed size, and the forward that HuggingFace compiles for it."""

    name = "hf-static"

    def obstacle(self, setup: Setup) -> str | None:
        return None if setup.device.type == "cuda" else "HuggingFace compiles by itself on CUDA only"

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[BenchSession]:
        model = setup.model()
        try:
            yield StaticSession(setup, model, cache_implementation="static")
        finally:
            forget_compiled(model)
            setup.free_memory()


class StaticSession(BenchSession):
    def prepare(self, workload: Workload) -> None:
        """Compile again: a second shape would make the graphs of all later ones symbolic, and slower."""
        forget_compiled(self.model)
        self.setup.free_memory()
        for _ in range(3):
            self.run(workload)


def forget_compiled(model: PreTrainedModel) -> None:
    """Drop what `generate` left on the model: the compiled call with its graphs, and the cache's size."""
    for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
        model.__dict__.pop(name, None)
    torch._dynamo.reset()
