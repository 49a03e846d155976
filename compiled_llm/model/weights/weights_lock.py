"""A lock for a model's weights: any number of threads read them; a thread that moves them in memory is alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from compiled_llm.compat.condition import Condition


class WeightsLock:
    """A lock that the model's own forward holds for reading; our programs never run while weights move."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._readers: Counter[int] = Counter()
        self._moving = False

    @contextmanager
    def read(self) -> Iterator[None]:
        """Let no other thread move the weights for the block."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._moving or thread in self._readers)
            self._readers[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[thread] -= 1
                self._readers += Counter()  # without those that are done
                self._changed.notify_all()

    @contextmanager
    def move(self, caller: int | None) -> Iterator[None]:
        """Let no thread read the weights for the block; ``caller``, the waiting thread, reads on afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: not self._moving and self._readers.keys() <= {caller})
            self._moving = True
        try:
            yield
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()
