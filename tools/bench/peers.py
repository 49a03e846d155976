"""Contenders that users do not get by default: HuggingFace's own compile, and vLLM at the end of a pipe."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import vocabulary_of, write_config
from processes import Worker, started
from shapes import SHAPES
from transformers import PreTrainedModel

from compiled_llm.commands.bench.contenders import BenchSession, Contender, Setup
from compiled_llm.commands.bench.timing import SAMPLING, CallTiming, Workload

HERE = Path(__file__).parent
GPU_SHARE = 0.6
"""How much of the GPU's memory an engine may take; this process's CUDA context needs some, too."""
LEAST_LENGTH = 4096


class Peer(Contender):
    """vLLM as it configures itself, in a process of `python`; see `peer_worker.py`."""

    name = "vllm"

    def __init__(
        self,
        python: str,
        streams: bool = False,
        cascade: bool = False,
        fp8: bool = False,
        pages: int | None = None,
        speculation: dict[str, Any] | None = None,
    ) -> None:
        self.python, self.streams, self.cascade, self.fp8, self.pages = python, streams, cascade, fp8, pages
        self.speculation = speculation

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
                "pages": self.pages,
                "speculation": self.speculation,
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

    def run(self, workload: Workload) -> CallTiming:
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
