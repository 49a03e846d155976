"""Turns of images: a bounded number of pixels is decoded and read at once, and nobody's images keep others waiting."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.server.defaults import MAX_KEPT_OF_IMAGES, MOST_IMAGE_PIXELS

_PLACES = 4
_LARGE = 2**22
"""Pixels from which on an image is a large one: one place is kept for smaller ones, which take little time."""
_LOOKING = 0.25
"""Seconds between two looks whether an image is still wanted."""


@dataclass(eq=False)
class Asker:
    """A request, whose images have their turns one after the other.

    Attributes:
        wanted: returns whether somebody still waits for it.
        seconds: how long its images have taken so far.
    """

    wanted: Callable[[], bool] = lambda: True
    seconds: float = 0.0


@dataclass(eq=False)
class _Turn:
    asker: Asker
    pixels: int
    seconds: float  # that the request had taken before it
    number: int  # in which order turns were asked for

    @property
    def is_large(self) -> bool:
        return self.pixels >= _LARGE


class Ending(Protocol):
    """A request, as far as it ends."""

    @property
    def done(self) -> bool: ...


class Turns:
    """Turns of the images of all requests: those of requests that have taken least time come first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._asked = 0
        self._kept: list[tuple[int, weakref.ref[Ending]]] = []

    def keep(self, nbytes: int, request: Ending) -> None:
        """Count bytes that a request keeps of its images until it has ended; beyond a bound no turn begins."""
        with self._changed:
            self._kept.append((nbytes, weakref.ref(request)))

    @contextmanager
    def turn(self, asker: Asker, pixels: int) -> Iterator[None]:
        """Wait until so many pixels of a request may be decoded, and read, which the block does.

        Raises:
            UnwantedError: nobody waits for the request any more.
        """
        turn = self._began(asker, pixels)
        start = time.monotonic()
        try:
            yield
        finally:
            asker.seconds += time.monotonic() - start
            with self._changed:
                self._running.remove(turn)
                self._changed.notify_all()

    def _began(self, asker: Asker, pixels: int) -> _Turn:
        with self._changed:
            turn = _Turn(asker, pixels, asker.seconds, self._asked)
            self._asked += 1
            self._waiting.append(turn)
            try:
                while asker.wanted():
                    if self._next() is turn:
                        self._running.append(turn)
                        return turn
                    self._changed.wait(_LOOKING)
                raise UnwantedError
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _next(self) -> _Turn | None:
        """Return who is to begin now; None while there is no place for the next."""
        if len(self._running) >= _PLACES or self._kept_bytes() >= MAX_KEPT_OF_IMAGES:
            return None
        waiting = sorted(self._waiting, key=attrgetter("seconds", "number"))
        large = next((turn for turn in waiting if turn.is_large), None)
        fits = large is not None and self._has_room(large)
        return next((turn for turn in waiting if not turn.is_large or (fits and turn is large)), None)

    def _kept_bytes(self) -> int:
        self._kept = [kept for kept in self._kept if (request := kept[1]()) is not None and not request.done]
        return sum(nbytes for nbytes, _ in self._kept)

    def _has_room(self, large: _Turn) -> bool:
        running = [turn.pixels for turn in self._running if turn.is_large]
        return len(running) < _PLACES - 1 and sum(running) + large.pixels <= MOST_IMAGE_PIXELS
