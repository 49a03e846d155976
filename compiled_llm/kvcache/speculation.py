"""A row's speculative tokens: steps feed them in, and until that is read only the device knows how many it accepts."""

from __future__ import annotations

from typing import Protocol


class SpeculativeStep(Protocol):
    """A step of which the device decides how many tokens of each row it accepts, at least one."""

    new_tokens: int  # by which it has grown each row

    def sync(self) -> None:
        """Let its rows shrink by the tokens that it has rejected, waiting for the step."""
        ...


class Speculation:
    """The steps of one row whose rejected tokens still count in its length and position, which are upper bounds then.

    Attributes:
        unread: these steps, oldest first.
        rejected: how many tokens by which the row has grown were rejected.
    """

    unread: tuple[SpeculativeStep, ...] = ()
    rejected = 0

    @property
    def most(self) -> int:
        """The most tokens by which the row may still shrink."""
        return sum([step.new_tokens - 1 for step in self.unread])

    def sync(self) -> None:
        """Have the row's length and position exact, waiting for the steps that are unread."""
        for step in self.unread:
            step.sync()
