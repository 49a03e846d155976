"""A streamer that notes when tokens come, for the figures of `compiled-llm generate`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.generation.streamers import BaseStreamer


class TimedStreamer:
    """Notes when tokens come, and passes them on to another streamer. `generate` puts the prompt first."""

    leaves_model_alone = True

    def __init__(self, streamer: BaseStreamer | None) -> None:
        self._streamer = streamer
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._tokens = -1  # the prompt is not counted

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each step's token."""
        self._last = time.perf_counter()
        self._tokens = 0 if self._tokens < 0 else self._tokens + value.numel()
        if self._tokens and self._first is None:
            self._first = self._last
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """Pass on that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()

    def numbers(self) -> dict[str, float | None]:
        """Return seconds from call to last token, tokens/s over them, and the seconds to the first token."""
        seconds = self._last - self._start
        return {
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds if self._first is not None else 0.0,
            "time_to_first_token": None if self._first is None else self._first - self._start,
        }

    def figures(self) -> str:
        """Return the figures in words."""
        if self._first is None:
            return "0 tokens"
        speed = self._tokens / (self._last - self._start)
        return f"{self._tokens} tokens, {speed:.1f} tokens/s, first token after {self._first - self._start:.3f} s"
