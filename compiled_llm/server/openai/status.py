"""``/health``, ``/ready``, ``/version`` and ``/v1/models``: whether requests are answered, and by which model."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.protocol.messages import Uncompiled
from compiled_llm.server.http.api_error import ApiError
from compiled_llm.server.openai.common.api_server import ApiServer, api_server_of
from compiled_llm.server.openai.common.openapi_responses import ERRORS

router = APIRouter()


class Health(BaseModel):
    """The API server answers."""

    status: Literal["ok"] = "ok"


class ReadyStatus(BaseModel):
    """Whether requests are answered, and the step before they are."""

    ready: bool
    doing: str
    # why answers run uncompiled, and slowly, if they do: until they are compiled, or for good
    uncompiled: Uncompiled | None = None
    step: int | None = None  # which of ``steps`` it is, if they are counted
    steps: int | None = None
    seconds: float | None = None  # since when none are answered


class Version(BaseModel):
    """Of compiled_llm."""

    version: str


class ModelCard(BaseModel):
    """A name that requests can call the model by, what it reads and writes, and how much a request can have of it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["compiled-llm"] = "compiled-llm"
    max_model_len: int | None  # tokens, with the answer
    limit_mm_per_prompt: dict[Literal["image"], int]
    max_body_bytes: int
    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]  # none of a classifier


class ModelList(BaseModel):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Health:
    """Say that the API server is alive; /ready says whether the model is."""
    return Health()


@router.get("/ready", response_model=ReadyStatus, responses={503: {"model": ReadyStatus}})
async def ready(request: Request) -> JSONResponse:
    """Say whether requests are answered; with status 503, the step before."""
    api_server = api_server_of(request)
    if api_server.is_ready:
        known = ReadyStatus(ready=True, doing=api_server.doing, uncompiled=api_server.link.model.client.uncompiled)
        return JSONResponse(known.model_dump(exclude_none=True))
    found = ReadyStatus(ready=False, doing=api_server.doing, seconds=round(api_server.link.unready_seconds, 1))
    if (progress := api_server.link.progress) is not None:
        found.step, found.steps = progress
    return JSONResponse(found.model_dump(exclude_none=True), 503)


@router.get("/version")
async def its_version() -> Version:
    """Return the version of compiled_llm."""
    return Version(version=OWN_VERSION)


@router.get("/v1/models", responses=ERRORS)
async def models(request: Request) -> ModelList:
    """Return the names that requests can call the model by."""
    api_server = api_server_of(request)
    return ModelList(data=[_card(name, api_server) for name in api_server.settings.names])


@router.get("/v1/models/{name:path}", responses=ERRORS)
async def model(name: str, request: Request) -> ModelCard:
    """Return one of the names."""
    api_server = api_server_of(request)
    if name not in api_server.settings.names:
        raise ApiError(404, f"model: there is no {name!r} here", "model", "model_not_found")
    return _card(name, api_server)


def _card(name: str, api_server: ApiServer) -> ModelCard:
    ready = api_server.link.model.ready if api_server.link.is_ready else None
    settings, reads_images = api_server.settings, api_server.reads_images()
    return ModelCard(
        id=name,
        created=settings.created,
        max_model_len=None if ready is None else ready.max_tokens,
        limit_mm_per_prompt={"image": settings.limit_mm_per_prompt if reads_images else 0},
        max_body_bytes=api_server.body_bytes(),
        input_modalities=["text", "image"] if reads_images else ["text"],
        output_modalities=["text"] if ready is None or ready.pooled.silent is None else [],
    )
