"""Several requests that are waited for together."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from compiled_llm.client.handle import RemoteHandle
from compiled_llm.requests.listeners import Listeners, tell
from compiled_llm.requests.outputs import RequestOutput


class Gathering:
    """Waits for the end of all, or for the first that is refused; whoever stops waiting ends them.

    Attributes:
        listeners: told whenever something has come of one of them.
    """

    def __init__(self, handles: Sequence[RemoteHandle]) -> None:
        """Listen to requests."""
        self.listeners = Listeners()
        self._handles = handles
        self._remaining = list(handles)
        for handle in handles:
            handle.when_changed(self._tell)

    def _tell(self) -> None:
        tell([self.listeners])

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for; asked after each step, so who has ended is not asked again."""
        remaining = self._remaining
        while remaining and remaining[-1].done and remaining[-1].refused is None:
            remaining.pop()
        return not remaining or any(handle.refused is not None for handle in remaining)

    def outputs(self) -> list[RequestOutput]:
        """Return what they came to, in their order.

        Raises:
            Exception: why one of them was refused.
        """
        for handle in self._handles:
            if handle.refused is not None:
                raise handle.refused
        return [handle.output() for handle in self._handles]

    def __enter__(self) -> Gathering:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what has not ended."""
        for handle in self._handles:
            handle.cancel()
