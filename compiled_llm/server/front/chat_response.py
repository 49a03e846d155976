"""What ``/v1/chat/completions`` answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from typing_extensions import Self

from compiled_llm.server.front.answer_parts import Call
from compiled_llm.server.front.usage import FinishReason, Usage


class TopLogprob(BaseModel):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    """Those of the answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CalledFunction(BaseModel):
    """What is called, and the arguments as JSON."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def of(cls, call: Call, **others: int) -> Self:
        """Return it by these names."""
        return cls(
            id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments), **others
        )


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    """One of ``n`` answers."""

    index: int
    message: AssistantMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class NewCall(CalledTool):
    """A call of a tool, whole, and its number in the answer."""

    index: int


class Delta(BaseModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[NewCall] | None = None


class ChunkChoice(BaseModel):
    """What is new of one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    """What a stream has of the answers at a time."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
