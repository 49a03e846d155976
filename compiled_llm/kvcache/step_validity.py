"""Whether a decode step may be launched again as it is."""

# Rows, pages, slots and CUDA graphs belong to different rooms. Each of them invalidates here what it has changed, so
# that a step asks one object in place of all.

from __future__ import annotations


class StepValidity:
    """The validity of steps: tells apart those made before and after a change; safe to use from any thread."""

    def __init__(self) -> None:
        # an object of its own between any two changes. A step that was made in another one is no longer valid
        self.period = object()

    def invalidate(self) -> None:
        """End the present period: what a step was made from has changed."""
        self.period = object()  # no number: of two threads that count up at once, one change would be lost
