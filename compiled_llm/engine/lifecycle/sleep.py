"""All engines of a model fall asleep together, since they share its pages, and wake together."""

from __future__ import annotations

import logging

from compiled_llm.engine.lifecycle.all_engines import all_paused, calls_ended, drivers_of, nothing_running
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.threads.interrupts import deferred

logger = logging.getLogger("compiled_llm.engine")


@deferred()
def put_to_sleep(runtime: Runtime, ends: bool, weights: bool) -> int:
    """Give device memory back, and return how many bytes.

    Args:
        runtime: of the model.
        ends: end all requests; otherwise they wait.
        weights: those, too.

    Raises:
        RuntimeError: others hold pages, or a loop of this thread's has called this.
        ValueError: weights cannot be moved.
    """
    with calls_ended(runtime, "sleep"):
        while (nbytes := _put_to_sleep(runtime, ends, weights)) is None:
            runtime.calls.wait()
    logger.info("asleep: %.2f GiB of device memory given back", nbytes / 2**30)
    return nbytes


def _put_to_sleep(runtime: Runtime, ends: bool, weights: bool) -> int | None:
    """As ``put_to_sleep``; None if a call is in progress, and nothing has changed."""
    with nothing_running(runtime) as drivers:
        if drivers is None:
            return None
        for driver in drivers:
            driver.placed.park()
        nbytes = runtime.device_side.sleep(weights)
        for driver in drivers:
            driver.rest(ends)
        return nbytes


def wake_up(runtime: Runtime) -> None:
    """Take device memory again, and let requests go on."""
    with all_paused(runtime) as drivers:
        runtime.device_side.wake()
        for driver in drivers:
            driver.go_on()


def let_rise(runtime: Runtime) -> None:
    """Let a model that has no engine any more serve other calls: nobody could wake it."""
    if runtime.asleep and not drivers_of(runtime):
        runtime.device_side.rise()
