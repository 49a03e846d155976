"""The modes side by side: first tokens, between tokens, memory and start, with CUDA graphs in each state.

python tools/bench/graphs.py --model qwen3-0.6b --seconds 6 --json graphs.json

With code that is compiled alone (`compile`), with torch's cudagraph trees (`reduce-overhead`), with CUDA graphs of our
own that are captured before requests, for them, or had to make room for others (`cuda-graphs`), and with graphs of what
lies between attention (`piecewise`). Each mode starts once to compile, and once for each state that is measured, in
which it is asked for twice `--seconds`. Of Qwen3-0.6B, with `--seconds 2` on an H200, `cuda-graphs` and `piecewise`
took two minutes together, and `compile` nearly three; `reduce-overhead` took three, beside tests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from common import Bench, Commit, Contenders, DeviceName, Json, Model, bench, integers
from engines import OurSession, params_of
from shapes import vocabulary_of

from compiled_llm.commands.bench import contenders as ours
from compiled_llm.commands.bench.contenders import Contender, Ours, wrapped
from compiled_llm.commands.bench.load import Asked, Lengths, Load
from compiled_llm.commands.bench.timing import BenchPercentiles, Workload
from compiled_llm.engine.engine import Engine

ROWS = 2
MODES = "compiled-llm:compile,compiled-llm:reduce-overhead,compiled-llm:cuda-graphs,compiled-llm:piecewise"

ON_DEMAND, PREPARED, ROLLING = "on demand", "prepared", "rolling"
"""Graphs are captured for the request that needs them, by `warmup`, or where others have to make room for them."""


class Asking:
    """Asks the engine in one mode, one request after the other, and notes how long they wait."""

    def __init__(
        self, run: Bench, contender: Ours, prompts: Sequence[int], new: int, requests: int, limit: float
    ) -> None:
        self.run, self.contender = run, contender
        self.prompts, self.new, self.requests, self.limit = prompts, new, requests, limit
        self._vocabulary, self._numbers = vocabulary_of(run.setup.name), itertools.count()

    @contextmanager
    def engine(self, **options: Any) -> Iterator[None]:
        self.run.setup.model()  # loaded before a start is timed
        self.run.setup.log(f"{self.contender.name}: compiling and warming up")
        self._taken, self._begun = self._taken_bytes(), time.perf_counter()
        limits: dict[str, Any] = {"max_num_seqs": ROWS, "prefix_cache": False, "watch_model": False}  # as a server's
        with (
            wrapped(self.run.setup, ROWS, mode=self.contender.mode, **options) as model,
            Engine(model, **limits) as engine,
        ):
            self._session = OurSession(self.run.setup, engine)
            self._compiled: Any = model.compiled
            yield

    def is_ready(self) -> None:
        """Note that the start is over."""
        with self._session.engine.paused():  # no graph may be being captured while the device is waited for
            self.run.setup.synchronize()
        self._start_s = time.perf_counter() - self._begun

    def measure(self, state: str, requests: int, warm: bool = True, beside: bool = True) -> None:
        """Ask, and note results; `beside`: once more while another request runs."""
        self.run.setup.log(f"{self.contender.name}, graphs {state}: asking")
        if warm:
            for prompt in self.in_turn():
                self._session.stream([self.request(prompt)._replace(new=2)], 1)
        alone: dict[int, list[list[float]]] = defaultdict(list)
        for prompt in self.rounds(requests):
            (answer,) = self._session.stream([self.request(prompt)], 1)
            alone[prompt].append([when - answer.begun for when in answer.times])
        running = self.running(requests) if beside else {}
        self._note_mode(state, alone)
        for prompt in sorted(alone):
            between, waits = BenchPercentiles.of(gaps(alone[prompt])), running.get(prompt, [])
            first = [times[0] for times in alone[prompt]]
            figures = {
                "first_s": BenchPercentiles.of(first)._asdict(),
                "running_s": BenchPercentiles.of(waits)._asdict() if waits else None,
            }
            result = {"contender": self.contender.name, "recordings": state, "prompt": prompt, "new": self.new}
            result |= {"first_s": first, "between_s": between._asdict(), "running_s": waits, "figures": figures}
            self.run.add("graph_times", result)
        if graphs := self._compiled.cuda_graphs:
            seconds = sum(row.capture_seconds for row in graphs)
            use = {
                "contender": self.contender.name,
                "recordings": state,
                "ready": graphs.ready,
                "nbytes": graphs.nbytes,
            }
            use |= {
                "captures": graphs.captures,
                "evictions": graphs.evictions,
                "failures": graphs.failures,
                "capture_s": seconds,
                "figures": {"mib": graphs.nbytes / 2**20, "seconds_a_capture": seconds / max(1, graphs.captures)},
            }
            self.run.add("graph_use", use)

    def _note_mode(self, state: str, alone: dict[int, list[list[float]]]) -> None:
        """Add one row for all lengths of prompts."""
        firsts = {str(prompt): BenchPercentiles.of([times[0] for times in alone[prompt]]) for prompt in sorted(alone)}
        between = BenchPercentiles.of(gaps([times for answers in alone.values() for times in answers]))
        result = {"contender": self.contender.name, "recordings": state, "new": self.new, "start_s": self._start_s}
        result["nbytes"] = self._taken_bytes() - self._taken
        figures: dict[str, Any] = {"first_s": {prompt: first.p50 for prompt, first in firsts.items()}}
        figures |= {"slowest_first_s": max(first.p99 for first in firsts.values()), "between_s": between._asdict()}
        self.run.add("graph_modes", result | {"figures": figures})

    def _taken_bytes(self) -> int:
        """Return what is taken on the device, by the driver, too; on a CPU what the model's own statistics know of."""
        self.run.setup.free_memory()
        if self.run.is_cuda:
            free, there = torch.cuda.mem_get_info(self.run.setup.device)
            return there - free
        model: Any = self.run.setup.model()
        return sum(model.compiled.stats().memory.values()) if hasattr(model, "compiled") else 0

    def in_turn(self) -> list[int]:
        """The lengths, neighbours far apart: they may share a graph, which is to be gone when it is needed."""
        ascending = sorted(set(self.prompts))
        return [*ascending[::2], *ascending[1::2]]

    def rounds(self, requests: int) -> Iterator[int]:
        """Prompt lengths, for as many rounds as there is time for, at least one."""
        end = time.perf_counter() + self.limit
        for number in range(requests):
            if number and time.perf_counter() > end:
                return
            yield from self.in_turn()

    def request(self, prompt: int) -> Asked:
        """One that there has not been."""
        lengths = Lengths(prompt, prompt), Lengths(self.new, self.new)
        (asked,) = Load(*lengths, requests=1, vocabulary=self._vocabulary).drawn(next(self._numbers))
        return asked

    def warmup(self, *, only: int | None = None) -> None:
        """Compile, and capture all graphs that there may be, or those of one request."""
        if only is None:
            self._session.engine.warmup(range(1, ROWS + 1))
        else:
            self._session.all([self.request(only)], 0.0)

    def running(self, requests: int) -> dict[int, list[float]]:
        """The longest waits of a request in the midst of its answer while others come, by their lengths."""
        waits: dict[int, list[float]] = defaultdict(list)
        shortest, part = min(self.prompts), self.new // 4
        for prompt in self.rounds(requests):
            pair = self.request(shortest), self.request(prompt)._replace(new=part)
            waits[prompt].append(max(gaps([asyncio.run(self._beside(*pair, part))[part - 1 :]])))
        return waits

    async def _beside(self, first: Asked, other: Asked, tokens: int) -> list[float]:
        times, others = [], []
        async for _ in self._session.engine.submit(first.prompt, params_of(first, 0.0)):
            times.append(time.perf_counter())
            if len(times) == tokens:
                others.append(asyncio.ensure_future(self._alone(other)))
        await asyncio.gather(*others)
        return times

    async def _alone(self, request: Asked) -> None:
        async for _ in self._session.engine.submit(request.prompt, params_of(request, 0.0)):
            pass


