"""``/v1/embeddings``, ``/v1/rerank``, ``/score`` and ``/classify``."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from compiled_llm.requests.pooling.embeddings import check_dimensions, embeddings_of
from compiled_llm.server.http.api_error import invalid, not_served
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import in_thread_if_long, written
from compiled_llm.server.openai.common.api_server import api_server_of, new_id
from compiled_llm.server.openai.common.openapi_responses import ERRORS
from compiled_llm.server.pooling import prompts as prompts_of
from compiled_llm.server.pooling.reading import PooledRead, scores_of, vectors_of
from compiled_llm.server.pooling.request import ClassifyRequest, EmbeddingsRequest, RerankRequest, ScoreRequest
from compiled_llm.server.pooling.response import (
    ClassifyResponse,
    EmbeddingsResponse,
    LabelEntry,
    PooledUsage,
    Rank,
    RankedDocument,
    RerankResponse,
    ScoreEntry,
    ScoreResponse,
)
from compiled_llm.server.pooling.scores import activated, best

if TYPE_CHECKING:
    from compiled_llm.server.parts import RoutesPart
    from compiled_llm.server.pooling import endpoint as this

    checked: RoutesPart = this

T = TypeVar("T")
_MAX_NUMBERS = 2**21  # of the embeddings of a request, which are some 40 MB as JSON
_OF_NUMBER = 20  # characters of a number as JSON

router = APIRouter(route_class=BodyRoute)


def _served(found: T | str) -> T:
    """Return what a model makes of texts; ApiError if it makes no such thing."""
    if isinstance(found, str):
        raise not_served(found)
    return found


@router.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=ERRORS)
async def create_embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    """Embed a text, or several."""
    api_server = api_server_of(request)
    model = api_server.model_for(body.model)
    embedding = _served(model.ready.pooled.embedding)
    dimensions = _dimensions(body.dimensions, embedding.width)
    inputs, begins = body.inputs(), prompts_of.beginning(embedding, body.prompt_name)
    if (numbers := len(inputs) * dimensions) > _MAX_NUMBERS:
        said = f"{len(inputs):,} texts have {dimensions:,} numbers each, and there can be {_MAX_NUMBERS:,} of all"
        raise invalid(f"input: {said}; send fewer at once", "input")
    prompts = await in_thread_if_long(
        lambda: [prompts_of.of_input(model, body, path, given, begins) for path, given in inputs],
        len(await request.body()),
    )
    read = await vectors_of(request, body, prompts, [path for path, _ in inputs])

    def made() -> bytes:
        vectors = embeddings_of(read.vectors, dimensions, embedding.normalizes).astype("<f4", copy=False)
        as_text = body.encoding_format == "base64"
        rows = (b64encode(row.tobytes()).decode() if as_text else row.tolist() for row in vectors)
        return _list_of(rows, api_server.settings.names[0], read)

    return Response(await in_thread_if_long(made, _OF_NUMBER * numbers), media_type="application/json")


def _dimensions(given: int | None, most: int) -> int:
    if given is not None:
        try:
            check_dimensions(given, most)
        except ValueError as error:
            raise invalid(f"dimensions: {error}", "dimensions") from None
    return given or most


def _list_of(rows: Any, name: str, read: PooledRead) -> bytes:
    """Return embeddings as JSON; each is written by itself, since nothing else has the GIL meanwhile."""
    data = [
        {"object": "embedding", "index": index, "embedding": msgspec.Raw(msgspec.json.encode(row))}
        for index, row in enumerate(rows)
    ]
    return msgspec.json.encode({"object": "list", "data": data, "model": name, "usage": read.usage.model_dump()})


@router.post("/v1/rerank", response_model=RerankResponse, responses=ERRORS)
@router.post("/v2/rerank", response_model=RerankResponse, responses=ERRORS)
@router.post("/rerank", response_model=RerankResponse, responses=ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Order documents by how well they answer a query."""
    pairs, scores, usage = await _scored(request, body, "documents")
    name = api_server_of(request).settings.names[0]

    def made() -> RerankResponse:
        texts = [RankedDocument(text=text) if body.return_documents else None for _, text in pairs]
        results = [
            Rank(index=place, relevance_score=scores[place], document=texts[place])
            for place in best(scores, body.top_n)
        ]
        return RerankResponse(id=new_id("rerank"), model=name, usage=usage, results=results)

    return await written(made, len(await request.body()))


@router.post("/v1/score", response_model=ScoreResponse, responses=ERRORS)
@router.post("/score", response_model=ScoreResponse, responses=ERRORS)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score how well texts go together, in pairs."""
    _, scores, usage = await _scored(request, body, "text_2")
    name = api_server_of(request).settings.names[0]

    def made() -> ScoreResponse:
        data = [ScoreEntry(index=index, score=score) for index, score in enumerate(scores)]
        head: dict[str, Any] = {"id": new_id("score"), "created": int(time.time())}
        return ScoreResponse(model=name, data=data, usage=usage, **head)

    return await written(made, _OF_NUMBER * len(scores))


async def _scored(
    request: Request, body: RerankRequest | ScoreRequest, field: str
) -> tuple[Sequence[tuple[str, str]], list[float], PooledUsage]:
    """Return the pairs of texts and how well each goes together; ``field`` is the one that has all second texts."""
    model = api_server_of(request).model_for(body.model)
    ranking, pairs = _served(model.ready.pooled.ranking), body.pairs()
    paths = [f"{field}[{place}]" for place in range(len(pairs))]
    prompts = await in_thread_if_long(
        lambda: [prompts_of.of_pair(model, ranking, *pair, path) for pair, path in zip(pairs, paths, strict=True)],
        sum(len(text) for pair in pairs for text in pair),
    )
    read = await scores_of(request, body, prompts, paths, ranking)
    activation = ranking.activation if body.use_activation else "identity"
    return pairs, [activated(vector, activation)[0] for vector in read.vectors], read.usage


@router.post("/classify", response_model=ClassifyResponse, responses=ERRORS)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Label a text, or several, by a classifier."""
    api_server = api_server_of(request)
    model = api_server.model_for(body.model)
    labelling, inputs = _served(model.ready.pooled.labelling), body.inputs()
    prompts = await in_thread_if_long(
        lambda: [prompts_of.of_input(model, body, path, given) for path, given in inputs], len(await request.body())
    )
    read = await vectors_of(request, body, prompts, [path for path, _ in inputs])
    activation, labels = labelling.activation if body.use_activation else "identity", labelling.labels

    def made() -> ClassifyResponse:
        each = [activated(vector, activation) for vector in read.vectors]
        data = [
            LabelEntry(index=index, label=labels[best(probs, 1)[0]], probs=probs, num_classes=len(labels))
            for index, probs in enumerate(each)
        ]
        head: dict[str, Any] = {"id": new_id("classify"), "created": int(time.time())}
        return ClassifyResponse(model=api_server.settings.names[0], data=data, usage=read.usage, **head)

    return await written(made, _OF_NUMBER * len(inputs) * len(labels))
