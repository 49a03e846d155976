"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.chat.answer_form import answer_form, with_form
from compiled_llm.server.openai.chat.answer_parser import AnswerParser
from compiled_llm.server.openai.chat.message import images_in, plain_messages
from compiled_llm.server.openai.chat.prompt import ChatPrompt, chat_prompt
from compiled_llm.server.openai.chat.request import ChatRequest
from compiled_llm.server.openai.chat.response import (
    AssistantMessage,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
)
from compiled_llm.server.openai.common.answering import answered
from compiled_llm.server.openai.common.answers import AnswerDelta, Answers, Choice
from compiled_llm.server.openai.common.api_server import api_server_of, new_id
from compiled_llm.server.openai.common.columns import column_writers, merged
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.events import event, text_event
from compiled_llm.server.openai.common.openapi_responses import ANSWERS
from compiled_llm.server.openai.common.usage import Usage, usage_of
from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ANSWERS)
async def create_chat_completion(body: ChatRequest, request: Request) -> Any:
    """Answer a chat: the next message of the assistant."""
    api_server = api_server_of(request)
    model = api_server.writer_for(body.model)
    api_server.check_answers(1, body.answers)

    shown = await api_server.shown(images_in(body.messages), model, body)

    def prepared() -> tuple[ChatPrompt, list[int], SamplingParams, Form | None, list[AnswerParser]]:
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
            [AnswerParser(prompt.reader(form), body.include_reasoning is not False) for _ in range(body.answers)],
        )

    prompt, tokens, params, form, parsers = await in_thread_if_long(prepared, len(await request.body()))
    answers = await api_server.submit(request, [tokens], params, "messages", body, form, shown, prompt.text)
    writer = _ChatResponseWriter(body, model, api_server.settings.names[0], answers, parsers)
    return await answered(writer, answers, bool(body.stream))


class _ChatResponseWriter:
    """A writer of answers, whole or as they come."""

    def __init__(
        self, body: ChatRequest, model: Model, name: str, answers: Answers, parsers: Sequence[AnswerParser]
    ) -> None:
        self._body = body
        self._model = model
        self._answers = answers
        self._parsers = parsers
        (self._handle,) = answers.handles
        names = TokenNames(model.token_bytes, bool(body.return_tokens_as_token_ids))
        self._columns = column_writers("chat", body, names, self._handle)
        self._head: dict[str, Any] = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": name}
        # Whether chunks of a text may be alike but for that text.
        self._tells_text_alone = not (body.tells_of_tokens or self._columns)
        self._choices: Sequence[Choice] = ()
        self._texts: Sequence[Callable[[str], bytes]] = ()

    def whole(self, answers: Sequence[AnswerDelta]) -> ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        ids = self._ids("prompt_token_ids", self._handle.prompt)
        of_prompt = merged(writer.of_prompt() for writer in self._columns)
        return ChatCompletion(choices=choices, usage=self._usage(), **ids, **of_prompt, **self._head)

    def _ids(self, name: str, tokens: Sequence[int]) -> dict[str, Any]:
        return {name: list(tokens)} if self._body.return_token_ids else {}

    def _choice(self, index: int, answer: AnswerDelta) -> ChatChoice:
        parser, reason = self._parsers[index], answer.finish_reason
        assert reason is not None, "it has ended"
        parts = parser.read(answer.text, reason)
        calls, content = [CalledTool.of(call) for call in parts.calls], self._body.echoed + parts.content
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=None if calls and not content else content,
                reasoning_content=parts.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=parser.reason(reason),
            stop_reason=answer.stop_reason,
            **merged(writer.of_tokens(answer) for writer in self._columns),
            **self._ids("token_ids", answer.token_ids),
        )

    def _usage(self) -> Usage:
        reasoning = sum(parser.reasoning_tokens(self._model.vocabulary) for parser in self._parsers)
        return usage_of(self._answers.handles, reasoning)

    def begin(self) -> None:
        self._choices = self._answers.choices()
        self._texts = [self._text_event(choice.index) for choice in self._choices]

    def first_events(self) -> list[bytes]:
        prompt, begins = self._ids("prompt_token_ids", self._handle.prompt), Delta(role="assistant", content="")
        found = [self._chunk([ChunkChoice.of(choice.index, begins)], **prompt) for choice in self._choices]
        if echoed := self._body.echoed:
            found += [text(echoed) for text in self._texts]
        return found

    def events(self) -> list[bytes]:
        found: list[bytes] = []
        for choice, parser, text in zip(self._choices, self._parsers, self._texts, strict=True):
            if (delta := choice.delta()) is None:
                continue
            if self._tells_text_alone and parser.reader is None and delta.finish_reason is None:
                found += [text(delta.text)] if delta.text else []
            else:
                found += self._events_of(choice.index, delta)
        return found

    async def last_events(self) -> list[bytes]:
        if not self._body.wants_usage:
            return []
        return [self._chunk([], usage=await in_thread_if_long(self._usage, self._answers.characters))]

    def _chunk(self, choices: list[ChunkChoice], count: int = 0, **others: Any) -> bytes:
        if self._body.wants_usage_always and choices:
            others["usage"] = usage_of([self._handle], so_far=count)
        elif self._body.wants_usage:
            others = {"usage": None, **others}
        return event(ChatChunk(object="chat.completion.chunk", choices=choices, **others, **self._head))

    def _events_of(self, index: int, delta: AnswerDelta) -> list[bytes]:
        """Return an event for each part of which there is something new; the last one says why the answer has ended."""
        parser, reason = self._parsers[index], delta.finish_reason
        parts = parser.read(delta.text, reason)
        if self._tells_text_alone and reason is None and parts.is_content:
            return [self._texts[index](parts.content)] if parts.content else []
        fields = merged(writer.of_tokens(delta) for writer in self._columns) if delta.tokens else {}
        deltas = parser.deltas(parts, reason is not None)
        if not deltas and (fields or self._body.return_token_ids):  # of tokens whose text comes later
            deltas = [Delta(content="")]
        new = [ChunkChoice.of(index, part) for part in deltas]
        for first in new[:1]:
            for name, value in (fields | self._ids("token_ids", delta.token_ids)).items():
                setattr(first, name, value)
        if reason is not None:
            new[-1].finish_reason = parser.reason(reason)
        if delta.stop_reason is not None:
            new[-1].stop_reason = delta.stop_reason
        return [self._chunk([choice], delta.total) for choice in new]

    def _text_event(self, index: int) -> Callable[[str], bytes]:
        return text_event(lambda text: self._chunk([ChunkChoice.of(index, Delta(content=text))]))
