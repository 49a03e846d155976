"""``bench online``: requests that arrive at random, and how long each waits for its tokens."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.experiment import Save
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Online
from compiled_llm.commands.bench.serving.contender import Served, ServingContender, ServingSession
from compiled_llm.commands.bench.serving.experiment import measure_each
from compiled_llm.commands.bench.serving.workloads import Asked, OnlineWorkload
from compiled_llm.commands.bench.timing import Percentiles

_UNTIMED = 5.0
"""Seconds of arrivals that come first and are not timed, at most."""


def measure(
    contenders: Iterable[ServingContender],
    setup: Setup,
    workloads: Sequence[OnlineWorkload],
    runs: int,
    report: Report,
    save: Save,
) -> None:
    """Measure one contender after the other, into the report.

    Args:
        contenders: who takes part; their sessions say when each token came.
        setup: model and device.
        workloads: what is asked, one for each rate.
        runs: passes over each workload, whose times are put together.
        report: gets results, obstacles and failures.
        save: called after each result.
    """
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def measure_one(name: str, session: ServingSession, workload: OnlineWorkload, prepared: float) -> None:
        report.online.append(result(name, session, workload, numbers[name], runs, setup, prepared))

    measure_each(contenders, setup, workloads, report, save, measure_one)


def result(
    name: str,
    session: ServingSession,
    workload: OnlineWorkload,
    numbers: Iterator[int],
    runs: int,
    setup: Setup,
    prepared: float,
    most_untimed: float = _UNTIMED,
) -> Online:
    """Return what came of a workload.

    Args:
        name: of who answers.
        session: answers.
        workload: what is asked.
        numbers: of passes that it has not had.
        runs: passes, whose times are put together.
        setup: of the run.
        prepared: seconds that it took to be ready.
        most_untimed: seconds of arrivals that come first and are not timed, at most.
    """
    passes = [workload.drawn(session.vocabulary, next(numbers)) for _ in range(runs)]
    untimed = replace(workload, seconds=min(most_untimed, workload.seconds)).drawn(session.vocabulary, next(numbers))
    setup.log(f"{name}, {workload}: a pass that is not timed")
    start = time.perf_counter()
    session.run(untimed, workload.temperature)
    ready = prepared + time.perf_counter() - start
    served = []
    for number, asked in enumerate(passes):
        setup.log(f"{name}, {workload}: run {number + 1} of {runs}")
        served.append(session.run(asked, workload.temperature))
    return Online(
        contender=name,
        workload=workload.without_rate,
        rate=workload.rate,
        requests=sum(map(len, passes)),
        prompt_tokens=sum(len(request.prompt) for asked in passes for request in asked),
        new_tokens=sum(request.new for asked in passes for request in asked),
        seconds=[one.seconds for one in served],
        first_s=Percentiles.of([seconds for seconds, _ in _ends(passes, served)]),
        between_s=Percentiles.of(list(_gaps(served)) or [0.0]),
        end_s=Percentiles.of([seconds for _, seconds in _ends(passes, served)]),
        counts={name: sum(one.counts[name] for one in served) for name in served[0].counts},
        ready_s=ready,
    )


def _ends(passes: Sequence[Sequence[Asked]], served: Sequence[Served]) -> Iterator[tuple[float, float]]:
    """Yield how long each request waited for its first and its last token, from when it was to arrive."""
    for asked, one in zip(passes, served, strict=True):
        for request, times in zip(asked, one.times, strict=True):
            yield times[0] - request.arrival, times[-1] - request.arrival


def _gaps(served: Sequence[Served]) -> Iterator[float]:
    for times in itertools.chain.from_iterable(one.times for one in served):
        for earlier, later in itertools.pairwise(times):
            yield later - earlier
