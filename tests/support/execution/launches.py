"""What steps launch, and that they wait for nothing."""

from __future__ import annotations

import re
import time

import torch
from transformers import PreTrainedModel

from compiled_llm.execution.batch import Batch
from compiled_llm.execution.generate_loop import GenerateLoop

SLEEP = 2_000_000_000
"""Cycles: about a second."""


def launches_of_steps(model: PreTrainedModel, loop: GenerateLoop, steps: int) -> list[str]:
    """The names of what steps launch; nothing if the profiler shows nothing on this machine."""
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda):
        torch.cuda.synchronize()  # the profiler has to be started on this thread before any other

    def run() -> list[str]:
        with torch.profiler.profile(activities=cuda) as profile:
            for _ in range(steps):
                loop.step()
            torch.cuda.synchronize()
        return [event.name for event in profile.events() if re.match("cu(da)?(Graph)?Launch", event.name)]

    found: list[str] = model.compiled.model_runner().thread.call(run)
    return found


def assert_steps_return_while_the_device_sleeps(loop: GenerateLoop, steps: int) -> None:
    """What they need must have been compiled, captured and pinned before."""
    rows = list(loop.rows)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP)
        asleep.record()
        start = time.perf_counter()
        for _ in range(steps):
            loop.launch(Batch(decode=rows, promise=loop.promise))
        took, over = time.perf_counter() - start, asleep.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not over, f"{steps} launches took {took:.3f} s, when the device had woken up"
    for _ in range(steps):
        loop.read()
