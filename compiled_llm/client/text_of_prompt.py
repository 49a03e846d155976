"""The text of an answer, for a loop that ends the request when it is left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from compiled_llm.requests.handle import RequestHandle


class TextOfPrompt:
    """The text of a request's only answer, piece by piece; a loop that is left ends the request, its ``handle``."""

    def __init__(self, handle: RequestHandle) -> None:
        self.handle = handle
        try:
            self._text = handle.text()
        except BaseException:
            handle.cancel()
            raise

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._text
        finally:
            self.handle.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for piece in self._text:
                yield piece
        finally:
            self.handle.cancel()
