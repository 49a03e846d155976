"""``/v1/systemone`` and ``/v1/decisions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from compiled_llm.client.handle import RemoteHandle
from compiled_llm.compat.decisions import DecisionsMissingError
from compiled_llm.requests.decisions.decider import Decider, QuestionError
from compiled_llm.requests.decisions.label_read import LabelRead
from compiled_llm.requests.decisions.part import decisions_of
from compiled_llm.requests.outputs import Decisions
from compiled_llm.requests.prompts import strings_in
from compiled_llm.server.decisions.request import DecisionsRequest, SystemOneRequest
from compiled_llm.server.decisions.response import (
    DecisionsResponse,
    DecisionUsage,
    InputTokensDetails,
    QuestionDiagnostics,
    SystemOneResponse,
)
from compiled_llm.server.decisions.translation import answered, asked
from compiled_llm.server.http.api_error import invalid, not_served
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long, written
from compiled_llm.server.openai.common.api_server import ApiServer, api_server_of, new_id
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.openapi_responses import ERRORS
from compiled_llm.server.openai.fields.sampling import WaitingFields
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary, check_texts

MAX_QUESTIONS = 64  # of a request, as vLLM has it
_MAX_CHARACTERS = 2**24  # of the state, times the questions: each has it in a prompt that is made tokens
_deciders: WeakKeyDictionary[Vocabulary, Decider] = WeakKeyDictionary()

router = APIRouter(route_class=BodyRoute)


class _Asked(NamedTuple):
    """The questions of a request, and how a client names what is wrong with them."""

    state: Any
    questions: dict[str, Any]
    param: str  # of the state
    path: Callable[[str], str]  # of a question, by its name


@router.post("/v1/systemone", response_model=SystemOneResponse, responses=ERRORS)
async def create_systemone(body: SystemOneRequest, request: Request) -> Response:
    """Answer typed questions about a state: with the probability of every answer that is allowed."""
    given = _Asked(body.state, body.questions, "state", "questions.{}".format)

    def response(found: Decisions, model: str) -> BaseModel:
        diagnostics = {name: QuestionDiagnostics(**own._asdict()) for name, own in found.diagnostics.items()}
        head: dict[str, Any] = {"id": new_id("decision"), "created": int(time.time()), "model": model}
        return SystemOneResponse(answers=found, usage=_usage(found), diagnostics=diagnostics, **head)

    return await _decided(body, request, given, response)


@router.post("/v1/decisions", response_model=DecisionsResponse, responses=ERRORS)
async def create_decisions(body: DecisionsRequest, request: Request) -> Response:
    """Answer typed questions about an input, in the form of OpenAI's Decisions API."""
    given = _Asked(body.state(), asked(body.questions), "input", "questions[{}]".format)

    def response(found: Decisions, model: str) -> BaseModel:
        each = zip(body.questions, found.values(), found.diagnostics.values(), strict=True)
        answers = [answered(question, answer, own.label_mass) for question, answer, own in each]
        return DecisionsResponse(model=model, answers=answers, usage=_usage(found))

    return await _decided(body, request, given, response)


async def _decided(
    body: WaitingFields, request: Request, given: _Asked, response: Callable[[Decisions, str], BaseModel]
) -> Response:
    api_server = api_server_of(request)
    model = api_server.writer_for(body.model)
    characters = _characters(api_server, given)
    reads = await in_thread_if_long(lambda: _reads(model, given), characters)
    prompts, params = [read.prompt for read in reads], [read.params for read in reads]
    answers = await api_server.submit(request, prompts, params, given.param, body, None)
    try:
        await answers.ended()
        found = decisions_of(reads, map(RemoteHandle.output, answers.handles))
        return await written(lambda: response(found, api_server.settings.names[0]), answers.characters)
    finally:
        answers.close()


def _characters(api_server: ApiServer, given: _Asked) -> int:
    """Return how many are made tokens; ApiError if these, or the questions, are too many."""
    most, count = min(MAX_QUESTIONS, api_server.settings.max_choices), len(given.questions)
    if count > most:
        raise invalid(f"questions: there are {count}, and there can be {most}", "questions")
    check_texts(given.state, given.param)
    check_texts(given.questions, "questions")
    characters = sum(map(len, strings_in(given.state))) * count
    if characters > _MAX_CHARACTERS:
        raise invalid(
            f"{given.param}: its length times the questions is {characters:,} characters, and it can be "
            f"{_MAX_CHARACTERS:,}; shorten it, or ask fewer at once",
            given.param,
            "context_length_exceeded",
        )
    return characters


def _reads(model: Model, given: _Asked) -> Sequence[LabelRead]:
    decider = _decider(model)
    try:
        return decider.reads(given.state, given.questions)
    except QuestionError as error:
        path = "questions" if error.name is None else given.path(error.name)
        raise invalid(f"{path}: {error.said}", path) from None


def _decider(model: Model) -> Decider:
    """Return what makes prompts for the model; ApiError if it cannot be asked."""
    if (known := _deciders.get(model.vocabulary)) is None:
        try:
            known = Decider(model.vocabulary.tokenizer, model.ready.tokenizer)
        except (DecisionsMissingError, ValueError) as error:
            raise not_served(str(error)) from None
        _deciders[model.vocabulary] = known
    return known


def _usage(found: Decisions) -> DecisionUsage:
    tokens, details = found.prompt_tokens, InputTokensDetails(cached_tokens=found.cached_tokens)
    return DecisionUsage(input_tokens=tokens, input_tokens_details=details, total_tokens=tokens)
