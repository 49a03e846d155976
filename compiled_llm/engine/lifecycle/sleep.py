"""All engines of a model fall asleep together, since they share its pages, and wake together."""

from __future__ import annotations

import logging

from compiled_llm.engine.lifecycle.all_engines import all_paused, engine_threads_of, with_no_pages
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle.runtime import Runtime

logger = logging.getLogger("compiled_llm.engine")


def put_to_sleep(runtime: Runtime, ends: bool, weights: bool, graphs: bool) -> int:
    """Give device memory back, and return how many bytes; ``ends`` ends all requests, which else wait.

    Raises:
        RuntimeError: others hold pages, or a loop of this thread's has called this.
        ValueError: weights cannot be moved.
    """

    def fall_asleep(engine_threads: list[EngineThread]) -> int:
        nbytes = runtime.runner_lifecycle.sleep(weights, graphs)
        for engine_thread in engine_threads:
            engine_thread.sleep(ends)
        return nbytes

    nbytes = with_no_pages(runtime, "sleep", fall_asleep)
    logger.info("asleep: %.2f GiB of device memory given back", nbytes / 2**30)
    return nbytes


def wake_up(runtime: Runtime) -> None:
    """Take device memory again, and let requests go on."""
    with all_paused(runtime) as engine_threads:
        runtime.runner_lifecycle.wake()
        for engine_thread in engine_threads:
            engine_thread.wake()


def let_rise(runtime: Runtime) -> None:
    """Let a model without engines serve other calls: no engine could wake it."""
    if runtime.asleep and not engine_threads_of(runtime):
        runtime.runner_lifecycle.rise()
