"""``bench latency``: time to first token, decode and end to end, all contenders side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable

from compiled_llm.commands.bench.contender import Contender, Session, Setup
from compiled_llm.commands.bench.experiment import Save, failure, run_each
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Latency
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.explaining.profile.step_bytes import step_bytes


def measure(contenders: Iterable[Contender], setup: Setup, runs: int, report: Report, save: Save) -> None:
    """Measure one contender after the other, into the report.

    Args:
        contenders: who takes part.
        setup: model, device and workloads.
        runs: timed runs of each workload.
        report: gets results, obstacles and failures.
        save: called after each result.
    """
    ceilings = _ceilings(setup, report.read_bandwidth)

    def measure_one(contender: Contender) -> None:
        _measure_one(contender, setup, runs, ceilings, report, save)

    run_each(contenders, setup, report, save, measure_one)


def _measure_one(
    contender: Contender,
    setup: Setup,
    runs: int,
    ceilings: dict[Workload, float | None],
    report: Report,
    save: Save,
) -> None:
    setup.log(f"{contender.name}: loading")
    with contender.opened(setup) as session:
        for workload in setup.workloads:
            try:
                result = _result(contender.name, session, workload, runs, ceilings[workload], setup)
            except Exception as error:
                report.failures.append(failure(f"{contender.name}, {workload}", error))
                setup.drop_model()  # its state is in doubt
                break
            report.latency.append(result)
            report.machine["versions"].update(session.versions)
            save()
        if memory := session.memory():
            report.memory[contender.name] = memory


def _result(name: str, session: Session, workload: Workload, runs: int, ceiling: float | None, setup: Setup) -> Latency:
    setup.log(f"{name}, {workload}: compiling and warming up")
    start = time.perf_counter()
    session.prepare(workload)
    ready = time.perf_counter() - start
    timings = []
    for number in range(runs):
        setup.log(f"{name}, {workload}: run {number + 1} of {runs}")
        timings.append(session.run(workload))
    return Latency(
        name,
        workload.batch,
        workload.prompt,
        workload.new,
        workload.sampled,
        [timing.first for timing in timings],
        [timing.total for timing in timings],
        ready,
        ceiling,
    )


def _ceilings(setup: Setup, bandwidth: float | None) -> dict[Workload, float | None]:
    """Return the decode rates that the read bandwidth allows."""
    ceilings: dict[Workload, float | None] = {}
    for workload in setup.workloads:
        nbytes = step_bytes(setup.model(), workload.context).total(workload.batch)
        known = nbytes is not None and bandwidth is not None
        ceilings[workload] = workload.batch * bandwidth / nbytes if known else None  # type: ignore[operator]
    return ceilings
