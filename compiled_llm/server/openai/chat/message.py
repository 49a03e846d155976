"""Messages of a chat, as OpenAI writes them and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.http.body_values import MAX_VALUES, values_in
from compiled_llm.server.openai.fields.content import ImagePart, Part, TextPart, check_seen
from compiled_llm.server.openai.fields.fields import Body, Entries, NoEffect, RefusedField
from compiled_llm.server.openai.parsing.half_characters import replaced_in


def _values_of(arguments: str) -> int:
    return values_in(arguments.encode("utf-8", "replace"))


def arguments_of(text: str) -> str:
    """Return arguments of a call, if they are a JSON object."""
    if _values_of(text) > MAX_VALUES:
        most = f"{MAX_VALUES:,}"
        raise PydanticCustomError("value_error", "has more than {most} texts, arrays and objects", {"most": most})
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("value_error", "is no JSON object")
    return text


class FunctionCall(Body):
    """The function that was called, and the arguments as JSON."""

    name: str
    arguments: Annotated[str, AfterValidator(arguments_of)]

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": replaced_in(json.loads(self.arguments or "{}"))}


class ToolCall(Body):
    """A call of a tool in an answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: Annotated[int | None, NoEffect("calls stand in their order")] = None


class Message(Body):
    """A message of a chat; ``developer`` is a new name of ``system``, ``tool`` returns a tool's output."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Entries[Part] | None, Field(validate_default=True)] = None
    tool_calls: Annotated[Entries[ToolCall] | None, Field(max_length=128)] = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None
    provider_specific_fields: Annotated[dict[str, Any] | None, NoEffect("LiteLLM's notes of an answer")] = None
    refusal: Annotated[None, RefusedField("an assistant's refusal is its content")] = None
    audio: Annotated[None, RefusedField("messages are text")] = None
    function_call: Annotated[Any, RefusedField("give tool_calls")] = None

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: object, info: ValidationInfo) -> object:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "is missing")
        if isinstance(content, list):
            check_seen(content, info, ImagePart)
        return content

    @field_validator("tool_calls", "reasoning_content", "reasoning")
    @classmethod
    def _is_the_assistants(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("value_error", "only messages of the assistant have it")
        return value

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""


class ChatEnd(Body):
    """The end of a chat, and what else its template reads."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def end(self) -> dict[str, Any]:
        """Options of ``apply_chat_template``: the answer begins, unless the last message goes on."""
        goes_on, begins = bool(self.continue_final_message), self.add_generation_prompt
        return {"add_generation_prompt": not goes_on if begins is None else begins, "continue_final_message": goes_on}


def images_in(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the images of a chat, each by the path of its field, and where it is."""
    return [
        (f"messages[{place}].content[{number}].image_url.url", part.image_url.url)
        for place, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them; ApiError if arguments of calls have too many values."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    if sum(_values_of(call.function.arguments) for call in calls) > MAX_VALUES:
        raise invalid(
            f"messages: arguments of calls have more than {MAX_VALUES:,} texts, arrays and objects", "messages"
        )
    names = {call.id: call.function.name for call in calls}
    return [_plain(message, names) for message in messages]


def _plain(message: Message, names: dict[str, str]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message),
    }
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.plain()} for call in message.tool_calls
        ]
    if reasoning := message.reasoning_content or message.reasoning:
        plain |= {"reasoning_content": reasoning, "thinking": reasoning}  # by the names that templates have for it
    if message.role == "tool":
        name = message.name or names.get(message.tool_call_id or "")
        given = {"tool_call_id": message.tool_call_id, "name": name}
        plain |= {key: value for key, value in given.items() if value is not None}
    return plain


def _content(message: Message) -> str | list[dict[str, str]]:
    """Return content as chat templates read it: with images in parts, of which they write the places."""
    parts = message.content
    if not isinstance(parts, list) or not any(isinstance(part, ImagePart) for part in parts):
        return message.text
    return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in parts]
