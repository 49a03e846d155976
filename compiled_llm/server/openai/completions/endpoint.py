"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request

from compiled_llm.client.handle import RemoteHandle
from compiled_llm.protocol.messages import Entry
from compiled_llm.requests.outputs import Completion
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.chat.logprobs import entries_of, prompt_logprobs
from compiled_llm.server.openai.common.answering import answered
from compiled_llm.server.openai.common.answers import Answers, Choice, News
from compiled_llm.server.openai.common.api_server import api_server_of, check_length, new_id
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.events import TextEvent, event
from compiled_llm.server.openai.common.openapi_responses import ANSWERS
from compiled_llm.server.openai.common.prompt_response import PromptPlace
from compiled_llm.server.openai.common.usage import finish_reason_of, usage_of, usage_so_far
from compiled_llm.server.openai.completions.logprobs import CompletionScores
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.completions.response import CompletionChoice, CompletionLogprobs, TextCompletion
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
        self._echoes = echoes
        self._model = model
        self._answers = answers
        self._names = TokenNames(model.token_bytes, bool(body.return_tokens_as_token_ids))
        self._head: dict[str, Any] = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, completions: Sequence[Completion]) -> TextCompletion:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return TextCompletion(choices=choices, usage=usage_of(self._answers.handles), **self._head)

    def _choice(self, index: int, completion: Completion) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echo(index) + (completion.text or ""),
            logprobs=self._all_logprobs(index, completion),
            finish_reason=finish_reason_of(completion.finish_reason),
            stop_reason=completion.stop_reason,
            prompt_logprobs=self._prompt_logprobs(index),
            **self._ids(completion.token_ids, index),
        )

    def _handle(self, index: int) -> RemoteHandle:
        return self._answers.handles[index // self._body.answers]

    def _prompt_logprobs(self, index: int) -> list[PromptPlace | None] | None:
        wanted = self._body.prompt_logprobs is not None
        return prompt_logprobs(self._handle(index).prompt_logprobs or (), self._names) if wanted else None

    def _ids(self, tokens: list[int], index: int | None = None) -> dict[str, Any]:
        """Return token ids, if they are wanted; with the index of an answer, those of its prompt, too."""
        if not self._body.return_token_ids:
            return {}
        prompt = {} if index is None else {"prompt_token_ids": list(self._handle(index).prompt)}
        return {"token_ids": tokens, **prompt}

    def _all_logprobs(self, index: int, completion: Completion) -> CompletionLogprobs | None:
        if completion.logprobs is None:
            return None
        prompt, first = self._prompt_places(index)
        return CompletionScores(self._names).written([*prompt, *entries_of(completion.logprobs)], first)

    def _prompt_places(self, index: int) -> tuple[list[list[Entry] | None], int | None]:
        """Return the log-probabilities of an answer's prompt, if they are wanted, and its first token, without any."""
        handle, most = self._handle(index), self._body.logprobs
        if not self._body.echo or most is None:
            return [], None
        places = [None if place is None else entries_of([place])[0] for place in handle.prompt_logprobs or ()]
        return [place and _likeliest(place, most) for place in places], handle.prompt[0] if places else None

    def stream(self) -> AsyncIterator[list[bytes]]:
        choices = self._answers.choices()
        scores = [CompletionScores(self._names) for _ in choices]
        return self._events(choices, scores, [self._text_event(choice) for choice in choices])

    async def _events(
        self, choices: Sequence[Choice], scores: Sequence[CompletionScores], texts: Sequence[TextEvent]
    ) -> AsyncIterator[list[bytes]]:
        echoed = not self._body.echo
        async for _ in self._answers.changes():
            if not echoed:
                if self._body.logprobs is not None and not all(handle.is_scored for handle in self._answers.handles):
                    continue
                yield [self._chunk(self._begun(choice, scores[choice.index])) for choice in choices]
                echoed = True
            yield [
                texts[choice.index](news.text)
                if news.is_text and not self._body.tells_of_tokens
                else self._chunk(self._news(choice, news, scores[choice.index]), news.total)
                for choice in choices
                if (news := choice.news()) is not None
            ]
        if self._body.wants_usage:
            yield [event(TextCompletion(choices=[], usage=usage_of(self._answers.handles), **self._head))]

    def _text_event(self, choice: Choice) -> TextEvent:
        nothing: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        return TextEvent(lambda text: self._chunk(CompletionChoice(index=choice.index, text=text, **nothing)))

    def _chunk(self, choice: CompletionChoice, count: int = 0) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._body.wants_usage else {}
        if self._body.wants_usage_always:
            usage["usage"] = usage_so_far(self._handle(choice.index), count)
        return event(TextCompletion(choices=[choice], **usage, **self._head))

    def _begun(self, choice: Choice, scores: CompletionScores) -> CompletionChoice:
        places, first = self._prompt_places(choice.index)
        logprobs = scores.written(places, first) if places else None
        index, text = choice.index, self._echo(choice.index)
        ids = self._ids([], index)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None, **ids)

    def _news(self, choice: Choice, news: News, scores: CompletionScores) -> CompletionChoice:
        logprobs = scores.written(news.logprobs) if news.logprobs else None
        first = choice.index if news.total == len(news.token_ids) and not self._body.echo else None
        others = self._ids(news.token_ids, first)
        if news.stop_reason is not None:
            others["stop_reason"] = news.stop_reason
        return CompletionChoice(
            index=choice.index, text=news.text, logprobs=logprobs, finish_reason=news.finish_reason, **others
        )

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._body.answers]


def _likeliest(place: list[Entry], most: int) -> list[Entry]:
    """Return a place's own token, and the most likely ones, of which there may be more than are wanted."""
    own, *others = place
    return [own, *(entry for entry in others if entry[2] <= most)]
