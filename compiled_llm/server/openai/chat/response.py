"""Responses of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from compiled_llm.server.openai.common.prompt_logprobs import PromptPlace
from compiled_llm.server.openai.common.usage import FinishReason, Usage
from compiled_llm.server.openai.parsing.answer_parts import CallPiece


class TopLogprob(BaseModel):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Those of the answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CalledFunction(BaseModel):
    """The function that is called, and the arguments as JSON."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def of(cls, call: CallPiece) -> Self:
        return cls(id=call.id, function=CalledFunction(name=call.name or "", arguments=call.arguments))


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    refusal: None = None


def _of_named_fields(schema: dict[str, Any]) -> None:
    schema.pop("additionalProperties", None)


class _Choice(BaseModel):
    """A choice; columns may bring fields that are not named here."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_of_named_fields)


class ChatChoice(_Choice):
    """One of ``n`` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptPlace | None] | None = None


class NewFunction(BaseModel):
    """The function that is called, at first, and the new part of the arguments."""

    name: str | None = None
    arguments: str


class NewCall(BaseModel):
    """The new part of a call, and its number in the answer; the first has the function's name, and no arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: NewFunction

    @classmethod
    def of(cls, piece: CallPiece, index: int) -> list[Self]:
        """Return the deltas of a piece: the function's name and the arguments are told one after another."""
        news = []
        if piece.name is not None:
            news.append(
                cls(index=index, id=piece.id, type="function", function=NewFunction(name=piece.name, arguments=""))
            )
        if piece.arguments:
            news.append(cls(index=index, function=NewFunction(arguments=piece.arguments)))
        return news


class Delta(BaseModel):
    """The new part of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[NewCall] | None = None


class ChunkChoice(_Choice):
    """The new part of one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None

    @classmethod
    def of(cls, index: int, delta: Delta) -> Self:
        """Return one that goes on; what a client looks for in each is set."""
        return cls(index=index, delta=delta, logprobs=None, finish_reason=None)


class ChatChunk(BaseModel):
    """A chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
