"""Where the time of each program goes: prefill, and a decode step of each bucket, on rows of our own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.progress import ProgressDisplay
from compiled_llm.explaining.profile.bandwidth import read_bandwidth
from compiled_llm.explaining.profile.breakdown import Breakdown, kernels_of, kinds_of, moved_by_decode, moved_by_prefill
from compiled_llm.explaining.profile.kernels import KernelProfiler, busy_us
from compiled_llm.explaining.profile.step_bytes import StepBytes, prepared_bytes, step_bytes

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


@dataclass(frozen=True)
class Timing:
    """One program's time."""

    program: str  # ``prefill``, or ``decode``
    rows: int
    tokens: int  # in prefill, all new tokens; in decode, those of an average row, in the middle of the profiled steps
    breakdown: Breakdown

    def data(self) -> dict[str, Any]:
        named = {"program": self.program, "rows": self.rows, "tokens": self.tokens}
        return {**named, **asdict(self.breakdown), **self.breakdown.figures()}


def tokens_to_hold(batches: Sequence[int], prompts: Prompts | None, page_size: int) -> int:
    longest = _PROMPT if prompts is None else max(map(len, prompts))
    return max(batches) * (-(-(longest + _STEPS) // page_size) + 1) * page_size


def measure(
    model_runner: ModelRunner, model: PreTrainedModel, batches: Sequence[int], prompts: Prompts | None, progress: bool
) -> list[Timing]:
    """Time prefill and a decode step at some batch sizes; buckets that are not compiled yet are compiled first.

    Raises:
        OutOfPagesError: the pages are in use.
        ValueError: the model has too few positions for what is timed.
    """
    _check_positions(model_runner, prompts)
    display, steps = (
        ProgressDisplay(progress),
        sorted({model_runner.steps.decode_of(size) for size in batches}),
    )
    for step in steps:
        model_runner.thread.call(model_runner.steps.ready, step)
    model_runner.thread.call(model_runner.prefill.launches.make_ready)
    with display.task("measuring the read bandwidth"):
        bench = _Stopwatch(model_runner, model, read_bandwidth(model_runner.device, model.dtype))
        if model_runner.device.type == "cuda":
            torch.cuda.empty_cache()  # it took gigabytes, which others may need
    timings = []
    with display.task("timing prefill"):
        timings.append(bench.prefill(_prompts(prompts, steps[0].rows, model_runner)))
    for number, step in enumerate(steps, 1):
        with display.task(f"timing decode bucket {step.rows} ({number} of {len(steps)})"):
            timings.append(bench.decode(_prompts(prompts, step.rows, model_runner)))
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
    def __init__(self, model_runner: ModelRunner, model: PreTrainedModel, bandwidth: float) -> None:
        self._model_runner, self._model, self._bandwidth = model_runner, model, bandwidth
        self._cuda = model_runner.device.type == "cuda"

    def prefill(self, prompts: Prompts) -> Timing:
        for _ in range(_WARM):
            self._seconds_of_prefill(prompts)
        seconds = statistics.median(self._seconds_of_prefill(prompts) for _ in range(_RUNS))
        profiler = KernelProfiler(self._model_runner.device)
        with profiler, self._admitted(prompts) as generate_loop:
            profiler.start()
            generate_loop.step()
            profiler.stop()
        tokens = sum(map(len, prompts))
        state = self._model_runner.state
        nbytes, prepared = step_bytes(self._model, 1, state), prepared_bytes(state.facts.layers, self._model.dtype)
        moved = moved_by_prefill(nbytes, prepared, tokens, profiler.launches)
        found = self._breakdown(profiler, 1, seconds, StepBytes(nbytes.weights, 0, 0), moved, len(prompts), None)
        return Timing("prefill", len(prompts), tokens, found)

    def decode(self, prompts: Prompts) -> Timing:
        with self._admitted(prompts) as generate_loop:
            generate_loop.step()
            generate_loop.step()
            self._seconds(generate_loop, _WARM)
            seconds = statistics.median(self._seconds(generate_loop, _RUN) / _RUN for _ in range(_RUNS))
            host = statistics.fmean(self._launch_seconds(generate_loop) for _ in range(_RUN))
            with KernelProfiler(self._model_runner.device) as profiler:
                profiler.start()
                for _ in range(_PROFILED):
                    generate_loop.step()
                profiler.stop()
            context = sum(row.exact_length for row in generate_loop.rows) // len(prompts) - _PROFILED // 2
        nbytes = step_bytes(self._model, context, self._model_runner.state)
        moved = moved_by_decode(nbytes, len(prompts))
        # Where host and device are one, launching a step is running it.
        host_us = 1e6 * host if self._cuda else None
        found = self._breakdown(profiler, _PROFILED, seconds, nbytes, moved, len(prompts), host_us)
        return Timing("decode", len(prompts), context, found)

    def _breakdown(
        self,
        profiler: KernelProfiler,
        steps: int,
        seconds: float,
        nbytes: StepBytes,
        moved: dict[str, int | None],
        rows: int,
        host_us: float | None,
    ) -> Breakdown:
        return Breakdown(
            measured="kernels" if self._cuda else "operators",
            step_us=1e6 * seconds,
            busy_us=busy_us(profiler.launches) / steps,
            steps=steps,
            weight_bytes=nbytes.weights,
            kv_bytes=rows * nbytes.kv_per_row,
            read_bandwidth=self._bandwidth,
            host_us=host_us,
            kinds=kinds_of(profiler.launches, steps, moved),
            kernels=kernels_of(profiler.launches, steps),
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
