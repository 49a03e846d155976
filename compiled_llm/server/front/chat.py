"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Request

from compiled_llm.engine.output import Completion
from compiled_llm.server.front.answering import answered
from compiled_llm.server.front.answers import Answers, Choice, News
from compiled_llm.server.front.chat_logprobs import chat_logprobs, entries_of
from compiled_llm.server.front.chat_request import ChatRequest
from compiled_llm.server.front.chat_response import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
)
from compiled_llm.server.front.errors_of_openapi import ERRORS
from compiled_llm.server.front.events import event
from compiled_llm.server.front.front import beside, front_of, new_id
from compiled_llm.server.front.generator_link import Model
from compiled_llm.server.front.usage import finish_reason_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def create_chat_completion(body: ChatRequest, request: Request) -> Any:
    """Answer a chat: the next message of the assistant."""
    front = front_of(request)
    model = front.model_for(body.model)
    params = body.sampling()
    prompt = await prompt_of(body, model)
    answers = await front.submit(request, [prompt], params, "messages", body.user, body.cache_salt)
    told = _Told(body, model, front.settings.names[0], answers)
    return await answered(told, answers, bool(body.stream))


async def prompt_of(body: ChatRequest, model: Model) -> list[int]:
    """Return the tokens of a chat.

    Raises:
        ApiError: the chat template does not take it.
    """
    messages = [message.plain() for message in body.messages]
    goes_on = bool(body.continue_final_message)
    options = {
        "add_generation_prompt": not goes_on if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": goes_on,
    }
    characters = sum(len(message["content"]) for message in messages)
    return await beside(lambda: model.vocabulary.of_chat(messages, body.chat_template_kwargs, **options), characters)


class _Told:
    """Writes answers, whole or as they come."""

    def __init__(self, body: ChatRequest, model: Model, name: str, answers: Answers) -> None:
        self._body = body
        self._token_bytes = model.token_bytes
        self._answers = answers
        self._head: dict[str, Any] = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": name}

    def whole(self, completions: Iterable[Completion]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=completion.text),
                logprobs=self._logprobs(None if completion.logprobs is None else entries_of(completion.logprobs)),
                finish_reason=finish_reason_of(completion.finish_reason),
            )
            for index, completion in enumerate(completions)
        ]
        return ChatCompletion(choices=choices, usage=self._answers.usage(), **self._head)

    async def stream(self) -> AsyncIterator[list[bytes]]:
        choices = self._answers.choices()
        yield [self._chunk([_begins(choice)]) for choice in choices]
        async for _ in self._answers.changes():
            yield [self._chunk([self._news(choice, news)]) for choice in choices if (news := choice.news()) is not None]
        if self._body.wants_usage:
            yield [self._chunk([], usage=self._answers.usage())]

    def _chunk(self, choices: list[ChunkChoice], **usage: Any) -> bytes:
        if self._body.wants_usage:
            usage = usage or {"usage": None}
        return event(ChatChunk(object="chat.completion.chunk", choices=choices, **usage, **self._head))

    def _news(self, choice: Choice, news: News) -> ChunkChoice:
        delta = Delta(content=news.text) if news.text or news.finish_reason is None else Delta()
        return ChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(news.logprobs),
            finish_reason=news.finish_reason,
        )

    def _logprobs(self, places: Any) -> Any:
        if not self._body.logprobs:
            return None
        return chat_logprobs(places or [], self._body.top_logprobs or 0, self._token_bytes)


def _begins(choice: Choice) -> ChunkChoice:
    return ChunkChoice(index=choice.index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None)
