"""`compiled-llm serve` of both checkouts of `turns.py`, asked over HTTP.

As a script it writes the model that they serve. The options and paths used here are those that older commits have, too.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from models import vocabulary_of, write_model
from processes import ServerProcess, free_port, log_at
from rich.status import Status

from compiled_llm.commands.bench.http_client import HttpClient
from compiled_llm.commands.bench.load import VOCABULARY, Lengths, Load, LoadAnswer, pieces_of

FIRST_CALLS, FIRST_PROMPT = 60, 128
MODEL = "bench"
TIMEOUT = 300.0
Environments = Mapping[str, Mapping[str, str]]
"""Of the two checkouts, by label: each finds its own `compiled_llm`."""


class TurnsServer:
    """The server of one checkout. It loads and gets warm while others do: `wait` before it is asked."""

    def __init__(
        self, label: str, environment: Mapping[str, str], folder: Path, size: str, job: dict[str, Any], log: IO[str]
    ) -> None:
        self.label, self._job, port = label, job, free_port()
        self._vocabulary = min(VOCABULARY, vocabulary_of(size))
        self._url = f"http://127.0.0.1:{port}"
        self._client: HttpClient | None = None
        command = [sys.executable, "-m", "compiled_llm", "serve", str(folder), f"--port={port}", "--quiet"]
        command += [f"--served-model-name={MODEL}", f"--kv-memory={job['kv_memory']}", f"--mode={job['mode']}"]
        command += [f"--dtype={job['dtype']}", f"--device={device()}"]
        self._server = ServerProcess(label, command, f"{self._url}/ready", log, env=environment, cwd=folder)
        self.close = self._server.close

    def wait(self, status: Status) -> None:
        """Return once it is ready; raises RuntimeError if it ends instead."""
        self._server.wait(lambda doing: status.update(f"http, {doing}"))
        self._client = HttpClient(f"{self._url}/v1", MODEL, TIMEOUT)

    def measure(self, name: str, number: int) -> dict[str, float]:
        """Return the figures of a round. Tokens are those of its number, which no prefix cache has seen."""
        new, requests = self._job["new"], self._job["requests"]
        known = {"vocabulary": self._vocabulary}
        one = Load(Lengths(FIRST_PROMPT, FIRST_PROMPT), Lengths(1, 1), FIRST_CALLS, concurrency=1, **known)
        timing = {"rate": self._job["rate"], "seconds": self._job["seconds"]}
        arriving = Load(Lengths(64, 512), Lengths(new // 4, new), seed=1, **timing, **known)
        many = Load(Lengths(100, 1024), Lengths(new // 2, new), requests, concurrency=requests, seed=2, **known)
        figures = _percentiles(f"first, {FIRST_PROMPT} tokens", _first(self._run(one, number)), (50, 90, 99))
        answers = self._run(arriving, number)
        figures |= _percentiles("first token", _first(answers), (50, 99)) | _percentiles(
            "gap", _gaps(answers), (50, 99)
        )
        answers = self._run(many, number)
        tokens, seconds = sum(answer.tokens for answer in answers), max(answer.times[-1] for answer in answers)
        return figures | {f"{requests} requests, tok/s": tokens / seconds}

    def _run(self, load: Load, number: int) -> list[LoadAnswer]:
        assert self._client is not None, "wait first"
        return self._client.run(load.drawn(number), load.concurrency)


@contextmanager
def turns_servers(
    environments: Environments, own: Mapping[str, str], size: str, job: dict[str, Any], logs: Path, status: Status
) -> Iterator[list[TurnsServer]]:
    """Both servers, each of which has had one round that is not measured; `own` is this checkout's environment."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        status.update("http: the model is written")
        # In a process of its own, which gives back the memory of its GPU.
        subprocess.run(
            [sys.executable, __file__, size, job["dtype"], str(folder)], env=dict(own, TQDM_DISABLE="1"), check=True
        )
        both = []
        for label, environment in environments.items():
            log = stack.enter_context(log_at(logs / f"turns-http-{label}.log"))
            both.append(TurnsServer(label, environment, folder, size, job, log))
            stack.callback(both[-1].close)
        for server in both:
            server.wait(status)
        for server in both:
            status.update(f"http, {server.label}: a round that is not measured")
            server.measure("http", 0)
        yield both


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _first(answers: Sequence[LoadAnswer]) -> list[float]:
    return [(answer.times[0] - answer.begun) * 1000 for answer in answers]


def _gaps(answers: Sequence[LoadAnswer]) -> list[float]:
    return [(later - earlier) * 1000 for answer in answers for earlier, later in pairwise(pieces_of(answer.times))]


def _percentiles(name: str, times: Sequence[float], which: Sequence[int]) -> dict[str, float]:
    """Return them in ms by name; none of too few times."""
    if len(times) < 2:
        return {}
    percentiles = statistics.quantiles(times, n=100, method="inclusive")
    return {f"{name}, p{one} ms": percentiles[one - 1] for one in which}


if __name__ == "__main__":
    write_model(sys.argv[1], getattr(torch, sys.argv[2]), torch.device(device()), Path(sys.argv[3]))
