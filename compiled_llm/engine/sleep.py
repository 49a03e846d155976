"""All engines of a model fall asleep together, since they share its pages, and wake together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from compiled_llm.engine.driver import Driver
from compiled_llm.execution.runtime import Runtime

logger = logging.getLogger("compiled_llm.engine")


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
    if runtime.loop_lock.here:
        raise RuntimeError("sleep: a call of generate is in progress in this thread; call it from outside of that")
    with all_paused(runtime) as drivers:
        with runtime.loop_lock.taken():
            for driver in drivers:
                driver.placed.park()
        with runtime.loop_lock.taken(fits=lambda: False):  # once no loop is in progress
            nbytes = runtime.device_side.sleep(weights)
        for driver in drivers:
            driver.rest(ends)
    logger.info("asleep: %.2f GiB of device memory given back", nbytes / 2**30)
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


@contextmanager
def all_paused(runtime: Runtime) -> Iterator[list[Driver]]:
    """Let no engine run."""
    with ExitStack() as stack:
        drivers = drivers_of(runtime)
        for driver in drivers:
            stack.enter_context(driver.paused())
        yield drivers


def drivers_of(runtime: Runtime) -> list[Driver]:
    """Return all engines of a model; always in the same order, so that two threads do not wait for each other."""
    return sorted((found for found in list(runtime.engines) if isinstance(found, Driver) and found.open), key=id)
