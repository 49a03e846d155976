"""A call of ``generate`` as requests of an engine that is busy on the same model: many callers become one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.engine.thread.source import EngineSource
from compiled_llm.execution.limits import check_fits
from compiled_llm.execution.threads.interrupts import allowed, deferred
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.huggingface.generate import Sequences, steps_with_callbacks
from compiled_llm.huggingface.processors.grammar import grammar_of
from compiled_llm.requests.handle import RequestHandle


def engine_to_join(call: PagedCall) -> EngineThread | None:
    """Return the engine that should serve a call of the fast loop, or None."""
    # An idle one does not while no other loop runs: alone, a call is faster in a loop of its own. Nor can it serve a
    # call that begins from a cache or returns one, lets the user's code run between steps, or follows a processor's
    # grammar.
    engine_thread = call.runtime.engine()
    if (
        not isinstance(engine_thread, EngineThread)
        or engine_thread.closed
        or not (engine_thread.request_table or call.runtime.loop_lock.busy)
    ):
        return None
    if engine_thread.step_lock.here or not _fits(call):  # inside ``engine.paused()``; or it will be refused
        return None
    if engine_thread.joined.barred or call.runtime.calls.awaited or call.runtime.loop_lock.here:
        return None  # the engine stops soon, or a call that has pages waits for this one
    alone = call.returns_cache or call.prefilled_apart or call.cache.generate_loop.rows
    return None if alone or steps_with_callbacks(call) or grammar_of(call.processors) is not None else engine_thread


def _fits(call: PagedCall) -> bool:
    pool = call.model_runner.pool
    return pool.pages_for(max(call.lengths) + call.max_new - 1) <= pool.total


def run_in_engine(engine_thread: EngineThread, call: PagedCall, settings: Sequence[Sampling | None]) -> Sequences:
    """Generate in the engine's batch, as ``fast_loop``; not ``done`` if the engine takes no calls, or has stopped."""
    # A streamer gets each token in this thread, while a thread of the engine's runs the steps: it holds up no other
    # row, and what it raises ends this call alone.
    check_fits(call.model_runner, call.lengths, call.max_new, needed=0)
    sequences = Sequences(call)
    requests = _requests(call, sequences, settings)
    handle = EngineSource(engine_thread, call.runtime).handle(requests)
    with deferred(), engine_thread.joined.joined(handle) as may_join:
        if may_join:
            engine_thread.add([handle])
            try:
                if call.streamer is None:
                    engine_thread.answer([handle])
                else:
                    engine_thread.start_thread()
                with allowed():
                    _follow(handle, sequences)
            finally:
                handle.cancel()
    if sequences.done:
        call.runtime.counters.add_tokens(sequences.new_tokens)
    return sequences


def _follow(handle: RequestHandle, sequences: Sequences) -> None:
    """Append the tokens of each step once all rows have them, until the end, or a row that was cancelled."""
    while not sequences.done:
        step = sequences.generated
        come = partial(_has_come, handle.requests, step)
        if not come():
            handle.listeners.wait_until(come)
        for request in handle.requests:
            if len(request.tokens) <= step and request.finish_reason in ("error", "cancelled"):
                if request.error is not None:
                    raise request.error
                return
        sequences.append([request.tokens[step] if step < len(request.tokens) else 0 for request in handle.requests])


def _has_come(requests: Sequence[Request], step: int) -> bool:
    """Whether each row has a token of this step, or ends before it."""
    return all(len(request.tokens) > step or request.done for request in requests)


def _requests(call: PagedCall, sequences: Sequences, settings: Sequence[Sampling | None]) -> list[Request]:
    requests: list[Request] = []
    for tokens, leads, sampling in zip(call.tokens, call.leaders, settings, strict=True):
        request = Request(
            prompt=tokens,
            sampling=sampling,
            max_tokens=call.max_new,
            stop_token_ids=sequences.eos,
            prefix_owner=requests[leads] if leads < len(requests) else None,
            submitted=time.monotonic(),
        )
        requests.append(request)
    return requests
