"""Detects starvation: the next request needs pages or slots that no running request will free."""

from __future__ import annotations

import logging
import time

from compiled_llm.engine.steps.loop import Loop

logger = logging.getLogger("compiled_llm.engine")

_STUCK = 0.005
"""Seconds between two looks for pages that others have."""
_LONG = 5.0
"""Seconds without a step after which it is said once."""
_PATIENCE = 0.5
"""Seconds without a step after which smaller requests go first."""


class Starvation:
    """The time during which nothing could run."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said = False

    @property
    def lasting(self) -> bool:
        """Whether the pages seem to stay where they are."""
        return self._since is not None and time.monotonic() - self._since > _PATIENCE

    def pause(self, loop: Loop) -> float:
        """Return how many seconds to wait, nothing having run in a loop's last step (else 0); says so if it lasts."""
        if not loop.stuck:
            self._since, self._said = None, False
            return 0.0
        now = time.monotonic()
        self._since = self._since or now
        if not self._said and now - self._since > _LONG and loop.scheduler.short_since is not None:
            self._said = True
            self._say(loop, now - self._since)
        return _STUCK

    def _say(self, loop: Loop, seconds: float) -> None:
        pool, request = loop.model_runner.pool, loop.scheduler.waiting[0]
        if not loop.model_runner.state.slots.room_for(1, request.keeps_slot):
            why = (
                "rows of other engines and calls have the slots, which they keep because of penalties or grammars; let "
                "them end, or wrap with a larger max_batch_size"
            )
        elif loop.scheduler.lacks_states:
            why = f"other engines and calls have the states of recurrent layers: {loop.scheduler.lacks_states}"
        else:
            why = (
                f"it needs {pool.pages_for(len(request.text))} pages, and {pool.available} of {pool.total} are "
                "available; drop caches that you keep (those of outputs), do not wait for it in a callback of "
                "generate, or wrap with a larger kv_memory"
            )
        logger.warning("compiled_llm: the engine's next request has waited %.0f s: %s", seconds, why)
