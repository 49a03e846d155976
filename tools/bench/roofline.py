"""Where the time of a decode step goes, by kind of kernel, against the bytes that it has to read.

python tools/bench/roofline.py --model qwen3-0.6b --batches 1,8,64
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from common import Bench, Commit, Contenders, DeviceName, Json, Model, bench, integers

from compiled_llm.commands.bench import contenders as ours
from compiled_llm.commands.bench.contenders import BenchSession, Contender
from compiled_llm.commands.bench.timing import TokenClock, Workload
from compiled_llm.explaining.profile.breakdown import kernels_of, kinds_of, moved_by_decode
from compiled_llm.explaining.profile.kernels import KernelProfiler, busy_us
from compiled_llm.explaining.profile.step_bytes import step_bytes

PROFILED = 16
"""Decode steps under the profiler; with pages of 16 tokens, one of them uploads a page table."""
HOST_STEPS = 64


class SwitchingClock(TokenClock):
    """Profiles some steps of a call.

    Between two tokens of the stream a loop launches as many steps as there are tokens, whether or not it runs ahead of
    what it streams; the device is idle at both ends.
    """

    def __init__(self, profiler: KernelProfiler, first: int, steps: int) -> None:
        super().__init__()
        self._profiler, self._first, self._last = profiler, first, first + steps

    def put(self, value: Any) -> None:
        super().put(value)
        if len(self.times) == self._first:
            self._profiler.start()
        if len(self.times) == self._last:
            self._profiler.stop()


def host_us(session: BenchSession, workload: Workload) -> float | None:
    """The mean of `generate`'s steps with an idle device: each launches a greedy step and reads the last."""
    steps = min(HOST_STEPS, workload.new - 2)
    if not hasattr(session.model, "compiled") or steps < 1 or workload.sampled:
        return None
    runner = session.model.compiled.generate_loop()

    def seconds_of_step() -> float:
        session.setup.synchronize()
        start = time.perf_counter()
        runner.step()
        return time.perf_counter() - start

    try:
        for prompt in workload.prompts(session.vocabulary, 0):
            runner.admit(prompt, workload.new)
        runner.step()  # prefill
        runner.step()  # looks whether the model is as it was captured; the others of a call need not
        return 1e6 * statistics.fmean(seconds_of_step() for _ in range(steps))
    finally:
        session.setup.synchronize()
        runner.close()


def measured(name: str, session: BenchSession, workload: Workload, runs: int, bandwidth: float) -> dict[str, Any]:
    """Time decode steps, then profile some in the middle of another call."""
    session.prepare(workload)
    timings = [session.run(workload) for _ in range(runs)]
    step = 1e6 * statistics.median((timing.total - timing.first) / (workload.new - 1) for timing in timings)
    host, device, steps = host_us(session, workload), session.setup.device, min(PROFILED, workload.new // 2)
    with KernelProfiler(device) as profiler:
        clock = SwitchingClock(profiler, max(1, workload.new // 2 - steps // 2), steps)
        session.run(workload, clock)
    compiled = getattr(session.model, "compiled", None)
    state = None if compiled is None else compiled.model_runner().state
    nbytes, launches = step_bytes(session.model, workload.context, state), profiler.launches
    moved, total = moved_by_decode(nbytes, workload.batch), nbytes.total(workload.batch)

    def shares(nbytes: int | None, us: float) -> dict[str, float | None]:
        return {"of_the_step": us / step, "of_bandwidth": nbytes and nbytes / bandwidth / us * 1e6}

    busy = busy_us(launches) / steps
    gaps = max(0.0, step - busy)
    kinds = [{**asdict(kind), **shares(kind.nbytes, kind.us)} for kind in kinds_of(launches, steps, moved)]
    return {
        "contender": name,
        **asdict(workload),
        "context": workload.context,
        "steps": steps,
        "measured": "kernels" if device.type == "cuda" else "operators",
        "step_us": step,
        "busy_us": busy,
        "host_us": host,
        "nbytes": total,
        "kinds": kinds,
        "kernels": [asdict(kernel) for kernel in kernels_of(launches, steps)],
        "figures": {
            "gaps_us": gaps,
            "gaps_of_the_step": gaps / step,
            "launches": len(launches) / steps,
            "of_bandwidth": total and total / bandwidth / step * 1e6,
        },
    }


def main(
    model: Model = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "128",
    new: Annotated[int, typer.Option(min=4, help="New tokens; those in the middle are profiled.")] = 64,
    contenders: Contenders = "ours",
    runs: Annotated[int, typer.Option(min=1, help="Runs without the profiler, for the time of a step.")] = 5,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Show where the time of a decode step goes, by kind of kernel, against the bytes that it has to read."""
    asked = [Workload(batch, prompt, new) for prompt in integers(prompts) for batch in integers(batches)]
    with bench(model, device, asked, json, commit, bandwidth=True) as run:
        run.each(ours.choose(contenders, run.setup.device.type), lambda contender: measure(run, contender, runs))


def measure(run: Bench, contender: Contender, runs: int) -> None:
    assert run.report.read_bandwidth is not None
    with contender.opened(run.setup) as session, torch.no_grad():
        for workload in run.setup.workloads:
            run.setup.log(f"{contender.name}, {workload}: profiling")
            run.add("roofline", measured(contender.name, session, workload, runs, run.report.read_bandwidth))


if __name__ == "__main__":
    typer.run(main)
