"""Responses of ``/v1/responses``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from compiled_llm.server.openai.chat.response import TokenLogprob
from compiled_llm.server.openai.common.usage import PromptTokensDetails, Usage

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    """Text of the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText]


class ReasoningText(BaseModel):
    """A text of the model's thinking."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class Reasoning(BaseModel):
    """The model's thinking before it answers."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    content: list[ReasoningText]
    status: Status = "in_progress"


class FunctionCallItem(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: Status = "in_progress"


Item = OutputMessage | Reasoning | FunctionCallItem


class Incomplete(BaseModel):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class OutputTokensDetails(BaseModel):
    """Of the answer's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )


class ResponseBody(BaseModel):
    """The answer, the options of its request, and the tokens that it has taken."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
