"""Launches of an engine's loop whose tokens nobody reads: rows go, others are admitted, and sizes of steps change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compiled_llm import Engine, SamplingParams
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.handle import RequestHandle

TURNS = 9


def launch_unread(loop: Loop, gone: Request, *, catch_up: bool = False) -> list[tuple[int, int, int]]:
    """Launch plans, and end a request after the third; return of each how many rows decode, prompts, and tokens a row.

    Another request waits for its place. The engine is paused. ``catch_up`` captures each step right after its launch.
    """
    launched = []
    for turn in range(TURNS):
        if turn == 3:
            loop.scheduler.end(gone, "cancelled")
        plan = loop.scheduler.plan()
        if not loop._repeat(plan):
            loop.model_runner.thread.call(loop._launch, plan)
        loop.scheduler.launched(plan)
        if catch_up:
            loop.model_runner.catch_up(lambda: False)
        launched.append((len(plan.decode), len(plan.extend), plan.new_tokens))
    return launched


def check_launched(launched: list[tuple[int, int, int]], rows: int) -> None:
    """Steps of several sizes ran, a prompt beside some, and as many rows after it."""
    assert {1, 2, 4, 8} == {new for _, _, new in launched}
    assert [prompts for _, prompts, _ in launched].count(1) == 1
    assert [decoding for decoding, _, _ in launched] == [rows] * 3 + [rows - 1] + [rows] * (TURNS - 4)


@contextmanager
def paused_amid(
    engine: Engine, asked: Sequence[tuple[list[int], SamplingParams]], rows: int, tokens: int
) -> Iterator[tuple[Loop, list[RequestHandle]]]:
    """Submit requests, and pause the engine once each of the first ``rows`` has ``tokens``.

    Its thread waits there for the pause: a busy machine would run to the end of the requests before it comes.
    """
    thread, reached = engine._engine_thread, threading.Event()

    def hold() -> None:
        if not reached.is_set() and min(len(handle.requests[0].tokens) for handle in handles[:rows]) >= tokens:
            reached.set()
            while not thread.step_lock.pausing:
                time.sleep(0.001)

    with engine.paused():
        handles = [engine.submit(*each) for each in asked]
        for handle in handles[:rows]:
            handle.when_changed(hold)
    assert reached.wait(60)
    with thread.paused():
        assert thread.loop is not None
        yield thread.loop, handles
