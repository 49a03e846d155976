"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.common.answering import answered
from compiled_llm.server.openai.common.answers import AnswerDelta, Answers, Choice
from compiled_llm.server.openai.common.api_server import api_server_of, check_length, new_id
from compiled_llm.server.openai.common.columns import column_writers, merged
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.events import event, text_event
from compiled_llm.server.openai.common.openapi_responses import ANSWERS
from compiled_llm.server.openai.common.usage import usage_of
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.completions.response import CompletionChoice, TextCompletion
from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", response_model=TextCompletion, responses=ANSWERS)
async def create_completion(body: CompletionRequest, request: Request) -> Any:
    """Continue a text, or several."""
    api_server = api_server_of(request)
    model = api_server.writer_for(body.model)
    api_server.check_answers(len(body.prompts()), body.answers)

    def prepared() -> tuple[list[_Prompt], SamplingParams, Form | None]:
        form = body.form
        params = body.sampling(form, model.ready.sampling)
        return [_prompt(given, params, model, body) for given in body.prompts()], params, form

    prompts, params, form = await in_thread_if_long(prepared, len(await request.body()))
    answers = await api_server.submit(request, [prompt.tokens for prompt in prompts], params, "prompt", body, form)
    echoes = [prompt.echo for prompt in prompts]
    writer = _CompletionResponseWriter(body, model, api_server.settings.names[0], answers, echoes)
    return await answered(writer, answers, bool(body.stream))


class _Prompt(NamedTuple):
    """A prompt as the model sees it, and its text before each answer, if that is asked for."""

    tokens: list[int]
    echo: str


def _prompt(given: str | list[int], params: SamplingParams, model: Model, body: CompletionRequest) -> _Prompt:
    special = body.add_special_tokens is not False
    whole = model.vocabulary.of_text(given, special) if isinstance(given, str) else given
    tokens = body.cut(whole, model.ready.max_tokens - (params.max_tokens or 0))
    check_length(tokens, params, "prompt", model.ready)  # here, before the next one is made tokens
    if not body.echo:
        return _Prompt(tokens, "")
    if isinstance(given, str) and len(tokens) == len(whole):
        return _Prompt(tokens, given)
    return _Prompt(tokens, model.vocabulary.text(tokens))


class _CompletionResponseWriter:
    """A writer of answers, whole or as they come."""

    def __init__(
        self, body: CompletionRequest, model: Model, name: str, answers: Answers, echoes: Sequence[str]
    ) -> None:
        self._body = body
        self._answers = answers
        names = TokenNames(model.token_bytes, bool(body.return_tokens_as_token_ids))
        self._echoes = [echo for echo in echoes for _ in range(body.answers)]  # of each answer
        self._handles = [handle for handle in answers.handles for _ in range(body.answers)]
        self._columns = [column_writers("completions", body, names, handle) for handle in self._handles]
        self._head: dict[str, Any] = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        self._choices: Sequence[Choice] = ()
        self._texts: Sequence[Callable[[str], bytes]] = ()
        self._echoed = not body.echo

    def whole(self, answers: Sequence[AnswerDelta]) -> TextCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return TextCompletion(choices=choices, usage=usage_of(self._answers.handles), **self._head)

    def _choice(self, index: int, answer: AnswerDelta) -> CompletionChoice:
        columns = self._columns[index]
        return CompletionChoice(
            index=index,
            text=self._echoes[index] + answer.text,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            **merged(writer.of_tokens(answer) for writer in columns),
            **merged(writer.of_prompt() for writer in columns),
            **self._ids(answer.token_ids, index),
        )

    def _ids(self, tokens: list[int], index: int | None = None) -> dict[str, Any]:
        """Return token ids, if they are wanted; with the index of an answer, those of its prompt, too."""
        if not self._body.return_token_ids:
            return {}
        prompt = {} if index is None else {"prompt_token_ids": list(self._handles[index].prompt)}
        return {"token_ids": tokens, **prompt}

    def begin(self) -> None:
        self._choices = self._answers.choices()
        self._texts = [self._text_event(choice.index) for choice in self._choices]

    def first_events(self) -> list[bytes]:
        return []

    def events(self) -> list[bytes]:
        found: list[bytes] = []
        if not self._echoed:
            if not all(writer.has_prompt for writers in self._columns for writer in writers):
                return []
            found += [self._chunk(self._begun(choice.index)) for choice in self._choices]
            self._echoed = True
        for choice, text, columns in zip(self._choices, self._texts, self._columns, strict=True):
            if (delta := choice.delta()) is None:
                continue
            if delta.finish_reason is None and not (columns or self._body.tells_of_tokens):
                found.append(text(delta.text))
            else:
                found.append(self._chunk(self._new(choice.index, delta), delta.total))
        return found

    async def last_events(self) -> list[bytes]:
        if not self._body.wants_usage:
            return []
        return [event(TextCompletion(choices=[], usage=usage_of(self._answers.handles), **self._head))]

    def _text_event(self, index: int) -> Callable[[str], bytes]:
        return text_event(lambda text: self._chunk(CompletionChoice.of(index, text)))

    def _chunk(self, choice: CompletionChoice, count: int = 0) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._body.wants_usage else {}
        if self._body.wants_usage_always:
            usage["usage"] = usage_of([self._handles[choice.index]], so_far=count)
        return event(TextCompletion(choices=[choice], **usage, **self._head))

    def _begun(self, index: int) -> CompletionChoice:
        of_echo = merged(writer.of_echo() for writer in self._columns[index])
        return CompletionChoice.of(index, self._echoes[index], **of_echo, **self._ids([], index))

    def _new(self, index: int, delta: AnswerDelta) -> CompletionChoice:
        fields = merged(writer.of_tokens(delta) for writer in self._columns[index]) if delta.tokens else {}
        first = index if delta.total == len(delta.token_ids) and not self._body.echo else None
        fields |= self._ids(delta.token_ids, first)
        if delta.stop_reason is not None:
            fields["stop_reason"] = delta.stop_reason
        return CompletionChoice.of(index, delta.text, **(fields | {"finish_reason": delta.finish_reason}))
