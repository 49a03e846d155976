"""When the next step is launched: so late that whoever comes meanwhile runs in it, and the device need not wait."""

from __future__ import annotations

import time

_SHORT = 0.0025
"""Seconds of a step below which the next one is launched at once."""
_LEAST, _MOST = 0.0008, 0.02
"""Seconds before the expected end of a step in which the next one is launched: bounds of what is learnt."""
_SHARE = 0.1
"""As a share of the step, at least, since steps are not all alike."""
_LONGER, _SHORTER = 1.5, 0.998
"""By how much the time grows if a launch came too late, and shrinks with any other."""


class LateLaunch:
    """The time of the next launch, while the device runs a step."""

    def __init__(self) -> None:
        self._began = 0.0  # when the device began with the step that runs; 0.0 if that is unknown
        self._lead = _LEAST

    def forget(self) -> None:
        """Launch at once: nothing is known of the step that runs."""
        self._began = 0.0

    def read(self, waited: bool, ran_prompts: bool) -> None:
        """Note that a step was read, which the host has ``waited`` for, while the next one was queued."""
        # It was too late if it did not have to. Prompts are launched when they come, and take longer than others.
        self._began = time.perf_counter() if waited else 0.0
        if waited or not ran_prompts:
            self._lead = min(_MOST, max(_LEAST, self._lead * (_SHORTER if waited else _LONGER)))

    def due(self, seconds: float) -> float:
        """Return when to launch, if the step that runs takes so many ``seconds``; 0.0 for at once."""
        # On the clock of ``time.perf_counter``.
        if not self._began or seconds < _SHORT:
            return 0.0
        return self._began + seconds - max(self._lead, _SHARE * seconds)
