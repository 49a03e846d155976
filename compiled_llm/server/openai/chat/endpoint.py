"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from compiled_llm.protocol.messages import Entry
from compiled_llm.requests.outputs import Completion
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.chat.answer_form import answer_form, with_form
from compiled_llm.server.openai.chat.logprobs import chat_logprobs, entries_of, prompt_logprobs
from compiled_llm.server.openai.chat.message import images_in, plain_messages
from compiled_llm.server.openai.chat.prompt import ChatPrompt, chat_prompt
from compiled_llm.server.openai.chat.reading import Reading
from compiled_llm.server.openai.chat.request import ChatRequest
from compiled_llm.server.openai.chat.response import (
    AssistantMessage,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from compiled_llm.server.openai.common.answering import answered
from compiled_llm.server.openai.common.answers import Answers, Choice, News
from compiled_llm.server.openai.common.api_server import api_server_of, new_id
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.events import TextEvent, event
from compiled_llm.server.openai.common.openapi_responses import ANSWERS
from compiled_llm.server.openai.common.usage import Usage, finish_reason_of, usage_of, usage_so_far
from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ANSWERS)
async def create_chat_completion(body: ChatRequest, request: Request) -> Any:
    """Answer a chat: the next message of the assistant."""
    api_server = api_server_of(request)
    model = api_server.writer_for(body.model)
    api_server.check_answers(1, body.answers)

    shown = await api_server.shown(images_in(body.messages), model, body, body.prompt_logprobs)

    def prepared() -> tuple[ChatPrompt, list[int], SamplingParams, Form | None, list[Reading]]:
        params = body.sampling(model.ready.sampling)
        messages, kwargs = plain_messages(body.messages), body.template_kwargs
        prompt = chat_prompt(model.vocabulary, messages, body.offer, kwargs, shown is not None, **body.end)
        form = answer_form(body.form, prompt, body.max_blanks)
        params = with_form(params, form, prompt)
        tokens = body.cut(prompt.tokens, model.ready.max_tokens - (params.max_tokens or 1))
        return (
            prompt,
            tokens,
            params,
            form,
            [Reading(prompt.reader(form), body.include_reasoning is not False) for _ in range(body.answers)],
        )

    prompt, tokens, params, form, readings = await in_thread_if_long(prepared, len(await request.body()))
    answers = await api_server.submit(request, [tokens], params, "messages", body, form, shown, prompt.text)
    writer = _ChatResponseWriter(body, model, api_server.settings.names[0], answers, readings)
    return await answered(writer, answers, bool(body.stream))


class _ChatResponseWriter:
    """A writer of answers, whole or as they come."""

    def __init__(
        self, body: ChatRequest, model: Model, name: str, answers: Answers, readings: Sequence[Reading]
    ) -> None:
        self._body = body
        self._model = model
        self._answers = answers
        self._names = TokenNames(model.token_bytes, bool(body.return_tokens_as_token_ids))
        self._readings = readings
        self._head: dict[str, Any] = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": name}

    def whole(self, completions: Iterable[Completion]) -> ChatCompletion:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return ChatCompletion(choices=choices, usage=self._usage(), **self._of_prompt(), **self._head)

    def _of_prompt(self) -> dict[str, Any]:
        (handle,), found = self._answers.handles, self._ids("prompt_token_ids", self._answers.handles[0].prompt)
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(handle.prompt_logprobs or (), self._names)
        return found

    def _ids(self, name: str, tokens: Sequence[int]) -> dict[str, Any]:
        return {name: list(tokens)} if self._body.return_token_ids else {}

    def _choice(self, index: int, completion: Completion) -> ChatChoice:
        reading = self._readings[index]
        reason = finish_reason_of(completion.finish_reason)
        parts = reading.read(completion.text or "", reason)
        calls, content = [CalledTool.of(call) for call in parts.calls], self._body.echoed + parts.content
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=None if calls and not content else content,
                reasoning_content=parts.reasoning or None,
                tool_calls=calls or None,
            ),
            logprobs=None if completion.logprobs is None else self._logprobs(entries_of(completion.logprobs)),
            finish_reason=reading.reason(reason),
            stop_reason=completion.stop_reason,
            **self._ids("token_ids", completion.token_ids),
        )

    def _usage(self) -> Usage:
        reasoning = sum(reading.reasoning_tokens(self._model.vocabulary) for reading in self._readings)
        return usage_of(self._answers.handles, reasoning)

    def stream(self) -> AsyncIterator[list[bytes]]:
        choices = self._answers.choices()
        texts = [self._text_event(choice) for choice in choices]
        if self._body.return_token_ids:  # those of pictures are known with the first token
            return self._events(choices, lambda: self._begins(choices), texts)
        begins = self._begins(choices)
        return self._events(choices, lambda: begins, texts)

    def _begins(self, choices: Sequence[Choice]) -> list[bytes]:
        prompt = self._ids("prompt_token_ids", self._answers.handles[0].prompt)
        begins = [self._chunk([_begins(choice)], **prompt) for choice in choices]
        if echoed := self._body.echoed:
            begins += [self._text_event(choice)(echoed) for choice in choices]
        return begins

    async def _events(
        self, choices: Sequence[Choice], begins: Callable[[], list[bytes]], texts: Sequence[TextEvent]
    ) -> AsyncIterator[list[bytes]]:
        yield begins()
        async for _ in self._answers.changes():
            yield [
                new
                for choice in choices
                if (news := choice.news()) is not None
                for new in self._news(choice.index, news, texts[choice.index])
            ]
        if self._body.wants_usage:
            yield [self._chunk([], usage=await in_thread_if_long(self._usage, self._answers.characters))]

    def _chunk(self, choices: list[ChunkChoice], count: int = 0, **others: Any) -> bytes:
        if self._body.wants_usage_always and choices:
            others["usage"] = usage_so_far(self._answers.handles[0], count)
        elif self._body.wants_usage:
            others = {"usage": None, **others}
        return event(ChatChunk(object="chat.completion.chunk", choices=choices, **others, **self._head))

    def _news(self, index: int, news: News, text: TextEvent) -> list[bytes]:
        """Return an event for each part of which there is something new; the last one says why the answer has ended."""
        reading, finished = self._readings[index], news.finish_reason is not None
        parts = reading.read(news.text, news.finish_reason)
        if news.is_text and parts.is_content and not self._body.tells_of_tokens:
            return [text(parts.content)] if parts.content else []
        deltas = reading.deltas(parts, finished)
        if not deltas and (news.logprobs or self._body.return_token_ids):  # of tokens whose text comes later
            deltas = [Delta(content="")]
        new = [ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None) for delta in deltas]
        for first in new[:1]:
            first.logprobs = self._logprobs(news.logprobs) if news.logprobs else None
            if self._body.return_token_ids:
                first.token_ids = news.token_ids
        if news.finish_reason is not None:
            new[-1].finish_reason = reading.reason(news.finish_reason)
        if news.stop_reason is not None:
            new[-1].stop_reason = news.stop_reason
        return [self._chunk([choice], news.total) for choice in new]

    def _text_event(self, choice: Choice) -> TextEvent:
        nothing: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        return TextEvent(
            lambda text: self._chunk([ChunkChoice(index=choice.index, delta=Delta(content=text), **nothing)])
        )

    def _logprobs(self, places: list[list[Entry]]) -> ChatLogprobs:
        top_logprobs = None if self._body.logprob_token_ids else self._body.top_logprobs or 0
        return chat_logprobs(places, top_logprobs, self._names)


def _begins(choice: Choice) -> ChunkChoice:
    return ChunkChoice(index=choice.index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None)
