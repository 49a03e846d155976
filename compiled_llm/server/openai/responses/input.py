"""The input of ``/v1/responses``: messages, thinking and calls of earlier answers, and outputs of calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Discriminator, Field, Tag, ValidationInfo, field_validator

from compiled_llm.server.openai.chat.message import FunctionCall, Message, ToolCall, arguments_of
from compiled_llm.server.openai.fields.content import (
    ImagePart,
    ImageUrl,
    InputImage,
    InputPart,
    InputText,
    OtherPart,
    Part,
    TextPart,
    check_seen,
)
from compiled_llm.server.openai.fields.fields import Body, Entries, NoEffect, RefusedField

_Part = InputText | InputImage | OtherPart
_TAGS = ("function_call", "function_call_output", "reasoning", "item_reference")
_NOT_STORED = NoEffect("nothing is stored")
_ASYNC = RefusedField("the client runs calls, and sends their outputs before it asks again", (False,))
_CALLER, _NAMESPACE = RefusedField("the model alone calls functions"), RefusedField("functions have names alone")


class StoredItem(Body):
    """An item of an earlier response; OpenAI would have it stored."""

    id: Annotated[str | None, _NOT_STORED] = None
    status: Annotated[str | None, _NOT_STORED] = None


class InputMessage(StoredItem):
    """A message of a chat."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Entries[InputPart]
    phase: Annotated[str | None, NoEffect("chat templates do not write it")] = None

    @field_validator("content")
    @classmethod
    def _is_seen(cls, content: object, info: ValidationInfo) -> object:
        check_seen(content, info, InputImage)
        return content


class CallItem(StoredItem):
    """A call of a tool in an answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(arguments_of)]
    async_: Annotated[Any, _ASYNC, Field(validation_alias=AliasChoices("async", "async_"))] = None
    caller: Annotated[Any, _CALLER] = None
    namespace: Annotated[Any, _NAMESPACE] = None


class CallOutput(StoredItem):
    """The output of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Entries[InputText]
    name: str | None = None
    caller: Annotated[Any, _CALLER] = None
    namespace: Annotated[Any, _NAMESPACE] = None
    created_by: Annotated[str | None, _NOT_STORED] = None


class ThoughtText(Body):
    """Thinking, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StoredItem):
    """The thinking of an answer."""

    type: Literal["reasoning"]
    content: Entries[ThoughtText] | None = None
    summary: Annotated[Entries[ThoughtText] | None, NoEffect("the model sees all of its thinking")] = None
    encrypted_content: Annotated[str | None, NoEffect("thinking is content")] = None


class ItemReference(Body):
    """An item that OpenAI would have stored."""

    type: Annotated[Any, RefusedField("nothing is stored; send the item itself, as clients do with store=false")]
    id: str


def _type_of(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in _TAGS else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type_of),
]


_Item = InputMessage | CallItem | CallOutput | ReasoningItem | ItemReference


def images_in(items: Sequence[_Item]) -> list[tuple[str, str]]:
    """Return the images of an input, in the order of its messages, each by the path of its field, and its place."""
    return [
        (f"input[{place}].content[{number}].image_url", part.image_url)
        for place, item in enumerate(items)
        if isinstance(item, InputMessage) and isinstance(item.content, list)
        for number, part in enumerate(item.content)
        if isinstance(part, InputImage)
    ]


def messages_of(items: Sequence[_Item]) -> list[Message]:
    """Return items as messages of a chat: the items of one answer are one message."""
    groups: list[list[_Item]] = []
    for item in items:
        if groups and _goes_on(groups[-1][-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return list(map(_message, groups))


def _is_answered(item: _Item) -> bool:
    return isinstance(item, (CallItem, ReasoningItem)) or (isinstance(item, InputMessage) and item.role == "assistant")


def _goes_on(last: _Item, item: _Item) -> bool:
    """Whether an item is of the answer that the last one is of; text or thinking after text or calls begins another."""
    return _is_answered(last) and (
        isinstance(item, CallItem) or (_is_answered(item) and isinstance(last, ReasoningItem))
    )


def _message(items: Sequence[_Item]) -> Message:
    """Return one message of the items of an answer, or of a single other item."""
    first = items[0]
    assert not isinstance(first, ItemReference), "it is refused"
    if isinstance(first, CallOutput):
        output = _text(first.output)
        return Message(role="tool", content=output, tool_call_id=first.call_id, name=first.name)
    if isinstance(first, InputMessage) and not _is_answered(first):
        return Message(role=first.role, content=_parts(first.content))
    answer, thoughts, calls = Message(role="assistant"), list[str](), list[ToolCall]()
    for item in items:
        if isinstance(item, InputMessage):
            answer.content = _parts(item.content)
        elif isinstance(item, ReasoningItem):
            thoughts += (part.text for part in item.content or ())
        elif isinstance(item, CallItem):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, type="function", function=function))
    answer.reasoning_content, answer.tool_calls = "".join(thoughts) or None, calls or None
    return answer


def _text(content: str | Iterable[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _parts(content: str | Iterable[_Part]) -> str | list[Part]:
    """Return the content of a message as one of a chat has it."""
    return content if isinstance(content, str) else list(map(_part, content))


def _part(part: _Part) -> Part:
    if isinstance(part, InputImage):
        return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
    assert isinstance(part, InputText), "others are refused"
    return TextPart(type="text", text=part.text)
