"""Takes bodies straight to the endpoints that are asked most: FastAPI's own way there takes several times as long."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, get_type_hints

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from compiled_llm.server.http.api_error import ANSWERED, invalid, respond
from compiled_llm.server.http.body_values import check_values
from compiled_llm.server.http.worker_thread import beside


class _Way(NamedTuple):
    route: APIRoute
    endpoint: Callable[[Any, Request], Coroutine[Any, Any, Response]]
    body: type[BaseModel]


class ShortWay:
    """Stands before FastAPI, which answers other routes, and describes them all."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        """Know the way to some routes.

        Args:
            app: what answers all else.
            routes: to functions ``endpoint(body, request)``, which return responses.
        """
        self._app = app
        self._ways = {route.path: _way(route) for route in routes if isinstance(route, APIRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose kind of body the guard has seen to, or have it answered."""
        way = self._ways.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if way is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        given = await request.body()
        scope["route"] = way.route  # as FastAPI says which one it is
        try:
            body = await beside(lambda: _read(given, way.body), len(given))
            response = await way.endpoint(body, request)
        except ANSWERED as error:
            response = await respond(request, error)
        await response(scope, receive, send)


def _way(route: APIRoute) -> _Way:
    return _Way(route, route.endpoint, get_type_hints(route.endpoint)["body"])


def _read(given: bytes, kind: type[BaseModel]) -> BaseModel:
    """Return a body as what it is to be.

    Raises:
        ApiError: it is none that can be read.
        RequestValidationError: something in it is wrong.
        RecursionError: it has too many levels.
    """
    if not given:
        raise invalid("the body: is missing", code="missing_required_parameter")
    check_values(given)
    try:
        found = decoded(given)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise invalid("the body is no JSON", code="invalid_json") from None
    except ValueError:
        raise invalid("the body has a number of too many digits", code="invalid_json") from None
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        wrong = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise RequestValidationError(wrong, body=found) from None


def decoded(body: bytes) -> Any:
    """Return what ``json.loads`` does, in a fraction of the time for what is strictly JSON.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):  # NaN is none, nor is half a character; Python reads both
        return json.loads(body)
