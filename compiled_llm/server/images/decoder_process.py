"""The worker process that decodes images, as the engine process sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.apart.fork_server_process import ForkServerProcess
from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.server.images.messages import MAX_BYTES, Decode, Decoded, FromWorker

_SCRIPT = Path(__file__).with_name("decoder_script.py")
_SECONDS = 3  # of processor time that any image may take
_PIXELS_A_SECOND = 2**22  # for which it may take a second more
_PATIENCE = 60  # seconds for an image, however busy the machine is
_EACH = 24
"""Bytes that a pixel may take while it is decoded: four as the file has it, as it is turned, and as it is sent."""
_LEAST = 2**27  # bytes that any image may take
_LOST = Failed("lost", "the process that decodes images has ended")


class DecoderProcess(ForkServerProcess):
    """The worker's process, which is started with the first image."""

    def __init__(self) -> None:
        super().__init__(_SCRIPT, MAX_BYTES)

    def decoded(self, file: bytes, pixels: int, wanted: Callable[[], bool] = lambda: True) -> Decoded | Failed:
        """Decode an image of at most so many pixels, and wait for it; UnwantedError once it is not ``wanted``."""
        task = Decode(file, pixels, _SECONDS + pixels // _PIXELS_A_SECOND, _LEAST + _EACH * pixels)
        deadline = time.monotonic() + _PATIENCE
        try:
            answer: Decoded | Failed | None = self.answered(
                lambda: self._ask(task), FromWorker, lambda: wanted() and time.monotonic() < deadline
            )
        except UnwantedError:
            if not wanted():
                raise
            return Failed("lost", f"it has taken more than {_PATIENCE} s")
        return answer or _LOST
