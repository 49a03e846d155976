"""What the server's socket and HTTP cost, beside the engine in process, vLLM's server, and any other by its URL.

The same requests go to each: one after the other over prompt lengths, many at once, and as they arrive.

python tools/bench/serve.py --model qwen3-0.6b --vllm path/to/python
"""

from __future__ import annotations

import json as js
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from common import Bench, Commit, Contenders, DeviceName, Json, Model, Vllm, bench, integers
from engines import OURS, EngineContender, OurEngine
from models import vocabulary_of, write_model
from peers import GPU_SHARE, HERE, LEAST_LENGTH, Peer
from processes import ServerProcess, free_port, log_at, started

from compiled_llm.commands.bench.contenders import choose
from compiled_llm.commands.bench.load import Asked, Lengths, Load, LoadAnswer, Run, measure_all
from compiled_llm.commands.bench.timing import Workload
from compiled_llm.config import WrapConfig
from compiled_llm.server.own_process import own_command

SOCKET, BUSY, HTTP = "compiled-llm:socket", "compiled-llm:socket-busy-poll", "compiled-llm:http"
BUSY_POLL = 0.01
"""Seconds: longer than a step, or than a first token takes."""
MODEL = "bench"
STREAMS_A_PROCESS = 16
"""One process that reads HTTP keeps up with some thousand events a second."""


