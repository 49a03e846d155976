"""Writes an answer as it comes, and notes when its tokens come."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from transformers import TextStreamer

from compiled_llm.commands.figures import answer_figures, decode_speed
from compiled_llm.commands.printable import printable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class AnswerStreamer(TextStreamer):
    """A streamer that writes to stdout unless ``silent``, on a terminal with control characters spelled out."""

    leaves_model_alone = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool = False, silent: bool = False) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._silent = silent
        self._start = self._last = time.perf_counter()
        self._first: float | None = None
        self._tokens = -1  # the prompt is not counted

    def put(self, value: Tensor) -> None:
        self._last = time.perf_counter()
        self._tokens = 0 if self._tokens < 0 else self._tokens + value.numel()
        if self._tokens and self._first is None:
            self._first = self._last
        if not self._silent:
            super().put(value)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        if not self._silent:
            super().end()  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text) if sys.stdout.isatty() else text, stream_end)

    def numbers(self) -> dict[str, float | None]:
        """Return seconds from call to last token, those to the first, and tokens/s after it, None without others."""
        seconds, first = self._times()
        speed = decode_speed(self._tokens, seconds, first)
        return {"seconds": seconds, "tokens_per_second": speed, "time_to_first_token": first}

    def figures(self) -> str:
        return answer_figures(max(0, self._tokens), *self._times())

    def _times(self) -> tuple[float, float | None]:
        return self._last - self._start, None if self._first is None else self._first - self._start
