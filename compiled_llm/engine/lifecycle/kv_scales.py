"""New scales for pages of fp8: what is in pages was divided by the old ones, so that nobody may go on reading it."""

from __future__ import annotations

from compiled_llm.config import KVScales
from compiled_llm.engine.lifecycle.all_engines import calls_ended, nothing_running
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.threads.interrupts import deferred


@deferred()
def set_kv_scales(runtime: Runtime, scales: KVScales) -> None:
    """Have scales that fit the model from now on; requests that run compute again what they need."""
    # RuntimeError, with nothing changed, if caches hold pages, or a loop of this thread's has called this.
    with calls_ended(runtime, "set_kv_scales"):
        while not _set(runtime, scales):
            runtime.calls.wait()


def _set(runtime: Runtime, scales: KVScales) -> bool:
    """As ``set_kv_scales``; False if a call is in progress, and nothing has changed."""
    with nothing_running(runtime) as engine_threads:
        if engine_threads is None:
            return False
        for engine_thread in engine_threads:
            engine_thread.placed.park()
        runtime.take_kv_scales(scales)
        return True
