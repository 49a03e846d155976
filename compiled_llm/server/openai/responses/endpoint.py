"""``/v1/responses``, for text and calls of tools."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.chat.answer_form import answer_form, with_form
from compiled_llm.server.openai.chat.answer_parser import AnswerParser
from compiled_llm.server.openai.chat.prompt import ChatPrompt, chat_prompt
from compiled_llm.server.openai.common.answering import answered
from compiled_llm.server.openai.common.answers import AnswerDelta, Answers
from compiled_llm.server.openai.common.api_server import api_server_of, new_id
from compiled_llm.server.openai.common.columns import column_writers, merged
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.events import named_event
from compiled_llm.server.openai.common.openapi_responses import ANSWERS
from compiled_llm.server.openai.common.usage import FinishReason, usage_of
from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.responses.input import images_in
from compiled_llm.server.openai.responses.output import Output
from compiled_llm.server.openai.responses.request import FlatNamedTool, ResponsesRequest
from compiled_llm.server.openai.responses.response import Incomplete, ResponseBody, ResponseUsage, Status
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames
from compiled_llm.server.openai.tokenizer.vocabulary import check_texts

if TYPE_CHECKING:
    from compiled_llm.server.openai.responses import endpoint as this
    from compiled_llm.server.parts import RoutesPart

    checked: RoutesPart = this


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", response_model=ResponseBody, responses=ANSWERS)
async def create_response(body: ResponsesRequest, request: Request) -> Any:
    """Answer a text, or a chat."""
    api_server = api_server_of(request)
    model = api_server.writer_for(body.model)

    given = [] if isinstance(body.input, str) else images_in(body.input)
    shown = await api_server.shown(given, model, body)

    def prepared() -> tuple[ChatPrompt, list[int], SamplingParams, Form | None, AnswerParser]:
        params = body.sampling(model.ready.sampling)
        for name in ("metadata", "text", "tools"):  # the response repeats them
            check_texts(body.model_dump(include={name}), name)
        messages, kwargs = body.messages(), body.template_kwargs
        shows = shown is not None
        prompt = chat_prompt(model.vocabulary, messages, body.offer, kwargs, shows, add_generation_prompt=True)
        tokens = body.cut(prompt.tokens, model.ready.max_tokens - (params.max_tokens or 1))
        form = answer_form(body.form, prompt, body.max_blanks)
        return prompt, tokens, with_form(params, form, prompt), form, AnswerParser(prompt.reader(form))

    prompt, tokens, params, form, parser = await in_thread_if_long(prepared, len(await request.body()))
    answers = await api_server.submit(request, [tokens], params, "input", body, form, shown, prompt.text)
    writer = _ResponsesWriter(body, model, api_server.settings.names[0], params, answers, parser)
    return await answered(writer, answers, bool(body.stream), end=b"")


class _ResponsesWriter:
    """A writer of an answer, whole or as it comes."""

    def __init__(
        self,
        body: ResponsesRequest,
        model: Model,
        name: str,
        params: SamplingParams,
        answers: Answers,
        parser: AnswerParser,
    ) -> None:
        self._body = body
        self._model = model
        self._answers = answers
        self._params = params
        self._parser = parser
        (self._handle,) = answers.handles
        self._columns = column_writers("responses", body, TokenNames(model.token_bytes), self._handle)
        self._name = name
        self._id, self._created = new_id("resp"), int(time.time())
        self._output = Output(self._event)
        self._sent = 0
        self._reason: FinishReason | None = None

    def whole(self, answers: Sequence[AnswerDelta]) -> ResponseBody:
        (answer,) = answers
        deque(self._new(answer), maxlen=0)
        return self._ended()

    def begin(self) -> None:
        (self._choice,) = self._answers.choices()
        begun = self._response("in_progress").model_dump()
        self._begins = [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]

    def first_events(self) -> list[bytes]:
        return self._begins

    def events(self) -> list[bytes]:
        delta = self._choice.delta()
        return [] if delta is None else list(self._new(delta))

    async def last_events(self) -> list[bytes]:
        response = await in_thread_if_long(self._ended, self._answers.characters)
        return [self._event(f"response.{response.status}", response=response.model_dump())]

    def _new(self, delta: AnswerDelta) -> Iterator[bytes]:
        self._reason = delta.finish_reason
        parts = self._parser.read(delta.text, delta.finish_reason)
        yield from self._output.take(parts, merged(writer.of_tokens(delta) for writer in self._columns))
        if delta.finish_reason is not None:
            yield from self._output.end(_status(delta.finish_reason))

    def _ended(self) -> ResponseBody:
        reason = self._reason
        assert reason is not None, "an answer that has ended has a reason"
        usage = usage_of(self._answers.handles, self._parser.reasoning_tokens(self._model.vocabulary))
        return self._response(
            _status(reason),
            output=self._output.items,
            incomplete_details=None if reason == "stop" else Incomplete(),
            usage=ResponseUsage.of(usage),
        )

    def _response(self, status: Status, **others: Any) -> ResponseBody:
        body, choice = self._body, self._body.tool_choice
        form = None if body.text is None else body.text.format
        return ResponseBody(
            id=self._id,
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=self._params.temperature,
            tool_choice=choice.model_dump() if isinstance(choice, FlatNamedTool) else choice or "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_p=self._params.top_p,
            text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            **{"output": [], **others},
        )

    def _event(self, kind: str, **others: object) -> bytes:
        self._sent += 1
        return named_event(kind, {"type": kind, "sequence_number": self._sent - 1, **others})


def _status(reason: FinishReason) -> Status:
    return "completed" if reason == "stop" else "incomplete"
