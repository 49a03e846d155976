"""Where the time of each program goes: prefill, and a decode step of each bucket, on rows of our own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.progress import ProgressDisplay
from compiled_llm.explaining.profile.kernels import KernelLaunch, KernelProfiler, Spent, busy_us, spent_by

Prompts = Sequence[NDArray[np.int64]]

_WARM = 3
_RUNS = 3
_RUN = 8
# With pages of 16 tokens, one of them uploads a page table.
_PROFILED = 16
_STEPS = 2 + _WARM + _RUNS * _RUN + _RUN + _PROFILED
_PROMPT = 128
# Prefill of all rows together; with many of them, prompts are shorter.
_TOKENS = 1024
# What is kept of kernels.
_TOP = 25
_LONGEST_NAME = 160


@dataclass(frozen=True)
class Timing:
    """Where the time of one program's step goes; times are in microseconds."""

    program: str  # ``prefill``, or ``decode``
    rows: int
    tokens: int  # in prefill, all new tokens; in decode, those of an average row, in the middle of the profiled steps
    measured: str  # ``kernels``, or on a CPU ``operators``
    steps: int  # how many steps were profiled
    step_us: float  # one step without the profiler: the median over the runs
    busy_us: float  # the time in a step during which any kernel ran
    host_us: float | None  # the host's time for the launch of a step; None where that was not measured
    kinds: list[Spent]
    kernels: list[Spent]  # the kernels that took longest

    def data(self) -> dict[str, Any]:
        gaps = max(0.0, self.step_us - self.busy_us)
        launches = sum(kind.launches for kind in self.kinds)
        return {**asdict(self), "gaps_us": gaps, "launches": launches}


def tokens_to_hold(batches: Sequence[int], prompts: Prompts | None, page_size: int) -> int:
    longest = _PROMPT if prompts is None else max(map(len, prompts))
    return max(batches) * (-(-(longest + _STEPS) // page_size) + 1) * page_size


def measure(model_runner: ModelRunner, batches: Sequence[int], prompts: Prompts | None, progress: bool) -> list[Timing]:
    """Time prefill and a decode step at some batch sizes; buckets that are not compiled yet are compiled first.

    Raises:
        OutOfPagesError: the pages are in use.
        ValueError: the model has too few positions for what is timed.
    """
    _check_positions(model_runner, prompts)
    steps = sorted({model_runner.steps.decode_of(size) for size in batches})
    for step in steps:
        model_runner.thread.call(model_runner.steps.ready, step)
    model_runner.thread.call(model_runner.prefill.launches.make_ready)
    display = ProgressDisplay(progress)
    stopwatch = _Stopwatch(model_runner)
    with display.task("timing prefill"):
        timings = [stopwatch.prefill(_prompts(prompts, steps[0].rows, model_runner))]
    for number, step in enumerate(steps, 1):
        with display.task(f"timing decode bucket {step.rows} ({number} of {len(steps)})"):
            timings.append(stopwatch.decode(_prompts(prompts, step.rows, model_runner)))
    return timings


def _check_positions(model_runner: ModelRunner, prompts: Prompts | None) -> None:
    longest = 1 if prompts is None else max(map(len, prompts))
    if longest + _STEPS > model_runner.max_positions:
        raise ValueError(
            f"timings: {_STEPS} steps after a prompt of {longest} tokens are timed, and the model has "
            f"{model_runner.max_positions} positions; leave timings out, or give a shorter prompt"
        )


def _prompts(prompts: Prompts | None, rows: int, model_runner: ModelRunner) -> Prompts:
    if prompts is not None:
        return [prompts[row % len(prompts)] for row in range(rows)]
    length = max(1, min(_PROMPT, _TOKENS // rows, model_runner.max_positions - _STEPS))
    return [np.arange(row, row + length, dtype=np.int64) % model_runner.vocabulary for row in range(rows)]


class _Stopwatch:
    def __init__(self, model_runner: ModelRunner) -> None:
        self._model_runner = model_runner
        self._cuda = model_runner.device.type == "cuda"

    def prefill(self, prompts: Prompts) -> Timing:
        for _ in range(_WARM):
            self._seconds_of_prefill(prompts)
        seconds = statistics.median(self._seconds_of_prefill(prompts) for _ in range(_RUNS))
        with self._admitted(prompts) as generate_loop:
            launches = self._profiled(generate_loop, 1)
        return self._timing("prefill", prompts, sum(map(len, prompts)), launches, 1, seconds, None)

    def decode(self, prompts: Prompts) -> Timing:
        with self._admitted(prompts) as generate_loop:
            generate_loop.step()
            generate_loop.step()
            self._seconds(generate_loop, _WARM)
            seconds = statistics.median(self._seconds(generate_loop, _RUN) / _RUN for _ in range(_RUNS))
            host = statistics.fmean(self._launch_seconds(generate_loop) for _ in range(_RUN))
            launches = self._profiled(generate_loop, _PROFILED)
            context = sum(row.exact_length for row in generate_loop.rows) // len(prompts) - _PROFILED // 2
        # Where host and device are one, launching a step is running it.
        host_us = 1e6 * host if self._cuda else None
        return self._timing("decode", prompts, context, launches, _PROFILED, seconds, host_us)

    def _profiled(self, generate_loop: GenerateLoop, steps: int) -> list[KernelLaunch]:
        with KernelProfiler(self._model_runner.device) as profiler:
            profiler.start()
            for _ in range(steps):
                generate_loop.step()
            profiler.stop()
        return profiler.launches

    def _timing(
        self,
        program: str,
        prompts: Prompts,
        tokens: int,
        launches: list[KernelLaunch],
        steps: int,
        seconds: float,
        host_us: float | None,
    ) -> Timing:
        return Timing(
            program=program,
            rows=len(prompts),
            tokens=tokens,
            measured="kernels" if self._cuda else "operators",
            steps=steps,
            step_us=1e6 * seconds,
            busy_us=busy_us(launches) / steps,
            host_us=host_us,
            kinds=spent_by(lambda launch: launch.kind, launches, steps),
            kernels=spent_by(lambda launch: launch.name[:_LONGEST_NAME], launches, steps)[:_TOP],
        )

    @contextmanager
    def _admitted(self, prompts: Prompts) -> Iterator[GenerateLoop]:
        generate_loop = GenerateLoop(self._model_runner)
        try:
            for prompt in prompts:
                generate_loop.admit(prompt, _STEPS)
            yield generate_loop
        finally:
            self._synchronize()
            generate_loop.close()

    def _seconds_of_prefill(self, prompts: Prompts) -> float:
        with self._admitted(prompts) as generate_loop:
            return self._seconds(generate_loop, 1)

    def _seconds(self, generate_loop: GenerateLoop, steps: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            generate_loop.step()
        self._synchronize()
        return time.perf_counter() - start

    def _launch_seconds(self, generate_loop: GenerateLoop) -> float:
        self._synchronize()
        start = time.perf_counter()
        generate_loop.step()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        self._model_runner.end_captures()
        wait_for_device(self._model_runner.device)
