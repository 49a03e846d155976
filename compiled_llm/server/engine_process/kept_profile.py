"""An engine process's profile: the sizes and features that its requests use, in a file for the next one."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports torch
    from compiled_llm.execution.lifecycle.runtime import Runtime

logger = logging.getLogger("compiled_llm.server")

PERIOD = 60.0  # seconds between two times that it is saved


class KeptProfile:
    """The profile of a model, saved each ``period`` seconds, and at the end."""

    def __init__(self, path: Path, period: float = PERIOD) -> None:
        self.path = path
        self._period = period
        self._runtime: Runtime | None = None
        self._saved = 0
        self._lock = threading.Lock()

    def begin(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Save it, if anything has been used since the last time; if that fails, the log says so."""
        with self._lock:
            runtime = self._runtime
            if runtime is None or runtime.asleep or (uses := runtime.warming.uses) == self._saved:
                return
            try:
                runtime.save_profile(self.path)
            except (OSError, RuntimeError) as error:  # the model may have fallen asleep just now
                logger.warning("compiled_llm: the profile could not be saved at %s: %s", self.path, error)
            else:
                self._saved = uses
