"""Images have turns: so many pixels at once, small ones beside large ones, and those who had least come first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from compiled_llm.engine.apart.unwanted import UnwantedError
from support.server.engine_processes import PATIENCE, until

SMALL, LARGE, HUGE = 1000, 2**23, 2**26


class Line:
    """Requests whose images go on until they are let."""

    def __init__(self) -> None:
        from compiled_llm.server.images.turns import Asker, Turns  # a part that can be taken out

        self.turns, self._asker = Turns(), Asker
        self.begun: list[str] = []
        self.threads = ThreadPoolExecutor(16)
        self._free: dict[str, threading.Event] = {}

    def ask(self, name: str, pixels: int, seconds: float = 0.0, **options: Any) -> Future[None]:
        self._free[name] = threading.Event()
        count = len(self.turns._waiting) + len(self.turns._running)
        future = self.threads.submit(self._ask, name, pixels, self._asker(seconds=seconds, **options))
        until(lambda: len(self.turns._waiting) + len(self.turns._running) > count)
        return future

    def _ask(self, name: str, pixels: int, asker: Any) -> None:
        with self.turns.turn(asker, pixels):
            self.begun.append(name)
            assert self._free[name].wait(PATIENCE)

    def let(self, *names: str) -> None:
        for name in names:
            self._free[name].set()

    def close(self) -> None:
        self.let(*self._free)
        self.threads.shutdown()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def running(line: Line, *names: str) -> None:
    until(lambda: set(names) <= set(line.begun))
    assert set(line.begun) == set(names)


def test_the_pixels_of_all_requests_are_bounded_together(line):
    line.ask("huge", HUGE)
    line.ask("large", LARGE)
    line.ask("small", SMALL)
    running(line, "huge", "small")
    line.let("huge")
    running(line, "huge", "small", "large")


def test_a_large_one_waits_for_no_larger_ones_that_come_later(line):
    line.ask("first", LARGE)
    line.ask("huge", HUGE)
    line.ask("later", LARGE)
    running(line, "first")
    line.let("first")
    running(line, "first", "huge")


def test_slow_requests_cannot_take_all_places(line):
    for number in range(4):
        line.ask(f"slow {number}", LARGE)
    running(line, "slow 0", "slow 1", "slow 2")
    line.ask("quick", SMALL)
    running(line, "slow 0", "slow 1", "slow 2", "quick")


def test_those_that_had_least_come_first(line):
    for number in range(4):
        line.ask(f"small {number}", SMALL)
    line.ask("much", SMALL, seconds=9.0)
    line.ask("little", SMALL, seconds=1.0)
    line.ask("new", SMALL)
    running(line, *(f"small {number}" for number in range(4)))
    for number in range(3):
        line.let(f"small {number}")
        until(partial(lambda count: len(line.begun) == count, 5 + number))
    assert line.begun[4:] == ["new", "little", "much"]


def test_time_that_images_took_counts_and_a_place_is_given_back_after_an_error(line):
    asker = line._asker()
    with pytest.raises(ZeroDivisionError), line.turns.turn(asker, HUGE):
        raise ZeroDivisionError
    assert asker.seconds > 0
    with line.turns.turn(asker, HUGE):
        assert len(line.turns._running) == 1


def test_one_that_nobody_waits_for_leaves_the_line(line):
    line.ask("huge", HUGE)
    left = threading.Event()
    waiting = line.ask("left", HUGE, wanted=lambda: not left.is_set())
    left.set()
    with pytest.raises(UnwantedError):
        waiting.result(PATIENCE)
    assert line.begun == ["huge"]
    assert not line.turns._waiting


class Answer:
    done = False


def test_none_begins_while_requests_keep_too_much_of_theirs(line):
    from compiled_llm.server.images.turns import MAX_KEPT_OF_IMAGES

    first, second = Answer(), Answer()
    for answer in (first, second):
        line.turns.keep(MAX_KEPT_OF_IMAGES // 2, answer)
    line.ask("small", SMALL)
    assert line.begun == []
    second.done = True
    running(line, "small")
