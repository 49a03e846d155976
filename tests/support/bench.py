"""What the tests of the bench share: reports and results with known figures, contenders that only pretend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from typer.testing import CliRunner, Result

from compiled_llm.commands.app import app
from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Latency, Roofline, Startup
from compiled_llm.commands.bench.timing import Timing
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.explaining.profile.breakdown import Kernel, Kind

CPU = torch.device("cpu")
MACHINE: dict[str, Any] = {
    "date": "today",
    "commit": "abc123",
    "python": "3.12",
    "versions": {"torch": "9.9"},
    "cpu": {"name": "a CPU", "cores": 2, "threads": 2},
    "load": 0.0,
    "gpu": None,
}
PNG = b"\x89PNG"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def new_report(**fields: Any) -> Report:
    model = {"name": "tiny", "weights": "random", "dtype": "float32"}
    machine = {**MACHINE, "versions": dict(MACHINE["versions"])}
    return Report("compiled-llm bench latency", machine, model, **fields)


def new_setup(asked: list[Workload], **commands: str) -> Setup:
    return Setup("tiny", CPU, torch.float32, asked, commands)


def one_latency(contender: str = "a", **fields: Any) -> Latency:
    given: dict[str, Any] = {
        "contender": contender,
        "batch": 2,
        "prompt": 8,
        "new": 5,
        "sampled": False,
        "first_s": [0.5, 0.25, 1.0],
        "total_s": [1.5, 2.25, 2.0],
        "ready_s": 3.0,
        "ceiling": 16.0,
    }
    return Latency(**{**given, **fields})


def full_report() -> Report:
    sampled = one_latency("a", sampled=True, total_s=[1.51, 2.25, 2.01])
    rates = [one_latency("a"), one_latency("b", total_s=[1.0, 1.25, 1.75], ceiling=None), sampled]
    rates += [replace(result, batch=8) for result in rates]
    rates += [replace(result, prompt=64) for result in rates]
    starts = [Startup("a", cache, {"imported": [1.0, 2.0], "all tokens": [4.0, 3.0]}) for cache in ("cold", "warm")]
    steps = Roofline(
        contender="a",
        batch=1,
        prompt=8,
        new=16,
        sampled=False,
        measured="kernels",
        step_us=100.0,
        busy_us=80.0,
        steps=4,
        weight_bytes=40_000,
        kv_bytes=10_000,
        read_bandwidth=1e9,
        host_us=30.0,
        kinds=[Kind("matrix products", 50.0, 7.0, 40_000), Kind("attention", 30.0, 2.0, 10_000)],
        kernels=[Kernel("gemv<a|b>", 50.0, 7.0)],
    )
    return new_report(
        read_bandwidth=1e9,
        latency=rates,
        startup=starts,
        roofline=[steps],
        memory={"a": {"weights": 3 * 2**20}},
        unavailable={"vllm": "not installed"},
        failures=["b: it broke"],
    )


class FakeSession:
    """Answers with known timings."""

    def __init__(self, timings: list[Timing]) -> None:
        self.timings = itertools.cycle(timings)
        self.versions = {"fake": "1.2.3"}
        self.prepared: list[Workload] = []

    def prepare(self, workload: Workload) -> None:
        self.prepared.append(workload)

    def run(self, workload: Workload) -> Timing:
        assert workload in self.prepared, "a run before it was warm"
        return next(self.timings)

    def memory(self) -> dict[str, int]:
        return {"weights": 2**20}


@dataclass
class FakeContender:
    name: str
    timings: list[Timing] = field(default_factory=lambda: [Timing(1.0, 3.0)])
    reason: str | None = None
    error: Exception | None = None
    summary: str = "fake"

    def obstacle(self, setup: Setup) -> str | None:
        return self.reason

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[FakeSession]:
        if self.error is not None:
            raise self.error
        yield FakeSession(self.timings)

    @contextmanager
    def worker(self, setup: Setup) -> Iterator[list[str]]:
        yield ["false"]
