"""The input of ``/v1/responses``: messages, what was thought and called in answers, and what calls have returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Tag

from compiled_llm.server.front.chat_message import FunctionCall, Message, ToolCall, arguments_of
from compiled_llm.server.front.fields import Body, NoEffect, Refused

_TAGS = ("function_call", "function_call_output", "reasoning", "item_reference")
_NOT_STORED = NoEffect("nothing is stored")


class InputText(Body):
    """A piece of a message, a user's or what was answered before."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None
    logprobs: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None


class InputMessage(Body):
    """A message of a chat."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: Annotated[str | None, _NOT_STORED] = None
    status: Annotated[str | None, _NOT_STORED] = None
    phase: Annotated[str | None, NoEffect("chat templates do not write it")] = None


class CallItem(Body):
    """A call of a tool in an answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(arguments_of)]
    id: Annotated[str | None, _NOT_STORED] = None
    status: Annotated[str | None, _NOT_STORED] = None


class CallOutput(Body):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    name: str | None = None
    id: Annotated[str | None, _NOT_STORED] = None
    status: Annotated[str | None, _NOT_STORED] = None


class ThoughtText(Body):
    """What was thought, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """What was thought in an answer."""

    type: Literal["reasoning"]
    content: list[ThoughtText] | None = None
    summary: Annotated[list[ThoughtText] | None, NoEffect("the model sees all of its thinking")] = None
    encrypted_content: Annotated[str | None, NoEffect("thinking is content")] = None
    id: Annotated[str | None, _NOT_STORED] = None
    status: Annotated[str | None, _NOT_STORED] = None


class ItemReference(Body):
    """What OpenAI would have stored."""

    type: Annotated[Any, Refused("nothing is stored; send the item itself, as clients do with store=false")]
    id: str


def _type_of(item: Any) -> str:
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


def messages_of(items: Sequence[InputMessage | CallItem | CallOutput | ReasoningItem | ItemReference]) -> list[Message]:
    """Return items as messages of a chat: what stands in one answer is one message."""
    messages: list[Message] = []
    for item in items:
        assert not isinstance(item, ItemReference), "it is refused"
        if isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(Message(role=item.role, content=_text(item.content)))
        elif isinstance(item, CallOutput):
            output = _text(item.output)
            messages.append(Message(role="tool", content=output, tool_call_id=item.call_id, name=item.name))
        else:
            _take(_answer(messages, item), item)
    return messages


def _answer(messages: list[Message], item: InputMessage | CallItem | ReasoningItem) -> Message:
    """Return the answer that an item belongs to: to a new one what comes after the text or calls of the last."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None or (not isinstance(item, CallItem) and (last.content is not None or last.tool_calls)):
        last = Message(role="assistant")
        messages.append(last)
    return last


def _take(answer: Message, item: InputMessage | CallItem | ReasoningItem) -> None:
    if isinstance(item, InputMessage):
        answer.content = _text(item.content)
    elif isinstance(item, ReasoningItem):
        thought = "".join(part.text for part in item.content or ())
        answer.reasoning_content = (answer.reasoning_content or "") + thought
    else:
        function = FunctionCall(name=item.name, arguments=item.arguments)
        call = ToolCall(id=item.call_id, type="function", function=function)
        answer.tool_calls = [*(answer.tool_calls or ()), call]


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
