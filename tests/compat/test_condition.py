"""Ctrl-C leaves our conditions free, wherever it arrives: other threads would wait for them for ever."""

from __future__ import annotations

import functools
import random
import signal
import threading

import pytest

from compiled_llm.compat.condition import Condition
from support.in_threads import in_thread


def interrupted(condition: threading.Condition, after: float) -> None:
    """Take a condition and leave it, again and again, until Ctrl-C is pressed."""
    main = threading.get_ident()
    threading.Timer(after, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    while True:
        with condition:
            pass


@pytest.mark.core
def test_no_interrupt_leaves_the_lock_taken(seed: int, request: pytest.FixtureRequest) -> None:
    """With ``threading.Condition`` the first few do."""
    draw = random.Random(seed)
    for number in range(400 if request.config.getoption("--whole") else 60):
        condition = Condition()
        with pytest.raises(KeyboardInterrupt):
            interrupted(condition, after=draw.random() * 0.002)
        assert in_thread(functools.partial(condition.acquire, timeout=1)), f"interrupt {number}"


def test_it_waits_and_notifies() -> None:
    condition, seen = Condition(), []

    def wait() -> None:
        with condition:
            condition.wait_for(lambda: seen, timeout=60)
            seen.append("woken")

    thread = threading.Thread(target=wait)
    thread.start()
    with condition:
        seen.append("notified")
        condition.notify_all()
    thread.join()
    assert seen == ["notified", "woken"]
