"""New weights for a model that serves: unless asked, no request is answered with some of the old and of the new."""

# All engines of a model get them together, since they share it.

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from compiled_llm.engine.lifecycle.all_engines import (
    all_paused,
    check_outside,
    engine_threads_of,
    run_alone,
)
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.threads.interrupts import check, deferred
from compiled_llm.model.weights.new_weights import NewWeights

logger = logging.getLogger("compiled_llm.engine")

_LOOKING = 0.005
"""Seconds between two looks whether requests have ended."""


def update_weights(runtime: Runtime, folder: Path, requests: Literal["wait", "keep", "end"]) -> None:
    """Have the weights in a folder from now on; ``requests`` is as in ``Engine.update_weights``.

    Raises:
        ValueError: the model or the folder does not allow it; nothing has changed.
        RuntimeError: requests cannot end; or a loop of this thread's has called this. Nothing has changed.
    """
    check_outside(runtime, "update_weights")
    new = NewWeights(runtime.facts.model, folder)  # while requests run

    def write(engine_threads: list[EngineThread]) -> None:
        try:
            with runtime.facts.attention.moving_weights(threading.get_ident()):
                new.write()
        finally:
            for engine_thread in engine_threads:
                engine_thread.model_may_have_changed(weights_stay=False)

    with deferred():
        earlier = nullcontext if requests == "keep" else partial(_ended, runtime, requests == "end")
        run_alone(runtime, "update_weights", write, earlier)
    logger.info("compiled_llm: the weights are those of %s", folder)


@contextmanager
def _ended(runtime: Runtime, cancels: bool) -> Iterator[None]:
    """Run the block once all earlier requests have ended; later ones begin after it."""
    # A thread that has paused an engine may wait for new requests of another, which are kept from here on.
    with all_paused(runtime):
        pass
    engine_threads, before = engine_threads_of(runtime), list[Request]()
    with ExitStack() as stack:
        for engine_thread in engine_threads:
            paused_requests = engine_thread.request_table.paused_requests
            before += paused_requests.begin()
            stack.callback(paused_requests.end)
        for engine_thread in engine_threads if cancels else ():
            engine_thread.cancel([request for request in before if request in engine_thread.request_table])
        _wait_for(before, runtime)
        yield


def _wait_for(requests: Sequence[Request], runtime: Runtime) -> None:
    while left := sum(not request.done for request in requests):
        if runtime.asleep:
            raise RuntimeError(
                f"update_weights: the model is asleep, and {left} requests have not ended; wake() it first, or give "
                "requests='end', or requests='keep' to let them go on with the new weights"
            )
        for engine_thread in engine_threads_of(runtime):
            engine_thread.cancel(engine_thread.request_table.paused_requests.pop_overdue(time.monotonic()), "timeout")
        time.sleep(_LOOKING)
        check()
