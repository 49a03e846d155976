"""``/v1/systemone`` and ``/v1/decisions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from compiled_llm.compat.decisions import DecisionsMissingError
from compiled_llm.requests.decisions.decider import Decider, QuestionError
from compiled_llm.requests.decisions.label_read import LabelRead
from compiled_llm.requests.decisions.part import decisions_of
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Decisions
from compiled_llm.server.decisions.asked_questions import AskedQuestions
from compiled_llm.server.decisions.request import DecisionsRequest, SystemOneRequest
from compiled_llm.server.decisions.response import (
    DecisionsResponse,
    DecisionUsage,
    InputTokensDetails,
    QuestionDiagnostics,
    SystemOneResponse,
)
from compiled_llm.server.decisions.translation import CRITERIA, answered, asked
from compiled_llm.server.http.api_error import invalid, not_served
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long, written
from compiled_llm.server.openai.common.api_server import ApiServer, api_server_of, check_length, new_id
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.openai.common.openapi_responses import ERRORS
from compiled_llm.server.openai.fields.sampling import WaitingFields
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from compiled_llm.server.decisions import endpoint as this
    from compiled_llm.server.parts import RoutesPart

    checked: RoutesPart = this

MAX_QUESTIONS = 64  # of a request, as vLLM has it
_deciders: WeakKeyDictionary[Vocabulary, Decider] = WeakKeyDictionary()

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/systemone", response_model=SystemOneResponse, responses=ERRORS)
async def create_systemone(body: SystemOneRequest, request: Request) -> Response:
    """Answer typed questions about a state: with the probability of every answer that is allowed."""

    def given() -> AskedQuestions:
        return AskedQuestions(body.state, body.questions, "state", "questions.{}".format)

    def response(found: Decisions, model: str) -> BaseModel:
        diagnostics = {name: QuestionDiagnostics(**own._asdict()) for name, own in found.diagnostics.items()}
        head: dict[str, Any] = {"id": new_id("decision"), "created": int(time.time()), "model": model}
        return SystemOneResponse(answers=found, usage=_usage(found), diagnostics=diagnostics, **head)

    return await _decided(body, request, given, "state", len(body.questions), response)


@router.post("/v1/decisions", response_model=DecisionsResponse, responses=ERRORS)
async def create_decisions(body: DecisionsRequest, request: Request) -> Response:
    """Answer typed questions about an input, in the form of OpenAI's Decisions API."""

    def given() -> AskedQuestions:
        return AskedQuestions(body.state(), asked(body.questions), "input", "questions[{}]".format, CRITERIA)

    def response(found: Decisions, model: str) -> BaseModel:
        each = zip(body.questions, found.values(), found.diagnostics.values(), strict=True)
        answers = [answered(question, answer, own.label_mass) for question, answer, own in each]
        return DecisionsResponse(model=model, answers=answers, usage=_usage(found))

    return await _decided(body, request, given, "input", len(body.questions), response)


async def _decided(
    body: WaitingFields,
    request: Request,
    given: Callable[[], AskedQuestions],
    param: str,
    count: int,
    response: Callable[[Decisions, str], BaseModel],
) -> Response:
    api_server = api_server_of(request)
    model = api_server.writer_for(body.model)
    characters = len(await request.body()) * count  # each question has the state in its prompt
    reads = await in_thread_if_long(lambda: _reads(api_server, model, given()), characters)
    prompts, params = [read.prompt for read in reads], [read.params for read in reads]
    answers = await api_server.submit(request, prompts, params, param, body, None)
    try:
        await answers.ended()
        found = decisions_of(reads, map(RequestHandle.output, answers.handles))
        return await written(lambda: response(found, api_server.settings.names[0]), answers.characters)
    finally:
        answers.close()


def _reads(api_server: ApiServer, model: Model, given: AskedQuestions) -> Sequence[LabelRead]:
    """Return the questions' prompts; ApiError, by the client's own field, if one is impossible or too long."""
    most, count = min(MAX_QUESTIONS, api_server.settings.max_choices), len(given.questions)
    if count > most:
        raise invalid(f"questions: there are {count}, and there can be {most}", "questions")
    given.check()

    def check(group: Sequence[Any]) -> None:
        model.vocabulary.check_fits("\n".join(given.texts(group).values()), given.longest(group))

    try:
        reads = _decider(model).reads(given.state, given.questions, check)
    except QuestionError as error:
        path = "questions" if error.name is None else given.path(error.name)
        raise invalid(f"{path}: {error.said}", path) from None
    for read in reads:
        check_length(read.prompt, read.params, given.longest([read.question]), model.ready)
    return reads


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
