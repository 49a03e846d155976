"""``/v1/responses``, for text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from compiled_llm.engine.output import Completion
from compiled_llm.server.front.answering import answered
from compiled_llm.server.front.answers import Answers, News
from compiled_llm.server.front.chat_logprobs import chat_logprobs, entries_of
from compiled_llm.server.front.chat_response import TokenLogprob
from compiled_llm.server.front.errors_of_openapi import ERRORS
from compiled_llm.server.front.events import named_event
from compiled_llm.server.front.front import beside, front_of, new_id
from compiled_llm.server.front.generator_link import Model
from compiled_llm.server.front.responses_request import ResponsesRequest
from compiled_llm.server.front.responses_response import (
    Incomplete,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponseUsage,
    Status,
)
from compiled_llm.server.front.usage import FinishReason, finish_reason_of

router = APIRouter()


@router.post("/v1/responses", response_model=ResponseBody, responses=ERRORS)
async def create_response(body: ResponsesRequest, request: Request) -> Any:
    """Answer a text, or a chat."""
    front = front_of(request)
    model = front.model_for(body.model)
    params, messages = body.sampling(), body.messages()
    characters = sum(len(message["content"]) for message in messages)
    prompt = await beside(lambda: model.vocabulary.of_chat(messages, add_generation_prompt=True), characters)
    answers = await front.submit(request, [prompt], params, "input", body.user)
    told = _Told(body, model, front.settings.names[0], answers)
    return await answered(told, answers, bool(body.stream), end=b"")


class _Told:
    """Writes an answer, whole or as it comes."""

    def __init__(self, body: ResponsesRequest, model: Model, name: str, answers: Answers) -> None:
        self._body = body
        self._token_bytes = model.token_bytes
        self._answers = answers
        self._name = name
        self._id, self._message_id, self._created = new_id("resp"), new_id("msg"), int(time.time())
        self._sent = 0

    def whole(self, completions: Sequence[Completion]) -> ResponseBody:
        (completion,) = completions
        logprobs = self.logprobs(None if completion.logprobs is None else entries_of(completion.logprobs))
        return self.body(completion.text or "", logprobs, finish_reason_of(completion.finish_reason))

    def logprobs(self, places: Any) -> list[TokenLogprob]:
        if not self._body.wants_logprobs:
            return []
        return chat_logprobs(places or [], self._body.top_logprobs or 0, self._token_bytes).content or []

    def body(self, text: str, logprobs: list[TokenLogprob], reason: FinishReason) -> ResponseBody:
        """Return the response to an answer that has ended."""
        status: Status = "completed" if reason == "stop" else "incomplete"
        return self._response(
            status,
            output=[self._message(status, [OutputText(text=text, logprobs=logprobs)])],
            incomplete_details=None if reason == "stop" else Incomplete(),
            usage=ResponseUsage.of(self._answers.usage()),
        )

    def _response(self, status: Status, **others: Any) -> ResponseBody:
        body = self._body
        form = None if body.text is None else body.text.format
        return ResponseBody(
            id=self._id,
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._name,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            **{"output": [], **others},
        )

    def _message(self, status: Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._message_id, status=status, content=content)

    # ---- as it comes

    async def stream(self) -> AsyncIterator[list[bytes]]:
        (choice,) = self._answers.choices()
        text, logprobs, reason = "", list[TokenLogprob](), None
        yield list(self._beginning())
        async for _ in self._answers.changes():
            if (news := choice.news()) is not None:
                text, reason = text + news.text, news.finish_reason
                logprobs += (new := self.logprobs(news.logprobs))
                yield list(self._delta(news, new))
        assert reason is not None, "what has ended has a reason"
        yield list(self._end(self.body(text, logprobs, reason)))

    def _beginning(self) -> Iterator[bytes]:
        response = self._response("in_progress").model_dump()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        yield self._event(
            "response.output_item.added", output_index=0, item=self._message("in_progress", []).model_dump()
        )
        yield self._in_part("response.content_part.added", part=OutputText(text="").model_dump())

    def _delta(self, news: News, logprobs: list[TokenLogprob]) -> Iterator[bytes]:
        if news.text or logprobs:
            entries = [entry.model_dump() for entry in logprobs]
            yield self._in_part("response.output_text.delta", delta=news.text, logprobs=entries)

    def _end(self, whole: ResponseBody) -> Iterator[bytes]:
        message = whole.output[0].model_dump()
        (part,) = message["content"]
        yield self._in_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._in_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{whole.status}", response=whole.model_dump())

    def _in_part(self, kind: str, **others: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **others)

    def _event(self, kind: str, **others: Any) -> bytes:
        self._sent += 1
        return named_event(kind, {"type": kind, "sequence_number": self._sent - 1, **others})
