"""``bench serve``: what a socket and HTTP cost, and how long requests wait, with clients in processes of their own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.experiment import Save, run_each
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import ManyStreams, OneStream, Online
from compiled_llm.commands.bench.serving import online
from compiled_llm.commands.bench.serving.contender import Served, ServingSession
from compiled_llm.commands.bench.serving.load import Load
from compiled_llm.commands.bench.serving.pieces import pieces
from compiled_llm.commands.bench.serving.servers import Server
from compiled_llm.commands.bench.serving.workloads import Asked, OfflineWorkload, OnlineWorkload
from compiled_llm.commands.bench.timing import Percentiles

_WARM_REQUESTS = 3
"""Of one stream, that are not timed."""
_WARM_SECONDS = 2.0
"""Of arrivals that are not timed, at most."""


def measure(servers: Iterable[Server], setup: Setup, load: Load, report: Report, save: Save) -> None:
    """Measure one engine after the other, in each way that it can be asked, into the report.

    Args:
        servers: who takes part.
        setup: model and device.
        load: what is asked.
        report: gets results, obstacles and failures.
        save: called after each result.
    """

    def measure_one(server: Server) -> None:
        setup.log(f"{server.name}: loading")
        start, numbers = time.perf_counter(), itertools.count()
        with server.opened(setup) as ways:
            measured = [Way(name, session, setup, numbers) for name, session in ways.items()]
            for way in measured:
                way.prepare()
            ready = time.perf_counter() - start
            for workload, measure_way in _tasks(load, ready, report):
                for way in measured:
                    _measured(way, workload, measure_way, report)
                    save()

    run_each(servers, setup, report, save, measure_one)


def _tasks(load: Load, ready: float, report: Report) -> Iterator[tuple[str, Callable[[Way], None]]]:
    """Yield each workload in words, and what measures it in one way."""

    def alone(workload: OfflineWorkload, way: Way) -> None:
        report.one_stream.append(way.alone(workload, ready))

    def together(workload: OfflineWorkload, way: Way) -> None:
        report.many_streams.append(way.together(workload, load.runs, ready))

    def at_rate(workload: OnlineWorkload, way: Way) -> None:
        report.online.append(way.at_rate(workload, ready))

    yield from ((str(workload), partial(alone, workload)) for workload in load.alone)
    yield from ((str(workload), partial(together, workload)) for workload in load.together)
    yield from ((str(workload), partial(at_rate, workload)) for workload in load.rates)


def _measured(way: Way, workload: str, measure: Callable[[Way], None], report: Report) -> None:
    try:
        measure(way)
    except Exception as error:
        raise RuntimeError(f"{way.name}, {workload}: {error}") from error
    report.machine["versions"].update(way.versions)


class Way:
    """One way to ask an engine.

    Attributes:
        name: in results.
        versions: of packages that this process does not have.
        vocabulary: how many token ids there are.
    """

    profiled = False

    def __init__(self, name: str, session: ServingSession, setup: Setup, numbers: Iterator[int]) -> None:
        """Take a session, and numbers of passes that its engine has not had."""
        self.name = name
        self.versions, self.vocabulary = session.versions, session.vocabulary
        self._session = session
        self._setup = setup
        self._numbers = numbers

    def prepare(self) -> None:
        """Compile and record."""
        self._setup.log(f"{self.name}: compiling and recording")
        self._session.prepare()

    def run(self, asked: Sequence[Asked], temperature: float) -> Served:
        """Ask, and say when pieces of each answer came."""
        served = self._session.run(asked, temperature)
        return replace(served, times=[pieces(times) for times in served.times])

    def alone(self, workload: OfflineWorkload, ready: float) -> OneStream:
        """Ask one after the other."""
        self._setup.log(f"{self.name}, one stream: prompts of {workload.prompts} tokens")
        warm = replace(workload, requests=_WARM_REQUESTS).drawn(self.vocabulary, next(self._numbers))
        timed = workload.drawn(self.vocabulary, next(self._numbers))
        served = [self.run([one], workload.temperature) for one in (*warm, *timed)][_WARM_REQUESTS:]
        times = [one.times[0] for one in served]
        gaps = [later - earlier for each in times for earlier, later in itertools.pairwise(each)]
        return OneStream(
            contender=self.name,
            prompt=workload.prompts.most,
            new=workload.answers.most,
            first_s=[each[0] for each in times],
            between_s=Percentiles.of(gaps or [0.0]),
            pieces=sum(map(len, times)),
            ready_s=ready,
        )

    def together(self, workload: OfflineWorkload, runs: int, ready: float) -> ManyStreams:
        """Ask all at once."""
        self._setup.log(f"{self.name}: {workload.requests} streams")
        passes = [workload.drawn(self.vocabulary, next(self._numbers)) for _ in range(1 + runs)]
        _, *served = [self.run(asked, workload.temperature) for asked in passes]
        return ManyStreams(
            contender=self.name,
            streams=workload.requests,
            prompt=workload.prompts.most,
            new=workload.answers.most,
            seconds=[one.seconds for one in served],
            first_s=Percentiles.of(times[0] for one in served for times in one.times),
            pieces=sum(len(times) for one in served for times in one.times),
            ready_s=ready,
        )

    def at_rate(self, workload: OnlineWorkload, ready: float) -> Online:
        """Ask when requests are to arrive."""
        return online.result(self.name, self, workload, self._numbers, 1, self._setup, ready, _WARM_SECONDS)
