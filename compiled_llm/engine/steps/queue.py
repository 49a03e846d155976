"""The requests that wait for their turn."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from compiled_llm.engine.steps.request import Request


class Queue:
    """Requests without a row."""

    def __init__(self, waits: bool = True) -> None:
        """``waits``: an answer waits until the prompt that it shares with another is computed."""
        self._waits = waits
        self.ready: list[Request] = []  # those that may run, the next one first
        self._followers: dict[Request, list[Request]] = {}  # by whose prompt they wait for

    def __bool__(self) -> bool:
        return bool(self.ready or self._followers)

    def __iter__(self) -> Iterator[Request]:
        """Yield the next request first; those that wait for another's prompt at the end."""
        yield from self.ready
        for group in self._followers.values():
            yield from group

    def add(self, request: Request) -> None:
        """Let a request wait for its turn, or for the prompt that it shares with another."""
        owner = request.prefix_owner
        if not self._waits or owner is None or owner.done or owner.prefilled:
            bisect.insort(self.ready, request, key=lambda entry: entry.order)
        else:
            self._followers.setdefault(owner, []).append(request)

    def wait(self, request: Request, owner: Request) -> None:
        """Let one that may run wait until ``owner`` has computed what both begin with."""
        self.ready.remove(request)
        self._followers.setdefault(owner, []).append(request)

    def remove(self, request: Request) -> None:
        if request in self.ready:
            self.ready.remove(request)
            return
        for owner, group in list(self._followers.items()):
            if request in group:
                group.remove(request)
                if not group:
                    del self._followers[owner]

    def release(self, owner: Request) -> None:
        """Let those that waited for a request's prompt wait for their turn."""
        for request in self._followers.pop(owner, ()):
            self.add(request)