class Clients:
    """Clients in processes of their own, which import no torch; requests are dealt out to them."""

    def __init__(self, closing: ExitStack, processes: int, **job: Any) -> None:
        command = [sys.executable, os.fspath(HERE / "client_worker.py"), js.dumps(job)]
        self._workers = [closing.enter_context(started(command)) for _ in range(processes)]
        for worker in self._workers:
            worker.wait_for("loaded")

    def run(self, asked: Sequence[Asked], concurrency: int | None) -> list[LoadAnswer]:
        """Each takes times from when it has its own requests, which is at nearly the same time."""
        count = min(len(self._workers), -(-min(concurrency or len(asked), len(asked)) // STREAMS_A_PROCESS))
        shares = [None if concurrency is None else len(range(number, concurrency, count)) for number in range(count)]

        def ask(number: int) -> list[LoadAnswer]:
            mine = asked[number::count]
            more = {"arrivals": [one.arrival for one in mine], "concurrency": shares[number]}
            prompts, new = [one.prompt for one in mine], [one.new for one in mine]
            return [LoadAnswer(*answer) for answer in self._workers[number].ask(prompts, new, **more)["answers"]]

        answers: list[LoadAnswer] = [LoadAnswer([], 0)] * len(asked)
        with ThreadPoolExecutor(count) as asking:
            for number, part in enumerate(asking.map(ask, range(count))):
                answers[number::count] = part
        return answers


class Server(EngineContender):
    """Something that can be asked in one way or several: `ways` yields them by name."""

    @contextmanager
    def ways(self, run: Bench) -> Iterator[Mapping[str, Run]]:
        raise NotImplementedError
        yield


class InProcess(Server):
    """Our engine in this process, made as `compiled-llm serve` makes it: what the others are compared with."""

    name = OURS

    def __init__(self, mode: str) -> None:
        self._engine = OurEngine(f"{OURS}:{mode}", watch_model=False)

    @contextmanager
    def ways(self, run: Bench) -> Iterator[Mapping[str, Run]]:
        with self._engine.engine(run.setup) as session:
            yield {self.name: session.stream}


class OurServer(Server):
    """`compiled-llm serve`, asked at its socket and over HTTP."""

    name = "compiled-llm:serve"

    def __init__(self, mode: str, folder: Path, processes: int) -> None:
        self._mode, self._folder, self._processes = mode, folder, processes

    @contextmanager
    def ways(self, run: Bench) -> Iterator[Mapping[str, Run]]:
        setup, port, path = run.setup, free_port(), self._folder / "engine.sock"
        model = write_model(setup.name, setup.dtype, setup.device, self._folder / "model")
        setup.drop_model()
        command = own_command("serve", model, f"--uds={path}", f"--port={port}", f"--served-model-name={MODEL}")
        command += [f"--mode={self._mode}", f"--device={setup.device.type}", "--quiet"]
        with ExitStack() as closing:
            closing.enter_context(running(command, f"http://127.0.0.1:{port}/ready", self.name, run))
            yield {
                SOCKET: Clients(closing, 1, socket=str(path), busy_poll=0.0).run,
                BUSY: Clients(closing, 1, socket=str(path), busy_poll=BUSY_POLL).run,
                HTTP: http(closing, self._processes, port).run,
            }


class VllmServer(Server):
    """vLLM's server, with its defaults."""

    name = "vllm"

    def __init__(self, python: str, folder: Path, processes: int) -> None:
        self._python, self._folder, self._processes = python, folder, processes

    def obstacle(self, setup: Any) -> str | None:
        return Peer(self._python).obstacle(setup)

    @contextmanager
    def ways(self, run: Bench) -> Iterator[Mapping[str, Run]]:
        setup, port = run.setup, free_port()
        model = write_model(setup.name, setup.dtype, setup.device, self._folder / "model")
        setup.drop_model()
        longest = max(work.prompt + work.new for work in setup.workloads)
        command = [
            *(shlex.split(self._python) or [sys.executable]),
            *("-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--served-model-name={MODEL}"),
            *("--host=127.0.0.1", f"--port={port}", f"--dtype={str(setup.dtype).removeprefix('torch.')}"),
            *(f"--max-model-len={max(LEAST_LENGTH, longest + 16)}", f"--gpu-memory-utilization={GPU_SHARE}"),
            *("--seed=0", "--disable-uvicorn-access-log"),
        ]
        with ExitStack() as closing:
            closing.enter_context(running(command, f"http://127.0.0.1:{port}/health", self.name, run))
            version = httpx.get(f"http://127.0.0.1:{port}/version", trust_env=False).json()["version"]
            run.report.machine["versions"]["vllm"] = version
            yield {self.name: http(closing, self._processes, port).run}


def http(closing: ExitStack, processes: int, port: int) -> Clients:
    return Clients(closing, processes, url=f"http://127.0.0.1:{port}/v1", model=MODEL)


@contextmanager
def running(command: Sequence[str], ready: str, name: str, run: Bench) -> Iterator[None]:
    """Run a server for the block, which begins when `ready` answers with status 200."""
    with log_at(None) as log:
        server = ServerProcess(name, command, ready, log)
        try:
            server.wait(run.setup.log)
            yield
        finally:
            server.close()


def main(
    model: Model = "qwen3-0.6b",
    prompts: Annotated[str, typer.Option(help="One after the other: prompt lengths.")] = "10,50,100,200,300,400",
    new: Annotated[int, typer.Option(min=2, help="One after the other: tokens of each answer.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="One after the other: requests of each length.")] = 30,
    streams: Annotated[str, typer.Option(help="How many at once.")] = "64,256",
    stream_tokens: Annotated[int, typer.Option(min=2, help="At once: tokens of each answer.")] = 256,
    rates: Annotated[str, typer.Option(help="Requests that arrive in a second.")] = "4,16,64",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they arrive, at each rate.")] = 8.0,
    mode: Annotated[str, typer.Option(help="How this package runs the model.")] = WrapConfig.mode,
    contenders: Contenders = "compiled-llm:engine,compiled-llm:serve,vllm",
    runs: Annotated[int, typer.Option(min=1, help="Timed passes of many at once.")] = 3,
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure what the server's socket and HTTP cost, and how long requests wait that arrive at random."""
    vocabulary = vocabulary_of(model)

    def load(prompt: str, answer: str, **how: Any) -> Load:
        return Load(Lengths.parse("", prompt), Lengths.parse("", answer), vocabulary=vocabulary, **how)

    lengths = [length for length in prompts.split(",") if length]
    alone = [load(length, str(new), requests=requests, concurrency=1) for length in lengths]
    together = [load("100", str(stream_tokens), requests=count, concurrency=count) for count in integers(streams)]
    arriving = [load("64-512", "32-256", rate=rate, seconds=seconds) for rate in integers(rates)]
    bounds = [Workload(1, one.prompts.most, one.answers.most) for one in (*alone, *together, *arriving)]
    processes = max(1, min((os.cpu_count() or 1) // 2, -(-max([1, *integers(streams)]) // STREAMS_A_PROCESS)))
    with (
        tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as folder,
        bench(model, device, bounds, json, commit) as run,
    ):
        known: list[Server] = [InProcess(mode), OurServer(mode, Path(folder), processes)]
        known.append(VllmServer(vllm, Path(folder), processes))

        def measure(server: Server) -> None:
            with server.ways(run) as ways:
                for loads, passes in ((alone, 1), (together, runs), (arriving, 1)):
                    measure_all(ways, loads, passes, run.report, run.save, run.setup.log)

        run.each(choose(contenders, run.setup.device.type, known), measure)


if __name__ == "__main__":
    typer.run(main)
