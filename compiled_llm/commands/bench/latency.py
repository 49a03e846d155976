"""``bench latency``: time to first token, decode and end to end, all contenders side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

from compiled_llm.commands.bench.contenders import BenchSession, Contender, Setup
from compiled_llm.commands.bench.report import BenchReport, Result, Save, failure
from compiled_llm.commands.bench.timing import Spread, Workload


def measure(contenders: Iterable[Contender], setup: Setup, runs: int, report: BenchReport, save: Save) -> None:
    """Measure one contender after the other into the report; one that fails does not take the others with it."""
    for contender in contenders:
        if reason := contender.obstacle(setup):
            report.unavailable[contender.name] = reason
            continue
        doing = contender.name
        try:
            setup.log(f"{contender.name}: loading")
            with contender.opened(setup) as session:
                for workload in setup.workloads:
                    doing = f"{contender.name}, {workload}"
                    report.add("latency", _result(contender.name, session, workload, runs, setup))
                    report.machine["versions"].update(session.versions)
                    save()
                if memory := session.memory():
                    report.memory[contender.name] = dict(memory)
        except Exception as error:
            report.failures.append(failure(doing, error))
            setup.drop_model()  # its state is in doubt


def _result(name: str, session: BenchSession, work: Workload, runs: int, setup: Setup) -> Result:
    setup.log(f"{name}, {work}: compiling and warming up")
    start = time.perf_counter()
    session.prepare(work)
    ready = time.perf_counter() - start
    timings = []
    for number in range(runs):
        setup.log(f"{name}, {work}: run {number + 1} of {runs}")
        timings.append(session.run(work))
    decode = (work.batch * (work.new - 1) / (timing.total - timing.first) for timing in timings)
    figures = {
        "context": work.context,
        "first_s": Spread.of_times(timing.first for timing in timings)._asdict(),
        "decode_tokens_per_s": Spread.of_rates(decode)._asdict(),
        "end_to_end_tokens_per_s": Spread.of_rates(work.batch * work.new / one.total for one in timings)._asdict(),
    }
    measured = {"first_s": [timing.first for timing in timings], "total_s": [timing.total for timing in timings]}
    return {"contender": name, **asdict(work), **measured, "ready_s": ready, "figures": figures}