def gaps(answers: Iterable[Sequence[float]]) -> list[float]:
    return [later - earlier for times in answers for earlier, later in itertools.pairwise(times)]


def measure_mode(asking: Asking, longer: int, requests: int, few: int) -> None:
    """Measure a mode in each state that its graphs can be in, each from a start of its own.

    Args:
        longer: a prompt that shares no graph with the others.
        requests: of each length.
        few: graphs that there may be where others take their place.
    """
    mode = asking.contender.mode
    with asking.engine():
        asking.warmup()  # what is compiled here, later starts of this mode find in caches on disk
    with asking.engine():
        asking.warmup()
        asking.is_ready()
        asking.measure(PREPARED, requests)
    if mode != "cuda-graphs":
        return
    with asking.engine():
        asking.warmup(only=longer)
        asking.is_ready()
        asking.measure(ON_DEMAND, 1, warm=False, beside=False)
    with asking.engine(max_graphs=few):
        asking.warmup()
        asking.is_ready()
        asking.measure(ROLLING, requests)


def main(
    model: Model = "qwen3-0.6b",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "10,50,100,150,200,250,300,350,400",
    new: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each length, at most.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.0, help="After so many, no more rounds are begun.")] = 10.0,
    few: Annotated[int, typer.Option(min=2, help="Graphs that there may be where others take their place.")] = 4,
    contenders: Contenders = MODES,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure each mode, and how requests wait whose CUDA graphs are captured, missing, or had to make room."""
    lengths = integers(prompts)
    longer = 2 * max(lengths) + 1  # shares no graph with the others
    with bench(model, device, [Workload(ROWS, longer, new)], json, commit) as run:

        def measure(contender: Contender) -> None:
            assert isinstance(contender, Ours), "compiled-llm:MODE"
            measure_mode(Asking(run, contender, lengths, new, requests, seconds), longer, requests, few)

        run.each(ours.choose(contenders, run.setup.device.type), measure)


if __name__ == "__main__":
    typer.run(main)
