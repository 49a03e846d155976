"""``bench roofline``: where the time of a decode step goes, against the bytes that it has to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from compiled_llm.commands.bench.contender import Contender, Setup
from compiled_llm.commands.bench.experiment import Save, run_each
from compiled_llm.commands.bench.local import LocalSession
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Roofline
from compiled_llm.commands.bench.step_profiler import StepProfiler
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.explaining.profile.breakdown import kernels_of, kinds_of, moved_by_decode
from compiled_llm.explaining.profile.kernels import busy_us
from compiled_llm.explaining.profile.step_bytes import step_bytes

PROFILED = 16
"""Decode steps under the profiler; with pages of 16 tokens, one of them uploads a page table."""


def measure(contenders: Iterable[Contender], setup: Setup, runs: int, report: Report, save: Save) -> None:
    """Profile one contender after the other, into the report.

    Args:
        contenders: who takes part.
        setup: model, device and workloads.
        runs: runs without the profiler, for the time of a step.
        report: gets results, obstacles and failures; it has the read bandwidth.
        save: called after each result.
    """

    def measure_one(contender: Contender) -> None:
        _measure_one(contender, setup, runs, report, save)

    run_each(contenders, setup, report, save, measure_one)


def _measure_one(contender: Contender, setup: Setup, runs: int, report: Report, save: Save) -> None:
    setup.log(f"{contender.name}: loading")
    with contender.opened(setup) as session:
        if not isinstance(session, LocalSession):
            report.unavailable[contender.name] = "runs in another process, into which the profiler does not see"
            return
        for workload in setup.workloads:
            setup.log(f"{contender.name}, {workload}: profiling")
            assert report.read_bandwidth is not None
            report.roofline.append(measure_step(contender.name, session, workload, runs, report.read_bandwidth))
            save()


def measure_step(name: str, session: LocalSession, workload: Workload, runs: int, bandwidth: float) -> Roofline:
    """Time decode steps, then profile some in the middle of another call.

    Args:
        name: the contender's.
        session: with its model loaded.
        workload: of at least four new tokens, so that a loop that runs ahead has not come to its end.
        runs: runs without the profiler.
        bandwidth: bytes/s.
    """
    session.prepare(workload)
    timings = [session.run(workload) for _ in range(runs)]
    step = statistics.median((timing.total - timing.first) / (workload.new - 1) for timing in timings)
    host = session.host_us(workload)
    device, steps = session.setup.device, min(PROFILED, workload.new // 2)
    with StepProfiler(device, steps, after=workload.new // 2 - steps // 2) as profiler:
        session.run_with(profiler.clock, workload)
    nbytes = step_bytes(session.model, workload.context)
    launches = profiler.launches
    return Roofline(
        contender=name,
        batch=workload.batch,
        prompt=workload.prompt,
        new=workload.new,
        sampled=workload.sampled,
        measured="kernels" if device.type == "cuda" else "operators",
        step_us=1e6 * step,
        busy_us=busy_us(launches) / steps,
        steps=steps,
        weight_bytes=nbytes.weights,
        kv_bytes=workload.batch * nbytes.kv_per_row,
        read_bandwidth=bandwidth,
        host_us=host,
        kinds=kinds_of(launches, steps, moved_by_decode(nbytes, workload.batch)),
        kernels=kernels_of(launches, steps),
    )
