"""The output of a response, item by item: thinking, text, calls of tools, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from compiled_llm.server.openai.chat.response import TokenLogprob
from compiled_llm.server.openai.common.api_server import new_id
from compiled_llm.server.openai.common.columns import Fields
from compiled_llm.server.openai.parsing.answer_parts import CallPiece, Parts
from compiled_llm.server.openai.responses.response import (
    FunctionCallItem,
    Item,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    Status,
)

_Part = TypeVar("_Part", OutputText, ReasoningText)


class Event(Protocol):
    """A writer of an event, by its kind and its other fields."""

    def __call__(self, kind: str, **others: object) -> bytes: ...


class Output:
    """The ``items`` of an answer as it comes, one after another; only the last one is open."""

    def __init__(self, event: Event) -> None:
        self.items: list[Item] = []
        self._event = event
        self._open: Item | None = None
        self._logprobs: list[TokenLogprob] = []

    def take(self, parts: Parts, fields: Fields) -> Iterator[bytes]:
        self._logprobs += fields.get("logprobs", [])
        if parts.reasoning:
            yield from self._think(parts.reasoning)
        if parts.content:
            yield from self._say(parts.content)
        for piece in parts.pieces:
            yield from self._call(piece)

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
        yield self._in_item("reasoning_text.delta", content_index=0, delta=text)

    def _say(self, text: str) -> Iterator[bytes]:
        item = self._open
        if not isinstance(item, OutputMessage):
            item = OutputMessage(id=new_id("msg"), content=[])
            yield from self._begin(item, item.content, OutputText(text=""))
        new, self._logprobs = self._logprobs, []
        item.content[0].text += text
        item.content[0].logprobs += new
        if text or new:
            writer = [entry.model_dump() for entry in new]
            yield self._in_item("output_text.delta", content_index=0, delta=text, logprobs=writer)

    def _call(self, piece: CallPiece) -> Iterator[bytes]:
        item = self._open
        if piece.name is not None:
            item = FunctionCallItem(id=new_id("fc"), call_id=piece.id, name=piece.name, arguments="")
            yield from self._add(item)
        assert isinstance(item, FunctionCallItem), "the first piece of a call has a name"
        item.arguments += piece.arguments
        if piece.arguments:
            yield self._in_item("function_call_arguments.delta", delta=piece.arguments)
        if piece.finished:
            yield from self._close()

    def _begin(self, item: OutputMessage | Reasoning, content: list[_Part], part: _Part) -> Iterator[bytes]:
        yield from self._add(item)
        content.append(part)
        yield self._in_item("content_part.added", content_index=0, part=part.model_dump())

    def _add(self, item: Item) -> Iterator[bytes]:
        yield from self._close()
        yield self._event("response.output_item.added", output_index=len(self.items), item=item.model_dump())
        self.items.append(item)
        self._open = item

    def _close(self, status: Status = "completed") -> Iterator[bytes]:
        item, index = self._open, len(self.items) - 1
        if item is None:
            return
        item.status = status
        yield from self._done(item) if isinstance(item, FunctionCallItem) else self._part_done(item)
        yield self._event("response.output_item.done", output_index=index, item=item.model_dump())
        self._open = None

    def _done(self, call: FunctionCallItem) -> Iterator[bytes]:
        yield self._in_item("function_call_arguments.done", arguments=call.arguments, name=call.name)

    def _part_done(self, item: OutputMessage | Reasoning) -> Iterator[bytes]:
        part = item.content[0].model_dump()
        logprobs = {"logprobs": part["logprobs"]} if isinstance(item, OutputMessage) else {}
        yield self._in_item(f"{part['type']}.done", content_index=0, text=part["text"], **logprobs)
        yield self._in_item("content_part.done", content_index=0, part=part)

    def _in_item(self, kind: str, **others: object) -> bytes:
        assert self._open is not None, "an item is open"
        place = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        return self._event(f"response.{kind}", **place, **others)
