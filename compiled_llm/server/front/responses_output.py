"""The output of a response, item by item: thinking, text, calls of tools, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from compiled_llm.server.front.answer_parts import Call, Parts
from compiled_llm.server.front.chat_response import TokenLogprob
from compiled_llm.server.front.front import new_id
from compiled_llm.server.front.responses_response import (
    CalledFunction,
    Item,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    Status,
)

_Part = TypeVar("_Part", OutputText, ReasoningText)


class Event(Protocol):
    """Writes an event."""

    def __call__(self, kind: str, **others: object) -> bytes:
        """Return it, by its kind and what it has."""
        ...


class Output:
    """Items of an answer as it comes, one after another; only the last one is open.

    Attributes:
        items: so far.
    """

    def __init__(self, event: Event) -> None:
        """Begin before the first token.

        Args:
            event: writes events.
        """
        self.items: list[Item] = []
        self._event = event
        self._open: OutputMessage | Reasoning | None = None
        self._logprobs: list[TokenLogprob] = []

    def take(self, parts: Parts, logprobs: list[TokenLogprob]) -> Iterator[bytes]:
        """Take what is new, and yield events of it."""
        self._logprobs += logprobs
        if parts.reasoning:
            yield from self._think(parts.reasoning)
        if parts.content:
            yield from self._say(parts.content)
        for call in parts.calls:
            yield from self._close()
            yield from self._call(call)

    def end(self, status: Status) -> Iterator[bytes]:
        """Yield events of the end; an answer that has said nothing has an empty text."""
        if not self.items or (self._logprobs and isinstance(self._open, OutputMessage)):
            yield from self._say("")
        yield from self._close(status)

    def _think(self, text: str) -> Iterator[bytes]:
        item = self._open
        if not isinstance(item, Reasoning):
            item = Reasoning(id=new_id("rs"), content=[])
            yield from self._begin(item, item.content, ReasoningText(text=""))
        item.content[0].text += text
        yield self._in_part("reasoning_text.delta", delta=text)

    def _say(self, text: str) -> Iterator[bytes]:
        item = self._open
        if not isinstance(item, OutputMessage):
            item = OutputMessage(id=new_id("msg"), content=[])
            yield from self._begin(item, item.content, OutputText(text=""))
        new, self._logprobs = self._logprobs, []
        item.content[0].text += text
        item.content[0].logprobs += new
        if text or new:
            yield self._in_part("output_text.delta", delta=text, logprobs=[entry.model_dump() for entry in new])

    def _call(self, call: Call) -> Iterator[bytes]:
        item = CalledFunction(id=new_id("fc"), call_id=call.id, name=call.name, arguments=call.arguments)
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        place = {"item_id": item.id, "output_index": len(self.items)}
        yield self._event("response.output_item.added", output_index=len(self.items), item=begun.model_dump())
        yield self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
        done = {"arguments": call.arguments, "name": call.name}
        yield self._event("response.function_call_arguments.done", **done, **place)
        yield self._event("response.output_item.done", output_index=len(self.items), item=item.model_dump())
        self.items.append(item)

    def _begin(self, item: OutputMessage | Reasoning, content: list[_Part], part: _Part) -> Iterator[bytes]:
        """Close what is open, and open an item with its one part, still empty."""
        yield from self._close()
        yield self._event("response.output_item.added", output_index=len(self.items), item=item.model_dump())
        self.items.append(item)
        self._open = item
        content.append(part)
        yield self._in_part("content_part.added", part=part.model_dump())

    def _close(self, status: Status = "completed") -> Iterator[bytes]:
        item, index = self._open, len(self.items) - 1
        if item is None:
            return
        item.status = status
        part = item.content[0].model_dump()
        logprobs = {"logprobs": part["logprobs"]} if isinstance(item, OutputMessage) else {}
        yield self._in_part(f"{part['type']}.done", text=part["text"], **logprobs)
        yield self._in_part("content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=index, item=item.model_dump())
        self._open = None

    def _in_part(self, kind: str, **others: object) -> bytes:
        assert self._open is not None, "a part stands in an item"
        place = {"item_id": self._open.id, "output_index": len(self.items) - 1, "content_index": 0}
        return self._event(f"response.{kind}", **place, **others)
