"""How many tokens a request has taken, and why an answer has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from compiled_llm.requests.handle import RequestHandle

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Tokens of the prompts that the prefix cache had."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the answers' tokens."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Tokens of prompts and of answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(handles: Sequence[RequestHandle], reasoning: int = 0, so_far: int | None = None) -> Usage:
    """Return the tokens of requests, ``reasoning`` of them to think; a prompt counts once.

    ``so_far`` are those that have come of one answer that goes on; otherwise the requests have ended.
    """
    tokens = sum(answer.tokens for handle in handles for answer in handle.answers) if so_far is None else so_far
    prompt = sum(len(handle.prompt) for handle in handles)
    cached = sum(handle.cached_tokens for handle in handles)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=tokens,
        total_tokens=prompt + tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=min(reasoning, tokens)),
    )


def finish_reason_of(reason: str | None) -> FinishReason:
    """Return OpenAI's reason: an answer whose time is over counts as one that was too long."""
    return "stop" if reason == "stop" else "length"
